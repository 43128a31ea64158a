"""Clients that open responses and do not read them: what the server's memory does.

The server is a process of its own. The bounds are those of one server with default settings,
however many readers there are: the budget of all responses, what is in flight on the fetching
threads, and a write buffer for each connection.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import pytest

import forebay
from forebay.limits import KIB, MIB
from forebay.settings import DeleterSettings, StoreSettings, UploaderSettings
from support.server_processes import ServerProcess

pytestmark = pytest.mark.long

ABOVE_MAX: Final = 150.0
"""MiB above the start, while clients do not read. Without a budget, 36 readers of all kinds took
345 MiB, and 64 readers of a large history in objects 1,200 MiB."""
LEFT_MAX: Final = 50.0
"""MiB above the start, a minute after they have gone."""
LEFT_SECONDS: Final = 60.0
QUIET_SECONDS: Final = 2.0


def fill(data: Path, cold: int, warm: int) -> list[str]:
    """Fills topics with so many MiB; returns the paths of all kinds of responses over them."""
    settings = StoreSettings(
        data,
        uploader=UploaderSettings(enabled=False),
        deleter=DeleterSettings(retention_size_mb=0, deletion_lag_minutes=0),
    )
    with forebay.open(settings) as store:
        for name, size in (("small", KIB), ("large", MIB)):
            topic = store.topic(f"cold-{name}")
            for _ in range(cold):
                topic.append_many([b"x" * size] * (MIB // size))
            topic.rotate()
            topic.append(b"last", durability="synced")
            topic.upload()
            topic.trim_local()
            [last] = topic.segments()
            assert last.count == 1
            topic = store.topic(f"warm-{name}")
            for _ in range(warm):
                topic.append_many([b"x" * size] * (MIB // size), durability="synced")
    [segment, *_] = sorted((data / "wal/default/warm-small").glob("*.log"))
    [stored, *_] = sorted((data / "objects").rglob("data-*.dnb1"))
    return [
        "/v1/topics/default/cold-small/messages",
        "/v1/topics/default/cold-large/messages",
        "/v1/topics/default/warm-small/messages?follow=true",
        "/v1/topics/default/warm-large/messages",
        f"/v1/topics/default/warm-small/segments/{segment.name}",
        f"/v1/objects/{stored.relative_to(data / 'objects')}",
    ]


@contextmanager
def serving(data: Path, log: Path) -> Iterator[ServerProcess]:
    with ServerProcess("serve", data, log) as server:
        server.wait_ready()
        yield server


def memory(server: ServerProcess, field: str = "VmRSS") -> float:
    """What the server has in memory, in MiB; `VmHWM` is the most since `forget_peak`."""
    status = Path(f"/proc/{server.pid}/status").read_text()
    found = re.search(rf"{field}:\s+(\d+)", status)
    assert found is not None
    return int(found[1]) / KIB


def forget_peak(server: ServerProcess) -> None:
    Path(f"/proc/{server.pid}/clear_refs").write_text("5")


def metric(server: ServerProcess, name: str) -> float:
    text = server.client.request("GET", "/metrics").read().decode()
    return sum(
        float(each) for each in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    )


def sent(server: ServerProcess) -> float:
    """The bytes of all responses so far."""
    transfers = metric(server, "forebay_http_transfer_bytes_total")
    return transfers + metric(server, "forebay_http_bytes_read_total")


def readers(server: ServerProcess, paths: Sequence[str], count: int) -> list[socket.socket]:
    """Clients that have sent their requests, and have read nothing."""
    parts = urlsplit(server.where["url"])
    found = []
    for number in range(count):
        client = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=60)
        head = f"GET {paths[number % len(paths)]} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n"
        client.sendall(head.encode())
        found.append(client)
    return found


def wait_until_quiet(server: ServerProcess) -> None:
    """Waits until the server has sent nothing for some seconds: all sockets are full."""
    last, since = -1.0, time.monotonic()

    def quiet() -> bool:
        nonlocal last, since
        now = sent(server)
        if now != last:
            last, since = now, time.monotonic()
        return time.monotonic() - since > QUIET_SECONDS

    server.wait_until(quiet, "the sockets were full")


def wait_for_memory(server: ServerProcess, start: float) -> None:
    server.wait_until(
        lambda: memory(server) <= start + LEFT_MAX, "the memory went back", LEFT_SECONDS
    )


def warm_up(server: ServerProcess, paths: Sequence[str]) -> float:
    """Uses each path once; returns the memory after that."""
    for path in paths:
        with closing(readers(server, [path.partition("?")[0] + "?limit=1"], 1)[0]) as client:
            assert client.recv(KIB)
    return memory(server)


def test_readers_that_do_not_read_take_little_memory_and_give_it_back(tmp_path: Path) -> None:
    paths = fill(tmp_path / "data", cold=64, warm=16)
    with serving(tmp_path / "data", tmp_path / "log") as server:
        start = warm_up(server, paths)
        forget_peak(server)
        clients = readers(server, paths, 36)
        wait_until_quiet(server)
        above = memory(server, "VmHWM") - start
        print(f"start {start:.0f} MiB, at most {above:.0f} MiB above it")
        assert above <= ABOVE_MAX
        for client in clients:
            client.close()
        wait_for_memory(server, start)
        print(f"then {memory(server) - start:.0f} MiB above it")


# ---- soak ----

CASES: Final = {"never": (64, 0), "slow": (16, KIB)}


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", CASES)
def test_readers_take_little_memory_for_minutes(tmp_path: Path, case: str) -> None:
    """64 that never read, or 16 that take 1 KiB a second, for a minute, twice."""
    count, rate = CASES[case]
    paths = fill(tmp_path / "data", cold=1100, warm=300)
    for group in (paths, paths[:1], paths[2:3]):
        with serving(tmp_path / "data", tmp_path / "log") as server:
            start = warm_up(server, group)
            for _ in range(2):
                forget_peak(server)
                clients = readers(server, group, count)
                end = time.monotonic() + 60
                while time.monotonic() < end:
                    time.sleep(1)
                    for client in clients if rate else ():
                        client.recv(rate)
                above = memory(server, "VmHWM") - start
                for client in clients:
                    client.close()
                wait_for_memory(server, start)
                time.sleep(LEFT_SECONDS)
                left = memory(server) - start
                print(f"{case} {len(group)} kinds: at most {above:.0f} MiB above, {left:.0f} left")
                assert above <= ABOVE_MAX
                assert left <= LEFT_MAX
