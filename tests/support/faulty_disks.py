"""Directories for a log on a disk that fails on request and can lose its power."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from pathlib import Path

from forebay.settings import DeleterSettings
from forebay.testing import CrashDisk, Fault, FaultDisk
from forebay.testing.faults import Operation
from forebay.wal.log import Wal
from forebay.wal.retention import Deleter
from support.disks import LogDirectory

EVERYTHING = Deleter(DeleterSettings(retention_time_minutes=0))


@dataclass
class FaultyDirectory(LogDirectory):
    faults: FaultDisk = field(default_factory=lambda: FaultDisk(CrashDisk()))
    power: CrashDisk = field(default_factory=CrashDisk)

    def fail(
        self,
        operation: Operation,
        code: int = errno.EIO,
        path: str | None = None,
        *,
        skip: int = 0,
        times: int | None = 1,
        partial: int | None = None,
    ) -> None:
        self.faults.inject(Fault(operation, code, path, skip, times, partial))

    def reopen(self) -> Wal:
        """Opens the log again, on a disk that works."""
        self.faults.clear()
        self.faults.space = None
        for wal in self.opened:
            wal.abandon()
        return self.open()


def faulty_directory() -> FaultyDirectory:
    crash = CrashDisk()
    faults = FaultDisk(crash)
    return FaultyDirectory(faults, Path("/data/log"), crash, faults=faults, power=crash)
