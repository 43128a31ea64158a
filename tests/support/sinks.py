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

import forebay
from forebay.format.message import StreamMessage
from forebay.format.names import staged_file
from forebay.pipeline.location import job_settings
from forebay.pipeline.sink.commit import MARK, Committed, SinkBatch, commit_batch
from forebay.pipeline.sink.owner import LocalTopicWriter
from forebay.pipeline.sink.staging import Part, Rows, stage
from forebay.settings import StoreSettings
from forebay.topic.resources import StoreResources, open_resources

TOPIC = "/default/orders"
OTHER = "/default/other"
Pairs = Sequence[tuple[str, str]]
"""Topics and values."""


@dataclass
class SinkSetup:
    data: Path
    settings: StoreSettings = field(init=False)
    bench: StoreResources = field(init=False)

    def __post_init__(self) -> None:
        self.settings = job_settings(self.data)
        self.bench = open_resources(self.settings)

    def stage(self, *partitions: Pairs, piece: int = 7) -> list[Part]:
        """The partitions' rows as files of one write."""
        write = secrets.token_hex(8)
        return [
            stage(
                self.bench.store,
                staged_file(write, number, 0),
                number,
                _batches(rows, piece),
                chunk_bytes=self.settings.uploader.stream_chunk_size,
            )
            for number, rows in enumerate(partitions)
        ]

    def stage_rows(self, *partitions: Rows) -> list[Part]:
        """The rows of each partition, with keys and headers, as files of one write."""
        write = secrets.token_hex(8)
        size = self.settings.uploader.stream_chunk_size
        return [
            stage(self.bench.store, staged_file(write, at, 0), at, [rows], chunk_bytes=size)
            for at, rows in enumerate(partitions)
        ]

    def commit(self, batch: SinkBatch, parts: Sequence[Part]) -> Committed:
        with LocalTopicWriter(self.settings, wait_seconds=1) as writer:
            return commit_batch(writer, self.bench.catalog, self.bench.store, batch, parts)

    def write(self, batch: SinkBatch, *partitions: Pairs) -> Committed:
        return self.commit(batch, self.stage(*partitions))

    def messages(self, topic: str = TOPIC) -> list[StreamMessage]:
        with forebay.open(self.data) as store:
            return list(store.topic(topic).read())

    def values(self, topic: str = TOPIC) -> list[str]:
        return [message.payload.decode() for message in self.messages(topic)]

    def staged(self) -> list[str]:
        return [meta.key for meta in self.bench.store.list("staging/")]

    def close(self) -> None:
        self.bench.close()


def _batches(pairs: Pairs, piece: int) -> list[Rows]:
    return [
        Rows(
            [topic for topic, _ in pairs[at : at + piece]],
            [value.encode() for _, value in pairs[at : at + piece]],
        )
        for at in range(0, len(pairs), piece)
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
        setup = SinkSetup(data)
        topics = (TOPIC, OTHER)
        parts = setup.stage(*(numbered(at * rows, rows, topics) for at in range(3)), piece=400)
        os.write(tell, b".")
        setup.commit(SinkBatch("killed", batch, named=True), parts)
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
