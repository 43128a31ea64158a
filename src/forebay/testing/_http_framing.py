"""Where the messages of an HTTP/1.1 stream begin and end.

A `Framer` is fed bytes and cuts them into pieces, none changed and none missing: a head whole, a
body as it comes. It knows heads, lengths and chunks; trailers and chunk extensions are passed over.
What the body of a message is, its owner says (`Body`), because an answer's depends on the request.

What a caller gets wrong: pieces of a body are views of what was fed. Use them before the next feed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, TypeAlias

HEAD_BYTES_MAX: Final = 64 * 1024
LINE_BYTES_MAX: Final = 4096
TRAILERS_MAX: Final = 128

_END_OF_HEAD: Final = b"\r\n\r\n"
_REQUEST_LINE: Final = re.compile(rb"([!-~]+) [^ \r\n]+ HTTP/1\.([01])")
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: .*)?")
_SIZE: Final = re.compile(rb"[0-9a-fA-F]{1,16}")
_LENGTH: Final = re.compile(rb"[0-9]{1,18}")


class MalformedHttp(Exception):
    """These bytes are not HTTP/1.1, or a head or a line of them is too long."""


class Head(NamedTuple):
    """A request's or an answer's first line and fields; the names of fields are lower case.

    `method` is empty in an answer, `status` is 0 in a request.
    """

    method: str
    status: int
    fields: dict[bytes, bytes]
    closes: bool

    def has(self, name: bytes, token: bytes) -> bool:
        return token in self.fields.get(name, b"").lower()


class Chunked:
    """A body of chunks."""

    __slots__ = ("_left", "_line", "_trailers")

    def __init__(self) -> None:
        self._line = bytearray()
        self._left = 0
        self._trailers: int | None = None

    def take(self, data: memoryview) -> tuple[int, bool]:
        """How many of these bytes belong to the body, and whether it ends with them."""
        at = 0
        while at < len(data):
            if self._left:
                step = min(self._left, len(data) - at)
                self._left -= step
                at += step
                continue
            part = bytes(data[at : at + LINE_BYTES_MAX])
            end = part.find(b"\n") + 1
            self._line += part[: end or len(part)]
            at += end or len(part)
            if len(self._line) > LINE_BYTES_MAX:
                raise MalformedHttp("a chunk's first line, or a trailer, is too long")
            if end and self._ends_with(bytes(self._line)):
                return at, True
        return at, False

    def _ends_with(self, line: bytes) -> bool:
        self._line.clear()
        if self._trailers is not None:
            self._trailers += 1
            if self._trailers > TRAILERS_MAX:
                raise MalformedHttp("too many trailers")
            return line in {b"\r\n", b"\n"}
        size = line.partition(b";")[0].strip()
        if not _SIZE.fullmatch(size):
            raise MalformedHttp("a chunk has no size")
        chunk = int(size, 16)
        if chunk:
            self._left = chunk + len(b"\r\n")
        else:
            self._trailers = 0
        return False


class Sized:
    """A body of a known length."""

    __slots__ = ("_left",)

    def __init__(self, length: int) -> None:
        self._left = length

    def take(self, data: memoryview) -> tuple[int, bool]:
        taken = min(self._left, len(data))
        self._left -= taken
        return taken, not self._left


class UntilClose:
    """A body that ends with the connection."""

    __slots__ = ()

    def take(self, data: memoryview) -> tuple[int, bool]:
        return len(data), False


Body: TypeAlias = Chunked | Sized | UntilClose


class Piece(NamedTuple):
    """A part of a message as it was on the wire: the whole head if there is one, or body."""

    data: bytes | memoryview
    head: Head | None
    last: bool


class Framer:
    """Cuts a stream into pieces. `parse` reads a head, `body_of` says what follows it."""

    def __init__(self, parse: Callable[[bytes], Head], body_of: Callable[[Head], Body]) -> None:
        self._parse = parse
        self._body_of = body_of
        self._head = bytearray()
        self._body: Body | None = None

    @property
    def until_close(self) -> bool:
        return isinstance(self._body, UntilClose)

    def feed(self, data: memoryview) -> Iterator[Piece]:
        while data:
            if self._body is None:
                known = len(self._head)
                self._head += data[: HEAD_BYTES_MAX + 1 - known]
                end = self._head.find(_END_OF_HEAD, max(0, known - 3))
                if end < 0:
                    if len(self._head) > HEAD_BYTES_MAX:
                        raise MalformedHttp("a head is too long")
                    return
                end += len(_END_OF_HEAD)
                raw = bytes(self._head[:end])
                self._head.clear()
                data = data[end - known :]
                yield self._begin(raw)
            else:
                taken, last = self._body.take(data)
                piece = Piece(data[:taken], None, last)
                data = data[taken:]
                if last:
                    self._body = None
                yield piece

    def _begin(self, raw: bytes) -> Piece:
        head = self._parse(raw)
        body = self._body_of(head)
        _, empty = body.take(memoryview(b""))
        self._body = None if empty else body
        return Piece(raw, head, empty)


def request_head(raw: bytes) -> Head:
    first, fields = _lines(raw)
    match = _REQUEST_LINE.fullmatch(first)
    if match is None:
        raise MalformedHttp("no request line")
    closes = match[2] == b"0" or b"close" in fields.get(b"connection", b"").lower()
    return Head(match[1].decode("ascii"), 0, fields, closes)


def response_head(raw: bytes) -> Head:
    first, fields = _lines(raw)
    match = _STATUS_LINE.fullmatch(first)
    if match is None:
        raise MalformedHttp("no status line")
    closes = match[1] == b"0" or b"close" in fields.get(b"connection", b"").lower()
    return Head("", int(match[2]), fields, closes)


def request_body(head: Head) -> Body:
    return _declared(head) or Sized(0)


def response_body(head: Head, method: str) -> Body:
    """The body of an answer to `method`."""
    if head.status == 101 or (method == "CONNECT" and head.status < 300):
        raise MalformedHttp("a connection that stops speaking HTTP/1.1")
    if method == "HEAD" or head.status < 200 or head.status in {204, 304}:
        return Sized(0)
    return _declared(head) or UntilClose()


def _declared(head: Head) -> Body | None:
    if b"transfer-encoding" in head.fields:
        if not head.has(b"transfer-encoding", b"chunked"):
            raise MalformedHttp("an unknown transfer encoding")
        return Chunked()
    length = head.fields.get(b"content-length")
    if length is None:
        return None
    if not _LENGTH.fullmatch(length):
        raise MalformedHttp("no content length")
    return Sized(int(length))


def _lines(raw: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    first, *lines = raw[: -len(_END_OF_HEAD)].split(b"\r\n")
    fields = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon:
            raise MalformedHttp("a field without a colon")
        fields[name.strip().lower()] = value.strip()
    return first, fields
