"""A standalone cluster of Spark for the suites that lose machines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.server_fixtures import absent
from support.spark_cluster import LocalCluster, can_hide


@pytest.fixture(scope="module")
def spark_cluster() -> Iterator[LocalCluster]:
    """One master, two workers. A test that kills one gives the cluster another."""
    pytest.importorskip("pyspark")
    with LocalCluster() as cluster:
        yield cluster


@dataclass(frozen=True, slots=True)
class BlindCluster:
    """A cluster, and a directory that its workers cannot see."""

    cluster: LocalCluster
    hidden: Path


@pytest.fixture(scope="module")
def blind_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlindCluster]:
    """One master, two workers, which find an empty directory where tests keep their stores."""
    pytest.importorskip("pyspark")
    if not can_hide():
        absent("no right to mount: directories cannot be hidden from the workers")
    hidden = tmp_path_factory.mktemp("hidden")
    with LocalCluster(hidden=[hidden]) as cluster:
        yield BlindCluster(cluster, hidden)
