"""A standalone cluster of Spark for the suites that lose machines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forebay.testing.spark_cluster import LocalCluster


@pytest.fixture(scope="module")
def spark_cluster() -> Iterator[LocalCluster]:
    """One master, two workers. A test that kills one gives the cluster another."""
    with LocalCluster() as cluster:
        yield cluster
