"""End rows and totals: a lookup takes as many requests however long the chain is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

from forebay.catalog.adopt import adopt
from forebay.catalog.catalog import Catalog
from forebay.catalog.chain import INDEXED_BATCH, Totals, decode_totals, encode_totals, stored
from forebay.catalog.kv import Remove
from forebay.catalog.records import TopicRecord
from forebay.catalog.sqlite import SqliteKv
from forebay.catalog.swap import Kept, encode_kept, swap_back
from forebay.errors import DescriptorError
from forebay.format.descriptor import encode_descriptor
from forebay.format.names import after_prefix
from forebay.limits import DESCRIPTOR_INDEX_ENTRIES, OFFSET_MAX
from support.catalog_swaps import fill, require_rows, require_whole, swapped
from support.catalogs import TOPIC, Setup, descriptor_of
from support.counting_kv import CountingKv, Reads, write_chain
from support.kv_stores import requested_backend

EARLIER_SWAP: Final = 32
"""Objects that a compaction of an earlier release replaced at once."""


@pytest.fixture(params=["sqlite", "memory", "etcd"])
def setup(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Setup]:
    backend = requested_backend(request, tmp_path)
    setup = Setup(backend)
    setup.create()
    yield setup
    backend.kv.close()


def forget_rows(setup: Setup) -> None:
    """Leaves the catalog as an earlier release would have written it."""
    keys, kv = setup.catalog.keys, setup.backend.kv
    prefix = keys.ends(TOPIC)
    for entry in kv.range(prefix, after_prefix(prefix), limit=10_000):
        assert kv.commit([], [Remove(entry.key)]) is not None
    assert kv.commit([], [Remove(keys.totals(TOPIC))]) is not None


def starts(setup: Setup, start: int, end: int | None = None, limit: int = 100) -> list[int]:
    found = setup.catalog.get_object_descriptors_range(TOPIC, start, end, limit)
    return [each.start_offset for each in found]


# ---- lookups ----


def reads_of_a_lookup(objects: int, offset: int, *, rows: bool = True) -> Reads:
    """What the catalog reads to find the object that holds `offset`, and the one after it."""
    kv = CountingKv(SqliteKv(None))
    made = [descriptor_of(at, at + 9) for at in range(0, 10 * objects, 10)]
    record = TopicRecord(epoch=1, tail=10 * objects, reserved=10 * objects)
    write_chain(kv, "/forebay", TOPIC, made, record)
    catalog = Catalog(kv)
    if not rows:
        setup_keys = catalog.keys.ends(TOPIC)
        for entry in kv.range(setup_keys, after_prefix(setup_keys), limit=10**6):
            kv.commit([], [Remove(entry.key)])
    before = kv.reads
    found = catalog.get_object_descriptors_range(TOPIC, offset, limit=2)
    wanted = made[offset // 10 : offset // 10 + 2]
    assert found == wanted
    kv.close()
    return kv.since(before)


def test_a_lookup_reads_the_same_however_many_objects_there_are() -> None:
    few, many = reads_of_a_lookup(300, 1505), reads_of_a_lookup(3000, 15005)
    assert few.requests == many.requests == 2
    assert few.entries == many.entries == 3
    assert many.walked <= 420  # one window of end rows
    assert many.bytes < 1.1 * few.bytes


def test_a_lookup_without_end_rows_reads_little_more_in_a_long_chain() -> None:
    few = reads_of_a_lookup(300, 1505, rows=False)
    many = reads_of_a_lookup(3000, 15005, rows=False)
    assert many.requests <= few.requests + 8
    assert many.requests < 25


def test_a_lookup_beyond_the_tail_or_in_a_hole_needs_no_search(setup: Setup) -> None:
    fill(setup, 0, 10)
    setup.create(tail=50, lost=((20, 50),))
    setup.add(50, 59)
    ranges = setup.kv.count("range")
    assert starts(setup, 60) == []
    assert starts(setup, 30) == [50]
    assert setup.kv.count("range") - ranges == 7


@pytest.mark.parametrize("offset", [1, 9, 10, 11, 55, 99, 100, 10**6, OFFSET_MAX])
def test_lookups_in_a_catalog_of_an_earlier_release_find_the_same(
    setup: Setup, offset: int
) -> None:
    fill(setup, *range(0, 100, 10))
    with_rows = starts(setup, offset)
    assert with_rows == ([] if offset > 99 else list(range(offset // 10 * 10, 100, 10)))
    forget_rows(setup)
    assert starts(setup, offset) == with_rows
    assert starts(setup, offset, offset + 1) == with_rows[:1]
    assert starts(setup, offset, None, 2) == with_rows[:2]
    setup.backend.kv.commit([], [Remove(setup.catalog.keys.record(TOPIC))])
    assert starts(setup, offset) == with_rows  # as in a prefix that Danube wrote


def test_a_lookup_passes_over_objects_that_have_no_end_row_yet(setup: Setup) -> None:
    fill(setup, 0, 10, 20)
    forget_rows(setup)
    fill(setup, 30, 40)
    assert starts(setup, 15) == [10, 20, 30, 40]
    assert starts(setup, 35) == [30, 40]


def test_a_wrong_end_row_misleads_nobody(setup: Setup) -> None:
    fill(setup, 0, 10, 20)
    for end, start in ((9, 0), (19, 0), (19, 5), (19, 19), (29, 10), (25, 20), (15, 10)):
        forget_rows(setup)
        setup.put(setup.catalog.keys.end(TOPIC, end), b'{"start":"%020d"}' % start)
        for offset in range(1, 30):
            assert starts(setup, offset) == list(range(offset // 10 * 10, 30, 10)), (end, offset)


def test_a_compaction_between_the_two_requests_is_no_gap(setup: Setup) -> None:
    made = fill(setup, 0, 10, 20, 30)

    def compact(operation: str) -> None:
        if operation == "range" and setup.kv.count("range") == first + 1:
            setup.kv.before = None
            swapped(setup, made[:3])

    first = setup.kv.count("range")
    setup.kv.before = compact
    assert starts(setup, 15) == [0, 30]

    def undo(operation: str) -> None:
        if operation == "range" and setup.kv.count("range") == first + 1:
            setup.kv.before = None
            swap_back(setup.catalog, TOPIC, "data-0-29.dnb1", clock=setup.clock)

    first = setup.kv.count("range")
    setup.kv.before = undo
    assert starts(setup, 15) == [10, 20, 30]


# ---- who writes the rows ----


def test_every_change_of_the_chain_writes_its_rows(setup: Setup) -> None:
    made = fill(setup, 0, 10, 20, 30, 40)
    require_whole(setup)
    large = swapped(setup, made[1:4])
    require_whole(setup)
    swap_back(setup.catalog, TOPIC, large.object_id, clock=setup.clock)
    require_whole(setup)
    assert setup.catalog.retire(TOPIC, 1, made[0])
    require_rows(setup)
    adopt(setup.catalog, TOPIC, 1, [descriptor_of(at, at + 9) for at in range(50, 1000, 10)])
    require_rows(setup)
    assert replace(setup.catalog.totals(TOPIC), times=None) == Totals(99, 99 * 500)


def test_an_undo_of_a_large_compaction_of_an_earlier_release_fits_into_a_transaction(
    setup: Setup,
) -> None:
    made = fill(setup, *range(0, 10 * EARLIER_SWAP, 10))
    large = swapped(setup, made[:2])
    by = descriptor_of(0, 10 * EARLIER_SWAP - 1)
    for each in (large, *made[2:]):
        setup.backend.kv.commit(
            [], [Remove(setup.catalog.keys.descriptor(TOPIC, each.start_offset))]
        )
    forget_rows(setup)
    setup.put(setup.catalog.keys.descriptor(TOPIC, 0), encode_descriptor(by))
    for each in made:
        key = setup.catalog.keys.replaced_descriptor(TOPIC, each.start_offset, each.object_id)
        setup.put(key, encode_kept(Kept(by.object_id, each)))
        setup.row(each.object_id, setup.state(made[0].object_id) or pytest.fail("it has a row"))
    assert swap_back(setup.catalog, TOPIC, by.object_id, clock=setup.clock) == made
    for offset in range(10 * EARLIER_SWAP):
        assert starts(setup, offset, offset + 1) == [offset // 10 * 10]


# ---- rows for a catalog of an earlier release ----


def test_rows_are_added_batch_by_batch(setup: Setup) -> None:
    objects = 2 * INDEXED_BATCH + 3
    made = [descriptor_of(at, at + 9) for at in range(0, 10 * objects, 10)]
    adopt(setup.catalog, TOPIC, 1, made)
    forget_rows(setup)
    chain = setup.catalog.chain(TOPIC)
    assert setup.catalog.totals(TOPIC) == Totals(0, 0, 0)
    assert not chain.index(1)
    assert setup.catalog.totals(TOPIC).objects == INDEXED_BATCH
    while not chain.index(1):
        pass
    require_rows(setup)
    commits = setup.kv.count("commit")
    assert chain.index(1)
    assert setup.kv.count("commit") == commits


def test_changes_of_the_chain_while_rows_are_added_are_counted_once(setup: Setup) -> None:
    made = fill(setup, *range(0, 10 * (INDEXED_BATCH + 20), 10))
    border = INDEXED_BATCH
    forget_rows(setup)
    chain = setup.catalog.chain(TOPIC)
    assert not chain.index(1)
    across = swapped(setup, made[border - 2 : border + 3])
    swapped(setup, made[:4])
    swapped(setup, made[border + 5 : border + 8])
    assert setup.catalog.retire(TOPIC, 1, next(setup.catalog.get_object_descriptors(TOPIC)))
    fill(setup, 10 * (INDEXED_BATCH + 20))
    swap_back(setup.catalog, TOPIC, across.object_id, clock=setup.clock)
    while not chain.index(1):
        pass
    require_rows(setup)


@pytest.mark.parametrize("moment", range(1, 9))
def test_a_commit_while_rows_are_added_is_neither_missed_nor_counted_twice(
    setup: Setup, moment: int
) -> None:
    fill(setup, 0, 10)
    forget_rows(setup)
    seen = 0

    def commit(_operation: str) -> None:
        nonlocal seen
        seen += 1
        if seen == moment:
            setup.kv.before = None
            fill(setup, 20)

    setup.kv.before = commit
    while not setup.catalog.chain(TOPIC).index(1):
        pass
    setup.kv.before = None
    if seen >= moment:
        require_whole(setup)


def test_totals_that_cannot_be_read_are_counted_again(setup: Setup) -> None:
    fill(setup, 0, 10)
    setup.put(setup.catalog.keys.totals(TOPIC), b"{")
    fill(setup, 20)
    while not setup.catalog.chain(TOPIC).index(1):
        pass
    require_whole(setup)


def test_totals_are_encoded_as_the_document_says() -> None:
    assert encode_totals(Totals(3, 900)) == b'{"bytes":900,"next":null,"objects":3}'
    assert decode_totals(b'{"bytes":900,"next":70,"objects":3}', "it") == Totals(3, 900, 70)
    with pytest.raises(DescriptorError, match="it"):
        decode_totals(b'{"bytes":"many"}', "it")


# ---- the index ----


def test_the_catalog_keeps_few_entries_of_an_index(setup: Setup) -> None:
    index = tuple((at, 50 * at) for at in range(0, 4000, 2))
    full = descriptor_of(0, 3999, offset_index=index)
    intent = setup.intend(0, 3999)
    setup.catalog.put_object_descriptor(TOPIC, intent, full)
    (found,) = setup.catalog.get_object_descriptors(TOPIC)
    assert found == stored(full)
    kept = found.offset_index or ()
    assert len(kept) == DESCRIPTOR_INDEX_ENTRIES
    assert kept[0] == index[0]
    assert set(kept) <= set(index)
    gaps = {then[1] - one[1] for one, then in pairwise(kept)}
    assert max(gaps) - min(gaps) <= 100
    assert setup.catalog.put_object_descriptor(TOPIC, intent, full).tail == 4000
