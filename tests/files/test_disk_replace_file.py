"""`replace_file` leaves the old file or the new one, whenever the power fails."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest

from forebay.files.disk import read_file, replace_file
from forebay.testing import CrashDisk, Fault, FaultDisk

ROOT = Path("/disk")
FILE = ROOT / "file"
SEEDS = range(200)


def new_disk() -> CrashDisk:
    disk = CrashDisk()
    disk.make_dirs(ROOT)
    return disk


def read(disk: CrashDisk) -> bytes | None:
    return read_file(disk, FILE, bytes_max=1 << 20) if disk.exists(FILE) else None


def calls_of_replace_file() -> int:
    """How many calls of the disk `replace_file` makes, found by letting more and more succeed."""
    for passed in range(100):
        disk = FaultDisk(new_disk())
        disk.inject(Fault("any", errno.EIO, skip=passed, times=None))
        try:
            replace_file(disk, FILE, b"new")
        except OSError:
            continue
        return passed
    raise AssertionError("replace_file never ended")


@pytest.mark.parametrize("old", [None, b"", b"the old file"])
@pytest.mark.parametrize("passed", range(calls_of_replace_file() + 1))
def test_replace_file_is_old_or_new_at_whichever_call_the_power_fails(
    passed: int, old: bytes | None
) -> None:
    new = b"the new file, and longer"
    for seed in [None, *SEEDS]:
        crash = new_disk()
        if old is not None:
            replace_file(crash, FILE, old)
        disk = FaultDisk(crash)
        disk.inject(Fault("any", errno.EIO, skip=passed, times=None))
        allowed: list[bytes | None] = [new]
        try:
            replace_file(disk, FILE, new)
        except OSError:
            allowed = [old, new]
        crash.crash(None if seed is None else random.Random(seed))
        assert read(crash) in allowed
        replace_file(crash, FILE, b"next boot")
        assert crash.list_dir(ROOT) == ["file"]
