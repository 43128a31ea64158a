"""A cluster whose workers cannot see the server's directory offloads and writes through the server.

Two workers, on which the directory with all stores is hidden. The server is in this process, so
that its metrics say what passed through it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from forebay.admin.executors import TRANSFERS
from forebay.client.address import ServerInfo, server_file
from forebay.config import load_config
from forebay.limits import MIB
from support.blind_driver import FILLER, BlindDriver
from support.cluster_fixtures import BlindCluster
from support.s3_server import S3Server
from support.served import Served, served

pytestmark = pytest.mark.timeout(900)

TOKEN: Final = "a-token-of-the-tests"
TOPICS: Final = [f"/default/t{number}" for number in range(4)]
MESSAGES: Final = 4_000
"""Of about a kilobyte, in each topic."""
SIZE: Final = len(TOPICS) * MESSAGES * 1000
ROWS: Final = 12_000
WRITTEN: Final = 3
"""Topics of a write."""


@pytest.fixture(scope="module")
def driver(
    blind_cluster: BlindCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BlindDriver]:
    driver = BlindDriver(blind_cluster.cluster, tmp_path_factory.mktemp("driver"), TOKEN)
    yield driver
    driver.close()


@contextmanager
def server_at(data: Path, config: Path, cloud: dict[str, Any]) -> Iterator[Served]:
    """A served store that the driver finds by its configuration file, and with its token."""
    document = {
        "storage": {
            "wal": {"dir": str(data / "wal"), "rotate_max_bytes": "1MiB"},
            "uploader": {"enabled": False, "max_object_bytes": "2MiB"},
            "cloud": cloud,
        },
        "metadata": {"backend": "sqlite", "path": str(data / "catalog.db")},
        "admin": {"token": TOKEN},
    }
    config.write_text(yaml.safe_dump(document))
    with served(load_config(config)) as server:
        note = ServerInfo(server.url, server.context.instance, 1, server.context.store_id)
        server_file(data).write_bytes(note.encode())
        yield server


@contextmanager
def local_server(blind: BlindCluster, config: Path) -> Iterator[Served]:
    """With the embedded defaults: objects are files in the hidden directory."""
    data = blind.hidden / config.parent.name
    data.mkdir()
    with server_at(data, config, {"backend": "fs", "root": str(data / "objects")}) as server:
        yield server


def payload(topic: str, number: int) -> bytes:
    return b"%s %d " % (topic.encode(), number) + b"." * 985


def fill(server: Served) -> None:
    """Fills all topics. The objects of the first one will be compressed."""
    server.store.topic(TOPICS[0]).configure(compression="zstd")
    for name in TOPICS:
        topic = server.store.topic(name)
        for at in range(0, MESSAGES, 2000):
            topic.append_many([payload(name, at + number) for number in range(2000)])
        topic.flush()


def assert_offloaded(server: Served) -> None:
    """Every message once and in order, and all of it in objects that were read back."""
    with server.store.view() as view:
        for name in TOPICS:
            topic = view.topic(name)
            assert topic.record is not None
            assert topic.record.tail == topic.record.verified == MESSAGES
            ends = [each.next_offset for each in topic.objects()]
            assert [each.start_offset for each in topic.objects()] == [0, *ends[:-1]]
            codec = "zstd" if name == TOPICS[0] else None
            assert {each.codec for each in topic.objects()} == {codec}
    for name in TOPICS:
        for number, message in enumerate(server.store.topic(name).read()):
            assert message.offset == number
            assert message.payload == payload(name, number)
        assert number == MESSAGES - 1


def assert_written(server: Served) -> None:
    """Every row of a write once, those of one topic in their order."""
    for number in range(WRITTEN):
        found = [each.payload.decode() for each in server.store.topic(f"w{number}").read()]
        assert found == [f"{row} {FILLER}" for row in range(number, ROWS, WRITTEN)]


def passed(kind: str, direction: str) -> float:
    """Bytes through the server since this process began."""
    return TRANSFERS.value(kind, direction)


def lose_a_worker(blind: BlindCluster) -> None:
    blind.cluster.kill_worker(random.choice(blind.cluster.workers))


def test_workers_see_nothing_of_the_directory(
    blind_cluster: BlindCluster, driver: BlindDriver, tmp_path: Path
) -> None:
    with local_server(blind_cluster, tmp_path / "forebay.yml"):
        assert list(blind_cluster.hidden.iterdir()) != []
        blind_cluster.cluster.wait_for_executors(2)
        workers: set[int] = set()
        deadline = time.monotonic() + 400
        while len(workers) < 2:
            assert time.monotonic() < deadline, "one of the workers gets no task"
            for worker, names in driver.ask("look", path=str(blind_cluster.hidden)):
                assert names == []
                workers.add(worker)


def test_an_offload_and_writes_go_through_the_server(
    blind_cluster: BlindCluster, driver: BlindDriver, tmp_path: Path
) -> None:
    config = tmp_path / "forebay.yml"
    with local_server(blind_cluster, config) as server:
        fill(server)
        before = {each: passed(*each) for each in (("segment", "down"), ("object", "up"))}
        report = driver.ask("offload", path=str(config))
        assert report["ok"], report["text"]
        assert report["messages"] == MESSAGES * len(TOPICS)
        assert passed("segment", "down") - before["segment", "down"] >= SIZE
        uncompressed = SIZE * (len(TOPICS) - 1) // len(TOPICS)
        assert passed("object", "up") - before["object", "up"] >= uncompressed
        assert_offloaded(server)

        staged = passed("staging", "up")
        options = {"server": server.url, "sinkId": "daily"}  # and nothing else: no path, no store
        for _ in range(2):
            driver.ask("write", options=options, count=ROWS, partitions=4, topics=WRITTEN)
        assert passed("staging", "up") - staged >= 2 * ROWS * len(FILLER)
        assert_written(server)

        lines = tmp_path / "lines"
        lines.mkdir()
        options = {"path": str(config), "topic": "lines", "sinkId": "lines"}
        for number in range(2):
            (lines / f"{number}.txt").write_text(f"line {number}\n")
            driver.ask(
                "stream", source=str(lines), checkpoint=str(tmp_path / "seen"), options=options
            )
        found = [each.payload for each in server.store.topic("lines").read()]
        assert found == [b"line 0", b"line 1"]


@pytest.mark.soak
def test_a_worker_that_is_lost_costs_nothing(
    blind_cluster: BlindCluster, driver: BlindDriver, tmp_path: Path
) -> None:
    config = tmp_path / "forebay.yml"
    with local_server(blind_cluster, config) as server:
        fill(server)
        before = passed("object", "up")
        driver.begin("offload", path=str(config))
        driver.wait_until(lambda: passed("object", "up") > before + 2 * MIB)
        lose_a_worker(blind_cluster)
        assert passed("object", "up") < before + SIZE, "the kill came too late to tell anything"
        report = driver.answer()
        assert report["ok"], report["text"]
        assert report["messages"] == MESSAGES * len(TOPICS)
        assert_offloaded(server)

        blind_cluster.cluster.start_worker()
        blind_cluster.cluster.wait_for_executors(2)
        staged = passed("staging", "up")
        driver.begin(
            "write", options={"server": server.url}, count=ROWS, partitions=16, topics=WRITTEN
        )
        driver.wait_until(lambda: passed("staging", "up") > staged)
        lose_a_worker(blind_cluster)
        assert passed("staging", "up") < staged + ROWS * len(FILLER), "the kill came too late"
        driver.answer()
        assert_written(server)
        blind_cluster.cluster.start_worker()


def test_executors_talk_to_a_bucket_themselves(
    blind_cluster: BlindCluster, driver: BlindDriver, tmp_path: Path, s3: S3Server
) -> None:
    cloud = s3.settings()
    data, config = blind_cluster.hidden / "with-a-bucket", tmp_path / "forebay.yml"
    data.mkdir()
    place = {"backend": cloud.backend, "root": cloud.root, "options": dict(cloud.options)}
    with server_at(data, config, place) as server:
        fill(server)
        before = {
            kind: passed(kind, way)
            for kind, way in (("segment", "down"), ("object", "up"), ("staging", "up"))
        }
        report = driver.ask("offload", path=str(config))
        assert report["ok"], report["text"]
        assert_offloaded(server)
        options = {"path": str(config), "sinkId": "daily"}
        driver.ask("write", options=options, count=ROWS, partitions=4, topics=WRITTEN)
        assert_written(server)
        assert passed("segment", "down") - before["segment"] >= SIZE
        assert passed("object", "up") == before["object"]
        assert passed("staging", "up") == before["staging"]
