"""`ObjectDescriptor`: the catalog's record of an object, as JSON.

An object is part of its topic only if the catalog has its descriptor. The fields are those of
Danube, so that each can read what the other wrote, and optional ones of Forebay. A descriptor of an
earlier release has none of the optional ones, and is encoded without them again. The layout is in
`docs/formats/descriptor.md`.

Beware: `end_offset` is the last offset in the object, not one more.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from typing import Any, Final, TypeGuard

from forebay.errors import DescriptorError
from forebay.limits import (
    DESCRIPTOR_BYTES_MAX,
    LEDGER_FIELDS_MAX,
    LEDGER_TEXT_BYTES_MAX,
    OBJECT_KEY_BYTES_MAX,
    OFFSET_MAX,
)

_FIELDS: Final = frozenset(
    {"completed", "created_at", "end_offset", "object_id", "size", "start_offset"}
)
_OPTIONAL: Final = (
    "codec",
    "content_hash",
    "format",
    "highest_publish_time",
    "ledger",
    "offset_index",
    "raw_size",
)

ZSTD: Final = "zstd"
"""The codec of objects that consist of blocks: see `forebay.format.blocks`."""
PULSAR: Final = "pulsar"
"""The format of objects that are ledgers of Pulsar: see `forebay.format.pulsar`."""

_LABEL: Final = r"[a-z][0-9a-z-]{0,31}"
"""What `codec` and `format` look like. A reader refuses values that it does not know."""
_HASH: Final = r"sha256:[0-9a-f]{64}"

_OUTLINE_HEAD: Final = re.compile(
    rb'\{(?:"codec":"(?P<codec>%b)",)?"completed":(?P<completed>true|false),'
    rb'(?:"content_hash":"(?P<content_hash>%b)",)?"created_at":(?P<created_at>\d{1,19}),'
    rb'"end_offset":(?P<end_offset>\d{1,19}),"etag":(?P<etag>null|"[^"\\\x00-\x1f\x80-\xff]*"),'
    rb'(?:"format":"(?P<format>%b)",)?'
    rb'(?:"highest_publish_time":(?P<highest_publish_time>\d{1,19}),)?'
    rb'(?:"ledger":(?P<ledger>\{[^{}\\]{1,4096}\}),)?'
    rb'"object_id":"(?P<object_id>[0-9A-Za-z._-]{3,200})",'
    % (_LABEL.encode(), _HASH.encode(), _LABEL.encode())
)
_OUTLINE_TAIL: Final = re.compile(
    rb'(?:"raw_size":(?P<raw_size>\d{1,19}),)?'
    rb'"size":(?P<size>\d{1,19}),"start_offset":(?P<start_offset>\d{1,19})\}'
)
_RAW_SIZE_BYTES_MAX: Final = len('"raw_size":,') + 19

_PAIR: Final = re.compile(rb"(\d{1,19}),(\d{1,19})\]")

Index = tuple[tuple[int, int], ...]
"""(offset, position in the object), ascending; the first entry is the object's first frame."""

Ledger = tuple[tuple[str, int | str], ...]
"""Names and values about a Pulsar ledger, ordered by name."""


@dataclass(frozen=True, slots=True)
class ObjectDescriptor:
    object_id: str
    """The object's name below its topic's prefix."""
    start_offset: int
    end_offset: int
    """The offset of the last message."""
    size: int
    etag: str | None
    created_at: int
    """Seconds since 1970-01-01 UTC."""
    completed: bool = True
    offset_index: Index | None = None
    content_hash: str | None = None
    """`sha256:` and 64 hexadecimal digits, of all frames with their headers: see `ContentHash`."""
    highest_publish_time: int | None = None
    """The highest publish time of the messages, in milliseconds since 1970-01-01 UTC."""
    raw_size: int | None = None
    """Bytes of the frames before compression; None if they are `size`."""
    codec: str | None = None
    """How the bytes are compressed; None if they are not."""
    format: str | None = None
    """What the object contains; None for frames."""
    ledger: Ledger | None = None
    """The Pulsar ledger that the object contains, if it does."""

    @property
    def unknown_form(self) -> str | None:
        """The codec or format, if it is one that cannot be read here."""
        if self.codec not in (None, ZSTD):
            return self.codec
        if self.format == PULSAR:
            return None if self.ledger_number("block_bytes") is not None else self.format
        return self.format if self.format != "dnb1" else None

    @property
    def encoded(self) -> bool:
        """Whether the object is anything else than the bytes of its frames."""
        return self.codec is not None or self.is_ledger

    @property
    def is_ledger(self) -> bool:
        """Whether the object is a ledger of Pulsar, and not frames."""
        return self.format == PULSAR

    def ledger_number(self, name: str) -> int | None:
        """Returns a number that the descriptor says about the ledger, or None."""
        value = dict(self.ledger or ()).get(name)
        return value if isinstance(value, int) else None

    @property
    def block_bytes(self) -> int:
        """The size of the blocks of a ledger, but for the last one."""
        return self.ledger_number("block_bytes") or max(self.size, 1)

    @property
    def logical_size(self) -> int:
        """Bytes of the frames in the object, before compression."""
        return self.size if self.raw_size is None else self.raw_size

    @property
    def next_offset(self) -> int:
        return self.end_offset + 1

    @property
    def count(self) -> int:
        return self.end_offset - self.start_offset + 1

    def seek(self, offset: int) -> tuple[int, int]:
        """The (offset, position) of the last indexed frame at or before `offset`."""
        index = self.offset_index
        if not index:
            return self.start_offset, 0
        return index[max(bisect_right(index, (offset, OFFSET_MAX)) - 1, 0)]

    def position_after(self, offset: int) -> int:
        """The nearest position known to be at or after the end of the frame at `offset`."""
        index = self.offset_index or ()
        at = bisect_left(index, (offset + 1, 0))
        return index[at][1] if at < len(index) else self.size


def like(descriptor: ObjectDescriptor, other: ObjectDescriptor) -> ObjectDescriptor:
    """Returns the descriptor with what may differ in two that describe the same object.

    A restore makes a descriptor with another time and etag, and verification adds the hash and the
    publish time that a descriptor of an earlier release does not have.
    """
    changed: dict[str, Any] = {"etag": other.etag, "created_at": other.created_at}
    for name in ("content_hash", "highest_publish_time"):
        if None in (getattr(descriptor, name), getattr(other, name)):
            changed[name] = getattr(other, name)
    return replace(descriptor, **changed)


def encode_descriptor(descriptor: ObjectDescriptor) -> bytes:
    """Compact JSON, keys in alphabetical order. Optional fields that are None are left out.

    Raises DescriptorError if it is larger than DESCRIPTOR_BYTES_MAX.
    """
    body: dict[str, Any] = {
        "completed": descriptor.completed,
        "created_at": descriptor.created_at,
        "end_offset": descriptor.end_offset,
        "etag": descriptor.etag,
        "object_id": descriptor.object_id,
        "size": descriptor.size,
        "start_offset": descriptor.start_offset,
    }
    for name in _OPTIONAL:
        value = getattr(descriptor, name)
        if value is not None:
            body[name] = dict(value) if name == "ledger" else value
    data = json.dumps(body, separators=(",", ":"), sort_keys=True, ensure_ascii=False).encode()
    if len(data) > DESCRIPTOR_BYTES_MAX:
        raise DescriptorError(
            f"the descriptor of {descriptor.object_id} has {len(data)} bytes; at most "
            f"{DESCRIPTOR_BYTES_MAX} are allowed"
        )
    return data


def decode_descriptor(data: bytes) -> ObjectDescriptor:
    """Decodes and checks a descriptor; raises DescriptorError. Ignores unknown fields."""
    if len(data) > DESCRIPTOR_BYTES_MAX:
        raise DescriptorError(f"{len(data)} bytes; at most {DESCRIPTOR_BYTES_MAX} are allowed")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DescriptorError(f"it is not JSON: {error}") from error
    if not isinstance(body, dict) or not body.keys() >= _FIELDS:
        raise DescriptorError("it does not have the fields of a descriptor")
    object_id, etag = body["object_id"], body.get("etag")
    if not _is_text(object_id) or not _is_name(object_id):
        raise DescriptorError("object_id is not the name of an object")
    if etag is not None and not _is_text(etag):
        raise DescriptorError("etag is not a string")
    if type(body["completed"]) is not bool:
        raise DescriptorError("completed is neither true nor false")
    start, end = _number(body, "start_offset"), _number(body, "end_offset")
    if start > end:
        raise DescriptorError(f"start_offset {start} is beyond end_offset {end}")
    size = _number(body, "size")
    index = _index(body.get("offset_index"), start, end, size)
    return ObjectDescriptor(
        object_id,
        start,
        end,
        size,
        etag,
        _number(body, "created_at"),
        body["completed"],
        index,
        _label(body, "content_hash", _HASH),
        _optional_number(body, "highest_publish_time"),
        _optional_number(body, "raw_size"),
        _label(body, "codec", _LABEL),
        _label(body, "format", _LABEL),
        _ledger(body.get("ledger")),
    )


def decode_outline(data: bytes, entries: int = 0) -> ObjectDescriptor:
    """Decodes a descriptor quickly, with only about `entries` evenly spaced entries of its index.

    For plans over very many descriptors. The other entries are not checked; everything else is
    checked as in `decode_descriptor`. JSON that is not formatted as by `encode_descriptor` is
    decoded in full first.
    """
    head = _OUTLINE_HEAD.match(data)
    at = data.rfind(b'"size":')
    if (raw := data.rfind(b'"raw_size":', max(at - _RAW_SIZE_BYTES_MAX, 0), max(at, 0))) >= 0:
        at = raw
    tail = None if head is None else _OUTLINE_TAIL.fullmatch(data, at)
    if head is None or tail is None or len(data) > DESCRIPTOR_BYTES_MAX:
        return _sampled(decode_descriptor(data), entries)
    begin = head.end()
    if begin != at and not (data.startswith(b'"offset_index":[', begin) and data[at - 2] == 0x5D):
        return _sampled(decode_descriptor(data), entries)
    numbers = [int(head[name]) for name in ("created_at", "end_offset")]
    numbers += [int(tail[name]) for name in ("size", "start_offset")]
    created, end, size, start = numbers
    published, raw_size = _int(head["highest_publish_time"]), _int(tail["raw_size"])
    if max(*numbers, published or 0, raw_size or 0) > OFFSET_MAX or start > end:
        return _sampled(decode_descriptor(data), entries)
    index = _sample(data, begin, at, entries) if entries else []
    return ObjectDescriptor(
        head["object_id"].decode(),
        start,
        end,
        size,
        None if head["etag"] == b"null" else head["etag"][1:-1].decode(),
        created,
        head["completed"] == b"true",
        _index([[start, 0], *index], start, end, size) if index else None,
        _text(head["content_hash"]),
        published,
        raw_size,
        _text(head["codec"]),
        _text(head["format"]),
        None if head["ledger"] is None else _ledger(_parsed(head["ledger"])),
    )


def _parsed(data: bytes) -> object:
    try:
        return json.loads(data)
    except ValueError as error:
        raise DescriptorError(f"it is not JSON: {error}") from error


def _int(digits: bytes | None) -> int | None:
    return None if digits is None else int(digits)


def _text(raw: bytes | None) -> str | None:
    return None if raw is None else raw.decode()


def _sample(data: bytes, begin: int, end: int, entries: int) -> list[list[int]]:
    """Pairs sampled from the JSON of the index in `data[begin:end]`, without the first."""
    found: list[list[int]] = []
    after = begin
    for number in range(1, entries + 1):
        at = data.find(b"],[", max(begin + (end - begin) * number // (entries + 1), after), end)
        pair = None if at < 0 else _PAIR.match(data, at + 3)
        if pair is None:
            break
        found.append([int(pair[1]), int(pair[2])])
        after = pair.end() - 1
    return found


def _sampled(descriptor: ObjectDescriptor, entries: int) -> ObjectDescriptor:
    """Samples an index that is decoded already."""
    index = descriptor.offset_index or ()
    if not entries or not index:
        return replace(descriptor, offset_index=None)
    step = -(-len(index) // (entries + 1))
    return replace(descriptor, offset_index=index[::step])


def sampled(descriptor: ObjectDescriptor, entries: int) -> ObjectDescriptor:
    """Returns the descriptor with at most `entries` evenly spaced entries of its index.

    The first entry is kept. An index that is short enough stays as it is.
    """
    index = descriptor.offset_index
    if index is None or len(index) <= entries:
        return descriptor
    kept = tuple(index[number * len(index) // entries] for number in range(entries))
    return replace(descriptor, offset_index=kept)


def _is_text(value: object) -> TypeGuard[str]:
    """Whether it is a string without lone surrogates, which JSON allows and UTF-8 does not."""
    return isinstance(value, str) and not any("\ud800" <= one <= "\udfff" for one in value)


def _is_name(object_id: str) -> bool:
    """Whether it is a plain name: one with slashes could lead outside the topic's prefix."""
    return (
        object_id not in {"", ".", ".."}
        and len(object_id.encode()) <= OBJECT_KEY_BYTES_MAX
        and not any(one in "/\\" or one < " " for one in object_id)
    )


def _number(body: dict[str, Any], name: str) -> int:
    value = body[name]
    if type(value) is not int or not 0 <= value <= OFFSET_MAX:
        raise DescriptorError(f"{name} is not a whole number in 0..{OFFSET_MAX}")
    return value


def _optional_number(body: dict[str, Any], name: str) -> int | None:
    return None if body.get(name) is None else _number(body, name)


def _label(body: dict[str, Any], name: str, pattern: str) -> str | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or re.fullmatch(pattern, value) is None:
        raise DescriptorError(f"{name} is not of the form {pattern}")
    return value


def _ledger(value: object) -> Ledger | None:
    """Checks names and values: numbers, or texts of at most LEDGER_TEXT_BYTES_MAX bytes."""
    if value is None:
        return None
    if not isinstance(value, dict) or not 0 < len(value) <= LEDGER_FIELDS_MAX:
        raise DescriptorError(f"ledger is not an object with 1 to {LEDGER_FIELDS_MAX} fields")
    for name, said in value.items():
        for text in (name, said) if type(said) is not int else (name,):
            if not _is_text(text) or len(text.encode()) > LEDGER_TEXT_BYTES_MAX:
                raise DescriptorError(
                    f"ledger has a name or a value that is neither a number nor a text of at most "
                    f"{LEDGER_TEXT_BYTES_MAX} bytes"
                )
        if type(said) is int:
            _number(value, name)
    return tuple(sorted(value.items()))


def _index(value: object, start: int, end: int, size: int) -> Index | None:
    """Checks that entries are ascending, inside the object, and begin with its first frame."""
    if value is None:
        return None
    if not isinstance(value, list):
        raise DescriptorError("offset_index is not a list")
    before = (start - 1, -1)
    entries = []
    for number, pair in enumerate(value):
        match pair:
            case [int() as offset, int() as position] if type(offset) is type(position) is int:
                entry = (offset, position)
            case _:
                raise DescriptorError(f"entry {number} of offset_index is not a pair of numbers")
        if offset <= before[0] or position <= before[1] or offset > end or position >= size:
            raise DescriptorError(f"offset_index is out of order at entry {number}")
        entries.append(entry)
        before = entry
    if entries and entries[0] != (start, 0):
        raise DescriptorError(f"offset_index starts at {entries[0]!r}, not at the first frame")
    return tuple(entries)
