"""The threads that fetch, for each test its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forebay.read.object_stream import FetchPool


@pytest.fixture
def pool() -> Iterator[FetchPool]:
    pool = FetchPool(4)
    yield pool
    pool.close()
