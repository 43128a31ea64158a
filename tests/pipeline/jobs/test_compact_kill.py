"""The driver of a compaction is killed with SIGKILL, again and again, at any moment."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest

from forebay.pipeline.jobs.compact import undo_compaction
from support.compactions import Setup
from support.paths import TESTS

MESSAGES: Final = 240
"""That are added whenever there is nothing left to compact; three to an object."""
TARGET: Final = 8000


def killed_after(data: Path, seconds: float) -> bool:
    """Whether the kill came before the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "support.compactions", str(data), str(TARGET)],
        cwd=TESTS,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout as lines:
        assert lines.readline() == "begun\n"
        time.sleep(seconds)  # not to wait for anything: the moment of death is the test
        process.kill()
        rest = lines.read()
    process.wait()
    assert not rest or rest.startswith("done"), rest
    return not rest


def play(data: Path, kills: int, seed: int) -> None:
    """Kills until so many came in the middle."""
    chosen = random.Random(seed)
    setup = Setup(data)
    total, count, longest = 0, 0, 1.0
    while count < kills:
        if not total or not setup.compacted(TARGET, dry_run=True).rows:
            setup.lay(range(total, total + MESSAGES + 1, 3), sidecars=False)
            total += MESSAGES
        if killed_after(data, chosen.uniform(0.0, longest)):
            count += 1
            longest = min(1.1 * longest, 2.0)
        else:
            longest *= 0.8
        setup.require_readable(total)
        if chosen.random() < 0.2:
            assert setup.swept().errors == 0
            setup.require_readable(total)
        elif chosen.random() < 0.3:
            assert undo_compaction(setup.settings, "orders").ok
            setup.require_readable(total)
    assert setup.compacted(TARGET).ok
    assert setup.compacted(TARGET, dry_run=True).rows == ()
    setup.require_readable(total)
    assert setup.swept().errors == 0
    setup.require_readable(total)
    assert len(setup.names()) <= 2 * len(setup.chain()), "nothing else is left behind"
    setup.close()


@pytest.mark.timeout(600)
def test_a_killed_compaction_loses_and_repeats_nothing(tmp_path: Path) -> None:
    play(tmp_path / "data", 5, 1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(100, 110))
def test_many_killed_compactions_lose_and_repeat_nothing(tmp_path: Path, seed: int) -> None:
    play(tmp_path / "data", 50, seed)
