"""Lines of standard input as messages, and messages as lines of standard output."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import UsageError
from forebay.limits import KIB, MESSAGE_BYTES_MAX, MIB

if TYPE_CHECKING:
    from forebay.format.message import StreamMessage

_READ_BYTES: Final = MIB
LINE_BYTES_MAX: Final = MESSAGE_BYTES_MAX - KIB


def arriving_lines() -> Iterator[list[bytes]]:
    """The lines of standard input, as many at a time as have arrived."""
    if sys.stdin is None or sys.stdin.closed:
        raise UsageError("standard input is closed: pipe lines into this command")
    rest = b""
    while chunk := sys.stdin.buffer.read1(_READ_BYTES):  # type: ignore[union-attr]
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > MESSAGE_BYTES_MAX:
            lines.append(rest)
        if lines:
            yield lines
    if rest:
        yield [rest]


def sound_lines(lines: list[bytes], done: int) -> tuple[list[bytes], UsageError | None]:
    """The lines before the first that is too long, and what is to be said about that one."""
    for at, line in enumerate(lines):
        if len(line) > LINE_BYTES_MAX:
            number = done + at + 1
            return lines[:at], UsageError(
                f"line {number} has {len(line)} bytes and a message at most {MESSAGE_BYTES_MAX}; "
                f"the {number - 1} lines before it are stored"
            )
    return lines, None


def message_facts(message: StreamMessage) -> dict[str, Any]:
    """A message as JSON has it."""
    return {
        "offset": message.offset,
        "publish_time": message.publish_time,
        **payload_facts(message.payload),
        "attributes": message.attributes,
        "routing_key": message.routing_key,
    }


def payload_facts(payload: bytes) -> dict[str, str]:
    """The payload as text where it is text, else in base64 under another name."""
    try:
        return {"payload": payload.decode()}
    except UnicodeDecodeError:
        return {"payload_base64": base64.b64encode(payload).decode()}


def payload_of(facts: dict[str, Any]) -> bytes:
    """The way back."""
    if "payload" in facts:
        return str(facts["payload"]).encode()
    return base64.b64decode(facts["payload_base64"])


def facts_line(facts: dict[str, Any]) -> bytes:
    return json.dumps(facts).encode() + b"\n"
