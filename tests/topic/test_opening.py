"""How a topic goes on when it is taken over: no offset is used twice, and every gap is recorded."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forebay.catalog.adopt import restored, restoring
from forebay.catalog.records import TopicRecord, decode_record, encode_record
from forebay.errors import DescriptorError, MissingData
from forebay.limits import LOST_RANGES_MAX
from forebay.topic.opening import settle
from forebay.wal.identity import LocalLog

NONCE: Final = "now"
RECORD: Final = TopicRecord(
    3, "mine", start_offset=10, tail=60, verified=40, reserved=1000, nonce=NONCE, assigned=70
)
FIRST: Final = replace(RECORD, nonce=None, assigned=0)
"""A record of the first release."""


def log(log_id: str, start: int, end: int, *nonces: str) -> LocalLog:
    return LocalLog(log_id, start, end, frozenset(nonces))


def settled(record: TopicRecord | None, local: LocalLog) -> TopicRecord:
    return settle(record, local, "fresh", "new")


def test_a_new_topic_is_what_the_local_log_is() -> None:
    assert settled(None, log("mine", 0, 0)) == TopicRecord(log_id="mine", nonce="new")
    assert settled(None, log("mine", 5, 9)) == TopicRecord(
        log_id="mine", start_offset=5, tail=5, verified=5, reserved=9, nonce="new", assigned=9
    )


@pytest.mark.parametrize(("start", "end"), [(0, 70), (60, 70), (30, 500), (60, 1000)])
@pytest.mark.parametrize("nonces", [[NONCE], ["before", NONCE], [NONCE, "intended"]])
def test_the_topics_own_log_goes_on(start: int, end: int, nonces: list[str]) -> None:
    assert settled(RECORD, log("mine", start, end, *nonces)) == replace(
        RECORD, nonce="new", assigned=end
    )


@pytest.mark.parametrize(("start", "end"), [(0, 60), (60, 60), (30, 500), (60, 1000)])
def test_a_log_of_the_first_release_goes_on(start: int, end: int) -> None:
    assert settled(FIRST, log("mine", start, end)) == replace(FIRST, nonce="new", assigned=end)


def test_the_topics_own_log_is_believed_beyond_the_reservation() -> None:
    """For example after a catalog was restored from a copy."""
    found = settled(RECORD, log("mine", 0, 1200, NONCE))
    assert (found.reserved, found.assigned) == (1200, 1200)


@pytest.mark.parametrize("nonces", [[], ["before"]])
def test_a_log_that_has_everything_goes_on_whatever_its_nonce_is(nonces: list[str]) -> None:
    released = replace(RECORD, reserved=70)
    assert settled(released, log("mine", 60, 70, *nonces)) == replace(released, nonce="new")


def test_the_topics_own_log_with_a_hole_before_it_is_refused() -> None:
    with pytest.raises(MissingData, match=r"\b60\b.*\b61\b.*restore --allow-gaps"):
        settled(RECORD, log("mine", 61, 99, NONCE))


@pytest.mark.parametrize(
    "local",
    [
        pytest.param(log("mine", 0, 500, "before"), id="opened since"),
        pytest.param(log("mine", 0, 500), id="without a nonce"),
        pytest.param(log("mine", 0, 69, NONCE), id="ends before what was assigned"),
        pytest.param(log("mine", 0, 59, NONCE), id="ends before the objects"),
    ],
)
def test_an_older_copy_of_the_topics_log_is_refused(local: LocalLog) -> None:
    with pytest.raises(MissingData, match=r"older copy.*forebay repair --apply --accept-loss"):
        settled(RECORD, local)


@pytest.mark.parametrize(
    "local",
    [
        pytest.param(log("other", 0, 0), id="no log"),
        pytest.param(log("other", 0, 70), id="another log"),
        pytest.param(log("other", 0, 70, NONCE), id="another log with the nonce"),
        pytest.param(log("mine", 60, 60, "before"), id="an older copy without messages"),
    ],
)
def test_without_the_topics_log_offsets_go_on_behind_the_reservation(local: LocalLog) -> None:
    assert settled(RECORD, local) == TopicRecord(
        3,
        "fresh",
        10,
        tail=1000,
        verified=40,
        reserved=1000,
        lost=((60, 70),),
        unknown=((70, 1000),),
        nonce="new",
        assigned=1000,
    )


def test_an_older_copy_of_the_first_release_is_set_aside() -> None:
    found = settled(FIRST, log("mine", 0, 59))
    assert (found.log_id, found.tail, found.unknown) == ("fresh", 1000, ((60, 1000),))


def test_a_topic_that_was_uploaded_whole_goes_on_without_a_hole() -> None:
    record = replace(RECORD, verified=60, assigned=60, reserved=60)
    found = settled(record, log("other", 0, 0))
    assert found == replace(record, log_id="fresh", nonce="new")


def test_offsets_of_a_log_that_the_catalog_forgot_are_not_used_again() -> None:
    found = settled(RECORD, log("other", 0, 1500))
    assert (found.tail, found.reserved) == (1500, 1500)
    assert (found.lost, found.unknown) == (((60, 70),), ((70, 1500),))


def test_watermarks_at_the_hole_cross_it() -> None:
    record = replace(RECORD, start_offset=60, verified=60)
    found = settled(record, log("other", 0, 0))
    assert (found.start_offset, found.verified, found.tail) == (60, 1000, 1000)


def test_a_second_loss_with_nothing_between_prolongs_the_first() -> None:
    once = settled(RECORD, log("other", 0, 0))
    twice = settled(replace(once, reserved=2000), log("third", 0, 0))
    assert (twice.lost, twice.unknown) == (((60, 70),), ((70, 2000),))
    again = settled(twice, log("fourth", 0, 0))
    assert (again.lost, again.unknown) == (twice.lost, twice.unknown)


def test_a_topic_with_too_many_holes_is_refused_and_not_shortened() -> None:
    lost = tuple((3 * n, 3 * n + 1) for n in range(LOST_RANGES_MAX))
    tail = lost[-1][1] + 1
    full = TopicRecord(1, "mine", tail=tail, reserved=tail + 5, lost=lost)
    with pytest.raises(DescriptorError, match=str(LOST_RANGES_MAX)):
        settled(full, log("other", 0, 0))


# ---- restores ----


def test_while_a_restore_is_under_way_nobody_opens_the_topic() -> None:
    for log_id in (None, "mine"):
        record = replace(RECORD, log_id=restoring(log_id))
        with pytest.raises(MissingData, match="restore"):
            settled(record, log("mine", 0, 70, NONCE))


def test_after_a_restore_the_local_log_goes_on() -> None:
    """A record that was rebuilt from objects knows no log: the local messages must not be lost."""
    rebuilt = replace(FIRST, log_id=restored(restoring(None)), reserved=60)
    found = settled(rebuilt, log("mine", 30, 75))
    assert found == replace(rebuilt, log_id="mine", nonce="new", assigned=75, reserved=75)


def test_after_a_restore_a_log_that_ends_before_the_objects_is_set_aside() -> None:
    rebuilt = replace(FIRST, log_id=None, reserved=60)
    found = settled(rebuilt, log("mine", 0, 59))
    assert (found.log_id, found.tail, found.holes) == ("fresh", 60, ())


# ---- any history ----


@st.composite
def records(draw: st.DrawFn) -> TopicRecord:
    edges = sorted(draw(st.lists(st.integers(0, 200), min_size=5, max_size=5)))
    start, verified, tail, assigned, reserved = edges
    log_id, nonce = draw(st.sampled_from([("a", None), (None, None), ("a", "x"), ("b", "y")]))
    return TopicRecord(1, log_id, start, tail, verified, reserved, nonce=nonce, assigned=assigned)


@st.composite
def locals_of(draw: st.DrawFn) -> LocalLog:
    start, end = sorted(draw(st.tuples(st.integers(0, 250), st.integers(0, 250))))
    nonces = draw(st.frozensets(st.sampled_from(["x", "y", "z"]), max_size=2))
    return LocalLog(draw(st.sampled_from(["a", "b"])), start, end, nonces)


@settings(max_examples=500)
@given(record=st.none() | records(), local=locals_of())
def test_any_settlement_keeps_the_chain_and_uses_no_offset_again(
    record: TopicRecord | None, local: LocalLog
) -> None:
    try:
        found = settled(record, local)
    except MissingData:
        assert record is not None
        older = record.nonce is not None and (
            record.nonce not in local.nonces or local.next_offset < record.assigned
        )
        older = older and not local.empty and local.next_offset < record.reserved
        assert record.tail < local.start_offset or (older and record.log_id == local.log_id)
        return
    assert found.start_offset <= found.verified <= found.tail <= found.reserved
    assert found.assigned <= found.reserved
    assert found.nonce == "new"
    assert decode_record(encode_record(found), TopicRecord, "it") == found
    goes_on = found.log_id != "fresh"
    next_offset = local.next_offset if goes_on else found.tail
    assert next_offset >= found.tail or goes_on
    assert next_offset <= found.reserved
    if record is None:
        return
    if goes_on and record.nonce is not None:
        assert record.nonce in local.nonces or local.next_offset >= record.reserved
        assert local.next_offset >= record.assigned
    assert found.tail >= record.tail
    assert found.reserved >= record.reserved
    holes = [] if goes_on or found.tail == record.tail else [(record.tail, found.tail)]
    assert list(found.holes) == holes
    if not goes_on:
        assert next_offset >= max(record.reserved, local.next_offset)


class Failovers(RuleBasedStateMachine):
    """A topic on machines that come and go, with a model of the offsets that were used."""

    def __init__(self) -> None:
        super().__init__()
        self.record: TopicRecord | None = None
        self.logs: dict[int, LocalLog] = {}
        self.owner = 0
        self.ids = 0
        self.handed_out = 0
        """One more than the highest offset that any owner gave to a message."""
        self.kept: dict[int, str] = {}
        """Where each message is that was synced: the id of its log."""

    def _fresh(self) -> str:
        self.ids += 1
        return f"log {self.ids}"

    @initialize()
    def begin(self) -> None:
        self.open(0)

    @rule(machine=st.integers(0, 2))
    def open(self, machine: int) -> None:
        local = self.logs.get(machine) or LocalLog(self._fresh(), 0, 0)
        fresh, nonce = self._fresh(), self._fresh()
        self.record = settle(self.record, local, fresh, nonce)
        local = replace(local, nonces=frozenset({nonce}))
        if self.record.log_id == fresh:
            local = replace(
                local, log_id=fresh, start_offset=self.record.tail, next_offset=self.record.tail
            )
            assert local.next_offset >= self.handed_out, "an offset would be used again"
        self.logs[machine] = local
        self.owner = machine

    @rule(count=st.integers(1, 5), block=st.integers(1, 10))
    def append(self, count: int, block: int) -> None:
        assert self.record is not None
        local = self.logs[self.owner]
        end = local.next_offset + count
        if end > self.record.reserved:
            self.record = replace(self.record, reserved=end + block)
        for offset in range(local.next_offset, end):
            assert self.record.lost_range(offset) is None
            self.kept[offset] = local.log_id
        self.logs[self.owner] = replace(local, next_offset=end)
        self.handed_out = max(self.handed_out, end)

    @precondition(lambda self: self.record is not None)
    @rule(data=st.data(), trim=st.booleans())
    def upload(self, data: st.DataObject, trim: bool) -> None:
        assert self.record is not None
        local = self.logs[self.owner]
        tail = data.draw(st.integers(self.record.tail, local.next_offset))
        assert all(self.kept[each] == local.log_id for each in range(self.record.tail, tail))
        verified = max(tail, self.record.verified)
        self.record = replace(self.record, tail=tail, verified=verified)
        if trim and local.start_offset < tail:
            self.logs[self.owner] = replace(local, start_offset=tail)

    @rule()
    def release(self) -> None:
        assert self.record is not None
        next_offset = self.logs[self.owner].next_offset
        self.record = replace(
            self.record, assigned=next_offset, reserved=max(self.record.tail, next_offset)
        )

    @rule(machine=st.integers(0, 2))
    def lose_the_disk(self, machine: int) -> None:
        self.logs.pop(machine, None)
        self.open(machine)

    @invariant()
    def every_offset_is_in_an_object_in_the_log_or_recorded_as_lost(self) -> None:
        record = self.record
        if record is None:
            return
        assert record.start_offset <= record.verified <= record.tail <= record.reserved
        local = self.logs[self.owner]
        assert local.start_offset <= record.tail <= local.next_offset
        for offset in range(self.handed_out):
            lost = record.lost_range(offset) is not None
            uploaded = offset < record.tail and not lost
            held = local.start_offset <= offset < local.next_offset
            assert lost or uploaded or (held and self.kept[offset] == local.log_id)


TestFailovers = Failovers.TestCase
TestFailovers.settings = settings(max_examples=60, stateful_step_count=25)
