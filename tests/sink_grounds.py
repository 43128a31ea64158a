"""A store with a sink and no Spark: rows are staged and committed as tasks and drivers do.

As a program: commits batches of numbered rows in children that are killed at random moments.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

import forebay
from forebay.format.message import StreamMessage
from forebay.format.names import staged_file
from forebay.pipeline.location import job_settings
from forebay.pipeline.resources import open_resources
from forebay.pipeline.sink.columns import staged_batches
from forebay.pipeline.sink.commit import Committed, commit_batch
from forebay.pipeline.sink.marks import MARK, Run
from forebay.pipeline.sink.staging import Part, stage
from forebay.pipeline.sink.topic_writer import LocalDoor
from forebay.settings import StoreSettings
from forebay.topic.resources import StoreResources

TOPIC = "/default/orders"
OTHER = "/default/other"
Rows = Sequence[tuple[str, str]]
"""Topics and values."""


@dataclass
class SinkGround:
    data: Path
    settings: StoreSettings = field(init=False)
    bench: StoreResources = field(init=False)

    def __post_init__(self) -> None:
        self.settings = job_settings(self.data)
        self.bench = open_resources(self.settings)

    def stage(self, *partitions: Rows, piece: int = 7) -> list[Part]:
        """The partitions' rows as files of one write."""
        write = secrets.token_hex(8)
        return [
            stage(
                self.bench.store,
                staged_file(write, number, 0),
                number,
                staged_batches(iter(_batches(rows, piece)), number, None),
                chunk_bytes=self.settings.uploader.stream_chunk_size,
            )
            for number, rows in enumerate(partitions)
        ]

    def commit(self, run: Run, parts: Sequence[Part]) -> Committed:
        with LocalDoor(self.settings, wait_seconds=1) as door:
            return commit_batch(door, self.bench.catalog, self.bench.store, run, parts)

    def write(self, run: Run, *partitions: Rows) -> Committed:
        return self.commit(run, self.stage(*partitions))

    def messages(self, topic: str = TOPIC) -> list[StreamMessage]:
        with forebay.open(self.data) as store:
            return list(store.topic(topic).read())

    def values(self, topic: str = TOPIC) -> list[str]:
        return [message.payload.decode() for message in self.messages(topic)]

    def staged(self) -> list[str]:
        return [meta.key for meta in self.bench.store.list("staging/")]

    def close(self) -> None:
        self.bench.close()


def _batches(rows: Rows, piece: int) -> list[Any]:
    return [
        pa.record_batch(
            {
                "topic": pa.array([topic for topic, _ in rows[at : at + piece]], pa.string()),
                "value": pa.array([value for _, value in rows[at : at + piece]], pa.string()),
            }
        )
        for at in range(0, len(rows), piece)
    ]


def numbered(first: int, count: int, topics: Sequence[str] = (TOPIC,)) -> list[tuple[str, str]]:
    """Rows whose values are numbers, spread over the topics."""
    return [(topics[at % len(topics)], f"{at:06d}") for at in range(first, first + count)]


def marks(messages: Sequence[StreamMessage]) -> list[str]:
    return [message.attributes[MARK] for message in messages]


def run_once(data: Path, batch: int, rows: int, seconds: float | None) -> tuple[bool, float]:
    """Commits the batch in a forked child; killed so many seconds after it staged its rows.

    Answers whether the child came to its end, and how long the commit took.
    """
    ready, tell = os.pipe()
    child = os.fork()  # nothing here has started a thread
    if child == 0:
        ground = SinkGround(data)
        topics = (TOPIC, OTHER)
        parts = ground.stage(*(numbered(at * rows, rows, topics) for at in range(3)), piece=400)
        os.write(tell, b".")
        ground.commit(Run("killed", batch, named=True), parts)
        os._exit(0)
    os.close(tell)
    os.read(ready, 1)
    os.close(ready)
    started = time.monotonic()
    if seconds is not None:
        time.sleep(seconds)  # the moment is what is tried
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    ended = os.waitstatus_to_exitcode(status)
    assert ended in (0, -signal.SIGKILL), ended
    return ended == 0, time.monotonic() - started


TRIES_MAX = 4
"""Kills of one batch."""


def main() -> None:
    """Arguments: the data directory, rows in each of three partitions, kills, a seed.

    Commits one batch after the other, each until it is complete. Prints how many there were.
    """
    data, (rows, kills, seed) = Path(sys.argv[1]), map(int, sys.argv[2:])
    moments = random.Random(seed)
    _, longest = run_once(data, 0, rows, None)
    batch, killed = 0, 0
    while killed < kills:
        batch += 1
        tries = 0
        # A batch that goes on may take longer than the first one did: in the end it is left alone.
        while not run_once(
            data, batch, rows, moments.random() * longest if tries < TRIES_MAX else None
        )[0]:
            killed += 1
            tries += 1
    sys.stdout.write(f"{batch + 1}\n")


if __name__ == "__main__":
    main()
