"""The fields of many entries as columns, without a Python object for each message.

`entry_columns` looks at entries whose payload is the value of one message as it is: not in a batch,
not compressed, not encrypted, no chunk and no marker. Such an entry is *plain*, and its row says
where key, value and the other fields are in the buffer. Every other entry, and every damaged one,
has a row of zeros: `messages.decode_messages` decodes it, or says what is wrong with it.

The compiled module does this if it was built, otherwise the function below, with the same results.
`batch_columns` does the same for messages in batches, whose payloads the caller decompressed. It
needs the compiled module.

Beware: a row is no promise about the entry beyond what it says. A plain entry may be transactional,
and its key or its value may be null, which is a length of -1.
"""

from __future__ import annotations

from array import array
from typing import Any, Final, NamedTuple

from forebay.errors import LedgerError
from forebay.format import codec
from forebay.format.layout import Buffer
from forebay.format.pulsar.codec import crc32c
from forebay.format.pulsar.entry import locate_parts
from forebay.format.pulsar.protobuf import (
    BYTES,
    VARINT,
    Field,
    bytes_of,
    fields,
    number_of,
    signed_64,
    text_of,
)
from forebay.limits import OFFSET_MAX

PLAIN: Final = 1
TRANSACTIONAL: Final = 2
HAS_EVENT_TIME: Final = 4
HAS_SEQUENCE_ID: Final = 8
"""Flags of messages in batches."""

_WHAT: Final = "an entry"


class EntryColumns(NamedTuple):
    """One number for each entry in each column. All are signed 64-bit."""

    flags: memoryview
    """PLAIN and TRANSACTIONAL; 0 if the entry is not plain."""
    payload_positions: memoryview
    payload_lengths: memoryview
    """-1 for a value that is null."""
    key_positions: memoryview
    key_lengths: memoryview
    """-1 without a key, as in the other columns of lengths."""
    ordering_positions: memoryview
    ordering_lengths: memoryview
    producer_positions: memoryview
    producer_lengths: memoryview
    schema_positions: memoryview
    schema_lengths: memoryview
    publish_times: memoryview
    event_times: memoryview
    """0 without one."""
    sequence_ids: memoryview
    indexes: memoryview
    """The broker's numbers of messages; -1 without one."""
    property_counts: memoryview
    properties: memoryview
    """Position and length of the name and of the value of every property of every row."""


_COLUMNS: Final = len(EntryColumns._fields) - 1
(
    _FLAGS,
    _PAYLOAD,
    _PAYLOAD_LENGTH,
    _KEY,
    _KEY_LENGTH,
    _ORDERING,
    _ORDERING_LENGTH,
    _PRODUCER,
    _PRODUCER_LENGTH,
    _SCHEMA,
    _SCHEMA_LENGTH,
    _PUBLISH_TIME,
    _EVENT_TIME,
    _SEQUENCE_ID,
    _INDEX,
    _PROPERTIES,
) = range(_COLUMNS)


def entry_columns(buffer: Buffer, positions: memoryview, lengths: memoryview) -> EntryColumns:
    """Locates the fields of entries at u64 `positions` with u32 `lengths`.

    Raises ValueError if the numbers of positions and lengths differ, or if an entry is not inside
    the buffer.
    """
    columns, properties = _raw(buffer, positions, lengths)
    numbers, rows = memoryview(columns).cast("q"), len(positions)
    parts = (numbers[at * rows : (at + 1) * rows] for at in range(_COLUMNS))
    return EntryColumns._make((*parts, memoryview(properties).cast("q")))


class BatchColumns(NamedTuple):
    """The messages of some batches, one row for each."""

    columns: EntryColumns
    """Without those that are of the entry as a whole: producer, schema and publish time. Flags say
    whether event time and sequence id are the message's own."""
    entries: memoryview
    """The number of the batch, from 0."""
    batch_indexes: memoryview


def batch_columns(
    buffer: Buffer, positions: Buffer, lengths: Buffer, counts: Buffer
) -> BatchColumns | None:
    """Locates the fields of the messages in batches: u64 `positions` and u32 `lengths` of their
    payloads, decompressed, and the u32 number of messages in each.

    None if a batch is not like most are, or damaged, and where the compiled module was not built:
    `messages` decodes these. Raises ValueError if the numbers of positions, lengths and counts
    differ.
    """
    found = None if _batches is None else _batches(buffer, positions, lengths, counts)
    if found is None:
        return None
    numbers = memoryview(found[0]).cast("q")
    rows = len(numbers) // _COLUMNS
    parts = [numbers[at * rows : (at + 1) * rows] for at in range(_COLUMNS)]
    entries, indexes = parts[_PUBLISH_TIME], parts[_INDEX]
    columns = EntryColumns._make((*parts, memoryview(found[1]).cast("q")))
    return BatchColumns(columns, entries, indexes)


def pure_entry_columns(
    buffer: Buffer, positions: memoryview, lengths: memoryview
) -> tuple[bytes, bytes]:
    """The reference for the compiled function: the columns in one, and the properties."""
    places, sizes = memoryview(positions).cast("B"), memoryview(lengths).cast("B")
    if places.nbytes % 8 or sizes.nbytes % 4 or places.nbytes // 8 != sizes.nbytes // 4:
        raise ValueError(
            f"{places.nbytes} bytes of positions and {sizes.nbytes} of lengths do not match"
        )
    view = memoryview(buffer).cast("B")
    columns = [array("q") for _ in range(_COLUMNS)]
    properties = array("q")
    rows = zip(places.cast("Q"), sizes.cast("I"), strict=True)
    for number, (position, length) in enumerate(rows):
        if position + length > len(view):
            raise ValueError(f"entry {number} is not inside the buffer of {len(view)} bytes")
        row = _Row(view, position, position + length)
        for column, value in zip(columns, row.numbers, strict=True):
            column.append(value)
        properties.extend(row.properties)
    return b"".join(column.tobytes() for column in columns), properties.tobytes()


_compiled: Any = getattr(codec.compiled, "entry_columns", None)
_raw: Final = _compiled or pure_entry_columns
_batches: Any = getattr(codec.compiled, "batch_columns", None)


class _NotPlain(Exception):
    """The entry is decoded elsewhere."""


class _Row:
    """The numbers of one entry."""

    def __init__(self, view: memoryview, start: int, end: int) -> None:
        self.numbers = [0] * _COLUMNS
        for column in (_KEY_LENGTH, _ORDERING_LENGTH, _SCHEMA_LENGTH, _INDEX):
            self.numbers[column] = -1
        self.properties: list[int] = []
        self._view = view
        self._seen: set[int] = set()
        self._null_value = self._null_key = False
        try:
            self._read(start, end)
        except (LedgerError, _NotPlain):
            self.numbers = [0] * _COLUMNS
            self.properties = []

    def _read(self, start: int, end: int) -> None:
        entry = self._view[start:end]
        parts = locate_parts(entry)
        if parts.checksum is not None and crc32c(entry[parts.checked :]) != parts.checksum:
            raise _NotPlain
        if parts.broker is not None:
            self._broker(start + parts.broker[0], start + parts.broker[1])
        first, last = parts.metadata
        for field in fields(self._view, start + first, start + last, _WHAT):
            self._take(field)
        if not {1, 2, 3} <= self._seen:
            raise _NotPlain
        self._number(_PAYLOAD, start + parts.payload)
        self._number(_PAYLOAD_LENGTH, -1 if self._null_value else end - start - parts.payload)
        if self._null_key:
            self._number(_KEY, 0)
            self._number(_KEY_LENGTH, -1)
        self.numbers[_FLAGS] |= PLAIN

    def _broker(self, start: int, end: int) -> None:
        for field in fields(self._view, start, end, _WHAT):
            if field.number in (1, 2):
                value = _varint(field)
            if field.number == 2:
                self._number(_INDEX, value)

    def _number(self, column: int, value: int) -> None:
        if value > OFFSET_MAX:
            raise _NotPlain
        self.numbers[column] = value

    def _span(self, column: int, field: Field) -> None:
        bytes_of(self._view, field, _WHAT)
        self.numbers[column], self.numbers[column + 1] = field.value, field.length

    def _take(self, field: Field) -> None:
        number = field.number
        self._seen.add(number)
        if number in _SPANS:
            if number in _TEXTS:
                text_of(self._view, field, _WHAT)
            self._span(_SPANS[number], field)
        elif number in _TIMES:
            self._number(_TIMES[number], _varint(field))
        elif number == 2:
            self.numbers[_SEQUENCE_ID] = signed_64(_varint(field))
        elif number == 4:
            self._property(field)
        elif number in _PLAIN_UP_TO:
            if _varint(field) > _PLAIN_UP_TO[number]:
                raise _NotPlain
        elif number in (22, 23):
            _varint(field)
            self.numbers[_FLAGS] |= TRANSACTIONAL
        elif number == 25:
            self._null_value = _varint(field) != 0
        elif number == 30:
            self._null_key = _varint(field) != 0
        elif number in _IGNORED_BYTES:
            bytes_of(self._view, field, _WHAT)
        elif number in _IGNORED_NUMBERS:
            _varint(field)
        elif number in _ELSEWHERE:
            raise _NotPlain

    def _property(self, field: Field) -> None:
        if field.wire != BYTES:
            raise _NotPlain
        name: Field | None = None
        value: Field | None = None
        for part in fields(self._view, field.value, field.value + field.length, _WHAT):
            if part.number > 2:
                continue
            text_of(self._view, part, _WHAT)
            name, value = (part, value) if part.number == 1 else (name, part)
        if name is None or value is None:
            raise _NotPlain
        self.properties += (name.value, name.length, value.value, value.length)
        self.numbers[_PROPERTIES] += 1


def _varint(field: Field) -> int:
    if field.wire != VARINT:
        raise _NotPlain
    return number_of(field, _WHAT)


_SPANS: Final = {1: _PRODUCER, 6: _KEY, 16: _SCHEMA, 18: _ORDERING}
_TEXTS: Final = {1, 6}
_TIMES: Final = {3: _PUBLISH_TIME, 12: _EVENT_TIME}
_PLAIN_UP_TO: Final = {8: 0, 17: 0, 27: 1}
"""Compression, whether the key is in Base64, and the number of chunks."""
_IGNORED_BYTES: Final = {5, 7, 14, 15, 26, 32}
_IGNORED_NUMBERS: Final = {9, 19, 24, 28, 29, 33, 34}
_ELSEWHERE: Final = {11, 13, 20, 31}
"""Batches, encryption, markers, and what a compaction left of a batch."""
