"""Chains of small objects in a catalog, and swaps of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from forebay.catalog.catalog import Intent
from forebay.catalog.chain import Totals
from forebay.catalog.records import State, decode_pointer
from forebay.catalog.swap import replaced_descriptors, swap
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import after_prefix
from support.catalogs import TOPIC, Setup, descriptor_of

LARGE: Final = "data-0-29.dnb1"


def fill(setup: Setup, *starts: int) -> list[ObjectDescriptor]:
    """Objects of ten messages, all read back."""
    made = [setup.add(start, start + 9) for start in starts]
    for each in made:
        setup.catalog.mark_verified(TOPIC, each)
    return made


def planned(
    setup: Setup, replaced: Sequence[ObjectDescriptor]
) -> tuple[Intent, ObjectDescriptor, Sequence[ObjectDescriptor]]:
    start, end = replaced[0].start_offset, replaced[-1].end_offset
    intent = setup.intend(start, end, setup.record().epoch)
    return intent, descriptor_of(start, end, intent.object_id), replaced


def swapped(setup: Setup, replaced: Sequence[ObjectDescriptor]) -> ObjectDescriptor:
    intent, descriptor, _ = planned(setup, replaced)
    swap(setup.catalog, TOPIC, intent, descriptor, replaced, clock=setup.clock)
    return descriptor


def kept(setup: Setup) -> list[tuple[str, str]]:
    found = replaced_descriptors(setup.catalog, TOPIC, 0, 10**9)
    return [(each.descriptor.object_id, each.by) for each in found]


def require_rows(setup: Setup) -> None:
    """Each object has its end row, there is no other, and the totals are those of the chain."""
    catalog = setup.catalog
    chain = list(catalog.get_object_descriptors(TOPIC))
    prefix = catalog.keys.ends(TOPIC)
    rows = setup.backend.kv.range(prefix, after_prefix(prefix), limit=10_000)
    assert {entry.key: decode_pointer(entry.value, entry.key) for entry in rows} == {
        catalog.keys.end(TOPIC, each.end_offset): each.start_offset for each in chain
    }
    totals = replace(catalog.totals(TOPIC), times=None)
    assert totals == Totals(len(chain), sum(each.size for each in chain))


def require_whole(setup: Setup) -> None:
    """I4, and no key is replaced or deleted while a descriptor names it."""
    record = setup.record()
    position = record.start_offset
    named = set()
    for each in setup.catalog.get_object_descriptors(TOPIC):
        assert each.start_offset == position
        position = each.next_offset
        named.add(each.object_id)
    assert position == record.tail
    require_rows(setup)
    rows = dict(setup.catalog.lives(TOPIC))
    assert {name for name, life in rows.items() if life.state is State.COMMITTED} == named
    for object_id, _ in kept(setup):
        assert rows[object_id].state is State.REPLACED
