"""What a sweep finds and removes; the schedules with others at work are in test_sweep_races.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from forebay.catalog.adopt import restoring
from forebay.catalog.kv import Put, Remove
from forebay.catalog.records import Life, State, TopicRecord, encode_record
from forebay.catalog.swap import replaced_descriptors, swap
from forebay.errors import ServiceUnavailable
from forebay.format.marker import BeginMarker, encode_marker
from forebay.format.names import TopicName, object_key, pending_object, sidecar
from forebay.objects.markers import list_markers
from forebay.upload.inventory import topics_in_store
from forebay.upload.sweep import ERRORS, Action, Kind, SweepItem, SweepReport, sweep
from support.reservoirs import GRACE_MINUTES, TOPIC, Reservoir, frames, with_ids


@pytest.fixture
def at() -> Iterator[Reservoir]:
    reservoir = Reservoir()
    yield reservoir
    reservoir.close()


def swept(at: Reservoir, *, dry_run: bool = False) -> SweepReport:
    return sweep(at.catalog, at.store, grace_minutes=GRACE_MINUTES, dry_run=dry_run, clock=at.clock)


def said(report: SweepReport) -> list[tuple[Kind, str, Action]]:
    return [(item.kind, item.key.rpartition("/")[2], item.action) for item in report.items]


def test_what_is_committed_is_counted_and_left_alone(at: Reservoir) -> None:
    done = at.fill(at.own(), 0, 10, 25, 30)
    at.grow_old()
    report = swept(at)
    assert (report.items, report.committed, report.errors) == ([], 3, 0)
    assert report.committed_bytes == sum(each.size for each in done)
    assert at.names() == with_ids([each.object_id for each in done])


def test_an_object_that_no_descriptor_names_goes_after_the_grace_time(at: Reservoir) -> None:
    at.fill(at.own(), 0, 10, 20)
    at.write("data-5-14.dnb1", frames(5, 10))
    young = swept(at)
    assert said(young) == [(Kind.ORPHAN, "data-5-14.dnb1", Action.KEPT)]
    assert young.items[0].reason == "it is younger than the grace time"
    at.grow_old()
    assert said(swept(at)) == [(Kind.ORPHAN, "data-5-14.dnb1", Action.REMOVED)]
    assert at.names() == with_ids(["data-0-9.dnb1", "data-10-19.dnb1"])
    assert at.catalog.life(TOPIC, "data-5-14.dnb1") is None, "the name is free again"
    assert swept(at).items == []


def test_a_dry_run_lists_everything_and_changes_nothing(at: Reservoir) -> None:
    owner = at.own()
    at.fill(owner, 0, 10, 20)
    token = at.catalog.retire(TOPIC, owner.epoch, next(at.catalog.get_object_descriptors(TOPIC)))
    assert token is not None
    at.intend(owner, 12, 15)
    at.write(pending_object(11, "ab"), frames(11, 3), with_sidecar=False)
    at.write("data-13-18.dnb1", frames(13, 6))
    at.store.put_object(object_key(TOPIC, "data-90-99.dnb1.json"), b"{}")
    at.store.put_object(object_key(TOPIC, "notes.txt"), b"mine")
    at.grow_old()
    before = at.entries(), at.listing()
    report = swept(at, dry_run=True)
    assert (at.entries(), at.listing()) == before
    would = Action.WOULD_REMOVE
    assert said(report) == [
        (Kind.DELETING, "data-0-9.dnb1", would),
        (Kind.PENDING, "data-11-pending-ab.dnb1", would),
        (Kind.INTENT, "data-12-15.dnb1", would),
        (Kind.ORPHAN, "data-13-18.dnb1", would),
        (Kind.SIDECAR, "data-90-99.dnb1.json", would),
        (Kind.UNKNOWN, "notes.txt", Action.KEPT),
    ]
    removed = [(kind, key) for kind, key, action in said(swept(at)) if action is Action.REMOVED]
    assert removed == [(kind, key) for kind, key, action in said(report) if action is would]
    assert at.names() == [*with_ids(["data-10-19.dnb1"]), "notes.txt"]


def test_totals_are_by_action_and_progress_is_told_of_each_item(at: Reservoir) -> None:
    at.fill(at.own(), 0, 60)
    at.write("data-30-39.dnb1", frames(30, 10), with_sidecar=False)
    at.grow_old()
    at.write("data-40-59.dnb1", frames(40, 20), with_sidecar=False)
    told: list[SweepItem] = []
    report = sweep(
        at.catalog,
        at.store,
        grace_minutes=GRACE_MINUTES,
        dry_run=False,
        clock=at.clock,
        progress=told.append,
    )
    assert told == report.items
    assert report.counts[Action.REMOVED] == report.counts[Action.KEPT] == 1
    assert report.bytes[Action.REMOVED] == len(frames(30, 10))
    assert report.bytes[Action.KEPT] == len(frames(40, 20))
    assert [item.age_ms for item in told] == [GRACE_MINUTES * 60_000, 0]


def test_pending_keys_of_a_dead_rolling_writer_go(at: Reservoir) -> None:
    owner = at.own()
    at.fill(owner, 0, 10)
    name = pending_object(10, "1abc")
    at.catalog.intend(TOPIC, owner.epoch, name)
    at.write(name, frames(10, 5), with_sidecar=False)
    at.grow_old()
    living = swept(at)
    assert said(living) == [(Kind.PENDING, name, Action.KEPT)]
    assert living.items[0].reason == "the topic's owner may still commit it"
    at.end_sessions()
    assert said(swept(at)) == [(Kind.PENDING, name, Action.REMOVED)]
    assert at.names() == with_ids(["data-0-9.dnb1"])
    assert at.catalog.life(TOPIC, name) is None


def test_a_replaced_object_is_kept_for_its_grace_time(at: Reservoir) -> None:
    owner = at.own()
    small = at.fill(owner, 0, 10, 20)
    for each in small:
        at.catalog.mark_verified(TOPIC, each)
    intent = at.intend(owner, 0, 19)
    large = at.write(intent.object_id, frames(0, 20))
    swap(at.catalog, TOPIC, intent, large, small, clock=at.clock)
    names = [each.object_id for each in small]
    assert said(swept(at)) == [(Kind.REPLACED, name, Action.KEPT) for name in names]
    at.grow_old()
    assert len(list(replaced_descriptors(at.catalog, TOPIC, 0, 20))) == 2
    assert said(swept(at)) == [(Kind.REPLACED, name, Action.REMOVED) for name in names]
    assert at.names() == with_ids(["data-0-19.dnb1"])
    assert list(replaced_descriptors(at.catalog, TOPIC, 0, 20)) == [], "what was kept goes too"
    at.require_chain_whole()


def test_a_descriptor_that_is_only_kept_names_nothing(at: Reservoir) -> None:
    """The small objects lose their rows, as with an older catalog: then they are orphans."""
    owner = at.own()
    small = at.fill(owner, 0, 10, 20)
    for each in small:
        at.catalog.mark_verified(TOPIC, each)
    intent = at.intend(owner, 0, 19)
    swap(at.catalog, TOPIC, intent, at.write(intent.object_id, frames(0, 20)), small)
    lives = [Remove(at.catalog.keys.life(TOPIC, each.object_id)) for each in small]
    at.kv.commit([], lives)
    at.grow_old()
    kinds = [(kind, action) for kind, _, action in said(swept(at))]
    assert kinds == [(Kind.ORPHAN, Action.REMOVED)] * 2
    at.require_chain_whole()


def test_a_missing_object_is_an_error_and_its_descriptor_stays(at: Reservoir) -> None:
    at.fill(at.own(), 0, 10, 20)
    at.backend.delete_object(object_key(TOPIC, "data-0-9.dnb1"))
    at.grow_old()
    before = ERRORS.value(Kind.MISSING)
    report = swept(at)
    assert said(report) == [(Kind.MISSING, "data-0-9.dnb1", Action.KEPT)]
    assert (report.errors, report.committed) == (1, 1)
    assert ERRORS.value(Kind.MISSING) == before + 1
    assert at.chain() == ["data-0-9.dnb1", "data-10-19.dnb1"]


def test_an_object_of_another_size_is_an_error(at: Reservoir) -> None:
    at.fill(at.own(), 0, 10)
    at.store.put_object(object_key(TOPIC, "data-0-9.dnb1"), frames(0, 9))
    report = swept(at)
    assert said(report) == [(Kind.RESIZED, "data-0-9.dnb1", Action.KEPT)]
    assert report.errors == 1


def test_a_committed_row_without_a_descriptor_is_reported_and_kept(at: Reservoir) -> None:
    at.fill(at.own(), 0, 10)
    at.write("data-10-19.dnb1", frames(10, 10))
    row = Life(State.COMMITTED, 1, "t", at.clock.now_ms())
    at.kv.commit([], [Put(at.catalog.keys.life(TOPIC, "data-10-19.dnb1"), encode_record(row))])
    at.grow_old()
    report = swept(at)
    assert said(report) == [(Kind.UNNAMED, "data-10-19.dnb1", Action.KEPT)]
    assert report.errors == 1


def test_an_object_that_a_descriptor_names_counts_even_without_a_row(at: Reservoir) -> None:
    descriptor = at.upload(at.own(), 0, 9)
    at.kv.commit([], [Remove(at.catalog.keys.life(TOPIC, descriptor.object_id))])
    at.grow_old()
    assert swept(at).items == []
    at.require_chain_whole()


def test_unknown_files_are_never_touched(at: Reservoir) -> None:
    at.fill(at.own(), 0, 10)
    names = ["data-00-9.dnb1", "data-9-0.dnb1", "data-0-9.dnb1-old", "sub/data-5-6.dnb1", "x.json"]
    for name in names:
        at.store.put_object(object_key(TOPIC, name), b"?")
    at.grow_old()
    report = swept(at)
    assert {(item.kind, item.action) for item in report.items} == {(Kind.UNKNOWN, Action.KEPT)}
    assert len(report.items) == len(names)
    assert at.names() == sorted([*names, *with_ids(["data-0-9.dnb1"])])


def test_an_error_for_one_key_stops_nothing_else(at: Reservoir) -> None:
    at.fill(at.own(), 0, 60)
    for start in (10, 30, 50):
        at.write(f"data-{start}-{start + 4}.dnb1", frames(start, 5))

    def before(operation: str, key: str) -> None:
        if operation == "delete" and key.endswith("data-30-34.dnb1"):
            raise ServiceUnavailable("no answer")

    at.backend.before = before
    at.grow_old()
    failed = ERRORS.value(Kind.ORPHAN)
    report = swept(at)
    assert [action for _, _, action in said(report)] == [
        Action.REMOVED,
        Action.FAILED,
        Action.REMOVED,
    ]
    assert (report.errors, ERRORS.value(Kind.ORPHAN)) == (1, failed + 1)
    assert "no answer" in report.items[1].reason
    at.backend.before = lambda _operation, _key: None
    at.grow_old()
    assert said(swept(at)) == [(Kind.DELETING, "data-30-34.dnb1", Action.REMOVED)]
    life = at.catalog.life(TOPIC, "data-30-34.dnb1")
    assert life is not None
    assert life.state is State.GONE, "the first request may still be on its way"


def test_a_topic_that_cannot_be_swept_stops_no_other(at: Reservoir) -> None:
    other = TopicName("default", "invoices")
    session = at.session()
    at.own(session, other)
    at.fill(at.own(session), 0, 20)
    at.write("data-10-19.dnb1", frames(10, 10))
    key = at.catalog.keys.life(other, "data-0-1.dnb1")
    at.kv.commit([], [Put(key, b"no row")])
    at.grow_old()
    report = swept(at)
    assert [(item.topic, item.kind, item.action) for item in report.items] == [
        (other, Kind.TOPIC, Action.FAILED),
        (TOPIC, Kind.ORPHAN, Action.REMOVED),
    ]


def test_a_topic_unknown_to_the_catalog_is_reported_and_kept(at: Reservoir) -> None:
    at.write("data-0-9.dnb1", frames(0, 10))
    at.write(pending_object(10, "ab"), frames(10, 3), with_sidecar=False)
    at.grow_old()
    before = at.entries(), at.listing()
    report = swept(at)
    assert [(item.kind, item.action) for item in report.items] == [(Kind.UNRESTORED, Action.KEPT)]
    assert report.items[0].reason == "unknown to the catalog: restore first (3 keys)"
    assert report.items[0].bytes == sum(size for _, size, _ in at.listing())
    assert (at.entries(), at.listing()) == before


def test_nothing_is_swept_while_a_restore_is_unfinished(at: Reservoir) -> None:
    at.write("data-0-9.dnb1", frames(0, 10))
    record = TopicRecord(epoch=1, log_id=restoring(None))
    at.kv.commit([], [Put(at.catalog.keys.record(TOPIC), encode_record(record))])
    at.grow_old()
    report = swept(at)
    assert [(item.kind, item.action) for item in report.items] == [(Kind.UNRESTORED, Action.KEPT)]
    assert at.names() == with_ids(["data-0-9.dnb1"])


def test_only_the_named_topics_are_swept(at: Reservoir) -> None:
    other = TopicName("default", "invoices")
    session = at.session()
    for topic in (TOPIC, other):
        at.fill(at.own(session, topic), 0, 10)
        at.write("data-0-4.dnb1", frames(0, 5), topic=topic)
    at.grow_old()
    report = sweep(
        at.catalog, at.store, [other], grace_minutes=GRACE_MINUTES, dry_run=False, clock=at.clock
    )
    assert (report.topics, report.counts[Action.REMOVED]) == (1, 1)
    assert at.names() == with_ids(["data-0-4.dnb1", "data-0-9.dnb1"])


def test_the_topics_of_a_store_are_found_among_other_files(at: Reservoir) -> None:
    wanted = [TopicName("a", "t"), TopicName("a", "t-1"), TopicName("a", "t0"), TopicName("b", "t")]
    for topic in wanted:
        for start in range(3):
            at.write(f"data-{start}-{start}.dnb1", frames(start, 1), topic=topic)
    for key in ("storage/topics/a", "storage/topics/a/x", "storage/topics/a/no/segments/data-0-1"):
        at.store.put_object(key, b"?")
    assert sorted(topics_in_store(at.store)) == wanted


def test_stray_sidecars_of_gone_names_go_too(at: Reservoir) -> None:
    at.own()
    token = at.catalog.condemn(TOPIC, "data-0-9.dnb1", None)
    assert token is not None
    at.catalog.bury(TOPIC, "data-0-9.dnb1", token, certain=False)
    at.write("data-0-9.dnb1", frames(0, 10))
    at.backend.delete_object(object_key(TOPIC, "data-0-9.dnb1"))
    at.grow_old()
    name = sidecar("data-0-9.dnb1")
    assert said(swept(at)) == [(Kind.SIDECAR, name, Action.REMOVED)]
    assert at.names() == []


# ---- nothing that may be the only copy ----


def grace_0(at: Reservoir) -> SweepReport:
    return sweep(at.catalog, at.store, grace_minutes=0, dry_run=False, clock=at.clock)


def test_objects_after_the_tail_of_an_older_catalog_are_kept_and_reported(at: Reservoir) -> None:
    at.fill(at.own(), 0, 10)
    at.write("data-10-19.dnb1", frames(10, 10))
    at.write("data-5-14.dnb1", frames(5, 10))
    at.grow_old()
    report = grace_0(at)
    assert said(report) == [
        (Kind.NEWER, "data-10-19.dnb1", Action.KEPT),
        (Kind.NEWER, "data-5-14.dnb1", Action.KEPT),
    ]
    assert report.errors == 2
    assert "forebay restore" in report.items[0].reason


@pytest.mark.parametrize("state", [State.INTENDED, State.DELETING, State.REPLACED, State.GONE])
def test_whatever_its_row_says_an_object_after_the_tail_is_kept(
    at: Reservoir, state: State
) -> None:
    """The row may be that of an older copy, and the name have been used since."""
    at.fill(at.own(), 0, 10)
    at.end_sessions()
    at.write("data-10-19.dnb1", frames(10, 10))
    row = Life(state, 1, "t", at.clock.now_ms())
    at.kv.commit([], [Put(at.catalog.keys.life(TOPIC, "data-10-19.dnb1"), encode_record(row))])
    at.grow_old()
    report = grace_0(at)
    assert [action for _, _, action in said(report)] == [Action.KEPT]
    assert report.errors == 0


def test_an_orphan_whose_messages_no_existing_object_holds_is_kept(at: Reservoir) -> None:
    """The catalog is older than a compaction, whose object is the only one left."""
    at.fill(at.own(), 0, 10, 20, 30)
    at.write("data-0-19.dnb1", frames(0, 20))
    at.backend.delete_object(object_key(TOPIC, "data-10-19.dnb1"))
    at.grow_old()
    kept = [item for item in grace_0(at).items if item.kind is Kind.ORPHAN]
    assert [(item.action, item.reason) for item in kept] == [
        (Action.KEPT, "no other object holds its messages")
    ]
    assert "data-0-19.dnb1" in at.names()


@pytest.mark.parametrize("accepted", [False, True])
def test_an_orphan_before_the_start_or_in_an_accepted_hole_goes(
    at: Reservoir, accepted: bool
) -> None:
    """One in another hole may be the only copy of messages that are thought to be lost."""
    owner = at.own()
    oldest = at.fill(owner, 0, 10, 20)[0]
    assert at.catalog.retire(TOPIC, owner.epoch, oldest) is not None
    record = at.catalog.record(TOPIC)
    assert record is not None
    at.end_sessions()
    after = replace(record.with_lost(20, 30), tail=30, reserved=30)
    after = after.with_accepted() if accepted else after
    at.kv.commit([], [Put(at.catalog.keys.record(TOPIC), encode_record(after))])
    for name in ("data-0-9.dnb1", "data-5-14.dnb1", "data-20-29.dnb1"):
        at.store.put_object(object_key(TOPIC, name), b"?")
    at.grow_old()
    in_hole = Action.REMOVED if accepted else Action.KEPT
    found = [action for _, _, action in said(grace_0(at))]
    assert found == [Action.REMOVED, in_hole, Action.REMOVED]
    assert ("data-20-29.dnb1" in at.names()) is not accepted


def test_old_markers_go_but_for_those_that_a_restore_needs(at: Reservoir) -> None:
    owner = at.own()
    at.fill(owner, 0, 10)
    record = at.catalog.record(TOPIC)
    assert record is not None
    after = replace(record.with_unknown(10, 100), tail=100, reserved=100)
    at.kv.commit([], [Put(at.catalog.keys.record(TOPIC), encode_record(after))])
    marker = encode_marker(BeginMarker("a" * 32, "b" * 32, 1, 300))
    offsets = (0, 5, 100, 150, 300, 310, 320, 330)
    for offset in offsets:
        at.store.put_object(object_key(TOPIC, f"begin-{offset}"), marker)
    assert swept(at).items == []
    at.grow_old()
    would = swept(at, dry_run=True)
    assert {(item.kind, item.action) for item in would.items} == {
        (Kind.MARKER, Action.WOULD_REMOVE)
    }
    assert swept(at).counts[Action.REMOVED] == 4
    assert [each.name.offset for each in list_markers(at.store, TOPIC)] == [100, 300, 320, 330]


def test_while_the_newest_marker_is_damaged_no_marker_goes(at: Reservoir) -> None:
    at.fill(at.own(), 0, 10)
    for offset in (0, 5, 6, 7):
        at.store.put_object(object_key(TOPIC, f"begin-{offset}"), b"?")
    at.grow_old()
    assert swept(at).items == []
