"""`spark.readStream.format("forebay")`: the streaming source.

Spark keeps one `ForebayStreamReader` for each query, in a separate process, which plans. It makes
another one in every task, which only reads. The planning one holds `StreamTopics`: views of the
topics that stay open from trigger to trigger and are refreshed, and no bytes of messages. Decisions
are in `stream_offsets`.

Beware: with failOnDataLoss=false a stream skips lost messages, and reports them only in its log. So
it does with ranges whose loss an operator accepted, whatever the option says.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from forebay.catalog.records import TopicRecord
from forebay.errors import OffsetOutOfRange, UsageError
from forebay.format.names import TopicName, parse_topic
from forebay.limits import MIB
from forebay.logs import event
from forebay.pipeline.source.options import ScanOptions
from forebay.pipeline.source.plan import (
    KnownPlaces,
    Piece,
    Split,
    after_skipped,
    plan_topic,
    recut,
    splits,
)
from forebay.pipeline.source.scan import open_view, range_of, read_split
from forebay.pipeline.source.stream_offsets import (
    Loss,
    Positions,
    TopicEnds,
    TopicSizes,
    decode_positions,
    encode_positions,
    limit_bytes,
    limit_messages,
    outlook,
    ranges,
)
from forebay.topic.resources import executor_resources
from forebay.topic.view import StoreView, TopicView

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType


_log: Final = logging.getLogger("forebay.pipeline")
_LOSSES_SHOWN: Final = 5
WORTH_A_TASK_BYTES: Final = 4 * MIB
"""Smaller pieces share a task: a task costs Spark some 15 ms, the time to read this much."""


class _Topic:
    """One topic: a view of it, and what is known about the positions of its messages."""

    def __init__(self, store: StoreView, topic: TopicName) -> None:
        self.view = TopicView(store, topic)
        self._begin()

    def refresh(self) -> None:
        self.view.refresh()
        segments = self.view.segments()
        if segments and segments[-1].path != self._newest:
            self._begin()  # the previous segment is sealed now, and has an index file
        else:
            self.places.remember(self.view)

    def _begin(self) -> None:
        segments = self.view.segments()
        self._newest = segments[-1].path if segments else None
        self.places = KnownPlaces()
        self.places.remember(self.view)
        self.sizes = TopicSizes(self.view, self.places)

    @property
    def ends(self) -> TopicEnds:
        view = self.view
        end = max(view.end_offset, view.start_offset)
        return TopicEnds(view.start_offset, end, view.record or TopicRecord())


class StreamTopics:
    """The topics of a query, as its planner sees them. Not thread-safe. Close it at the end."""

    def __init__(self, options: ScanOptions) -> None:
        self._options = options
        self._store = open_view(options.settings)
        self._topics: dict[TopicName, _Topic] = {}

    def close(self) -> None:
        self._topics.clear()
        self._store.close()

    def first(self) -> Positions:
        """Where a new query starts, by its options.

        UsageError if a named topic does not exist. A pattern may match no topic.
        """
        self._options.chosen(self._store.topics())
        self.look()
        self._options.starting.require_named("startingOffsets", list(self._topics))
        resources = executor_resources(self._options.settings)
        return {
            topic: range_of(resources, each.view, self._options).start
            for topic, each in self._topics.items()
        }

    def look(self) -> dict[TopicName, TopicEnds]:
        """Refreshes the views; returns the subscribed topics that exist, with their synced ends."""
        found: dict[TopicName, _Topic] = {}
        for topic in self._subscribed():
            each = self._topics.get(topic)
            try:
                if each is None:
                    each = _Topic(self._store, topic)
                else:
                    each.refresh()
            except UsageError:  # a directory without a log yet, or a topic that was deleted
                continue
            found[topic] = each
        self._topics = found
        return {topic: each.ends for topic, each in found.items()}

    def _subscribed(self) -> list[TopicName]:
        """The subscribed topics that exist. No error for others: `outlook` reports losses."""
        names = self._store.topics()
        there = {*names, *(parse_topic(name).base for name in names)}
        topics = tuple(topic for topic in self._options.topics if str(topic) in there)
        return replace(self._options, topics=topics).chosen(names)

    def sizes(self) -> Mapping[TopicName, TopicSizes]:
        return {topic: each.sizes for topic, each in self._topics.items()}

    def ends(self) -> dict[TopicName, TopicEnds]:
        """The ends of the topics as of the last `look`."""
        return {topic: each.ends for topic, each in self._topics.items()}

    def plan(self, ranges: Mapping[TopicName, tuple[int, int]]) -> list[Split]:
        """The splits that read exactly these offsets, which must be inside their topics."""
        options = self._options
        pieces: list[Piece] = []
        for topic, (start, end) in ranges.items():
            each = self._topics[topic]
            try:
                pieces += self._pieces(each, start, end)
            except FileNotFoundError:  # a segment was uploaded and deleted meanwhile
                each.refresh()
                pieces += self._pieces(each, start, end)
        size = sum(piece.size for piece in pieces)
        least = max(options.partitions_min, min(_cores(), size // WORTH_A_TASK_BYTES), 1)
        planned = splits(
            pieces,
            options.split_bytes,
            least,
            lambda piece, size: recut(self._topics[piece.topic].view, piece, size),
        )
        event(
            _log,
            logging.DEBUG,
            "batch planned",
            topics=len(ranges),
            splits=len(planned),
            messages=sum(split.count for split in planned),
            bytes=size,
        )
        return planned

    def _pieces(self, each: _Topic, start: int, end: int) -> list[Piece]:
        return plan_topic(
            each.view,
            start,
            end,
            split_bytes=self._options.split_bytes,
            fail_on_data_loss=self._options.fail_on_data_loss,
            places=each.places,
        )


def _cores() -> int:
    """The cores of this machine. The planner cannot see the cluster: users set `minPartitions`."""
    return len(os.sched_getaffinity(0))


class ForebayStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The source of one streaming query."""

    def __init__(self, options: ScanOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._opened: StreamTopics | None = None
        self._target: Mapping[TopicName, int] | None = None
        """The end of a query with trigger(availableNow=True)."""
        self._warned: dict[TopicName, int] = {}
        """For each topic, the position of the last loss that was logged."""

    @property
    def _topics(self) -> StreamTopics:
        if self._opened is None:
            self._opened = StreamTopics(self._options)
        return self._opened

    # ---- how far to go

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return encode_positions(self._topics.first())

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """The limit of messages or of bytes. If both are given, `_admit` applies bytes as well."""
        options = self._options
        if options.offsets_per_trigger is not None:
            return ReadMaxRows(options.offsets_per_trigger)
        if options.bytes_per_trigger is not None:
            return ReadMaxBytes(options.bytes_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = {topic: ends.end for topic, ends in self._topics.look().items()}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        now = self._until_target(self._topics.look())
        fail = self._options.fail_on_data_loss
        seen = outlook(decode_positions(start), now, fail_on_data_loss=fail)
        self._report(seen.losses)
        end = self._admit(seen.start, seen.end, limit)
        return encode_positions({**end, **seen.new})

    def _until_target(self, now: Mapping[TopicName, TopicEnds]) -> Mapping[TopicName, TopicEnds]:
        target = self._target
        if target is None:
            return now
        return {
            topic: replace(ends, end=max(min(ends.end, target[topic]), ends.start))
            for topic, ends in now.items()
            if topic in target
        }

    def _admit(self, start: Positions, end: Positions, limit: ReadLimit) -> Positions:
        if isinstance(limit, ReadAllAvailable):
            return end
        if not isinstance(limit, ReadMaxRows | ReadMaxBytes):
            raise UsageError(f"a stream of the format forebay does not support the limit {limit!r}")
        messages = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        size = (
            limit.max_bytes if isinstance(limit, ReadMaxBytes) else self._options.bytes_per_trigger
        )
        holes = {topic: ends.record for topic, ends in self._topics.ends().items()}
        fail = self._options.fail_on_data_loss
        if messages is not None:
            end = limit_messages(start, end, messages, holes, fail_on_data_loss=fail)
        if size is not None:
            sizes = self._topics.sizes()
            end = limit_bytes(start, end, size, sizes, holes, fail_on_data_loss=fail)
        return end

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """The ends of all topics, from which the query's progress shows how far it is behind."""
        if self._opened is None:
            return None
        ends = self._opened.ends()
        return encode_positions({topic: each.end for topic, each in ends.items()})

    # ---- what to read

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        wanted = ranges(decode_positions(start), decode_positions(end))
        now = self._topics.ends()
        if any(topic not in now or now[topic].end < stop for topic, (_, stop) in wanted.items()):
            now = self._topics.look()  # a batch that an earlier run of the query planned
        self._report(_lost(wanted, now, fail_on_data_loss=self._options.fail_on_data_loss))
        there = {
            topic: (max(first, now[topic].start), min(stop, now[topic].end))
            for topic, (first, stop) in wanted.items()
            if topic in now
        }
        return [InputPartition(split) for split in self._topics.plan(there)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        options = self._options
        yield from read_split(options.settings, partition.value, options.columns)

    def commit(self, end: dict[str, Any]) -> None:
        """Does nothing: the position of a query is in Spark's checkpoint only."""

    def stop(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    # ---- losses

    def _report(self, losses: Sequence[Loss]) -> None:
        """Raises OffsetOutOfRange for losses; with failOnDataLoss=false, logs each of them once."""
        if losses and self._options.fail_on_data_loss:
            said = "; ".join(str(loss) for loss in losses[:_LOSSES_SHOWN])
            more = len(losses) - _LOSSES_SHOWN
            first = losses[0]
            raise OffsetOutOfRange(
                f"{said}{f'; and {more} more topics' if more > 0 else ''}. Start the query with a "
                "new checkpoint, or set failOnDataLoss=false to skip what is lost",
                start=first.position if first.now is None else first.now.start,
                end=first.position if first.now is None else first.now.end,
            )
        for loss in losses:
            if self._warned.get(loss.topic) != loss.position:
                self._warned[loss.topic] = loss.position
                event(_log, logging.WARNING, "stream skips lost messages", loss=str(loss))


def _lost(
    wanted: Mapping[TopicName, tuple[int, int]],
    now: Mapping[TopicName, TopicEnds],
    *,
    fail_on_data_loss: bool,
) -> list[Loss]:
    """The offsets of a planned batch that do not exist any more."""
    found = []
    for topic, (start, stop) in wanted.items():
        ends = now.get(topic)
        record = TopicRecord() if ends is None else ends.record
        first = after_skipped(record, start, fail_on_data_loss=fail_on_data_loss)
        if ends is None or first < ends.start:
            found.append(Loss(topic, first, ends))
        elif stop > ends.end:
            found.append(Loss(topic, stop, ends))
    return found
