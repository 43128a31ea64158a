"""`forebay bench http`: compares `forebay serve` with a service that only reads the same bodies.

Both run in separate processes, with the same HTTP server and the same settings, and get the
same requests in turns from one client over 4 connections: 256 messages of 1 KiB a request, as lines
of JSON. Forebay also parses them, gives them offsets, writes them and, `synced`, waits for the
disk. The client costs as little as it can: a request is one write of bytes made in advance, and a
response is read to the length that its header gives.

`follow`: four producers send one message a request, synced, at 1,000 messages a second together. A
reader follows the topic and takes the time at which each message arrives. Both are in the client's
process, so one clock measures the time from before the request to after the line.
"""

from __future__ import annotations

import json
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from forebay.bench.bare_server import MODULE
from forebay.bench.measure import (
    Measurement,
    Timed,
    in_threads,
    progress_line,
    rate_of,
    result_of,
    run_rounds,
    scratch,
    server_process,
)
from forebay.errors import ServiceError

PRODUCE_GOAL: Final = 0.3
CONNECTIONS: Final = 4
MESSAGES: Final = 256
MESSAGE_BYTES: Final = 1024
FOLLOW_RATE: Final = 1000
_TOPIC: Final = "/v1/topics/default/bench/messages"
_FOLLOWED: Final = "/v1/topics/default/followed/messages"
_MARK: Final = b'"payload":"'
_READ_BYTES: Final = 64 * 1024
_RESPONSE_SECONDS: Final = 60.0
_PATIENCE_SECONDS: Final = 30.0


def run(
    directory: Path | None, *, rounds: int, requests: int, follow_seconds: float, progress: bool
) -> dict[str, Any]:
    """All measurements, as data for `forebay.bench.measure.show`."""
    started = time.time()
    say = progress_line(progress=progress)
    with scratch(directory) as home, our_server(home / "data") as ours, bare_server() as bare:
        results = run_rounds(_rows(ours, bare, requests), rounds, directory, say)
        say(f"following {FOLLOW_RATE} messages a second")
        followed = _follow(ours, rounds, follow_seconds)
    say("")
    return result_of(
        "http",
        rounds,
        directory,
        connections=CONNECTIONS,
        requests=requests,
        results=[result.as_json() for result in results],
        follow=followed,
        seconds=time.time() - started,
    )


def _produce(port: int, durability: str, requests: int) -> Timed:
    target = f"{_TOPIC}?durability={durability}"
    request = post(lines_of(MESSAGES, MESSAGE_BYTES), target)
    return lambda _: _requests_a_second(port, request, requests)


def _rows(ours: int, bare: int, requests: int) -> list[Measurement]:
    return [
        Measurement(
            f"POST {MESSAGES} messages, {durability}", MESSAGE_BYTES, "requests/s",
            _produce(ours, durability, requests), "a bare service reads them",
            _produce(bare, durability, requests), goal,
        )
        for durability, goal in (("synced", PRODUCE_GOAL), ("buffered", None))
    ]  # fmt: skip


class Follower:
    """Reads a topic as it grows, and notes how long each message took to arrive."""

    def __init__(self, port: int, expected: int) -> None:
        self._connection = Connection(port)
        self._expected = expected
        self.delays: list[float] = []
        self.ready = threading.Event()
        self.done = threading.Event()

    def run(self) -> None:
        rest = b""
        try:
            for data in self._connection.stream(f"{_FOLLOWED}?start=latest&follow=true"):
                now = time.perf_counter_ns()
                self.ready.set()
                *found, rest = (rest + data).split(b"\n")
                for line in found:
                    _, mark, text = line.partition(_MARK)
                    if mark:
                        self.delays.append((now - int(text.partition(b'"')[0])) / 1e9)
                if len(self.delays) >= self._expected:
                    break
        except (ServiceError, OSError):
            return  # the caller finds that messages are missing
        finally:
            self.done.set()

    def close(self) -> None:
        self._connection.close()


def _send_paced(connection: Connection, number: int, messages: int, rate: int) -> None:
    """Sends one message per request, at fixed times, however long the responses take."""
    step = CONNECTIONS / rate
    begin = time.perf_counter() + number / rate
    for index in range(messages):
        pause = begin + index * step - time.perf_counter()
        if pause > 0:
            time.sleep(pause)
        body = b'{"payload":"%d"}\n' % time.perf_counter_ns()
        connection.ask(post(body, _FOLLOWED))


def follow_delays(port: int, seconds: float, rate: int) -> list[float]:
    """How long each message took, in seconds, from its request to its line; sorted."""
    share = max(int(seconds * rate) // CONNECTIONS, 1)
    connections = [Connection(port) for _ in range(CONNECTIONS)]
    connections[0].ask(post(b'{"payload":"0"}\n', _FOLLOWED))  # creates the topic
    follower = Follower(port, share * CONNECTIONS)
    thread = threading.Thread(target=follower.run)
    thread.start()
    try:
        if not follower.ready.wait(_PATIENCE_SECONDS):
            raise ServiceError("the stream does not begin")
        in_threads(
            CONNECTIONS, lambda number: _send_paced(connections[number], number, share, rate)
        )
        follower.done.wait(_PATIENCE_SECONDS)
    finally:
        follower.close()
        thread.join(_PATIENCE_SECONDS)
        for connection in connections:
            connection.close()
    if len(follower.delays) != share * CONNECTIONS:
        raise ServiceError(f"{len(follower.delays)} messages of {share * CONNECTIONS} arrived")
    return sorted(follower.delays)


def _follow(port: int, rounds: int, seconds: float) -> dict[str, Any]:
    found = [follow_delays(port, seconds, FOLLOW_RATE) for _ in range(rounds)]

    def part(share: float) -> float:
        return statistics.median(delays[int(share * (len(delays) - 1))] for delays in found)

    return {
        "rate": FOLLOW_RATE,
        "messages": sum(map(len, found)),
        "p50_ms": part(0.5) * 1000,
        "p99_ms": part(0.99) * 1000,
        "max_ms": max(delays[-1] for delays in found) * 1000,
    }


# ---- the client ----


def post(body: bytes, target: str = _TOPIC) -> bytes:
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
        self._socket = socket.create_connection(("127.0.0.1", port), _RESPONSE_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, request: bytes) -> bytes:
        """Sends a request and returns the body of the response, which must have status 200."""
        self._socket.sendall(request)
        data = b""
        while (end := data.find(b"\r\n\r\n")) < 0:
            data += self._more()
        head, body = data[:end].lower(), data[end + 4 :]
        if not head.startswith(b"http/1.1 200"):
            raise ServiceError(f"the server responded {data[:300]!r}")
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        while len(body) < length:
            body += self._more()
        return body

    def stream(self, target: str) -> Iterator[bytes]:
        """The response to a GET as it comes, the framing of HTTP included."""
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


def our_server(data: Path) -> AbstractContextManager[int]:
    """`forebay serve` on that directory; yields its port."""
    options = ["serve", "--data", str(data), "--listen", "127.0.0.1:0", "--json"]
    return _server("forebay", "--log-level", "warning", *options)


def bare_server() -> AbstractContextManager[int]:
    return _server(MODULE)


@contextmanager
def _server(*arguments: str) -> Iterator[int]:
    """Runs a module that prints its URL as JSON, in a separate process; yields its port."""
    with server_process(*arguments) as said:
        port = int(said["url"].rpartition(":")[2])
        with closing(Connection(port)) as connection:
            connection.ask(post(lines_of(1, 8)))  # returns once it responds
        yield port


def _requests_a_second(port: int, request: bytes, requests: int) -> float:
    """The rate of so many requests, on connections that each wait for their responses."""
    opened = [Connection(port) for _ in range(CONNECTIONS)]
    share = max(requests // CONNECTIONS, 1)

    def send(times: int) -> None:
        def work(number: int) -> None:
            for _ in range(times):
                opened[number].ask(request)

        in_threads(CONNECTIONS, work)

    try:
        send(1)  # opens the topic
        return rate_of(share * CONNECTIONS, lambda: send(share))
    finally:
        for connection in opened:
            connection.close()
