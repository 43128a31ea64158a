"""Which columns the sink takes, and how rows become messages.

| column    | type                                  | becomes           |
|-----------|---------------------------------------|-------------------|
| `value`   | binary or string                      | the payload       |
| `key`     | binary or string, UTF-8               | the routing key   |
| `headers` | array of struct(key string, value binary or string), UTF-8 | attributes |
| `topic`   | string                                | where it goes     |

Every row is checked here, in the task, with what the log will check when it is appended: the
driver must not stop in the middle of a batch because of one row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from forebay.errors import InvalidTopicName, MessageTooLarge, UsageError
from forebay.format.names import parse_topic
from forebay.limits import ATTRIBUTES_MAX, KIB, MESSAGE_BYTES_MAX
from forebay.pipeline.sink.staging import STAGED

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType


_COLUMNS: Final = ("value", "key", "headers", "topic")
_ROOM_BYTES: Final = 4 * KIB
"""For what a message has besides value, key and headers: its topic's name, numbers, the mark."""
_HEADER_BYTES: Final = 16
"""The two lengths of an attribute."""
_HEADERS_TYPE: Final = "array<struct<key:string,value:binary>>"


def check_columns(schema: StructType, topic: str | None) -> None:
    """UsageError, before any task runs, for columns that cannot become messages."""
    from pyspark.sql.types import StringType

    types = {field.name: field.dataType for field in schema.fields}
    unknown = [name for name in types if name not in _COLUMNS]
    if unknown:
        hint = (
            "; a partition is named in the topic, as in 'orders-part-2'"
            if "partition" in unknown
            else ""
        )
        raise UsageError(
            f"the sink has no use for the columns {', '.join(map(repr, unknown))}: select "
            f"{', '.join(map(repr, _COLUMNS))}, of which only 'value' is required{hint}"
        )
    if "value" not in types:
        raise UsageError("the sink needs a column 'value', binary or string: the payloads")
    for name in ("value", "key"):
        if name in types and not _is_text_or_bytes(types[name]):
            raise UsageError(
                f"the column {name!r} is {types[name].simpleString()}; the sink takes binary or "
                "string: cast it, or make JSON of it with to_json"
            )
    if "headers" in types and not _is_headers(types["headers"]):
        raise UsageError(
            f"the column 'headers' is {types['headers'].simpleString()}; the sink takes "
            f"{_HEADERS_TYPE}"
        )
    if "topic" in types and not isinstance(types["topic"], StringType):
        raise UsageError(
            f"the column 'topic' is {types['topic'].simpleString()}; the sink takes string"
        )
    if topic is None and "topic" not in types:
        raise UsageError(
            "the sink needs to know the topic: the option 'topic', or a column 'topic'"
        )


def _is_text_or_bytes(kind: DataType) -> bool:
    from pyspark.sql.types import BinaryType, StringType

    return isinstance(kind, BinaryType | StringType)


def _is_headers(kind: DataType) -> bool:
    from pyspark.sql.types import ArrayType, StringType, StructType

    if not isinstance(kind, ArrayType) or not isinstance(kind.elementType, StructType):
        return False
    fields = kind.elementType.fields
    return (
        [field.name for field in fields] == ["key", "value"]
        and isinstance(fields[0].dataType, StringType)
        and _is_text_or_bytes(fields[1].dataType)
    )


def staged_batches(
    batches: Iterator[pa.RecordBatch], partition: int, topic: str | None
) -> Iterator[pa.RecordBatch]:
    """The rows with the columns STAGED, each of them fit to be appended.

    `topic` counts before the column, as in Spark's Kafka sink. UsageError, naming the first row
    at fault, for one that is not fit.
    """
    known: dict[str, str] = {}
    first = 0
    for batch in batches:
        if batch.num_rows:
            yield _Rows(batch, partition, first, known).staged(topic)
        first += batch.num_rows


class _Rows:
    """One batch of rows on its way to the columns STAGED."""

    def __init__(
        self, batch: pa.RecordBatch, partition: int, first: int, known: dict[str, str]
    ) -> None:
        self._batch = batch
        self._partition = partition
        self._first = first
        self._known = known

    def staged(self, topic: str | None) -> pa.RecordBatch:
        value = self._column("value")
        self._refuse(pc.is_null(value), "has no value: a message must have one, if empty")
        value = value.cast(pa.binary())
        key = self._text(self._column("key"), "key")
        headers, header_bytes = self._headers()
        size = pc.add(pc.binary_length(value), header_bytes)
        size = pc.add(size, pc.fill_null(pc.binary_length(key), 0))
        self._refuse(
            pc.greater(size, MESSAGE_BYTES_MAX - _ROOM_BYTES),
            f"is too large: a message has at most {MESSAGE_BYTES_MAX - _ROOM_BYTES} bytes",
            MessageTooLarge,
        )
        topics = self._topics(topic)
        return pa.RecordBatch.from_arrays([topics, key, value, headers], schema=STAGED)

    def _column(self, name: str) -> Any:
        """The column, or nulls where there is none."""
        at = self._batch.schema.get_field_index(name)
        if at < 0:
            return pa.nulls(self._batch.num_rows, STAGED.field(name).type)
        return self._batch.column(at)

    def _topics(self, topic: str | None) -> Any:
        if topic is not None:
            return pa.array([topic] * self._batch.num_rows, pa.string())
        column = self._column("topic")
        self._refuse(pc.is_null(column), "has no topic, and the option 'topic' is not given")
        encoded = column.dictionary_encode()
        names = encoded.dictionary.to_pylist()
        for name in names:
            if name not in self._known:
                try:
                    self._known[name] = str(parse_topic(name))
                except InvalidTopicName as error:
                    self._refuse(pc.equal(column, name), f"has no good topic: {error}")
        return pa.array([self._known[name] for name in names]).take(encoded.indices)

    def _text(self, column: Any, what: str) -> Any:
        """Bytes that must be UTF-8, as text."""
        try:
            return column.cast(pa.string())
        except pa.ArrowInvalid:
            bad = pa.array([not _is_utf8(each) for each in column.to_pylist()])
            self._refuse(bad, f"has a {what} that is not UTF-8 text")
            raise

    def _headers(self) -> tuple[Any, Any]:
        """The headers with their values as text, and the bytes of each row's."""
        column = self._column("headers")
        count = self._batch.num_rows
        if column.null_count == count:
            return pa.nulls(count, STAGED.field("headers").type), pa.repeat(0, count)
        rows: list[list[dict[str, str]] | None] = []
        sizes: list[int] = []
        for at, found in enumerate(column.to_pylist()):
            row = None if found is None else [self._header(at, header) for header in found]
            if row is not None and len({header["key"] for header in row}) < len(row):
                self._refuse_row(at, "has two headers of one name: attributes are a map")
            if row is not None and len(row) >= ATTRIBUTES_MAX:
                self._refuse_row(at, f"has {len(row)} headers; at most {ATTRIBUTES_MAX - 1}")
            rows.append(row)
            sizes.append(
                sum(
                    len(header["key"].encode()) + len(header["value"].encode()) + _HEADER_BYTES
                    for header in row or ()
                )
            )
        return pa.array(rows, STAGED.field("headers").type), pa.array(sizes, pa.int64())

    def _header(self, at: int, header: dict[str, Any] | None) -> dict[str, str]:
        if header is None or header["key"] is None or header["value"] is None:
            self._refuse_row(at, "has a header without a key or a value")
        assert header is not None
        value = header["value"]
        if isinstance(value, bytes):
            try:
                value = value.decode()
            except UnicodeDecodeError:
                self._refuse_row(at, f"has a header {header['key']!r} that is not UTF-8 text")
        return {"key": header["key"], "value": value}

    def _refuse(self, mask: Any, why: str, kind: type[UsageError] = UsageError) -> None:
        """Raises if any row is in the mask, naming the first."""
        at = pc.index(mask, True).as_py()
        if at >= 0:
            self._refuse_row(at, why, kind)

    def _refuse_row(self, at: int, why: str, kind: type[UsageError] = UsageError) -> None:
        raise kind(f"row {self._first + at} of partition {self._partition} {why}")


def _is_utf8(value: bytes | None) -> bool:
    try:
        (value or b"").decode()
    except UnicodeDecodeError:
        return False
    return True
