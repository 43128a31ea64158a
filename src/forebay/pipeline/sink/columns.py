"""Which columns the sink accepts, and how rows become messages.

| column    | type                                  | becomes           |
|-----------|---------------------------------------|-------------------|
| `value`   | binary or string                      | the payload       |
| `key`     | binary or string, UTF-8               | the routing key   |
| `headers` | array of struct(key string, value binary or string), UTF-8 | attributes |
| `topic`   | string                                | the topic         |
| `partition` | int                                 | the partition: `<topic>-part-<n>` |

A row with the partition 0 may belong to `<topic>-part-0`, or to `<topic>` itself if that has no
partitions. It is staged as the former, and the commit decides (`Rows.zeros`).

Every row is checked here, in the task, for everything that the log checks when it is appended: a
commit must not stop in the middle of a batch because of one row. This module needs Arrow; the
`Rows` that it returns do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, cast

import pyarrow as pa
import pyarrow.compute as pc

from forebay.errors import InvalidTopicName, MessageTooLarge, UsageError
from forebay.format.names import parse_topic
from forebay.limits import ATTRIBUTES_MAX, KIB, MESSAGE_BYTES_MAX
from forebay.pipeline.sink.staging import COPIED_BYTES_MAX, Rows

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType


_COLUMNS: Final = ("value", "key", "headers", "topic", "partition")
_REST_BYTES: Final = 4 * KIB
"""Room for the rest of a message: the name of its topic, numbers, and the sink's mark."""
_HEADER_BYTES: Final = 16
"""Room for the two lengths of an attribute."""
_PARTITIONS_MAX: Final = 1_000_000_000
"""The number of a partition has at most nine digits."""
_HEADERS_TYPE: Final = "array<struct<key:string,value:binary>>"


def check_columns(schema: StructType, topic: str | None) -> None:
    """Raises UsageError if the columns cannot become messages. Called before any task runs."""
    from pyspark.sql.types import IntegerType, StringType

    types = {field.name: field.dataType for field in schema.fields}
    unknown = [name for name in types if name not in _COLUMNS]
    if unknown:
        raise UsageError(
            f"the sink does not know the columns {', '.join(map(repr, unknown))}: select "
            f"{', '.join(map(repr, _COLUMNS))}, of which only 'value' is required"
        )
    if "value" not in types:
        raise UsageError("the sink needs a column 'value' with the payloads, binary or string")
    for name in ("value", "key"):
        if name in types and not _is_text_or_bytes(types[name]):
            raise UsageError(
                f"the column {name!r} is {types[name].simpleString()}; the sink accepts binary or "
                "string: cast it, or convert it to JSON with to_json"
            )
    if "headers" in types and not _is_headers(types["headers"]):
        raise UsageError(
            f"the column 'headers' is {types['headers'].simpleString()}; the sink accepts "
            f"{_HEADERS_TYPE}"
        )
    if "topic" in types and not isinstance(types["topic"], StringType):
        raise UsageError(
            f"the column 'topic' is {types['topic'].simpleString()}; the sink accepts string"
        )
    if "partition" in types and not isinstance(types["partition"], IntegerType):
        raise UsageError(
            f"the column 'partition' is {types['partition'].simpleString()}; the sink accepts int: "
            "cast it, or leave it out"
        )
    if topic is None and "topic" not in types:
        raise UsageError("the sink needs a topic: give the option 'topic' or a column 'topic'")


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


def checked_rows(
    batches: Iterator[pa.RecordBatch], partition: int, topic: str | None
) -> Iterator[Rows]:
    """Yields the rows of Arrow batches with the columns above, checked.

    `topic` overrides the column, as in Spark's Kafka sink. UsageError names the first row that
    cannot be appended. Payloads may be views into their Arrow batch.
    """
    known: dict[str, str] = {}
    first = 0
    for batch in batches:
        if batch.num_rows:
            yield _BatchCheck(batch, partition, first, known).rows(topic)
        first += batch.num_rows


class _BatchCheck:
    """Checks one Arrow batch and converts it to `Rows`."""

    def __init__(
        self, batch: pa.RecordBatch, partition: int, first: int, known: dict[str, str]
    ) -> None:
        self._batch = batch
        self._partition = partition
        self._first = first
        self._known = known
        """Topic names as given, with their full names."""

    def rows(self, topic: str | None) -> Rows:
        value = self._column("value")
        self._refuse(pc.is_null(value), "has a null value: a value may be empty, but not null")
        value = value.cast(pa.binary())
        size = pc.cast(pc.binary_length(value), pa.int64())
        key = self._column("key")
        if key is not None:
            key = self._text(key, "key")
            size = pc.add(size, pc.fill_null(pc.binary_length(key), 0))
        attributes = self._attributes()
        if attributes is not None:
            size = pc.add(size, pa.array([_header_bytes(each) for each in attributes], pa.int64()))
        self._refuse(
            pc.greater(size, MESSAGE_BYTES_MAX - _REST_BYTES),
            f"is too large: a message has at most {MESSAGE_BYTES_MAX - _REST_BYTES} bytes",
            MessageTooLarge,
        )
        keys = None if key is None else key.to_pylist()
        topics, zeros = self._with_partitions(self._topics(topic))
        return Rows(topics, _payloads(value), attributes, keys, zeros)

    def _column(self, name: str) -> Any:
        """The column; None if it does not exist or has only nulls."""
        at = self._batch.schema.get_field_index(name)
        column = None if at < 0 else self._batch.column(at)
        empty = column is None or (name != "value" and column.null_count == len(column))
        return None if empty else column

    def _topics(self, topic: str | None) -> list[str]:
        if topic is not None:
            return [topic] * self._batch.num_rows
        column = self._batch.column("topic")
        self._refuse(pc.is_null(column), "has no topic, and the option 'topic' is not given")
        names = column.to_pylist()
        for name in set(names):
            if name not in self._known:
                try:
                    self._known[name] = str(parse_topic(name))
                except InvalidTopicName as error:
                    self._refuse(pc.equal(column, name), f"has an invalid topic: {error}")
        return [self._known[name] for name in names]

    def _with_partitions(self, names: list[str]) -> tuple[list[str], frozenset[str]]:
        """The topics with their partitions, and those that come from a partition 0."""
        column = self._column("partition")
        if column is None:
            return names, frozenset()
        bad = pc.or_(pc.less(column, 0), pc.greater_equal(column, _PARTITIONS_MAX))
        self._refuse(bad, f"has a partition that is not in 0..{_PARTITIONS_MAX - 1}")
        partitions = column.to_pylist()
        known = {
            pair: self._numbered(*pair, names, partitions)
            for pair in set(zip(names, partitions, strict=True))
        }
        found = [known[pair] for pair in zip(names, partitions, strict=True)]
        zeros = {each for (name, number), each in known.items() if number == 0 and each != name}
        named = {each for (name, _), each in known.items() if each == name}
        return found, frozenset(zeros - named)

    def _numbered(
        self, name: str, number: int | None, names: list[str], partitions: list[int | None]
    ) -> str:
        """The full name of the partition; UsageError if the name has another one already."""
        topic = parse_topic(name)
        if number is None or (topic.is_partition and topic.partition == number):
            return name
        at = list(zip(names, partitions, strict=True)).index((name, number))
        if topic.is_partition:
            raise self._refusal(at, f"has the topic {name!r} and the partition {number}")
        try:
            return str(parse_topic(f"{name}-part-{number}"))
        except InvalidTopicName as error:
            raise self._refusal(at, f"has an invalid topic: {error}") from error

    def _text(self, column: Any, what: str) -> Any:
        """The column as text; UsageError if a row is not UTF-8."""
        try:
            return column.cast(pa.string())
        except pa.ArrowInvalid:
            bad = pa.array([not _is_utf8(each) for each in column.to_pylist()])
            self._refuse(bad, f"has a {what} that is not UTF-8 text")
            raise

    def _attributes(self) -> list[dict[str, str] | None] | None:
        """The headers of each row as attributes."""
        column = self._column("headers")
        if column is None:
            return None
        return [
            None if headers is None else self._row_attributes(at, headers)
            for at, headers in enumerate(column.to_pylist())
        ]

    def _row_attributes(self, at: int, headers: list[dict[str, Any] | None]) -> dict[str, str]:
        found: dict[str, str] = {}
        for header in headers:
            if header is None or header["key"] is None or header["value"] is None:
                raise self._refusal(at, "has a header without a key or a value")
            name, value = header["key"], header["value"]
            if isinstance(value, bytes):
                try:
                    value = value.decode()
                except UnicodeDecodeError:
                    raise self._refusal(
                        at, f"has a header {name!r} that is not UTF-8 text"
                    ) from None
            found[name] = value
        if len(found) < len(headers):
            raise self._refusal(at, "has two headers with the same name")
        if len(found) >= ATTRIBUTES_MAX:
            raise self._refusal(at, f"has {len(found)} headers; the limit is {ATTRIBUTES_MAX - 1}")
        return found

    def _refuse(self, mask: Any, why: str, kind: type[UsageError] = UsageError) -> None:
        """Raises an error that names the first row for which the mask is true, if there is one."""
        at = pc.index(mask, True).as_py()
        if at >= 0:
            raise self._refusal(at, why, kind)

    def _refusal(self, at: int, why: str, kind: type[UsageError] = UsageError) -> UsageError:
        return kind(f"row {self._first + at} of partition {self._partition} {why}")


def _payloads(values: pa.Array) -> list[bytes] | list[memoryview]:
    """The values of a binary array without nulls; large ones are not copied."""
    if values.nbytes <= len(values) * COPIED_BYTES_MAX:
        return cast("list[bytes]", values.to_pylist())
    _, offsets, data = values.buffers()
    ends = memoryview(offsets).cast("i")[values.offset : values.offset + len(values) + 1]
    view = memoryview(data)
    return [view[begin:end] for begin, end in pairwise(ends)]


def _header_bytes(attributes: dict[str, str] | None) -> int:
    if not attributes:
        return 0
    texts = (*attributes.keys(), *attributes.values())
    return sum(len(each.encode()) for each in texts) + _HEADER_BYTES * len(attributes)


def _is_utf8(value: bytes | None) -> bool:
    try:
        (value or b"").decode()
    except UnicodeDecodeError:
        return False
    return True
