"""Ledgers of Pulsar as objects of a topic: uploaded, read, restored, swept, trimmed, deleted."""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import pytest

from forebay.catalog.catalog import Catalog, LedgerIntent
from forebay.catalog.kv import Put
from forebay.catalog.ledgers import LEDGER_BITS
from forebay.catalog.ownership import Session
from forebay.catalog.records import State
from forebay.catalog.sqlite import SqliteKv
from forebay.errors import (
    CommitRefused,
    CorruptFrame,
    CorruptLog,
    ForebayError,
    ForeignObject,
    InvalidSetting,
    MissingData,
)
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import is_ledger, object_key, parse_ledger
from forebay.format.pulsar.index import LedgerIndex, decode_index, encode_index
from forebay.format.pulsar.topic_ledger import offsets_of_ledger
from forebay.limits import KIB, LEDGER_INDEX_BYTES_MAX, MIB
from forebay.objects.memory import MemoryBackend
from forebay.read.object_stream import ObjectStream
from forebay.read.tiered_log import CatalogSource
from forebay.read.verify import FaultKind, examine_object
from forebay.settings import CloudReaderSettings, RemoteRetentionSettings, UploaderSettings
from forebay.testing.objects import FaultBackend, ObjectFault
from forebay.topic.describe import explain
from forebay.upload.restore import RestoreChoices, restore_topic
from forebay.upload.sweep import Action, sweep
from support.storages import storage_of
from support.tiered_stores import TOPIC, Setup, fill, offsets, require_chain, resources_of

LEDGERS: Final = UploaderSettings(
    enabled=False, format="pulsar", ledger_block_bytes=2 * KIB, index_every_messages=10
)


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path / "data", backend=FaultBackend(MemoryBackend()), uploader=LEDGERS)


def backend_of(setup: Setup) -> FaultBackend:
    assert isinstance(setup.backend, FaultBackend)
    return setup.backend


def index_of(setup: Setup, descriptor: ObjectDescriptor) -> LedgerIndex:
    name = parse_ledger(descriptor.object_id)
    assert name is not None
    key = object_key(TOPIC, name.index_name)
    return decode_index(bytes(setup.objects.get_object(key, LEDGER_INDEX_BYTES_MAX)))


def ledger_files(setup: Setup) -> list[str]:
    return [each for each in setup.listed() if "-ledger-" in each]


def test_a_topic_is_uploaded_as_ledgers_and_read_back_from_any_offset(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 500)
        [first] = topic.upload()
        fill(topic, 100)
        [second] = topic.upload()
        assert topic.watermarks().verified == 600
    assert [each.is_ledger for each in (first, second)] == [True, True]
    shutil.rmtree(setup.data / "wal")
    with setup.topic() as topic:
        for start in (0, 1, 9, 10, 11, 255, 499, 500, 501, 599):
            assert offsets(topic.read(start)) == list(range(start, 600))
    require_chain(setup)


def test_the_index_object_says_whose_ledger_it_is_and_where_its_blocks_begin(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 50)
        topic.upload()
        fill(topic, 70)
        [descriptor] = topic.upload()
    index = index_of(setup, descriptor)
    assert offsets_of_ledger(index) == (50, 120)
    assert index.metadata.managed_ledger == "public/default/persistent/orders"
    assert index.metadata.text("forebay/content-hash") == descriptor.content_hash
    assert index.data_bytes == descriptor.size
    assert index.last_entry_id == 69
    assert all(each.position % LEDGERS.ledger_block_bytes == 0 for each in index.blocks)


def test_a_broker_finds_the_version_of_the_format_in_the_metadata(tmp_path: Path) -> None:
    setup = Setup(tmp_path, uploader=LEDGERS)
    with setup.topic() as topic:
        fill(topic, 10)
        topic.upload()
    files = [key for key in ledger_files(setup) if not key.endswith(".json")]
    found = {key: setup.objects.head(key).metadata for key in files}
    assert len(found) == 2
    for key, metadata in found.items():
        assert metadata["s3managedledgeroffloaderformatversion"] == "1"
        assert metadata["role"] == ("index" if key.endswith("-index") else "data")
        assert metadata["managedledgername"] == "public/default/persistent/orders"


def test_a_ledger_holds_whole_segments_and_a_forced_one_ends_with_the_log(setup: Setup) -> None:
    setup.uploading(max_object_bytes=10_000)
    with setup.topic() as topic:
        fill(topic, 300)
        ends = [each.end_offset for each in topic.segments()]
        found = topic.upload()
        assert len(found) > 3
        assert {each.next_offset for each in found} <= {*ends, 300}
        assert all(each.sealed for each in topic.segments())
    assert setup.ranges() == [(each.start_offset, each.next_offset) for each in found]


def test_a_segment_that_is_larger_than_an_object_may_be_is_cut(setup: Setup) -> None:
    setup.uploading(max_object_messages=7)
    with setup.topic() as topic:
        fill(topic, 30)
        sizes = [each.count for each in topic.upload()]
    assert max(sizes) == 7
    assert sum(sizes) == 30
    require_chain(setup)


def test_the_open_segment_is_left_to_a_later_cycle(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 100)
        sealed = max(each.end_offset for each in topic.segments() if each.sealed)
        assert 0 < sealed < 100
        storage_of(topic).upload_due()
        assert topic.watermarks().uploaded == sealed
        storage_of(topic).upload_due()
        assert topic.watermarks().uploaded == sealed


def test_a_message_that_waits_to_be_uploaded_seals_its_segment(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 3)
        assert topic.append(b"0000000003", durability="uploaded") == 3
        assert topic.watermarks().uploaded == 4
    [descriptor] = setup.descriptors()
    assert descriptor.count == 4


def test_ids_ascend_from_the_number_of_the_topic_and_every_attempt_has_a_name_of_its_own(
    setup: Setup,
) -> None:
    with setup.store() as store:
        for name in ("/default/orders", "/default/bills"):
            topic = store.topic(name)
            for _ in range(3):
                fill(topic, 5)
                topic.upload()
    numbers = []
    for name in ("orders", "bills"):
        found = setup.descriptors(TOPIC._replace(topic=name))
        ids = [parse_ledger(each.object_id) for each in found]
        assert [each.ledger_id & (2**LEDGER_BITS - 1) for each in ids if each] == [0, 1, 2]
        assert len({each.uid for each in ids if each}) == 3
        numbers.append({each.ledger_id >> LEDGER_BITS for each in ids if each})
    assert numbers == [{1}, {2}]


def test_a_message_that_fits_into_no_block_makes_the_blocks_of_its_ledger_larger(
    setup: Setup,
) -> None:
    with setup.topic() as topic:
        fill(topic, 5)
        topic.append(b"0000000005" + bytes(9 * KIB), durability="synced")
        fill(topic, 5)
        [descriptor] = topic.upload()
        assert descriptor.block_bytes == 16 * KIB
    shutil.rmtree(setup.data / "wal")
    with setup.topic() as topic:
        assert offsets(topic.read(0)) == list(range(11))


@pytest.mark.parametrize(
    "changes", [{"compression": "zstd"}, {"rolling": True}, {"ledger_block_bytes": 10}]
)
def test_what_ledgers_cannot_be_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidSetting):
        replace(LEDGERS, **changes)  # type: ignore[arg-type]


def test_a_topic_may_change_its_format_and_its_history_is_mixed(setup: Setup) -> None:
    setup.uploading(format="dnb1")
    with setup.topic() as topic:
        for form in ("dnb1", "pulsar", "dnb1", "pulsar"):
            topic.configure(format=form)
            fill(topic, 40)
            topic.upload()
        topic.configure(format="dnb1", compression="zstd")
        fill(topic, 40)
        topic.upload()
        with pytest.raises(InvalidSetting, match="not compressed"):
            topic.configure(format="pulsar")
    assert [is_ledger(each.object_id) for each in setup.descriptors()] == [
        False,
        True,
        False,
        True,
        False,
    ]
    shutil.rmtree(setup.data / "wal")
    with setup.topic() as topic:
        for start in range(0, 200, 19):
            assert offsets(topic.read(start)) == list(range(start, 200))
        assert offsets(topic.read(35, end=165)) == list(range(35, 165))


# -- failures leave nothing behind ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "times"),
    [
        (ObjectFault("open_writer", key="-ledger-"), 1),
        (ObjectFault("write", key="-ledger-"), 1),
        (ObjectFault("complete", key="-ledger-"), 1),
        (ObjectFault("complete", key="-ledger-", when="after"), 1),
        (ObjectFault("put", key="-index"), 1),
        (ObjectFault("put", key="-index", when="after"), 1),
        (ObjectFault("get_range", key="-ledger-", times=None), 1),
        (ObjectFault("put", key=".json"), 1),
    ],
    ids=["open", "part", "complete", "response", "index", "index response", "read back", "sidecar"],
)
def test_a_failure_at_any_step_of_an_upload_leaves_nothing_behind(
    setup: Setup, fault: ObjectFault, times: int
) -> None:
    with setup.topic() as topic:
        fill(topic, 50)
        for _ in range(times):
            backend_of(setup).inject(fault)
            with pytest.raises(ForebayError):
                topic.upload()
            backend_of(setup).clear()
        assert ledger_files(setup) == []
        assert [each for each, _ in setup.catalog.lives(TOPIC) if is_ledger(each)] == []
        assert len(topic.upload()) == 1
        assert len(ledger_files(setup)) == 3
        assert offsets(topic.read(0)) == list(range(50))


def test_an_attempt_of_a_process_that_died_is_removed_by_the_next_one(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 50)
        epoch = storage_of(topic).epoch
        assert epoch is not None
        topic.rotate()
        died = setup.catalog.intend_ledger(TOPIC, epoch, (0, 50)).intent
        name = parse_ledger(died.object_id)
        assert name is not None
        for file in (name.data_name, name.index_name, name.data_name + ".json"):
            setup.objects.put_object(object_key(TOPIC, file), b"half of it")
        [descriptor] = topic.upload()
        again = parse_ledger(descriptor.object_id)
        assert again is not None
        assert again.ledger_id == name.ledger_id, "a retry of the same offsets keeps the id"
        assert again.uid != name.uid
    assert not [each for each in setup.listed() if name.uid in each]
    life = setup.catalog.life(TOPIC, died.object_id)
    assert life is not None
    assert life.state is State.GONE
    assert list(setup.catalog.ledgers(TOPIC).attempts()) == []


def test_of_two_attempts_only_the_later_one_can_be_committed(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 20)
        topic.rotate()
        storage = storage_of(topic)
        uploader, epoch = storage.uploader, storage.epoch
        assert uploader is not None
        assert epoch is not None
        once: list[LedgerIntent] = []

        def overtake(_key: str) -> None:
            if not once:
                once.append(setup.catalog.intend_ledger(TOPIC, epoch, (0, 20)))

        backend_of(setup).hook("complete", overtake, when="after")
        with pytest.raises(CommitRefused, match="another attempt"):
            topic.upload()
        backend_of(setup).clear()
        assert ledger_files(setup) == []
        [descriptor] = topic.upload()
        assert descriptor.object_id != once[0].intent.object_id
    require_chain(setup)


# -- verification, repair, sweep, restore ---------------------------------------------------------


def examined(setup: Setup, descriptor: ObjectDescriptor) -> FaultKind | None:
    fault = examine_object(setup.objects, None, CloudReaderSettings(), TOPIC, descriptor).fault
    return None if fault is None else fault.kind


def test_verification_reads_entries_the_block_map_and_the_index_of_positions(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 60)
        [descriptor] = topic.upload()
    assert examined(setup, descriptor) is None
    entries = descriptor.offset_index
    assert entries is not None
    assert len(entries) == 3
    wrong = replace(descriptor, offset_index=(entries[0], (entries[1][0], entries[1][1] + 1)))
    assert examined(setup, wrong) is FaultKind.INDEX
    key = object_key(TOPIC, descriptor.object_id)
    good = bytes(setup.objects.get_object(key, MIB))
    for at in (0, 140, 200, len(good) // 2, len(good) - 1):
        damaged = bytearray(good)
        damaged[at] ^= 0x40
        setup.objects.put_object(key, bytes(damaged))
        assert examined(setup, descriptor) is FaultKind.CORRUPT
    setup.objects.put_object(key, good)
    setup.objects.delete_object(key + "-index")
    assert examined(setup, descriptor) is FaultKind.CORRUPT


def test_a_damaged_entry_is_an_error_with_its_place_and_a_lenient_reader_goes_on(
    setup: Setup,
) -> None:
    with setup.topic() as topic:
        fill(topic, 60)
        [descriptor] = topic.upload()
    shutil.rmtree(setup.data / "wal")
    key = object_key(TOPIC, descriptor.object_id)
    data = bytearray(setup.objects.get_object(key, MIB))
    data[300] ^= 0xFF
    setup.objects.put_object(key, bytes(data))
    setup.catalog.replace_descriptor(  # its etag is another one: let the content be the same
        TOPIC, descriptor, replace(descriptor, etag=setup.objects.head(key).etag)
    )
    with setup.topic() as topic, pytest.raises(CorruptFrame) as caught:
        offsets(topic.read(0))
    assert caught.value.offset is not None
    bad = caught.value.offset
    with setup.store() as store, store.view() as view:
        resources = resources_of(store)
        source = CatalogSource(resources.catalog, TOPIC)
        lenient = CloudReaderSettings(lenient=True)
        assert view is not None
        with ObjectStream(TOPIC, setup.objects, source, None, lenient, 0) as stream:
            found = [offset for frames in iter(stream.next, None) for offset in frames.offsets]
    assert found == [offset for offset in range(60) if offset != bad]


def test_a_restore_needs_nothing_but_the_bucket(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 100)
        topic.upload()
        topic.configure(format="dnb1")
        fill(topic, 50)
        topic.upload()
        topic.configure(format="pulsar")
        fill(topic, 30)
        topic.upload()
    before = setup.descriptors()
    for sidecars in (True, False):
        if not sidecars:
            for key in setup.listed():
                if key.endswith(".json"):
                    setup.objects.delete_object(key)
        shutil.rmtree(setup.data, ignore_errors=True)
        setup.kv = SqliteKv(None)
        setup.catalog = Catalog(setup.kv, clock=setup.clock)
        restored(setup)
        after = setup.descriptors()
        assert [(each.object_id, each.start_offset, each.end_offset) for each in after] == [
            (each.object_id, each.start_offset, each.end_offset) for each in before
        ]
        assert [each.content_hash for each in after] == [each.content_hash for each in before]
        assert [each.ledger for each in after] == [each.ledger for each in before]
        with setup.topic() as topic:
            assert offsets(topic.read(0, end=180)) == list(range(180))
            topic.configure(format="pulsar")
            topic.append(b"one more", durability="uploaded")
        last = setup.descriptors()[-1].ledger_number("id")
        ids = [each.ledger_number("id") or 0 for each in before]
        assert last is not None
        assert last > max(ids), "an id is never given twice"
        setup.catalog.kv.close()
        break_after = [each for each in setup.listed() if str(last) in each]
        for key in break_after:
            setup.objects.delete_object(key)


def restored(setup: Setup) -> None:
    session = Session(setup.catalog, setup.settings().metadata, setup.clock)
    try:
        choices = RestoreChoices(assume_nothing_lost=True)
        restore_topic(setup.catalog, setup.objects, session, TOPIC, choices)
    finally:
        session.close()


def test_a_sweep_keeps_ledgers_that_count_and_removes_what_nobody_commits(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 50)
        [kept] = topic.upload()
    name = parse_ledger(kept.object_id)
    assert name is not None
    stray = name._replace(uid="00000000-0000-4000-8000-000000000000")
    setup.objects.put_object(object_key(TOPIC, stray.data_name), b"no index object came after it")
    copied = name._replace(uid="11111111-0000-4000-8000-000000000000")
    for file in (name.data_name, name.index_name):
        data = bytes(setup.objects.get_object(object_key(TOPIC, file), MIB))
        target = copied.index_name if file == name.index_name else copied.data_name
        setup.objects.put_object(object_key(TOPIC, target), data)
    report = sweep(setup.catalog, setup.objects, grace_minutes=0, dry_run=False)
    assert report.errors == 0
    assert report.committed == 1
    removed = {item.key.rpartition("/")[2] for item in report.items}
    assert removed == {stray.data_name, copied.data_name}
    assert {item.action for item in report.items} == {Action.REMOVED}
    assert len(ledger_files(setup)) == 3
    assert examined(setup, kept) is None


def test_local_segments_go_after_the_lag_and_remote_retention_removes_both_files(
    setup: Setup,
) -> None:
    setup.deleter = replace(setup.deleter, deletion_lag_minutes=240)
    setup.remote = RemoteRetentionSettings(size_mb=0)
    with setup.topic() as topic:
        for _ in range(3):
            fill(topic, 50)
            topic.upload()
        assert topic.trim_local() == []
        setup.clock.advance(239 * 60)
        assert topic.trim_local() == []
        setup.clock.advance(120)
        assert topic.trim_local() != []
        gone = storage_of(topic).trim_remote()
        assert [each.start_offset for each in gone] == [0, 50]
        assert offsets(topic.read(100)) == list(range(100, 150))
    assert len(ledger_files(setup)) == 3


def test_deleting_a_topic_removes_its_ledgers_and_a_new_one_gets_another_number(
    setup: Setup,
) -> None:
    with setup.store() as store:
        topic = store.topic(str(TOPIC))
        fill(topic, 50)
        [before] = topic.upload()
        store.delete(str(TOPIC))
        assert ledger_files(setup) == []
        topic = store.topic(str(TOPIC))
        topic.append(b"again")
        [after] = topic.upload()
    numbers = [(each.ledger_number("id") or 0) >> LEDGER_BITS for each in (before, after)]
    assert numbers == [1, 2]


def test_explain_finds_an_entry_in_its_ledger(setup: Setup) -> None:
    with setup.store() as store:
        topic = store.topic(str(TOPIC))
        fill(topic, 60)
        [descriptor] = topic.upload()
        with store.view() as view:
            found = explain(view.topic(str(TOPIC)), 33)
    place = next(each for each in found.places if each.tier == "object")
    assert place.name.endswith(descriptor.object_id)
    data = bytes(setup.objects.get_object(object_key(TOPIC, descriptor.object_id), MIB))
    assert int.from_bytes(data[place.position + 4 : place.position + 12]) == 33


def test_a_newer_ledger_shows_that_the_catalog_is_an_older_copy(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 50)
        topic.upload()
        older = setup.kv.range("/", "0", limit=1000)
        fill(topic, 50)
        topic.upload()
    kv = SqliteKv(None)
    kv.commit([], [Put(entry.key, entry.value) for entry in older if "/owner" not in entry.key])
    setup.kv, setup.catalog = kv, Catalog(kv, clock=setup.clock)
    shutil.rmtree(setup.data / "wal")
    with pytest.raises(MissingData, match="never known the ledger"), setup.topic():
        pass
    restored(setup)
    with setup.topic() as topic:
        assert offsets(topic.read(0, end=100)) == list(range(100))


@pytest.mark.parametrize("index", ["cut off", "of a broker"])
def test_a_sweep_keeps_a_ledger_that_it_does_not_know_and_whose_index_it_cannot_read(
    setup: Setup, index: str
) -> None:
    with setup.topic() as topic:
        fill(topic, 50)
        [kept] = topic.upload()
    name = parse_ledger(kept.object_id)
    assert name is not None
    other = name._replace(uid="11111111-0000-4000-8000-000000000000")
    data = bytes(setup.objects.get_object(object_key(TOPIC, name.data_name), MIB))
    raw = bytes(setup.objects.get_object(object_key(TOPIC, name.index_name), MIB))
    known = decode_index(raw)
    theirs = encode_index(replace(known, metadata=replace(known.metadata, custom=())))
    setup.objects.put_object(object_key(TOPIC, other.data_name), data)
    damaged = raw[:-1] if index == "cut off" else theirs
    setup.objects.put_object(object_key(TOPIC, other.index_name), damaged)
    [item] = sweep(setup.catalog, setup.objects, grace_minutes=0, dry_run=False).items
    assert item.key == object_key(TOPIC, other.data_name)
    assert (item.action, "does not say which messages" in item.reason) == (Action.KEPT, True)
    assert len(ledger_files(setup)) == 5


def test_a_restore_takes_no_ledger_by_the_index_of_another_one(setup: Setup) -> None:
    """The index says at which offset a ledger begins: messages would get wrong offsets."""
    for _ in range(2):
        with setup.topic() as topic:
            fill(topic, 50)
            topic.upload()
    names = [parse_ledger(each.object_id) for each in setup.descriptors()]
    keys = [object_key(TOPIC, name.index_name) for name in names if name is not None]
    first, second = (bytes(setup.objects.get_object(key, MIB)) for key in keys)
    for key, raw in zip(keys, (second, first), strict=True):
        setup.objects.put_object(key, raw)
    for key in setup.listed():
        if key.endswith(".json"):
            setup.objects.delete_object(key)
    shutil.rmtree(setup.data)
    setup.kv = SqliteKv(None)
    setup.catalog = Catalog(setup.kv, clock=setup.clock)
    with pytest.raises(CorruptLog, match="no undamaged object holds the offsets 0 to") as raised:
        restored(setup)
    assert isinstance(raised.value.__cause__, ForeignObject)
    assert "is not the ledger of its index object" in str(raised.value.__cause__)


def test_the_row_of_an_attempt_that_is_gone_is_forgotten_after_a_day(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 20)
        topic.rotate()
        epoch = storage_of(topic).epoch
        assert epoch is not None
        died = setup.catalog.intend_ledger(TOPIC, epoch, (0, 20)).intent
        topic.upload()
    for hours, there in ((23, True), (2, False)):
        setup.clock.advance(hours * 3600)
        sweep(setup.catalog, setup.objects, grace_minutes=1, dry_run=False, clock=setup.clock)
        assert (setup.catalog.life(TOPIC, died.object_id) is not None) is there
    require_chain(setup)


def test_messages_in_ledgers_are_found_by_their_time(setup: Setup) -> None:
    with setup.topic() as topic:
        times = []
        for _ in range(3):
            fill(topic, 30)
            times.append(setup.clock.now_ms())
            setup.clock.advance(60)
            topic.upload()
    shutil.rmtree(setup.data / "wal")
    with setup.topic() as topic:
        for number, time_ms in enumerate(times):
            at = datetime.fromtimestamp(time_ms / 1000, UTC)
            assert topic.offset_at(at) == number * 30
            assert topic.offset_at(at + timedelta(seconds=1)) == (number + 1) * 30


def test_a_store_seals_the_logs_of_the_topics_that_are_ledgers(setup: Setup) -> None:
    with setup.store() as store:
        ledgers, others = store.topic("/default/orders"), store.topic("/default/others")
        others.configure(format="dnb1")
        for topic in (ledgers, others):
            fill(topic, 3)
        store.seal_for_ledgers(["others"])
        assert [each.sealed for each in ledgers.segments()] == [False]
        store.seal_for_ledgers()
        assert [each.sealed for each in ledgers.segments()] == [True]
        assert [each.sealed for each in others.segments()] == [False]
