"""Plans: pieces that hold exactly what was asked for, cut where an index allows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import OffsetOutOfRange
from forebay.files.local import LocalDisk
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import TopicName
from forebay.pipeline.source.plan import (
    EARLIEST,
    LATEST,
    SPLIT_BYTES,
    KnownPlaces,
    OffsetRange,
    Piece,
    joined,
    object_pieces,
    plan_topic,
    recut,
    resolve_range,
    splits,
    thinned,
)
from forebay.pipeline.source.scan import scan_pieces
from forebay.read.plan import object_range
from forebay.settings import WalSettings
from forebay.testing.clock import ManualClock
from forebay.topic.resources import close_executor_resources, executor_resources
from forebay.topic.store import Store
from forebay.topic.view import StoreView
from support.scan_stores import append, fill_both_tiers, settings_of

TOPIC = TopicName("default", "orders")

# ---- pieces of one object ----


@st.composite
def objects(draw: st.DrawFn) -> ObjectDescriptor:
    start = draw(st.integers(0, 50))
    steps = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 99)), max_size=30))
    index, offset, position = [(start, 0)], start, 0
    for messages, size in steps:
        offset, position = offset + messages, position + size
        index.append((offset, position))
    end, size = offset + draw(st.integers(0, 9)), position + draw(st.integers(1, 99))
    kept = draw(st.sampled_from([None, tuple(index)]))
    return ObjectDescriptor("data.dnb1", start, end, size, None, 0, offset_index=kept)


@given(objects(), st.integers(1, 500), st.data())
def test_pieces_of_an_object_read_what_its_whole_index_would(
    descriptor: ObjectDescriptor, split_bytes: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(descriptor.start_offset, descriptor.end_offset))
    stop = data.draw(st.integers(first + 1, descriptor.next_offset))
    pieces = object_pieces(TOPIC, descriptor, first, stop, split_bytes)
    assert [pieces[0].first, pieces[-1].next] == [first, stop]
    assert all(one.next == other.first for one, other in pairwise(pieces))
    for piece in pieces:
        slim = piece.descriptor
        assert slim is not None
        assert len(slim.offset_index or ()) <= 3
        ours = object_range(slim, piece.first, piece.next)
        whole = object_range(descriptor, piece.first, piece.next)
        assert ours[1:] == whole[1:] == (piece.at, piece.begin, piece.end)
        assert ours.next_offset == whole.next_offset
    thin = thinned(descriptor, first, stop, split_bytes)
    assert object_pieces(TOPIC, thin, first, stop, split_bytes) == pieces
    (again,) = joined(pieces)
    assert object_range(again, first, stop)[1:] == object_range(descriptor, first, stop)[1:]


def piece(topic: str, first: int, size: int) -> Piece:
    return Piece(TopicName("default", topic), first, first + 1, first, 0, size, size, path=Path())


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 300)), max_size=30),
    st.integers(1, 1000),
    st.integers(1, 10),
)
def test_every_piece_is_in_one_split(
    sizes: list[tuple[str, int]], split_bytes: int, least: int
) -> None:
    pieces = [piece(topic, at, size) for at, (topic, size) in enumerate(sorted(sizes))]
    found = splits(pieces, split_bytes, least)
    assert sorted(one.first for each in found for one in each.pieces) == [*range(len(pieces))]
    assert len(found) >= min(least, len(pieces))
    for each in found:
        firsts = [one.first for one in each.pieces]
        assert firsts == sorted(firsts)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 300)), min_size=1, max_size=30),
    st.integers(1, 10),
    st.integers(1, 60),
)
def test_there_are_as_many_splits_as_wanted_if_indexes_allow_it(
    sizes: list[tuple[str, int]], grain: int, least: int
) -> None:
    """Pieces can be cut at every multiple of `grain`, as by an index with such entries.

    Those of the topic `a` cannot be cut.
    """
    pieces = [piece(topic, at * 1000, size) for at, (topic, size) in enumerate(sorted(sizes))]
    most = sum(1 if one.topic.topic == "a" else -(-one.size // grain) for one in pieces)

    def recut(one: Piece, target: int) -> list[Piece]:
        if one.topic.topic == "a":
            return [one]
        step = max(target // grain, 1) * grain
        cuts = [*range(one.begin, one.end, step), one.end]
        bounds = [(at - one.begin + one.first, at, end) for at, end in pairwise(cuts)]
        return [
            one._replace(first=first, at=first, begin=begin, end=end, size=end - begin)
            for first, begin, end in bounds
        ]

    found = splits(pieces, 1000, least, recut)
    assert len(found) >= min(least, most)
    assert sum(each.size for each in found) == sum(one.size for one in pieces)


def test_the_large_topic_of_a_skewed_set_is_cut(tmp_path: Path, view_of: StoreView) -> None:
    """There are enough pieces for all tasks, and one of them has most of the bytes."""
    with Store(settings_of(tmp_path)) as store:
        for name in "abcdefgh":
            append(store.topic(name), 20, 100)
        large = store.topic("orders")
        append(large, 9000, 100)
        large.rotate()
        large.upload()
    with view_of as views:
        each = {name: views.topic(name) for name in (*"abcdefgh", "orders")}
        pieces = [one for view in each.values() for one in plan_topic(view, 0, view.end_offset)]
        assert len(pieces) == 9
        found = splits(
            pieces, SPLIT_BYTES, 4, lambda one, size: recut(each[one.topic.topic], one, size)
        )
    assert len(found) == 4
    sizes = [split.size for split in found]
    assert max(sizes) < sum(sizes) / 4 * 1.5, sizes
    assert sum(split.count for split in found) == 8 * 20 + 9000


def test_neighbours_stay_together() -> None:
    found = splits([piece("a", at, 10) for at in range(100)], 100)
    assert [len(each.pieces) for each in found] == [10] * 10
    for each in found:
        assert each.pieces[-1].first - each.pieces[0].first == 9


# ---- a topic ----


@pytest.fixture
def view_of(tmp_path: Path) -> StoreView:
    close_executor_resources()
    return StoreView(settings_of(tmp_path))


def test_objects_come_before_segments(tmp_path: Path, view_of: StoreView) -> None:
    with Store(settings_of(tmp_path)) as store:
        fill_both_tiers(store.topic("orders"))
    with view_of as views:
        pieces = plan_topic(views.topic("orders"), 10, 110)
    assert [(one.first, one.next, one.descriptor is not None) for one in pieces] == [
        (10, 30, True),
        (30, 60, True),
        (60, 90, False),
        (90, 110, False),
    ]


def test_bounds_are_resolved_and_checked(tmp_path: Path, view_of: StoreView) -> None:
    with Store(settings_of(tmp_path)) as store:
        append(store.topic("orders"), 9)
    with view_of as views:
        view = views.topic("orders")
        assert resolve_range(view, EARLIEST, LATEST) == OffsetRange(TOPIC, 0, 9)
        assert resolve_range(view, 3, 3) == OffsetRange(TOPIC, 3, 3)
        for start, end in ((10, LATEST), (0, 12)):
            with pytest.raises(OffsetOutOfRange, match="failOnDataLoss"):
                resolve_range(view, start, end)
        assert resolve_range(view, 10, 12, fail_on_data_loss=False) == OffsetRange(TOPIC, 9, 9)


class MeddledDisk(LocalDisk):
    """Somebody is faster, once, than whoever lists a directory."""

    def __init__(self, meddle: Callable[[], None]) -> None:
        super().__init__()
        self._meddle: Callable[[], None] | None = meddle

    def list_dir(self, path: Path) -> list[str]:
        meddle, self._meddle = self._meddle, None
        if meddle is not None:
            meddle()
        return super().list_dir(path)


def test_an_upload_while_the_view_was_made_is_found(tmp_path: Path) -> None:
    with Store(settings_of(tmp_path)) as store:
        topic = store.topic("orders")
        append(topic, 10)
        topic.rotate()
        topic.upload()
        append(topic, 10)

        def go_on() -> None:
            topic.rotate()
            topic.upload()
            append(topic, 10)
            assert topic.trim_local()

        with StoreView(settings_of(tmp_path), disk=MeddledDisk(go_on)) as views:
            view = views.topic("orders")
            assert view.record is not None
            assert (view.record.tail, view.end_offset, view.segments()) == (10, 20, [])
            assert [one.first for one in plan_topic(view, 0, 20)] == [0, 10]


def test_a_segment_that_retention_deletes_meanwhile_is_planned_from_its_object(
    tmp_path: Path, view_of: StoreView
) -> None:
    with Store(settings_of(tmp_path)) as store:
        topic = store.topic("orders")
        append(topic, 20)
        topic.rotate()
        append(topic, 10)
        view = view_of.topic("orders")
        topic.upload()
        assert topic.trim_local()
        planned = plan_topic(view, 5, 30)  # from the middle: the index of the segment is needed
    assert [one.path is None for one in planned] == [True] * len(planned)
    assert (planned[0].first, planned[-1].next) == (5, 30)


def test_places_seen_before_are_where_tasks_begin(tmp_path: Path, view_of: StoreView) -> None:
    places = KnownPlaces()
    with Store(settings_of(tmp_path)) as store, view_of as views:
        topic, view = store.topic("orders"), None
        ends = []
        for _ in range(200):
            append(topic, 3)
            view = views.topic("orders")
            places.remember(view)
            ends.append((view.segments()[-1].end_offset, view.segments()[-1].size))
        assert view is not None
        (last,) = plan_topic(view, 597, 600, places=places)
        assert (last.at, last.begin, last.end) == (*ends[-2], ends[-1][1])
        (some,) = plan_topic(view, 301, 400, places=places)
        assert 0 < some.at <= 301
        assert len(places.of(view.segments()[-1])) <= 64
        frames = [
            frame
            for found in scan_pieces(executor_resources(view.store.settings), [some])
            for frame in found.offsets
        ]
        assert frames == list(range(301, 400))
        (without,) = plan_topic(view, 597, 600)
        assert (without.at, without.begin) == (0, 0)


# ---- times ----


def test_a_time_finds_the_first_offset_that_is_not_earlier(tmp_path: Path) -> None:
    close_executor_resources()
    clock = ManualClock()
    begun = clock.now_ms()
    settings = settings_of(tmp_path, wal=WalSettings(rotate_max_bytes=20_000))
    with Store(settings, clock=clock) as store:
        topic = store.topic("orders")
        for number in range(300):
            append(topic, 5, 200)
            clock.advance(0.010)
            if number in (100, 200):
                topic.rotate()
                topic.upload()
    with StoreView(settings) as views:
        view, bench = views.topic("orders"), executor_resources(settings)
        assert {one.descriptor is None for one in plan_topic(view, 0, 1500)} == {True, False}
        for number in (*range(0, 300, 17), 99, 100, 101, 200, 299):
            assert view.offset_at_time(begun + 10 * number, bench) == 5 * number
            assert view.offset_at_time(begun + 10 * number - 9, bench) == 5 * number
        assert view.offset_at_time(0, bench) == 0
        assert view.offset_at_time(begun + 10_000, bench) == 1500
