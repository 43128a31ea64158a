"""Batches of the sink through a server: each row once, in order, whoever else appends."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Message

from forebay.admin.context import ServerContext
from forebay.admin.request import PENDING
from forebay.admin.sink_commits import routes
from forebay.client.address import find_server
from forebay.client.http import ServerClient
from forebay.errors import (
    MessageTooLarge,
    ObjectMissing,
    ServiceRefused,
    ServiceUnavailable,
    UsageError,
    WaitTimeout,
)
from forebay.limits import MIB
from forebay.objects.local import LocalBackend
from forebay.objects.store import CloudStore
from forebay.pipeline.sink.commit import MARK, Committed, SinkBatch
from forebay.pipeline.sink.owner import (
    REQUEST_BYTES_MAX,
    commit_through,
    encode_request,
    forget_through,
)
from forebay.pipeline.sink.staging import Part, Rows
from forebay.settings import AdminSettings, ServerAddress, StoreSettings
from forebay.testing.objects import FaultBackend
from forebay.topic.store import Store
from support.disks import in_thread, wait_until
from support.raw_http import ask, plain_socket
from support.served import Served, served, serving
from support.serving_process import serving_process
from support.sinks import OTHER, TOPIC, SinkSetup, numbered

NAMED = SinkBatch("daily", 0, named=True)


@contextmanager
def ground_at(data: Path) -> Iterator[SinkSetup]:
    setup = SinkSetup(data)
    try:
        yield setup
    finally:
        setup.close()


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[SinkSetup]:
    with ground_at(tmp_path) as setup:
        yield setup


@pytest.fixture
def server(setup: SinkSetup) -> Iterator[Served]:
    with served(setup.data) as server:
        yield server


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that refuses what it is asked."""
    with served(tmp_path_factory.mktemp("idle")) as server:
        yield server
        assert server.store.topics() == []


def values(server: Served, topic: str = TOPIC) -> list[str]:
    return [message.payload.decode() for message in server.store.topic(topic).read()]


def texts(rows: list[tuple[str, str]], topic: str = TOPIC) -> list[str]:
    return [value for name, value in rows if name == topic]


def test_rows_arrive_once_and_in_order(setup: SinkSetup, server: Served) -> None:
    rows = numbered(0, 300, (TOPIC, OTHER))
    address = server.client.address
    done = commit_through(address, NAMED, setup.stage(rows[:100], rows[100:]))
    assert done == Committed(300, 0)
    again = commit_through(address, NAMED, setup.stage(rows[:150], rows[150:]))
    assert again == Committed(0, 300)
    with pytest.raises(UsageError, match="not the same rows"):
        commit_through(address, NAMED, setup.stage(rows[:10]))
    assert values(server) == texts(rows)
    assert values(server, OTHER) == texts(rows, OTHER)
    assert setup.staged() != []  # of the write that was refused: its driver forgets them
    commit_through(address, replace(NAMED, number=1), setup.stage(numbered(300, 10)))
    assert len(values(server)) == 160


def test_a_server_knows_the_query_and_the_partitions_of_a_batch(
    setup: SinkSetup, server: Served
) -> None:
    commit = partial(commit_through, server.client.address)
    first = SinkBatch("q", 1, named=True, streaming=True, query="a")
    name = f"{TOPIC}-part-0"
    rows = Rows([name], [b"x"], zeros=frozenset({name}))
    assert commit(first, setup.stage_rows(rows)) == Committed(1, 0)
    other = replace(first, query="b")
    with pytest.raises(UsageError, match="the sinkId 'q' belongs to another query"):
        commit(other, setup.stage_rows(replace(rows, payloads=[b"y"])))
    assert commit(other, setup.stage_rows(rows)) == Committed(0, 1)
    assert commit(other, setup.stage_rows(replace(rows, keys=["k"]))) == Committed(0, 1)
    assert server.store.topics() == [TOPIC]
    assert values(server) == ["x"]


def test_the_same_request_again_changes_nothing(setup: SinkSetup, server: Served) -> None:
    address = server.client.address
    named, once = setup.stage(numbered(0, 50)), setup.stage(numbered(50, 50))
    unnamed = SinkBatch("once-1", 0, named=False)
    commit_through(address, NAMED, named)
    assert commit_through(address, NAMED, named) == Committed(0, 50)
    commit_through(address, unnamed, once)
    with pytest.raises(ObjectMissing):
        commit_through(address, unnamed, once)
    assert values(server) == texts(numbered(0, 100))


def test_other_producers_append_meanwhile(setup: SinkSetup, server: Served) -> None:
    rows = numbered(0, 3000)
    over = threading.Event()

    def produce() -> int:
        count = 0
        while not over.is_set() or not count:
            server.store.topic(TOPIC).append(b"other", durability="synced")
            count += 1
        return count

    with ThreadPoolExecutor() as pool:
        others = [pool.submit(produce) for _ in range(2)]
        try:
            for batch in range(3):
                part = rows[batch * 1000 : batch * 1000 + 1000]
                run = replace(NAMED, number=batch)
                commit_through(server.client.address, run, setup.stage(part[:500], part[500:]))
                commit_through(server.client.address, run, setup.stage(part[:500], part[500:]))
        finally:
            over.set()
        others_count = sum(each.result() for each in others)
    messages = list(server.store.topic(TOPIC).read())
    assert [each.offset for each in messages] == list(range(len(messages)))
    own = [each.payload.decode() for each in messages if MARK in each.attributes]
    assert own == texts(rows)
    assert len(messages) == 3000 + others_count


def test_two_commits_of_one_batch_at_the_same_time_append_it_once(
    setup: SinkSetup, server: Served
) -> None:
    rows = numbered(0, 2000)
    staged = [setup.stage(rows[:1000], rows[1000:], piece=200) for _ in range(4)]
    with ThreadPoolExecutor() as pool:
        done = list(
            pool.map(lambda parts: commit_through(server.client.address, NAMED, parts), staged)
        )
    assert sorted(each.appended for each in done) == [0, 0, 0, 2000]
    assert values(server) == texts(rows)
    assert setup.staged() == []


def test_a_batch_goes_on_when_its_client_has_gone(setup: SinkSetup, server: Served) -> None:
    rows = numbered(0, 4000)
    body = json.dumps(encode_request(NAMED, setup.stage(rows, piece=200))).encode()
    client = server.new_client()
    client.request("POST", "/v1/sink/commit", body=body)
    client.close()
    again = commit_through(server.client.address, NAMED, setup.stage(rows, piece=400))
    assert again == Committed(0, 4000)
    assert values(server) == texts(rows)


def test_no_other_sink_forgets_the_rows_of_a_batch_that_is_under_way(setup: SinkSetup) -> None:
    first, second = setup.stage(numbered(0, 10)), setup.stage(numbered(10, 10))
    begun, goes_on = threading.Event(), threading.Event()

    def hold(key: str) -> None:
        if key == first[0].key:
            begun.set()
            goes_on.wait(120)

    backend = FaultBackend(LocalBackend(setup.data / "objects"))
    backend.hook("get_range", hold)
    settings = StoreSettings(data=setup.data, admin=AdminSettings(listen="127.0.0.1:0"))
    with (
        Store(settings, store=CloudStore(backend)) as store,
        serving(context := ServerContext(store)) as client,
        ThreadPoolExecutor() as pool,
    ):

        def is_forgotten(key: str | None) -> bool:
            request = encode_request(
                SinkBatch("other", 0, named=True), [replace(second[0], key=key)]
            )
            return bool(client.json("POST", "/v1/sink/forget", value=request)["forgotten"])

        try:
            one = pool.submit(commit_through, client.address, NAMED, first)
            assert begun.wait(120)
            two = pool.submit(commit_through, client.address, replace(NAMED, number=1), second)
            # A file that is not there, of the same write: it stays from when the batch has come.
            wait_until(lambda: not is_forgotten((second[0].key or "").replace("0-", "999-")))
            assert not is_forgotten(second[0].key)
        finally:
            goes_on.set()
        assert one.result(120) == two.result(120) == Committed(10, 0)
        assert values(Served(context, client)) == texts(numbered(0, 20))


@pytest.mark.parametrize(("named", "words"), [(True, "write the batch again"), (False, "sinkId")])
def test_who_is_left_in_the_middle_is_told_what_to_do(*, named: bool, words: str) -> None:
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while True:
                client, _ = listener.accept()
                with client:
                    client.recv(64 * 1024)
                    client.sendall(head + b'{"working": true}\n')

        in_thread(answer)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ServiceUnavailable, match=words):
            commit_through(ServerAddress(url, "x"), replace(NAMED, named=named), [])


def test_a_batch_whose_rows_are_gone_is_not_begun(setup: SinkSetup, server: Served) -> None:
    parts = setup.stage(numbered(0, 10), numbered(10, 10))
    forget_through(server.client.address, NAMED, parts[1:])
    with pytest.raises(ObjectMissing):
        commit_through(server.client.address, NAMED, parts)
    assert values(server) == []
    # Other rows, in other partitions: possible, as nothing was begun.
    commit_through(server.client.address, NAMED, setup.stage(numbered(0, 7)))
    assert values(server) == texts(numbered(0, 7))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"sink_id": "a/b"}, "sinkId"),
        ({"sink_id": 7}, "must be text"),
        ({"batch": -1}, "batch"),
        ({"batch": True}, "batch"),
        ({"named": 1}, "named"),
        ({"more": 1}, "unknown key 'more'"),
        ({"\ud800": 1}, "not JSON"),
        ({"parts": "x"}, "parts is text; it must be a list"),
        ({"parts": [{"partition": 0}]}, r"parts\[0\]: the key 'key' is missing"),
        ({"parts": [7]}, r"parts\[0\] is a number; it must be an object"),
    ],
)
def test_a_request_that_is_none_is_refused(
    idle: Served, change: dict[str, object], why: str
) -> None:
    value = {**encode_request(NAMED, []), **change}
    with pytest.raises(UsageError, match=why):
        idle.client.json("POST", "/v1/sink/commit", value=value)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"key": "storage/topics/default/orders/objects/data-0-9.dnb1"},
            "not the key of a staged file",
        ),
        ({"key": 7}, "key is a number; it must be text"),
        ({"key": None}, "need a key"),
        ({"rows": -1}, "rows must be a whole number from 0 on"),
        ({"rows": 11}, "sum of its topics"),
        ({"topics": {"a.b": 10}}, "not a topic name"),
        ({"topics": {TOPIC: "10"}}, "topics\\[...\\] is text; it must be a whole number"),
        ({"topics": [TOPIC]}, "topics is a list; it must be an object"),
        ({"digest": "0"}, "digest"),
    ],
)
def test_a_part_that_is_none_is_refused(idle: Served, change: dict[str, object], why: str) -> None:
    key = "staging/0123456789abcdef/0-0.frames"
    part = {"partition": 0, "key": key, "rows": 10, "bytes": 9, "topics": {TOPIC: 10}, "digest": 0}
    value = {**encode_request(NAMED, []), "parts": [{**part, **change}]}
    with pytest.raises(UsageError, match=why):
        idle.client.json("POST", "/v1/sink/commit", value=value)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"[" * 100_000])
def test_a_body_that_is_no_json_is_refused(idle: Served, body: bytes) -> None:
    with idle.new_client() as client, pytest.raises(UsageError):
        client.request("POST", "/v1/sink/commit", body=body)


def test_a_body_says_where_rows_are_and_is_not_large(idle: Served) -> None:
    parts = [
        Part(number, f"staging/0123456789abcdef/{number}-{number}.frames", 10, 9, {TOPIC: 10})
        for number in range(10_000)
    ]
    assert len(json.dumps(encode_request(NAMED, parts))) < REQUEST_BYTES_MAX / 4
    with idle.new_client() as client, pytest.raises(MessageTooLarge, match="fewer partitions"):
        client.request("POST", "/v1/sink/commit", body=b"[" + b"{}," * 3 * MIB)


def test_bodies_that_never_end_are_bounded_in_time_and_memory(tmp_path: Path) -> None:
    with served(tmp_path) as server, ExitStack() as stalled:
        before = PENDING.value()
        size = REQUEST_BYTES_MAX - 1
        head = f"POST /v1/sink/commit HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n"
        for _ in range(6):
            client = stalled.enter_context(plain_socket(server))
            in_thread(partial(client.sendall, head.encode() + b"[" * (size - 1)))
        wait_until(lambda: PENDING.value() >= before + 3 * REQUEST_BYTES_MAX)
        assert PENDING.value() <= before + 4 * REQUEST_BYTES_MAX
        assert ask(server, "POST", "/v1/topics/default/orders/messages", b"x").status == 200
    wait_until(lambda: PENDING.value() == before)


def test_a_body_that_does_not_go_on_is_not_waited_for(tmp_path: Path) -> None:
    with Store(StoreSettings(data=tmp_path)) as store:
        context = ServerContext(store)
        [commit, _] = routes(context, stall_seconds=0.1)
        assert isinstance(commit, Route)

        async def silent() -> Message:
            return await asyncio.Future()

        scope = {"type": "http", "method": "POST", "path": "/v1/sink/commit", "headers": []}
        with pytest.raises(WaitTimeout, match="nothing was taken"):
            asyncio.run(commit.endpoint(Request(scope, silent)))


def test_a_killed_server_leaves_a_batch_that_goes_on(setup: SinkSetup) -> None:
    rows = numbered(0, 20_000)
    parts = setup.stage(rows[:10_000], rows[10_000:], piece=400)
    held = parts[1].key
    assert held is not None
    with serving_process(setup.data, held) as process:
        address = find_server(setup.settings)
        assert address is not None
        log = setup.data / "wal/default/orders/wal.log"
        with ThreadPoolExecutor() as pool:
            commit = pool.submit(commit_through, address, NAMED, parts)
            wait_until(lambda: log.exists() and log.stat().st_size > 50_000)
            process.kill()
            with pytest.raises(ServiceUnavailable):
                commit.result(timeout=120)
    assert find_server(setup.settings) is None
    with serving_process(setup.data):
        address = find_server(setup.settings)
        assert address is not None
        # Another attempt cuts the same rows into other partitions.
        parts = setup.stage(rows[:7000], rows[7000:], piece=400)
        done = commit_through(address, NAMED, parts)
        assert done.appended + done.known == 20_000
    assert setup.values() == texts(rows)


TARGETS = [
    ("GET", "/v1/topics/default/orders/segments/wal.log"),
    ("HEAD", "/v1/objects/staging/0123456789abcdef/0-0.frames"),
    ("GET", "/v1/objects/staging/0123456789abcdef/0-0.frames"),
    ("PUT", "/v1/objects/staging/0123456789abcdef/0-0.frames"),
    ("POST", "/v1/sink/commit"),
    ("POST", "/v1/sink/forget"),
]


def test_nothing_is_given_or_taken_without_the_token(tmp_path: Path) -> None:
    settings = StoreSettings(data=tmp_path, admin=AdminSettings(token="secret"))
    with served(settings) as server:
        address = server.client.address
        assert address.token == "secret"
        for token in (None, "wrong"):
            with ServerClient(replace(address, token=token)) as client:
                for method, path in TARGETS:
                    with pytest.raises(ServiceRefused):
                        client.request(method, path)
        with pytest.raises(ServiceRefused):
            commit_through(replace(address, token=None), NAMED, [])
        assert commit_through(address, NAMED, []) == Committed(0, 0)


def test_a_server_that_is_gone_is_said(setup: SinkSetup) -> None:
    with served(setup.data) as server:
        address = server.client.address
    with pytest.raises(ServiceUnavailable, match="does not respond"):
        commit_through(address, NAMED, setup.stage(numbered(0, 3)))
