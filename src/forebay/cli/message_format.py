"""`consume --format`: prints the parts of a message as a template says.

The letters are those of kcat's `-f`, as far as a message has the part:

| escape | meaning |
|---|---|
| `%o` | the offset |
| `%v`, `%s` | the payload, as it is |
| `%S` | the number of bytes of the payload |
| `%k` | the routing key; nothing if the message has none |
| `%K` | the number of bytes of the routing key; -1 if the message has none |
| `%t`, `%p` | the topic, and its partition |
| `%T` | the publish time, in milliseconds since 1970-01-01 UTC |
| `%h` | the attributes: `name=text`, separated by commas, ordered by name |
| `%%` | a percent sign |
| `\\n`, `\\r`, `\\t`, `\\0`, `\\\\` | line feed, carriage return, tab, zero byte, backslash |
| `\\xNN` | the byte with these two hexadecimal digits |

Beware: nothing is printed between messages but what the template has. It usually ends with `\\n`.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from typing import Any, Final

from forebay.errors import UsageError
from forebay.format.names import TopicName

Facts = dict[str, Any]
"""A message as a JSON object."""
Part = Callable[[Facts, TopicName], bytes]


def payload_of(facts: Facts) -> bytes:
    if "payload" in facts:
        return str(facts["payload"]).encode()
    return base64.b64decode(facts["payload_base64"])


def _key(facts: Facts) -> bytes | None:
    key = facts.get("routing_key")
    return None if key is None else str(key).encode()


def _key_length(facts: Facts) -> bytes:
    key = _key(facts)
    return b"%d" % (-1 if key is None else len(key))


def _attributes(facts: Facts) -> bytes:
    pairs = sorted((facts.get("attributes") or {}).items())
    return ",".join(f"{name}={text}" for name, text in pairs).encode()


_PARTS: Final[dict[str, Part]] = {
    "o": lambda facts, _: b"%d" % facts["offset"],
    "v": lambda facts, _: payload_of(facts),
    "s": lambda facts, _: payload_of(facts),
    "S": lambda facts, _: b"%d" % len(payload_of(facts)),
    "k": lambda facts, _: _key(facts) or b"",
    "K": lambda facts, _: _key_length(facts),
    "t": lambda _, topic: str(topic).encode(),
    "p": lambda _, topic: b"%d" % topic.partition,
    "T": lambda facts, _: b"%d" % facts["publish_time"],
    "h": lambda facts, _: _attributes(facts),
}
_CHARACTERS: Final = {"n": b"\n", "r": b"\r", "t": b"\t", "0": b"\0", "\\": b"\\"}
_TOKEN: Final = re.compile(
    r"%(?P<part>.?)|\\(?P<byte>x[0-9A-Fa-f]{2}|.?)|(?P<text>[^%\\]+)", re.DOTALL
)


class MessageFormat:
    """A template that was checked. UsageError names an escape that does not exist."""

    def __init__(self, template: str) -> None:
        self._parts: list[bytes | Part] = []
        for found in _TOKEN.finditer(template):
            if found["text"] is not None:
                self._parts.append(found["text"].encode("utf-8", "surrogateescape"))
            elif found["part"] is not None:
                self._parts.append(self._part(found["part"]))
            else:
                self._parts.append(self._byte(found["byte"]))

    def _part(self, letter: str) -> bytes | Part:
        if letter == "%":
            return b"%"
        if letter not in _PARTS:
            known = " ".join(f"%{each}" for each in _PARTS)
            raise UsageError(f"--format has %{letter}, which means nothing; known: {known} %%")
        return _PARTS[letter]

    def _byte(self, escape: str) -> bytes:
        if len(escape) == 3:
            return bytes.fromhex(escape[1:])
        if escape not in _CHARACTERS:
            raise UsageError(
                f"--format has \\{escape}, which means nothing; known: \\n \\r \\t \\0 \\xNN \\\\"
            )
        return _CHARACTERS[escape]

    def line(self, facts: Facts, topic: TopicName) -> bytes:
        return b"".join(
            each if isinstance(each, bytes) else each(facts, topic) for each in self._parts
        )
