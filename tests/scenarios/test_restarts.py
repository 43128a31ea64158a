"""A store that is closed and opened again, or that lost its disk, goes on where it should."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from forebay.clock import SystemClock
from forebay.errors import LostOffsets, OffsetOutOfRange
from forebay.format.names import object_key, parse_topic, sidecar
from forebay.limits import MIB
from forebay.objects.memory import MemoryBackend
from forebay.objects.store import CloudStore, connect
from forebay.settings import RemoteRetentionSettings
from forebay.testing.objects import FaultBackend
from forebay.topic.factory import WalStorageFactory
from forebay.topic.store import Store
from support.paths import TESTS
from support.storages import storage_of
from support.tiers import (
    NAME,
    QUIET,
    TierSettings,
    check,
    descriptors,
    end_lease,
    make_tiers,
    payload,
    produce,
    read_all,
    require_chain,
)

pytestmark = pytest.mark.timeout(300)

TOPIC = parse_topic(NAME)


@pytest.fixture(params=[("fs", "sqlite"), ("s3", "etcd")], ids="-".join)
def tiers(request: pytest.FixtureRequest, tmp_path: Path) -> TierSettings:
    return make_tiers(request.param, tmp_path, request)


@pytest.fixture
def simple(request: pytest.FixtureRequest, tmp_path: Path) -> TierSettings:
    return make_tiers(("memory", "sqlite"), tmp_path, request)


# ---- opened again ----


@pytest.mark.parametrize("rolling", [False, True], ids=["planned", "rolling"])
def test_an_upload_goes_on_at_the_exact_byte_after_a_restart(
    tiers: TierSettings, tmp_path: Path, rolling: bool
) -> None:
    """What the objects hold together is what the segments held, byte for byte."""
    uploader = replace(QUIET, max_object_bytes=MIB, rolling=rolling)
    kept = KeptSegments(tmp_path / "kept")
    uploaded = 0
    for step in (7_001, 13, 20_000, 0, 1):
        with tiers.open(uploader=uploader) as store:
            topic = store.topic(NAME)
            produce(topic, step)
            done = topic.upload()
            require_chain(done, uploaded, uploaded + step)
            uploaded += step
            kept.keep(path for path in (each.path for each in topic.segments()))
            topic.trim_local()
            assert topic.start_offset == 0
    with tiers.open(uploader=uploader) as store:
        found = descriptors(store)
        require_chain(found, 0, uploaded)
        assert stored_bytes(tiers, [each.object_id for each in found]) == kept.joined()
        assert read_all(store.topic(NAME), 0) == uploaded


class KeptSegments:
    """Copies of segments by their name; the newest copy of a name has all of it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._names: list[str] = []

    def keep(self, paths: Iterator[Path]) -> None:
        for path in paths:
            shutil.copyfile(path, self._folder / path.name)
            if path.name not in self._names:
                self._names.append(path.name)

    def joined(self) -> bytes:
        return b"".join((self._folder / name).read_bytes() for name in self._names)


def stored_bytes(tiers: TierSettings, object_ids: list[str]) -> bytes:
    store = connect(tiers.cloud, tiers.data)
    try:
        return b"".join(
            bytes(store.get_object(object_key(TOPIC, each), 64 * MIB)) for each in object_ids
        )
    finally:
        store.close()


def test_nothing_that_is_committed_is_uploaded_again(simple: TierSettings) -> None:
    backend = FaultBackend(MemoryBackend())
    for _ in range(3):
        with Store(simple.settings(), store=CloudStore(backend)) as store:
            produce(store.topic(NAME), 5_000)
            store.topic(NAME).upload()
    with Store(simple.settings(), store=CloudStore(backend)) as store:
        assert store.topic(NAME).upload() == []
        found = descriptors(store)
    assert len(found) == 3
    assert backend.calls("open_writer") == 3
    assert backend.calls("put") == 3 + 4  # a sidecar for each object, a marker for each opening
    assert len([each for each in backend.list("") if "/data-" in each.key]) == 6


def test_an_open_rolling_object_is_built_again_after_a_restart(simple: TierSettings) -> None:
    backend = FaultBackend(MemoryBackend())
    settings = simple.settings(uploader=replace(QUIET, rolling=True))
    factory = WalStorageFactory(settings, store=CloudStore(backend))
    storage = factory.for_topic(NAME)
    storage.wal.append_many(map(payload, range(3_000)))
    storage.flush()
    storage.upload_due()
    assert storage.watermarks().uploaded == 0
    factory.close()
    with Store(settings, store=CloudStore(backend)) as store:
        topic = store.topic(NAME)
        produce(topic, 1_000)
        topic.upload()
        require_chain(descriptors(store), 0, 4_000)
        assert read_all(topic, 0) == 4_000
        data = [meta.key for meta in backend.list("") if "pending" in meta.key]
        assert data == []


# ---- the disk is lost ----


def lose_the_log(tiers: TierSettings) -> None:
    shutil.rmtree(tiers.data)


def test_a_log_that_is_lost_after_a_crash_leaves_a_hole_that_readers_are_told_of(
    tiers: TierSettings,
) -> None:
    tiers.metadata = replace(tiers.metadata, offsets_reserved=5_000)
    die_with(tiers, uploaded=12_000, synced=2_000)
    end_lease(tiers.metadata, NAME)
    lose_the_log(tiers)
    with tiers.open() as store:
        topic = store.topic(NAME)
        begin = topic.append(b"after the hole", durability="synced")
        assert 14_000 <= begin <= 14_000 + 2 * 5_000
        assert topic.append_many([b"next"]) == range(begin + 1, begin + 2)
        require_hole(store, 12_000, begin)
        topic.upload()
        topic.rotate()
        topic.append(b"last", durability="synced")
        assert topic.trim_local()
        require_hole(store, 12_000, begin)
    with tiers.open() as store:
        require_hole(store, 12_000, begin)
        assert store.topic(NAME).start_offset == 0


def require_hole(store: Store, start: int, end: int) -> None:
    """What is before and after it can be read, and the error says where to go on."""
    topic = store.topic(NAME)
    reader = topic.read(0)
    for offset in range(start):
        check(next(reader), offset)
    for meeting in (reader, topic.read(start + 1)):
        with pytest.raises(LostOffsets) as met:
            next(meeting)
        assert (met.value.start, met.value.end) == (start, end)
    behind = [message.payload for message in topic.read(met.value.end)]
    assert behind[:2] == [b"after the hole", b"next"]


def die_with(tiers: TierSettings, *, uploaded: int, synced: int) -> None:
    """A process that uploads some messages, syncs some more, and dies."""
    given = {
        "data": str(tiers.data),
        "cloud": {
            **asdict(replace(tiers.cloud, options={})),
            "options": {**tiers.cloud.options},
        },
        "metadata": {
            **asdict(tiers.metadata),
            "path": tiers.metadata.path and str(tiers.metadata.path),
        },
        "uploaded": uploaded,
        "synced": synced,
    }
    done = subprocess.run(
        [sys.executable, "-m", "support.dying_process", json.dumps(given)],
        cwd=TESTS,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 7, done.stderr


def test_an_empty_disk_after_a_clean_end_goes_on_without_a_hole(tiers: TierSettings) -> None:
    with tiers.open() as store:
        produce(store.topic(NAME), 5_000)
        store.topic(NAME).upload()
    lose_the_log(tiers)
    with tiers.open() as store:
        topic = store.topic(NAME)
        produce(topic, 5_000)
        assert read_all(topic, 0) == 10_000
        topic.upload()
        require_chain(descriptors(store), 0, 10_000)
        assert read_all(topic, 4_999) == 5_001


def test_only_what_was_not_uploaded_is_lost_with_the_disk_after_a_clean_end(
    simple: TierSettings,
) -> None:
    with simple.open() as store:
        produce(store.topic(NAME), 5_000)
        store.topic(NAME).upload()
        produce(store.topic(NAME), 300)
    lose_the_log(simple)
    with simple.open() as store:
        topic = store.topic(NAME)
        assert topic.append(b"after the hole", durability="synced") == 5_300
        topic.append(b"next")
        require_hole(store, 5_000, 5_300)


# ---- remote retention ----


class MovedClock(SystemClock):
    """The system's clock, moved into the future, as if time had passed."""

    later_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.later_ms

    def monotonic(self) -> float:
        return super().monotonic() + self.later_ms / 1000


def test_remote_retention_by_size_removes_the_oldest_objects(simple: TierSettings) -> None:
    uploader = replace(QUIET, max_object_bytes=MIB)
    settings = simple.settings(
        uploader=uploader, remote_retention=RemoteRetentionSettings(size_mb=2.5)
    )
    backend = FaultBackend(MemoryBackend())
    with Store(settings, store=CloudStore(backend)) as store:
        topic = store.topic(NAME)
        produce(topic, 60_000)
        done = topic.upload()
        named = named_when_deleted(backend, store)
        gone = storage_of(topic).trim_remote()
        assert gone == done[: len(gone)]
        kept = done[len(gone) :]
        stays = sum(each.size for each in kept)
        assert stays <= 2.5 * MIB < stays + gone[-1].size
        assert named == []
        start = kept[0].start_offset
        require_gone_before(store, start)
        topic.trim_local()
        require_gone_before(store, start)
        listed = [each for each in backend.list("") if "/data-" in each.key]
        assert len(listed) == 2 * len(kept)
    with Store(settings, store=CloudStore(backend)) as store:
        require_gone_before(store, start)
        produce(store.topic(NAME), 10)
        assert read_all(store.topic(NAME), start) == 60_010 - start


def named_when_deleted(backend: FaultBackend, store: Store) -> list[str]:
    """A list that gets the name of each object deleted while a descriptor still names it."""
    found: list[str] = []

    def look(key: str) -> None:
        name = key.rpartition("/")[2]
        ids = [each.object_id for each in descriptors(store)]
        if name in ids or name in map(sidecar, ids):
            found.append(name)

    backend.hook("delete", look)
    return found


def require_gone_before(store: Store, start: int) -> None:
    topic = store.topic(NAME)
    assert topic.start_offset == start
    for offset in (0, start - 1):
        with pytest.raises(OffsetOutOfRange) as gone:
            next(topic.read(offset))
        assert gone.value.start == start
    check(next(topic.read("earliest")), start)
    check(next(topic.read(start)), start)


def test_remote_retention_by_time_removes_objects_when_they_are_old(tiers: TierSettings) -> None:
    clock = MovedClock()
    settings = tiers.settings(remote_retention=RemoteRetentionSettings(time_minutes=60))
    with Store(settings, clock=clock) as store:
        topic = store.topic(NAME)
        storage = storage_of(topic)
        produce(topic, 20_000)
        topic.upload()
        clock.later_ms = 50 * 60_000
        produce(topic, 20_000)
        topic.upload()
        assert storage.trim_remote() == []
        topic.trim_local()
        clock.later_ms = 70 * 60_000
        assert [each.start_offset for each in storage.trim_remote()] == [0]
        require_gone_before(store, 20_000)
        assert read_all(topic, 20_000) == 20_000
    with Store(settings, clock=clock) as store:
        require_gone_before(store, 20_000)


def test_a_reader_in_an_object_that_retention_removes_is_told(simple: TierSettings) -> None:
    settings = simple.settings(
        uploader=replace(QUIET, max_object_bytes=MIB),
        remote_retention=RemoteRetentionSettings(size_mb=0),
    )
    with Store(settings) as store:
        topic = store.topic(NAME)
        produce(topic, 60_000)
        topic.upload()
        topic.trim_local()
        reader = topic.read(0)
        check(next(reader), 0)
        storage_of(topic).trim_remote()
        with pytest.raises(OffsetOutOfRange) as gone:
            for _ in reader:
                pass
        [newest] = descriptors(store)
        assert gone.value.start == topic.start_offset == newest.start_offset
