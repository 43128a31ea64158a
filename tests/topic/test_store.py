"""Stores and topics as programs use them, and Danube's names for the same objects."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import forebay
from forebay.errors import (
    DiskError,
    InvalidSetting,
    InvalidTopicName,
    LogClosed,
    OffsetOutOfRange,
    UsageError,
)
from support.disks import PATIENCE_SECONDS


def test_a_topic_is_created_on_first_use_and_found_again(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as store:
        assert store.topics() == []
        topic = store.topic("orders")
        assert topic.name == "/default/orders"
        assert topic.append(b"one", attributes={"k": "v"}, durability="synced") == 0
        assert topic.append_many([b"two", b"three"]) == range(1, 3)
    assert (tmp_path / "wal" / "default" / "orders" / "wal.log").is_file()
    with forebay.open(str(tmp_path)) as store:
        assert store.topics() == ["/default/orders"]
        messages = list(store.topic("/default/orders").read(start=0))
        assert [(m.offset, m.payload) for m in messages] == [
            (0, b"one"),
            (1, b"two"),
            (2, b"three"),
        ]
        assert messages[0].attributes == {"k": "v"}
        assert store.topic("orders").append(b"four", durability="synced") == 3


def test_a_read_sees_everything_that_was_appended_before_it(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as store:
        topic = store.topic("t")
        topic.append(b"buffered")
        assert [message.payload for message in topic.read()] == [b"buffered"]
        assert topic.watermarks() == forebay.Watermarks(1, 1, 0, 0)


def test_a_read_starts_where_it_is_told(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as store:
        topic = store.topic("t")
        topic.append_many([b"%d" % number for number in range(10)])
        assert [m.offset for m in topic.read(start=7)] == [7, 8, 9]
        assert [m.offset for m in topic.read(start="earliest")] == list(range(10))
        assert list(topic.read(start="latest")) == []
        with pytest.raises(OffsetOutOfRange, match="offset 11"):
            topic.read(start=11)
        for bad in (-1, "begin", None, 1.5):
            with pytest.raises(UsageError, match="start"):
                topic.read(start=bad)  # type: ignore[arg-type]


def test_bad_topic_names_are_refused_with_the_rule(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as store:
        for bad in ("", "/", "/a", "a/b", "/a/b/c", "/a/..", "/a/b c", "../x"):
            with pytest.raises(InvalidTopicName, match="a topic is /namespace/topic"):
                store.topic(bad)
    assert list((tmp_path).rglob("wal.log")) == []


def test_a_store_in_memory_has_no_files() -> None:
    with forebay.open(None) as store:
        topic = store.topic("t")
        topic.append(b"one", durability="synced")
        assert [message.payload for message in topic.read()] == [b"one"]
        assert store.topics() == ["/default/t"]


def test_a_closed_store_refuses_everything(tmp_path: Path) -> None:
    store = forebay.open(tmp_path)
    topic = store.topic("t")
    topic.append(b"kept")
    store.close()
    store.close()
    with pytest.raises(LogClosed):
        topic.append(b"late")
    with pytest.raises(LogClosed):
        store.topic("t")
    with forebay.open(tmp_path) as again:
        assert [message.payload for message in again.topic("t").read()] == [b"kept"]


def test_a_file_is_not_a_data_directory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UsageError, match="not a directory"):
        forebay.open(file)


def test_buffered_appends_are_synced_when_the_interpreter_exits(tmp_path: Path) -> None:
    script = f"import forebay; forebay.open({str(tmp_path)!r}).topic('t').append(b'kept')"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)
    with forebay.open(tmp_path) as store:
        assert [message.payload for message in store.topic("t").read()] == [b"kept"]


_FORK = """
import os, sys, forebay
store = forebay.open(sys.argv[1])
topic = store.topic("t")
topic.append(b"queued")
child = os.fork()
if child == 0:
    try:
        topic.append(b"from the child", durability="synced")
    except forebay.ForebayError as error:
        print(error, flush=True)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
topic.append(b"after", durability="synced")
store.close()
"""


def test_a_batch_is_anything_that_can_be_iterated_but_a_single_value() -> None:
    with forebay.open(None) as store:
        topic = store.topic("t")
        assert topic.append_many(b"%d" % n for n in range(3)) == range(3)
        assert topic.append_many([b"a", b"b"], routing_keys=iter(["x", None])) == range(3, 5)
        for bad in (b"abc", "abc", {"a": "b"}):
            with pytest.raises(UsageError, match="payloads is one"):
                topic.append_many(bad)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="routing_keys is one str"):
            topic.append_many([b"a", b"b"], routing_keys="ab")
        assert topic.watermarks().appended == 5


def test_an_error_of_the_disk_at_opening_says_what_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "wal").write_text("in the way")
    with forebay.open(tmp_path) as store, pytest.raises(DiskError, match="not a directory") as info:
        store.topic("t")
    assert isinstance(info.value, OSError)


def test_settings_take_a_path_as_text(tmp_path: Path) -> None:
    settings = forebay.StoreSettings(
        data=str(tmp_path), wal=forebay.WalSettings(fsync_interval_ms=1000)
    )
    with forebay.open(settings) as store:
        store.topic("t").append(b"x", durability="synced")
    assert (tmp_path / "wal" / "default" / "t" / "wal.log").exists()
    for bad in (5, "", "a\0b"):
        with pytest.raises(InvalidSetting, match="data"):
            forebay.open(bad)  # type: ignore[arg-type]


def test_a_forked_child_cannot_write_what_its_parent_queued(tmp_path: Path) -> None:
    shown = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FORK, str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "belongs to its parent" in shown.stdout
    with forebay.open(tmp_path) as store:
        assert [message.payload for message in store.topic("t").read()] == [b"queued", b"after"]


async def test_a_stream_follows_in_asyncio(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as store:
        topic = store.topic("t")
        await topic.append_async(b"zero", durability="synced")
        stream = topic.stream(start="earliest")
        assert (await anext(stream)).payload == b"zero"
        waiting = asyncio.ensure_future(anext(stream))
        offset = topic.append(b"one")
        await topic.wait_async(offset)
        assert (await waiting).payload == b"one"
        await stream.aclose()
        assert [m.payload async for m in topic.stream(start=0, follow=False)] == [b"zero", b"one"]


def test_many_threads_opening_one_topic_get_the_same_log(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as store:
        barrier = threading.Barrier(8)
        offsets: list[int] = []

        def open_and_append() -> None:
            barrier.wait(PATIENCE_SECONDS)
            offsets.append(store.topic("t").append(b"x", durability="synced"))

        threads = [threading.Thread(target=open_and_append) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(offsets) == list(range(8))


def test_the_factory_gives_storages_that_append_read_and_acknowledge(tmp_path: Path) -> None:
    factory = forebay.WalStorageFactory(forebay.StoreSettings(data=tmp_path))
    try:
        storage = factory.for_topic("/ns/topic")
        assert factory.for_topic("/ns/topic") is storage
        message = forebay.StreamMessage(
            b"payload",
            request_id=2,
            msg_id=forebay.MessageId(7, "/ns/topic", "127.0.0.1:6650"),
            producer_name="p1",
            subscription_name="",
            schema_id=3,
            schema_version=1,
            routing_key="rk",
        )
        assert storage.append_message(message) == 0
        storage.flush()
        with storage.create_reader(forebay.StartPosition.offset(0)) as reader:
            assert next(reader) == message
        live = storage.create_reader(forebay.StartPosition.latest())
        assert storage.append_message(message, durability="synced") == 1
        assert next(live).offset == 1
        storage.ack_checkpoint(0)
        assert storage.acknowledged == 1
        with pytest.raises(OffsetOutOfRange):
            storage.ack_checkpoint(99)
        with pytest.raises(UsageError):
            forebay.StartPosition.offset(-1)
        assert storage.trim_local() == []
    finally:
        factory.close()


def test_a_message_without_a_topic_gets_the_topic_it_is_appended_to() -> None:
    factory = forebay.WalStorageFactory(forebay.StoreSettings(data=None))
    storage = factory.for_topic("t")
    storage.append_message(forebay.StreamMessage(b"x"), durability="synced")
    (message,) = storage.wal.tail_reader(0, end=1)
    assert message.msg_id.topic_name == "/default/t"
    factory.close()


def test_a_second_process_is_told_who_owns_a_topic(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as store:
        store.topic("t").append(b"x", durability="synced")
        script = (
            "import sys, forebay\n"
            "try:\n"
            "    forebay.open(sys.argv[1]).topic('t')\n"
            "except forebay.ForebayError as error:\n"
            "    print(error)\n"
        )
        shown = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)],
            check=True,
            capture_output=True,
            text=True,
            timeout=100,
        )
    assert f"in use by process {os.getpid()}" in shown.stdout


def test_every_public_name_is_there() -> None:
    for name in forebay.__all__:
        assert getattr(forebay, name).__module__.startswith("forebay.")
    assert set(forebay.__all__) <= set(dir(forebay))
    with pytest.raises(AttributeError, match="nothing"):
        _ = forebay.nothing
