"""From scanned frames to Arrow record batches, without creating a Python object for each row.

| column          | Spark     | Arrow                | what it is                              |
|-----------------|-----------|----------------------|-----------------------------------------|
| `key`           | binary    | binary               | the routing key, or null                |
| `value`         | binary    | binary               | the payload                             |
| `topic`         | string    | string               | `/namespace/topic`, without a partition |
| `partition`     | int       | int32                | the number after `-part-`, else 0       |
| `offset`        | bigint    | int64                | the offset                              |
| `timestamp`     | timestamp | timestamp[us, UTC]   | when it was published                   |
| `timestampType` | int       | int32                | 0: the producer's time                  |
| `headers`       | array     | list of (key, value) | the attributes; null if there are none  |

The names and types are those of Spark's Kafka source. `headers` is optional.

Beware: make the batch before the next chunk is read, because the reader reuses the buffer. The
batch itself copies the values and keys, so it stays valid afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from forebay.errors import CorruptLog, MessageError
from forebay.format import codec
from forebay.format.frame import Scan
from forebay.format.layout import Span, attribute_spans
from forebay.format.message import MessageColumns, message_columns
from forebay.format.names import TopicName

_HEADER: Final = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
TYPES: Final[dict[str, pa.DataType]] = {
    "key": pa.binary(),
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestampType": pa.int32(),
    "headers": pa.list_(pa.field("element", _HEADER)),
}
"""All columns, in the order of the schema. All are nullable, as in Spark's Kafka source."""

_MS_MAX: Final = 253_402_300_799_999
"""The end of the year 9999, the last time that a Spark timestamp can hold."""


class BatchMaker:
    """Makes record batches of the given columns, and reuses constant columns. Not thread-safe."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.schema = pa.schema([pa.field(name, TYPES[name]) for name in columns])
        self._makers = [_MAKERS[name] for name in columns]
        self._located = any(name in _LOCATED for name in columns)
        self._constants: dict[tuple[object, pa.DataType], pa.Array] = {}

    def batch(self, topic: TopicName, frames: Scan) -> pa.RecordBatch:
        """The rows of the frames; CorruptLog if a frame does not hold a message."""
        rows = _Rows(self, topic, frames, _located(topic, frames) if self._located else None)
        return pa.RecordBatch.from_arrays([make(rows) for make in self._makers], schema=self.schema)

    def constant(self, value: str | int | None, kind: pa.DataType, count: int) -> pa.Array:
        """An array that has `value` `count` times."""
        known = self._constants.get((value, kind))
        if known is None or len(known) < count:
            # The constants of a topic are not needed again once the next topic has begun.
            if len(self._constants) >= _CONSTANTS_MAX:
                self._constants.clear()
            known = pa.repeat(pa.scalar(value, kind), max(count, _CONSTANT_ROWS))
            self._constants[value, kind] = known
        return known.slice(0, count)


_CONSTANT_ROWS: Final = 1024
_CONSTANTS_MAX: Final = 16


class _Rows:
    """The frames of a batch, as the functions below get them."""

    __slots__ = ("_found", "frames", "maker", "topic")

    def __init__(
        self, maker: BatchMaker, topic: TopicName, frames: Scan, found: MessageColumns | None
    ) -> None:
        self.maker = maker
        self.topic = topic
        self.frames = frames
        self._found = found

    @property
    def found(self) -> MessageColumns:
        assert self._found is not None, "the column is one of those that need it"
        return self._found

    def constant(self, value: str | int | None, name: str) -> pa.Array:
        return self.maker.constant(value, TYPES[name], len(self.frames))


def _located(topic: TopicName, frames: Scan) -> MessageColumns:
    try:
        return message_columns(frames)
    except MessageError as error:
        raise CorruptLog(
            f"{topic}: between offsets {frames.offsets[0]} and {frames.offsets[-1]}: {error}"
        ) from error


def _binary(frames: Scan, positions: memoryview, lengths: memoryview) -> pa.Array:
    offsets, data, validity = codec.gather(frames.buffer, positions, lengths)
    present = None if validity is None else pa.py_buffer(validity)
    buffers = [present, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), len(positions), buffers)


def _key(rows: _Rows) -> pa.Array:
    lengths = rows.found.key_lengths
    if np.frombuffer(lengths, np.int64).max(initial=-1) < 0:
        return rows.constant(None, "key")
    return _binary(rows.frames, rows.found.key_positions, lengths)


def _value(rows: _Rows) -> pa.Array:
    return _binary(rows.frames, rows.found.payload_positions, rows.found.payload_lengths)


def _topic(rows: _Rows) -> pa.Array:
    return rows.constant(rows.topic.base, "topic")


def _partition(rows: _Rows) -> pa.Array:
    return rows.constant(rows.topic.partition, "partition")


def _offset(rows: _Rows) -> pa.Array:
    offsets = rows.frames.offsets  # u64, but the highest bit is never set, so i64 is the same
    return pa.Array.from_buffers(pa.int64(), len(offsets), [None, pa.py_buffer(offsets)])


def _timestamp(rows: _Rows) -> pa.Array:
    times = np.frombuffer(rows.found.publish_times, np.uint64)
    nonsense = times > _MS_MAX
    if nonsense.any():
        micros = np.where(nonsense, 0, times).astype(np.int64) * 1000
        return pa.array(micros, pa.int64(), mask=nonsense).cast(TYPES["timestamp"])
    micros = times.astype(np.int64)
    micros *= 1000
    return pa.Array.from_buffers(TYPES["timestamp"], len(micros), [None, pa.py_buffer(micros)])


def _timestamp_type(rows: _Rows) -> pa.Array:
    return rows.constant(0, "timestampType")


def _headers(rows: _Rows) -> pa.Array:
    found = rows.found
    counts = np.frombuffer(found.attribute_counts, np.int64)
    if not counts.any():
        return rows.constant(None, "headers")
    places, sizes = [], []
    for row in np.flatnonzero(counts).tolist():
        pairs = Span(found.attribute_positions[row], found.attribute_lengths[row])
        for position, length in attribute_spans(
            rows.frames.buffer, pairs, found.attribute_counts[row], found.flavours[row]
        ):
            places.append(position)
            sizes.append(length)
    spans = np.array(places, np.int64), np.array(sizes, np.int64)
    keys, values = (
        _binary(rows.frames, *(np.ascontiguousarray(each[at::2]).data for each in spans))
        for at in (0, 1)
    )
    try:
        keys = keys.cast(pa.string())
    except pa.ArrowInvalid as error:
        raise CorruptLog(
            f"{rows.topic}: a message between offsets {rows.frames.offsets[0]} and "
            f"{rows.frames.offsets[-1]} has an attribute whose name is not UTF-8: {error}"
        ) from error
    pairs_array = pa.StructArray.from_arrays([keys, values], fields=list(_HEADER))
    ends = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    return pa.ListArray.from_arrays(
        pa.array(ends), pairs_array, type=TYPES["headers"], mask=pa.array(counts == 0)
    )


_MAKERS: Final[dict[str, Callable[[_Rows], pa.Array]]] = {
    "key": _key,
    "value": _value,
    "topic": _topic,
    "partition": _partition,
    "offset": _offset,
    "timestamp": _timestamp,
    "timestampType": _timestamp_type,
    "headers": _headers,
}
_LOCATED: Final = frozenset({"key", "value", "timestamp", "headers"})
"""The columns whose values are inside the messages, so that these must be parsed."""
