"""Servers for the suites of single calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from served import Served, served


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path) as found:
        yield found


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that refuses everything it is asked for."""
    with served(tmp_path_factory.mktemp("untouched")) as found:
        yield found
