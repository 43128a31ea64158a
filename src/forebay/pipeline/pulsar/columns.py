"""From entries of Pulsar to Arrow record batches.

| column                | Spark              | what it is                                        |
|-----------------------|--------------------|---------------------------------------------------|
| `value`               | binary             | the payload; null for a null value                |
| `__key`               | binary             | the key, decoded from Base64 if it was; or null   |
| `__topic`             | string             | `persistent://…`, with the partition              |
| `__messageId`         | binary             | as the clients' `MessageId.toByteArray`           |
| `__publishTime`       | timestamp          | when the producer sent it                         |
| `__eventTime`         | timestamp          | the producer's own time, or null                  |
| `__messageProperties` | map<string,string> | its properties                                    |
| `__ledgerId`          | bigint             | with the next two: its order in its topic         |
| `__entryId`           | bigint             | of a message in chunks, the entry of the last one |
| `__batchIndex`        | int                | its number in the batch; -1 if it is in none      |
| `__partition`         | int                | -1 if the topic is not partitioned                |
| `__kind`              | string             | see `forebay.format.pulsar.messages`              |
| `__sequenceId`        | bigint             | the producer's number                             |
| `__producerName`      | string             |                                                   |
| `__schemaVersion`     | bigint             | null without a schema                             |
| `__orderingKey`       | binary             | or null                                           |
| `__index`             | bigint             | the broker's number of the message, or null       |

The last five are optional. Plain entries become rows without a Python object for each; other
messages come decoded, one by one.

Beware: make the batch of plain entries before the next chunk is read, because the reader reuses the
buffer. The batch itself copies what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from forebay.format import codec
from forebay.format.layout import Buffer
from forebay.format.pulsar.blocks import Entries
from forebay.format.pulsar.columns import TRANSACTIONAL, EntryColumns
from forebay.format.pulsar.messages import Kind, Message
from forebay.format.pulsar.protobuf import put_number, varint
from forebay.pipeline.pulsar.bucket import Ledger

_TIME: Final = pa.timestamp("us", tz="UTC")
TYPES: Final[dict[str, pa.DataType]] = {
    "value": pa.binary(),
    "__key": pa.binary(),
    "__topic": pa.string(),
    "__messageId": pa.binary(),
    "__publishTime": _TIME,
    "__eventTime": _TIME,
    "__messageProperties": pa.map_(pa.string(), pa.string()),
    "__ledgerId": pa.int64(),
    "__entryId": pa.int64(),
    "__batchIndex": pa.int32(),
    "__partition": pa.int32(),
    "__kind": pa.string(),
    "__sequenceId": pa.int64(),
    "__producerName": pa.string(),
    "__schemaVersion": pa.int64(),
    "__orderingKey": pa.binary(),
    "__index": pa.int64(),
}

Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

_MS_MAX: Final = 253_402_300_799_999
"""The end of the year 9999, the last time that a Spark timestamp can hold."""
_CONSTANT_ROWS: Final = 4096
_CONSTANTS_MAX: Final = 16


class BatchMaker:
    """Makes record batches of the given columns. Not thread-safe.

    With times, only rows published in `start..end` are in them; the end is not included.
    """

    def __init__(
        self, columns: Sequence[str], start: int | None = None, end: int | None = None
    ) -> None:
        self.schema = pa.schema([pa.field(name, TYPES[name]) for name in columns])
        self._plain = [_PLAIN[name] for name in columns]
        self._decoded = [_DECODED[name] for name in columns]
        self._start, self._end = start, end
        self._constants: dict[tuple[object, pa.DataType], pa.Array] = {}

    def plain(
        self, ledger: Ledger, entries: Entries, found: EntryColumns, first: int, stop: int
    ) -> pa.RecordBatch:
        """The rows `first..stop` of entries that are all plain."""
        ids = np.arange(entries.first_entry_id + first, entries.first_entry_id + stop)
        rows = _PlainRows(self, ledger, entries.buffer, found, ids, None, first)
        return self._made(rows)

    def batched(self, ledger: Ledger, found: Batched) -> pa.RecordBatch:
        """The rows of the messages of batches."""
        return self._made(
            _PlainRows(self, ledger, found.buffer, found.columns, found.entry_ids, found, 0)
        )

    def _made(self, rows: _PlainRows) -> pa.RecordBatch:
        made = [make(rows) for make in self._plain]
        batch = pa.RecordBatch.from_arrays(made, schema=self.schema)
        return self._in_time(batch, rows.numbers("publish_times"))

    def decoded(self, ledger: Ledger, messages: Sequence[Message]) -> pa.RecordBatch:
        """The rows of messages of one ledger."""
        rows = _DecodedRows(self, ledger, messages)
        made = [make(rows) for make in self._decoded]
        batch = pa.RecordBatch.from_arrays(made, schema=self.schema)
        times = np.fromiter((each.publish_time for each in messages), np.uint64, len(messages))
        return self._in_time(batch, times)

    def _in_time(self, batch: pa.RecordBatch, times: np.ndarray[Any, Any]) -> pa.RecordBatch:
        keep = np.ones(len(times), np.bool_)
        if self._start is not None:
            keep &= times >= self._start
        if self._end is not None:
            keep &= times < self._end
        return batch if keep.all() else batch.filter(pa.array(keep))

    def constant(self, value: str | int | None, kind: pa.DataType, count: int) -> pa.Array:
        """An array that has `value` `count` times."""
        known = self._constants.get((value, kind))
        if known is None or len(known) < count:
            if len(self._constants) >= _CONSTANTS_MAX:
                self._constants.clear()
            known = pa.repeat(pa.scalar(value, kind), max(count, _CONSTANT_ROWS))
            self._constants[value, kind] = known
        return known.slice(0, count)


class Batched(NamedTuple):
    """The messages of batches, as columns."""

    buffer: Buffer
    columns: EntryColumns
    entry_ids: Numbers
    batch_indexes: Numbers
    batch_sizes: Numbers


class _PlainRows:
    """Some rows of entries or of messages in batches, as the functions below get them."""

    def __init__(
        self,
        maker: BatchMaker,
        ledger: Ledger,
        buffer: Buffer,
        found: EntryColumns,
        entry_ids: Numbers,
        batched: Batched | None,
        first: int,
    ) -> None:
        self.maker = maker
        self.ledger = ledger
        self.entry_ids = entry_ids
        self.batched = batched
        self.count = len(entry_ids)
        self._buffer = buffer
        self._found = found
        self._first, self._stop = first, first + self.count

    def column(self, name: str) -> memoryview:
        found: memoryview = getattr(self._found, name)
        return found[self._first : self._stop]

    def numbers(self, name: str) -> np.ndarray[Any, Any]:
        return np.frombuffer(self.column(name), np.int64)

    def constant(self, value: str | int | None, name: str) -> pa.Array:
        return self.maker.constant(value, TYPES[name], self.count)

    def spans(self, name: str, column: str) -> pa.Array:
        """The bytes at the positions of a column; null where the length is negative."""
        lengths = self.column(f"{name}_lengths")
        if np.frombuffer(lengths, np.int64).max(initial=-1) < 0:
            return self.constant(None, column)
        return self.gathered(self.column(f"{name}_positions"), lengths, TYPES[column])

    def gathered(self, positions: memoryview, lengths: memoryview, kind: pa.DataType) -> pa.Array:
        offsets, data, validity = codec.gather(self._buffer, positions, lengths)
        present = None if validity is None else pa.py_buffer(validity)
        buffers = [present, pa.py_buffer(offsets), pa.py_buffer(data)]
        return pa.Array.from_buffers(kind, len(positions), buffers)

    def properties(self) -> pa.Array:
        counts = self.numbers("property_counts")
        ends = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        before = int(np.frombuffer(self._found.property_counts, np.int64)[: self._first].sum())
        numbers = np.frombuffer(self._found.properties, np.int64).reshape(-1, 4)
        wanted = numbers[before : before + int(ends[-1])]
        columns = [np.ascontiguousarray(wanted[:, at]).data for at in range(4)]
        names = self.gathered(columns[0], columns[1], pa.string())
        values = self.gathered(columns[2], columns[3], pa.string())
        return _map(ends, names, values)


def _map(ends: np.ndarray[Any, Any], names: pa.Array, values: pa.Array) -> pa.Array:
    pairs = pa.StructArray.from_arrays(
        [names, values],
        fields=[pa.field("key", pa.string(), nullable=False), pa.field("value", pa.string())],
    )
    buffers = [None, pa.py_buffer(np.ascontiguousarray(ends))]
    kind = TYPES["__messageProperties"]
    return pa.Array.from_buffers(kind, len(ends) - 1, buffers, children=[pairs])


def _times(milliseconds: np.ndarray[Any, Any], absent: np.ndarray[Any, Any]) -> pa.Array:
    """Timestamps; null where `absent`, and where Spark has no such time."""
    wrong = absent | (milliseconds > _MS_MAX)
    micros = np.where(wrong, 0, milliseconds).astype(np.int64) * 1000
    return pa.array(micros, pa.int64(), mask=wrong).cast(_TIME)


def _publish_times(rows: _PlainRows) -> pa.Array:
    times = rows.numbers("publish_times")
    return _times(times, np.zeros(len(times), np.bool_))


def _event_times(rows: _PlainRows) -> pa.Array:
    times = rows.numbers("event_times")
    return _times(times, times == 0) if times.any() else rows.constant(None, "__eventTime")


def _batch_indexes(rows: _PlainRows) -> pa.Array:
    if rows.batched is None:
        return rows.constant(-1, "__batchIndex")
    return pa.array(rows.batched.batch_indexes.astype(np.int32))


def _kinds(rows: _PlainRows) -> pa.Array:
    sent = rows.numbers("flags") & TRANSACTIONAL != 0
    if not sent.any():
        return rows.constant(Kind.MESSAGE.value, "__kind")
    return pa.array(np.where(sent, Kind.TRANSACTIONAL.value, Kind.MESSAGE.value), pa.string())


def _indexes(rows: _PlainRows) -> pa.Array:
    numbers = rows.numbers("indexes")
    return pa.array(numbers, pa.int64(), mask=numbers < 0)


def _schema_versions(rows: _PlainRows) -> pa.Array:
    if rows.numbers("schema_lengths").max(initial=-1) < 0:
        return rows.constant(None, "__schemaVersion")
    stored = rows.spans("schema", "__orderingKey")
    return pa.array([_version(each.as_py()) for each in stored], pa.int64())


def _version(stored: bytes | None) -> int | None:
    """The number of a schema's version; null for anything else than Pulsar's 8 bytes."""
    if stored is None or len(stored) != 8:
        return None
    return int.from_bytes(stored, "big", signed=True)


# ---- message ids: MessageIdData of PulsarApi.proto ----


def _message_id(ledger: Ledger, message: Message) -> bytes:
    parts = [_id_head(ledger), varint(message.entry_id), _id_tail(ledger)]
    if message.batch_size:
        parts += [put_number(4, message.batch_index), put_number(6, message.batch_size)]
    return b"".join(parts)


def _id_head(ledger: Ledger) -> bytes:
    """Everything before the number of the entry."""
    return put_number(1, ledger.ledger_id) + varint(2 << 3)


def _id_tail(ledger: Ledger) -> bytes:
    """The partition, if there is one."""
    partition = ledger.topic.partition
    return b"" if partition < 0 else put_number(3, partition)


def _message_ids(rows: _PlainRows) -> pa.Array:
    """The ids of consecutive entries. Those whose numbers have as many bytes are made together."""
    if rows.batched is not None:
        return _ids_in_batches(rows.ledger, rows.batched)
    head, tail = _id_head(rows.ledger), _id_tail(rows.ledger)
    data: list[bytes] = []
    widths: list[np.ndarray[Any, Any]] = []
    first = int(rows.entry_ids[0])
    stop = first + rows.count
    while first < stop:
        width = len(varint(first))
        until = min(stop, 1 << 7 * width)
        numbers = np.arange(first, until, dtype=np.uint64)
        table = np.empty((until - first, len(head) + width + len(tail)), np.uint8)
        table[:, : len(head)] = np.frombuffer(head, np.uint8)
        table[:, len(head) + width :] = np.frombuffer(tail, np.uint8)
        for at in range(width):
            seven = numbers >> np.uint64(7 * at) & np.uint64(0x7F)
            more = 0x80 if at < width - 1 else 0
            table[:, len(head) + at] = seven.astype(np.uint8) | np.uint8(more)
        data.append(table.tobytes())
        widths.append(np.full(until - first, table.shape[1], np.int32))
        first = until
    ends = np.concatenate(
        (np.zeros(1, np.int32), np.cumsum(np.concatenate(widths), dtype=np.int32))
    )
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(data))]
    return pa.Array.from_buffers(pa.binary(), rows.count, buffers)


def _ids_in_batches(ledger: Ledger, found: Batched) -> pa.Array:
    head, tail = _id_head(ledger), _id_tail(ledger)
    entries, indexes, sizes = (
        each.tolist() for each in (found.entry_ids, found.batch_indexes, found.batch_sizes)
    )
    of_entry = {each: head + varint(each) + tail for each in set(entries)}
    of_index = {each: put_number(4, each) for each in set(indexes)}
    of_size = {each: put_number(6, each) for each in set(sizes)}
    ids = [
        of_entry[entry] + of_index[index] + of_size[size]
        for entry, index, size in zip(entries, indexes, sizes, strict=True)
    ]
    return pa.array(ids, pa.binary())


_PLAIN: Final[dict[str, Callable[[_PlainRows], pa.Array]]] = {
    "value": lambda rows: rows.spans("payload", "value"),
    "__key": lambda rows: rows.spans("key", "__key"),
    "__topic": lambda rows: rows.constant(str(rows.ledger.topic), "__topic"),
    "__messageId": _message_ids,
    "__publishTime": _publish_times,
    "__eventTime": _event_times,
    "__messageProperties": lambda rows: rows.properties(),
    "__ledgerId": lambda rows: rows.constant(rows.ledger.ledger_id, "__ledgerId"),
    "__entryId": lambda rows: pa.array(rows.entry_ids, pa.int64()),
    "__batchIndex": _batch_indexes,
    "__partition": lambda rows: rows.constant(rows.ledger.topic.partition, "__partition"),
    "__kind": _kinds,
    "__sequenceId": lambda rows: pa.array(rows.numbers("sequence_ids")),
    "__producerName": lambda rows: rows.spans("producer", "__producerName"),
    "__schemaVersion": _schema_versions,
    "__orderingKey": lambda rows: rows.spans("ordering", "__orderingKey"),
    "__index": _indexes,
}


# ---- messages that were decoded ----


class _DecodedRows:
    def __init__(self, maker: BatchMaker, ledger: Ledger, messages: Sequence[Message]) -> None:
        self.maker = maker
        self.ledger = ledger
        self.messages = messages

    def constant(self, value: str | int | None, name: str) -> pa.Array:
        return self.maker.constant(value, TYPES[name], len(self.messages))

    def each(self, name: str, of: Callable[[Message], object]) -> pa.Array:
        return pa.array([of(message) for message in self.messages], TYPES[name])


def _each(name: str, of: Callable[[Message], object]) -> Callable[[_DecodedRows], pa.Array]:
    return lambda rows: rows.each(name, of)


def _micros(milliseconds: int | None) -> int | None:
    return None if milliseconds is None or milliseconds > _MS_MAX else milliseconds * 1000


_DECODED: Final[dict[str, Callable[[_DecodedRows], pa.Array]]] = {
    "value": _each("value", lambda each: each.value),
    "__key": _each("__key", lambda each: each.key),
    "__topic": lambda rows: rows.constant(str(rows.ledger.topic), "__topic"),
    "__messageId": lambda rows: rows.each(
        "__messageId", lambda each: _message_id(rows.ledger, each)
    ),
    "__publishTime": _each("__publishTime", lambda each: _micros(each.publish_time)),
    "__eventTime": _each("__eventTime", lambda each: _micros(each.event_time)),
    "__messageProperties": _each("__messageProperties", lambda each: list(each.properties)),
    "__ledgerId": lambda rows: rows.constant(rows.ledger.ledger_id, "__ledgerId"),
    "__entryId": _each("__entryId", lambda each: each.entry_id),
    "__batchIndex": _each("__batchIndex", lambda each: each.batch_index),
    "__partition": lambda rows: rows.constant(rows.ledger.topic.partition, "__partition"),
    "__kind": _each("__kind", lambda each: each.kind.value),
    "__sequenceId": _each("__sequenceId", lambda each: each.sequence_id),
    "__producerName": _each("__producerName", lambda each: each.producer_name),
    "__schemaVersion": _each("__schemaVersion", lambda each: _version(each.schema_version)),
    "__orderingKey": _each("__orderingKey", lambda each: each.ordering_key),
    "__index": _each("__index", lambda each: each.index),
}
