"""A relayed connection that speaks HTTP/1.1: requests are counted, and some of them fail.

Each request has its fate from its head on: it is forwarded, it is answered with an error instead,
or it is forwarded and its answer is dropped. Answers keep the order of the requests, also when a
client pipelines. A request that is answered with an error is read to its end first, so that the
connection stays usable; one that waits for `100 Continue` is answered at once and is the
connection's last.

What a caller gets wrong: bytes that are no HTTP/1.1 are not passed on. The connection is reset and
the trouble counted as "malformed".
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, Literal

from forebay.testing._connection import Address, Connection
from forebay.testing._http_framing import (
    Body,
    Framer,
    Head,
    MalformedHttp,
    request_body,
    request_head,
    response_body,
    response_head,
)
from forebay.testing._relay import End, Traffic

DRAIN_SECONDS_MAX: Final = 5.0
"""How long a client may go on sending after the answer that was its connection's last."""

REQUESTS_WAITING_MAX: Final = 1024

_CODES: Final = {503: "SlowDown", 500: "InternalError", 429: "TooManyRequests"}
_PHRASES: Final = {status.value: status.phrase for status in HTTPStatus}


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
        for piece in self._requests.feed(data):
            if self.closed or self._last_sent or (self.dropping and piece.head is not None):
                return
            if piece.head is not None:
                self._reading = self._begin(piece.head)
            assert self._reading is not None, "a body without a head"
            if self._reading.fate != "error":
                self.up.push(piece.data, due)
            if piece.last:
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
        for piece in self._answers.feed(data):
            if self.closed or self.dropping or self._last_sent:
                return
            if piece.head is not None:
                self._interim = piece.head.status < 200
            dropped = self._is_dropped() and not self._interim
            if not dropped:
                self.down.push(piece.data, due)
            if piece.last and not self._interim:
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
