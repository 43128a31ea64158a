"""Random operations over the whole system, with real processes and an oracle (`support/walk.py`).

A failure names its seed: `python -m support.walk SEED` in `tests/` takes the same walk again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from support.etcd_server import EtcdServer
from support.s3_server import S3Server

pytest.importorskip("pyarrow")

from support.walk import Walk, run, steps_of
from support.walk_places import LocalPlace, Place, RemotePlace
from support.walk_process import Nursery

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(600)
LOCAL_STEPS: Final = 1000
REMOTE_STEPS: Final = 750


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("nursery") / "log")
    yield nursery
    nursery.close()


def taken(
    place: Place, nursery: Nursery, seed: int, count: int, spark: SparkSession | None = None
) -> Walk:
    weights = {} if spark is None else {"spark": 100}
    steps = steps_of(seed, count, **weights)
    print(f"seed {seed}, {count} steps")  # shown if it fails
    return run(place, nursery, steps, spark)


def assert_was_a_walk(walk: Walk) -> None:
    assert all(ledger.known for ledger in walk.ledgers.values())


@pytest.mark.parametrize("seed", range(2))
def test_a_walk_on_local_disk_and_sqlite_breaks_no_promise(
    tmp_path: Path, nursery: Nursery, seed: int
) -> None:
    assert_was_a_walk(taken(LocalPlace(tmp_path / "walk", seed), nursery, seed, 120))


def test_a_walk_on_s3_and_etcd_breaks_no_promise(
    tmp_path: Path, nursery: Nursery, s3: S3Server, etcd: EtcdServer
) -> None:
    place = RemotePlace(tmp_path / "walk", 0, s3, etcd)
    assert_was_a_walk(taken(place, nursery, 0, 80))


def test_a_walk_with_spark_breaks_no_promise(
    tmp_path: Path, nursery: Nursery, spark: SparkSession
) -> None:
    walk = taken(LocalPlace(tmp_path / "walk", 7), nursery, 7, 60, spark)
    assert walk.outcomes["spark"] > 3


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(1000, 1200, 5))
def test_long_walks_on_local_disk_and_sqlite_break_no_promise(
    tmp_path: Path, nursery: Nursery, block: int
) -> None:
    for seed in range(block, block + 5):
        place = LocalPlace(tmp_path / str(seed), seed)
        assert_was_a_walk(taken(place, nursery, seed, LOCAL_STEPS))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(2000, 2040, 2))
def test_long_walks_on_s3_and_etcd_break_no_promise(
    tmp_path: Path, nursery: Nursery, s3: S3Server, etcd: EtcdServer, block: int
) -> None:
    for seed in range(block, block + 2):
        place = RemotePlace(tmp_path / str(seed), seed, s3, etcd)
        assert_was_a_walk(taken(place, nursery, seed, REMOTE_STEPS))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3000, 3010))
def test_long_walks_with_spark_break_no_promise(
    tmp_path: Path, nursery: Nursery, spark: SparkSession, seed: int
) -> None:
    assert_was_a_walk(taken(LocalPlace(tmp_path / "walk", seed), nursery, seed, 300, spark))
