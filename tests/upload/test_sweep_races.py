"""Sweeps while others are at work: the life of a key, schedule by schedule."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from forebay.catalog.catalog import Catalog, Intent
from forebay.catalog.ownership import Ownership
from forebay.catalog.records import Life, Range, State
from forebay.catalog.swap import swap, swap_back
from forebay.errors import CommitRefused, ServiceUnavailable, TopicFenced
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import ObjectName, TopicName, object_key, objects_prefix, sidecar
from forebay.upload.sweep import Action, Kind, SweepReport, sweep
from support.reservoirs import (
    GRACE_MINUTES,
    PATIENCE,
    TOPIC,
    Reservoir,
    Stall,
    frames,
    running,
    with_ids,
)

NAME = "data-10-19.dnb1"


@pytest.fixture
def at() -> Iterator[Reservoir]:
    reservoir = Reservoir()
    yield reservoir
    reservoir.require_chain_whole()
    reservoir.close()


def swept(at: Reservoir) -> SweepReport:
    return sweep(at.catalog, at.store, grace_minutes=GRACE_MINUTES, dry_run=False, clock=at.clock)


def outcomes(report: SweepReport) -> list[tuple[Kind, Action, str]]:
    return [(item.kind, item.action, item.reason) for item in report.items]


def compacted(at: Reservoir, owner: Ownership, start: int, end: int) -> ObjectDescriptor:
    """Merges the objects from `start` to `end`, which is included."""
    small = at.catalog.get_object_descriptors_range(TOPIC, start, end + 1)
    for each in at.catalog.get_object_descriptors(TOPIC):
        at.catalog.mark_verified(TOPIC, each)
    intent = at.intend(owner, start, end)
    large = at.write(intent.object_id, frames(start, end - start + 1))
    swap(at.catalog, TOPIC, intent, large, small, clock=at.clock)
    return large


def test_a_stalled_living_uploader_with_a_young_intent_is_left_alone(at: Reservoir) -> None:
    owner = at.own()
    at.fill(owner, 0, 10)
    at.grow_old()
    intent = at.intend(owner, 10, 19)
    at.write(intent.object_id, frames(10, 10))
    at.end_sessions()  # not even its lease protects it: the grace time does
    young = "it is younger than the grace time"
    assert outcomes(swept(at)) == [(Kind.ORPHAN, Action.KEPT, young)]
    at.finish(owner, intent, 10, 19)
    assert at.chain() == ["data-0-9.dnb1", NAME]


@pytest.mark.parametrize("written", [True, False])
def test_an_old_intent_of_a_living_owner_at_the_tail_is_left_alone(
    at: Reservoir, written: bool
) -> None:
    owner = at.own()
    at.fill(owner, 0, 10)
    intent = at.intend(owner, 10, 19)
    if written:
        at.write(intent.object_id, frames(10, 10))
    at.grow_old()
    at.grow_old()
    kind = Kind.ORPHAN if written else Kind.INTENT
    reason = "the topic's owner may still commit it"
    assert outcomes(swept(at)) == [(kind, Action.KEPT, reason)]
    at.finish(owner, intent, 10, 19)
    assert at.chain() == ["data-0-9.dnb1", NAME]


def test_an_upload_that_took_longer_than_the_grace_time_is_not_swept_as_it_ends(
    at: Reservoir,
) -> None:
    owner = at.own()
    intent = at.intend(owner, 0, 9)
    at.grow_old()
    at.write(intent.object_id, frames(0, 10))
    at.end_sessions()
    young = "it is younger than the grace time"
    assert outcomes(swept(at)) == [(Kind.ORPHAN, Action.KEPT, young)]
    at.finish(owner, intent, 0, 9)
    assert at.chain() == ["data-0-9.dnb1"]


@pytest.mark.parametrize("later", ["intended", "committed", "replaced"])
def test_an_object_written_after_the_rows_were_read_is_not_newer_than_the_catalog(
    at: Reservoir, later: str
) -> None:
    """The rows of a topic are read before its objects are listed."""
    owner = at.own()
    at.fill(owner, 0, 5, 10)  # the row of data-5-9 comes after that of data-10-19
    written: list[str] = []

    def write(operation: str, key: str) -> None:
        if (operation, key) != ("list", objects_prefix(TOPIC)) or written:
            return
        written.append(key)
        intent = at.intend(owner, 10, 19)
        at.write(intent.object_id, frames(10, 10))
        if later != "intended":
            at.finish(owner, intent, 10, 19)
        if later == "replaced":
            compacted(at, owner, 0, 19)

    at.backend.before = write
    report = sweep(at.catalog, at.store, [TOPIC], grace_minutes=0, dry_run=False, clock=at.clock)
    assert written
    assert report.errors == 0
    assert Kind.NEWER not in [kind for kind, _, _ in outcomes(report)]


def test_an_old_intent_below_the_tail_of_a_living_owner_goes(at: Reservoir) -> None:
    owner = at.own()
    abandoned = at.intend(owner, 0, 4)
    at.write(abandoned.object_id, frames(0, 5))
    at.fill(owner, 0, 10)
    at.grow_old()
    assert [action for _, action, _ in outcomes(swept(at))] == [Action.REMOVED]
    assert at.names() == with_ids(["data-0-9.dnb1"])
    with pytest.raises(CommitRefused):
        at.finish(owner, abandoned, 0, 4)


def test_a_fenced_uploader_that_finishes_after_its_key_was_condemned_is_refused(
    at: Reservoir,
) -> None:
    old = at.own()
    at.fill(old, 0, 10)
    late = at.intend(old, 10, 19)
    at.grow_old()
    new = at.own()
    stall = Stall("delete", object_key(TOPIC, NAME))
    at.backend.before = stall
    reports: list[SweepReport] = []
    with running(lambda: reports.append(swept(at))):
        assert stall.reached.wait(PATIENCE)
        with pytest.raises((CommitRefused, TopicFenced)):
            at.finish(old, late, 10, 19)
        assert at.intend(new, 10, 19).object_id == "data-10-19-1.dnb1"
        at.upload(new, 10, 19)
        stall.release()
    assert outcomes(reports[0])[0][:2] == (Kind.INTENT, Action.REMOVED)
    assert at.chain() == ["data-0-9.dnb1", "data-10-19-1.dnb1"]
    assert NAME not in at.names()
    assert sidecar(NAME) in at.names(), "the late writer's, after that of the sweep"
    at.grow_old()
    assert outcomes(swept(at))[0][:2] == (Kind.SIDECAR, Action.REMOVED)
    assert at.names() == with_ids(["data-0-9.dnb1", "data-10-19-1.dnb1"])


def test_an_upload_that_ends_after_its_sweep_is_swept_again(at: Reservoir) -> None:
    old = at.own()
    at.fill(old, 0, 10)
    late = at.intend(old, 10, 19)
    at.grow_old()
    new = at.own()
    assert outcomes(swept(at))[0][:2] == (Kind.INTENT, Action.REMOVED)
    at.upload(new, 10, 24)
    with pytest.raises((CommitRefused, TopicFenced)):
        at.finish(old, late, 10, 19)
    at.grow_old()
    assert outcomes(swept(at))[0][:2] == (Kind.ORPHAN, Action.REMOVED)
    assert at.names() == with_ids(["data-0-9.dnb1", "data-10-24.dnb1"])


def test_the_late_delete_of_a_stalled_sweeper_hits_only_the_old_name(at: Reservoir) -> None:
    old = at.own()
    at.fill(old, 0, 10, 15, 20)
    at.write(at.intend(old, 10, 19).object_id, frames(10, 10))
    at.grow_old()
    new = at.own()
    stall = Stall("delete", object_key(TOPIC, NAME))
    at.backend.before = stall
    with running(lambda: swept(at)):
        assert stall.reached.wait(PATIENCE)
        assert compacted(at, new, 10, 19).object_id == "data-10-19-1.dnb1"
        at.require_chain_whole()
        stall.release()
    assert NAME not in at.names()
    assert at.chain() == ["data-0-9.dnb1", "data-10-19-1.dnb1"]


def test_a_second_sweeper_takes_the_deletion_over_and_the_name_is_never_used_again(
    at: Reservoir,
) -> None:
    """The first one goes on when the second is done, and sends its request only then."""
    old = at.own()
    at.fill(old, 0, 10, 15, 20)
    at.write(at.intend(old, 10, 19).object_id, frames(10, 10))
    at.grow_old()
    new = at.own()
    stall = Stall("delete", object_key(TOPIC, NAME))
    at.backend.before = stall
    with running(lambda: swept(at)):
        assert stall.reached.wait(PATIENCE)
        at.grow_old()
        assert outcomes(swept(at))[0][:2] == (Kind.DELETING, Action.REMOVED)
        compacted(at, new, 10, 19)
        stall.release()
    life = at.catalog.life(TOPIC, NAME)
    assert life is not None
    assert life.state is State.GONE, "the first sweeper's own end must not free the name"
    assert at.chain() == ["data-0-9.dnb1", "data-10-19-1.dnb1"]


def test_a_sweeper_that_died_after_it_condemned_is_finished_by_the_next(at: Reservoir) -> None:
    old = at.own()
    at.fill(old, 0, 10, 15, 20)
    at.write(at.intend(old, 10, 19).object_id, frames(10, 10))
    at.grow_old()
    assert at.catalog.condemn(TOPIC, NAME, at.catalog.life(TOPIC, NAME)) is not None
    young = "it is younger than the grace time"
    assert outcomes(swept(at)) == [(Kind.DELETING, Action.KEPT, young)]
    at.grow_old()
    assert outcomes(swept(at))[0][:2] == (Kind.DELETING, Action.REMOVED)
    life = at.catalog.life(TOPIC, NAME)
    assert life is not None
    assert life.state is State.GONE
    new = at.own()
    for _ in range(3):
        assert at.intend(new, 10, 19).object_id == "data-10-19-1.dnb1"
    assert swept(at).counts[Action.REMOVED] == 0


def test_a_late_upload_to_a_gone_name_is_swept_and_the_mark_stays(at: Reservoir) -> None:
    at.fill(at.own(), 0, 30)
    token = at.catalog.condemn(TOPIC, NAME, None)
    assert token is not None
    at.catalog.bury(TOPIC, NAME, token, certain=False)
    at.write(NAME, frames(10, 10))
    at.grow_old()
    assert outcomes(swept(at))[0][:2] == (Kind.ORPHAN, Action.REMOVED)
    assert at.names() == with_ids(["data-0-29.dnb1"])
    life = at.catalog.life(TOPIC, NAME)
    assert life is not None
    assert life.state is State.GONE


def test_a_commit_before_the_condemnation_wins(at: Reservoir) -> None:
    owner = at.own()
    intent = at.intend(owner, 0, 9)
    seen = at.catalog.life(TOPIC, intent.object_id)
    at.finish(owner, intent, 0, 9)
    assert at.catalog.condemn(TOPIC, intent.object_id, seen) is None
    assert at.chain() == ["data-0-9.dnb1"]


def test_a_condemnation_before_the_commit_wins(at: Reservoir) -> None:
    owner = at.own()
    intent = at.intend(owner, 0, 9)
    assert at.catalog.condemn(TOPIC, intent.object_id, at.catalog.life(TOPIC, intent.object_id))
    with pytest.raises(CommitRefused):
        at.finish(owner, intent, 0, 9)
    assert at.chain() == []


def test_of_a_commit_and_a_condemnation_exactly_one_wins(at: Reservoir) -> None:
    owner = at.own()
    start, won = 0, {"commit": 0, "condemn": 0}
    for _ in range(100):
        intent = at.intend(owner, start, start)
        descriptor = at.write(intent.object_id, frames(start, 1))
        committed, condemned = _race(at, intent, descriptor)
        assert committed != condemned
        won["commit" if committed else "condemn"] += 1
        start += committed
    assert len(at.chain()) == won["commit"]
    assert at.catalog.record(TOPIC) is not None


def _race(at: Reservoir, intent: Intent, descriptor: ObjectDescriptor) -> tuple[bool, bool]:
    seen = at.catalog.life(TOPIC, intent.object_id)
    line = threading.Barrier(2)
    condemned: list[bool] = []

    def condemn() -> None:
        line.wait(PATIENCE)
        token = at.catalog.condemn(TOPIC, intent.object_id, seen)
        condemned.append(token is not None)
        if token is not None:
            at.store.delete_object(object_key(TOPIC, intent.object_id))
            at.catalog.bury(TOPIC, intent.object_id, token, certain=True)

    with running(condemn):
        line.wait(PATIENCE)
        try:
            at.catalog.put_object_descriptor(TOPIC, intent, descriptor)
        except CommitRefused:
            committed = False
        else:
            committed = True
    return committed, condemned[0]


class LateCatalog(Catalog):
    """Something else happens right before each condemnation."""

    def __init__(self, at: Reservoir, between: Callable[[], object]) -> None:
        super().__init__(at.kv, clock=at.clock)
        self._between = between

    def condemn(
        self, topic: TopicName, object_id: str, seen: Life | None, span: Range | None = None
    ) -> str | None:
        self._between()
        return super().condemn(topic, object_id, seen, span)


def test_a_sweep_that_decided_before_a_commit_keeps_the_object(at: Reservoir) -> None:
    """The object was an orphan when it was listed; its commit comes before it is condemned."""
    owner = at.own()
    at.fill(owner, 0, 10, 15, 20)
    at.write(NAME, frames(10, 10))
    at.grow_old()
    late = LateCatalog(at, lambda: compacted(at, owner, 10, 19))
    report = sweep(late, at.store, grace_minutes=GRACE_MINUTES, dry_run=False, clock=at.clock)
    assert outcomes(report)[0] == (Kind.ORPHAN, Action.KEPT, "it changed meanwhile")
    assert at.chain() == ["data-0-9.dnb1", NAME]


def test_a_sweeper_that_was_overtaken_deletes_nothing(at: Reservoir) -> None:
    """It saw the row `deleting`; by the time it acts, the name was freed and committed again."""
    owner = at.own()
    at.fill(owner, 0, 5, 10)
    at.write("data-0-9.dnb1", frames(0, 10))
    token = at.catalog.condemn(TOPIC, "data-0-9.dnb1", None)
    assert token is not None
    at.grow_old()

    def others() -> None:
        at.store.delete_object(object_key(TOPIC, "data-0-9.dnb1"))
        at.catalog.bury(TOPIC, "data-0-9.dnb1", token, certain=True)
        assert compacted(at, owner, 0, 9).object_id == "data-0-9.dnb1"

    late = LateCatalog(at, others)
    report = sweep(late, at.store, grace_minutes=GRACE_MINUTES, dry_run=False, clock=at.clock)
    assert (Kind.DELETING, Action.KEPT, "it changed meanwhile") in outcomes(report)
    assert at.chain() == ["data-0-9.dnb1"]


def test_a_young_intent_of_a_compaction_is_left_alone(at: Reservoir) -> None:
    owner = at.own()
    at.fill(owner, 0, 10, 20, 30)
    at.grow_old()
    intent = at.intend(owner, 0, 29)
    at.write(intent.object_id, frames(0, 30))
    young = "it is younger than the grace time"
    assert outcomes(swept(at)) == [(Kind.ORPHAN, Action.KEPT, young)]
    assert at.catalog.life(TOPIC, intent.object_id) is not None


def test_an_old_intent_of_a_compaction_is_kept_while_the_owner_of_its_epoch_lives(
    at: Reservoir,
) -> None:
    owner = at.own()
    at.fill(owner, 0, 10, 20, 30)
    intent = at.intend(owner, 10, 29)
    at.write(intent.object_id, frames(10, 20))
    at.grow_old()
    reason = "a compaction may still commit it"
    assert outcomes(swept(at)) == [(Kind.ORPHAN, Action.KEPT, reason)]
    at.own()
    assert outcomes(swept(at))[0][:2] == (Kind.ORPHAN, Action.REMOVED)


def test_an_old_intent_to_compress_one_object_is_kept_while_the_owner_of_its_epoch_lives(
    at: Reservoir,
) -> None:
    owner = at.own()
    at.fill(owner, 0, 10, 20)
    intent = at.catalog.intend(TOPIC, owner.epoch, ObjectName(0, 9, compressed=True))
    at.store.put_object(object_key(TOPIC, intent.object_id), b"compressed")
    at.grow_old()
    reason = "a compaction may still commit it"
    assert outcomes(swept(at)) == [(Kind.ORPHAN, Action.KEPT, reason)]
    at.own()
    assert outcomes(swept(at))[0][:2] == (Kind.ORPHAN, Action.REMOVED)


def test_a_retirement_that_died_after_the_catalog_step_is_finished(at: Reservoir) -> None:
    owner = at.own()
    oldest = at.fill(owner, 0, 10, 20)[0]
    assert at.catalog.retire(TOPIC, owner.epoch, oldest) is not None
    at.grow_old()
    assert outcomes(swept(at))[0][:2] == (Kind.DELETING, Action.REMOVED)
    assert at.names() == with_ids([NAME])
    assert at.chain() == [NAME]
    record = at.catalog.record(TOPIC)
    assert record is not None
    assert record.start_offset == 10


@pytest.mark.parametrize("applied", [True, False])
def test_a_condemnation_without_an_answer_deletes_nothing(at: Reservoir, applied: bool) -> None:
    at.fill(at.own(), 0, 30)
    at.write(NAME, frames(10, 10))
    at.grow_old()
    at.kv.fail("commit", applied=applied)
    assert outcomes(swept(at))[0][:2] == (Kind.ORPHAN, Action.FAILED)
    assert NAME in at.names()
    at.grow_old()
    at.kv.heal()
    kind = Kind.DELETING if applied else Kind.ORPHAN
    assert outcomes(swept(at))[0][:2] == (kind, Action.REMOVED)


def test_a_burial_without_an_answer_leaves_a_mark(at: Reservoir) -> None:
    at.fill(at.own(), 0, 30)
    at.write(NAME, frames(10, 10))
    at.grow_old()
    at.kv.fail("commit", at=2)
    assert outcomes(swept(at))[0][:2] == (Kind.ORPHAN, Action.FAILED)
    at.grow_old()
    swept(at)
    life = at.catalog.life(TOPIC, NAME)
    assert life is not None
    assert life.state is State.GONE


def test_a_store_without_an_answer_leaves_the_key_condemned(at: Reservoir) -> None:
    old = at.own()
    at.fill(old, 0, 30)
    at.write(NAME, frames(10, 10))
    at.grow_old()

    def refuse(operation: str, _key: str) -> None:
        if operation == "delete":
            raise ServiceUnavailable("no answer")

    at.backend.before = refuse
    swept(at)
    assert at.intend(at.own(), 10, 19).object_id == "data-10-19-1.dnb1"


def test_a_compaction_in_the_middle_of_a_sweep_is_no_alarm(at: Reservoir) -> None:
    """A compaction is committed, or undone, before each call of the sweep."""
    for back in (False, True):
        call, calls = 0, 1
        while calls > call:
            call, calls = call + 1, 0
            reservoir = Reservoir()
            owner = reservoir.own()
            small = reservoir.fill(owner, 0, 10, 20, 30)
            for each in small:
                reservoir.catalog.mark_verified(TOPIC, each)
            intent = reservoir.intend(owner, 0, 29)
            large = reservoir.write(intent.object_id, frames(0, 30))

            def compact(reservoir: Reservoir = reservoir, small: object = small) -> None:
                swap(reservoir.catalog, TOPIC, intent, large, small)  # type: ignore[arg-type]  # noqa: B023

            def undo(reservoir: Reservoir = reservoir) -> None:
                swap_back(reservoir.catalog, TOPIC, large.object_id)  # noqa: B023

            if back:
                compact()
            change = undo if back else compact

            def before(
                _: str, reservoir: Reservoir = reservoir, change: Callable[[], None] = change
            ) -> None:
                nonlocal calls
                calls += 1
                if calls == call:  # noqa: B023  # used within this round only
                    reservoir.kv.before = None
                    change()
                    reservoir.kv.before = before

            reservoir.kv.before = before
            report = swept(reservoir)
            reservoir.kv.before = None
            assert report.errors == 0, report.items
            reservoir.require_chain_whole()
            reservoir.close()
