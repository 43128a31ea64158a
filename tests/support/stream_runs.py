"""A streaming query without Spark: asks the source what Spark asks, in the same order."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pyspark.sql.streaming.datasource import ReadLimit

from forebay.pipeline.source.data_source import scan_schema
from forebay.pipeline.source.options import scan_options
from forebay.pipeline.source.stream import ForebayStreamReader
from forebay.settings import RemoteRetentionSettings
from forebay.topic.store import Store
from support.scan_stores import settings_of

Rows = list[tuple[str, int, bytes]]
"""Topic, offset, value."""


class StreamRun:
    """One run of a query; `checkpoint` is what a next one begins with."""

    def __init__(
        self,
        path: Path,
        checkpoint: dict[str, Any] | None = None,
        *,
        now: bool = False,
        **options: str,
    ) -> None:
        chosen = {"path": str(path), "columns": "topic,partition,offset,value", **options}
        scan = scan_options(chosen, streaming=True)
        self.reader = ForebayStreamReader(scan, scan_schema(scan))
        if now:
            self.reader.prepareForTriggerAvailableNow()
        if checkpoint is None:
            checkpoint = through_json(self.reader.initialOffset())
        self.checkpoint = checkpoint

    def batch(self, limit: ReadLimit | None = None) -> Rows | None:
        """The rows of the next batch; None if the source has nothing new."""
        before = self.checkpoint
        wanted = limit or self.reader.getDefaultReadLimit()
        after = through_json(self.reader.latestOffset(before, wanted))
        if after == before:
            return None
        rows = self.read(before, after)
        self.checkpoint = after
        return rows

    def read(self, start: dict[str, Any], end: dict[str, Any]) -> Rows:
        """The rows of a batch that is in the checkpoint."""
        # A task gets what was pickled, and a reader of its own.
        planned = pickle.dumps(self.reader.partitions(start, end))
        rows: Rows = []
        for partition in pickle.loads(planned):
            for batch in self.reader.read(partition):
                for row in batch.to_pylist():
                    number = f"-part-{row['partition']}" if row["partition"] else ""
                    rows.append((row["topic"] + number, row["offset"], row["value"]))
        return rows

    def drain(self) -> list[Rows]:
        """All batches there are."""
        found = []
        while (rows := self.batch()) is not None:
            found.append(rows)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.reader.stop()


def through_json(offset: dict[str, Any]) -> dict[str, Any]:
    """As it comes back from a checkpoint."""
    found: dict[str, Any] = json.loads(json.dumps(offset))
    return found


def require_exact(rows: Rows, expected: dict[str, range]) -> None:
    """Every offset once, with the value that was appended at it."""
    assert Counter((topic, offset) for topic, offset, _ in rows) == Counter(
        (topic, offset) for topic, offsets in expected.items() for offset in offsets
    )
    for topic, offset, value in rows:
        assert value.rstrip(b".") == b"%s %d " % (topic.encode(), offset)


def lose_the_start(path: Path) -> None:
    """The first objects of `orders` go, as remote retention takes them, and then their segments."""
    settings = settings_of(path, remote_retention=RemoteRetentionSettings(size_mb=0))
    with Store(settings) as store:
        # A server does it now and then; there is no call for it.
        assert store._factory.for_topic("/default/orders").trim_remote()
        assert store.topic("orders").trim_local()
