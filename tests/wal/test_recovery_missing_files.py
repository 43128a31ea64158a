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
from support.disks import LogDirectory


@pytest.mark.parametrize("which", [1, 2])
def test_a_missing_middle_segment_is_named(directory: LogDirectory, which: int) -> None:
    names = fill_segments(directory)
    directory.remove(names[which])
    before = directory.contents()
    with pytest.raises(MissingData, match=names[which].replace(".", r"\.")):
        directory.open()
    expect_unchanged(directory, before)
    directory.remove("wal.ckpt")
    with pytest.raises(MissingData, match=names[which].replace(".", r"\.")):
        directory.open()


@pytest.mark.parametrize("lost", ["wal.ckpt", "wal.synced", None])
def test_a_missing_newest_segment_is_noticed(directory: LogDirectory, lost: str | None) -> None:
    names = fill_segments(directory)
    directory.remove(names[-1])
    if lost is not None:
        directory.remove(lost)
    before = directory.contents()
    with pytest.raises(MissingData):
        directory.open()
    expect_unchanged(directory, before)


def test_a_missing_oldest_segment_is_noticed(directory: LogDirectory) -> None:
    names = fill_segments(directory)
    directory.remove(names[0])
    with pytest.raises(MissingData):
        directory.open()


def test_all_segments_missing_is_not_an_empty_log(directory: LogDirectory) -> None:
    for name in fill_segments(directory):
        directory.remove(name)
    before = directory.contents()
    with pytest.raises(MissingData):
        directory.open()
    expect_unchanged(directory, before)


def test_a_checkpoint_ahead_of_the_files_means_that_data_is_gone(directory: LogDirectory) -> None:
    fill(directory)
    newer = directory.read("wal.ckpt")
    start = frame_starts(directory)[3]
    directory.write("wal.log", directory.read("wal.log")[:start])
    directory.write("wal.ckpt", newer)
    directory.remove("wal.synced")
    before = directory.contents()
    with pytest.raises(MissingData, match=r"\b3\b.*\b5\b"):
        directory.open()
    expect_unchanged(directory, before)


def test_data_that_is_missing_and_torn_is_reported_before_anything_is_cut(
    directory: LogDirectory,
) -> None:
    fill(directory)
    newer = directory.read("wal.ckpt")
    start = frame_starts(directory)[3]
    directory.write("wal.log", directory.read("wal.log")[: start + 20])
    directory.write("wal.ckpt", newer)
    directory.remove("wal.synced")
    before = directory.contents()
    with pytest.raises((MissingData, CorruptFrame)):
        directory.open()
    expect_unchanged(directory, before)


def test_interrupted_retention_is_not_finished_when_newer_data_is_missing(
    directory: LogDirectory,
) -> None:
    names = fill_segments(directory)
    saved = {name: directory.read(name) for name in names[:2]}
    wal = directory.open(rotate_max_bytes=SEGMENT_BYTES)
    dropped = wal.retain(EVERYTHING, wal.current_offset())
    assert [segment.path.name for segment in dropped[:2]] == names[:2]
    wal.shutdown()
    for name, data in saved.items():
        directory.write(name, data)
    directory.remove(names[-1])
    before = directory.contents()
    with pytest.raises(MissingData):
        directory.open()
    expect_unchanged(directory, before)
