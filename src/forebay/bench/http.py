"""`forebay bench http`: the HTTP server beside a bare one that only reads the same bodies.

Both run in processes of their own, on the same HTTP server with the same settings, and are asked
in turns by one client over 4 connections: 256 messages of 1 KiB a request, as lines of JSON. What
ours does more is parse them, give them offsets, write them and, `synced`, wait for the disk.

`follow`: four producers send one message a request, synced, together so many a second; a reader
that follows the topic takes the time at which each message arrives. Both are in the client's
process, so one clock tells how long it took from before the request to after the line.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

from forebay.bench.http_client import (
    TOPIC,
    Connection,
    in_threads,
    lines_of,
    post,
    requests_a_second,
    server,
)
from forebay.bench.measure import Measurement, Timed, machine, run_rounds, scratch
from forebay.errors import ServiceError
from forebay.format.codec import COMPILED

PRODUCE_GOAL: Final = 0.3
CONNECTIONS: Final = 4
MESSAGES: Final = 256
MESSAGE_BYTES: Final = 1024
FOLLOW_RATE: Final = 1000
_FOLLOWED: Final = "/v1/topics/default/followed/messages"
_MARK: Final = b'"payload":"'
_PATIENCE_SECONDS: Final = 30.0


def _produce(port: int, durability: str, requests: int) -> Timed:
    target = f"{TOPIC}?durability={durability}"
    request = post(lines_of(MESSAGES, MESSAGE_BYTES), target)
    return lambda _: requests_a_second(port, request, CONNECTIONS, requests)


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
    """Reads a topic as it grows, and notes how long each message was under way."""

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
            return  # whoever waits finds that messages are missing
        finally:
            self.done.set()

    def close(self) -> None:
        self._connection.close()


def _send_paced(connection: Connection, number: int, messages: int, rate: int) -> None:
    """One message a request, at set times, whatever the answers take."""
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
    connections[0].ask(post(b'{"payload":"0"}\n', _FOLLOWED))  # and the topic is there
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


def run(
    directory: Path | None, *, rounds: int, requests: int, follow_seconds: float, progress: bool
) -> dict[str, Any]:
    """All measurements, as data for `forebay.bench.report`."""
    started = time.time()

    def say(text: str) -> None:
        if progress and sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    with scratch(directory) as home, server("ours", home / "data") as ours, server("bare") as bare:
        results = run_rounds(_rows(ours, bare, requests), rounds, directory, say)
        say(f"following {FOLLOW_RATE} messages a second")
        followed = _follow(ours, rounds, follow_seconds)
        about = machine(home, compiled=COMPILED)
    say("")
    found: dict[str, Any] = {
        "benchmark": "http",
        "machine": about,
        "rounds": rounds,
        "connections": CONNECTIONS,
        "requests": requests,
        "results": [result.as_json() for result in results],
        "follow": followed,
        "seconds": time.time() - started,
    }
    if about["filesystem"] in {"tmpfs", "ramfs"}:
        found["warning"] = "the directory is in memory: name one on a disk with --dir"
    return found
