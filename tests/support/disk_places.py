"""Every kind of disk, each with an empty directory, for the contract suites of `Disk`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from forebay.files.disk import Disk, append_all, read_file
from forebay.files.local import LocalDisk
from forebay.testing import CrashDisk, FaultDisk

SHORT_WRITES_SEED = 20_240_229


@dataclass(frozen=True)
class Place:
    """A disk and an empty directory on it."""

    disk: Disk
    root: Path

    def make(self, name: str, data: bytes = b"") -> Path:
        path = self.root / name
        file = self.disk.create(path)
        append_all(file, data)
        file.close()
        return path

    def read(self, name: str) -> bytes:
        return read_file(self.disk, self.root / name, bytes_max=1 << 20)


def in_memory(disk: Disk) -> Place:
    root = Path("/disk")
    disk.make_dirs(root)
    return Place(disk, root)


def short_writing(inner: Disk) -> FaultDisk:
    return FaultDisk(inner, short_writes=random.Random(SHORT_WRITES_SEED))


PLACES: dict[str, Callable[[Path], Place]] = {
    "local": lambda path: Place(LocalDisk(), path),
    "crash": lambda path: in_memory(CrashDisk()),
    "faults over crash": lambda path: in_memory(FaultDisk(CrashDisk())),
    "short writes over local": lambda path: Place(short_writing(LocalDisk()), path),
}
