"""kill -9 on a real Spark cluster: of a worker with everything on it, and of the driver.

The work goes on in the workers that are left, or in the next run, and in the end every message is
there once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import pytest

import forebay
from forebay.config import load_config
from forebay.format.names import is_ledger
from forebay.limits import MIB
from forebay.settings import StoreSettings
from forebay.topic.view import StoreView
from support.blind_driver import BlindDriver
from support.spark_cluster import LocalCluster
from support.spark_drivers import Driver, write_config

TOPICS: Final = [f"/default/t{number}" for number in range(6)]
MESSAGES: Final = 6_000
"""Of about a kilobyte, in each topic."""


def payload(topic: str, number: int) -> bytes:
    return b"%s %d " % (topic.encode(), number) + b"." * 1000


def fill(settings: StoreSettings, start: int, stop: int) -> None:
    with forebay.open(settings) as store:
        for name in TOPICS:
            topic = store.topic(name)
            for at in range(start, stop, 4000):
                topic.append_many([payload(name, at + n) for n in range(min(4000, stop - at))])
            topic.flush()


def assert_all_there(settings: StoreSettings, stop: int) -> None:
    """Every message once, by a reader that trusts nobody, and a chain without a gap."""
    with StoreView(settings) as view:
        for name in TOPICS:
            topic = view.topic(name)
            assert topic.end_offset == stop
            record = topic.record
            assert record is not None
            assert record.tail == record.verified == stop
            at = 0
            for descriptor in topic.objects():
                assert descriptor.start_offset == at, "the chain has a gap or an overlap"
                at = descriptor.next_offset
            for number, message in enumerate(topic.reader(0)):
                assert message.offset == number
                assert message.payload == payload(name, number)
            assert number == stop - 1


def data_files(settings: StoreSettings) -> list[Path]:
    found = (Path(settings.data or "") / "objects").rglob("*-*")
    return [each for each in found if each.name.endswith(".dnb1") or is_ledger(each.name)]


@pytest.fixture
def config(tmp_path: Path, spark_cluster: LocalCluster) -> Iterator[Path]:
    """A store of small objects, and a cluster with two workers again afterwards."""
    data = tmp_path / "data"
    data.mkdir()
    yield write_config(tmp_path / "forebay.yml", data, spark_cluster, max_object_bytes="1MiB")
    while len(spark_cluster.workers) < 2:
        spark_cluster.start_worker()


def command(config: Path, *arguments: str) -> list[str]:
    return ["-m", "forebay", *arguments, "--config", str(config), "--json"]


def start_and_lose_a_worker(
    arguments: list[str], cluster: LocalCluster, config: Path, begun: object
) -> Driver:
    """The driver of a job that has lost one of two workers in the middle of its work."""
    driver = Driver(arguments, cluster, config.parent)
    assert callable(begun)
    assert driver.wait_until(begun), driver.answer()
    cluster.kill_worker(random.choice(cluster.workers))
    assert not driver.over, "the kill came too late to tell anything"
    return driver


@pytest.mark.timeout(900)
def test_offload_compaction_and_scan_survive_the_loss_of_a_worker(
    spark_cluster: LocalCluster, config: Path
) -> None:
    """One driver for all three: a start takes longer than the work."""
    settings = load_config(config)
    fill(settings, 0, MESSAGES)
    driver = BlindDriver(spark_cluster, config.parent)

    def survives(begun: Callable[[], bool], do: str, **arguments: Any) -> Any:
        """What a job returns that lost one of two workers in the middle of its work."""
        while len(spark_cluster.workers) < 2:
            spark_cluster.start_worker()
        spark_cluster.wait_for_executors(2)
        driver.begin(do, path=str(config), **arguments)
        driver.wait_until(begun)
        spark_cluster.kill_worker(random.choice(spark_cluster.workers))
        assert not driver.has_answered, "the kill came too late to tell anything"
        return driver.answer()

    try:
        report = survives(lambda: len(data_files(settings)) > 3, "offload")
        assert report["ok"], report["text"]
        assert report["messages"] == MESSAGES * len(TOPICS)
        assert_all_there(settings, MESSAGES)

        small = len(data_files(settings))
        assert survives(lambda: len(data_files(settings)) > small, "compact", target=16 * MIB)
        assert_all_there(settings, MESSAGES)
        with StoreView(settings) as view:
            assert all(len(view.topic(name).objects()) <= 2 for name in TOPICS)

        mark = config.parent / "begun"
        said = [payload(name, number) for name in TOPICS for number in range(MESSAGES)]
        assert survives(mark.exists, "scan", mark=str(mark)) == {
            "n": len(said),
            "s": len(TOPICS) * MESSAGES * (MESSAGES - 1) // 2,
            "b": sum(len(each) for each in said),
            "c": sum(crc32(each) for each in said),
        }
    finally:
        driver.close()


def with_ledgers(config: Path, folder: Path, cluster: LocalCluster) -> StoreSettings:
    ledgers = {"max_object_bytes": "1MiB", "format": "pulsar", "ledger_block_bytes": "128KiB"}
    write_config(config, folder / "data", cluster, **ledgers)
    return load_config(config)


@pytest.mark.timeout(900)
def test_an_offload_and_a_scan_of_ledgers_survive_the_loss_of_a_worker(
    spark_cluster: LocalCluster, tmp_path: Path, config: Path
) -> None:
    settings = with_ledgers(config, tmp_path, spark_cluster)
    fill(settings, 0, MESSAGES)
    driver = BlindDriver(spark_cluster, config.parent)
    try:
        spark_cluster.wait_for_executors(2)
        driver.begin("offload", path=str(config))
        driver.wait_until(lambda: len(data_files(settings)) > 3)
        spark_cluster.kill_worker(random.choice(spark_cluster.workers))
        assert not driver.has_answered, "the kill came too late to tell anything"
        report = driver.answer()
        assert report["ok"], report["text"]
        assert report["messages"] == MESSAGES * len(TOPICS)
        assert_all_there(settings, MESSAGES)
        spark_cluster.start_worker()
        spark_cluster.wait_for_executors(2)
        mark = config.parent / "begun"
        driver.begin("scan", path=str(config), mark=str(mark))
        driver.wait_until(mark.exists)
        spark_cluster.kill_worker(random.choice(spark_cluster.workers))
        found = driver.answer()
        assert found["n"] == MESSAGES * len(TOPICS)
        said = [payload(name, number) for name in TOPICS for number in range(MESSAGES)]
        assert found["c"] == sum(crc32(each) for each in said)
    finally:
        driver.close()


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_scan_of_the_bucket_alone_survives_the_loss_of_a_worker(
    spark_cluster: LocalCluster, tmp_path: Path, config: Path
) -> None:
    settings = with_ledgers(config, tmp_path, spark_cluster)
    fill(settings, 0, MESSAGES)
    driver = BlindDriver(spark_cluster, config.parent)
    try:
        spark_cluster.wait_for_executors(2)
        assert driver.ask("offload", path=str(config))["ok"]
        mark = config.parent / "begun"
        objects = str(Path(settings.data or "") / "objects")
        driver.begin("scan_ledgers", path=objects, mark=str(mark))
        driver.wait_until(mark.exists)
        spark_cluster.kill_worker(random.choice(spark_cluster.workers))
        assert not driver.has_answered, "the kill came too late to tell anything"
        found = driver.answer()
        assert found["n"] == MESSAGES * len(TOPICS)
        said = [payload(name, number) for name in TOPICS for number in range(MESSAGES)]
        assert found["c"] == sum(crc32(each) for each in said)
    finally:
        driver.close()


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_an_export_survives_the_loss_of_a_worker(
    spark_cluster: LocalCluster, config: Path, tmp_path: Path
) -> None:
    import duckdb

    settings = load_config(config)
    fill(settings, 0, MESSAGES)
    table = tmp_path / "table"
    driver = start_and_lose_a_worker(
        command(config, "export", TOPICS[0], str(table), "--format", "parquet"),
        spark_cluster,
        config,
        lambda: any(table.rglob("*.parquet")) or any(table.rglob("*attempt*")),
    )
    assert driver.answer()["ok"]
    query = f"select count(*), sum(\"offset\") from read_parquet('{table}/**/*.parquet')"
    with duckdb.connect() as connection:
        found = connection.execute(query).fetchall()
    assert found == [(MESSAGES, MESSAGES * (MESSAGES - 1) // 2)]


def kill_the_driver(cluster: LocalCluster, config: Path, kills: int, seed: int) -> None:
    """Kills at random moments; each run goes on where the last one was killed."""
    settings = load_config(config)
    random_ = random.Random(seed)
    stop = 0
    landed = 0
    while landed < kills:
        fill(settings, stop, stop + MESSAGES // 3)
        stop += MESSAGES // 3
        before = len(data_files(settings))
        driver = Driver(command(config, "offload"), cluster, config.parent)
        if not driver.wait_until(lambda: len(data_files(settings)) > before):  # noqa: B023
            driver.answer()
            continue
        time.sleep(random_.uniform(0, 0.8))  # a random moment is what is tested
        landed += not driver.over
        driver.kill()
    assert Driver(command(config, "offload"), cluster, config.parent).answer()["ok"]
    assert_all_there(settings, stop)


@pytest.mark.timeout(900)
def test_an_offload_goes_on_after_its_driver_was_killed(
    spark_cluster: LocalCluster, config: Path
) -> None:
    kill_the_driver(spark_cluster, config, kills=1, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_an_offload_goes_on_after_thirty_kills(spark_cluster: LocalCluster, config: Path) -> None:
    kill_the_driver(spark_cluster, config, kills=30, seed=random.randrange(10**6))
