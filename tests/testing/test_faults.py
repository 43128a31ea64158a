"""What `FaultDisk` adds to the disk inside: failures by plan, a full disk, short writes."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.files.disk import AppendFile, append_all, read_file, write_all_at
from forebay.testing import CrashDisk, Fault, FaultDisk

ROOT = Path("/disk")
FILE = ROOT / "file"


def new_disk(short_writes: random.Random | None = None) -> tuple[FaultDisk, CrashDisk]:
    crash = CrashDisk()
    crash.make_dirs(ROOT)
    return FaultDisk(crash, short_writes=short_writes), crash


def new_file(disk: FaultDisk, data: bytes = b"") -> AppendFile:
    file = disk.create(FILE)
    append_all(file, data)
    file.sync()
    disk.sync_dir(ROOT)
    return file


def read(disk: FaultDisk | CrashDisk) -> bytes:
    return read_file(disk, FILE, bytes_max=1 << 20)


def error_of(call: Callable[..., object], *arguments: object) -> int | None:
    with pytest.raises(OSError, match="Errno") as failure:
        call(*arguments)
    return failure.value.errno


def test_each_named_call_fails_once_and_then_works() -> None:
    disk, _ = new_disk()
    file = new_file(disk, b"data")
    reader = disk.open_read(FILE)
    buffer = memoryview(bytearray(4))
    calls: dict[str, Callable[[], object]] = {
        "append": lambda: file.append(b"x"),
        "create": lambda: disk.create(ROOT / "created"),
        "exists": lambda: disk.exists(FILE),
        "in_place": file.in_place,
        "list_dir": lambda: disk.list_dir(ROOT),
        "make_dirs": lambda: disk.make_dirs(ROOT / "made"),
        "modified": lambda: disk.modified(FILE),
        "open_append": lambda: disk.open_append(FILE),
        "open_locked": lambda: disk.open_locked(ROOT / "lock"),
        "open_read": lambda: disk.open_read(FILE),
        "read_into": lambda: reader.read_into(buffer, 0),
        "replace": lambda: disk.replace(ROOT / "created", ROOT / "renamed"),
        "size": lambda: disk.size(FILE),
        "sync": file.sync,
        "sync_dir": lambda: disk.sync_dir(ROOT),
        "truncate": lambda: file.truncate(2),
        "unlink": lambda: disk.unlink(ROOT / "renamed"),
        "write_at": lambda: file.write_at(b"x", 0),
    }
    for fired, (operation, call) in enumerate(calls.items(), start=1):
        disk.inject(Fault(operation, errno.EIO))  # type: ignore[arg-type]
        assert error_of(call) == errno.EIO, operation
        assert disk.fired == fired
        call()
        assert disk.fired == fired


def test_a_failed_call_does_not_reach_the_disk() -> None:
    disk, _ = new_disk()
    file = new_file(disk, b"data")
    disk.inject(Fault("any", errno.EIO, times=None))
    for call in (
        lambda: file.append(b"x"),
        lambda: file.write_at(b"x", 0),
        lambda: file.truncate(0),
        lambda: disk.unlink(FILE),
        lambda: disk.replace(FILE, ROOT / "renamed"),
        lambda: disk.create(ROOT / "other"),
    ):
        assert error_of(call) == errno.EIO
    disk.clear()
    assert disk.list_dir(ROOT) == ["file"]
    assert read(disk) == b"data"


def test_a_fault_lets_calls_pass_first_and_fires_as_often_as_told() -> None:
    disk, _ = new_disk()
    file = new_file(disk)
    disk.inject(Fault("append", errno.EIO, skip=2, times=2))
    outcomes = []
    for letter in (b"a", b"b", b"c", b"d", b"e"):
        try:
            file.append(letter)
            outcomes.append("took")
        except OSError:
            outcomes.append("failed")
    assert outcomes == ["took", "took", "failed", "failed", "took"]
    assert read(disk) == b"abe"
    assert disk.fired == 2


def test_a_fault_without_end_ends_when_cleared() -> None:
    disk, _ = new_disk()
    disk.inject(Fault("list_dir", errno.EMFILE, times=None))
    for _ in range(5):
        assert error_of(disk.list_dir, ROOT) == errno.EMFILE
    disk.clear()
    assert disk.list_dir(ROOT) == []
    assert disk.fired == 5


def test_a_fault_strikes_the_paths_it_names() -> None:
    disk, _ = new_disk()
    disk.inject(Fault("create", errno.EACCES, path=".index", times=None))
    disk.inject(Fault("create", errno.EROFS, path=lambda path: path.name == "x", times=None))
    disk.create(ROOT / "a.log")
    assert error_of(disk.create, ROOT / "a.index") == errno.EACCES
    assert error_of(disk.create, ROOT / "x") == errno.EROFS


def test_a_fault_on_replace_may_name_either_path() -> None:
    disk, _ = new_disk()
    new_file(disk)
    for named in ("file", "renamed"):
        disk.inject(Fault("replace", errno.EIO, path=named))
        assert error_of(disk.replace, FILE, ROOT / "renamed") == errno.EIO
    assert disk.list_dir(ROOT) == ["file"]


def test_a_partial_fault_takes_some_bytes_and_fails_the_next_call() -> None:
    disk, _ = new_disk()
    file = new_file(disk)
    disk.inject(Fault("append", errno.ENOSPC, partial=3))
    assert error_of(append_all, file, b"abcdef") == errno.ENOSPC
    assert read(disk) == b"abc"
    append_all(file, b"def")
    assert read(disk) == b"abcdef"


def test_a_fault_that_means_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="fsync"):
        Fault("fsync", errno.EIO)  # type: ignore[arg-type]
    for operation, partial in (("sync", 3), ("append", 0)):
        with pytest.raises(ValueError, match="partial"):
            Fault(operation, errno.EIO, partial=partial)  # type: ignore[arg-type]


def test_a_stopped_machine_loses_bytes_only_as_a_crash_does() -> None:
    disk, crash = new_disk()
    file = new_file(disk, b"synced")
    file.append(b" and more")
    disk.inject(Fault("any", errno.EIO))
    assert error_of(file.sync) == errno.EIO
    file.sync()
    crash.crash()
    assert read(disk) == b"synced and more"


def test_a_full_disk_takes_what_fits_and_then_refuses() -> None:
    disk, _ = new_disk()
    file = new_file(disk)
    disk.space = 4
    assert file.append(b"abcdef") == 4
    assert error_of(file.append, b"ef") == errno.ENOSPC
    assert file.append(b"") == 0
    assert read(disk) == b"abcd"
    assert disk.space == 0


def test_a_full_disk_can_be_overwritten_but_not_extended() -> None:
    disk, _ = new_disk()
    file = new_file(disk, b"0123")
    disk.space = 0
    assert file.write_at(b"abc", 2) == 2
    assert error_of(file.write_at, b"c", 4) == errno.ENOSPC
    assert read(disk) == b"01ab"


def test_space_comes_back_when_bytes_are_cut_off_replaced_or_unlinked() -> None:
    disk, _ = new_disk()
    file = new_file(disk, b"0123456789")
    disk.space = 0
    file.truncate(7)
    assert disk.space == 3
    disk.create(ROOT / "other").append(b"ab")
    disk.replace(ROOT / "other", FILE)
    assert disk.space == 8
    disk.unlink(FILE)
    assert disk.space == 10


def test_a_failed_append_takes_no_space() -> None:
    disk, _ = new_disk()
    file = new_file(disk)
    disk.space = 10
    file.close()
    assert error_of(file.append, b"abc") == errno.EBADF
    assert disk.space == 10


@given(data=st.binary(max_size=200), seed=st.integers(0, 2**32))
def test_short_writes_are_short_and_lose_nothing(data: bytes, seed: int) -> None:
    disk, _ = new_disk(random.Random(seed))
    file = new_file(disk)
    rest = data
    while rest:
        taken = file.append(rest)
        assert 1 <= taken <= len(rest)
        rest = rest[taken:]
    assert read(disk) == data
    write_all_at(file, data[::-1], 0)
    assert read(disk) == data[::-1]
