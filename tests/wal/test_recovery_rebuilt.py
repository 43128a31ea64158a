"""What opening a log rebuilds or finishes: checkpoints, indexes, interrupted retention."""

from __future__ import annotations

import random

import pytest

from forebay.format.checkpoint import WalCheckpoint, decode_checkpoint, decode_danube_wal_checkpoint
from support.closed_logs import EVERYTHING, SEGMENT_BYTES, fill, fill_segments
from support.disks import LogDirectory, in_memory, payloads, texts

DANUBE_CHECKPOINT = bytes.fromhex(
    "00000000000000000500000000000000010000000000000017000000000000002f772f64656661756c742f74312f"
    "77616c2e312e6c6f670100000000000000000000000000000015000000000000002f772f64656661756c742f7431"
    "2f77616c2e6c6f67000000000000000001090000000000000077616c2e312e6c6f6700010300000000000000"
)


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
    directory: LogDirectory, kind: str
) -> None:
    fill_segments(directory)
    good = directory.read("wal.ckpt")
    bad = broken_checkpoints(good)[kind]
    directory.write("wal.ckpt", bad)
    wal = directory.open(rotate_max_bytes=SEGMENT_BYTES)
    assert payloads(wal) == texts(0, 30)
    assert wal.append(b"next") == 30
    wal.shutdown()
    assert directory.read("wal.ckpt.unusable") == bad
    rebuilt = decode_checkpoint(directory.read("wal.ckpt"), WalCheckpoint)
    assert rebuilt.next_offset == 31
    assert rebuilt.start_offset == 0


def test_danubes_checkpoint_is_the_one_of_its_documents() -> None:
    assert decode_danube_wal_checkpoint(DANUBE_CHECKPOINT).last_offset == 5


def test_a_missing_checkpoint_is_rebuilt_from_the_segments(directory: LogDirectory) -> None:
    fill_segments(directory)
    before = decode_checkpoint(directory.read("wal.ckpt"), WalCheckpoint)
    directory.remove("wal.ckpt")
    wal = directory.open(rotate_max_bytes=SEGMENT_BYTES)
    assert payloads(wal) == texts(0, 30)
    wal.shutdown()
    after = decode_checkpoint(directory.read("wal.ckpt"), WalCheckpoint)
    assert after.segments == before.segments


def test_leftover_temporary_files_are_no_obstacle(directory: LogDirectory) -> None:
    fill(directory)
    for name in ("wal.ckpt.tmp", "wal.log.tmp", "wal.failed.tmp", "wal.1.log.tmp"):
        directory.write(name, b"half a file")
    wal = directory.open()
    assert payloads(wal) == texts(0, 5)
    wal.rotate()
    assert wal.append(b"next", durability="synced") == 5
    wal.shutdown()
    assert payloads(directory.open()) == [*texts(0, 5), b"next"]


def test_a_note_of_a_failed_sync_is_gone_after_one_open(directory: LogDirectory) -> None:
    directory.write("wal.failed", b"EIO")
    directory.open().shutdown()
    assert "wal.failed" not in directory.names()
    fill(directory)
    directory.write("wal.failed", b"EIO")
    wal = directory.open()
    assert "wal.failed" not in directory.names()
    assert payloads(wal) == texts(0, 5)


def test_an_index_that_is_missing_or_damaged_is_built_again(directory: LogDirectory) -> None:
    names = fill_segments(directory)
    indexes = [name for name in directory.names() if name.endswith(".idx")]
    assert len(indexes) == len(names) - 1
    directory.remove(indexes[0])
    for name in indexes[1:]:
        directory.write(name, directory.read(name)[:-1] + b"?")
    wal = directory.open(cache_capacity=0)
    for start in range(30):
        assert payloads(wal, start) == texts(start, 30)


# -- retention ----------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [(0,), (1,), (0, 1), (0, 2), (2,)])
def test_retention_that_was_interrupted_is_finished(
    directory: LogDirectory, left: tuple[int, ...]
) -> None:
    names = fill_segments(directory)
    saved = {name: directory.read(name) for name in names}
    wal = directory.open(rotate_max_bytes=SEGMENT_BYTES)
    dropped = wal.retain(EVERYTHING, wal.current_offset())
    start = wal.start_offset
    wal.shutdown()
    for number in left:
        assert dropped[number].path.name == names[number]
        directory.write(names[number], saved[names[number]])
    wal = directory.open(rotate_max_bytes=SEGMENT_BYTES)
    assert wal.start_offset == start
    assert payloads(wal) == texts(start, 30)
    wal.shutdown()
    assert not set(names[:-1]) & set(directory.names())


@pytest.mark.parametrize("seed", range(30))
def test_a_power_loss_at_any_moment_of_retention_loses_nothing_that_should_stay(seed: int) -> None:
    rng = random.Random(seed)
    directory = in_memory()
    assert directory.crash is not None
    fill_segments(directory)
    wal = directory.open(rotate_max_bytes=SEGMENT_BYTES)
    # Only some segments may be removed: the others must stay.
    committed = wal.segments()[2].end_offset
    wal.retain(EVERYTHING, committed)
    directory.crash.crash(rng)
    wal = directory.open(rotate_max_bytes=SEGMENT_BYTES)
    assert wal.start_offset == committed
    assert payloads(wal) == texts(committed, 30)
    directory.close()
