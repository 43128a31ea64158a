"""A relayed connection that speaks HTTP/1.1: requests are counted, and some of them fail.

Each request has its fate from its head on: it is forwarded, it is answered with an error instead,
or it is forwarded and its answer is dropped. Answers keep the order of the requests, also when a
client pipelines. A request that is answered with an error is read to its end first, so that the
connection stays usable; one that waits for `100 Continue` is answered at once and is the
connection's last.

Beware: bytes that are no HTTP/1.1 are not passed on. The connection is reset and
the trouble counted as "malformed".
"""

from __future__ import annotations

import re
import socket
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, Literal, NamedTuple, TypeAlias

from support.proxy_relay import Address, Connection, End, Traffic

HEAD_BYTES_MAX: Final = 64 * 1024
LINE_BYTES_MAX: Final = 4096
TRAILERS_MAX: Final = 128
DRAIN_SECONDS_MAX: Final = 5.0
"""How long a client may go on sending after the answer that was its connection's last."""
REQUESTS_WAITING_MAX: Final = 1024
_CODES: Final = {503: "SlowDown", 500: "InternalError", 429: "TooManyRequests"}
_PHRASES: Final = {status.value: status.phrase for status in HTTPStatus}

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


class MessagePart(NamedTuple):
    """A part of a message as it was on the wire: the whole head if there is one, or body."""

    data: bytes | memoryview
    head: Head | None
    last: bool


class Framer:
    """Cuts a stream into parts, none changed and none missing: a head whole, a body as it comes.

    `parse` reads a head, `body_of` says what follows it: an answer's body depends on its request.
    Trailers and chunk extensions are passed over. Parts of a body are views of what was fed: use
    them before the next feed.
    """

    def __init__(self, parse: Callable[[bytes], Head], body_of: Callable[[Head], Body]) -> None:
        self._parse = parse
        self._body_of = body_of
        self._head = bytearray()
        self._body: Body | None = None

    @property
    def until_close(self) -> bool:
        return isinstance(self._body, UntilClose)

    def feed(self, data: memoryview) -> Iterator[MessagePart]:
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
                part = MessagePart(data[:taken], None, last)
                data = data[taken:]
                if last:
                    self._body = None
                yield part

    def _begin(self, raw: bytes) -> MessagePart:
        head = self._parse(raw)
        body = self._body_of(head)
        _, empty = body.take(memoryview(b""))
        self._body = None if empty else body
        return MessagePart(raw, head, empty)


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


@dataclass(slots=True)
class _Exchange:
    """A request whose answer has not been delivered, or dropped, whole."""

    method: str
    fate: Literal["forward", "error", "drop"]
    closes: bool
    status: int = 0
    read: bool = False


class HttpConnection(Connection):
    def __init__(
        self,
        traffic: Traffic,
        client: socket.socket,
        upstream: Address,
        on_closed: Callable[[Connection], None],
    ) -> None:
        super().__init__(traffic, client, upstream, on_closed)
        self._waiting: deque[_Exchange] = deque()
        self._reading: _Exchange | None = None
        self._requests = Framer(request_head, request_body)
        self._answers = Framer(response_head, self._answer_body)
        self._interim = False
        self._last_sent = False

    # ---- requests ----

    def client_bytes(self, data: memoryview, due: float) -> None:
        self._guarded(self._feed_requests, data, due)

    def _feed_requests(self, data: memoryview, due: float) -> None:
        for part in self._requests.feed(data):
            if self.closed or self._last_sent or (self.dropping and part.head is not None):
                return
            if part.head is not None:
                self._reading = self._begin(part.head)
            assert self._reading is not None, "a body without a head"
            if self._reading.fate != "error":
                self.up.push(part.data, due)
            if part.last:
                self._reading.read = True
                self._answer_errors()

    def _begin(self, head: Head) -> _Exchange:
        if len(self._waiting) >= REQUESTS_WAITING_MAX:
            raise MalformedHttp("too many requests without an answer")
        faults = self.traffic.faults
        self.traffic.methods[head.method] += 1
        draw = self.traffic.requests.random()
        exchange = _Exchange(head.method, "forward", head.closes)
        if draw < faults.http_error_rate:
            exchange.fate = "error"
            exchange.status = faults.http_error_status
        elif draw < faults.http_error_rate + faults.timeout_after_success_rate:
            exchange.fate = "drop"
        self._waiting.append(exchange)
        if exchange.fate == "error" and head.has(b"expect", b"100-continue"):
            exchange.read = exchange.closes = True
            self._answer_errors()
        return exchange

    def _answer_errors(self) -> None:
        """Answers the requests at the front that get an error and are read."""
        while self._waiting and self._waiting[0].fate == "error" and self._waiting[0].read:
            exchange = self._waiting.popleft()
            self.traffic.injected["http_error"] += 1
            now = self.traffic.loop.time()
            # The answer was never at the upstream: the whole round trip is on its way back.
            due = self.down.due(self.down.due(now) or now)
            self.down.push(_error_answer(exchange), due)
            if exchange.closes:
                self._last_sent = True
                self._waiting.clear()
                self.down.end("eof", due)
                self.later(DRAIN_SECONDS_MAX, self.close)

    # ---- answers ----

    def server_bytes(self, data: memoryview, due: float) -> None:
        self._guarded(self._feed_answers, data, due)

    def _feed_answers(self, data: memoryview, due: float) -> None:
        for part in self._answers.feed(data):
            if self.closed or self.dropping or self._last_sent:
                return
            if part.head is not None:
                self._interim = part.head.status < 200
            dropped = self._is_dropped() and not self._interim
            if not dropped:
                self.down.push(part.data, due)
            if part.last and not self._interim:
                self._answered(dropped=dropped)

    def _answer_body(self, head: Head) -> Body:
        return response_body(head, self._waiting[0].method if self._waiting else "")

    def _is_dropped(self) -> bool:
        return bool(self._waiting) and self._waiting[0].fate == "drop"

    def _answered(self, *, dropped: bool) -> None:
        if self._waiting:
            self._waiting.popleft()
        if dropped:
            self.timed_out(self.close)
        else:
            self._answer_errors()

    def server_ended(self, end: End, due: float) -> None:
        if self.dropping or self._last_sent:
            return
        if end == "eof" and self._is_dropped() and self._answers.until_close:
            self.timed_out(self.close)
        else:
            self.down.end(end, due)

    def _guarded(
        self, feed: Callable[[memoryview, float], None], data: memoryview, due: float
    ) -> None:
        try:
            feed(data, due)
        except MalformedHttp:
            self.traffic.failures["malformed"] += 1
            self.reset()


def _error_answer(exchange: _Exchange) -> bytes:
    code = _CODES.get(exchange.status, "ServiceUnavailable")
    body = (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{code}</Code><Message>A fault of the proxy.</Message></Error>"
    ).encode()
    lines = [
        f"HTTP/1.1 {exchange.status} {_PHRASES.get(exchange.status, 'Error')}",
        "Content-Type: application/xml",
        f"Content-Length: {len(body)}",
        *(["Connection: close"] if exchange.closes else []),
    ]
    head = "".join(f"{line}\r\n" for line in lines)
    return f"{head}\r\n".encode() + (b"" if exchange.method == "HEAD" else body)
