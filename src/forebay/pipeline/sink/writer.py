"""The sink: `df.write.format("forebay")` and `df.writeStream.format("forebay")`.

Tasks stage their rows in the object store; the driver appends them through the owner of the
topics, in the order of partitions, and each row once for each (sink id, batch, partition, row).
The owner is the server where one runs, and for the time of a batch the driver itself where none
does. Spark makes these objects anew in every process that needs one, so they hold options alone.

What a caller gets wrong: a streaming query is known by its `sinkId`, which must stay the same when
it is started again, and must be another one when it gets a new checkpoint.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from forebay.errors import ForebayError, UsageError
from forebay.format.names import parse_topic, staged_file
from forebay.limits import OFFSET_MAX
from forebay.logs import event
from forebay.pipeline.location import ADDRESS_NAMES, NO_DATA, SERVER, is_address, sink_settings
from forebay.pipeline.sink.columns import check_columns, checked_rows
from forebay.pipeline.sink.commit import (
    Committed,
    SinkBatch,
    check_sink_id,
    commit_batch,
    sweep_if_due,
)
from forebay.pipeline.sink.owner import (
    LocalTopicWriter,
    commit_through,
    forget_through,
    serving,
)
from forebay.pipeline.sink.staging import Part, forget_parts, stage
from forebay.settings import StoreSettings
from forebay.topic.resources import executor_resources

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType


_log: Final = logging.getLogger("forebay.pipeline")
_OPTIONS: Final = (SERVER, "topic", "sinkId", "batchId")


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The options of a write, checked."""

    settings: StoreSettings
    topic: str | None
    sink_id: str | None
    batch: int | None


@dataclass
class StagedPart(WriterCommitMessage):
    """What a task tells the driver: where its rows are."""

    part: Part


def sink_options(options: Mapping[str, str], *, streaming: bool) -> SinkOptions:
    """UsageError for options that no sink has, or that contradict the kind of write."""
    given = {name.lower(): value for name, value in options.items()}
    known = {name.lower() for name in (*_OPTIONS, *ADDRESS_NAMES)} | _SPARKS_OWN
    unknown = sorted(
        name for name in given if name not in known and not is_address(name) and name != "token"
    )
    if unknown:
        raise UsageError(
            f"the sink has no option {', '.join(map(repr, unknown))}; it has "
            f"{', '.join(map(repr, ('path', *_OPTIONS)))}"
        )
    settings = sink_settings(options)
    if settings.data == NO_DATA and settings.server is None:
        raise UsageError(
            "the sink appends through the owner of the topics, whose log is in a data directory: "
            "give the option 'path', a data directory or a configuration file, or 'server', the "
            "address of the server that owns them"
        )
    topic, sink_id, batch = given.get("topic"), given.get("sinkid"), given.get("batchid")
    if streaming and sink_id is None:
        raise UsageError(
            "a streaming query needs the option 'sinkId', a name of its own that stays the same "
            "when it is started again: Spark may repeat a batch, and the sink knows it by that"
        )
    if streaming and batch is not None:
        raise UsageError("a streaming query has no option 'batchId': Spark numbers its batches")
    if batch is not None and sink_id is None:
        raise UsageError("the option 'batchId' needs 'sinkId': whose batch it is")
    return SinkOptions(
        settings=settings,
        topic=None if topic is None else str(parse_topic(topic)),
        sink_id=None if sink_id is None else check_sink_id(sink_id),
        batch=None if batch is None else _batch(batch),
    )


_SPARKS_OWN: Final = frozenset({"checkpointlocation", "queryname", "mode"})
"""Options of Spark's that reach every source."""


def _batch(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) > OFFSET_MAX:
        raise UsageError(f"the option 'batchId' is {text!r}; it must be a number from 0 on")
    return int(text)


class _Sink:
    """What both kinds of writers share."""

    def __init__(
        self,
        options: Mapping[str, str],
        schema: StructType,
        overwrite: bool,
        *,
        streaming: bool,
    ) -> None:
        self.options = sink_options(options, streaming=streaming)
        if overwrite:
            raise UsageError(
                'a topic is append-only: write with mode("append")'
                if not streaming
                else 'a topic is append-only: write with outputMode("append")'
            )
        check_columns(schema, self.options.topic)
        self._write_id = secrets.token_hex(8)

    def stage(self, batches: Iterator[pa.RecordBatch]) -> StagedPart:
        """In a task: its rows as one object."""
        task = TaskContext.get()
        partition = 0 if task is None else task.partitionId()
        attempt = 0 if task is None else task.taskAttemptId()
        settings = self.options.settings
        part = stage(
            executor_resources(settings).store,
            staged_file(self._write_id, partition, attempt),
            partition,
            checked_rows(batches, partition, self.options.topic),
            chunk_bytes=settings.uploader.stream_chunk_size,
        )
        return StagedPart(part)

    def append(self, messages: Sequence[WriterCommitMessage | None], batch: SinkBatch) -> Committed:
        """On the driver: the rows of all tasks, through the owner."""
        settings, parts = self.options.settings, parts_of(messages)
        server = serving(settings)
        if server is not None:
            return commit_through(server, batch, parts)
        resources = executor_resources(settings)
        sweep_if_due(resources.store, batch)
        with LocalTopicWriter(settings) as writer:
            return commit_batch(writer, resources.catalog, resources.store, batch, parts)

    def forget(self, messages: Sequence[WriterCommitMessage | None], batch: SinkBatch) -> None:
        """After a failure: the staged files go, unless a batch that was begun needs them."""
        settings, parts = self.options.settings, parts_of(messages)
        server = serving(settings)
        if server is None:
            forget_parts(executor_resources(settings).store, parts)
            return
        try:
            forget_through(server, batch, parts)
        except ForebayError as error:  # why the write failed was raised already; a sweep takes them
            event(_log, logging.WARNING, "staged files are left behind", error=error)


def parts_of(messages: Sequence[WriterCommitMessage | None]) -> list[Part]:
    """What the tasks staged; one that failed reports nothing."""
    return [message.part for message in messages if isinstance(message, StagedPart)]


class ForebayWriter(DataSourceArrowWriter):
    """One write of a DataFrame."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        self._sink = _Sink(options, schema, overwrite, streaming=False)
        given = self._sink.options
        self._batch = SinkBatch(
            given.sink_id or f"once-{secrets.token_hex(8)}",
            given.batch or 0,
            named=given.sink_id is not None,
        )

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._sink.stage(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._sink.append(messages, self._batch)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._sink.forget(messages, self._batch)


class ForebayStreamWriter(DataSourceStreamArrowWriter):
    """The batches of a streaming query; Spark makes it anew for each."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        self._sink = _Sink(options, schema, overwrite, streaming=True)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._sink.stage(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._sink.append(messages, self._batch(batchId))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        event(_log, logging.WARNING, "a batch failed", batch=batchId)
        self._sink.forget(messages, self._batch(batchId))

    def _batch(self, number: int) -> SinkBatch:
        sink_id = self._sink.options.sink_id
        assert sink_id is not None, "a stream without one is refused when it is made"
        return SinkBatch(sink_id, number, named=True, streaming=True)
