"""The faults of the original log: each has a test that the original would fail.

P1 to P7 are the probes that were run against it; the others were read in its code.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from forebay.errors import CorruptFrame, LogStopped, OffsetOutOfRange
from forebay.format.checkpoint import WalCheckpoint, decode_checkpoint
from forebay.format.frame import End
from forebay.format.names import SegmentNames
from forebay.settings import DeleterSettings
from forebay.testing import Fault, FaultDisk
from forebay.wal.retention import Deleter
from support.disks import (
    PATIENCE_SECONDS,
    GatedDirectory,
    LogDirectory,
    in_thread,
    on_local_disk,
    payloads,
    payloads_of,
    texts,
)

NAMES = SegmentNames()
EVERYTHING = Deleter(DeleterSettings(retention_time_minutes=0))


def checkpoint(directory: LogDirectory) -> WalCheckpoint:
    return decode_checkpoint(directory.read("wal.ckpt"), WalCheckpoint)


# -- P1: offsets start again at 0 after a restart -----------------------------------------------


def test_p1_offsets_continue_after_a_restart_with_the_checkpoint(directory: LogDirectory) -> None:
    wal = directory.open()
    for payload in texts(0, 10):
        wal.append(payload)
    wal.shutdown()
    assert checkpoint(directory).last_offset == 9
    wal = directory.open()
    assert wal.current_offset() == 10
    assert wal.append(b"next", durability="synced") == 10
    assert list(directory.frames("wal.log").offsets) == list(range(11))


@pytest.mark.parametrize("lost", [("wal.ckpt",), ("wal.synced",), ("wal.ckpt", "wal.synced")])
def test_p1_offsets_continue_after_a_restart_without_the_checkpoint(
    directory: LogDirectory, lost: tuple[str, ...]
) -> None:
    wal = directory.open(rotate_max_bytes=300)
    for payload in texts(0, 10):
        wal.append(payload, durability="synced")
    wal.shutdown()
    for name in lost:
        directory.remove(name)
    wal = directory.open()
    assert wal.current_offset() == 10
    assert wal.append(b"next", durability="synced") == 10
    assert payloads(wal) == [*texts(0, 10), b"next"]


APPEND_AND_WAIT = """
import sys, pathlib
from forebay import Wal, WalSettings
wal = Wal(WalSettings(dir=pathlib.Path(sys.argv[1]), fsync_interval_ms=3600000))
for number in range(10):
    wal.append(f"message {number}".encode(), durability="synced")
print("ready", flush=True)
sys.stdin.read()
"""


def test_p1_offsets_continue_after_kill_9(tmp_path: Path) -> None:
    directory = on_local_disk(tmp_path)
    command = [sys.executable, "-c", APPEND_AND_WAIT, str(directory.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        child.kill()
    wal = directory.open()
    assert wal.current_offset() == 10
    assert wal.append(b"next", durability="synced") == 10
    assert payloads(wal) == [*texts(0, 10), b"next"]
    directory.close()


def test_p1_offsets_continue_after_a_power_loss(crashing: LogDirectory) -> None:
    assert crashing.crash is not None
    wal = crashing.open()
    for payload in texts(0, 10):
        wal.append(payload, durability="synced")
    crashing.crash.crash()
    assert crashing.open().append(b"next") == 10


# -- P2: frames are not where the checkpoint says -----------------------------------------------


def expect_files_as_the_checkpoint_says(directory: LogDirectory, count: int) -> None:
    found = checkpoint(directory)
    expected = 0
    for entry in found.segments:
        frames = directory.frames(NAMES.segment(entry.seq))
        assert frames.end is End.COMPLETE
        assert frames.offsets[0] == entry.first_offset == expected
        expected += len(frames)
        if entry.end_offset is not None:
            assert entry.end_offset == expected
        assert payloads_of(frames) == texts(entry.first_offset, expected)
    assert expected == found.next_offset == count


def test_p2_rotation_with_unflushed_data_keeps_frames_where_the_checkpoint_says(
    directory: LogDirectory,
) -> None:
    wal = directory.open(rotate_max_bytes=1000)
    for payload in texts(0, 300):
        wal.append(payload)  # nobody waits: all of it is unflushed when the log rotates
    wal.shutdown()
    assert len(checkpoint(directory).segments) > 10
    expect_files_as_the_checkpoint_says(directory, 300)


def test_p2_a_rotation_that_is_asked_for_takes_what_is_buffered_with_it(
    directory: LogDirectory,
) -> None:
    wal = directory.open()
    for end in (10, 20, 30):
        for payload in texts(end - 10, end):
            wal.append(payload)
        wal.rotate()
    assert [segment.first_offset for segment in wal.segments()] == [0, 10, 20]
    expect_files_as_the_checkpoint_says(directory, 30)


# -- P3: acknowledged appends are lost ----------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_p3_appends_acknowledged_as_synced_survive_a_power_loss(
    crashing: LogDirectory, seed: int | None
) -> None:
    assert crashing.crash is not None
    wal = crashing.open(rotate_max_bytes=5000)
    for start in range(0, 1000, 100):
        wal.append_many(texts(start, start + 99))
        wal.append(texts(start + 99, start + 100)[0], durability="synced")
    crashing.crash.crash(None if seed is None else random.Random(seed))
    assert payloads(crashing.open()) == texts(0, 1000)


# -- P4: a reader of the latest that is not polled loses messages --------------------------------


def test_p4_a_latest_reader_that_is_not_polled_during_1000_appends_loses_nothing(
    directory: LogDirectory,
) -> None:
    wal = directory.open(cache_capacity=64, rotate_max_bytes=10_000)
    wal.append(b"before", durability="synced")
    reader = wal.tail_reader("latest")
    for payload in texts(1, 1001):
        wal.append(payload)
    got = [next(reader) for _ in range(1000)]
    assert [message.offset for message in got] == list(range(1, 1001))
    assert [message.payload for message in got] == texts(1, 1001)
    reader.close()


# -- P5: a reader that pauses hangs or dies ------------------------------------------------------


def test_p5_a_reader_paused_for_100_000_messages_with_a_cache_of_64_gets_every_one(
    directory: LogDirectory,
) -> None:
    wal = directory.open(cache_capacity=64, rotate_max_bytes=1 << 20)
    wal.append_many(texts(0, 5), durability="synced")
    reader = wal.tail_reader(0)
    got = [next(reader).payload for _ in range(5)]
    for start in range(5, 100_005, 10_000):
        wal.append_many(texts(start, start + 10_000))
    got += [next(reader).payload for _ in range(100_000)]
    assert got == texts(0, 100_005)
    wal.append(b"and it is live again")
    assert next(reader).payload == b"and it is live again"
    reader.close()


# -- P6: concurrent producers write out of order -------------------------------------------------


def produce_concurrently(directory: LogDirectory, producers: int, each: int) -> dict[int, bytes]:
    wal = directory.open(rotate_max_bytes=1 << 20)
    seen: list[dict[int, bytes]] = [{} for _ in range(producers)]
    begin = threading.Barrier(producers)

    def produce(number: int) -> None:
        begin.wait(PATIENCE_SECONDS)
        for count in range(each):
            payload = b"%d:%d" % (number, count)
            seen[number][wal.append(payload)] = payload

    threads = [in_thread(lambda number=number: produce(number)) for number in range(producers)]  # type: ignore[misc]
    for thread in threads:
        thread.result(PATIENCE_SECONDS)
    wal.shutdown()
    return {offset: payload for part in seen for offset, payload in part.items()}


def test_p6_8_concurrent_producers_give_files_in_strict_offset_order(
    directory: LogDirectory,
) -> None:
    appended = produce_concurrently(directory, 8, 500)
    offsets: list[int] = []
    for entry in checkpoint(directory).segments:
        frames = directory.frames(NAMES.segment(entry.seq))
        assert frames.end is End.COMPLETE
        offsets += frames.offsets
    assert offsets == list(range(4000))
    assert payloads(directory.open()) == [appended[offset] for offset in range(4000)]


def test_p6b_4_producers_of_25_000_then_reopen_and_replay_from_0(tmp_path: Path) -> None:
    directory = on_local_disk(tmp_path)
    appended = produce_concurrently(directory, 4, 25_000)
    assert payloads(directory.open(), 0) == [appended[offset] for offset in range(100_000)]
    directory.close()


# -- P7: the checkpoint forgets what retention removed -------------------------------------------


def test_p7_retention_then_appends_then_a_reopen_keeps_the_start_and_lists_no_removed_file(
    directory: LogDirectory,
) -> None:
    wal = directory.open(rotate_max_bytes=500)
    for payload in texts(0, 40):
        wal.append(payload, durability="synced")
    dropped = wal.retain(EVERYTHING, 35)
    assert len(dropped) >= 5
    start = dropped[-1].end_offset
    assert wal.start_offset == start
    wal.append(b"message 40", durability="synced")
    wal.rotate()
    wal.shutdown()
    removed = {segment.seq for segment in dropped}
    assert checkpoint(directory).start_offset == start
    assert not removed & {entry.seq for entry in checkpoint(directory).segments}
    assert not {segment.path.name for segment in dropped} & set(directory.names())
    wal = directory.open()
    assert wal.start_offset == start
    with pytest.raises(OffsetOutOfRange) as caught:
        wal.tail_reader(0)
    assert caught.value.start == start
    assert payloads(wal) == texts(start, 41)


# -- read in its code ----------------------------------------------------------------------------


def test_an_acknowledgement_goes_out_only_after_the_sync_of_its_segment(
    gated: GatedDirectory,
) -> None:
    assert gated.crash is not None
    wal = gated.open()
    wal.append(b"first", durability="synced")
    gated.gate.shut()
    waiting = in_thread(lambda: wal.append(b"second", durability="synced"))
    assert gated.gate.reached.wait(PATIENCE_SECONDS)
    # The bytes are written, the sync has not returned: there is no acknowledgement yet, and a
    # message is lost if the power fails now.
    assert len(gated.frames("wal.log")) == 2
    assert not waiting.done()
    gated.crash.crash()
    assert len(gated.frames("wal.log")) == 1
    gated.gate.open()


def test_every_acknowledged_append_is_on_the_device_at_that_very_moment(
    crashing: LogDirectory,
) -> None:
    assert crashing.crash is not None
    for count in range(1, 25):
        directory = LogDirectory(crashing.disk, Path(f"/log-{count}"), crashing.crash)
        wal = directory.open(rotate_max_bytes=250)
        for payload in texts(0, count):
            wal.append(payload, durability="synced")
        crashing.crash.crash()
        reopened = directory.open()
        assert payloads(reopened) == texts(0, count)
        reopened.shutdown()


def test_a_checkpoint_is_durable_with_its_name_and_its_bytes(crashing: LogDirectory) -> None:
    assert crashing.crash is not None
    wal = crashing.open(rotate_max_bytes=250)
    for payload in texts(0, 20):
        wal.append(payload, durability="synced")
    live = checkpoint(crashing)
    crashing.crash.crash()
    assert checkpoint(crashing) == live
    assert "wal.ckpt.tmp" not in crashing.names()


def test_a_new_segment_has_its_name_before_its_first_frame_is_acknowledged(
    crashing: LogDirectory,
) -> None:
    """Rule R3, with a disk that fails the sync of the directory: nothing is acknowledged."""
    assert crashing.crash is not None
    faults = FaultDisk(crashing.crash)
    directory = LogDirectory(faults, crashing.path, crashing.crash)
    wal = directory.open()
    wal.append(b"one", durability="synced")
    wal.rotate()
    faults.inject(Fault("sync_dir", 5))
    with pytest.raises(LogStopped):
        wal.append(b"two", durability="synced")
    crashing.crash.crash()
    assert payloads(directory.open()) == [b"one"]


def test_one_bad_crc_is_an_error_and_what_follows_it_is_never_skipped_to(
    directory: LogDirectory,
) -> None:
    wal = directory.open(rotate_max_bytes=500)
    for payload in texts(0, 40):
        wal.append(payload, durability="synced")
    victim = wal.segments()[2]
    wal.shutdown()
    frames = directory.frames(victim.path.name)
    data = bytearray(directory.read(victim.path.name))
    data[frames.positions[1] + 30] ^= 1
    directory.write(victim.path.name, bytes(data))
    wal = directory.open(cache_capacity=0)
    reader = wal.tail_reader(0)
    bad = victim.first_offset + 1
    assert [next(reader).offset for _ in range(bad)] == list(range(bad))
    for _ in range(3):
        with pytest.raises(CorruptFrame) as caught:
            next(reader)
        assert caught.value.offset == bad
    assert bytes(data) == directory.read(victim.path.name)


def test_a_trailing_partial_frame_does_not_stall_what_is_appended_later(
    directory: LogDirectory,
) -> None:
    wal = directory.open()
    wal.append_many(texts(0, 5), durability="synced")
    wal.shutdown()
    whole = directory.read("wal.log")
    directory.write("wal.log", whole + whole[:25])
    wal = directory.open()
    wal.append_many(texts(5, 10), durability="synced")
    assert payloads(wal) == texts(0, 10)
    assert directory.frames("wal.log").end is End.COMPLETE
