"""Restores over a catalog that lost a part, or that is an older copy; begin markers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from forebay.catalog.adopt import ADOPTED_MAX, is_restoring
from forebay.catalog.kv import Put, Remove
from forebay.catalog.records import encode_record
from forebay.errors import CommitRefused, MissingData, ServiceUnavailable, UsageError
from forebay.format.descriptor import encode_descriptor
from forebay.format.marker import BeginMarker, encode_marker
from forebay.format.names import object_key, sidecar
from forebay.limits import LOG_DISTANCE
from forebay.topic.opening import settle
from forebay.wal.identity import LocalLog
from support.reservoirs import TOPIC, Reservoir, frames, lay, record_of, restored

LOG, NONCE, OTHER = "a" * 32, "b" * 32, "c" * 32


@pytest.fixture
def at() -> Iterator[Reservoir]:
    reservoir = Reservoir()
    yield reservoir
    reservoir.require_chain_whole()
    reservoir.close()


def mark(
    at: Reservoir, name: str, *, begin: int = 0, epoch: int = 1, nonce: str = NONCE, log: str = LOG
) -> None:
    marker = BeginMarker(log, nonce, epoch, begin)
    at.store.put_object(object_key(TOPIC, name), encode_marker(marker))


def delete(at: Reservoir, *names: str) -> None:
    for name in names:
        at.store.delete_object(object_key(TOPIC, name))
        at.store.delete_object(object_key(TOPIC, sidecar(name)))


def kept_copy(at: Reservoir) -> list[Put]:
    """A copy of the catalog, to put back."""
    return [Put(key, value) for key, value, _ in at.entries()]


def put_back(at: Reservoir, copy: list[Put]) -> None:
    at.end_sessions()
    stale: list[Put | Remove] = [Remove(key) for key, _, _ in at.entries()]
    for each in stale:
        at.kv.commit([], [each])
    for put in copy:
        at.kv.commit([], [put])


# ---- the record is lost, the descriptors are there ----


@pytest.mark.parametrize("extra", [False, True])
def test_a_lost_record_is_made_from_the_descriptors_that_are_there(
    at: Reservoir, extra: bool
) -> None:
    done = at.fill(at.own(), 0, 10, 20)
    at.end_sessions()
    if extra:
        lay(at, 20, 30)
    at.kv.commit([], [Remove(at.catalog.keys.record(TOPIC))])
    report = restored(at)
    assert (report.known, report.adopted) == (2, int(extra))
    assert list(at.catalog.get_object_descriptors(TOPIC))[:2] == done
    assert record_of(at).tail == (30 if extra else 20)
    assert not is_restoring(record_of(at).log_id)


@pytest.mark.parametrize("number", range(1, 8))
def test_descriptors_that_contradict_the_store_are_replaced_whatever_interrupts_it(
    at: Reservoir, number: int
) -> None:
    """Danube's own prefix: rows, and no record. The last row's object exists under another name."""
    done = at.fill(at.own(), 0, 10, 20, 30)
    at.end_sessions()
    keys = at.catalog.keys
    gone = replace(done[1], object_id="data-10-19-1.dnb1")
    overlapping = replace(done[2], object_id="data-15-29.dnb1", start_offset=15)
    at.kv.commit(
        [],
        [
            Remove(keys.record(TOPIC)),
            Put(keys.descriptor(TOPIC, 10), encode_descriptor(gone)),
            Put(keys.descriptor(TOPIC, 15), encode_descriptor(overlapping)),
            Put(keys.descriptor(TOPIC, 20), b"{}"),
        ],
    )
    at.kv.fail("commit", at=number)
    try:
        restored(at)
    except ServiceUnavailable:
        restored(at)
    assert at.chain() == ["data-0-9.dnb1", "data-10-19.dnb1", "data-20-29.dnb1"]
    assert record_of(at).tail == 30
    assert at.catalog.get_current_pointer(TOPIC) == 20


# ---- objects of the catalog are gone ----


def test_a_compacted_object_replaces_the_descriptors_of_an_older_catalog(at: Reservoir) -> None:
    many = 2 * ADOPTED_MAX + 5
    at.fill(at.own(), *range(0, 2 * many + 1, 2))
    at.end_sessions()
    copy = kept_copy(at)
    at.write(f"data-0-{2 * many - 3}.dnb1", frames(0, 2 * many - 2))
    delete(at, *(f"data-{start}-{start + 1}.dnb1" for start in range(0, 2 * many - 2, 2)))
    put_back(at, copy)
    report = restored(at)
    last = f"data-{2 * many - 2}-{2 * many - 1}.dnb1"
    assert at.chain() == [f"data-0-{2 * many - 3}.dnb1", last]
    assert (report.adopted, report.known, report.gaps) == (1, 1, [])
    assert report.older is not None
    record = record_of(at)
    assert (record.tail, record.log_id) == (2 * many, "log")
    assert record.reserved == 2 * many + LOG_DISTANCE


@pytest.mark.parametrize("number", range(1, 8))
def test_a_chain_that_is_made_anew_goes_on_after_an_interruption(
    at: Reservoir, number: int
) -> None:
    at.fill(at.own(), 0, 10, 20, 30, 40)
    at.end_sessions()
    at.write("data-10-29.dnb1", frames(10, 20))
    delete(at, "data-10-19.dnb1", "data-20-29.dnb1")
    at.kv.fail("commit", at=number)
    try:
        restored(at)
    except ServiceUnavailable:
        restored(at)
    assert at.chain() == ["data-0-9.dnb1", "data-10-29.dnb1", "data-30-39.dnb1"]
    assert record_of(at).tail == 40


@pytest.mark.parametrize("where", [0, 10, 20])
def test_objects_that_nothing_replaces_are_lost_only_if_gaps_are_allowed(
    at: Reservoir, where: int
) -> None:
    at.fill(at.own(), 0, 10, 20, 30)
    at.end_sessions()
    delete(at, f"data-{where}-{where + 9}.dnb1")
    before = at.entries()
    with pytest.raises(CommitRefused, match="--allow-gaps"):
        restored(at)
    assert at.entries() == before
    report = restored(at, allow_gaps=True)
    record = record_of(at)
    assert (record.lost, record.tail, report.gaps) == (
        ((where, where + 10),),
        30,
        [(where, where + 10)],
    )
    assert len(at.chain()) == 2
    taken = settle(record, LocalLog("new", 0, 0), "fresh")
    assert taken.tail == record.reserved
    pointer = at.catalog.get_current_pointer(TOPIC)
    assert pointer == (10 if where == 20 else 20)


def test_what_the_local_log_still_has_is_left_to_a_repair(at: Reservoir) -> None:
    at.fill(at.own(), 0, 10, 20)
    at.end_sessions()
    delete(at, "data-10-19.dnb1")
    before = at.entries()
    with pytest.raises(CommitRefused, match="forebay repair"):
        restored(at, allow_gaps=True, local=LocalLog("log", 0, 25))
    assert at.entries() == before
    lay(at, 10, 20)


# ---- begin markers ----


def test_without_log_and_catalog_the_next_offset_is_far_after_the_newest_marker(
    at: Reservoir,
) -> None:
    lay(at, 0, 10)
    mark(at, "begin-0")
    mark(at, "begin-1500", epoch=7)
    report = restored(at)
    record = record_of(at)
    assert (record.log_id, record.nonce) == (LOG, NONCE)
    assert (record.tail, record.assigned) == (10, 1500), "the log reached it from 0 on"
    assert (record.begin, record.reserved) == (1500, 1500 + LOG_DISTANCE)
    assert (report.lost, report.unknown) == ((10, 1500), (1500, 1500 + LOG_DISTANCE))
    assert record.epoch > 7, "no later opening is taken for an older one"
    taken = settle(record, LocalLog("new", 0, 0), "fresh")
    assert (taken.lost, taken.unknown) == (((10, 1500),), ((1500, 1500 + LOG_DISTANCE),))
    kept = settle(record, LocalLog(LOG, 10, 1600, frozenset({NONCE})), "fresh")
    assert (kept.log_id, kept.tail, kept.lost) == (LOG, 10, ())


def test_a_topic_of_which_only_a_marker_is_left_is_restored(at: Reservoir) -> None:
    mark(at, "begin-0")
    report = restored(at)
    assert (report.objects_found, report.markers, report.next_offset) == (0, 1, LOG_DISTANCE)
    assert record_of(at).log_id == LOG


def test_a_damaged_marker_counts_by_its_name_and_its_log_is_unknown(at: Reservoir) -> None:
    lay(at, 0, 10)
    mark(at, "begin-0")
    at.store.put_object(object_key(TOPIC, "begin-500"), b"?")
    restored(at)
    record = record_of(at)
    assert (record.log_id, record.nonce, record.assigned) == (None, None, 10)
    assert record.reserved == 500 + LOG_DISTANCE


def test_a_current_catalog_keeps_its_log_and_its_reservation(at: Reservoir) -> None:
    """The newest marker is of an earlier opening: the store was away at the last one."""
    owner = at.own()
    at.fill(owner, 0, 10)
    at.end_sessions()
    mark(at, "begin-0", epoch=1, nonce=OTHER)
    at.kv.commit(
        [],
        [
            Put(
                at.catalog.keys.record(TOPIC),
                encode_record(
                    replace(
                        record_of(at), epoch=2, log_id=LOG, nonce=NONCE, reserved=1000, marked=1
                    )
                ),
            )
        ],
    )
    before = at.entries()
    report = restored(at)
    assert (report.older, report.next_offset) == (None, 1000)
    assert at.entries() == before


def test_an_older_catalog_takes_the_log_of_the_newest_marker(at: Reservoir) -> None:
    at.fill(at.own(), 0, 10)
    at.end_sessions()
    mark(at, "begin-300", epoch=9)
    report = restored(at)
    assert report.older is not None
    assert "begin-300" in report.older
    record = record_of(at)
    assert (record.log_id, record.nonce, record.assigned) == (LOG, NONCE, 300)
    assert record.reserved == 300 + LOG_DISTANCE
    again = restored(at)
    assert (again.older, again.next_offset) == (None, record.reserved)


# ---- a log that begins after the objects end ----


def test_a_hole_before_the_local_log_is_recorded_if_gaps_are_allowed(at: Reservoir) -> None:
    lay(at, 0, 10)
    mark(at, "begin-1000", begin=1000)
    local = LocalLog(LOG, 1000, 1100, frozenset({NONCE}))
    with pytest.raises(MissingData, match=r"10 to 999.*--allow-gaps"):
        restored(at, local=local)
    assert at.entries() == []
    restored(at, local=local, allow_gaps=True)
    record = record_of(at)
    assert (record.tail, record.unknown, record.lost) == (1000, ((10, 1000),), ())
    kept = settle(record, local, "fresh")
    assert (kept.log_id, kept.tail) == (LOG, 1000)


def test_the_hole_before_a_lost_log_is_known_from_its_marker(at: Reservoir) -> None:
    lay(at, 0, 10)
    mark(at, "begin-1000", begin=1000)
    report = restored(at)
    assert (report.tail, report.lost) == (10, None)
    assert report.unknown == (10, 1000 + LOG_DISTANCE)
    at.lose_catalog()
    mark(at, "begin-1200", begin=1000, epoch=3)
    restored(at, allow_gaps=True)
    record = record_of(at)
    assert (record.tail, record.unknown) == (1000, ((10, 1000),))
    taken = settle(record, LocalLog("new", 0, 0), "fresh")
    assert taken.lost == ((1000, 1200),)


# ---- what the operator says ----


def test_the_operator_says_which_offset_is_next_within_what_can_be_right(at: Reservoir) -> None:
    lay(at, 0, 10)
    mark(at, "begin-50")
    for wrong in (49, 51 + LOG_DISTANCE):
        with pytest.raises(UsageError, match="next offset"):
            restored(at, next_offset=wrong)
    assert at.entries() == []
    assert restored(at).next_offset == 50 + LOG_DISTANCE
    report = restored(at, next_offset=60)
    assert (report.next_offset, record_of(at).reserved) == (60, 60)


def test_an_accepted_loss_is_accepted_now_and_when_the_topic_is_opened(at: Reservoir) -> None:
    lay(at, 0, 10)
    lay(at, 20, 30)
    report = restored(at, allow_gaps=True, accept_loss=True)
    record = record_of(at)
    assert report.accepted
    assert (record.lost, record.accepted, record.accept) == ((), ((10, 20),), True)
