"""Opening a log: a torn tail is cut and kept aside, and corrupt files are left alone."""

from __future__ import annotations

import pytest

from forebay.errors import CorruptFrame, MissingData
from support.closed_logs import (
    SEGMENT_BYTES,
    expect_unchanged,
    fill,
    fill_segments,
    forget_memories,
    frame_starts,
)
from support.disks import LogDirectory, in_memory, payloads, texts

# -- torn tails ---------------------------------------------------------------------------------


@pytest.mark.parametrize("memories", ["kept", "lost"])
def test_a_torn_tail_is_cut_and_kept_aside_at_every_byte_of_the_last_frame(memories: str) -> None:
    source = in_memory()
    fill(source)
    whole = source.read("wal.log")
    last = frame_starts(source)[-1]
    published = source.read("wal.synced")
    fill(source_of_four := in_memory(), 4)
    behind = source_of_four.read("wal.synced")
    assert published != behind
    for cut in range(last + 1, len(whole)):
        directory = in_memory()
        directory.write("wal.log", whole[:cut])
        if memories == "kept":
            # What a crash leaves: all frames but the last were synced.
            directory.write("wal.synced", behind)
        wal = directory.open()
        assert payloads(wal) == texts(0, 4)
        assert directory.read(f"wal.log.{last}.torn") == whole[last:cut]
        assert directory.read("wal.log") == whole[:last]
        assert wal.append(b"again", durability="synced") == 4
        wal.shutdown()
        assert payloads(directory.open()) == [*texts(0, 4), b"again"]
        directory.close()


def test_a_torn_tail_right_behind_the_synced_position_is_cut_before_anything_is_appended(
    directory: LogDirectory,
) -> None:
    fill(directory)
    whole = directory.read("wal.log")
    published = directory.read("wal.synced")
    directory.write("wal.log", whole + whole[:7])
    directory.write("wal.synced", published)
    wal = directory.open()
    assert directory.read("wal.log") == whole
    assert wal.append(b"next", durability="synced") == 5
    wal.shutdown()
    assert payloads(directory.open()) == [*texts(0, 5), b"next"]


@pytest.mark.parametrize("zeros", [1, 15, 16, 17, 4096, 3 << 20])
def test_a_tail_of_zeros_is_cut_and_kept_aside(directory: LogDirectory, zeros: int) -> None:
    fill(directory)
    whole = directory.read("wal.log")
    directory.write("wal.log", whole + bytes(zeros))
    wal = directory.open()
    assert payloads(wal) == texts(0, 5)
    assert directory.read(f"wal.log.{len(whole)}.torn") == bytes(zeros)
    assert directory.read("wal.log") == whole


def test_a_segment_of_nothing_but_a_torn_frame_is_used_again(directory: LogDirectory) -> None:
    names = fill_segments(directory)
    newest = names[-1]
    directory.write(f"wal.{len(names)}.log", directory.read(newest)[:20])
    wal = directory.open(rotate_max_bytes=SEGMENT_BYTES)
    assert wal.append(b"next", durability="synced") == 30
    wal.shutdown()
    assert payloads(directory.open())[-1] == b"next"


def test_torn_tails_of_several_crashes_are_all_kept(directory: LogDirectory) -> None:
    fill(directory)
    whole = directory.read("wal.log")
    for tail in (b"one", b"two", b"three"):
        directory.write("wal.log", whole + tail)
        directory.open().shutdown()
    kept = [name for name in directory.names() if name.endswith(".torn")]
    assert sorted(directory.read(name) for name in kept) == [b"one", b"three", b"two"]


def test_frames_that_were_written_and_never_synced_are_durable_once_they_were_served(
    crashing: LogDirectory,
) -> None:
    assert crashing.crash is not None
    fill(crashing)
    whole = crashing.read("wal.log")
    starts = frame_starts(crashing)
    crashing.write("wal.log", whole[: starts[3]])
    # Written by a process that was killed before its sync.
    file = crashing.disk.open_append(crashing.path / "wal.log")
    file.append(whole[starts[3] :])
    crashing.remove("wal.synced")
    crashing.remove("wal.ckpt")
    crashing.crash.kill()
    assert payloads(crashing.open()) == texts(0, 5)
    crashing.crash.crash()
    assert payloads(crashing.open()) == texts(0, 5)


# -- corruption ---------------------------------------------------------------------------------


@pytest.mark.parametrize("memories", ["kept", "lost"])
@pytest.mark.parametrize("part", ["offset", "length", "crc", "payload"])
@pytest.mark.parametrize("frame", [0, 1, 3])
def test_a_damaged_frame_in_the_middle_of_the_newest_segment_is_an_error_that_changes_nothing(
    directory: LogDirectory, frame: int, part: str, memories: str
) -> None:
    fill(directory)
    data = bytearray(directory.read("wal.log"))
    start = frame_starts(directory)[frame]
    data[start + {"offset": 0, "length": 8, "crc": 12, "payload": 40}[part]] ^= 0x40
    directory.write("wal.log", bytes(data))
    if memories == "lost":
        forget_memories(directory)
    before = directory.contents()
    with pytest.raises(CorruptFrame) as caught:
        directory.open()
    known_first = memories == "kept" or frame > 0 or part != "offset"
    if known_first:
        assert caught.value.position == start
        assert caught.value.offset == frame
    assert caught.value.file == str(directory.path / "wal.log")
    expect_unchanged(directory, before)


@pytest.mark.parametrize("part", ["offset", "length", "crc", "payload"])
def test_a_damaged_last_frame_that_was_synced_is_an_error_and_not_a_torn_tail(
    directory: LogDirectory, part: str
) -> None:
    fill(directory)
    data = bytearray(directory.read("wal.log"))
    start = frame_starts(directory)[-1]
    data[start + {"offset": 0, "length": 8, "crc": 12, "payload": 40}[part]] ^= 0x40
    directory.write("wal.log", bytes(data))
    before = directory.contents()
    with pytest.raises(CorruptFrame) as caught:
        directory.open()
    assert (caught.value.position, caught.value.offset) == (start, 4)
    expect_unchanged(directory, before)


@pytest.mark.parametrize("part", ["offset", "length", "crc", "payload"])
def test_a_damaged_last_frame_that_only_the_checkpoint_knows_of_is_not_cut(
    directory: LogDirectory, part: str
) -> None:
    fill(directory)
    data = bytearray(directory.read("wal.log"))
    start = frame_starts(directory)[-1]
    data[start + {"offset": 0, "length": 8, "crc": 12, "payload": 40}[part]] ^= 0x40
    directory.write("wal.log", bytes(data))
    directory.remove("wal.synced")
    before = directory.contents()
    with pytest.raises((CorruptFrame, MissingData)):
        directory.open()
    expect_unchanged(directory, before)


def test_a_whole_last_frame_with_a_wrong_offset_is_corrupt_even_when_nothing_was_published(
    directory: LogDirectory,
) -> None:
    fill(directory)
    data = bytearray(directory.read("wal.log"))
    start = frame_starts(directory)[-1]
    data[start] = 9
    directory.write("wal.log", bytes(data))
    forget_memories(directory)
    before = directory.contents()
    with pytest.raises(CorruptFrame) as caught:
        directory.open()
    assert (caught.value.position, caught.value.offset) == (start, 4)
    expect_unchanged(directory, before)


def test_an_impossible_length_below_the_synced_position_is_corrupt(directory: LogDirectory) -> None:
    fill(directory)
    data = bytearray(directory.read("wal.log"))
    start = frame_starts(directory)[-1]
    data[start + 8 : start + 12] = (0xFFFF_FFFF).to_bytes(4, "little")
    directory.write("wal.log", bytes(data))
    before = directory.contents()
    with pytest.raises(CorruptFrame) as caught:
        directory.open()
    assert (caught.value.position, caught.value.offset) == (start, 4)
    expect_unchanged(directory, before)


@pytest.mark.parametrize("length", [0, 9, 0xFFFF_FFFF, 64 << 20])
def test_an_impossible_length_with_valid_frames_behind_it_is_corrupt(
    directory: LogDirectory, length: int
) -> None:
    fill(directory)
    data = bytearray(directory.read("wal.log"))
    start = frame_starts(directory)[2]
    data[start + 8 : start + 12] = length.to_bytes(4, "little")
    directory.write("wal.log", bytes(data))
    forget_memories(directory)
    before = directory.contents()
    with pytest.raises(CorruptFrame) as caught:
        directory.open()
    assert (caught.value.position, caught.value.offset) == (start, 2)
    expect_unchanged(directory, before)


def test_a_damaged_frame_in_a_sealed_segment_is_an_error_for_the_reader_and_never_skipped(
    directory: LogDirectory,
) -> None:
    names = fill_segments(directory)
    victim = names[1]
    data = bytearray(directory.read(victim))
    first, second = directory.frames(victim).offsets[:2]
    start = frame_starts(directory, victim)[1]
    data[start + 40] ^= 1
    directory.write(victim, bytes(data))
    wal = directory.open(cache_capacity=0)
    reader = wal.tail_reader(0, end=30)
    got = []
    for _ in range(3):
        with pytest.raises(CorruptFrame) as caught:
            got += list(reader)
        assert caught.value.offset == second
        assert caught.value.position == start
        assert caught.value.file == str(directory.path / victim)
    assert reader.position == second
    assert second == first + 1


def test_a_sealed_segment_cut_at_a_frame_boundary_is_an_error_for_the_reader(
    directory: LogDirectory,
) -> None:
    names = fill_segments(directory)
    victim = names[1]
    start = frame_starts(directory, victim)[-1]
    directory.write(victim, directory.read(victim)[:start])
    wal = directory.open(cache_capacity=0)
    with pytest.raises(CorruptFrame):
        list(wal.tail_reader(0, end=30))


def test_the_last_sealed_segment_must_end_where_the_newest_begins(directory: LogDirectory) -> None:
    names = fill_segments(directory)
    victim = names[-2]
    start = frame_starts(directory, victim)[-1]
    directory.write(victim, directory.read(victim)[:start])
    before = directory.contents()
    with pytest.raises((CorruptFrame, MissingData)):
        directory.open()
    expect_unchanged(directory, before)
