"""kill -9 of a real process, again and again on the same directory, at random moments."""

from __future__ import annotations

import contextlib
import errno
import random
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.errors import OffsetOutOfRange
from forebay.files.disk import Disk
from forebay.files.local import LocalDisk
from forebay.settings import DeleterSettings, WalSettings
from forebay.testing import Fault, FaultDisk
from forebay.wal.log import Wal
from forebay.wal.retention import Deleter
from forebay.wal.view import LogView
from support.paths import SUPPORT

SCRIPT = SUPPORT / "producer_process.py"
EXTRAS: tuple[list[str], ...] = (
    [],
    ["buffered"],
    ["reader"],
    ["many"],
    ["buffered", "reader", "many"],
)
ACKNOWLEDGED_MAX = 60
"""How many lines are awaited at most before the kill, so that a cycle stays short."""


class Killer:
    """Starts a process, kills it, and remembers everything that was ever acknowledged."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.rng = random.Random(seed)
        self.acknowledged: dict[int, bytes] = {}
        self.runs = 0

    def run_and_kill(self) -> None:
        self.runs += 1
        extras = self.rng.choice(EXTRAS)
        command = [sys.executable, str(SCRIPT), str(self.directory), f"run{self.runs}", *extras]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            lines = []
            for _ in range(self.rng.randint(0, ACKNOWLEDGED_MAX)):
                line = child.stdout.readline()
                if not line:
                    break
                lines.append(line)
            child.kill()
            lines += child.stdout.readlines()
            assert child.wait(60) == -9, lines[-1:]
        for line in lines:
            if not line.endswith(b"\n"):
                continue  # the process died while it wrote the line
            offset, payload = line[:-1].split(b" ", 1)
            number = int(offset)
            assert number not in self.acknowledged, f"offset {number} was given twice"
            self.acknowledged[number] = payload

    def open(self, disk: Disk | None = None) -> Wal:
        settings = WalSettings(dir=self.directory, cache_capacity=16, rotate_max_bytes=8192)
        return Wal(settings, disk=disk)

    def check(self, wal: Wal) -> None:
        start, end = wal.start_offset, wal.current_offset()
        found = {}
        for expected, message in enumerate(wal.tail_reader(start, end=end), start):
            assert message.offset == expected
            found[expected] = message.payload
        assert len(found) == end - start
        for offset, payload in self.acknowledged.items():
            if offset >= start:
                assert found[offset] == payload
        assert max(self.acknowledged, default=-1) < end


def kill_and_check(killer: Killer, kills: int) -> None:
    for _ in range(kills):
        killer.run_and_kill()
        if killer.rng.random() < 0.4:
            continue  # the next process finds what this one left
        view = LogView(killer.directory) if killer.acknowledged else None
        disk = FaultDisk(LocalDisk())
        wal = killer.open(disk)
        killer.check(wal)
        if view is not None:
            assert view.end_offset > max(killer.acknowledged)
        if killer.rng.random() < 0.3:
            offset = wal.append(b"from the parent", durability="synced")
            killer.acknowledged[offset] = b"from the parent"
        if killer.rng.random() < 0.5:
            retain(wal)
        if killer.rng.random() < 0.5:
            wal.shutdown()
        else:  # without a checkpoint, as if it had been killed
            disk.inject(Fault("any", errno.EIO, times=None))
            with contextlib.suppress(OSError):
                wal.shutdown()
    wal = killer.open()
    killer.check(wal)
    wal.shutdown()


def retain(wal: Wal) -> None:
    everything = Deleter(DeleterSettings(retention_time_minutes=0))
    wal.retain(everything, max(wal.current_offset() - 100, 0))
    with pytest.raises(OffsetOutOfRange):
        wal.tail_reader(wal.start_offset - 1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(4))
def test_nothing_acknowledged_is_lost_when_the_process_is_killed_again_and_again(
    tmp_path: Path, seed: int
) -> None:
    killer = Killer(tmp_path / "log", seed)
    kill_and_check(killer, 15)
    assert len(killer.acknowledged) > 100


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(100, 110))
def test_nothing_acknowledged_is_lost_in_hundreds_of_kills(tmp_path: Path, seed: int) -> None:
    kill_and_check(Killer(tmp_path / "log", seed), 60)
