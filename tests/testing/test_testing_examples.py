"""The examples in the docstrings of the doubles run as they are written."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest

MODULES = ["", ".clock", ".crash", ".faults", ".kv", ".objects"]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_double_run(name: str) -> None:
    done = doctest.testmod(import_module(f"forebay.testing{name}"), report=True)
    assert done.attempted > 0
    assert done.failed == 0
