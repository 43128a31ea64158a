"""The sink: `df.write.format("forebay")` and `df.writeStream.format("forebay")`.

Tasks stage their rows in the object store. The driver then appends them through the owner of the
topics, in the order of partitions, once for each (sink id, batch, partition, row). The owner is a
server if one runs, else the driver itself during the commit. Spark creates these objects again in
every process, so they hold only options.

Spark tells the driver's part of a sink neither which query it writes for nor where its checkpoint
is. Tasks know the id of the query, which is in the checkpoint, and send it along with their rows.

Beware: a streaming query is identified by its `sinkId`. Keep it when the query is restarted, and
choose another one when the query gets a new checkpoint.
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
_QUERY_ID: Final = "sql.streaming.queryId"
"""The local property in which Spark gives tasks the id of their query, as its checkpoint has it."""


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The options of a write, parsed and checked."""

    settings: StoreSettings
    topic: str | None
    sink_id: str | None
    batch: int | None


@dataclass
class StagedPart(WriterCommitMessage):
    """The message of a task to the driver: where its rows are staged."""

    part: Part
    query: str | None = None
    """The id of the streaming query, if it is one."""


def sink_options(options: Mapping[str, str], *, streaming: bool) -> SinkOptions:
    """Parses the options; UsageError for unknown ones, and for ones that do not fit the write."""
    given = {name.lower(): value for name, value in options.items()}
    known = {name.lower() for name in (*_OPTIONS, *ADDRESS_NAMES)} | _SPARK_OPTIONS
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
            "the sink appends through the owner of the topics: give the option 'path', a data "
            "directory or a configuration file, or 'server', the URL of the server that owns them"
        )
    topic, sink_id, batch = given.get("topic"), given.get("sinkid"), given.get("batchid")
    if streaming and sink_id is None:
        raise UsageError(
            "a streaming query needs the option 'sinkId', a unique name that stays the same when "
            "the query is restarted: the sink recognises repeated batches by it"
        )
    if streaming and batch is not None:
        raise UsageError("a streaming query has no option 'batchId': Spark numbers its batches")
    if batch is not None and sink_id is None:
        raise UsageError("the option 'batchId' needs the option 'sinkId'")
    return SinkOptions(
        settings=settings,
        topic=None if topic is None else str(parse_topic(topic)),
        sink_id=None if sink_id is None else check_sink_id(sink_id),
        batch=None if batch is None else _batch(batch),
    )


_SPARK_OPTIONS: Final = frozenset({"checkpointlocation", "queryname", "mode"})
"""Options of Spark itself, which it passes to every format."""


def _batch(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) > OFFSET_MAX:
        raise UsageError(f"the option 'batchId' is {text!r}; it must be a whole number")
    return int(text)


class _Sink:
    """What the batch writer and the stream writer share."""

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
        """Runs in a task: stages its rows as one object."""
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
        query = None if task is None else task.getLocalProperty(_QUERY_ID)
        return StagedPart(part, query)

    def append(self, messages: Sequence[WriterCommitMessage | None], batch: SinkBatch) -> Committed:
        """Runs on the driver: appends the rows of all tasks through the owner."""
        settings, parts = self.options.settings, parts_of(messages)
        server = serving(settings)
        if server is not None:
            return commit_through(server, batch, parts)
        resources = executor_resources(settings)
        sweep_if_due(resources.store, batch)
        with LocalTopicWriter(settings) as writer:
            return commit_batch(writer, resources.catalog, resources.store, batch, parts)

    def forget(self, messages: Sequence[WriterCommitMessage | None], batch: SinkBatch) -> None:
        """Runs after a failure: deletes the staged files, unless a begun batch needs them."""
        settings, parts = self.options.settings, parts_of(messages)
        server = serving(settings)
        if server is None:
            forget_parts(executor_resources(settings).store, parts)
            return
        try:
            forget_through(server, batch, parts)
        except ForebayError as error:  # the cause is raised already; a sweep deletes the files
            event(_log, logging.WARNING, "staged files are left behind", error=error)


def parts_of(messages: Sequence[WriterCommitMessage | None]) -> list[Part]:
    """The parts that tasks staged. A task that failed has no message."""
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
    """One batch of a streaming query: Spark creates a new writer for each."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        self._sink = _Sink(options, schema, overwrite, streaming=True)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._sink.stage(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._sink.append(messages, self._batch(batchId, messages))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        event(_log, logging.WARNING, "a batch failed", batch=batchId)
        self._sink.forget(messages, self._batch(batchId, messages))

    def _batch(self, number: int, messages: Sequence[WriterCommitMessage | None]) -> SinkBatch:
        sink_id = self._sink.options.sink_id
        assert sink_id is not None, "a stream without one is refused when it is made"
        queries = (each.query for each in messages if isinstance(each, StagedPart))
        query = next(filter(None, queries), None)
        return SinkBatch(sink_id, number, named=True, streaming=True, query=query)
