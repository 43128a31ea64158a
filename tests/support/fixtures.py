"""Fixtures that the suites of one package share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.read.fetch_pool import FetchPool
from support.disks import DIRECTORIES, GatedDirectory, LogDirectory, gated_directory, in_memory
from support.served import Served, served


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    """A server over a store of its own."""
    with served(tmp_path) as found:
        yield found


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server for the requests that it refuses: no test changes it."""
    with served(tmp_path_factory.mktemp("untouched")) as found:
        yield found


@pytest.fixture
def pool() -> Iterator[FetchPool]:
    """Threads that fetch, for one test."""
    pool = FetchPool(4)
    yield pool
    pool.close()


@pytest.fixture(params=sorted(DIRECTORIES))
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LogDirectory]:
    """A directory for a log, on each kind of disk."""
    directory = DIRECTORIES[request.param](tmp_path)
    yield directory
    directory.close()


@pytest.fixture
def crashing() -> Iterator[LogDirectory]:
    """A directory for a log on a disk that can lose its power."""
    directory = in_memory()
    yield directory
    directory.close()


@pytest.fixture
def gated() -> Iterator[GatedDirectory]:
    """A directory for a log on a disk whose syncs of segments wait at a gate."""
    directory = gated_directory()
    yield directory
    directory.close()
