"""What every object store backend promises: this machine's own, the double, and real servers.

What only one of them can get wrong (a killed process, a wrong secret) is in the other modules.
"""

from __future__ import annotations

import random
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forebay.errors import (
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    ServiceError,
    UsageError,
)
from forebay.limits import OBJECT_KEY_BYTES_MAX, PART_BYTES_MIN
from forebay.objects.backend import Backend, ObjectMeta, ObjectWriter
from forebay.objects.local import LocalBackend
from forebay.objects.memory import MemoryBackend
from forebay.objects.remote import RemoteBackend
from forebay.objects.store import CloudStore
from forebay.testing.objects import FaultBackend
from support.azurite import Azurite
from support.gcs_fake import GcsFake
from support.s3_server import S3Server

CHUNK = PART_BYTES_MIN
NOISE = random.Random(7).randbytes(3 * CHUNK + 17)
KEY = "storage/topics/default/orders/objects/data-0-9.dnb1"
BACKENDS = ["memory", "local", "fault", "store", "s3", "azure", "gcs"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    made = make(request, tmp_path)
    yield made
    made.close()


def make(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    match request.param:
        case "memory":
            return MemoryBackend()
        case "local":
            return LocalBackend(tmp_path / "objects")
        case "fault":
            return FaultBackend(MemoryBackend())
        case "store":
            return CloudStore(MemoryBackend())
    server: S3Server | Azurite | GcsFake = request.getfixturevalue(request.param)
    return RemoteBackend(server.settings())


def writer(backend: Backend, key: str = KEY) -> ObjectWriter:
    return backend.open_streaming_writer(key, chunk_bytes=CHUNK, concurrent_parts=2)


def whole(backend: Backend, key: str = KEY) -> bytes:
    return bytes(backend.get_range(key, 0, backend.head(key).size))


def keys(backend: Backend, prefix: str, after: str | None = None) -> list[str]:
    return [meta.key for meta in backend.list(prefix, after=after)]


# ---- writing ----


def test_what_was_put_is_there_whole(backend: Backend) -> None:
    meta = backend.put_object(KEY, b"frames")
    assert (meta.key, meta.size) == (KEY, 6)
    assert whole(backend) == b"frames"


def test_put_takes_every_kind_of_buffer(backend: Backend) -> None:
    for data in (b"", b"bytes", bytearray(b"bytearray"), memoryview(b"a view")[2:]):
        backend.put_object(KEY, data)
        assert whole(backend) == bytes(data)


@pytest.mark.parametrize(
    "size",
    [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 17],
    ids=["nothing", "a byte", "under a chunk", "a chunk", "over a chunk", "three and a bit"],
)
def test_a_writer_keeps_every_byte_at_the_edges_of_its_parts(backend: Backend, size: int) -> None:
    with writer(backend) as made:
        for start in range(0, size, 1_000_003):
            made.write(NOISE[start : min(start + 1_000_003, size)])
        meta = made.close()
    assert meta.size == size
    assert whole(backend) == NOISE[:size]


def test_a_write_of_several_chunks_at_once_is_cut_into_parts(backend: Backend) -> None:
    with writer(backend) as made:
        made.write(NOISE)
    assert whole(backend) == NOISE


def test_the_callers_buffer_is_free_when_write_returns(backend: Backend) -> None:
    buffer = bytearray(1 << 20)
    pieces = [NOISE[at : at + len(buffer)] for at in range(0, 12 << 20, len(buffer))]
    with writer(backend) as made:
        for piece in pieces:
            buffer[:] = piece
            made.write(buffer)
            buffer[:] = bytes(len(buffer))
    assert whole(backend) == b"".join(pieces)


def test_nothing_is_visible_before_close(backend: Backend) -> None:
    made = writer(backend)
    made.write(NOISE[: 2 * CHUNK + 1])
    with pytest.raises(ObjectMissing):
        backend.head(KEY)
    assert keys(backend, "") == []
    made.close()
    assert backend.head(KEY).size == 2 * CHUNK + 1


@pytest.mark.parametrize("size", [10, 2 * CHUNK + 1])
def test_an_exception_in_the_with_block_publishes_nothing(backend: Backend, size: int) -> None:
    class Planned(Exception):
        pass

    def fail() -> None:
        with writer(backend) as made:
            made.write(NOISE[:size])
            raise Planned

    with pytest.raises(Planned):
        fail()
    with pytest.raises(ObjectMissing):
        backend.head(KEY)
    assert keys(backend, "") == []


def test_an_aborted_writer_publishes_nothing_and_takes_nothing_more(backend: Backend) -> None:
    made = writer(backend)
    made.write(NOISE[: CHUNK + 1])
    made.abort()
    made.abort()
    with pytest.raises(UsageError):
        made.write(b"more")
    with pytest.raises(UsageError):
        made.close()
    assert keys(backend, "") == []


def test_an_aborted_writer_leaves_the_object_it_would_have_replaced(backend: Backend) -> None:
    backend.put_object(KEY, b"old")
    made = writer(backend)
    made.write(NOISE[: CHUNK + 1])
    made.abort()
    assert whole(backend) == b"old"


def test_abort_after_close_changes_nothing(backend: Backend) -> None:
    made = writer(backend)
    made.write(b"kept")
    made.close()
    made.abort()
    assert whole(backend) == b"kept"


def test_an_object_is_replaced_whole(backend: Backend) -> None:
    first = backend.put_object(KEY, b"a longer first version")
    with writer(backend) as made:
        made.write(b"second")
        second = made.close()
    assert whole(backend) == b"second"
    assert first.etag != second.etag


@pytest.mark.parametrize("size", [5, 2 * CHUNK])
def test_close_and_head_give_the_same_etag(backend: Backend, size: int) -> None:
    with writer(backend) as made:
        made.write(NOISE[:size])
        closed = made.close()
    assert closed.etag is not None
    assert backend.head(KEY).etag == closed.etag
    assert [meta.etag for meta in backend.list("")] == [closed.etag]


def test_put_and_head_give_the_same_etag(backend: Backend) -> None:
    assert backend.put_object(KEY, b"12345").etag == backend.head(KEY).etag


# ---- creating ----

OTHER = bytes(reversed(NOISE))


def test_a_range_of_an_object_with_another_etag_is_refused(backend: Backend) -> None:
    backend.put_object(KEY, b"first bytes")
    first = backend.head(KEY).etag
    assert first is not None
    assert bytes(backend.get_range(KEY, 2, 5, etag=first)) == b"rst"
    with pytest.raises(ServiceError) as past:
        backend.get_range(KEY, 2, 500, etag=first)
    assert not isinstance(past.value, ObjectMissing)
    backend.delete_object(KEY)
    with pytest.raises(ObjectMissing):
        backend.get_range(KEY, 2, 5, etag=first)
    backend.put_object(KEY, b"other bytes")
    with pytest.raises(ObjectChanged, match=KEY) as caught:
        backend.get_range(KEY, 2, 5, etag=first)
    assert caught.value.etag == backend.head(KEY).etag
    assert bytes(backend.get_range(KEY, 2, 5, etag=caught.value.etag)) == b"her"
    assert bytes(backend.get_range(KEY, 2, 5)) == b"her"


CREATIONS: dict[str, Callable[[Backend, bytes], object]] = {
    "put": lambda backend, data: backend.put_object(KEY, data[:100], create=True),
    "small": lambda backend, data: create(backend, data[:100]),
    "multipart": lambda backend, data: create(backend, data[: 2 * CHUNK + 1]),
    "copy": lambda backend, data: copy_new(backend, data[:100]),
}
HOLDS_ALWAYS = ["put", "small", "copy"]
"""What every store creates for one of several callers only. A multipart upload has a window."""


def create(backend: Backend, data: bytes) -> ObjectMeta:
    made = backend.open_streaming_writer(KEY, chunk_bytes=CHUNK, concurrent_parts=2, create=True)
    with made:
        for start in range(0, len(data), 1 << 20):
            made.write(data[start : start + (1 << 20)])
        return made.close()


def copy_new(backend: Backend, data: bytes) -> None:
    source = f"pending-{secrets.token_hex(4)}"
    backend.put_object(source, data, {"start_offset": "7"})
    backend.copy_object(source, KEY, create=True)


@pytest.mark.parametrize("how", CREATIONS)
def test_a_name_gets_its_bytes_once(backend: Backend, how: str) -> None:
    CREATIONS[how](backend, NOISE)
    before, stored = backend.head(KEY), whole(backend)
    assert NOISE.startswith(stored)
    assert stored
    for attempt in CREATIONS.values():
        for data in (NOISE, OTHER):
            with pytest.raises(ObjectExists) as caught:
                attempt(backend, data)
            assert KEY in str(caught.value)
            assert backend.name in str(caught.value)
    assert whole(backend) == stored
    after = backend.head(KEY)
    assert (after.etag, dict(after.metadata)) == (before.etag, dict(before.metadata))
    assert [key for key in keys(backend, "") if not key.startswith("pending-")] == [KEY]


@pytest.mark.parametrize("how", CREATIONS)
def test_a_refused_creation_leaves_the_metadata_of_the_object(backend: Backend, how: str) -> None:
    backend.put_object(KEY, b"there", {"kind": "first"})
    with pytest.raises(ObjectExists):
        backend.put_object(KEY, b"other", {"kind": "second"}, create=True)
    with pytest.raises(ObjectExists):
        CREATIONS[how](backend, OTHER)
    assert (whole(backend), dict(backend.head(KEY).metadata)) == (b"there", {"kind": "first"})


def test_a_created_object_has_its_metadata(backend: Backend) -> None:
    backend.put_object("put", b"x", {"k": "put"}, create=True)
    backend.put_object("source", b"x", {"k": "copied"})
    backend.copy_object("source", "copy", create=True)
    made = backend.open_streaming_writer(
        "written", chunk_bytes=CHUNK, concurrent_parts=1, metadata={"k": "written"}, create=True
    )
    with made:
        made.write(NOISE[: CHUNK + 1])
    found = [dict(backend.head(key).metadata) for key in ("put", "copy", "written")]
    assert found == [{"k": "put"}, {"k": "copied"}, {"k": "written"}]


@pytest.mark.parametrize("how", CREATIONS)
def test_a_deleted_name_can_be_created_again(backend: Backend, how: str) -> None:
    backend.put_object(KEY, b"first")
    backend.delete_object(KEY)
    CREATIONS[how](backend, NOISE)
    assert NOISE.startswith(whole(backend))


@pytest.mark.parametrize("how", HOLDS_ALWAYS)
def test_of_many_creations_at_once_one_succeeds(backend: Backend, how: str) -> None:
    start = threading.Barrier(8)

    def attempt(number: int) -> bytes | None:
        data = bytes([number]) * 100
        start.wait()
        try:
            CREATIONS[how](backend, data)
        except ObjectExists:
            return None
        return data

    with ThreadPoolExecutor(8) as pool:
        won = [data for data in pool.map(attempt, range(8)) if data is not None]
    assert won == [whole(backend)]


def test_a_copy_of_nothing_creates_nothing(backend: Backend) -> None:
    with pytest.raises(ObjectMissing):
        backend.copy_object("no/such/object", KEY, create=True)
    assert keys(backend, "") == []


def test_a_large_object_that_appears_during_an_upload_is_not_replaced(backend: Backend) -> None:
    """The last look is before the parts in flight and the completion; what comes later is lost."""
    made = backend.open_streaming_writer(KEY, chunk_bytes=CHUNK, concurrent_parts=2, create=True)
    made.write(NOISE[: 2 * CHUNK + 1])
    backend.put_object(KEY, b"came first")
    with pytest.raises(ObjectExists):
        made.close()
    made.abort()
    assert whole(backend) == b"came first"


def test_an_aborted_creation_creates_nothing(backend: Backend) -> None:
    made = backend.open_streaming_writer(KEY, chunk_bytes=CHUNK, concurrent_parts=2, create=True)
    made.write(NOISE[: CHUNK + 1])
    made.abort()
    assert keys(backend, "") == []


# ---- reading ----


def test_ranges_are_exact_at_all_edges(backend: Backend) -> None:
    data = NOISE[:100]
    backend.put_object(KEY, data)
    for start, end in [
        (0, 100),
        (0, 1),
        (99, 100),
        (1, 99),
        (50, 51),
        (0, 0),
        (40, 40),
        (100, 100),
    ]:
        assert bytes(backend.get_range(KEY, start, end)) == data[start:end]


@pytest.mark.parametrize(("start", "end"), [(0, 11), (9, 11), (10, 11), (11, 12), (11, 11)])
def test_a_range_past_the_end_is_an_error(backend: Backend, start: int, end: int) -> None:
    backend.put_object(KEY, b"0123456789")
    with pytest.raises(ServiceError) as caught:
        backend.get_range(KEY, start, end)
    assert type(caught.value) is ServiceError, "neither missing nor unavailable"


@pytest.mark.parametrize(("start", "end"), [(-1, 5), (5, 4)])
def test_what_is_no_range_is_a_wrong_call(backend: Backend, start: int, end: int) -> None:
    backend.put_object(KEY, b"0123456789")
    with pytest.raises(UsageError):
        backend.get_range(KEY, start, end)


def test_what_is_not_there_is_missing(backend: Backend) -> None:
    backend.put_object(KEY, b"x")
    for missing in ("no/such/object", KEY.rpartition("/")[0], KEY + "/below"):
        with pytest.raises(ObjectMissing):
            backend.head(missing)
        with pytest.raises(ObjectMissing):
            backend.get_range(missing, 0, 1)
        with pytest.raises(ObjectMissing):
            backend.get_range(missing, 0, 0)
        with pytest.raises(ObjectMissing):
            backend.copy_object(missing, "target")


# ---- copy, delete ----


def test_a_copy_has_the_bytes_and_outlives_its_source(backend: Backend) -> None:
    backend.put_object("a/pending", b"bytes", {"start_offset": "7"})
    backend.put_object("a/final", b"what was there before")
    backend.copy_object("a/pending", "a/final")
    backend.copy_object("a/pending", "a/final")
    backend.delete_object("a/pending")
    assert whole(backend, "a/final") == b"bytes"
    assert dict(backend.head("a/final").metadata) == {"start_offset": "7"}
    assert keys(backend, "") == ["a/final"]


def test_replacing_the_source_leaves_a_copy_as_it_was(backend: Backend) -> None:
    backend.put_object("source", b"first")
    backend.copy_object("source", "target")
    backend.put_object("source", b"second")
    assert whole(backend, "target") == b"first"


def test_delete_is_idempotent(backend: Backend) -> None:
    backend.put_object(KEY, b"x")
    backend.put_object(KEY + ".json", b"stays")
    backend.delete_object(KEY)
    backend.delete_object(KEY)
    backend.delete_object("never/was/there")
    assert keys(backend, "") == [KEY + ".json"]


# ---- list ----


def test_a_prefix_is_of_the_key_and_not_a_directory(backend: Backend) -> None:
    for key in ("t/orders/1", "t/orders/2", "t/orders2/1", "t/other", "u"):
        backend.put_object(key, b"x")
    assert keys(backend, "t/orders") == ["t/orders/1", "t/orders/2", "t/orders2/1"]
    assert keys(backend, "t/orders/") == ["t/orders/1", "t/orders/2"]
    assert keys(backend, "t/orders/2") == ["t/orders/2"]
    assert keys(backend, "t/o") == ["t/orders/1", "t/orders/2", "t/orders2/1", "t/other"]
    assert keys(backend, "") == ["t/orders/1", "t/orders/2", "t/orders2/1", "t/other", "u"]
    assert keys(backend, "nothing") == []
    assert keys(backend, "nothing/") == []


def test_after_leaves_out_the_keys_up_to_it(backend: Backend) -> None:
    names = [f"t/objects/data-{number}" for number in (0, 10, 100, 2, 30)]
    for name in names:
        backend.put_object(name, b"x")
    for at, name in enumerate(names):
        assert keys(backend, "t/objects/", after=name) == names[at + 1 :]
    assert keys(backend, "t/objects/data-1", after="t/objects/data-10") == ["t/objects/data-100"]
    assert keys(backend, "t/objects/", after="t/objects/data-1") == names[1:]


def test_a_long_list_comes_in_order_with_nothing_missing(
    backend: Backend, request: pytest.FixtureRequest
) -> None:
    # A page of S3 and GCS has 1000 objects. One of Azurite has 5000, which take it long to make,
    # and a directory has no pages but a sync for every object.
    count = {"azure": 60, "local": 200}.get(request.node.callspec.params["backend"], 1100)
    names = [f"many/data-{number:05d}" for number in range(count)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: backend.put_object(name, b"x"), reversed(names)))
    assert keys(backend, "many/") == names
    assert keys(backend, "many/", after=names[-51]) == names[-50:]


def test_list_gives_sizes_and_times(backend: Backend) -> None:
    backend.put_object(KEY, b"12345")
    (found,) = backend.list("storage/")
    assert (found.key, found.size) == (KEY, 5)
    assert found.modified_ms > 1_500_000_000_000


# ---- metadata, keys, threads ----


def test_metadata_come_back_as_they_were_given(backend: Backend) -> None:
    given = {"start_offset": "0", "kind": "frames; v=1"}
    assert dict(backend.put_object("put", b"x", given).metadata) == given
    made = backend.open_streaming_writer(
        "written", chunk_bytes=CHUNK, concurrent_parts=2, metadata={"end": "9"}
    )
    with made:
        made.write(NOISE[: CHUNK + 1])
    assert dict(backend.head("put").metadata) == given
    assert dict(backend.head("written").metadata) == {"end": "9"}
    backend.put_object("put", b"again")
    assert dict(backend.head("put").metadata) == {}


@pytest.mark.parametrize(
    "metadata",
    [{"Upper": "x"}, {"a-b": "x"}, {"a": "é"}, {"a": " x"}, {"a": ""}, {"a": "x" * 3000}],
)
def test_metadata_that_some_store_would_change_are_refused(
    backend: Backend, metadata: dict[str, str]
) -> None:
    with pytest.raises(UsageError):
        backend.put_object(KEY, b"x", metadata)
    with pytest.raises(UsageError):
        backend.open_streaming_writer(KEY, chunk_bytes=CHUNK, concurrent_parts=1, metadata=metadata)


@pytest.mark.parametrize(
    "key",
    ["storage/topics/default/bestellungen_köln/objects/data-0-9.dnb1", "t/注文/1", "a b+c%20&="],
)
def test_keys_may_have_letters_of_any_script(backend: Backend, key: str) -> None:
    backend.put_object(key, b"x")
    backend.copy_object(key, key + "2")
    assert backend.head(key).key == key
    assert keys(backend, key.rpartition("/")[0]) == [key, key + "2"]
    backend.delete_object(key)
    assert keys(backend, "") == [key + "2"]


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/a",
        "a/",
        "a//b",
        "a/../b",
        "..",
        "./a",
        "a\0b",
        "a\nb",
        "x" * (OBJECT_KEY_BYTES_MAX + 1),
    ],
)
def test_keys_that_some_store_cannot_have_are_refused(backend: Backend, key: str) -> None:
    with pytest.raises(UsageError):
        backend.put_object(key, b"x")
    with pytest.raises(UsageError):
        writer(backend, key)
    with pytest.raises(UsageError):
        backend.head(key)
    with pytest.raises(UsageError):
        backend.get_range(key, 0, 1)
    with pytest.raises(UsageError):
        backend.delete_object(key)


def test_many_threads_may_use_one_backend(backend: Backend) -> None:
    def work(number: int) -> None:
        key, data = f"threads/{number}", NOISE[number : number + 10_000]
        with writer(backend, key) as made:
            made.write(data)
        for start in range(0, 10_000, 2_500):
            assert backend.get_range(key, start, start + 2_500) == data[start : start + 2_500]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(40)))
    assert len(keys(backend, "threads/")) == 40
