"""The examples do what they say."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

import pytest

from support.paths import ROOT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLES: Final = ROOT / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def session(spark: SparkSession) -> SparkSession:
    """The examples take the session that is there."""
    return spark


def test_analytics_reads_history_and_live_tail(tmp_path: Path) -> None:
    found = load("analytics").main(tmp_path / "data")
    orders = 20_000
    assert sum(count for count, _ in found.values()) == orders
    assert sum(cents for _, cents in found.values()) == sum(n % 997 for n in range(orders))


def test_the_word_count_counts_every_word_once(tmp_path: Path) -> None:
    module = load("word_count")
    words = Counter(" ".join(module.LINES * 2).split())
    assert module.main(tmp_path / "data") == words


def test_a_hundred_topics_are_offloaded_and_compacted(tmp_path: Path) -> None:
    found = load("hundred_topics").main(tmp_path / "data")
    assert found == {"made": 300, "left": 100, "messages": 30_000}
