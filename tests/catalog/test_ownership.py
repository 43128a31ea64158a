"""Leases and epochs: who owns a topic, when it may acknowledge, and how it loses it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import pytest

from forebay.catalog.catalog import Catalog
from forebay.catalog.kv import Compare, Put, Remove
from forebay.catalog.ownership import Ownership, Session, acquire
from forebay.catalog.records import Owner, TopicRecord, encode_record
from forebay.catalog.sqlite import SqliteKv
from forebay.errors import (
    ServiceError,
    ServiceRefused,
    ServiceUnavailable,
    TopicFenced,
    TopicOwned,
)
from forebay.format.names import TopicName
from forebay.limits import LOG_DISTANCE, OFFSET_MAX
from forebay.settings import MetadataSettings
from forebay.testing import ManualClock
from forebay.testing.kv import OPERATIONS, FaultKv
from support.catalogs import TOPIC
from support.disks import wait_until

LEASE: Final = 1200.0
"""So long that the threads, which use the real clock, renew nothing while a test runs."""
MARGIN: Final = 100.0
BLOCK: Final = 50


def settle_new(record: TopicRecord | None) -> TopicRecord:
    return record or TopicRecord(log_id="log")


class Machine:
    """One process, with a session, a connection to the catalog and a clock of its own."""

    def __init__(self, kv: SqliteKv, clock: ManualClock, **changes: Any) -> None:
        self.kv = FaultKv(kv)
        self.clock = clock
        self.catalog = Catalog(self.kv, "/forebay", clock)
        settings: dict[str, Any] = {
            "lease_seconds": LEASE,
            "lease_margin_seconds": MARGIN,
            "offsets_reserved": BLOCK,
            "timeout_seconds": 1,
        }
        self.session = Session(self.catalog, MetadataSettings(**settings | changes), clock)

    def take(
        self,
        lock: str = "",
        settle: Callable[[TopicRecord | None], TopicRecord] = settle_new,
        topic: TopicName = TOPIC,
    ) -> Ownership:
        return acquire(self.session, topic, lock or self.session.name, settle)[0]

    def calls(self) -> int:
        return sum(self.kv.count(operation) for operation in OPERATIONS)

    def cut_off(self) -> None:
        for operation in OPERATIONS:
            self.kv.fail(operation, times=1000)


@dataclass
class Cluster:
    """Machines that share a catalog. They share its clock too, unless a test gives them another."""

    clock: ManualClock = field(default_factory=ManualClock)
    kv: SqliteKv = field(init=False)
    machines: list[Machine] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kv = SqliteKv(None, boottime=lambda: 1000.0 + self.clock.monotonic())

    def machine(self, clock: ManualClock | None = None, **changes: Any) -> Machine:
        machine = Machine(self.kv, clock or self.clock, **changes)
        self.machines.append(machine)
        return machine

    @property
    def catalog(self) -> Catalog:
        return Catalog(self.kv)

    def record(self) -> TopicRecord:
        record = self.catalog.record(TOPIC)
        assert record is not None
        return record

    def change(self, **fields: Any) -> None:
        key = self.catalog.keys.record(TOPIC)
        changed = replace(self.record(), **fields)
        assert self.kv.commit([], [Put(key, encode_record(changed))]) is not None

    def close(self) -> None:
        for machine in self.machines:
            machine.kv.heal()
            machine.session.close()
        self.kv.close()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()


# ---- the lease ----


def test_a_lease_is_valid_from_before_it_was_asked_for(cluster: Cluster) -> None:
    machine = cluster.machine()
    machine.kv.before = lambda _: machine.clock.advance(5)
    machine.session.lease()
    assert machine.session.valid_until == LEASE
    machine.kv.before = lambda _: machine.clock.advance(3)
    machine.session.renew()
    assert machine.session.valid_until == 5 + LEASE


def test_a_lease_counts_until_its_margin(cluster: Cluster) -> None:
    session = cluster.machine().session
    session.lease()
    alive = []
    for seconds in (0, LEASE - MARGIN - 1, 1):
        cluster.clock.advance(seconds)
        alive.append(session.alive)
    assert alive == [True, True, False]


def test_one_lease_serves_until_it_ends(cluster: Cluster) -> None:
    session = cluster.machine().session
    lease = session.lease()
    assert session.lease() == lease
    cluster.clock.advance(LEASE - 1)
    assert session.lease() == lease, "it was in its margin, and is renewed"
    assert session.alive
    cluster.clock.advance(LEASE + 1)
    assert session.lease() != lease
    assert session.alive


def test_a_lease_that_is_gone_is_noticed_by_renewing(cluster: Cluster) -> None:
    session = cluster.machine().session
    lease = session.lease()
    cluster.kv.revoke(lease)
    with pytest.raises(TopicFenced):
        session.renew()
    assert session.current is None
    assert not session.alive
    session.renew()


def _later(session: Session, moment: float) -> bool:
    return session.valid_until > moment


def test_the_thread_keeps_the_lease() -> None:
    """The catalog's clock stands still, so a thread that renews late has not lost its lease."""
    kv = SqliteKv(None, boottime=lambda: 1000.0)
    session = Session(Catalog(kv), MetadataSettings(lease_seconds=0.5, lease_margin_seconds=0.05))
    try:
        lease = session.lease()
        for _ in range(3):
            wait_until(partial(_later, session, session.valid_until))
        assert session.lease() == lease
        kv.revoke(lease)
        wait_until(lambda: session.current is None)
        assert session.lease() != lease
    finally:
        session.close()
        kv.close()


def test_the_thread_outlives_a_catalog_that_fails_and_ends_with_one_that_is_closed() -> None:
    kv = FaultKv(SqliteKv(None, boottime=lambda: 1000.0))
    session = Session(Catalog(kv), MetadataSettings(lease_seconds=0.5, lease_margin_seconds=0.05))
    before = set(threading.enumerate())
    session.lease()
    keepers = set(threading.enumerate()) - before
    assert [each.name for each in keepers] == ["forebay-lease"]
    kv.fail("keep_alive")
    failed = kv.count("keep_alive") + 1
    wait_until(lambda: kv.count("keep_alive") > failed)
    kv.close()
    wait_until(lambda: not any(each.is_alive() for each in keepers))


def test_a_closed_session_frees_its_topics_and_takes_none(cluster: Cluster) -> None:
    machine, other = cluster.machine(), cluster.machine()
    owned = machine.take()
    with pytest.raises(TopicOwned):
        other.take()
    machine.session.close()
    machine.session.close()
    assert other.take().epoch == 2
    with pytest.raises(TopicFenced):
        owned.confirm()
    with pytest.raises(TopicFenced):
        machine.take()
    assert cluster.catalog.owner(TOPIC) is not None


def test_a_session_that_cannot_say_goodbye_leaves_its_lease_to_end(cluster: Cluster) -> None:
    machine, other = cluster.machine(), cluster.machine()
    machine.take()
    machine.cut_off()
    machine.session.close()
    with pytest.raises(TopicOwned):
        other.take()
    cluster.clock.advance(LEASE + 1)
    assert other.take().epoch == 2


# ---- taking a topic ----


def test_a_new_topic_gets_the_first_epoch_and_an_owner(cluster: Cluster) -> None:
    machine = cluster.machine()
    ownership, record = acquire(machine.session, TOPIC, "the lock", settle_new)
    assert (ownership.epoch, record) == (1, TopicRecord(epoch=1, log_id="log"))
    owner = Owner(1, machine.session.name, "the lock", cluster.clock.now_ms())
    assert cluster.catalog.owner(TOPIC) == owner
    assert cluster.record() == record


def test_a_topic_whose_owner_is_alive_is_not_taken(cluster: Cluster) -> None:
    machine = cluster.machine()
    owned = machine.take()
    with pytest.raises(TopicOwned, match=machine.session.name):
        cluster.machine().take()
    owned.confirm()
    assert cluster.record().epoch == 1


def test_whoever_holds_the_lock_that_the_owner_held_takes_the_topic_at_once(
    cluster: Cluster,
) -> None:
    cluster.machine().take("boot:8:42")
    assert cluster.machine().take("boot:8:42").epoch == 2


def test_a_copy_of_the_directory_has_another_lock_and_waits(cluster: Cluster) -> None:
    cluster.machine().take("boot:8:42")
    copied = cluster.machine()
    with pytest.raises(TopicOwned):
        copied.take("boot:8:43")
    cluster.clock.advance(LEASE + 1)
    assert copied.take("boot:8:43").epoch == 2


def test_the_same_session_takes_its_topic_again_and_the_older_hold_is_fenced(
    cluster: Cluster,
) -> None:
    machine = cluster.machine()
    older = machine.take("one")
    newer = machine.take("two")
    assert (older.epoch, newer.epoch) == (1, 2)
    newer.confirm()
    with pytest.raises(TopicFenced):
        older.confirm()
    with pytest.raises(TopicFenced):
        older.admit(1)
    with pytest.raises(TopicFenced):
        older.release(0)
    newer.confirm()


def test_epochs_grow_whoever_takes_the_topic(cluster: Cluster) -> None:
    epochs = [cluster.machine().take("same").epoch for _ in range(3)]
    cluster.clock.advance(LEASE + 1)
    epochs.append(cluster.machine().take().epoch)
    assert epochs == [1, 2, 3, 4]


def test_a_settlement_that_refuses_changes_nothing(cluster: Cluster) -> None:
    def refuse(_: TopicRecord | None) -> TopicRecord:
        raise ServiceError("no")

    with pytest.raises(ServiceError):
        cluster.machine().take(settle=refuse)
    assert cluster.catalog.record(TOPIC) is None
    assert cluster.catalog.owner(TOPIC) is None


def test_of_two_sessions_that_race_for_a_topic_one_wins(cluster: Cluster) -> None:
    first, second = cluster.machine(), cluster.machine()
    winners: list[Ownership] = []

    def other(operation: str) -> None:
        if operation == "commit":
            first.kv.before = None
            winners.append(second.take())

    first.kv.before = other
    with pytest.raises(TopicOwned):
        first.take()
    winners[0].confirm()
    assert cluster.record().epoch == 1


def test_of_many_threads_that_race_for_a_topic_one_wins(cluster: Cluster) -> None:
    machines = [cluster.machine() for _ in range(5)]
    barrier = threading.Barrier(len(machines))
    won: list[Ownership] = []
    lost: list[TopicOwned] = []

    def run(machine: Machine) -> None:
        barrier.wait()
        try:
            won.append(machine.take())
        except TopicOwned as error:
            lost.append(error)

    threads = [threading.Thread(target=run, args=(machine,)) for machine in machines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 4)
    won[0].confirm()


def test_a_takeover_whose_answer_was_lost_is_made_again_with_a_higher_epoch(
    cluster: Cluster,
) -> None:
    machine = cluster.machine()
    machine.kv.fail("commit", applied=True)
    with pytest.raises(ServiceUnavailable):
        machine.take()
    assert machine.take().epoch == 2


def test_a_topic_is_taken_with_a_new_lease_when_the_old_one_turns_out_to_be_gone(
    cluster: Cluster,
) -> None:
    machine = cluster.machine()
    cluster.kv.revoke(machine.session.lease())
    machine.take().confirm()
    assert cluster.catalog.owner(TOPIC) is not None


def test_a_lease_lost_right_after_the_takeover_does_not_count_for_the_topic(
    cluster: Cluster,
) -> None:
    """The owner key is gone with the lease: a newer lease of the session must not replace it."""
    machine, other = cluster.machine(), cluster.machine()
    commit = machine.kv.commit

    def commit_and_lose(compares: Sequence[Compare], writes: Sequence[Put | Remove]) -> int | None:
        done = commit(compares, writes)
        cluster.kv.revoke(machine.session.lease())
        with pytest.raises(TopicFenced):
            machine.session.renew()
        machine.session.lease()
        return done

    machine.kv.commit = commit_and_lose  # type: ignore[method-assign]  # the moment between
    owned = machine.take()
    machine.kv.commit = commit  # type: ignore[method-assign]
    assert machine.session.alive
    other.take()
    with pytest.raises(TopicFenced):
        owned.confirm()


# ---- confirm ----


def test_confirming_within_the_lease_asks_the_catalog_nothing(cluster: Cluster) -> None:
    machine = cluster.machine()
    owned = machine.take()
    before = machine.calls()
    for _ in range(100):
        owned.confirm()
    cluster.clock.advance(LEASE - MARGIN - 1)
    owned.confirm()
    assert machine.calls() == before


def test_confirming_in_the_margin_renews_the_lease_first(cluster: Cluster) -> None:
    machine = cluster.machine()
    owned = machine.take()
    cluster.clock.advance(LEASE - MARGIN)
    owned.confirm()
    assert machine.session.alive
    assert machine.kv.count("keep_alive") == 1
    assert cluster.record().epoch == 1


def test_a_lost_lease_that_nobody_used_is_made_good(cluster: Cluster) -> None:
    machine = cluster.machine()
    owned = machine.take("lock")
    cluster.clock.advance(LEASE + 1)
    assert cluster.catalog.owner(TOPIC) is None
    owned.confirm()
    assert cluster.record().epoch == 1
    owner = cluster.catalog.owner(TOPIC)
    assert owner == Owner(1, machine.session.name, "lock", cluster.clock.now_ms())
    with pytest.raises(TopicOwned):
        cluster.machine().take()
    before = machine.calls()
    owned.confirm()
    assert machine.calls() == before


def test_all_topics_of_a_session_are_made_good_one_by_one(cluster: Cluster) -> None:
    machine = cluster.machine()
    topics = [TopicName("a", "b"), TopicName("a", "c")]
    owned = [machine.take(topic=topic) for topic in topics]
    cluster.clock.advance(LEASE + 1)
    owned[0].confirm()
    assert cluster.catalog.owner(topics[1]) is None
    owned[1].confirm()
    assert cluster.catalog.owner(topics[1]) is not None


def test_a_lost_lease_that_another_used_is_a_lost_topic(cluster: Cluster) -> None:
    machine, other = cluster.machine(), cluster.machine()
    owned = machine.take()
    cluster.clock.advance(LEASE + 1)
    taken = other.take()
    with pytest.raises(TopicFenced, match=r"epoch is 2.* 1"):
        owned.confirm()
    taken.confirm()
    cluster.clock.advance(LEASE + 1)
    with pytest.raises(TopicFenced):
        owned.confirm()


def test_a_topic_taken_over_while_it_is_made_good_is_lost(cluster: Cluster) -> None:
    machine, other = cluster.machine(), cluster.machine()
    owned = machine.take()
    cluster.clock.advance(LEASE + 1)

    def take_over(operation: str) -> None:
        if operation == "commit":
            machine.kv.before = None
            other.take()

    machine.kv.before = take_over
    with pytest.raises(TopicFenced):
        owned.confirm()
    assert cluster.record().epoch == 2


def test_without_a_catalog_nothing_is_confirmed_once_the_lease_may_have_ended(
    cluster: Cluster,
) -> None:
    machine = cluster.machine()
    owned = machine.take()
    machine.cut_off()
    owned.confirm()
    cluster.clock.advance(LEASE - MARGIN)
    with pytest.raises(ServiceUnavailable):
        owned.confirm()
    machine.kv.heal()
    owned.confirm()


def test_a_process_that_was_paused_is_fenced_before_it_acknowledges(cluster: Cluster) -> None:
    machine, other = cluster.machine(), cluster.machine()
    owned = machine.take()
    owned.admit(1)
    # The machine sleeps here, between the write and its acknowledgement; the clock goes on.
    cluster.clock.advance(LEASE * 3)
    other.take()
    with pytest.raises(TopicFenced):
        owned.confirm()


def test_a_pause_while_the_catalog_answers_is_noticed(cluster: Cluster) -> None:
    clock = ManualClock()
    machine = cluster.machine(clock)
    owned = machine.take()
    clock.advance(LEASE - MARGIN)
    machine.kv.before = lambda _: clock.advance(LEASE)
    with pytest.raises(TopicFenced, match=str(TOPIC)):
        owned.confirm()


def test_a_clock_that_runs_ahead_costs_a_question_and_nothing_else(cluster: Cluster) -> None:
    clock = ManualClock()
    machine = cluster.machine(clock)
    owned = machine.take()
    clock.advance(10 * LEASE)
    owned.confirm()
    assert cluster.record().epoch == 1


def test_a_catalog_that_began_anew_does_not_give_the_topic_back_to_a_zombie(
    cluster: Cluster,
) -> None:
    """Epochs began anew too, so the numbers are equal, and only the owner's name differs."""
    machine, other = cluster.machine(), cluster.machine()
    owned = machine.take()
    assert machine.session.current is not None
    cluster.kv.revoke(machine.session.current)
    assert cluster.kv.commit([], [Remove(cluster.catalog.keys.record(TOPIC))]) is not None
    assert other.take().epoch == owned.epoch
    cluster.clock.advance(LEASE - MARGIN)
    other.session.renew()
    with pytest.raises(TopicFenced):
        owned.confirm()
    owner = cluster.catalog.owner(TOPIC)
    assert owner is not None
    assert owner.name == other.session.name


def test_a_catalog_that_lost_the_topic_confirms_nothing(cluster: Cluster) -> None:
    owned = cluster.machine().take()
    keys = cluster.catalog.keys
    assert cluster.kv.commit([], [Remove(keys.record(TOPIC))]) is not None
    cluster.clock.advance(LEASE + 1)
    with pytest.raises(TopicFenced):
        owned.confirm()
    assert cluster.catalog.record(TOPIC) is None


# ---- admit ----


def test_offsets_are_reserved_a_block_at_a_time(cluster: Cluster) -> None:
    machine = cluster.machine()
    owned = machine.take()
    owned.admit(0)
    assert cluster.record().reserved == 0
    owned.admit(1)
    assert cluster.record().reserved == 1 + BLOCK
    before = machine.calls()
    owned.admit(1 + BLOCK)
    assert machine.calls() == before
    owned.admit(2 + BLOCK)
    assert cluster.record().reserved == 2 + 2 * BLOCK


def test_no_offset_is_admitted_beyond_what_the_catalog_has_reserved(cluster: Cluster) -> None:
    machine = cluster.machine()
    owned = machine.take()
    for end in (1, 7, BLOCK, BLOCK + 2, 3 * BLOCK + 1, 10 * BLOCK, 10 * BLOCK + 1):
        owned.admit(end)
        assert cluster.record().reserved >= end


def test_nothing_is_admitted_when_the_reservation_fails(cluster: Cluster) -> None:
    machine = cluster.machine()
    owned = machine.take()
    machine.kv.fail("commit")
    with pytest.raises(ServiceUnavailable):
        owned.admit(1)
    assert cluster.record().reserved == 0
    machine.kv.fail("commit", applied=True)
    with pytest.raises(ServiceUnavailable):
        owned.admit(1)
    owned.admit(1)
    assert cluster.record().reserved == 1 + BLOCK


def test_a_reservation_is_never_lowered_by_another_one(cluster: Cluster) -> None:
    owned = cluster.machine().take()
    cluster.change(reserved=1000)
    owned.admit(5)
    assert cluster.record().reserved == 1000


def test_reservations_end_where_offsets_do(cluster: Cluster) -> None:
    owned = cluster.machine().take()
    cluster.change(tail=OFFSET_MAX - 2)
    owned.admit(OFFSET_MAX - 1)
    assert cluster.record().reserved == OFFSET_MAX


@pytest.mark.parametrize("change", [{"tail": 7}, {"begin": 7}])
def test_a_log_runs_a_bounded_distance_past_the_last_object_or_marker(
    cluster: Cluster, change: dict[str, int]
) -> None:
    """A restore without log and catalog continues after this distance."""
    owned = cluster.machine().take()
    owned.admit(LOG_DISTANCE)
    assert cluster.record().reserved == LOG_DISTANCE
    with pytest.raises(ServiceRefused, match="forebay offload"):
        owned.admit(LOG_DISTANCE + 1)
    cluster.change(**change)
    owned.admit(LOG_DISTANCE + 7)
    assert cluster.record().reserved == LOG_DISTANCE + 7
    with pytest.raises(ServiceRefused, match=str(LOG_DISTANCE + 7)):
        owned.admit(LOG_DISTANCE + 8)


def test_the_record_tells_what_was_certainly_assigned(cluster: Cluster) -> None:
    owned = cluster.machine().take()
    owned.admit(5)
    assert cluster.record().assigned == 0
    owned.confirm()
    owned.admit(cluster.record().reserved + 1)
    assert cluster.record().assigned == 5
    owned.release(9)
    assert (cluster.record().assigned, cluster.record().reserved) == (9, 9)


def test_an_owner_that_was_refused_writes_nothing_more(cluster: Cluster) -> None:
    owned = cluster.machine().take()
    owned.refuse(TopicFenced("an older copy"))
    with pytest.raises(TopicFenced, match="an older copy"):
        owned.admit(1)
    with pytest.raises(TopicFenced, match="an older copy"):
        owned.confirm()


def test_a_fenced_owner_reserves_nothing(cluster: Cluster) -> None:
    owned = cluster.machine().take("same")
    cluster.machine().take("same")
    with pytest.raises(TopicFenced):
        owned.admit(1)
    assert cluster.record().reserved == 0


# ---- release ----


@pytest.mark.parametrize("tail", [0, 5, 10])
def test_a_released_topic_has_nothing_reserved_that_was_not_handed_out(
    cluster: Cluster, tail: int
) -> None:
    owned = cluster.machine().take()
    owned.admit(10)
    cluster.change(tail=tail)
    owned.release(10)
    assert (cluster.record().tail, cluster.record().reserved) == (tail, 10)
    assert cluster.catalog.owner(TOPIC) is None
    assert cluster.machine().take().epoch == 2


def test_a_released_topic_is_neither_written_nor_acknowledged(cluster: Cluster) -> None:
    owned = cluster.machine().take()
    owned.admit(10)
    owned.release(10)
    with pytest.raises(TopicFenced, match="released"):
        owned.confirm()
    for end in (11, 10):
        with pytest.raises(TopicFenced):
            owned.admit(end)


def test_a_release_after_the_lease_ended_still_frees_the_reservation(cluster: Cluster) -> None:
    owned = cluster.machine().take()
    owned.admit(10)
    cluster.clock.advance(LEASE + 1)
    owned.release(10)
    assert cluster.record().reserved == 10


def test_a_release_leaves_the_next_owner_alone(cluster: Cluster) -> None:
    owned = cluster.machine().take()
    owned.admit(10)
    cluster.clock.advance(LEASE + 1)
    taken = cluster.machine().take()
    taken.admit(500)
    reserved = cluster.record().reserved
    with pytest.raises(TopicFenced):
        owned.release(10)
    assert cluster.record().reserved == reserved
    assert cluster.catalog.owner(TOPIC) is not None
    taken.confirm()


def test_of_a_release_and_a_takeover_that_cross_the_takeover_stands(cluster: Cluster) -> None:
    machine, other = cluster.machine(), cluster.machine()
    owned = machine.take("same")
    owned.admit(10)

    def take_over(operation: str) -> None:
        if operation == "commit":
            machine.kv.before = None
            other.take("same").admit(100)

    machine.kv.before = take_over
    with pytest.raises(TopicFenced):
        owned.release(10)
    assert cluster.record().reserved == 100 + BLOCK
    owner = cluster.catalog.owner(TOPIC)
    assert owner is not None
    assert (owner.epoch, owner.name) == (2, other.session.name)


def test_a_release_whose_answer_was_lost_is_made(cluster: Cluster) -> None:
    machine = cluster.machine()
    owned = machine.take()
    owned.admit(10)
    machine.kv.fail("commit", applied=True)
    with pytest.raises(ServiceUnavailable):
        owned.release(10)
    assert cluster.catalog.owner(TOPIC) is None
    assert cluster.record().reserved == 10


# ---- together ----


def test_at_no_moment_do_two_owners_confirm(cluster: Cluster) -> None:
    """The second takes over before each call of the first one's slow confirmation."""
    for call in range(1, 12):
        topic = TopicName("round", str(call))
        machine, other = cluster.machine(), cluster.machine()
        owned = machine.take(topic=topic)
        cluster.clock.advance(LEASE + 1)
        calls = 0
        won: list[Ownership | None] = []

        def rival(_: str) -> None:
            nonlocal calls
            calls += 1
            if calls == call:  # noqa: B023  # used within this round only
                machine.kv.before = None  # noqa: B023
                try:
                    won.append(other.take(topic=topic))  # noqa: B023
                except TopicOwned:
                    won.append(None)  # noqa: B023

        machine.kv.before = rival
        try:
            owned.confirm()
            confirmed = True
        except TopicFenced:
            confirmed = False
        machine.kv.before = None
        assert confirmed is (won in ([], [None])), f"at call {call}"


def test_comparisons_and_writes_of_a_takeover_are_one_transaction(cluster: Cluster) -> None:
    machine = cluster.machine()
    before = machine.kv.count("commit")
    machine.take()
    assert machine.kv.count("commit") == before + 1
    record = cluster.kv.get(cluster.catalog.keys.record(TOPIC))
    owner = cluster.kv.get(cluster.catalog.keys.owner(TOPIC))
    assert record is not None
    assert owner is not None
    assert record.revision == owner.revision
    assert (record.lease, owner.lease) == (None, machine.session.current)
    assert cluster.kv.commit([Compare(owner.key, owner.revision)], [Remove(owner.key)]) is not None
