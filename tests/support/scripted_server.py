"""Servers that are none: one that says what a test wants, and an address that changes hands."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

RUN = "1" * 32
STORE = "a" * 32
SECONDS = 10.0


def said(body: object, status: str = "200 OK", run: str = RUN) -> bytes:
    """An answer, of the run of a server."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\nForebay-Instance: {run}\r\n\r\n"
    return head.encode() + data


def appended(first: int, count: int) -> dict[str, int]:
    return {"first_offset": first, "next_offset": first + count, "count": count}


@contextmanager
def answering(
    answer: Callable[[bytes], bytes | None],
    who: dict[str, str | None] | None = None,
    heard: list[bytes] | None = None,
) -> Iterator[str]:
    """A server that answers each request so; None breaks the connection off.

    `who` is what it says of itself, without asking the test; `heard` takes all that it is sent.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    health = said({"status": "ok", "instance": RUN, "store": STORE, **(who or {})})

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as file, suppress(ConnectionError):
                while head := whole_request(file):
                    if heard is not None:
                        heard.append(head)
                    told = health if head.startswith(b"GET /healthz ") else answer(head)
                    if told is None:
                        break
                    connection.sendall(told)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(SECONDS)
        assert not thread.is_alive()


def whole_request(file: Any) -> bytes:
    """One request, its body included."""
    head, size = b"", 0
    while (line := file.readline()) not in (b"\r\n", b""):
        head += line
        if line.lower().startswith(b"content-length:"):
            size = int(line.split(b":")[1])
    return head + file.read(size) if head else b""


class Address:
    """An address that one server after another has, as a port is when servers come and go."""

    def __init__(self, url: str) -> None:
        self._target = url
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def give_to(self, url: str) -> None:
        """Ends all connections: from now on another server is here."""
        self._target = url
        for each in self._open:
            with suppress(OSError):  # its client has gone already
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            parts = urlsplit(self._target)
            try:
                there = socket.create_connection((parts.hostname or "", parts.port or 0), SECONDS)
            except OSError:
                here.close()
                continue
            there.settimeout(None)
            self._open += [here, there]
            for one, other in ((here, there), (there, here)):
                self._threads.append(threading.Thread(target=_carry, args=(one, other)))
                self._threads[-1].start()

    def __enter__(self) -> Address:
        return self

    def __exit__(self, *_error: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.give_to(self._target)
        for thread in self._threads:
            thread.join(SECONDS)
            assert not thread.is_alive()
        for each in self._open:
            each.close()


def _carry(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(65536):
            other.sendall(data)
    for each in (one, other):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


class Lines:
    """Standard input that comes in pieces, with something happening between them."""

    closed = False

    def __init__(self, *pieces: bytes | Callable[[], object]) -> None:
        self._pieces = iter(pieces)
        self.buffer = self

    def read1(self, _size: int) -> bytes:
        for piece in self._pieces:
            if isinstance(piece, bytes):
                return piece
            piece()
        return b""


def interrupt() -> None:
    raise KeyboardInterrupt
