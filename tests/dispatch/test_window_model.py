"""A window does what a slow and simple model says, whatever happens in whatever order."""

from __future__ import annotations

import pytest

from support.subscription_walk import walk

STEPS = 250
SAMPLE = 100
SOAK = 4000


@pytest.mark.parametrize("part", range(4))
def test_random_steps_agree_with_the_model(part: int) -> None:
    for seed in range(part, SAMPLE, 4):
        walk(seed, STEPS)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(4))
def test_a_million_random_steps_agree_with_the_model(part: int) -> None:
    for seed in range(SAMPLE + part, SAMPLE + SOAK, 4):
        walk(seed, STEPS)
