"""The descriptors of a topic from its objects alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from forebay.catalog.adopt import is_restoring
from forebay.catalog.records import State, TopicRecord
from forebay.errors import (
    CommitRefused,
    CorruptFrame,
    CorruptLog,
    ForeignObject,
    MissingData,
    TopicOwned,
)
from forebay.format.descriptor import encode_descriptor
from forebay.format.frame import encode_frame, scan
from forebay.format.names import object_key, pending_object, sidecar
from forebay.limits import LOG_DISTANCE, MIB
from forebay.topic.opening import settle
from forebay.upload.inventory import CHUNK_BYTES
from forebay.wal.identity import LocalLog
from support.danube_messages import SAMPLE, encoded, fixed
from support.reservoirs import TOPIC, Reservoir, frames, lay, plain, record_of, restored


@pytest.fixture
def at() -> Iterator[Reservoir]:
    reservoir = Reservoir()
    yield reservoir
    reservoir.require_chain_whole()
    reservoir.close()


# ---- what is rebuilt ----


@pytest.mark.parametrize("sidecars", [True, False])
def test_the_lost_catalog_is_rebuilt_from_the_bucket(at: Reservoir, sidecars: bool) -> None:
    done = at.fill(at.own(), 0, 10, 25, 30, 1030)
    if not sidecars:
        for each in done:
            at.backend.delete_object(object_key(TOPIC, sidecar(each.object_id)))
    at.lose_catalog()
    report = restored(at)
    assert list(at.catalog.get_object_descriptors(TOPIC)) == done
    assert at.catalog.get_current_pointer(TOPIC) == 30
    assert [life.state for _, life in at.catalog.lives(TOPIC)] == [State.COMMITTED] * 4
    assert (report.objects_found, report.adopted, report.messages) == (4, 4, 1030)
    assert (report.by_sidecar, report.read_whole) == ((4, 0) if sidecars else (0, 4))
    assert at.catalog.owner(TOPIC) is None, "the topic is free"


@pytest.mark.parametrize("verify", [True, False])
def test_an_object_whose_hash_is_not_that_of_its_sidecar_is_not_adopted(
    at: Reservoir, verify: bool
) -> None:
    """A foreign object of the same range and size: its etag makes the restore read it."""
    mine = at.fill(at.own(), 0, 10, 20)[1]
    foreign = [encode_frame(offset, bytes(each)[::-1]) for offset, each in scan(frames(10, 10))]
    at.store.put_object(object_key(TOPIC, mine.object_id), b"".join(foreign))
    at.lose_catalog()
    with pytest.raises(CorruptLog) as raised:
        restored(at, verify=verify)
    assert isinstance(raised.value.__cause__, ForeignObject)
    assert str(mine.content_hash) in str(raised.value.__cause__)
    at.store.delete_object(object_key(TOPIC, sidecar(mine.object_id)))
    restored(at, verify=verify)
    found = list(at.catalog.get_object_descriptors(TOPIC))[1]
    assert found.content_hash not in (None, mine.content_hash)


def test_with_sidecars_next_to_nothing_is_read(at: Reservoir) -> None:
    for start in range(0, 3000, 1000):
        at.write(f"data-{start}-{start + 999}.dnb1", frames(start, 1000, size=1000))
    at.backend.bytes_read = 0
    report = restored(at)
    total = sum(size for _, size, _ in at.listing())
    assert report.bytes_read == at.backend.bytes_read < total / 1000


def test_appending_goes_on_far_behind_the_objects_and_says_what_is_unknown(at: Reservoir) -> None:
    lay(at, 5, 10, 20)
    report = restored(at)
    record = record_of(at)
    assert plain(record) == TopicRecord(
        start_offset=5, tail=20, verified=5, assigned=20, reserved=20 + LOG_DISTANCE, log_id=None
    )
    assert (report.start_offset, report.tail, report.next_offset) == (5, 20, 20 + LOG_DISTANCE)
    assert (report.lost, report.unknown) == (None, (20, 20 + LOG_DISTANCE))
    taken = settle(record, LocalLog("new", 0, 0), "fresh")
    assert (taken.tail, taken.lost) == (20 + LOG_DISTANCE, ())
    assert taken.unknown == ((20, 20 + LOG_DISTANCE),)


def test_who_knows_that_nothing_is_lost_goes_on_without_a_hole(at: Reservoir) -> None:
    lay(at, 0, 10)
    report = restored(at, assume_nothing_lost=True)
    assert (report.next_offset, report.lost, report.unknown) == (10, None, None)
    taken = settle(record_of(at), LocalLog("new", 0, 0), "fresh")
    assert (taken.tail, taken.lost) == (10, ())


def test_the_chain_grows_on_after_a_restore(at: Reservoir) -> None:
    lay(at, 0, 10)
    restored(at, assume_nothing_lost=True)
    at.upload(at.own(), 10, 19)
    assert at.chain() == ["data-0-9.dnb1", "data-10-19.dnb1"]


def test_verifying_reads_everything_and_moves_the_watermark(at: Reservoir) -> None:
    lay(at, 0, 10, 20)
    report = restored(at, verify=True)
    assert (report.read_whole, report.by_sidecar) == (2, 0)
    assert record_of(at).verified == 20


def test_verifying_reads_again_what_was_verified_before(at: Reservoir) -> None:
    lay(at, 0, 10, 20)
    restored(at, verify=True)
    key = object_key(TOPIC, "data-0-9.dnb1")
    raw = bytearray(at.store.get_object(key, bytes_max=MIB))
    raw[-1] ^= 1
    at.store.put_object(key, bytes(raw))
    with pytest.raises(CorruptLog):
        restored(at, verify=True)
    restored(at, verify=True, allow_gaps=True)
    assert record_of(at).holes == ((0, 10),)


def test_an_object_larger_than_a_chunk_gets_the_same_index(at: Reservoir) -> None:
    data = frames(0, 5000, size=1000)
    assert len(data) > CHUNK_BYTES
    written = at.write("data-0-4999.dnb1", data, with_sidecar=False)
    restored(at)
    assert list(at.catalog.get_object_descriptors(TOPIC)) == [written]


def test_objects_that_danube_wrote_are_restored(at: Reservoir) -> None:
    data = b"".join(
        encode_frame(offset, encoded(replace(SAMPLE, request_id=offset), fixed, 0))
        for offset in range(7)
    )
    at.write("data-0-6.dnb1", data, with_sidecar=False)
    at.write("data-7-pending.dnb1", frames(7, 1), with_sidecar=False)
    report = restored(at)
    assert (report.messages, report.pending, at.chain()) == (7, 1, ["data-0-6.dnb1"])


def test_pending_and_unknown_files_are_ignored(at: Reservoir) -> None:
    lay(at, 0, 10)
    at.write(pending_object(10, "ab"), frames(10, 3), with_sidecar=False)
    at.store.put_object(object_key(TOPIC, "readme"), b"?")
    report = restored(at)
    assert (report.objects_found, report.pending, report.unknown_files) == (1, 1, 1)
    assert record_of(at).tail == 10


# ---- sidecars ----


@pytest.mark.parametrize(
    "damage",
    [
        {"object_id": "data-0-9-1.dnb1"},
        {"end_offset": 8},
        {"size": 1},
        {"etag": "other"},
        {"completed": False},
        {"offset_index": None},
    ],
)
def test_a_sidecar_that_contradicts_its_object_is_not_trusted(
    at: Reservoir, damage: dict[str, object]
) -> None:
    written = at.write("data-0-9.dnb1", frames(0, 10))
    wrong = replace(written, **damage)  # type: ignore[arg-type] # one field at a time
    if "size" in damage:
        wrong = replace(wrong, offset_index=((0, 0),))
    at.store.put_object(object_key(TOPIC, "data-0-9.dnb1.json"), encode_descriptor(wrong))
    report = restored(at)
    assert (report.by_sidecar, report.read_whole) == (0, 1)
    assert list(at.catalog.get_object_descriptors(TOPIC)) == [written]


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"x" * (600 * 1024)])
def test_a_damaged_sidecar_does_no_harm(at: Reservoir, data: bytes) -> None:
    written = at.write("data-0-9.dnb1", frames(0, 10))
    at.store.put_object(object_key(TOPIC, "data-0-9.dnb1.json"), data)
    assert restored(at).read_whole == 1
    assert list(at.catalog.get_object_descriptors(TOPIC)) == [written]


# ---- gaps, overlaps, damage ----


def test_a_gap_is_refused_with_its_exact_ranges_and_nothing_is_written(at: Reservoir) -> None:
    lay(at, 0, 10)
    lay(at, 15, 20)
    lay(at, 30, 40)
    with pytest.raises(MissingData, match="10 to 14, 20 to 29"):
        restored(at)
    assert at.entries() == []


def test_allowed_gaps_are_recorded_as_lost(at: Reservoir) -> None:
    lay(at, 0, 10)
    lay(at, 15, 20)
    report = restored(at, allow_gaps=True)
    assert report.gaps == [(10, 15)]
    assert record_of(at).lost == ((10, 15),)
    assert [each.start_offset for each in at.catalog.get_object_descriptors(TOPIC)] == [0, 15]


@pytest.mark.parametrize("finished", [True, False])
def test_after_a_compaction_the_large_object_is_taken(at: Reservoir, finished: bool) -> None:
    lay(at, 0, 10, 20, 30)
    at.write("data-0-19.dnb1", frames(0, 20))
    if finished:
        at.store.delete_object(object_key(TOPIC, "data-0-9.dnb1"))
    report = restored(at)
    assert at.chain() == ["data-0-19.dnb1", "data-20-29.dnb1"]
    small = ["data-10-19.dnb1"] if finished else ["data-0-9.dnb1", "data-10-19.dnb1"]
    assert sorted(report.superseded) == small


def test_an_orphan_that_leads_nowhere_is_not_taken(at: Reservoir) -> None:
    lay(at, 0, 10, 20)
    at.write("data-0-14.dnb1", frames(0, 15))
    report = restored(at)
    assert at.chain() == ["data-0-9.dnb1", "data-10-19.dnb1"]
    assert report.superseded == ["data-0-14.dnb1"]


def test_of_two_names_for_one_range_a_sound_one_is_taken(at: Reservoir) -> None:
    at.write("data-0-9.dnb1", frames(0, 10), with_sidecar=False)
    at.store.put_object(object_key(TOPIC, "data-0-9-1.dnb1"), frames(0, 9))
    report = restored(at)
    assert at.chain() == ["data-0-9.dnb1"]
    assert (report.damaged, report.superseded) == (["data-0-9-1.dnb1"], [])


def test_a_name_with_a_number_is_taken_where_it_is_the_only_one(at: Reservoir) -> None:
    lay(at, 0, 10)
    at.write("data-10-19-3.dnb1", frames(10, 10))
    restored(at)
    assert at.chain() == ["data-0-9.dnb1", "data-10-19-3.dnb1"]


def test_around_a_damaged_object_the_small_ones_are_taken(at: Reservoir) -> None:
    lay(at, 0, 10, 20, 30)
    at.store.put_object(object_key(TOPIC, "data-10-29.dnb1"), b"?" * 500)
    report = restored(at)
    assert at.chain() == ["data-0-9.dnb1", "data-10-19.dnb1", "data-20-29.dnb1"]
    assert report.damaged == ["data-10-29.dnb1"]
    assert (report.adopted, report.messages, report.gaps) == (3, 30, [])


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(frames(10, 9), id="a frame too few"),
        pytest.param(frames(10, 11), id="a frame too many"),
        pytest.param(frames(10, 10)[:-1], id="torn"),
        pytest.param(frames(10, 10)[:-1] + b"!", id="a wrong byte"),
        pytest.param(frames(11, 10), id="other offsets"),
        pytest.param(frames(10, 10) + bytes(5), id="bytes too many"),
        pytest.param(b"", id="empty"),
    ],
)
def test_damage_that_nothing_makes_good_is_an_error(at: Reservoir, data: bytes) -> None:
    lay(at, 0, 10)
    lay(at, 20, 30)
    at.store.put_object(object_key(TOPIC, "data-10-19.dnb1"), data)
    with pytest.raises(CorruptLog, match="10 to 19") as caught:
        restored(at)
    assert isinstance(caught.value.__cause__, CorruptLog)
    assert at.chain() == ["data-0-9.dnb1"], "what is before the damage"
    assert is_restoring(record_of(at).log_id)
    taken = LocalLog("new", 0, 0)
    with pytest.raises(MissingData, match="restore"):
        settle(record_of(at), taken, "fresh")


def test_damage_is_said_with_its_position(at: Reservoir) -> None:
    data = bytearray(frames(0, 10))
    data[-1] ^= 1
    at.store.put_object(object_key(TOPIC, "data-0-9.dnb1"), bytes(data))
    with pytest.raises(CorruptLog) as caught:
        restored(at)
    cause = caught.value.__cause__
    assert isinstance(cause, CorruptFrame)
    assert (cause.offset, cause.position) == (9, len(data) * 9 // 10)


def test_a_damaged_end_is_lost_if_gaps_are_allowed_and_the_topic_goes_on_after_it(
    at: Reservoir,
) -> None:
    lay(at, 0, 10)
    at.store.put_object(object_key(TOPIC, "data-10-19.dnb1"), b"?")
    report = restored(at, allow_gaps=True, assume_nothing_lost=True)
    assert (report.tail, report.next_offset, report.gaps) == (20, 20, [(10, 20)])
    assert (record_of(at).lost, record_of(at).reserved) == (((10, 20),), 20)
    taken = settle(record_of(at), LocalLog("new", 0, 0), "fresh")
    assert (taken.tail, taken.unknown) == (20, ())
    at.upload(at.own(), 20, 29)
    assert at.chain() == ["data-0-9.dnb1", "data-20-29.dnb1"]


def test_a_damaged_object_keeps_its_name_so_that_no_upload_uses_it(at: Reservoir) -> None:
    lay(at, 0, 10)
    at.store.put_object(object_key(TOPIC, "data-10-19.dnb1"), b"?")
    restored(at, local=LocalLog("log", 0, 20))
    assert record_of(at).tail == 10, "the local log holds the messages"
    life = at.catalog.life(TOPIC, "data-10-19.dnb1")
    assert life is not None
    assert life.state is State.GONE
    at.upload(at.own(), 10, 19)
    assert at.chain() == ["data-0-9.dnb1", "data-10-19-1.dnb1"]


def test_a_topic_without_objects_cannot_be_restored(at: Reservoir) -> None:
    with pytest.raises(MissingData):
        restored(at)
    assert at.entries() == []


# ---- with a catalog that knows something ----


def test_a_second_restore_changes_nothing(at: Reservoir) -> None:
    lay(at, 0, 10, 20)
    restored(at)
    before = at.entries()
    report = restored(at)
    assert (at.entries(), report.known, report.adopted) == (before, 2, 0)
    assert report.next_offset == 20 + LOG_DISTANCE


def test_a_catalog_that_is_behind_gets_what_it_lacks_and_keeps_its_log(at: Reservoir) -> None:
    at.fill(at.own(), 0, 10)
    lay(at, 10, 20, 30)
    at.end_sessions()
    report = restored(at)
    assert (report.known, report.adopted) == (1, 2)
    assert at.chain() == ["data-0-9.dnb1", "data-10-19.dnb1", "data-20-29.dnb1"]
    record = record_of(at)
    assert (record.log_id, record.tail) == ("log", 30)
    assert record.reserved >= 30


def test_a_catalog_that_knows_other_objects_is_left_alone(at: Reservoir) -> None:
    at.fill(at.own(), 0, 10, 20)
    at.end_sessions()
    at.store.put_object(object_key(TOPIC, "data-0-9.dnb1"), frames(0, 9))
    before = at.entries()
    with pytest.raises(CommitRefused, match=r"data-0-9\.dnb1"):
        restored(at)
    assert at.entries() == before
    at.write("data-0-9.dnb1", frames(0, 10))


def test_a_topic_with_a_living_owner_is_not_restored(at: Reservoir) -> None:
    at.fill(at.own(), 0, 10)
    lay(at, 10, 20)
    with pytest.raises(TopicOwned):
        restored(at)
    assert at.chain() == ["data-0-9.dnb1"]


@pytest.mark.parametrize("sidecars", [True, False])
def test_a_dry_run_changes_nothing_and_tells_the_same(at: Reservoir, sidecars: bool) -> None:
    lay(at, 0, 10, 20, 30, sidecars=sidecars)
    at.write("data-0-19.dnb1", frames(0, 20), with_sidecar=sidecars)
    before = at.entries(), at.listing()
    dry = restored(at, dry_run=True)
    assert (at.entries(), at.listing()) == before
    wet = restored(at)
    assert replace(dry, dry_run=False) == wet
