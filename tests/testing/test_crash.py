"""What a `CrashDisk` holds after a power loss and after a kill."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.files.disk import AppendFile, append_all, read_file
from forebay.testing import CrashDisk
from support.disks import errno_text

ROOT = Path("/disk")
FILE = ROOT / "file"
SEEDS = range(200)
seeds = st.integers(0, 2**32)


def new_disk() -> CrashDisk:
    disk = CrashDisk()
    disk.make_dirs(ROOT)
    return disk


def new_file(disk: CrashDisk, path: Path = FILE, data: bytes = b"") -> AppendFile:
    """A file whose name and first bytes are durable."""
    file = disk.create(path)
    append_all(file, data)
    file.sync()
    disk.sync_dir(path.parent)
    return file


def read(disk: CrashDisk, path: Path = FILE) -> bytes:
    return read_file(disk, path, bytes_max=1 << 20)


def test_synced_bytes_survive_and_unsynced_ones_vanish() -> None:
    disk = new_disk()
    file = new_file(disk, data=b"synced")
    file.append(b" and not")
    disk.crash()
    assert read(disk) == b"synced"


def test_a_synced_file_without_a_synced_name_vanishes() -> None:
    disk = new_disk()
    file = disk.create(FILE)
    file.append(b"data")
    file.sync()
    disk.crash()
    assert disk.list_dir(ROOT) == []


def test_a_synced_name_without_synced_bytes_is_an_empty_file() -> None:
    disk = new_disk()
    disk.create(FILE).append(b"data")
    disk.sync_dir(ROOT)
    disk.crash()
    assert read(disk) == b""


def test_an_unsynced_unlink_comes_back_with_its_bytes() -> None:
    disk = new_disk()
    new_file(disk, data=b"data")
    disk.unlink(FILE)
    disk.crash()
    assert read(disk) == b"data"
    disk.unlink(FILE)
    disk.sync_dir(ROOT)
    disk.crash()
    assert not disk.exists(FILE)


def test_an_unsynced_overwrite_and_truncation_are_undone() -> None:
    disk = new_disk()
    file = new_file(disk, data=b"0123456789")
    file.write_at(b"abc", 2)
    file.write_at(b"xyz", 4)
    file.truncate(5)
    file.append(b"more than there was before")
    file.write_at(b"!", 0)
    disk.crash()
    assert read(disk) == b"0123456789"


def test_made_directories_survive_with_their_parents() -> None:
    disk = new_disk()
    disk.make_dirs(ROOT / "one" / "two")
    disk.crash()
    assert disk.list_dir(ROOT / "one") == ["two"]


@pytest.mark.parametrize("asked", ["topic", "topic/below"])
def test_a_directory_left_unsynced_by_a_killed_process_is_synced_by_the_next(asked: str) -> None:
    disk = new_disk()
    disk.make_dirs(ROOT / "unsynced")
    disk.replace(ROOT / "unsynced", ROOT / "topic")
    disk.kill()
    disk.make_dirs(ROOT / asked)
    disk.crash()
    assert disk.exists(ROOT / asked)


def test_what_survived_a_crash_survives_the_next() -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        disk = new_disk()
        new_file(disk, data=b"synced").append(b" and not")
        disk.create(ROOT / "other")
        disk.crash(rng)
        names, data = disk.list_dir(ROOT), read(disk)
        disk.crash(rng)
        assert (disk.list_dir(ROOT), read(disk)) == (names, data)


@given(synced=st.binary(max_size=20), unsynced=st.binary(max_size=20), seed=seeds)
def test_an_unsynced_suffix_leaves_a_prefix_and_perhaps_zeros(
    synced: bytes, unsynced: bytes, seed: int
) -> None:
    disk = new_disk()
    new_file(disk, data=synced).append(unsynced)
    disk.crash(random.Random(seed))
    left = read(disk)
    assert left.startswith(synced)
    suffix = left[len(synced) :]
    possible = (unsynced[:cut] + bytes(len(suffix) - cut) for cut in range(len(suffix) + 1))
    assert len(suffix) <= len(unsynced)
    assert suffix in possible


def outcomes_of_a_suffix(*, torn: bool) -> set[bytes]:
    outcomes = set()
    for seed in SEEDS:
        disk = new_disk()
        new_file(disk, data=b"..").append(b"ab")
        disk.crash(random.Random(seed), torn=torn)
        outcomes.add(read(disk))
    return outcomes


def test_every_fate_of_an_unsynced_suffix_is_met() -> None:
    assert outcomes_of_a_suffix(torn=True) == {
        b"..",
        b"..a",
        b"..ab",
        b"..\0",
        b"..\0\0",
        b"..a\0",
    }
    assert outcomes_of_a_suffix(torn=False) == {b"..", b"..ab"}


def test_every_fate_of_an_unsynced_overwrite_is_met() -> None:
    outcomes = set()
    for seed in SEEDS:
        disk = new_disk()
        new_file(disk, data=b".00.").write_at(b"11", 1)
        disk.crash(random.Random(seed))
        outcomes.add(read(disk))
    assert outcomes == {b".00.", b".10.", b".01.", b".11."}


def test_bytes_cut_off_by_an_unsynced_truncation_may_come_back() -> None:
    outcomes = set()
    for seed in SEEDS:
        disk = new_disk()
        file = new_file(disk, data=b"..")
        file.append(b"a")
        file.truncate(2)
        disk.crash(random.Random(seed))
        outcomes.add(read(disk))
    assert outcomes == {b"..", b"..a", b"..\0"}


def test_an_overwrite_that_was_cut_off_leaves_nothing_in_what_was_appended_there() -> None:
    outcomes = set()
    for seed in SEEDS:
        disk = new_disk()
        file = new_file(disk, data=b"..00")
        file.write_at(b"11", 2)
        file.truncate(2)
        file.append(b"ab")
        disk.crash(random.Random(seed))
        outcomes.add(read(disk)[2:])
    truncation_lost = {b"00", b"01", b"10", b"11"}
    truncation_kept = {b"", b"a", b"ab", b"\0", b"\0\0", b"a\0"}
    assert outcomes == truncation_lost | truncation_kept


def test_unsynced_names_survive_one_by_one() -> None:
    outcomes = set()
    for seed in SEEDS:
        disk = new_disk()
        disk.create(ROOT / "a")
        disk.create(ROOT / "b")
        disk.crash(random.Random(seed))
        outcomes.add(tuple(disk.list_dir(ROOT)))
    assert outcomes == {(), ("a",), ("b",), ("a", "b")}


def test_an_unsynced_rename_is_there_or_not_and_never_half() -> None:
    outcomes = set()
    for seed in SEEDS:
        disk = new_disk()
        new_file(disk, ROOT / "source", b"new")
        new_file(disk, ROOT / "target", b"old")
        disk.replace(ROOT / "source", ROOT / "target")
        disk.crash(random.Random(seed))
        outcomes.add(tuple((name, read(disk, ROOT / name)) for name in disk.list_dir(ROOT)))
    assert outcomes == {(("source", b"new"), ("target", b"old")), (("target", b"new"),)}


def test_a_new_file_under_the_old_name_does_not_survive_without_the_rename_before_it() -> None:
    outcomes = set()
    for seed in SEEDS:
        disk = new_disk()
        new_file(disk, ROOT / "a", b"old")
        disk.replace(ROOT / "a", ROOT / "b")
        disk.create(ROOT / "a")
        disk.crash(random.Random(seed))
        outcomes.add(tuple(names_and_bytes(disk).items()))
    assert outcomes == {(("a", b"old"),), (("b", b"old"),), (("a", b""), ("b", b"old"))}


NAME_STEPS = st.lists(
    st.tuples(
        st.sampled_from(("create", "replace", "unlink", "sync_dir")),
        st.sampled_from("abc"),
        st.sampled_from("abc"),
    ),
    max_size=15,
)


def run_name_step(disk: CrashDisk, step: tuple[str, str, str], number: int) -> None:
    operation, name, other = step
    if operation == "sync_dir":
        disk.sync_dir(ROOT)
    elif operation == "create" and not disk.exists(ROOT / name):
        file = disk.create(ROOT / name)
        file.append(b"%d" % number)
        file.sync()
    elif operation == "replace" and disk.exists(ROOT / name):
        disk.replace(ROOT / name, ROOT / other)
    elif operation == "unlink" and disk.exists(ROOT / name):
        disk.unlink(ROOT / name)


def names_and_bytes(disk: CrashDisk) -> dict[str, bytes]:
    return {name: read(disk, ROOT / name) for name in disk.list_dir(ROOT)}


@given(NAME_STEPS)
def test_a_crash_without_dice_leaves_the_last_synced_names_exactly(
    steps: list[tuple[str, str, str]],
) -> None:
    disk = new_disk()
    durable = names_and_bytes(disk)
    for number, step in enumerate(steps):
        run_name_step(disk, step, number)
        if step[0] == "sync_dir":
            durable = names_and_bytes(disk)
    disk.crash()
    assert names_and_bytes(disk) == durable


@given(NAME_STEPS, seeds)
def test_a_file_never_has_two_names_and_loses_its_last_only_where_that_was_asked(
    steps: list[tuple[str, str, str]], seed: int
) -> None:
    disk = new_disk()
    durable: set[bytes] = set()
    gone: set[bytes] = set()
    for number, step in enumerate(steps):
        before = set(names_and_bytes(disk).values())
        run_name_step(disk, step, number)
        gone |= before - set(names_and_bytes(disk).values())
        if step[0] == "sync_dir":
            durable = set(names_and_bytes(disk).values())
    disk.crash(random.Random(seed))
    left = list(names_and_bytes(disk).values())
    assert len(left) == len(set(left))
    assert durable - gone <= set(left)


def test_a_rename_of_unsynced_bytes_can_lose_both_files() -> None:
    outcomes = set()
    for seed in SEEDS:
        disk = new_disk()
        new_file(disk, data=b"old")
        disk.create(ROOT / "tmp").append(b"new")
        disk.replace(ROOT / "tmp", FILE)
        disk.sync_dir(ROOT)
        disk.crash(random.Random(seed))
        outcomes.add(read(disk))
    assert b"" in outcomes
    assert b"old" not in outcomes


@pytest.mark.parametrize("end", [CrashDisk.crash, CrashDisk.kill])
def test_handles_are_dead_and_locks_free_after_a_crash_and_a_kill(
    end: Callable[[CrashDisk], None],
) -> None:
    disk = new_disk()
    file = new_file(disk, data=b"data")
    reader = disk.open_read(FILE)
    holder = disk.open_locked(ROOT / "lock")
    end(disk)
    for use in (
        lambda: file.append(b"x"),
        lambda: file.write_at(b"x", 0),
        lambda: file.truncate(0),
        file.sync,
        file.size,
        reader.size,
        lambda: reader.read_into(memoryview(bytearray(1)), 0),
        lambda: holder.append(b"x"),
    ):
        with pytest.raises(OSError, match=errno_text(errno.EBADF)):
            use()
    next_holder = disk.open_locked(ROOT / "lock")
    holder.close()
    with pytest.raises(BlockingIOError):
        disk.open_locked(ROOT / "lock")
    next_holder.close()


def test_a_kill_keeps_what_was_written_and_a_later_crash_does_not() -> None:
    disk = new_disk()
    new_file(disk, data=b"synced").append(b" and not")
    disk.create(ROOT / "unsynced")
    disk.kill()
    assert read(disk) == b"synced and not"
    assert disk.list_dir(ROOT) == ["file", "unsynced"]
    disk.crash()
    assert read(disk) == b"synced"
    assert disk.list_dir(ROOT) == ["file"]


def test_the_same_seed_leaves_the_same_disk() -> None:
    def crashed(seed: int) -> dict[str, bytes]:
        disk = new_disk()
        for name in "abcdefgh":
            new_file(disk, ROOT / name, b"synced").append(b" and not")
            disk.create(ROOT / (name * 2))
        disk.crash(random.Random(seed))
        return names_and_bytes(disk)

    assert all(crashed(seed) == crashed(seed) for seed in range(20))
