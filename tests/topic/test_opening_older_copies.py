"""Older copies of a log, a catalog or both that were put back: no offset is given again."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from forebay.catalog.ownership import Session
from forebay.catalog.sqlite import SqliteKv
from forebay.errors import (
    ForebayError,
    MissingData,
    ObjectMissing,
    ServiceUnavailable,
    TopicFenced,
    TopicOwned,
)
from forebay.files.local import LocalDisk
from forebay.format.marker import decode_marker
from forebay.format.names import NONCE_FILE, MarkerName, object_key
from forebay.limits import LOG_DISTANCE, MIB
from forebay.objects.markers import list_markers
from forebay.objects.memory import MemoryBackend
from forebay.repair.repair import RepairReport, repair
from forebay.settings import MetadataSettings
from forebay.testing import FaultBackend, ObjectFault
from forebay.testing.objects import ObjectOperation
from forebay.topic.opening import TopicClaim
from forebay.topic.resources import StoreResources
from forebay.topic.store import Topic
from forebay.upload.restore import RestoreChoices, restore_topic
from forebay.upload.sweep import sweep
from forebay.wal.identity import LocalLog, read_nonces
from support.storages import storage_of
from support.tiered_stores import TOPIC, Setup

LOG = Path("wal/default/orders")


class Copies:
    """A store whose log and catalog can be copied and put back."""

    def __init__(self, folder: Path, backend: FaultBackend | None = None) -> None:
        self.folder = folder
        self.backend = backend or FaultBackend(MemoryBackend())
        self.file = folder / "catalog.db"
        self.setup = self.opened()

    def opened(self) -> Setup:
        return Setup(self.folder / "data", kv=SqliteKv(self.file), backend=self.backend)

    @contextmanager
    def topic(self) -> Iterator[Topic]:
        with self.setup.topic() as topic:
            yield topic

    def add(self, count: int, *, upload: bool = False) -> range:
        """Opens the topic, appends, and closes it. Returns the offsets."""
        with self.topic() as topic:
            offsets = topic.append_many([b"x"] * count, durability="synced")
            if upload:
                topic.upload()
        return offsets

    def copy(self, name: str) -> None:
        shutil.copytree(self.folder / "data", self.folder / name / "data")
        with closing(sqlite3.connect(self.file)) as now:
            (self.folder / name).mkdir(exist_ok=True)
            with closing(sqlite3.connect(self.folder / name / "catalog.db")) as then:
                now.backup(then)

    def put_back(self, name: str, *, log: bool = False, catalog: bool = False) -> None:
        if log:
            shutil.rmtree(self.folder / "data")
            shutil.copytree(self.folder / name / "data", self.folder / "data")
        if catalog:
            self.setup.kv.close()
            for path in self.folder.glob("catalog.db*"):
                path.unlink()
            shutil.copy(self.folder / name / "catalog.db", self.file)
            self.setup = self.opened()

    def restore(self, *, verify: bool = False, allow_gaps: bool = False) -> None:
        session = Session(self.setup.catalog, MetadataSettings(), self.setup.clock)
        choices = RestoreChoices(verify=verify, allow_gaps=allow_gaps)
        with closing(session):
            restore_topic(self.setup.catalog, self.setup.objects, session, TOPIC, choices)

    def repair(self) -> RepairReport:
        settings = self.setup.settings()
        resources = StoreResources(
            settings, self.setup.clock, catalog=self.setup.catalog, store=self.setup.objects
        ).open()
        return repair(
            settings, apply=True, accept_loss=True, clock=self.setup.clock, resources=resources
        )

    def markers(self) -> list[MarkerName]:
        return [each.name for each in list_markers(self.setup.objects, TOPIC)]


def die(topic: Topic) -> None:
    """Lets the topic's log end as if its process had been killed: it releases nothing."""
    storage_of(topic).fence(TopicFenced("its process was killed"))


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Copies]:
    copies = Copies(tmp_path)
    yield copies
    copies.setup.kv.close()


def test_an_older_copy_of_the_log_gives_no_offset_again(at: Copies) -> None:
    at.add(100)
    at.copy("old")
    assert at.add(100) == range(100, 200)
    at.put_back("old", log=True)
    with pytest.raises(MissingData, match=r"older copy.*ends at offset 100.*offset 199"):
        at.add(1)
    at.repair()
    assert at.add(1).start >= 200
    with at.topic() as topic:
        assert [each.offset for each in topic.read(0, end=100)] == list(range(100))
    record = at.setup.catalog.record(TOPIC)
    assert record is not None
    assert (record.lost, record.unknown) == (((100, 200),), ())


def test_an_older_copy_opens_although_a_verified_object_is_damaged(at: Copies) -> None:
    """What is damaged is recorded as lost first, with the command that the repair names."""
    at.add(100)
    at.add(100, upload=True)
    with at.topic() as topic:
        topic.trim_local()
        assert topic.watermarks().verified == 200
    assert not any((at.folder / "data" / LOG).glob("wal.log")), "the log begins later"
    at.add(10)
    at.copy("old")
    at.add(100, upload=True)
    at.put_back("old", log=True)
    key = object_key(TOPIC, "data-0-199.dnb1")
    raw = bytearray(at.setup.objects.get_object(key, bytes_max=MIB))
    raw[50] ^= 1
    at.setup.objects.put_object(key, bytes(raw))
    with pytest.raises(MissingData, match=r"older copy.*forebay repair --apply --accept-loss"):
        at.add(1)
    assert "`forebay restore --verify --allow-gaps`" in at.repair().left[0].remedy
    at.restore(verify=True, allow_gaps=True)
    assert at.repair().left == []
    assert at.add(1).start >= 310
    with at.topic() as topic:
        assert [each.offset for each in topic.read(200, end=310)] == list(range(200, 310))


def test_two_copies_of_a_log_that_are_opened_in_turn_give_no_offset_twice(at: Copies) -> None:
    at.add(100)
    at.copy("twin")
    with at.topic() as topic:
        assert topic.append_many([b"a"] * 5, durability="synced") == range(100, 105)
        die(topic)
    at.copy("first")
    at.put_back("twin", log=True)
    with pytest.raises(MissingData, match="older copy"):
        at.add(5)
    at.put_back("first", log=True)
    assert at.add(5) == range(105, 110)


def test_an_older_log_and_catalog_beside_newer_objects_are_refused(at: Copies) -> None:
    at.add(100, upload=True)
    at.copy("old")
    at.add(100, upload=True)
    objects = {key: at.setup.objects.head(key).etag for key in at.setup.listed()}
    at.put_back("old", log=True, catalog=True)
    with pytest.raises(MissingData, match=r"older than the objects.*forebay restore"):
        at.add(100, upload=True)
    assert {key: at.setup.objects.head(key).etag for key in at.setup.listed()} == objects
    at.restore()
    assert at.setup.ranges() == [(0, 100), (100, 200)]
    with pytest.raises(MissingData, match="older copy"):
        at.add(1)
    at.repair()
    assert at.add(1).start == 200 + LOG_DISTANCE


@pytest.mark.parametrize("upload", [False, True])
def test_an_older_catalog_under_the_newest_log_is_brought_up_to_date(
    at: Copies, upload: bool
) -> None:
    at.add(100, upload=True)
    at.copy("old")
    at.add(100, upload=upload)
    at.put_back("old", catalog=True)
    with pytest.raises(MissingData, match=r"older.*forebay restore"):
        at.add(1)
    at.restore()
    assert at.add(1) == range(200, 201)


def test_an_object_at_the_tail_tells_an_older_copy_even_without_a_newer_marker(
    at: Copies,
) -> None:
    """Copies made while the process ran have the nonce of the newest opening."""
    with at.topic() as topic:
        topic.append_many([b"x"] * 100, durability="synced")
        topic.upload()
        at.copy("old")
        topic.append_many([b"x"] * 100, durability="synced")
        topic.upload()
        die(topic)
    at.put_back("old", log=True, catalog=True)
    with pytest.raises(MissingData, match=r"data-100-199.*forebay restore"):
        at.add(1)


def test_a_missing_last_object_keeps_a_topic_closed_and_repair_writes_it_again(
    at: Copies,
) -> None:
    at.add(100, upload=True)
    key = object_key(TOPIC, at.setup.descriptors()[-1].object_id)
    before = bytes(at.setup.objects.get_object(key, MIB))
    at.setup.objects.delete_object(key)
    with pytest.raises(MissingData, match=r"does not exist.*forebay restore.*forebay repair"):
        at.add(1)
    at.repair()
    assert bytes(at.setup.objects.get_object(key, MIB)) == before
    assert at.add(1) == range(100, 101)


# ---- markers and nonces ----


def test_every_opening_leaves_a_marker_with_the_nonce_of_log_and_record(at: Copies) -> None:
    with at.topic():
        pass
    at.add(5)
    at.add(0)
    assert at.markers() == [(0, 0), (0, 1), (5, 0)]
    newest = at.setup.objects.get_object(object_key(TOPIC, "begin-5"), MIB)
    marker = decode_marker(bytes(newest), "it")
    record = at.setup.catalog.record(TOPIC)
    assert record is not None
    assert (record.nonce, record.log_id) == (marker.nonce, marker.log_id)
    assert read_nonces(LocalDisk(), at.folder / "data" / LOG) == {marker.nonce}
    assert (record.begin, record.begin_attempt) == (5, 0)


def test_a_log_without_its_nonce_goes_on_if_nothing_is_missing(at: Copies) -> None:
    at.add(5)
    (at.folder / "data" / LOG / NONCE_FILE).write_bytes(b"damaged")
    assert at.add(1) == range(5, 6)


@pytest.mark.parametrize("call", ["list", "head", "put"])
def test_with_the_store_away_a_proven_log_opens_and_uploads_wait_for_the_look(
    at: Copies, call: ObjectOperation
) -> None:
    at.add(10, upload=True)
    at.backend.inject(ObjectFault(call, ServiceUnavailable, times=None))
    with at.topic() as topic:
        assert topic.append(b"x", durability="synced") == 10
        with pytest.raises(ServiceUnavailable):
            topic.upload()
        at.backend.clear()
        topic.upload()
        assert topic.watermarks().uploaded == 11
    assert at.markers()[-1] == (10, 0)


def test_a_look_that_comes_late_stops_an_older_copy(at: Copies) -> None:
    at.add(10, upload=True)
    at.copy("old")
    at.add(10, upload=True)
    at.put_back("old", log=True, catalog=True)
    at.backend.inject(ObjectFault("list", ServiceUnavailable, times=None))
    with suppress(TopicFenced), at.topic() as topic:  # closing tells of the last append
        topic.append(b"x", durability="synced")
        at.backend.clear()
        with pytest.raises(MissingData, match="forebay restore"):
            topic.upload()
        with pytest.raises(ForebayError, match="forebay restore"):
            topic.append(b"x", durability="synced")


def test_a_new_topic_needs_the_store_for_its_marker(at: Copies) -> None:
    at.backend.inject(ObjectFault("put", ServiceUnavailable, times=None))
    with pytest.raises(ServiceUnavailable):
        at.add(1)
    at.backend.clear()
    assert at.add(1) == range(1)
    with pytest.raises(ObjectMissing):
        at.setup.objects.head(object_key(TOPIC, "begin-1"))


def test_an_object_that_was_not_committed_is_not_hidden_by_a_lost_log(at: Copies) -> None:
    at.add(10)
    with at.topic() as topic:
        at.backend.inject(ObjectFault("get_range", ServiceUnavailable, times=None))
        with pytest.raises(ServiceUnavailable):
            topic.upload()
    at.backend.clear()
    shutil.rmtree(at.folder / "data")
    with pytest.raises(MissingData, match=r"data-0-9.*forebay restore"):
        at.add(1)
    at.restore()
    assert at.setup.ranges() == [(0, 10)]


@contextmanager
def away(at: Copies) -> Iterator[None]:
    """The object store does not respond."""
    at.backend.inject(ObjectFault("any", ServiceUnavailable, times=None))
    yield
    at.backend.clear()


def test_openings_without_the_store_do_not_make_an_older_copy_the_newest(at: Copies) -> None:
    at.add(10)
    at.copy("old")
    at.add(5)
    at.put_back("old", log=True, catalog=True)
    for _ in range(3):
        with pytest.raises(MissingData, match="forebay restore"):
            at.add(1)
        with away(at):
            at.add(0)
    with pytest.raises(MissingData, match="forebay restore"):
        at.add(1)


def test_a_marker_is_the_newest_also_after_a_sweep(at: Copies) -> None:
    at.add(10)
    for _ in range(4):
        at.add(0)
    at.copy("old")
    sweep(at.setup.catalog, at.setup.objects, grace_minutes=0, dry_run=False)
    before = at.markers()
    at.add(5)
    assert at.markers()[-1] not in before
    at.put_back("old", log=True, catalog=True)
    with pytest.raises(MissingData, match="forebay restore"):
        at.add(1)


def test_the_markers_of_an_idle_topic_do_not_pile_up(at: Copies) -> None:
    for _ in range(12):
        at.add(0)
    sweep(at.setup.catalog, at.setup.objects, grace_minutes=0, dry_run=False)
    assert len(at.markers()) <= 3
    calls = at.backend.calls()
    at.add(0)
    assert at.backend.calls() - calls <= 8


def test_a_lost_response_to_a_late_marker_fences_nobody(at: Copies) -> None:
    at.add(10, upload=True)
    at.backend.inject(ObjectFault("any", ServiceUnavailable, times=None))
    with at.topic() as topic:
        at.backend.clear()
        at.backend.inject(ObjectFault("put", ServiceUnavailable, when="after"))
        topic.append(b"x", durability="synced")
        with pytest.raises(ServiceUnavailable):
            topic.upload()
        assert topic.append(b"x", durability="synced") == 11
        topic.upload()
        assert topic.watermarks().uploaded == 12


def test_a_new_topic_needs_its_marker_at_the_second_opening_too(at: Copies) -> None:
    at.backend.inject(ObjectFault("put", ServiceUnavailable, times=None))
    for _ in range(2):
        with pytest.raises(ServiceUnavailable):
            at.add(1)
    at.backend.clear()
    assert at.add(1) == range(1)
    assert at.markers()


def test_after_an_opening_without_the_store_the_log_is_the_newest_for_a_restore(
    at: Copies,
) -> None:
    at.add(10, upload=True)
    with away(at):
        at.add(5)
    at.setup.kv.close()
    for path in at.folder.glob("catalog.db*"):
        path.unlink()
    at.setup = at.opened()
    at.restore()
    assert at.add(1) == range(15, 16)


def test_who_loses_a_race_for_a_topic_is_told_of_the_owner(at: Copies, tmp_path: Path) -> None:
    """The winner's marker is in the store before the loser looks there."""
    other = tmp_path / "other"
    other.mkdir()
    opened: list[Topic] = []
    with at.setup.store() as store:

        def win(_key: str) -> None:
            at.backend.clear()
            opened.append(store.topic(str(TOPIC)))

        session = Session(at.setup.catalog, MetadataSettings(), at.setup.clock)
        claim = TopicClaim(session, at.setup.objects, TOPIC, LocalDisk(), other, wait_seconds=0)
        at.backend.hook("list", win)
        with closing(session), pytest.raises(TopicOwned):
            claim.acquire(LocalLog("0" * 32, 0, 0))
        assert opened
