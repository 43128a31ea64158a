"""Clients that give nothing, take nothing or never ask: nobody else is held up by them."""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.admin.consume import STREAMS, StreamTimeouts
from forebay.admin.context import ServerContext
from forebay.admin.request import PENDING
from forebay.admin.response import DROPPED
from forebay.admin.server import ConnectionLimits, connections_max
from forebay.files.local import LocalDisk
from forebay.limits import KIB, MIB
from forebay.settings import AdminSettings, StoreSettings
from forebay.topic.store import Store
from support.disks import WatchedDisk, in_thread, wait_until
from support.raw_http import NDJSON, ask, plain_socket
from support.served import Served, served, serving, strained

PATH = "/v1/topics/default/orders/messages"
TOPIC = "/default/orders"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(StoreSettings(data=tmp_path)) as store:
        yield store


def head_of(length: int, path: str = PATH) -> bytes:
    text = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"
    return text.encode()


def rest_of(client: socket.socket) -> bytes:
    """What comes until the server closes."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(64 * KIB):
            parts.append(part)
    return b"".join(parts)


# ---- who gives nothing ----


def test_bodies_that_never_come_take_no_room(tmp_path: Path) -> None:
    with served(tmp_path) as server, contextlib.ExitStack() as silent:
        before = PENDING.value()
        for _ in range(8):  # of 16 MiB each, where there is room for 64 MiB
            silent.enter_context(plain_socket(server)).sendall(head_of(16 * MIB))
        for _ in range(8):
            silent.enter_context(plain_socket(server)).sendall(head_of(16 * MIB) + b"x")
        wait_until(lambda: PENDING.value() > before)
        assert ask(server, "POST", PATH, b"x").status == 200
        assert PENDING.value() < before + KIB


def test_a_body_that_does_not_go_on_is_not_waited_for(store: Store) -> None:
    with strained(store, stall_seconds=0.1) as server:
        before = PENDING.value()
        for sent in (b"", b"x" * 100 * KIB):
            with plain_socket(server) as stalled:
                stalled.sendall(head_of(16 * MIB) + sent)
                answer = stalled.recv(KIB)
                assert b" 504 " in answer.splitlines()[0]
        wait_until(lambda: PENDING.value() == before)
        # A busy machine may be too slow for the short limit itself, and nothing is appended then.
        wait_until(lambda: ask(server, "POST", PATH, b"x").status == 200)
        assert store.topic(TOPIC).watermarks().appended == 1


# ---- who takes nothing ----


def takes_nothing(server: Served) -> socket.socket:
    stuck = plain_socket(server)
    stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * KIB)
    stuck.sendall(f"GET {PATH} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert stuck.recv(KIB)
    return stuck


def fill(store: Store) -> None:
    store.topic(TOPIC).append_many([os.urandom(100 * KIB) for _ in range(200)], durability="synced")


def test_a_reader_that_takes_nothing_is_left_in_the_end(store: Store) -> None:
    fill(store)
    limits = ConnectionLimits(100, closing_seconds=0.1)
    timeouts = StreamTimeouts(stall_seconds=0.1, patience_seconds=0.1)
    with strained(store, timeouts=timeouts, limits=limits) as server:
        before, descriptors, dropped = STREAMS.value(), open_descriptors(), DROPPED.value()
        with takes_nothing(server):
            wait_until(lambda: STREAMS.value() == before)
            assert DROPPED.value() == dropped + 1
            wait_until(lambda: open_descriptors() == descriptors + 1)  # the client's own


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_reader_that_takes_nothing_makes_way_when_every_place_is_taken(tmp_path: Path) -> None:
    admin = AdminSettings(streams_max=3)
    with Store(StoreSettings(data=tmp_path, admin=admin)) as store:
        fill(store)
        with (
            strained(store, timeouts=StreamTimeouts(contended_stall_seconds=0.1)) as server,
            contextlib.ExitStack() as all_,
        ):
            for _ in range(3):
                all_.enter_context(takes_nothing(server))
            wait_until(lambda: ask(server, "GET", f"{PATH}?limit=1").status == 200)


# ---- an object store or a disk that hangs ----


def test_readers_that_hang_hold_up_no_producer(tmp_path: Path) -> None:
    disk = WatchedDisk(LocalDisk())
    settings = StoreSettings(data=tmp_path, admin=AdminSettings(listen="127.0.0.1:0"))
    settings = replace(settings, wal=replace(settings.wal, cache_capacity=10))
    goes_on, waiting = threading.Event(), []

    def hang(path: Path) -> None:
        if "orders" in str(path):
            waiting.append(path)
            goes_on.wait(300)

    with Store(settings, disk=disk) as store, serving(context := ServerContext(store)) as client:
        server = Served(context, client)
        topic = store.topic(TOPIC)
        topic.append_many([b"%d" % number for number in range(1000)], durability="synced")
        topic.rotate()
        topic.append_many([b"x"] * 100, durability="synced")
        disk.on_read = hang
        readers = [in_thread(lambda: ask(server, "GET", PATH)) for _ in range(40)]
        try:
            wait_until(lambda: len(waiting) == 40)
            large = b'{"payload":"%s"}\n' % (b"x" * 100 * KIB) * 20
            assert ask(server, "POST", PATH, large, NDJSON).status == 200
            other = ask(server, "POST", PATH.replace("orders", "others"), b"x")
            assert other.status == 200, "a topic that is opened"
        finally:
            goes_on.set()
        for reader in readers:
            assert reader.result(120).status == 200


# ---- who never asks ----


def test_a_connection_that_never_asks_is_closed(store: Store) -> None:
    limits = ConnectionLimits(100, head_seconds=0.1)
    with strained(store, limits=limits) as server:
        for sent in (b"", b"GET / HTTP/1.1\r\nHost: loc"):
            with plain_socket(server) as silent:
                silent.sendall(sent)
                assert rest_of(silent) == b""
        wait_until(lambda: _is_healthy(server))


def _is_healthy(server: Served) -> bool:
    """False too where a busy machine is too slow for the server's short limit."""
    try:
        return ask(server, "GET", "/healthz").status == 200
    except (OSError, http.client.HTTPException):
        return False


def test_a_body_that_nobody_times_does_not_keep_its_connection(store: Store) -> None:
    limits = ConnectionLimits(100, body_seconds=0.1)
    with strained(store, limits=limits) as server, plain_socket(server) as silent:
        silent.sendall(head_of(10, "/v1/jobs"))
        rest_of(silent)


def test_a_head_that_never_ends_is_refused(store: Store) -> None:
    with strained(store) as server, plain_socket(server) as endless:
        with contextlib.suppress(ConnectionError):
            endless.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
            for number in range(10_000):
                endless.sendall(b"X-%d: %s\r\n" % (number, b"x" * 4 * KIB))
        assert b" 431 " in rest_of(endless).splitlines()[0]


def test_a_connection_too_many_is_told_so_and_the_others_go_on(store: Store) -> None:
    with strained(store, limits=ConnectionLimits(5)) as server, contextlib.ExitStack() as open_:
        held = [open_.enter_context(plain_socket(server)) for _ in range(5)]
        wait_until(lambda: _is_refused(server))
        held[0].sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in held[0].recv(KIB).splitlines()[0]
        held[1].close()
        wait_until(lambda: not _is_refused(server))


def _is_refused(server: Served) -> bool:
    with plain_socket(server) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return b" 200 " not in rest_of(client)


@pytest.mark.parametrize(("soft", "most"), [(256, 64), (4096, 1024)])
def test_descriptors_are_left_for_the_logs(soft: int, most: int) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        assert connections_max() == most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
