"""Files that are missing: opening the log says which, and changes nothing."""

from __future__ import annotations

import pytest

from forebay.errors import CorruptFrame, MissingData
from support.closed_logs import (
    EVERYTHING,
    SEGMENT_BYTES,
    expect_unchanged,
    fill,
    fill_segments,
    frame_starts,
)
from support.disks import Place


@pytest.mark.parametrize("which", [1, 2])
def test_a_missing_middle_segment_is_named(place: Place, which: int) -> None:
    names = fill_segments(place)
    place.remove(names[which])
    before = place.contents()
    with pytest.raises(MissingData, match=names[which].replace(".", r"\.")):
        place.open()
    expect_unchanged(place, before)
    place.remove("wal.ckpt")
    with pytest.raises(MissingData, match=names[which].replace(".", r"\.")):
        place.open()


@pytest.mark.parametrize("lost", ["wal.ckpt", "wal.synced", None])
def test_a_missing_newest_segment_is_noticed(place: Place, lost: str | None) -> None:
    names = fill_segments(place)
    place.remove(names[-1])
    if lost is not None:
        place.remove(lost)
    before = place.contents()
    with pytest.raises(MissingData):
        place.open()
    expect_unchanged(place, before)


def test_a_missing_oldest_segment_is_noticed(place: Place) -> None:
    names = fill_segments(place)
    place.remove(names[0])
    with pytest.raises(MissingData):
        place.open()


def test_all_segments_missing_is_not_an_empty_log(place: Place) -> None:
    for name in fill_segments(place):
        place.remove(name)
    before = place.contents()
    with pytest.raises(MissingData):
        place.open()
    expect_unchanged(place, before)


def test_a_checkpoint_ahead_of_the_files_means_that_data_is_gone(place: Place) -> None:
    fill(place)
    newer = place.read("wal.ckpt")
    start = frame_starts(place)[3]
    place.write("wal.log", place.read("wal.log")[:start])
    place.write("wal.ckpt", newer)
    place.remove("wal.synced")
    before = place.contents()
    with pytest.raises(MissingData, match="end at offset 3, but everything before offset 5"):
        place.open()
    expect_unchanged(place, before)


def test_data_that_is_missing_and_torn_is_reported_before_anything_is_cut(place: Place) -> None:
    fill(place)
    newer = place.read("wal.ckpt")
    start = frame_starts(place)[3]
    place.write("wal.log", place.read("wal.log")[: start + 20])
    place.write("wal.ckpt", newer)
    place.remove("wal.synced")
    before = place.contents()
    with pytest.raises((MissingData, CorruptFrame)):
        place.open()
    expect_unchanged(place, before)


def test_interrupted_retention_is_not_finished_when_newer_data_is_missing(place: Place) -> None:
    names = fill_segments(place)
    saved = {name: place.read(name) for name in names[:2]}
    wal = place.open(rotate_max_bytes=SEGMENT_BYTES)
    dropped = wal.retain(EVERYTHING, wal.current_offset())
    assert [segment.path.name for segment in dropped[:2]] == names[:2]
    wal.shutdown()
    for name, data in saved.items():
        place.write(name, data)
    place.remove(names[-1])
    before = place.contents()
    with pytest.raises(MissingData):
        place.open()
    expect_unchanged(place, before)
