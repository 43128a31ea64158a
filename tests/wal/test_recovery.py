"""What opening a log makes of what it finds: torn is cut and kept aside, corrupt is left alone."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from disks import Place, in_memory, on_local_disk, payloads, texts, wait_until
from forebay.errors import CorruptFrame, LogLocked, MissingData
from forebay.format.checkpoint import WalCheckpoint, decode_checkpoint
from forebay.format.danube import decode_danube_wal_checkpoint
from forebay.format.frame import HEADER_BYTES
from forebay.settings import DeleterSettings
from forebay.testing import CrashDisk
from forebay.wal.retention import Deleter
from forebay.wal.view import LogView

EVERYTHING = Deleter(DeleterSettings(retention_time_minutes=0))
SEGMENT_BYTES = 500
DANUBE_CHECKPOINT = bytes.fromhex(
    "00000000000000000500000000000000010000000000000017000000000000002f772f64656661756c742f74312f"
    "77616c2e312e6c6f670100000000000000000000000000000015000000000000002f772f64656661756c742f7431"
    "2f77616c2e6c6f67000000000000000001090000000000000077616c2e312e6c6f6700010300000000000000"
)


def fill(place: Place, count: int = 5) -> None:
    wal = place.open()
    for payload in texts(0, count):
        wal.append(payload, durability="synced")
    wal.shutdown()


def fill_segments(place: Place, count: int = 30) -> list[str]:
    """A log of several segments, closed; answers their names, oldest first."""
    wal = place.open(rotate_max_bytes=SEGMENT_BYTES)
    for payload in texts(0, count):
        wal.append(payload, durability="synced")
    names = [segment.path.name for segment in wal.segments()]
    wal.shutdown()
    assert len(names) >= 4
    return names


def forget_memories(place: Place) -> None:
    for name in ("wal.ckpt", "wal.synced"):
        place.remove(name)


def frame_starts(place: Place, name: str = "wal.log") -> list[int]:
    return [position - HEADER_BYTES for position in place.frames(name).positions]


def expect_unchanged(place: Place, before: dict[str, bytes]) -> None:
    """Nothing but the lock and the published position may differ."""
    after = place.contents()
    for contents in (before, after):
        contents.pop("wal.synced", None)
    assert after == before


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
        place = in_memory()
        place.write("wal.log", whole[:cut])
        if memories == "kept":
            # What a crash leaves: the last frame was never synced, all before it was.
            place.write("wal.synced", behind)
        wal = place.open()
        assert payloads(wal) == texts(0, 4)
        assert place.read(f"wal.log.{last}.torn") == whole[last:cut]
        assert place.read("wal.log") == whole[:last]
        assert wal.append(b"again", durability="synced") == 4
        wal.shutdown()
        assert payloads(place.open()) == [*texts(0, 4), b"again"]
        place.close()


def test_a_torn_tail_right_behind_the_synced_position_is_cut_before_anything_is_appended(
    place: Place,
) -> None:
    fill(place)
    whole = place.read("wal.log")
    published = place.read("wal.synced")
    place.write("wal.log", whole + whole[:7])
    place.write("wal.synced", published)
    wal = place.open()
    assert place.read("wal.log") == whole
    assert wal.append(b"next", durability="synced") == 5
    wal.shutdown()
    assert payloads(place.open()) == [*texts(0, 5), b"next"]


@pytest.mark.parametrize("zeros", [1, 15, 16, 17, 4096, 3 << 20])
def test_a_tail_of_zeros_is_cut_and_kept_aside(place: Place, zeros: int) -> None:
    fill(place)
    whole = place.read("wal.log")
    place.write("wal.log", whole + bytes(zeros))
    wal = place.open()
    assert payloads(wal) == texts(0, 5)
    assert place.read(f"wal.log.{len(whole)}.torn") == bytes(zeros)
    assert place.read("wal.log") == whole


def test_a_segment_of_nothing_but_a_torn_frame_is_used_again(place: Place) -> None:
    names = fill_segments(place)
    newest = names[-1]
    place.write(f"wal.{len(names)}.log", place.read(newest)[:20])
    wal = place.open(rotate_max_bytes=SEGMENT_BYTES)
    assert wal.append(b"next", durability="synced") == 30
    wal.shutdown()
    assert payloads(place.open())[-1] == b"next"


def test_torn_tails_of_several_crashes_are_all_kept(place: Place) -> None:
    fill(place)
    whole = place.read("wal.log")
    for tail in (b"one", b"two", b"three"):
        place.write("wal.log", whole + tail)
        place.open().shutdown()
    kept = [name for name in place.names() if name.endswith(".torn")]
    assert sorted(place.read(name) for name in kept) == [b"one", b"three", b"two"]


def test_frames_that_were_written_and_never_synced_are_durable_once_they_were_served(
    crashing: Place,
) -> None:
    assert crashing.crash is not None
    fill(crashing)
    whole = crashing.read("wal.log")
    starts = frame_starts(crashing)
    crashing.write("wal.log", whole[: starts[3]])
    # Written by a process that was killed before its sync.
    file = crashing.disk.open_append(crashing.dir / "wal.log")
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
    place: Place, frame: int, part: str, memories: str
) -> None:
    fill(place)
    data = bytearray(place.read("wal.log"))
    start = frame_starts(place)[frame]
    data[start + {"offset": 0, "length": 8, "crc": 12, "payload": 40}[part]] ^= 0x40
    place.write("wal.log", bytes(data))
    if memories == "lost":
        forget_memories(place)
    before = place.contents()
    with pytest.raises(CorruptFrame) as caught:
        place.open()
    known_first = memories == "kept" or frame > 0 or part != "offset"
    if known_first:
        assert caught.value.position == start
        assert caught.value.offset == frame
    assert caught.value.file == str(place.dir / "wal.log")
    expect_unchanged(place, before)


@pytest.mark.parametrize("part", ["offset", "length", "crc", "payload"])
def test_a_damaged_last_frame_that_was_synced_is_an_error_and_not_a_torn_tail(
    place: Place, part: str
) -> None:
    fill(place)
    data = bytearray(place.read("wal.log"))
    start = frame_starts(place)[-1]
    data[start + {"offset": 0, "length": 8, "crc": 12, "payload": 40}[part]] ^= 0x40
    place.write("wal.log", bytes(data))
    before = place.contents()
    with pytest.raises(CorruptFrame) as caught:
        place.open()
    assert (caught.value.position, caught.value.offset) == (start, 4)
    expect_unchanged(place, before)


@pytest.mark.parametrize("part", ["offset", "length", "crc", "payload"])
def test_a_damaged_last_frame_that_only_the_checkpoint_knows_of_is_not_cut(
    place: Place, part: str
) -> None:
    fill(place)
    data = bytearray(place.read("wal.log"))
    start = frame_starts(place)[-1]
    data[start + {"offset": 0, "length": 8, "crc": 12, "payload": 40}[part]] ^= 0x40
    place.write("wal.log", bytes(data))
    place.remove("wal.synced")
    before = place.contents()
    with pytest.raises((CorruptFrame, MissingData)):
        place.open()
    expect_unchanged(place, before)


def test_a_whole_last_frame_with_a_wrong_offset_is_corrupt_even_when_nothing_was_published(
    place: Place,
) -> None:
    fill(place)
    data = bytearray(place.read("wal.log"))
    start = frame_starts(place)[-1]
    data[start] = 9
    place.write("wal.log", bytes(data))
    forget_memories(place)
    before = place.contents()
    with pytest.raises(CorruptFrame) as caught:
        place.open()
    assert (caught.value.position, caught.value.offset) == (start, 4)
    expect_unchanged(place, before)


def test_an_impossible_length_below_the_synced_position_is_corrupt(place: Place) -> None:
    fill(place)
    data = bytearray(place.read("wal.log"))
    start = frame_starts(place)[-1]
    data[start + 8 : start + 12] = (0xFFFF_FFFF).to_bytes(4, "little")
    place.write("wal.log", bytes(data))
    before = place.contents()
    with pytest.raises(CorruptFrame, match="impossible frame length below the synced position"):
        place.open()
    expect_unchanged(place, before)


@pytest.mark.parametrize("length", [0, 9, 0xFFFF_FFFF, 64 << 20])
def test_an_impossible_length_with_valid_frames_behind_it_is_corrupt(
    place: Place, length: int
) -> None:
    fill(place)
    data = bytearray(place.read("wal.log"))
    start = frame_starts(place)[2]
    data[start + 8 : start + 12] = length.to_bytes(4, "little")
    place.write("wal.log", bytes(data))
    forget_memories(place)
    before = place.contents()
    with pytest.raises(CorruptFrame, match="valid frames follow") as caught:
        place.open()
    assert (caught.value.position, caught.value.offset) == (start, 2)
    expect_unchanged(place, before)


def test_a_damaged_frame_in_a_sealed_segment_is_an_error_for_the_reader_and_never_skipped(
    place: Place,
) -> None:
    names = fill_segments(place)
    victim = names[1]
    data = bytearray(place.read(victim))
    first, second = place.frames(victim).offsets[:2]
    start = frame_starts(place, victim)[1]
    data[start + 40] ^= 1
    place.write(victim, bytes(data))
    wal = place.open(cache_capacity=0)
    reader = wal.tail_reader(0, end=30)
    got = []
    for _ in range(3):
        with pytest.raises(CorruptFrame) as caught:
            got += list(reader)
        assert caught.value.offset == second
        assert caught.value.position == start
        assert caught.value.file == str(place.dir / victim)
    assert reader.position == second
    assert second == first + 1


def test_a_sealed_segment_cut_at_a_frame_boundary_is_an_error_for_the_reader(place: Place) -> None:
    names = fill_segments(place)
    victim = names[1]
    start = frame_starts(place, victim)[-1]
    place.write(victim, place.read(victim)[:start])
    wal = place.open(cache_capacity=0)
    with pytest.raises(CorruptFrame):
        list(wal.tail_reader(0, end=30))


def test_the_last_sealed_segment_must_end_where_the_newest_begins(place: Place) -> None:
    names = fill_segments(place)
    victim = names[-2]
    start = frame_starts(place, victim)[-1]
    place.write(victim, place.read(victim)[:start])
    before = place.contents()
    with pytest.raises((CorruptFrame, MissingData)):
        place.open()
    expect_unchanged(place, before)


# -- missing files ------------------------------------------------------------------------------


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


# -- checkpoints --------------------------------------------------------------------------------


def broken_checkpoints(good: bytes) -> dict[str, bytes]:
    return {
        "corrupt": good[:20] + bytes([good[20] ^ 1]) + good[21:],
        "truncated": good[: len(good) // 2],
        "empty": b"",
        "zeros": bytes(len(good)),
        "Danube's": DANUBE_CHECKPOINT,
        "a newer version's": good[:4] + b"\x63\x00" + good[6:],
    }


@pytest.mark.parametrize("kind", sorted(broken_checkpoints(bytes(30))))
def test_an_unusable_checkpoint_is_kept_and_rebuilt_from_the_segments(
    place: Place, kind: str
) -> None:
    fill_segments(place)
    good = place.read("wal.ckpt")
    bad = broken_checkpoints(good)[kind]
    place.write("wal.ckpt", bad)
    wal = place.open(rotate_max_bytes=SEGMENT_BYTES)
    assert payloads(wal) == texts(0, 30)
    assert wal.append(b"next") == 30
    wal.shutdown()
    assert place.read("wal.ckpt.unusable") == bad
    rebuilt = decode_checkpoint(place.read("wal.ckpt"), WalCheckpoint)
    assert rebuilt.next_offset == 31
    assert rebuilt.start_offset == 0


def test_danubes_checkpoint_is_the_one_of_its_documents() -> None:
    assert decode_danube_wal_checkpoint(DANUBE_CHECKPOINT).last_offset == 5


def test_a_missing_checkpoint_is_rebuilt_from_the_segments(place: Place) -> None:
    fill_segments(place)
    before = decode_checkpoint(place.read("wal.ckpt"), WalCheckpoint)
    place.remove("wal.ckpt")
    wal = place.open(rotate_max_bytes=SEGMENT_BYTES)
    assert payloads(wal) == texts(0, 30)
    wal.shutdown()
    after = decode_checkpoint(place.read("wal.ckpt"), WalCheckpoint)
    assert after.segments == before.segments


def test_leftover_temporary_files_are_no_obstacle(place: Place) -> None:
    fill(place)
    for name in ("wal.ckpt.tmp", "wal.log.tmp", "wal.failed.tmp", "wal.1.log.tmp"):
        place.write(name, b"half a file")
    wal = place.open()
    assert payloads(wal) == texts(0, 5)
    wal.rotate()
    assert wal.append(b"next", durability="synced") == 5
    wal.shutdown()
    assert payloads(place.open()) == [*texts(0, 5), b"next"]


def test_a_note_of_a_failed_sync_is_gone_after_one_open(place: Place) -> None:
    place.write("wal.failed", b"EIO")
    place.open().shutdown()
    assert "wal.failed" not in place.names()
    fill(place)
    place.write("wal.failed", b"EIO")
    wal = place.open()
    assert "wal.failed" not in place.names()
    assert payloads(wal) == texts(0, 5)


def test_an_index_that_is_missing_or_damaged_is_built_again(place: Place) -> None:
    names = fill_segments(place)
    indexes = [name for name in place.names() if name.endswith(".idx")]
    assert len(indexes) == len(names) - 1
    place.remove(indexes[0])
    for name in indexes[1:]:
        place.write(name, place.read(name)[:-1] + b"?")
    wal = place.open(cache_capacity=0)
    for start in range(30):
        assert payloads(wal, start) == texts(start, 30)


# -- retention ----------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [(0,), (1,), (0, 1), (0, 2), (2,)])
def test_retention_that_was_interrupted_is_finished(place: Place, left: tuple[int, ...]) -> None:
    names = fill_segments(place)
    saved = {name: place.read(name) for name in names}
    wal = place.open(rotate_max_bytes=SEGMENT_BYTES)
    dropped = wal.retain(EVERYTHING, wal.current_offset())
    start = wal.start_offset
    wal.shutdown()
    for number in left:
        assert dropped[number].path.name == names[number]
        place.write(names[number], saved[names[number]])
    wal = place.open(rotate_max_bytes=SEGMENT_BYTES)
    assert wal.start_offset == start
    assert payloads(wal) == texts(start, 30)
    wal.shutdown()
    assert not set(names[:-1]) & set(place.names())


@pytest.mark.parametrize("seed", range(30))
def test_a_power_loss_at_any_moment_of_retention_loses_nothing_that_should_stay(seed: int) -> None:
    rng = random.Random(seed)
    place = in_memory()
    assert place.crash is not None
    fill_segments(place)
    wal = place.open(rotate_max_bytes=SEGMENT_BYTES)
    # Half of what may go, so that the rest has to stay.
    committed = wal.segments()[2].end_offset
    wal.retain(EVERYTHING, committed)
    place.crash.crash(rng)
    wal = place.open(rotate_max_bytes=SEGMENT_BYTES)
    assert wal.start_offset == committed
    assert payloads(wal) == texts(committed, 30)
    place.close()


# -- the lock -----------------------------------------------------------------------------------


def test_a_second_log_in_the_same_process_is_refused(place: Place) -> None:
    wal = place.open()
    wal.append(b"mine", durability="synced")
    with pytest.raises(LogLocked, match="in use by process") as caught:
        place.open()
    assert str(place.dir) in str(caught.value)
    assert wal.append(b"still mine", durability="synced") == 1
    wal.shutdown()
    assert payloads(place.open()) == [b"mine", b"still mine"]


def test_another_process_is_refused_while_the_log_is_open_and_told_who_has_it(
    tmp_path: Path,
) -> None:
    place = on_local_disk(tmp_path)
    wal = place.open()
    wal.append(b"mine", durability="synced")
    script = (
        "import os, sys, pathlib\n"
        "from forebay import Wal, WalSettings\n"
        "from forebay.errors import LogLocked\n"
        "try:\n"
        "    Wal(WalSettings(dir=pathlib.Path(sys.argv[1])))\n"
        "except LogLocked as error:\n"
        "    print(error)\n"
        "    sys.exit(0 if f'process {os.getppid()}' in str(error) else 2)\n"
        "sys.exit(3)\n"
    )
    command = [sys.executable, "-c", script, str(place.dir)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert wal.append(b"still mine", durability="synced") == 1
    wal.shutdown()


def test_a_failed_open_releases_the_lock(place: Place) -> None:
    names = fill_segments(place)
    saved = place.read(names[1])
    place.remove(names[1])
    for _ in range(2):
        with pytest.raises(MissingData):
            place.open()
    place.write(names[1], saved)
    assert payloads(place.open()) == texts(0, 30)


# -- readers of other processes -----------------------------------------------------------------

VIEWER = """
import sys, pathlib
from forebay.wal.view import LogView
view = LogView(pathlib.Path(sys.argv[1]))
for line in sys.stdin:
    view.refresh()
    with view.reader(view.start_offset) as reader:
        messages = list(reader)
    assert [m.offset for m in messages] == list(range(view.start_offset, view.end_offset))
    assert [m.payload.decode() for m in messages] == [f"message {m.offset}" for m in messages]
    print(view.start_offset, view.end_offset, flush=True)
"""


def test_another_process_reads_what_is_published_and_nothing_behind_it(tmp_path: Path) -> None:
    place = on_local_disk(tmp_path)
    wal = place.open(rotate_max_bytes=SEGMENT_BYTES)
    command = [sys.executable, "-c", VIEWER, str(place.dir)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as viewer:
        assert viewer.stdin is not None
        assert viewer.stdout is not None

        def seen() -> tuple[int, int]:
            assert viewer.stdin is not None
            assert viewer.stdout is not None
            print("look", file=viewer.stdin, flush=True)
            start, end = viewer.stdout.readline().split()
            return int(start), int(end)

        assert seen() == (0, 0)
        for payload in texts(0, 20):
            wal.append(payload)
        assert seen() == (0, 0), "buffered messages are not published"
        wal.flush()
        assert seen() == (0, 20)
        for payload in texts(20, 40):
            wal.append(payload, durability="synced")
            assert seen() == (0, wal.current_offset())
        wal.retain(EVERYTHING, 30)
        assert seen() == (wal.start_offset, 40)
        # Bytes that are in the file and not published do not exist.
        newest = wal.segments()[-1].path
        with newest.open("ab") as file:
            file.write(newest.read_bytes()[:30])
        assert seen() == (wal.start_offset, 40)
        viewer.stdin.close()
        assert viewer.wait(60) == 0
    place.close()


def test_a_view_of_a_log_whose_retention_runs_meanwhile_never_shows_a_hole(
    crashing: Place,
) -> None:
    fill_segments(crashing, 60)
    wal = crashing.open(rotate_max_bytes=SEGMENT_BYTES)
    dropped: list[int] = []

    class Racing(CrashDisk):
        """Retention removes files between the listing and the look at each of them."""

        def __init__(self, inner: CrashDisk) -> None:
            self.__dict__.update(inner.__dict__)

        def modified(self, path: Path) -> float:
            modified = super().modified(path)
            if not dropped:
                dropped.extend(s.seq for s in wal.retain(EVERYTHING, 45))
            return modified

    assert crashing.crash is not None
    view = LogView(crashing.dir, disk=Racing(crashing.crash))
    assert dropped
    segments = view.segments()
    for before, after in pairwise(segments):
        assert after.seq == before.seq + 1
        assert before.end_offset == after.first_offset
    assert segments[0].seq > dropped[-1]
    with view.reader(segments[0].first_offset) as reader:
        assert [m.payload for m in reader] == texts(segments[0].first_offset, 60)


def test_a_closed_logs_directory_can_be_opened_by_anybody(place: Place) -> None:
    wal = place.open()
    wal.append(b"one")
    wal.shutdown()
    second = place.open()
    wait_until(lambda: second.current_offset() == 1)
    assert payloads(second) == [b"one"]
