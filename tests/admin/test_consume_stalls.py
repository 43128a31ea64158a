"""A reader that does not read holds no memory, delays nobody, and misses nothing."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from forebay.admin.consume import STREAMS, StreamTimeouts
from forebay.admin.response import HELD, STALLED, WAITING
from forebay.catalog.catalog import Catalog, Change
from forebay.catalog.kv import Remove
from forebay.catalog.records import TopicRecord
from forebay.catalog.sqlite import SqliteKv
from forebay.errors import ServiceUnavailable
from forebay.format.names import parse_topic
from forebay.limits import KIB, MIB
from forebay.settings import (
    AdminSettings,
    DeleterSettings,
    RemoteRetentionSettings,
    StoreSettings,
    UploaderSettings,
    WalSettings,
)
from forebay.testing.kv import FaultKv
from forebay.topic.store import Store, Topic
from support.disks import in_thread, wait_until
from support.raw_http import ask, plain_socket
from support.served import Served, strained
from support.storages import storage_of

TOPIC = "/default/orders"
PATH = "/v1/topics/default/orders/messages"


@contextlib.contextmanager
def no_patience(store: Store) -> Iterator[Served]:
    """A server that drops what it has read as soon as a socket is full."""
    timeouts = StreamTimeouts(patience_seconds=0, heartbeat_seconds=0.01)
    with strained(store, timeouts=timeouts) as server:
        yield server


def settings(data: Path, **admin: Any) -> StoreSettings:
    return StoreSettings(
        data=data,
        wal=WalSettings(rotate_max_bytes=4 * MIB, cache_capacity=10),
        deleter=DeleterSettings(retention_size_mb=0, deletion_lag_minutes=0),
        admin=AdminSettings(**admin),
    )


def texts(seed: int, mib: int) -> list[bytes]:
    """So many MiB of messages: many small ones, and some that are sent in several pieces."""
    chance = random.Random(seed)
    found: list[bytes] = []
    size = 0
    while size < mib * MIB:
        length = chance.choice([10, KIB, KIB, KIB, 20 * KIB, 300 * KIB, 2 * MIB])
        found.append(b"%d " % len(found) + chance.randbytes(16).hex().encode() * (length // 32))
        size += len(found[-1])
    return found


class Stalling:
    """A client that reads when it is told to."""

    def __init__(self, server: Served, query: str = "", path: str = PATH) -> None:
        self._socket = plain_socket(server)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 256 * KIB)
        head = f"GET {path}{query} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        self._socket.sendall(head.encode())
        self.data = bytearray(self._socket.recv(1))

    def read(self, size: int) -> bool:
        """Reads so many bytes; False at the end."""
        end = len(self.data) + size
        while len(self.data) < end:
            part = self._socket.recv(min(64 * KIB, end - len(self.data)))
            if not part:
                return False
            self.data += part
        return True

    def payloads(self) -> list[bytes]:
        """All messages, in order; checks that each line is whole and each offset comes once."""
        _, _, body = bytes(self.data).partition(b"\r\n\r\n")
        plain = bytearray()
        while body:
            size, _, body = body.partition(b"\r\n")
            count = int(size, 16)
            plain += body[:count]
            body = body[count + 2 :]
        lines = [json.loads(line) for line in bytes(plain).splitlines() if line]
        assert [line["offset"] for line in lines] == list(range(len(lines)))
        return [line["payload"].encode() for line in lines]

    def close(self) -> None:
        self._socket.close()


def upload_and_trim(topic: Topic) -> None:
    topic.rotate()
    topic.upload()
    topic.trim_local()


def compact_and_sweep(data: Path) -> None:
    """Rewrites small objects as larger ones, and deletes the small ones at once."""
    from support.compactions import Setup

    objects = Setup(data)
    try:
        assert objects.compacted(target=64 * MIB).ok
        objects.swept()
    finally:
        objects.close()


def read_with_stalls(reader: Stalling, chance: random.Random, change: Callable[[], None]) -> int:
    """Reads everything. Calls `change` at each stall, and returns how many there were."""
    stalls = 0
    while True:
        # It stalls, or all the rest is in the buffers of the two sockets.
        wait_until(lambda: STALLED.value() > 0 or STREAMS.value() == 0)
        if STREAMS.value() == 0:
            break
        assert stalls or HELD.value() == 0  # later, it may just have begun to read again
        stalls += 1
        change()
        reader.read(chance.randrange(1, 2 * MIB))
    while reader.read(MIB):
        pass
    reader.close()
    return stalls


def test_a_reader_that_stalls_while_segments_become_objects_gets_every_message_once(
    tmp_path: Path,
) -> None:
    sent = texts(1, 10)
    chance = random.Random(2)
    with Store(settings(tmp_path)) as store:
        topic = store.topic(TOPIC)
        topic.append_many(sent[: len(sent) // 2], durability="synced")
        with no_patience(store) as server:
            reader = Stalling(server, f"?follow=true&limit={len(sent)}")
            topic.append_many(sent[len(sent) // 2 :], durability="synced")

            def change() -> None:
                topic.rotate()
                topic.upload()
                topic.trim_local()

            assert read_with_stalls(reader, chance, change) > 1
        assert topic.segments()[0].first_offset > 0
    assert reader.payloads() == sent


def test_a_reader_that_stalls_while_objects_are_compacted_gets_every_message_once(
    tmp_path: Path,
) -> None:
    pytest.importorskip("forebay.pipeline.jobs.compact")
    sent = texts(3, 10)
    with Store(settings(tmp_path)) as store:
        topic = store.topic(TOPIC)
        for at in range(0, len(sent), 10):
            topic.append_many(sent[at : at + 10])
            topic.upload()
        topic.rotate()
        topic.trim_local()
        with no_patience(store) as server:
            reader = Stalling(server)
            # From the second stall on there is nothing to compact.
            compact = partial(compact_and_sweep, tmp_path)
            assert read_with_stalls(reader, random.Random(4), compact) > 1
    assert reader.payloads() == sent


def test_readers_that_stall_in_large_messages_leave_the_budget_to_others(tmp_path: Path) -> None:
    """The budget has room for one of the messages at a time."""
    large = [b"%d" % number * MIB for number in range(8)]
    with Store(settings(tmp_path, stream_bytes_max=4 * MIB, streams_max=65)) as store:
        topic = store.topic(TOPIC)
        topic.append_many(large)
        topic.upload()
        topic.rotate()
        topic.append_many(large, durability="synced")
        topic.trim_local()
        assert topic.segments()[0].first_offset == 8
        with no_patience(store) as server, contextlib.ExitStack() as all_:
            for start in range(64):
                all_.callback(Stalling(server, f"?start={start % 2 * 8}").close)
            wait_until(lambda: STALLED.value() > 0)
            for start in (0, 8):
                lines = ask(server, "GET", f"{PATH}?start={start}&end={start + 8}").lines()
                assert [line["payload"].encode() for line in lines] == large
            wait_until(lambda: STALLED.value() == 64 and WAITING.value() == 0)
            assert HELD.value() == 0
        assert STALLED.value() == 0


def test_a_segment_reaches_a_client_that_stalls_exactly(tmp_path: Path) -> None:
    with Store(replace(settings(tmp_path), wal=WalSettings())) as store:
        topic = store.topic(TOPIC)
        topic.append_many([b"x"])
        topic.append_many(texts(5, 12), durability="synced")
        topic.rotate()
        [file, *_] = (segment.path for segment in topic.segments() if segment.size > 10 * MIB)
        with strained(store) as server:
            path = f"/v1/topics/default/orders/segments/{file.name}"
            reader = Stalling(server, path=path)
            wait_until(lambda: STALLED.value() > 0)
            assert HELD.value() == 0
            while reader.read(MIB):
                pass
            reader.close()
    assert bytes(reader.data).partition(b"\r\n\r\n")[2] == file.read_bytes()


def test_a_follower_that_waits_holds_nothing(tmp_path: Path) -> None:
    with Store(settings(tmp_path)) as store:
        topic = store.topic(TOPIC)
        topic.append_many([b"x" * KIB] * 1000, durability="synced")
        with strained(store) as server:
            reader = in_thread(lambda: ask(server, "GET", f"{PATH}?follow=true&limit=1001"))
            wait_until(lambda: STREAMS.value() == 1 and HELD.value() == 0)
            topic.append(b"last", durability="synced")
            assert reader.result(60).lines()[-1]["payload"] == "last"


def test_a_message_that_is_gone_when_its_reader_continues_cuts_the_response_off(
    tmp_path: Path,
) -> None:
    """An error line in the middle of a message would be taken for a part of it."""
    with Store(settings(tmp_path)) as store:
        topic = store.topic(TOPIC)
        topic.append_many([b"x" * 16 * MIB], durability="synced")
        with no_patience(store) as server:
            reader = Stalling(server)
            wait_until(lambda: STALLED.value() > 0)
            for file in tmp_path.glob("wal/*/*/*.log"):
                file.unlink()
            while reader.read(MIB):
                pass
            reader.close()
    assert b"error" not in reader.data
    assert not reader.data.endswith(b"0\r\n\r\n")


def test_a_reader_that_waits_for_the_catalog_delays_nobody_else(tmp_path: Path) -> None:
    """While remote retention is unsure of the topic's start, a reader asks the catalog for it."""
    away, back, asked = threading.Event(), threading.Event(), threading.Event()
    blocked: list[str] = []

    def before(operation: str) -> None:
        if away.is_set() and operation == "get":
            asked.set()
            if not back.wait(20):
                blocked.append(operation)

    kv = FaultKv(SqliteKv(tmp_path / "catalog.db"), before)
    wanted = replace(
        settings(tmp_path / "data"),
        remote_retention=RemoteRetentionSettings(size_mb=1),
        uploader=UploaderSettings(enabled=False),
    )
    with Store(wanted, catalog=Catalog(kv)) as store:
        topic = store.topic(TOPIC)
        topic.append(b"x", durability="synced")
        kv.fail_reads(times=10)
        with pytest.raises(ServiceUnavailable):
            storage_of(topic).trim_remote()
        kv.heal()
        with strained(store) as server:
            away.set()
            try:
                for query in ("", "?start=0", "?follow=true&limit=1"):
                    asked.clear()
                    reader = in_thread(partial(ask, server, "GET", f"{PATH}{query}"))
                    assert asked.wait(60)
                    assert ask(server, "GET", "/healthz").status == 200
                    assert not blocked
                    back.set()
                    assert [line["payload"] for line in reader.result(60).lines()] == ["x"]
                    back.clear()
            finally:
                away.clear()
                back.set()


def test_a_reader_that_never_pauses_does_not_keep_the_budget_from_others(tmp_path: Path) -> None:
    """The large message needs the whole budget, of which the other stream always holds a part."""
    large = "x" * (2 * MIB)
    with Store(settings(tmp_path, stream_bytes_max=4 * MIB, streams_max=64)) as store:
        topic = store.topic(TOPIC)
        for _ in range(160):
            topic.append_many([b"y" * KIB] * KIB, durability="synced")
        store.topic("/default/large").append(large.encode(), durability="synced")
        with strained(store) as server, contextlib.closing(Stalling(server)) as steady:
            path = "/v1/topics/default/large/messages"
            other = in_thread(lambda: ask(server, "GET", path))
            while not other.done():
                assert steady.read(64 * KIB), "the stream has ended, and nobody else was served"
                time.sleep(0.0002)  # so that it lasts for a while, without a stall
            assert other.result().lines()[0]["payload"] == large


@pytest.mark.parametrize("accepted", [False, True])
def test_a_message_that_is_lost_when_its_reader_continues_cuts_the_response_off(
    tmp_path: Path, accepted: bool
) -> None:
    """Neither the line about lost offsets nor the next message may continue its line."""
    catalog = Catalog(SqliteKv(tmp_path / "catalog.db"))
    with Store(settings(tmp_path / "data"), catalog=catalog) as store:
        topic = store.topic(TOPIC)
        for payload in (b"x" * 16 * MIB, b"y" * 16 * MIB):
            topic.append(payload, durability="synced")
            topic.rotate()
            topic.upload()
        topic.append(b"z", durability="synced")
        topic.trim_local()
        assert topic.segments()[0].first_offset == 2
        with (
            no_patience(store) as server,
            contextlib.closing(Stalling(server, "?skip_lost=true")) as reader,
        ):
            wait_until(lambda: STALLED.value() > 0)

            def lose(record: TopicRecord) -> Change:
                found = record.with_lost(0, 1)
                gone = Remove(catalog.keys.descriptor(parse_topic(TOPIC), 0))
                return Change(found.with_accepted() if accepted else found, (gone,))

            catalog.update(parse_topic(TOPIC), None, lose)
            while reader.read(MIB):
                pass
    assert b"lost" not in reader.data
    assert b"y" * KIB not in reader.data
    assert not reader.data.endswith(b"0\r\n\r\n")
