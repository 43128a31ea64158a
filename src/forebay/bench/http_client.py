"""The client of `forebay bench http`: sockets and bytes made in advance.

It costs as little as it can, and the same for every server: a request is one write of bytes that
were there before, an answer is read to the length that it tells.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from forebay.bench.http_server import MODULE
from forebay.errors import ServiceError

TOPIC: Final = "/v1/topics/default/bench/messages"
_READ_BYTES: Final = 64 * 1024
_ANSWER_SECONDS: Final = 60.0
_START_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 20.0


def post(body: bytes, target: str = TOPIC) -> bytes:
    """A whole request for lines of messages."""
    head = (
        f"POST {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/x-ndjson\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def lines_of(messages: int, message_bytes: int) -> bytes:
    """Lines of messages that are text of so many bytes, no two the same."""
    texts = (f"{number:08d}".ljust(message_bytes, "x") for number in range(messages))
    return b"".join(json.dumps({"payload": text}).encode() + b"\n" for text in texts)


class Connection:
    """One kept-alive connection; one request at a time."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), _ANSWER_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, request: bytes) -> bytes:
        """The body of the answer, which must be a good one."""
        self._socket.sendall(request)
        data = b""
        while (end := data.find(b"\r\n\r\n")) < 0:
            data += self._more()
        head, body = data[:end].lower(), data[end + 4 :]
        if not head.startswith(b"http/1.1 200"):
            raise ServiceError(f"the server answered {data[:300]!r}")
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        while len(body) < length:
            body += self._more()
        return body

    def stream(self, target: str) -> Iterator[bytes]:
        """What a GET answers, as it comes, the framing of HTTP included."""
        self._socket.sendall(f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        while True:
            yield self._more()

    def _more(self) -> bytes:
        data = self._socket.recv(_READ_BYTES)
        if not data:
            raise ServiceError("the server closed the connection")
        return data

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@contextmanager
def server(*arguments: str | Path) -> Iterator[int]:
    """A server in a process of its own; answers its port."""
    command = [sys.executable, "-m", MODULE, *map(str, arguments)]
    process = subprocess.Popen(  # noqa: S603  # this interpreter, and a module of this package
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        said = process.stdout.readline()
        if not said:
            raise ServiceError(f"{' '.join(command)} ended before it listened")
        _require_answers(int(said))
        yield int(said)
    finally:
        process.stdin.close()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _require_answers(port: int) -> None:
    deadline = time.monotonic() + _START_SECONDS
    connection = Connection(port)
    try:
        connection.ask(post(lines_of(1, 8)))
    finally:
        connection.close()
    assert time.monotonic() < deadline, "the server does not answer"


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Does the same so many times at a time; raises what the first of them raised."""
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001  # raised below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def requests_a_second(port: int, request: bytes, connections: int, requests: int) -> float:
    """So many requests over so many connections, each of which waits for its answers."""
    opened = [Connection(port) for _ in range(connections)]
    share = max(requests // connections, 1)

    def work(number: int, times: int) -> None:
        for _ in range(times):
            opened[number].ask(request)

    try:
        in_threads(connections, lambda number: work(number, 1))  # and everything is warm
        started = time.perf_counter()
        in_threads(connections, lambda number: work(number, share))
        return share * connections / (time.perf_counter() - started)
    finally:
        for connection in opened:
            connection.close()
