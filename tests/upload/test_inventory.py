"""Which objects a topic has in a bucket, and which of them make the chain."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from forebay.format.names import TopicName, object_key
from forebay.objects.memory import MemoryBackend
from forebay.upload.inventory import choose_chain, take_stock, topics_in_store


def test_of_nothing_there_is_no_chain() -> None:
    assert choose_chain([]) == ((), ())
    assert choose_chain([], 5, 7) == ((), ((5, 7),))


def test_of_equal_chains_the_one_with_the_longer_beginning_is_chosen() -> None:
    assert choose_chain([(0, 4), (5, 14), (0, 9), (10, 14)]).ranges == ((0, 9), (10, 14))


@given(
    st.sets(st.integers(1, 40), max_size=10).map(sorted),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8)), max_size=12),
)
def test_a_chain_without_a_gap_is_found_wherever_there_is_one(
    cuts: list[int], others: list[tuple[int, int]]
) -> None:
    bounds = [0, *cuts, 50]
    base = [(start, after - 1) for start, after in pairwise(bounds)]
    found = choose_chain([*base, *((start, start + size) for start, size in others)])
    assert found.gaps == ()
    assert found.ranges[0][0] == 0
    assert found.ranges[-1][1] == 49
    for one, after in zip(found.ranges, found.ranges[1:], strict=False):
        assert after[0] == one[1] + 1
    assert len(found.ranges) <= len(base)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), min_size=1, max_size=12))
def test_ranges_and_gaps_together_cover_everything_once(spans: list[tuple[int, int]]) -> None:
    ranges = [(start, start + size) for start, size in spans]
    found = choose_chain(ranges)
    covered = [
        offset
        for start, after in sorted([*((a, b + 1) for a, b in found.ranges), *found.gaps])
        for offset in range(start, after)
    ]
    assert covered == list(range(min(ranges)[0], max(end for _, end in ranges) + 1))


def test_markers_count_as_the_highest_offset_and_not_as_unknown_files() -> None:
    store, topic = MemoryBackend(), TopicName("default", "orders")
    for name in ("begin-9", "begin-100", "data-0-9.dnb1", "readme"):
        store.put_object(object_key(topic, name), b"?")
    stock = take_stock(store, topic)
    assert (stock.unknown, len(stock), stock.end, stock.highest) == (1, 1, 10, 100)
    assert [str(each.name) for each in stock.markers] == ["begin-9", "begin-100"]


def test_a_topic_with_nothing_but_a_marker_is_in_the_store() -> None:
    store, topic = MemoryBackend(), TopicName("default", "orders")
    store.put_object(object_key(topic, "begin-0"), b"?")
    assert list(topics_in_store(store)) == [topic]
