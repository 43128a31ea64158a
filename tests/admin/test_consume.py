"""Messages are got: over all tiers, as they come, and with every error told."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

from forebay.admin import messages
from forebay.admin.consume import StreamTimeouts
from forebay.admin.context import ServerContext
from forebay.admin.server import AdminServer
from forebay.files.local import LocalDisk
from forebay.limits import KIB
from forebay.settings import AdminSettings, CloudReaderSettings, DeleterSettings, StoreSettings
from forebay.testing import FaultDisk
from forebay.topic.store import Store
from support.disks import in_thread, wait_until
from support.raw_http import Said, ask, plain_socket
from support.served import Served, served, serving

PATH = "/v1/topics/default/orders/messages"
TOPIC = "/default/orders"


@pytest.fixture(scope="module")
def twenty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with twenty messages."""
    with served(tmp_path_factory.mktemp("twenty")) as found:
        topic = found.store.topic(TOPIC)
        topic.append_many([b"%d" % number for number in range(20)], durability="synced")
        yield found


def get(server: Served, query: str = "") -> Said:
    return ask(server, "GET", PATH + query)


def offsets(said: Said) -> list[int]:
    return [line["offset"] for line in said.lines()]


class Follower:
    """A client that reads on a thread of its own; its lines, as they came."""

    def __init__(self, server: Served, query: str) -> None:
        self.lines: list[Any] = []
        self.failure: BaseException | None = None
        self._client = server.new_client()
        self._thread = threading.Thread(target=self._run, args=(query,))
        self._thread.start()

    def _run(self, query: str) -> None:
        try:
            for line in self._client.lines(PATH + query):
                self.lines.append(json.loads(line))
        except BaseException as error:  # noqa: BLE001  # a test looks at it
            self.failure = error

    def end(self) -> list[Any]:
        self._thread.join(120)
        assert not self._thread.is_alive()
        return self.lines

    def interrupt(self) -> None:
        self._client.interrupt()
        self.end()


# ---- what is given ----


def test_messages_come_as_lines_with_all_their_parts(server: Served) -> None:
    topic = server.store.topic(TOPIC)
    topic.append("grüße".encode(), {"a": "1"}, "k")
    topic.append(b"\0\xff", durability="synced")
    said = get(server)
    assert said.status == 200
    assert said.headers["Content-Type"] == "application/x-ndjson"
    first, second = said.lines()
    assert isinstance(first.pop("publish_time"), int)
    assert first == {"offset": 0, "payload": "grüße", "attributes": {"a": "1"}, "routing_key": "k"}
    assert base64.b64decode(second["payload_base64"]) == b"\0\xff"
    assert (second["offset"], second["attributes"], second["routing_key"]) == (1, {}, None)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", range(20)),
        ("?start=earliest", range(20)),
        ("?start=latest", range(0)),
        ("?start=7", range(7, 20)),
        ("?start=20", range(0)),
        ("?start=5&end=9", range(5, 9)),
        ("?end=0", range(0)),
        ("?start=5&end=5", range(0)),
        ("?start=15&end=900", range(15, 20)),
        ("?limit=3", range(3)),
        ("?limit=0", range(0)),
        ("?start=18&limit=900", range(18, 20)),
        ("?start=2&end=9&limit=4&visibility=buffered&skip_lost=true", range(2, 6)),
        ("?start=3&end=6&follow=true", range(3, 6)),
        ("?start=3&limit=2&follow=true", range(3, 5)),
    ],
)
def test_a_range_is_what_was_asked_for(twenty: Served, query: str, expected: range) -> None:
    assert offsets(get(twenty, query)) == list(expected)


def test_one_answer_goes_over_objects_files_and_memory(tmp_path: Path) -> None:
    settings = StoreSettings(
        data=tmp_path,
        deleter=DeleterSettings(retention_size_mb=0, deletion_lag_minutes=0),
    )
    settings = replace(settings, wal=replace(settings.wal, cache_capacity=10))
    with served(settings) as server:
        topic = server.store.topic(TOPIC)
        payloads = [b"%d" % number for number in range(3000)]
        topic.append_many(payloads[:1000])
        topic.rotate()
        topic.append_many(payloads[1000:1001])
        topic.upload()
        assert topic.trim_local()
        topic.append_many(payloads[1001:2000], durability="synced")
        topic.rotate()
        topic.append_many(payloads[2000:], durability="synced")
        assert topic.segments()[0].first_offset == 1000
        assert topic.in_memory().start > 2000
        lines = get(server).lines()
        assert [line["offset"] for line in lines] == list(range(3000))
        assert [line["payload"].encode() for line in lines] == payloads


def test_a_topic_that_is_not_open_is_read_as_it_is_and_opened_for_a_follower(
    tmp_path: Path,
) -> None:
    with Store(StoreSettings(data=tmp_path)) as store:
        store.topic(TOPIC).append_many([b"a", b"b", b"c"], durability="synced")
    with served(tmp_path) as server:
        assert offsets(get(server)) == [0, 1, 2]
        assert offsets(get(server, "?start=1&limit=1&visibility=buffered")) == [1]
        assert offsets(get(server, "?start=latest")) == []
        assert get(server, "?start=4").error[:2] == (416, "OffsetOutOfRange")
        assert server.store.opened(TOPIC) is None
        assert offsets(get(server, "?limit=3&follow=true")) == [0, 1, 2]
        assert server.store.opened(TOPIC) is not None


def test_a_full_disk_keeps_nobody_from_reading(tmp_path: Path) -> None:
    disk = FaultDisk(LocalDisk())
    settings = StoreSettings(data=tmp_path, admin=AdminSettings(listen="127.0.0.1:0"))
    with Store(settings, disk=disk) as store, serving(context := ServerContext(store)) as client:
        server = Served(context, client)
        store.topic(TOPIC).append_many([b"a", b"b"], durability="synced")
        disk.space = 0
        assert ask(server, "POST", PATH, b"refused").status == 507
        assert offsets(get(server))[:2] == [0, 1]
        assert get(server, "?follow=true").status == 507
        disk.space = None
        assert offsets(get(server, "?limit=2&follow=true")) == [0, 1]


def test_many_large_messages_reach_a_slow_client_whole(server: Served) -> None:
    topic = server.store.topic(TOPIC)
    topic.append_many([b"%07d" % number * 1000 for number in range(500)], durability="synced")
    with plain_socket(server) as slow:
        slow.sendall(
            f"GET {PATH} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        )
        data = b""
        while part := slow.recv(64 * KIB):
            data += part
    assert data.count(b'"offset":') == 500
    assert data.endswith(b"0\r\n\r\n")


# ---- following ----


def test_a_follower_gets_what_is_appended_while_it_waits(server: Served) -> None:
    topic = server.store.topic(TOPIC)
    topic.append(b"old", durability="synced")
    follower = Follower(server, "?start=0&follow=true&limit=4")
    wait_until(lambda: len(follower.lines) == 1)
    topic.append(b"new")
    wait_until(lambda: len(follower.lines) == 2)  # seen by nobody's order but the reader's
    topic.append_many([b"x", b"y"])
    assert [line["payload"] for line in follower.end()] == ["old", "new", "x", "y"]


def test_latest_begins_with_the_next_message(server: Served) -> None:
    topic = server.store.topic(TOPIC)
    topic.append(b"old", durability="synced")
    with plain_socket(server) as client:
        target = PATH + "?start=latest&follow=true&limit=1"
        client.sendall(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        head = client.recv(64 * KIB)  # comes before any message does
        assert head.startswith(b"HTTP/1.1 200")
        topic.append(b"new")
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += client.recv(64 * KIB)
        assert b'"payload":"new"' in data
        assert b"old" not in data


def test_a_reconnect_by_offset_goes_on_without_a_gap_or_a_double(server: Served) -> None:
    topic = server.store.topic(TOPIC)
    seen: list[int] = []
    appended = 0
    for _ in range(5):
        start = seen[-1] + 1 if seen else 0
        topic.append_many([b"x"] * 7)
        appended += 7
        follower = Follower(server, f"?start={start}&follow=true")
        wait_until(lambda follower=follower: len(follower.lines) >= 3)  # type: ignore[misc]
        follower.interrupt()
        seen += [line["offset"] for line in follower.lines]
    assert seen == list(range(len(seen)))
    assert len(seen) >= 15


def test_a_client_that_goes_frees_its_place(tmp_path: Path) -> None:
    settings = StoreSettings(data=tmp_path, admin=AdminSettings(streams_max=1))
    with served(settings) as server:
        server.store.topic(TOPIC).append(b"a", durability="synced")
        follower = Follower(server, "?follow=true")
        wait_until(lambda: len(follower.lines) == 1)
        said = get(server)
        assert said.error[:2] == (503, "ServiceUnavailable")
        assert "admin.streams_max" in said.error[2]
        assert said.headers["Retry-After"] == "1"
        follower.interrupt()
        wait_until(lambda: get(server).status == 200)


def test_a_silent_stream_tells_that_it_lives(tmp_path: Path) -> None:
    with Store(StoreSettings(data=tmp_path)) as store, _beating(store) as port:
        store.topic(TOPIC).append(b"a", durability="synced")
        with socket.create_connection(("127.0.0.1", port), timeout=120) as client:
            target = f"{PATH}?start=latest&follow=true"
            client.sendall(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            data = b""
            while data.count(b"1\r\n\n\r\n") < 2:  # two blank lines, each in a chunk of its own
                data += client.recv(KIB)


@contextlib.contextmanager
def _beating(store: Store) -> Iterator[int]:
    """A server of messages alone that breaks a silence soon."""
    context = ServerContext(store)
    app = Starlette(
        routes=messages.routes(context, timeouts=StreamTimeouts(heartbeat_seconds=0.02))
    )
    app.state.stopping = context.stopping
    server = AdminServer(AdminSettings(listen="127.0.0.1:0"))
    port = int(server.bind().rpartition(":")[2])
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(app)))
    thread.start()
    try:
        yield port
    finally:
        server.stop()
        thread.join(120)
        server.close()


def test_a_stop_ends_streams_with_a_line_that_says_where_to_go_on(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        server.store.topic(TOPIC).append_many([b"a", b"b"], durability="synced")
        followers = [Follower(server, "?follow=true") for _ in range(3)]
        for follower in followers:
            wait_until(lambda follower=follower: len(follower.lines) == 2)  # type: ignore[misc]
    for follower in followers:
        error = follower.end()[-1]["error"]
        assert error["kind"] == "ServiceUnavailable"
        assert "start=2" in error["message"]
        assert follower.failure is None


def test_a_stop_does_not_wait_for_a_client_that_takes_nothing(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        topic = server.store.topic(TOPIC)
        topic.append_many([os.urandom(100 * KIB) for _ in range(200)], durability="synced")
        stuck = plain_socket(server)
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * KIB)
        stuck.sendall(f"GET {PATH} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert stuck.recv(KIB)
    stuck.close()  # `served` asserts that the server stopped


# ---- what is refused ----


@pytest.mark.parametrize(
    ("query", "words"),
    [
        (
            "?start=x",
            "start is 'x'; it must be a whole number from 0 on, or one of earliest, latest",
        ),
        ("?start=-1", "start is '-1'"),
        ("?start=%C2%B2", "start is '²'"),
        ("?start=9999999999999999999", "start is '9999999999999999999'"),
        ("?start=", "start is ''"),
        ("?end=x", "end is 'x'; it must be a whole number from 0 on"),
        ("?limit=1.5", "limit is '1.5'"),
        ("?follow=yes", "follow is 'yes'; it must be true or false"),
        ("?visibility=all", "visibility is 'all'; it must be one of buffered, synced"),
        ("?skip_lost=1", "skip_lost is '1'"),
        ("?offset=1", "unknown parameter 'offset'; known ones: "),
        ("?start=1&start=2", "start is given twice"),
        ("?start=5&end=4", "end (4) is before start (5)"),
    ],
)
def test_a_bad_query_is_refused(untouched: Served, query: str, words: str) -> None:
    status, kind, message = get(untouched, query).error
    assert (status, kind) == (400, "UsageError")
    assert words in message


def test_an_unknown_topic_is_not_found_and_not_made(server: Served, tmp_path: Path) -> None:
    status, kind, _ = get(server, "?follow=true").error
    assert (status, kind) == (404, "UnknownTopic")
    assert server.store.topics() == []
    assert not (tmp_path / "wal" / "default").exists()


def test_a_start_outside_the_log_is_told_before_the_stream(server: Served) -> None:
    server.store.topic(TOPIC).append(b"a", durability="synced")
    for query in ("?start=2", "?start=2&follow=true", "?start=900&limit=0"):
        said = get(server, query)
        assert said.error[:2] == (416, "OffsetOutOfRange")
        told = said.json()["error"]
        assert (told["start"], told["end"]) == (0, 1)


# ---- what is lost, what is damaged ----


@pytest.fixture
def holed(tmp_path: Path) -> Iterator[Served]:
    """A server whose topic has messages 0 to 4, then a range that is lost, then new ones."""
    settings = StoreSettings(data=tmp_path)
    with Store(settings) as store:
        topic = store.topic(TOPIC)
        topic.append_many([b"a"] * 5)
        topic.upload()
        topic.append_many([b"gone"] * 5, durability="synced")
    shutil.rmtree(tmp_path / "wal")
    with served(settings) as server:
        topic = server.store.topic(TOPIC)
        assert topic.append(b"new", durability="synced") == 10
        yield server


def test_a_lost_range_is_an_error_in_its_place(holed: Served) -> None:
    *lines, last = get(holed).lines()
    assert [line["offset"] for line in lines] == [0, 1, 2, 3, 4]
    assert last["error"]["kind"] == "LostOffsets"
    assert (last["error"]["start"], last["error"]["end"]) == (5, 10)
    assert get(holed, "?start=7").error[:2] == (410, "LostOffsets")


def test_a_lost_range_is_a_line_of_its_own_where_it_may_be_skipped(holed: Served) -> None:
    def told(query: str) -> list[Any]:
        return [line.get("lost") or line["offset"] for line in get(holed, query).lines()]

    assert told("?skip_lost=true") == [0, 1, 2, 3, 4, [5, 10], 10]
    assert told("?skip_lost=true&start=7") == [[7, 10], 10]
    assert told("?skip_lost=true&start=3&end=8") == [3, 4, [5, 8]]
    assert told("?skip_lost=true&start=3&limit=3") == [3, 4, [5, 10], 10]
    assert told("?skip_lost=true&start=3&limit=2") == [3, 4]


def test_an_accepted_range_is_no_line_and_counts_for_no_limit(holed: Served) -> None:
    assert offsets(get(holed, "?end=5")) == [0, 1, 2, 3, 4]
    done = holed.client.json("POST", f"/v1/topics{TOPIC}/accept-loss")
    assert done["accepted"] == [[5, 10]]
    assert offsets(get(holed)) == [0, 1, 2, 3, 4, 10]
    for query in ("?start=3&limit=3", "?start=3&limit=3&follow=true", "?start=3&end=11&limit=3"):
        assert offsets(get(holed, query)) == [3, 4, 10], query
    assert offsets(get(holed, "?start=3&limit=2")) == [3, 4]
    assert offsets(get(holed, "?start=6&end=8")) == []
    assert offsets(get(holed, "?start=6&end=8&limit=5")) == []
    assert offsets(get(holed, "?start=6&limit=5&skip_lost=true")) == [10]


def test_a_lost_range_keeps_its_place_behind_messages_that_a_lenient_reader_skips(
    holed: Served, tmp_path: Path
) -> None:
    (stored,) = (tmp_path / "objects").rglob("data-0-4.dnb1")
    frame = stored.stat().st_size // 5
    with stored.open("r+b") as file:
        file.seek(2 * frame + 20)
        file.write(b"damage")
    holed.store.close()
    settings = StoreSettings(data=tmp_path, cloud_reader=CloudReaderSettings(lenient=True))
    with served(settings) as server:
        server.store.topic(TOPIC)
        lines = get(server, "?skip_lost=true").lines()
        found = [line.get("lost") or line["offset"] for line in lines]
        assert found == [0, 1, 3, 4, [5, 10], 10]


def test_a_lost_range_is_told_alike_of_a_topic_that_is_not_open(tmp_path: Path) -> None:
    with Store(StoreSettings(data=tmp_path)) as store:
        store.topic(TOPIC).append_many([b"a"] * 5)
        store.topic(TOPIC).upload()
        store.topic(TOPIC).append_many([b"gone"] * 5, durability="synced")
    shutil.rmtree(tmp_path / "wal")
    with Store(StoreSettings(data=tmp_path)) as store:
        store.topic(TOPIC).append(b"new", durability="synced")
    with served(tmp_path) as server:
        assert get(server).lines()[-1]["error"]["kind"] == "LostOffsets"
        lines = get(server, "?skip_lost=true").lines()
        assert [line.get("lost") or line["offset"] for line in lines] == [
            0,
            1,
            2,
            3,
            4,
            [5, 10],
            10,
        ]
        assert server.store.opened(TOPIC) is None


def test_damage_in_the_middle_is_told_in_the_last_line(tmp_path: Path) -> None:
    settings = StoreSettings(data=tmp_path)
    settings = replace(settings, wal=replace(settings.wal, cache_capacity=1))
    with served(settings) as server:
        topic = server.store.topic(TOPIC)
        topic.append_many([b"%d" % number * 1000 for number in range(3000)], durability="synced")
        topic.rotate()
        topic.append_many([b"x"] * 3, durability="synced")
        segment = topic.segments()[0]
        with segment.path.open("r+b") as file:
            file.seek(segment.size - 100)
            file.write(b"damage")
        *lines, last = get(server).lines()
        assert [line["offset"] for line in lines] == list(range(len(lines)))
        assert 0 < len(lines) < 3000
        assert last["error"]["kind"] == "CorruptFrame"
        assert last["error"]["file"] == str(segment.path)


def test_readers_at_a_time_do_not_hold_each_other_back(server: Served) -> None:
    topic = server.store.topic(TOPIC)
    topic.append_many([b"x" * 100] * 5000, durability="synced")
    answers = [in_thread(lambda: offsets(get(server))) for _ in range(6)]
    assert all(answer.result(60) == list(range(5000)) for answer in answers)
