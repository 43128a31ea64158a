"""`spark.readStream.format("forebay")`: what Spark asks of a streaming source, and the answers.

Spark keeps one of these in a process of its own for each query, and makes another one in every
task, which only reads. Decisions are in `stream_offsets`, topics and plans in `stream_topics`.

What a caller gets wrong: with failOnDataLoss=false a stream goes on where it can, and says so in
the log alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from forebay.errors import OffsetOutOfRange, UsageError
from forebay.format.names import TopicName
from forebay.logs import event
from forebay.pipeline.options import ScanOptions
from forebay.pipeline.scan_batch import read_split
from forebay.pipeline.stream_offsets import (
    Loss,
    Positions,
    TopicEnds,
    decode_positions,
    encode_positions,
    limit_bytes,
    limit_messages,
    outlook,
    ranges,
)
from forebay.pipeline.stream_topics import StreamTopics

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

_log: Final = logging.getLogger("forebay.pipeline")
_LOSSES_SHOWN: Final = 5


class ForebayStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The source of one streaming query."""

    def __init__(self, options: ScanOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._opened: StreamTopics | None = None
        self._target: Mapping[TopicName, int] | None = None
        """Where a query that reads what there is now ends."""
        self._told: dict[TopicName, int] = {}
        """Losses that were warned of: the topic, and where the stream was."""

    @property
    def _topics(self) -> StreamTopics:
        if self._opened is None:
            self._opened = StreamTopics(self._options)
        return self._opened

    # -- how far to go --------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return encode_positions(self._topics.first())

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Spark has no limit of both; where both are given, the other one counts all the same."""
        options = self._options
        if options.offsets_per_trigger is not None:
            return ReadMaxRows(options.offsets_per_trigger)
        if options.bytes_per_trigger is not None:
            return ReadMaxBytes(options.bytes_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = {topic: ends.end for topic, ends in self._topics.look().items()}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        seen = outlook(decode_positions(start), self._until_target(self._topics.look()))
        self._report(seen.losses)
        end = self._admit(seen.start, seen.end, limit)
        return encode_positions({**end, **seen.new})

    def _until_target(self, now: Mapping[TopicName, TopicEnds]) -> Mapping[TopicName, TopicEnds]:
        target = self._target
        if target is None:
            return now
        return {
            topic: TopicEnds(ends.start, max(min(ends.end, target[topic]), ends.start))
            for topic, ends in now.items()
            if topic in target
        }

    def _admit(self, start: Positions, end: Positions, limit: ReadLimit) -> Positions:
        if isinstance(limit, ReadAllAvailable):
            return end
        if not isinstance(limit, ReadMaxRows | ReadMaxBytes):
            raise UsageError(f"a stream of the format forebay cannot be limited by {limit!r}")
        messages = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        size = (
            limit.max_bytes if isinstance(limit, ReadMaxBytes) else self._options.bytes_per_trigger
        )
        if messages is not None:
            end = limit_messages(start, end, messages)
        if size is not None:
            end = limit_bytes(start, end, size, self._topics.rulers())
        return end

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """The ends of all topics: the query's progress shows how far it is behind."""
        if self._opened is None:
            return None
        ends = self._opened.ends()
        return encode_positions({topic: each.end for topic, each in ends.items()})

    # -- what to read ---------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        wanted = ranges(decode_positions(start), decode_positions(end))
        now = self._topics.ends()
        if any(topic not in now or now[topic].end < stop for topic, (_, stop) in wanted.items()):
            now = self._topics.look()  # a batch of an earlier run, to be read once more
        self._report(_lost(wanted, now))
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
        """Nothing is kept for a query but its own checkpoint."""

    def stop(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    # -- losses ---------------------------------------------------------------------------------

    def _report(self, losses: Sequence[Loss]) -> None:
        """Raises, or warns of each loss once."""
        if losses and self._options.fail_on_data_loss:
            said = "; ".join(str(loss) for loss in losses[:_LOSSES_SHOWN])
            more = len(losses) - _LOSSES_SHOWN
            first = losses[0]
            raise OffsetOutOfRange(
                f"{said}{f'; and {more} more topics' if more > 0 else ''}. Start the query with a "
                "new checkpoint, or let it go on with what there is: failOnDataLoss=false",
                start=first.position if first.now is None else first.now.start,
                end=first.position if first.now is None else first.now.end,
            )
        for loss in losses:
            if self._told.get(loss.topic) != loss.position:
                self._told[loss.topic] = loss.position
                event(_log, logging.WARNING, "stream goes on after a loss", loss=str(loss))


def _lost(
    wanted: Mapping[TopicName, tuple[int, int]], now: Mapping[TopicName, TopicEnds]
) -> list[Loss]:
    """Of a batch that was planned before, what is not there now."""
    found = []
    for topic, (first, stop) in wanted.items():
        ends = now.get(topic)
        if ends is None or first < ends.start:
            found.append(Loss(topic, first, ends))
        elif stop > ends.end:
            found.append(Loss(topic, stop, ends))
    return found
