"""Chains of small objects in a catalog, and swaps of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from catalog_worlds import TOPIC, World, descriptor_of
from forebay.catalog.catalog import Intent
from forebay.catalog.records import State
from forebay.catalog.swap import replaced_descriptors, swap
from forebay.format.descriptor import ObjectDescriptor

LARGE: Final = "data-0-29.dnb1"


def fill(world: World, *starts: int) -> list[ObjectDescriptor]:
    """Objects of ten messages, all read back."""
    made = [world.add(start, start + 9) for start in starts]
    for each in made:
        world.catalog.mark_verified(TOPIC, each)
    return made


def planned(
    world: World, replaced: Sequence[ObjectDescriptor]
) -> tuple[Intent, ObjectDescriptor, Sequence[ObjectDescriptor]]:
    start, end = replaced[0].start_offset, replaced[-1].end_offset
    intent = world.intend(start, end, world.record().epoch)
    return intent, descriptor_of(start, end, intent.object_id), replaced


def swapped(world: World, replaced: Sequence[ObjectDescriptor]) -> ObjectDescriptor:
    intent, descriptor, _ = planned(world, replaced)
    swap(world.catalog, TOPIC, intent, descriptor, replaced, clock=world.clock)
    return descriptor


def kept(world: World) -> list[tuple[str, str]]:
    found = replaced_descriptors(world.catalog, TOPIC, 0, 10**9)
    return [(each.descriptor.object_id, each.by) for each in found]


def require_whole(world: World) -> None:
    """I4, and no key is replaced or deleted while a descriptor names it."""
    record = world.record()
    position = record.start_offset
    named = set()
    for each in world.catalog.get_object_descriptors(TOPIC):
        assert each.start_offset == position
        position = each.next_offset
        named.add(each.object_id)
    assert position == record.tail
    rows = dict(world.catalog.lives(TOPIC))
    assert {name for name, life in rows.items() if life.state is State.COMMITTED} == named
    for object_id, _ in kept(world):
        assert rows[object_id].state is State.REPLACED
