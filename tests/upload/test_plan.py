"""Which bytes of which segments make the next object."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import CorruptFrame, MissingData
from forebay.settings import UploaderSettings
from forebay.upload.plan import PlannedObject, plan_object
from forebay.wal.segment import LogPosition, Segment

Sizes = list[list[int]]
"""Of the frames in each segment."""


def build(sizes: Sizes) -> list[Segment]:
    segments, offset = [], 0
    for seq, frames in enumerate(sizes):
        end = offset + len(frames)
        segments.append(Segment(seq, Path(f"wal.{seq}.log"), offset, end, sum(frames), 0, 0))
        offset = end
    return segments


class Frames:
    """A cut that knows every frame."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes

    def __call__(
        self, segment: Segment, start: LogPosition, bytes_max: int, messages_max: int | None
    ) -> LogPosition:
        position, offset = start.position, start.offset
        for size in self._sizes[segment.seq][start.offset - segment.first_offset :]:
            over = position + size - start.position > bytes_max
            if over or (messages_max is not None and offset - start.offset >= messages_max):
                break
            position, offset = position + size, offset + 1
        return LogPosition(segment.seq, position, offset)


def plan_all(
    sizes: Sizes, settings: UploaderSettings, *, overdue: bool
) -> tuple[list[PlannedObject], LogPosition]:
    segments, at = build(sizes), LogPosition(0, 0, 0)
    planned = []
    while (
        found := plan_object(segments, at, settings, Frames(sizes), overdue=overdue)
    ) is not None:
        planned.append(found)
        at = found.end
    return planned, at


def bounds(bytes_max: int, messages_max: int | None = None) -> UploaderSettings:
    return UploaderSettings(max_object_bytes=bytes_max, max_object_messages=messages_max)


def test_nothing_is_planned_until_an_object_is_full() -> None:
    planned, _ = plan_all([[100] * 5], bounds(1000), overdue=False)
    assert planned == []


def test_what_is_overdue_is_planned_however_little_it_is() -> None:
    planned, _ = plan_all([[100] * 5], bounds(1000), overdue=True)
    assert [(each.start_offset, each.next_offset, each.size) for each in planned] == [(0, 5, 500)]


def test_several_segments_make_one_object() -> None:
    planned, _ = plan_all([[100] * 3, [100] * 3, [100] * 3], bounds(10_000), overdue=True)
    assert len(planned) == 1
    assert [extent.seq for extent in planned[0].extents] == [0, 1, 2]


def test_a_full_object_is_cut_inside_a_segment_at_a_frame() -> None:
    planned, at = plan_all([[100] * 8], bounds(250), overdue=False)
    assert [(each.start_offset, each.next_offset) for each in planned] == [(0, 2), (2, 4), (4, 6)]
    assert at == LogPosition(0, 600, 6)


def test_an_object_that_is_exactly_full_counts_as_full() -> None:
    planned, _ = plan_all([[100] * 4], bounds(400), overdue=False)
    assert [each.size for each in planned] == [400]


def test_a_frame_larger_than_an_object_gets_one_of_its_own() -> None:
    planned, _ = plan_all([[10, 5000, 10]], bounds(100), overdue=True)
    assert [each.size for each in planned] == [10, 5000, 10]


def test_the_number_of_messages_bounds_an_object_too() -> None:
    planned, _ = plan_all([[10] * 4, [10] * 4], bounds(10_000, 3), overdue=True)
    assert [each.next_offset - each.start_offset for each in planned] == [3, 3, 2]


def test_an_empty_active_segment_is_no_reason_for_an_object() -> None:
    planned, _ = plan_all([[10] * 4, []], bounds(40), overdue=True)
    assert [(each.start_offset, each.next_offset) for each in planned] == [(0, 4)]


def test_a_plan_cut_at_a_damaged_frame_keeps_what_is_before_it() -> None:
    [planned], _ = plan_all([[10] * 4, [10] * 4], bounds(10_000), overdue=True)
    damage = damaged("wal.1.log", 20, 6)
    assert planned.holds(damage)
    cut = planned.before(damage)
    assert cut is not None
    assert (cut.start_offset, cut.next_offset, cut.size) == (0, 6, 60)
    assert planned.before(damaged("wal.0.log", 0, 0)) is None


def test_damage_of_the_object_itself_is_no_damage_of_what_it_is_made_of() -> None:
    [planned], _ = plan_all([[10] * 4], bounds(10_000), overdue=True)
    assert not planned.holds(damaged("storage/topics/default/orders/objects/data-0-3.dnb1", 20, 2))
    assert not planned.holds(MissingData("gone"))


def damaged(file: str, position: int, offset: int) -> CorruptFrame:
    return CorruptFrame("a checksum", file=file, position=position, offset=offset)


@given(
    sizes=st.lists(st.lists(st.integers(26, 400), min_size=1, max_size=8), min_size=1, max_size=6),
    bytes_max=st.integers(1, 1000),
    messages_max=st.none() | st.integers(1, 12),
    overdue=st.booleans(),
)
def test_plans_follow_each_other_without_a_gap_and_within_bounds(
    sizes: Sizes, bytes_max: int, messages_max: int | None, overdue: bool
) -> None:
    settings = bounds(bytes_max, messages_max)
    planned, at = plan_all(sizes, settings, overdue=overdue)
    flat = [size for frames in sizes for size in frames]
    offset = 0
    for each in planned:
        count = each.next_offset - each.start_offset
        assert each.start_offset == offset
        assert each.size == sum(flat[offset : offset + count])
        assert each.size <= bytes_max or count == 1
        assert messages_max is None or count <= messages_max
        offset = each.next_offset
    assert at.offset == offset
    left = len(flat) - offset
    if overdue:
        assert left == 0
    else:  # what is left would not fill an object
        assert sum(flat[offset:]) < bytes_max
        assert messages_max is None or left < messages_max


@pytest.mark.parametrize("start", range(9))
def test_a_plan_begins_at_any_frame(start: int) -> None:
    sizes = [[10] * 3, [10] * 3, [10] * 3]
    seq, at = divmod(start, 3)
    place = LogPosition(seq, at * 10, start)
    found = plan_object(build(sizes), place, bounds(10_000), Frames(sizes), overdue=True)
    assert found is not None
    assert (found.start_offset, found.next_offset, found.size) == (start, 9, (9 - start) * 10)
