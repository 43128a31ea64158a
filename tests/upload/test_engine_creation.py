"""A name gets its bytes once (rule R8): a second attempt finds its bytes or changes nothing."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import forebay
from forebay.catalog.records import State
from forebay.errors import (
    CorruptFrame,
    ForebayError,
    ForeignObject,
    ServiceUnavailable,
)
from forebay.format.content import ContentHash
from forebay.format.names import object_key, parse_topic
from forebay.limits import PART_BYTES_MIN
from forebay.objects.local import LocalBackend
from forebay.objects.memory import MemoryBackend
from forebay.objects.remote import RemoteBackend
from forebay.objects.store import CloudStore
from forebay.settings import StoreSettings, UploaderSettings
from forebay.testing.objects import FaultBackend, ObjectFault
from forebay.upload.engine import NewObject
from forebay.upload.sweep import sweep
from support.azurite import Azurite
from support.gcs_fake import GcsFake
from support.proxy import FaultProxy, Faults
from support.reservoirs import frames
from support.s3_server import S3Server
from support.tiered_stores import TOPIC, Setup, fill, offsets, require_chain

FIRST = object_key(TOPIC, "data-0-9.dnb1")
SETTINGS = UploaderSettings(stream_chunk_size=PART_BYTES_MIN, concurrent_parts=2)
SMALL = frames(0, 10)
LARGE = frames(0, 200, size=64 * 1024)
assert len(LARGE) > 2 * PART_BYTES_MIN


@pytest.fixture(params=["memory", "local", "s3", "azure", "gcs"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CloudStore:
    if request.param == "memory":
        return CloudStore(MemoryBackend())
    if request.param == "local":
        return CloudStore(LocalBackend(tmp_path / "objects"))
    server: S3Server | Azurite | GcsFake = request.getfixturevalue(request.param)
    return CloudStore(RemoteBackend(server.settings()))


def create(store: CloudStore, data: bytes, object_id: str = "data-0-9.dnb1") -> str | None:
    """Writes the object as an upload does; returns its etag."""
    content = ContentHash()
    content.add(data)
    with NewObject(store, TOPIC, object_id, SETTINGS) as made:
        for start in range(0, len(data), 1 << 20):
            made.write(data[start : start + (1 << 20)])
        meta = made.finish(len(data), content.value).meta
    assert meta.size == len(data)
    return meta.etag


def stored(store: CloudStore) -> bytes:
    return bytes(store.get_object(FIRST, 1 << 30))


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "multipart"])
def test_the_same_bytes_again_are_a_success(store: CloudStore, data: bytes) -> None:
    etag = create(store, data)
    assert create(store, data) == etag
    assert stored(store) == data


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "multipart"])
@pytest.mark.parametrize("longer", [0, 7], ids=["same size", "other size"])
def test_other_bytes_are_an_error_that_names_both(
    store: CloudStore, data: bytes, longer: int
) -> None:
    other = bytes(reversed(data)) + bytes(longer)
    etag = create(store, other)
    with pytest.raises(ForeignObject) as caught:
        create(store, data)
    said = str(caught.value)
    ours, theirs = ContentHash(), ContentHash()
    ours.add(data)
    theirs.add(other)
    for part in (store.name, FIRST, str(len(data)), str(len(other)), ours.value, "forebay restore"):
        assert part in said
    assert (theirs.value in said) == (longer == 0), "an object of another size is not read"
    assert stored(store) == other
    assert store.head(FIRST).etag == etag


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "multipart"])
def test_two_at_the_same_time_both_succeed(store: CloudStore, data: bytes) -> None:
    start = threading.Barrier(2)

    def attempt(_number: int) -> None:
        start.wait()
        create(store, data)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(attempt, range(2)))
    assert stored(store) == data


def test_an_error_before_the_end_publishes_nothing(store: CloudStore) -> None:
    def fail() -> None:
        with NewObject(store, TOPIC, "data-0-9.dnb1", SETTINGS) as made:
            made.write(LARGE)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(store.list("")) == []


def test_a_name_that_is_free_again_when_it_is_compared_can_be_tried_again() -> None:
    backend = FaultBackend(MemoryBackend())
    store = CloudStore(backend)
    create(store, SMALL)
    backend.hook("head", backend.inner.delete_object)
    with pytest.raises(ServiceUnavailable, match="try again"):
        create(store, SMALL)
    backend.clear()
    create(store, SMALL)


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "multipart"])
def test_lost_answers_end_as_success(s3: S3Server, data: bytes) -> None:
    """The client sends a request again whose answer was lost, and so does the caller."""
    with FaultProxy(s3.endpoint.removeprefix("http://"), http=True, seed=3) as proxy:
        settings = replace(s3.settings(options={"endpoint": proxy.url}), request_timeout_seconds=5)
        direct = CloudStore(RemoteBackend(s3.settings(root=settings.root)))
        store = CloudStore(RemoteBackend(settings))
        lossy = Faults(timeout_after_success_rate=0.5, hang_seconds=0.01)
        for number in range(20 if data is SMALL else 4):
            object_id = f"data-{number}-9.dnb1"
            key = object_key(TOPIC, object_id)
            with proxy.faults(lossy):
                for _ in range(100):
                    try:
                        create(store, data, object_id)
                    except ServiceUnavailable:
                        continue
                    break
                else:
                    pytest.fail("no attempt succeeded")
            assert bytes(direct.get_object(key, 1 << 30)) == data
        assert proxy.stats().faults["timeout_after_success"] > 0


# ---- uploads ----


@pytest.fixture(params=[False, True], ids=["ahead", "rolling"])
def rolling(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def faulty(tmp_path: Path, *, rolling: bool) -> tuple[Setup, FaultBackend]:
    backend = FaultBackend(MemoryBackend())
    setup = Setup(tmp_path / "data", backend=backend)
    setup.uploading(rolling=rolling)
    return setup, backend


def test_an_upload_whose_answer_was_lost_is_found_by_the_next_one(
    tmp_path: Path, rolling: bool
) -> None:
    setup, backend = faulty(tmp_path, rolling=rolling)
    with setup.topic() as topic:
        fill(topic, 10)
        # The request that publishes the object is carried out, and nobody hears of it.
        lost = ObjectFault("copy" if rolling else "complete", when="after", key="data-0-")
        backend.inject(lost)
        with pytest.raises(ServiceUnavailable):
            topic.upload()
        etag = backend.inner.head(FIRST).etag
        [descriptor] = topic.upload()
        assert (descriptor.object_id, descriptor.etag) == ("data-0-9.dnb1", etag)
        assert backend.inner.head(FIRST).etag == etag, "it was not written again"
        assert offsets(topic.read(0)) == list(range(10))
    require_chain(setup)


def test_a_process_that_died_before_the_commit_leaves_an_object_that_is_taken(
    tmp_path: Path, rolling: bool
) -> None:
    setup, backend = faulty(tmp_path, rolling=rolling)
    with setup.topic() as topic:
        fill(topic, 10)
        backend.inject(ObjectFault("put", key=".json", times=None))  # the step before the commit
        with pytest.raises(ServiceUnavailable):
            topic.upload()
        etag = backend.inner.head(FIRST).etag
    backend.clear()
    with setup.topic() as topic:  # another process, with a new epoch
        [descriptor] = topic.upload()
        assert (descriptor.object_id, descriptor.etag) == ("data-0-9.dnb1", etag)
    require_chain(setup)


def test_an_upload_does_not_replace_the_object_of_another_log(
    tmp_path: Path, rolling: bool
) -> None:
    setup, backend = faulty(tmp_path, rolling=rolling)
    foreign = frames(0, 10, size=33)
    with setup.topic() as topic:
        fill(topic, 10)
        backend.inner.put_object(FIRST, foreign)
        for _ in range(2):  # it is said in every cycle, until somebody acts
            with pytest.raises(ForeignObject, match=r"data-0-9\.dnb1.* was not changed"):
                topic.upload()
        assert topic.watermarks().uploaded == 0
        assert bytes(backend.inner.get_range(FIRST, 0, len(foreign))) == foreign
        life = setup.catalog.life(TOPIC, "data-0-9.dnb1")
        assert life is not None
        assert life.state is State.INTENDED, "a sweep may not delete it either"
        assert not [key for key in setup.listed() if "pending" in key]


def test_an_older_log_and_catalog_overwrite_no_committed_object(tmp_path: Path) -> None:
    data, old = tmp_path / "data", tmp_path / "old"
    settings = StoreSettings(data=data, uploader=UploaderSettings(enabled=False))
    path = data / "objects" / object_key(parse_topic("orders"), "data-100-199.dnb1")
    with forebay.open(settings) as store:
        topic = store.topic("orders")
        topic.append_many([b"first"] * 100, durability="synced")
        topic.upload()
    shutil.copytree(data, old)
    with forebay.open(settings) as store:
        topic = store.topic("orders")
        topic.append_many([b"a newer message"] * 100, durability="synced")
        topic.upload()
    before = path.read_bytes()
    shutil.rmtree(data / "wal")
    shutil.copytree(old / "wal", data / "wal")
    for path_of_catalog in data.glob("catalog.db*"):
        path_of_catalog.unlink()
    shutil.copy(old / "catalog.db", data / "catalog.db")

    def continue_with_the_old_copy() -> None:
        with forebay.open(settings) as store:
            topic = store.topic("orders")
            topic.append_many([b"another"] * 100, durability="synced")
            topic.upload()

    with pytest.raises(ForebayError):
        continue_with_the_old_copy()
    assert path.read_bytes() == before


class Damaging(MemoryBackend):
    """Objects whose bytes the store changes as it takes them."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.left = times

    def publish(self, key: str, data: bytes, metadata: dict[str, str], create: bool) -> object:  # type: ignore[override]
        if create and self.left and key.endswith(".dnb1"):
            self.left -= 1
            data = data[:-1] + bytes([data[-1] ^ 1])
        return super().publish(key, data, metadata, create)


def test_a_damaged_upload_is_set_aside_and_made_again(tmp_path: Path, rolling: bool) -> None:
    backend = Damaging(1)
    setup = Setup(tmp_path / "data", backend=backend)
    setup.uploading(rolling=rolling)
    with setup.topic() as topic:
        fill(topic, 10)
        with pytest.raises(CorruptFrame):
            topic.upload()
        [descriptor] = topic.upload()
        assert descriptor.object_id == "data-0-9-1.dnb1"
        assert offsets(topic.read(0)) == list(range(10))
        setup.clock.advance(7200)
        report = sweep(
            setup.catalog,
            CloudStore(backend),
            grace_minutes=60,
            dry_run=False,
            clock=setup.clock,
        )
        assert [item.key for item in report.items] == [FIRST]
    require_chain(setup)
    assert FIRST not in setup.listed()
