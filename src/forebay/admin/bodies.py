"""Messages as lines of JSON: those that come in, and those that go out.

    {"offset": 7, "publish_time": 1789000000000, "payload": "text", "attributes": {"k": "v"},
     "routing_key": null}

A payload that is not UTF-8 is `payload_base64`. What comes in has no offset and no time: the log
gives them. Pure: nothing here reads or writes anything.

What a caller gets wrong: `parse_lines` answers all messages of a body, or raises. A body is never
taken in part.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import orjson

from forebay.errors import MessageTooLarge, UsageError
from forebay.format.frame import Scan
from forebay.format.message import StreamMessage, decode_messages
from forebay.limits import ATTRIBUTES_MAX, KIB, MESSAGE_BYTES_MAX

_KEYS: Final = ("payload", "payload_base64", "attributes", "routing_key")
_GIVEN: Final = {"offset", "publish_time"}
_BETWEEN: Final = b",\n0,"
_CHUNK_BYTES: Final = 64 * KIB
_SHOWN: Final = 40
_ROOM: Final = 2 * KIB
"""What a message's encoding adds to its parts, at most: two names of topics, and numbers."""
_KINDS: Final = {
    dict: "an object",
    list: "a list",
    str: "text",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    type(None): "null",
}


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages to append, as columns; a column that no message fills is None."""

    payloads: list[bytes]
    attributes: list[dict[str, str] | None] | None = None
    routing_keys: list[str | None] | None = None


# ---- in ----


def parse_lines(body: bytes, messages_max: int) -> Batch:
    """One message object a line; UsageError with the number of the first line that is none.

    Blank lines count as lines, and are no messages.
    """
    batch = _parse_plain(body.strip(), messages_max)
    if batch is None:
        batch = _parse_each(body, messages_max)
    if len(body) > MESSAGE_BYTES_MAX - _ROOM:
        _require_sizes(batch)
    return batch


def _parse_plain(text: bytes, messages_max: int) -> Batch | None:
    """Lines that have a payload alone, all parsed at once; None where they must be looked at.

    They are parsed as one list, with a 0 for each end of a line, which stays beside it. An end
    inside a string or an object is then no JSON, and one inside a list is in no message: so each
    is between two lines, and with as many other parts as there are lines, each line is one.
    """
    listed = text.replace(b"\n", _BETWEEN)
    count = (len(listed) - len(text)) // (len(_BETWEEN) - 1) + 1  # at a fifth of what a count costs
    if count > messages_max:
        return None
    try:
        found = orjson.loads(b"[%b]" % listed)
        objects = found[::2]
        if len(found) == 2 * count - 1 and sum(map(len, objects)) == count:
            return Batch([each["payload"].encode() for each in objects])
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        pass
    return None


def _parse_each(body: bytes, messages_max: int) -> Batch:
    payloads: list[bytes] = []
    attributes: list[dict[str, str] | None] = []
    routing_keys: list[str | None] = []
    for number, line in enumerate(body.split(b"\n"), 1):
        if not line.strip():
            continue
        if len(payloads) >= messages_max:
            raise MessageTooLarge(
                f"line {number}: a request has {messages_max} messages at most "
                "(admin.request_messages_max): send the rest in another one"
            )
        try:
            payload, pairs, key = _message(orjson.loads(line))
        except orjson.JSONDecodeError as error:
            raise UsageError(
                f"line {number}, column {error.colno}: not JSON: {error.msg}; each line is one "
                'message, such as {"payload": "text"}'
            ) from error
        except UsageError as error:
            raise UsageError(f"line {number}: {error}") from error
        payloads.append(payload)
        attributes.append(pairs)
        routing_keys.append(key)
    if not payloads:
        raise UsageError('the body has no message; a message is a line like {"payload": "text"}')
    return Batch(
        payloads,
        attributes if any(attributes) else None,
        routing_keys if any(key is not None for key in routing_keys) else None,
    )


def _message(found: Any) -> tuple[bytes, dict[str, str] | None, str | None]:
    if type(found) is not dict:
        raise UsageError(f"{_kind(found)}; a message is an object")
    for name in found:
        if name in _GIVEN:
            raise UsageError(f"{name} is given by the log: leave it out")
        if name not in _KEYS:
            raise UsageError(f"unknown key {name[:_SHOWN]!r}; known ones: {', '.join(_KEYS)}")
    return _payload(found), _attributes(found.get("attributes")), _key(found.get("routing_key"))


def _payload(found: dict[str, Any]) -> bytes:
    if ("payload" in found) == ("payload_base64" in found):
        given = "both" if "payload" in found else "neither"
        raise UsageError(f"a message has either payload or payload_base64; this has {given}")
    name = "payload" if "payload" in found else "payload_base64"
    text = found[name]
    if type(text) is not str:
        raise UsageError(f"{name} is {_kind(text)}; it must be text")
    if name == "payload":
        return text.encode()
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:  # ValueError: not ASCII
        raise UsageError(f"payload_base64 is no base64: {error}") from error


def _attributes(found: Any) -> dict[str, str] | None:
    if found is None:
        return None
    if type(found) is not dict:
        raise UsageError(f"attributes is {_kind(found)}; it must be an object of texts")
    for name, text in found.items():
        if type(text) is not str:
            raise UsageError(f"attribute {name[:_SHOWN]!r} is {_kind(text)}; it must be text")
    if len(found) > ATTRIBUTES_MAX:
        raise UsageError(f"{len(found)} attributes; a message has {ATTRIBUTES_MAX} at most")
    return found


def _key(found: Any) -> str | None:
    if found is not None and type(found) is not str:
        raise UsageError(f"routing_key is {_kind(found)}; it must be text, or null")
    return found


def _kind(value: Any) -> str:
    return _KINDS[type(value)]


def one_message(body: bytes, pairs: list[str], routing_key: str | None) -> Batch:
    """A body that is one payload, with attributes as `name=text`."""
    attributes: dict[str, str] = {}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        if not separator:
            raise UsageError(f"attribute is {pair[:_SHOWN]!r}; it must be name=text")
        if name in attributes:
            raise UsageError(f"attribute {name[:_SHOWN]!r} is given twice")
        attributes[name] = text
    if len(attributes) > ATTRIBUTES_MAX:
        raise UsageError(f"{len(attributes)} attributes; a message has {ATTRIBUTES_MAX} at most")
    batch = Batch(
        [body],
        [attributes] if attributes else None,
        None if routing_key is None else [routing_key],
    )
    if len(body) > MESSAGE_BYTES_MAX - 2 * _ROOM:
        _require_sizes(batch)
    return batch


def _require_sizes(batch: Batch) -> None:
    """Before anything is appended: a batch that is refused half-way would be there in part."""
    for row, payload in enumerate(batch.payloads):
        pairs = batch.attributes[row] if batch.attributes is not None else None
        key = batch.routing_keys[row] if batch.routing_keys is not None else None
        size = len(payload) + len((key or "").encode()) + _ROOM
        size += sum(
            len(name.encode()) + len(text.encode()) + 16 for name, text in (pairs or {}).items()
        )
        if size > MESSAGE_BYTES_MAX:
            raise MessageTooLarge(
                f"message {row + 1} has {size} bytes; a message has {MESSAGE_BYTES_MAX} at most"
            )


# ---- out ----


def message_lines(frames: Scan) -> Iterator[tuple[bytes, int]]:
    """The messages of a piece as lines, some at a time, each time with how many they are."""
    lines: list[bytes] = []
    size = 0
    for message in decode_messages(frames):
        line = _line(message)
        lines.append(line)
        size += len(line)
        if size >= _CHUNK_BYTES:
            yield b"".join(lines), len(lines)
            lines, size = [], 0
    if lines:
        yield b"".join(lines), len(lines)


def _line(message: StreamMessage) -> bytes:
    facts: dict[str, Any] = {
        "offset": message.msg_id.topic_offset,
        "publish_time": message.publish_time,
    }
    try:
        facts["payload"] = message.payload.decode()
    except UnicodeDecodeError:
        facts["payload_base64"] = base64.b64encode(message.payload).decode()
    facts["attributes"] = message.attributes
    facts["routing_key"] = message.routing_key
    return orjson.dumps(facts, option=orjson.OPT_APPEND_NEWLINE)


def plain_line(value: dict[str, Any]) -> bytes:
    """A line that is no message: an error, or a range that is lost."""
    return orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)
