"""kill -9 of a server under load, again and again: what was acknowledged is there, once."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import ForebayError, ServiceUnavailable
from support.server_processes import PATIENCE, ServerProcess

TOPICS = ["/default/a", "/default/b"]
BATCH = 20


class Producer(threading.Thread):
    """Appends numbered messages until its server is gone, and remembers what was acknowledged."""

    def __init__(self, server: ServerProcess, topic: str, first: int) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._topic = topic
        self.next = first
        """The number that the next batch begins with; numbers that are in doubt are not reused."""
        self.acknowledged: dict[int, str] = {}
        """By offset."""
        self.error: ForebayError | None = None

    def run(self) -> None:
        with self._server.new_client() as client:
            while True:
                texts = [f"{self._topic} {self.next + each}" for each in range(BATCH)]
                self.next += BATCH
                try:
                    answer = self._server.produce(self._topic, texts, client)
                except ForebayError as error:
                    self.error = error
                    return
                offsets = range(answer["first_offset"], answer["next_offset"])
                self.acknowledged.update(zip(offsets, texts, strict=True))


def restart_under_load(
    tmp_path: Path, restarts: int, seed: int, command: str = "serve", seconds: float = 0.3
) -> None:
    random_ = random.Random(seed)
    place = tmp_path / ("forebay.yml" if command == "up" else "data")
    acknowledged: dict[str, dict[int, str]] = {topic: {} for topic in TOPICS}
    firsts = dict.fromkeys(TOPICS, 0)
    for _ in range(restarts):
        with ServerProcess(command, place, tmp_path / "log") as server:
            producers = [Producer(server, topic, firsts[topic]) for topic in TOPICS]
            for producer in producers:
                producer.start()
            server.wait_until(lambda: all(each.acknowledged for each in producers), "a load")  # noqa: B023
            time.sleep(random_.uniform(0, seconds))  # a random moment is what is tested
            server.kill()
            for producer, topic in zip(producers, TOPICS, strict=True):
                producer.join(PATIENCE)
                assert isinstance(producer.error, ServiceUnavailable), producer.error
                assert not acknowledged[topic].keys() & producer.acknowledged.keys()
                acknowledged[topic] |= producer.acknowledged
                firsts[topic] = producer.next
    with ServerProcess(command, place, tmp_path / "log") as server:
        server.wait_ready()
        for topic in TOPICS:
            require(server.consume(topic), acknowledged[topic])
        assert server.stop() == 0


def require(found: list[Any], acknowledged: dict[int, str]) -> None:
    """What was acknowledged is at its offset; every message is there once, in order."""
    assert [each["offset"] for each in found] == list(range(len(found)))
    payloads = [each["payload"] for each in found]
    assert len(set(payloads)) == len(payloads)
    numbers = [int(each.rpartition(" ")[2]) for each in payloads]
    assert numbers == sorted(numbers)
    assert {offset: payloads[offset] for offset in acknowledged} == acknowledged


@pytest.mark.timeout(600)
def test_ten_kills_of_a_server_under_load_lose_nothing(tmp_path: Path) -> None:
    restart_under_load(tmp_path, restarts=10, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_two_hundred_kills_of_a_server_under_load_lose_nothing(tmp_path: Path) -> None:
    restart_under_load(tmp_path, restarts=200, seed=random.randrange(10**6))


@pytest.mark.soak
@pytest.mark.spark
@pytest.mark.timeout(1800)
def test_ten_kills_with_spark_at_work_lose_nothing(tmp_path: Path) -> None:
    """Some come while Spark starts, some while it uploads."""
    (tmp_path / "forebay.yml").write_text(
        "data: data\nstorage: {uploader: {interval_seconds: 1, max_open_seconds: 1}}\n"
    )
    restart_under_load(tmp_path, restarts=10, seed=2, command="up", seconds=20)
