"""What a failed sync leaves: bytes that can be read, that a later sync does not write, and that a
crash takes away. The syncs that succeed are checked against the same model.
"""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.files.disk import AppendFile, append_all, read_file, write_all_at
from forebay.testing import CrashDisk, Fault, FaultDisk
from support.disks import errno_text

FILE = Path("/file")
seeds = st.integers(0, 2**32)


def new_disk() -> tuple[FaultDisk, CrashDisk]:
    crash = CrashDisk()
    return FaultDisk(crash), crash


def new_file(disk: FaultDisk, data: bytes = b"") -> AppendFile:
    file = disk.create(FILE)
    append_all(file, data)
    file.sync()
    disk.sync_dir(FILE.parent)
    return file


def read(disk: FaultDisk | CrashDisk) -> bytes:
    return read_file(disk, FILE, bytes_max=1 << 20)


def fail_sync(disk: FaultDisk, file: AppendFile) -> None:
    disk.inject(Fault("sync", errno.EIO))
    with pytest.raises(OSError, match=errno_text(errno.EIO)):
        file.sync()


@pytest.mark.parametrize("seed", [None, *range(20)])
def test_bytes_of_a_failed_sync_never_become_durable_by_trying_again(seed: int | None) -> None:
    disk, crash = new_disk()
    file = new_file(disk, b"synced")
    file.append(b" lost")
    file.write_at(b"S", 0)
    fail_sync(disk, file)
    assert read(disk) == b"Synced lost"
    file.sync()
    crash.crash(None if seed is None else random.Random(seed))
    zeros_max = 0 if seed is None else len(b" lost")
    assert read(disk) in [b"synced" + bytes(zeros) for zeros in range(zeros_max + 1)]


def test_bytes_synced_after_a_failed_sync_are_durable_behind_a_hole_of_zeros() -> None:
    disk, crash = new_disk()
    file = new_file(disk, b"synced")
    file.append(b" lost")
    fail_sync(disk, file)
    file.append(b" later")
    file.sync()
    crash.crash()
    assert read(disk) == b"synced" + bytes(5) + b" later"


def test_bytes_of_a_failed_sync_are_durable_once_written_again() -> None:
    disk, crash = new_disk()
    file = new_file(disk, b"synced")
    file.append(b" again")
    fail_sync(disk, file)
    write_all_at(file, b" again", 6)
    file.sync()
    crash.crash()
    assert read(disk) == b"synced again"


def test_bytes_of_a_failed_sync_that_were_cut_off_do_not_harm_what_follows() -> None:
    disk, crash = new_disk()
    file = new_file(disk, b"synced")
    file.append(b" lost")
    fail_sync(disk, file)
    file.truncate(6)
    file.append(b" anew")
    file.sync()
    crash.crash()
    assert read(disk) == b"synced anew"


def test_an_overwrite_of_an_overwrite_is_lost_down_to_the_synced_bytes() -> None:
    disk, crash = new_disk()
    file = new_file(disk, b"0000")
    file.write_at(b"11", 0)
    file.write_at(b"22", 1)
    fail_sync(disk, file)
    file.sync()
    crash.crash()
    assert read(disk) == b"0000"


def test_lost_bytes_written_again_are_still_lost_until_the_next_sync() -> None:
    disk, crash = new_disk()
    file = new_file(disk, b"0000")
    file.write_at(b"11", 1)
    fail_sync(disk, file)
    file.write_at(b"22", 1)
    crash.crash()
    assert read(disk) == b"0000"


def test_bytes_that_come_back_after_a_forgotten_truncation_are_where_they_were() -> None:
    outcomes = set()
    for seed in range(200):
        disk, crash = new_disk()
        file = new_file(disk)
        file.append(b"lost")
        fail_sync(disk, file)
        file.append(b"ab")
        file.truncate(2)
        crash.crash(random.Random(seed))
        outcomes.add(read(disk))
    assert bytes(4) + b"ab" in outcomes
    assert all(left[:4].count(0) == len(left[:4]) for left in outcomes)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.binary(min_size=1, max_size=9), st.just(0)),
        st.tuples(st.just("write_at"), st.binary(min_size=1, max_size=9), st.integers(0, 20)),
        st.tuples(st.just("truncate"), st.just(b""), st.integers(0, 25)),
        st.tuples(st.sampled_from(("sync", "fail")), st.just(b""), st.just(0)),
    ),
    max_size=15,
)


def run_step(file: AppendFile, disk: FaultDisk, step: tuple[str, bytes, int]) -> None:
    operation, data, number = step
    if operation == "append":
        file.append(data)
    elif operation == "write_at":
        file.write_at(data, min(number, file.size()))
    elif operation == "truncate":
        file.truncate(number)
    elif operation == "sync":
        file.sync()
    else:
        fail_sync(disk, file)


class ModelFile:
    """The same file, modelled byte by byte: slow, but simple."""

    def __init__(self) -> None:
        self.device = b""
        self.live = bytearray()
        self.dirty: set[int] = set()
        self.size_min = 0

    def run(self, step: tuple[str, bytes, int]) -> None:
        operation, data, number = step
        if operation == "append":
            self.write(data, len(self.live))
        elif operation == "write_at":
            self.write(data, min(number, len(self.live)))
        elif operation == "truncate":
            self.write(bytes(max(0, number - len(self.live))), len(self.live))
            del self.live[number:]
            self.dirty = {position for position in self.dirty if position < number}
            self.size_min = min(self.size_min, number)
        else:
            self.write_back(self.dirty if operation == "sync" else set())

    def write(self, data: bytes, position: int) -> None:
        self.live[position : position + len(data)] = data
        self.dirty.update(range(position, position + len(data)))

    def write_back(self, positions: set[int]) -> None:
        image = bytearray(self.device[: self.size_min])
        image += bytes(max(0, max(positions, default=-1) + 1 - len(image)))
        for position in positions:
            image[position] = self.live[position]
        self.device = bytes(image)
        self.dirty = set()
        self.size_min = len(self.live)


@settings(max_examples=500)
@given(steps=STEPS)
def test_a_crash_without_dice_leaves_exactly_what_was_written_and_synced(
    steps: list[tuple[str, bytes, int]],
) -> None:
    disk, crash = new_disk()
    file = new_file(disk)
    model = ModelFile()
    for step in steps:
        run_step(file, disk, step)
        model.run(step)
        assert read(crash) == model.live
    crash.crash()
    assert read(crash) == model.device


@given(steps=STEPS, seed=st.none() | seeds)
def test_a_sync_after_everything_was_rewritten_makes_it_durable(
    steps: list[tuple[str, bytes, int]], seed: int | None
) -> None:
    disk, crash = new_disk()
    file = new_file(disk)
    for step in steps:
        run_step(file, disk, step)
    live = read(crash)
    file.write_at(live, 0)
    file.sync()
    crash.crash(None if seed is None else random.Random(seed))
    assert read(crash) == live


@given(steps=STEPS, seed=st.none() | seeds)
def test_a_crash_invents_no_bytes(steps: list[tuple[str, bytes, int]], seed: int | None) -> None:
    disk, crash = new_disk()
    file = new_file(disk)
    seen: dict[int, set[int]] = {}
    for step in steps:
        run_step(file, disk, step)
        for position, byte in enumerate(read(crash)):
            seen.setdefault(position, {0}).add(byte)
    crash.crash(None if seed is None else random.Random(seed))
    assert all(byte in seen[position] for position, byte in enumerate(read(crash)))
