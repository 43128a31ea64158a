"""What only the real disk does, and that the doubles make the same files."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.files.disk import AppendFile, Disk, append_all, read_file, write_all_at
from forebay.files.local import LocalDisk
from forebay.testing import CrashDisk, FaultDisk
from support.disks import open_files


class RecordingDisk(LocalDisk):
    __slots__ = ("synced",)

    def __init__(self) -> None:
        self.synced: list[Path] = []

    def sync_dir(self, path: Path) -> None:
        self.synced.append(path)
        super().sync_dir(path)


def test_the_local_disk_syncs_every_name_it_makes_and_the_one_it_found(tmp_path: Path) -> None:
    disk = RecordingDisk()
    disk.make_dirs(tmp_path / "one" / "two")
    assert disk.synced == [tmp_path.parent, tmp_path, tmp_path / "one"]
    disk.synced.clear()
    disk.make_dirs(tmp_path / "one" / "two")
    assert disk.synced == [tmp_path / "one"]


def test_the_local_disk_keeps_no_descriptor_of_a_refused_lock(tmp_path: Path) -> None:
    disk = LocalDisk()
    holder = disk.open_locked(tmp_path / "lock")
    before = open_files(tmp_path)
    with pytest.raises(BlockingIOError):
        disk.open_locked(tmp_path / "lock")
    assert open_files(tmp_path) == before
    holder.close()


FILE_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.binary(max_size=40), st.just(0)),
        st.tuples(st.just("write_at"), st.binary(max_size=40), st.integers(0, 60)),
        st.tuples(st.just("truncate"), st.just(b""), st.integers(0, 80)),
        st.tuples(st.just("sync"), st.just(b""), st.just(0)),
    ),
    max_size=20,
)


def run_steps(file: AppendFile, steps: list[tuple[str, bytes, int]]) -> Iterator[int]:
    """Yields the file's size after each step; a position past the end becomes the end."""
    for step, data, number in steps:
        if step == "append":
            append_all(file, data)
        elif step == "write_at":
            write_all_at(file, data, min(number, file.size()))
        elif step == "truncate":
            file.truncate(number)
        else:
            file.sync()
        yield file.size()


def outcome(disk: Disk, root: Path, steps: list[tuple[str, bytes, int]]) -> tuple[list[int], bytes]:
    disk.make_dirs(root)
    file = disk.create(root / "file")
    sizes = list(run_steps(file, steps))
    file.close()
    return sizes, read_file(disk, root / "file", bytes_max=1 << 20)


@given(steps=FILE_STEPS, seed=st.integers(0, 2**32))
def test_every_disk_makes_the_same_file_of_the_same_steps(
    steps: list[tuple[str, bytes, int]], seed: int
) -> None:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as temporary:
        local = outcome(LocalDisk(), Path(temporary, "whole"), steps)
        short = outcome(FaultDisk(LocalDisk(), short_writes=rng), Path(temporary, "short"), steps)
    assert local == short
    assert local == outcome(CrashDisk(), Path("/disk"), steps)
    assert local == outcome(FaultDisk(CrashDisk(), short_writes=rng), Path("/disk"), steps)
