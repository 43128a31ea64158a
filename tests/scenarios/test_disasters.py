"""Whatever befalls a topic, no offset is given twice, every loss is told, and commands lead on.

`support/disasters.py` says what can happen, and what no system can know.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Final

import pytest

from support.disasters import history, outcome, shrunk

pytestmark = pytest.mark.timeout(300)
pytest.importorskip("forebay.pipeline.jobs.compact")


def require_promises(folder: Path, seed: int) -> None:
    steps = history(seed)
    broken = outcome(folder, steps)
    if broken is not None:
        fewer, error = shrunk(folder, steps, broken.kind)
        pytest.fail(f"seed {seed}: {fewer}\n{error}\n" + "\n".join(error.__notes__), pytrace=False)


ONCE_BROKEN: Final = (3342, 4030, 4447, 5031, 7285, 10695, 10909, 13083, 13521)
"""Histories that showed a fault which the first thirty do not."""


@pytest.mark.parametrize("seed", [*range(30), *ONCE_BROKEN])
def test_after_any_disaster_nothing_is_given_twice_and_every_loss_is_told(
    tmp_path: Path, seed: int
) -> None:
    require_promises(tmp_path, seed)


@pytest.mark.soak
def test_histories_that_nobody_has_seen_keep_the_promises_too(tmp_path: Path) -> None:
    for _ in range(100):
        require_promises(tmp_path, secrets.randbelow(2**32))


@pytest.mark.soak
@pytest.mark.parametrize("block", range(1000, 6000, 100))
def test_after_many_disasters_nothing_is_given_twice_and_every_loss_is_told(
    tmp_path: Path, block: int
) -> None:
    for seed in range(block, block + 100):
        require_promises(tmp_path, seed)
