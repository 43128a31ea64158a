"""Restores that are interrupted, or that others interfere with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from forebay.catalog.adopt import ADOPTED_MAX, adopt, is_restoring
from forebay.catalog.ownership import Ownership
from forebay.catalog.records import State, TopicRecord
from forebay.errors import (
    CommitRefused,
    ServiceUnavailable,
    TopicFenced,
)
from forebay.format.descriptor import ObjectDescriptor
from forebay.limits import LOG_DISTANCE
from forebay.upload.restore import RestoreChoices, restore_topic
from support.reservoirs import TOPIC, Reservoir, frames, lay, plain, record_of, restored


@pytest.fixture
def at() -> Iterator[Reservoir]:
    reservoir = Reservoir()
    yield reservoir
    reservoir.require_chain_whole()
    reservoir.close()


MANY = tuple(range(0, 2 * (2 * ADOPTED_MAX + 5) + 1, 2))
"""Bounds of objects for three transactions."""


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("number", range(1, 7))
def test_a_restore_goes_on_after_an_interruption_at_any_transaction(
    at: Reservoir, number: int, applied: bool
) -> None:
    """The transactions: take the topic, three with objects, finish, release the topic."""
    lay(at, *MANY)
    at.kv.fail("commit", at=number, applied=applied)
    with pytest.raises(ServiceUnavailable):
        restored(at)
    at.require_chain_whole()
    interrupted = at.catalog.record(TOPIC)
    if interrupted is not None and is_restoring(interrupted.log_id):
        assert interrupted.reserved == MANY[-1] + LOG_DISTANCE, "no offset is reused even now"
    report = restored(at)
    assert report.known + report.adopted == len(MANY) - 1
    assert plain(record_of(at)) == TopicRecord(
        tail=MANY[-1], assigned=MANY[-1], reserved=MANY[-1] + LOG_DISTANCE
    )
    assert at.chain() == [f"data-{start}-{start + 1}.dnb1" for start in MANY[:-1]]
    assert at.catalog.owner(TOPIC) is None


def test_what_an_interrupted_restore_reserved_is_given_back(at: Reservoir) -> None:
    lay(at, 0, 10)
    at.kv.fail("commit", at=2)
    with pytest.raises(ServiceUnavailable):
        restored(at)
    assert restored(at, assume_nothing_lost=True).next_offset == 10
    assert record_of(at).reserved == 10


def test_a_topic_that_was_made_meanwhile_is_not_restored(at: Reservoir) -> None:
    lay(at, 0, 10)
    made: list[Ownership] = []

    def before(operation: str) -> None:
        if operation == "grant":  # which is when the topic is taken
            at.kv.before = None
            made.append(at.own(at.session()))
            made[0].release(0)

    at.kv.before = before
    with pytest.raises(CommitRefused, match="changed during"):
        restored(at)
    assert made
    assert (at.chain(), record_of(at).log_id) == ([], "log")


def test_there_is_no_seventh_transaction(at: Reservoir) -> None:
    lay(at, *MANY)
    restored(at)
    assert at.kv.count("commit") == 6


def test_a_restore_goes_on_after_the_store_failed(at: Reservoir) -> None:
    lay(at, *MANY)

    def before(operation: str, key: str) -> None:
        if operation == "get_range" and f"data-{MANY[40]}-" in key:
            raise ServiceUnavailable("no answer")

    at.backend.before = before
    with pytest.raises(ServiceUnavailable):
        restored(at)
    at.backend.before = lambda _operation, _key: None
    report = restored(at, verify=True)
    assert report.known == 40
    assert record_of(at).verified == MANY[-1]
    assert report.read_whole == len(MANY) - 1, "those of the first run too"


def test_an_object_that_is_being_deleted_is_adopted_only_if_no_other_holds_its_offsets(
    at: Reservoir,
) -> None:
    lay(at, 0, 10, 20, 30)
    at.write("data-10-29.dnb1", frames(10, 20))
    for name in ("data-0-9.dnb1", "data-10-29.dnb1", "data-20-29.dnb1"):
        assert at.catalog.condemn(TOPIC, name, None) is not None
    report = restored(at)
    assert at.chain() == ["data-10-29.dnb1"], "what retention was deleting does not come back"
    assert report.start_offset == 10
    life = at.catalog.life(TOPIC, "data-10-29.dnb1")
    assert life is not None
    assert life.state is State.COMMITTED


@pytest.mark.parametrize("start", [9, 11])
def test_nothing_is_adopted_that_does_not_begin_where_the_chain_ends(
    at: Reservoir, start: int
) -> None:
    owner = at.own()
    at.fill(owner, 0, 10)
    other = at.write(f"data-{start}-19.dnb1", frames(start, 20 - start))
    with pytest.raises(CommitRefused, match="at offset 10"):
        adopt(at.catalog, TOPIC, owner.epoch, [other])
    assert at.chain() == ["data-0-9.dnb1"]


def test_a_fenced_restore_adopts_nothing(at: Reservoir) -> None:
    old = at.own()
    at.own()
    with pytest.raises(TopicFenced):
        adopt(at.catalog, TOPIC, old.epoch, [at.write("data-0-9.dnb1", frames(0, 10))])
    assert at.chain() == []


def test_large_descriptors_go_in_more_transactions(at: Reservoir) -> None:
    owner = at.own()
    large = ObjectDescriptor("data-0-3999.dnb1", 0, 3999, 100_000, "e" * 100_000, 0)
    many = [
        replace(
            large,
            object_id=f"data-{first}-{first + 3999}.dnb1",
            start_offset=first,
            end_offset=first + 3999,
        )
        for first in range(0, 4000 * ADOPTED_MAX, 4000)
    ]
    assert adopt(at.catalog, TOPIC, owner.epoch, many) > 1
    assert list(at.catalog.get_object_descriptors(TOPIC)) == many
    at.lose_catalog()  # the objects were never there


def test_progress_is_told(at: Reservoir) -> None:
    lay(at, 0, 10, 20, 30)
    told: list[tuple[int, int]] = []
    session = at.session()
    restore_topic(
        at.catalog,
        at.store,
        session,
        TOPIC,
        RestoreChoices(),
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(1, 3), (2, 3), (3, 3)]
