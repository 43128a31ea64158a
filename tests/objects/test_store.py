"""CloudStore: what it counts, and its copies; connect: which backend the settings mean."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from forebay.errors import (
    InvalidSetting,
    ObjectMissing,
    ServiceError,
    ServiceRefused,
    ServiceUnavailable,
)
from forebay.objects.backend import CopyUnsupported
from forebay.objects.memory import MemoryBackend
from forebay.objects.store import BYTES, REQUEST_SECONDS, REQUESTS, CloudStore, connect
from forebay.settings import CloudSettings
from forebay.testing.objects import FaultBackend, ObjectFault


@pytest.fixture
def faults() -> FaultBackend:
    return FaultBackend(MemoryBackend())


@pytest.mark.parametrize("chunk_bytes", [1, 3, 4, 9, 10, 100])
def test_a_ranged_reader_gives_every_byte_in_order_a_chunk_at_a_time(chunk_bytes: int) -> None:
    store = CloudStore(MemoryBackend())
    data = b"0123456789"
    store.put_object("a", data)
    for start in range(11):
        chunks = list(map(bytes, store.open_ranged_reader("a", start, chunk_bytes=chunk_bytes)))
        assert b"".join(chunks) == data[start:]
        assert all(len(chunk) == chunk_bytes for chunk in chunks[:-1])
        for end in range(start, 11):
            reader = store.open_ranged_reader("a", start, end=end, chunk_bytes=chunk_bytes)
            assert b"".join(map(bytes, reader)) == data[start:end]
    with pytest.raises(ObjectMissing):
        list(store.open_ranged_reader("b", chunk_bytes=chunk_bytes))


# ---- metrics ----


def test_requests_are_counted_by_outcome(faults: FaultBackend) -> None:
    store = CloudStore(faults)
    labels = [("put", "ok"), ("head", "missing"), ("head", "unavailable"), ("head", "refused")]
    before = [REQUESTS.value(*pair) for pair in labels]
    seconds = REQUEST_SECONDS.count("head")
    store.put_object("a", b"12345")
    with pytest.raises(ObjectMissing):
        store.head("b")
    for error in (ServiceUnavailable, ServiceRefused):
        faults.inject(ObjectFault("head", error))
        with pytest.raises(error):
            store.head("a")
    assert [REQUESTS.value(*pair) for pair in labels] == [count + 1 for count in before]
    assert REQUEST_SECONDS.count("head") == seconds + 3


def test_bytes_are_counted_in_both_directions(faults: FaultBackend) -> None:
    store = CloudStore(faults)
    up, down = BYTES.value("up"), BYTES.value("down")
    store.put_object("a", b"12345")
    with store.open_streaming_writer("b", chunk_bytes=4, concurrent_parts=1) as writer:
        writer.write(b"1234567")
    store.get_range("b", 1, 4)
    assert (BYTES.value("up") - up, BYTES.value("down") - down) == (12, 3)


def test_the_parts_of_a_writer_are_counted(faults: FaultBackend) -> None:
    store = CloudStore(faults)
    names = ("put", "part", "complete")
    before = [REQUESTS.value(name, "ok") for name in names]
    for size in (4, 9):
        with store.open_streaming_writer("b", chunk_bytes=4, concurrent_parts=1) as writer:
            writer.write(b"x" * size)
    counted = [REQUESTS.value(name, "ok") for name in names]
    assert [now - was for now, was in zip(counted, before, strict=True)] == [1, 3, 1]


def test_a_long_list_counts_a_request_for_every_page(faults: FaultBackend) -> None:
    store = CloudStore(faults)
    for number in range(2001):
        store.put_object(f"{number:04d}", b"")
    before = REQUESTS.value("list", "ok")
    assert [meta.key for meta in store.list("")] == [f"{number:04d}" for number in range(2001)]
    assert REQUESTS.value("list", "ok") - before == 3


# ---- whole objects and copies ----


def test_get_has_a_limit(faults: FaultBackend) -> None:
    store = CloudStore(faults)
    store.put_object("a", b"12345")
    store.put_object("empty", b"")
    assert bytes(store.get_object("a", 5)) == b"12345"
    assert bytes(store.get_object("empty", 0)) == b""
    with pytest.raises(ServiceError, match=r"5 bytes.* 4"):
        store.get_object("a", 4)


def test_a_copy_that_the_server_makes_is_not_read(faults: FaultBackend) -> None:
    store = CloudStore(faults)
    store.put_object("a", b"12345")
    assert store.copy_or_rewrite("a", "b").size == 5
    assert faults.calls("get_range") == 0


def test_what_the_server_does_not_copy_is_read_and_written(faults: FaultBackend) -> None:
    store = CloudStore(faults)
    store.put_object("a", b"1234567", {"k": "v"})
    faults.inject(ObjectFault("copy", CopyUnsupported))
    meta = store.copy_or_rewrite("a", "b", chunk_bytes=3, concurrent_parts=1)
    assert (meta.key, meta.size, dict(meta.metadata)) == ("b", 7, {"k": "v"})
    assert bytes(store.get_object("b", 100)) == b"1234567"
    assert faults.calls("write") == 3


@pytest.mark.parametrize("error", [ServiceUnavailable, ServiceRefused, ObjectMissing])
def test_a_copy_that_failed_otherwise_is_not_rewritten(
    faults: FaultBackend, error: type[Exception]
) -> None:
    store = CloudStore(faults)
    store.put_object("a", b"1234567")
    faults.inject(ObjectFault("copy", error))
    with pytest.raises(error):
        store.copy_or_rewrite("a", "b")
    assert faults.calls("open_writer") == 0


@pytest.mark.parametrize("operation", ["get_range", "write", "complete"])
def test_a_rewrite_that_fails_raises_and_publishes_nothing(
    faults: FaultBackend, operation: str
) -> None:
    store = CloudStore(faults)
    store.put_object("a", b"1234567")
    faults.inject(ObjectFault("copy", CopyUnsupported))
    faults.inject(ObjectFault(operation))  # type: ignore[arg-type] # a parameter is any string
    with pytest.raises(ServiceUnavailable):
        store.copy_or_rewrite("a", "b", chunk_bytes=7)
    with pytest.raises(ObjectMissing):
        store.head("b")


# ---- the double ----


def test_a_fault_after_the_call_has_done_the_thing(faults: FaultBackend) -> None:
    faults.inject(ObjectFault("put", when="after"))
    with pytest.raises(ServiceUnavailable):
        faults.put_object("a", b"x")
    faults.inject(ObjectFault("complete", when="after"))
    writer = faults.open_streaming_writer("b", chunk_bytes=4, concurrent_parts=1)
    writer.write(b"yy")
    with pytest.raises(ServiceUnavailable):
        writer.close()
    assert [meta.key for meta in faults.list("")] == ["a", "b"]
    assert faults.fired == 2


def test_a_fault_strikes_the_call_that_was_planned(faults: FaultBackend) -> None:
    faults.inject(ObjectFault("head", key="orders", skip=1, times=2))
    for key in ("orders/1", "other/1"):
        faults.put_object(key, b"x")
    faults.head("orders/1")
    faults.head("other/1")
    for _ in range(2):
        with pytest.raises(ServiceUnavailable):
            faults.head("orders/1")
    faults.head("orders/1")
    assert (faults.fired, faults.calls("head")) == (2, 5)


def test_a_hook_can_hold_a_call_back(faults: FaultBackend) -> None:
    arrived, released = threading.Event(), threading.Event()

    def hold(key: str) -> None:
        arrived.set()
        assert released.wait(60)

    faults.hook("put", hold)
    thread = threading.Thread(target=faults.put_object, args=("a", b"x"))
    thread.start()
    assert arrived.wait(60)
    assert list(faults.list("")) == []
    released.set()
    thread.join(60)
    assert [meta.key for meta in faults.list("")] == ["a"]


# ---- connect ----


def test_files_are_the_default_below_the_data_directory(tmp_path: Path) -> None:
    connect(CloudSettings(), tmp_path).put_object("a/b", b"x")
    assert (tmp_path / "objects" / "a" / "b").read_bytes() == b"x"
    with pytest.raises(InvalidSetting):
        connect(CloudSettings())


def test_stores_in_memory_of_one_root_share_their_objects() -> None:
    first, second, other = (
        connect(CloudSettings(backend="memory", root=root)) for root in ("shared", "shared", "else")
    )
    first.put_object("a", b"x")
    assert second.head("a").size == 1
    assert list(other.list("")) == []


def test_the_client_of_remote_stores_is_not_imported_without_need() -> None:
    program = "import forebay, forebay.objects.store, sys; print('obstore' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"
