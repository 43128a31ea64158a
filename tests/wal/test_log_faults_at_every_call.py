"""A disk that fails at any call, and then a power loss: nothing acknowledged is lost."""

from __future__ import annotations

import itertools
import random

import pytest

from forebay.errors import ForebayError
from forebay.wal.log import Wal
from support.disks import payloads, texts
from support.faulty_disks import EVERYTHING, faulty_directory


def run_a_while(wal: Wal) -> int:
    """Makes every call that writes; returns how many messages were acknowledged."""
    acknowledged = wal.watermarks().synced
    try:
        for number in range(4):
            wal.append(b"buffered")
            wal.append(f"{number}".encode(), durability="synced")
            acknowledged = wal.current_offset()
        wal.append_many([b"many"] * 5)
        wal.rotate()
        acknowledged = wal.current_offset()
        wal.retain(EVERYTHING, wal.segments()[0].end_offset)
        wal.append(b"last")
        wal.shutdown()
        acknowledged = wal.current_offset()
    except (ForebayError, OSError):
        pass
    return max(acknowledged, wal.watermarks().synced)


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_power_loss_at_every_single_call_of_the_disk_loses_nothing_acknowledged(
    seed: int | None,
) -> None:
    for call in itertools.count():
        directory = faulty_directory()
        first = directory.open(rotate_max_bytes=300)
        first.append_many(texts(0, 9), durability="synced")
        first.shutdown()
        directory.fail("any", skip=call, times=None)
        acknowledged = 9
        try:
            wal = directory.open(rotate_max_bytes=300)
        except (OSError, ForebayError):
            wal = None
        if wal is not None:
            acknowledged = run_a_while(wal)
            wal.abandon()
        fired = directory.faults.fired
        directory.faults.clear()
        directory.power.crash(None if seed is None else random.Random(seed * 10_000 + call))
        reopened = directory.open(rotate_max_bytes=300)
        assert reopened.watermarks().synced >= acknowledged, f"at call {call}"
        assert len(payloads(reopened)) == reopened.current_offset() - reopened.start_offset
        offset = reopened.append(b"next", durability="synced")
        assert payloads(reopened, offset) == [b"next"]
        directory.close()
        if not fired:
            assert call > 50
            return
