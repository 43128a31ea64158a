"""Batches of the sink through a server: each row once, in order, whoever else appends."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.errors import ObjectMissing, ServiceRefused, ServiceUnavailable, UsageError
from forebay.pipeline.server_commit import commit_through, encode_request, forget_through
from forebay.pipeline.sink_commit import Committed
from forebay.pipeline.sink_notes import MARK, Run
from forebay.remote import ServerClient, find_server
from forebay.settings import AdminSettings, StoreSettings
from served import Served, served
from serving_process import serving_process
from sink_grounds import OTHER, TOPIC, SinkGround, numbered

NAMED = Run("daily", 0, named=True)


@contextmanager
def ground_at(data: Path) -> Iterator[SinkGround]:
    ground = SinkGround(data)
    try:
        yield ground
    finally:
        ground.close()


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[SinkGround]:
    with ground_at(tmp_path) as ground:
        yield ground


@pytest.fixture
def server(ground: SinkGround) -> Iterator[Served]:
    with served(ground.data) as server:
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


def test_rows_arrive_once_and_in_order(ground: SinkGround, server: Served) -> None:
    rows = numbered(0, 300, (TOPIC, OTHER))
    address = server.client.address
    done = commit_through(address, NAMED, ground.stage(rows[:100], rows[100:]))
    assert done == Committed(300, 0)
    again = commit_through(address, NAMED, ground.stage(rows[:150], rows[150:]))
    assert again == Committed(0, 300)
    with pytest.raises(UsageError, match="they are not the same rows"):
        commit_through(address, NAMED, ground.stage(rows[:10]))
    assert values(server) == texts(rows)
    assert values(server, OTHER) == texts(rows, OTHER)
    assert ground.staged() != []  # of the write that was refused: its driver forgets them
    commit_through(address, replace(NAMED, batch=1), ground.stage(numbered(300, 10)))
    assert len(values(server)) == 160


def test_the_same_request_again_changes_nothing(ground: SinkGround, server: Served) -> None:
    address = server.client.address
    named, once = ground.stage(numbered(0, 50)), ground.stage(numbered(50, 50))
    unnamed = Run("once-1", 0, named=False)
    commit_through(address, NAMED, named)
    assert commit_through(address, NAMED, named) == Committed(0, 50)
    commit_through(address, unnamed, once)
    with pytest.raises(ObjectMissing):
        commit_through(address, unnamed, once)
    assert values(server) == texts(numbered(0, 100))


def test_other_producers_append_meanwhile(ground: SinkGround, server: Served) -> None:
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
                run = replace(NAMED, batch=batch)
                commit_through(server.client.address, run, ground.stage(part[:500], part[500:]))
                commit_through(server.client.address, run, ground.stage(part[:500], part[500:]))
        finally:
            over.set()
        others_count = sum(each.result() for each in others)
    messages = list(server.store.topic(TOPIC).read())
    assert [each.offset for each in messages] == list(range(len(messages)))
    own = [each.payload.decode() for each in messages if MARK in each.attributes]
    assert own == texts(rows)
    assert len(messages) == 3000 + others_count


def test_two_commits_of_one_batch_at_the_same_time_append_it_once(
    ground: SinkGround, server: Served
) -> None:
    rows = numbered(0, 2000)
    staged = [ground.stage(rows[:1000], rows[1000:], piece=200) for _ in range(4)]
    with ThreadPoolExecutor() as pool:
        done = list(
            pool.map(lambda parts: commit_through(server.client.address, NAMED, parts), staged)
        )
    assert sorted(each.appended for each in done) == [0, 0, 0, 2000]
    assert values(server) == texts(rows)
    assert ground.staged() == []


def test_a_batch_goes_on_when_its_client_has_gone(ground: SinkGround, server: Served) -> None:
    rows = numbered(0, 4000)
    body = json.dumps(encode_request(NAMED, ground.stage(rows, piece=200))).encode()
    client = server.new_client()
    client.request("POST", "/v1/sink/commit", body=body)
    client.close()
    again = commit_through(server.client.address, NAMED, ground.stage(rows, piece=400))
    assert again == Committed(0, 4000)
    assert values(server) == texts(rows)


def test_a_batch_whose_rows_are_gone_is_not_begun(ground: SinkGround, server: Served) -> None:
    parts = ground.stage(numbered(0, 10), numbered(10, 10))
    forget_through(server.client.address, NAMED, parts[1:])
    with pytest.raises(ObjectMissing):
        commit_through(server.client.address, NAMED, parts)
    assert values(server) == []
    # Other rows, in other partitions: possible, as nothing was begun.
    commit_through(server.client.address, NAMED, ground.stage(numbered(0, 7)))
    assert values(server) == texts(numbered(0, 7))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"sink_id": "a/b"}, "sinkId"),
        ({"sink_id": 7}, "must be text"),
        ({"batch": -1}, "batch"),
        ({"batch": True}, "batch"),
        ({"named": 1}, "named"),
        ({"more": 1}, "no batch"),
        ({"\ud800": 1}, "no batch"),
        ({"sink_id": "\ud800"}, "sinkId"),
        ({"parts": "x"}, "list of parts"),
        ({"parts": [{"partition": 0}]}, "no batch"),
        ({"parts": [7]}, "no batch"),
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
        ({"key": "storage/topics/default/orders/objects/data-0-9.dnb1"}, "no key of staged rows"),
        ({"key": 7}, "no key of staged rows"),
        ({"key": None}, "staged somewhere"),
        ({"rows": -1}, "numbers"),
        ({"rows": 11}, "those of its topics"),
        ({"topics": {"a.b": 10}}, "not a topic name"),
        ({"topics": {"\ud800": 10}}, "not a topic name"),
        ({"topics": {TOPIC: "10"}}, "numbers of rows"),
        ({"topics": [TOPIC]}, "topics of a part"),
        ({"digest": "0"}, "digest"),
    ],
)
def test_a_part_that_is_none_is_refused(idle: Served, change: dict[str, object], why: str) -> None:
    key = "staging/0123456789abcdef/0-0.arrow"
    part = {"partition": 0, "key": key, "rows": 10, "bytes": 9, "topics": {TOPIC: 10}, "digest": 0}
    value = {**encode_request(NAMED, []), "parts": [{**part, **change}]}
    with pytest.raises(UsageError, match=why):
        idle.client.json("POST", "/v1/sink/commit", value=value)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"[" * 100_000])
def test_a_body_that_is_no_json_is_refused(idle: Served, body: bytes) -> None:
    with idle.new_client() as client, pytest.raises(UsageError):
        client.request("POST", "/v1/sink/commit", body=body)


def test_a_killed_server_leaves_a_batch_that_goes_on(ground: SinkGround) -> None:
    rows = numbered(0, 20_000)
    with serving_process(ground.data) as process:
        address = find_server(ground.settings)
        assert address is not None
        parts = ground.stage(rows[:10_000], rows[10_000:], piece=400)
        log = ground.data / "wal/default/orders/wal.log"
        with ThreadPoolExecutor() as pool:
            commit = pool.submit(commit_through, address, NAMED, parts)
            while not commit.done() and not (log.exists() and log.stat().st_size > 50_000):
                threading.Event().wait(0.001)
            process.kill()
            with pytest.raises(ServiceUnavailable):
                commit.result(timeout=60)
    assert find_server(ground.settings) is None
    with serving_process(ground.data):
        address = find_server(ground.settings)
        assert address is not None
        # Another attempt cuts the same rows into other partitions.
        parts = ground.stage(rows[:7000], rows[7000:], piece=400)
        done = commit_through(address, NAMED, parts)
        assert done.appended + done.known == 20_000
    assert ground.values() == texts(rows)


TARGETS = [
    ("GET", "/v1/topics/default/orders/segments/wal.log"),
    ("HEAD", "/v1/objects/staging/0123456789abcdef/0-0.arrow"),
    ("GET", "/v1/objects/staging/0123456789abcdef/0-0.arrow"),
    ("PUT", "/v1/objects/staging/0123456789abcdef/0-0.arrow"),
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


def test_a_server_that_is_gone_is_said(ground: SinkGround) -> None:
    with served(ground.data) as server:
        address = server.client.address
    with pytest.raises(ServiceUnavailable, match="does not answer"):
        commit_through(address, NAMED, ground.stage(numbered(0, 3)))
