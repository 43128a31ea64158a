"""What a scrub reads and remembers, and what it makes of a chain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.catalog.records import TopicRecord
from forebay.errors import DescriptorError
from forebay.format.names import TopicName
from forebay.pipeline.jobs.verify_plan import (
    SUSPECTS_MAX,
    Flaw,
    Link,
    Read,
    ScrubState,
    Survey,
    chain_flaws,
    choose_reads,
    decode_state,
    encode_state,
    state_after,
)

TOPIC = TopicName("default", "orders")
OTHER = TopicName("default", "others")


def link(start: int, end: int, revision: int = 1, size: int = 100) -> Link:
    return Link(start, end, size, f"data-{start}-{end - 1}.dnb1", revision)


def chain(count: int, topic: TopicName = TOPIC, state: ScrubState | None = None) -> Survey:
    """Objects of ten messages and 100 bytes, committed one after the other."""
    links = tuple(link(10 * at, 10 * at + 10, revision=at + 1) for at in range(count))
    record = TopicRecord(tail=10 * count, verified=10 * count)
    return Survey(topic, record, links, revision=count, state=state or ScrubState())


def starts(reads: list[Read]) -> list[int]:
    return [read.link.start for read in reads]


def ids(reads: list[Read]) -> set[str]:
    return {read.link.object_id for read in reads}


# ---- what is read ----


def test_a_full_run_reads_everything() -> None:
    known = chain(3, state=ScrubState(revision=3))
    assert starts(choose_reads([known], incremental=False, budget_bytes=None)) == [0, 10, 20]


def test_an_incremental_run_reads_what_is_new_by_the_catalogs_revisions() -> None:
    survey = chain(5, state=ScrubState(revision=3))
    compacted = replace(survey, links=(link(0, 20, revision=9), *survey.links[2:]))
    assert starts(choose_reads([compacted], incremental=True, budget_bytes=None)) == [0, 30, 40]


def test_what_was_damaged_is_read_again_every_time() -> None:
    survey = chain(3, state=ScrubState(revision=3, suspects=("data-10-19.dnb1",)))
    reads = choose_reads([survey], incremental=True, budget_bytes=None)
    assert starts(reads) == [10]
    after = state_after(survey, ids(reads), ids(reads), now_ms=5)
    assert after.suspects == ("data-10-19.dnb1",)
    assert state_after(survey, ids(reads), (), now_ms=5).suspects == ()


def test_a_budget_covers_everything_in_rounds() -> None:
    memories = {TOPIC: ScrubState(revision=7), OTHER: ScrubState(revision=2)}
    seen: list[tuple[TopicName, int]] = []
    for run in range(6):
        surveys = [chain(7, TOPIC, memories[TOPIC]), chain(2, OTHER, memories[OTHER])]
        reads = choose_reads(surveys, incremental=False, budget_bytes=300)
        assert len(reads) == 3
        seen += [(read.topic, read.link.start) for read in reads]
        for survey in surveys:
            done = ids([read for read in reads if read.topic == survey.topic])
            memories[survey.topic] = state_after(survey, done, (), now_ms=run + 1)
    everything = {(TOPIC, 10 * at) for at in range(7)} | {(OTHER, 0), (OTHER, 10)}
    assert len(set(seen[:9])) == 9
    assert set(seen[:9]) == set(seen[9:]) == everything


def test_a_budget_is_spent_on_the_new_first() -> None:
    survey = chain(5, state=ScrubState(revision=3, cursor=10))
    reads = choose_reads([survey], incremental=True, budget_bytes=300)
    assert starts(reads) == [30, 40, 10]
    after = state_after(survey, ids(reads), (), now_ms=1)
    assert (after.revision, after.cursor) == (5, 20)


def test_what_is_new_and_not_read_stays_new() -> None:
    survey = chain(5, state=ScrubState(revision=1))
    reads = choose_reads([survey], incremental=True, budget_bytes=200)
    assert starts(reads) == [10, 20]
    assert state_after(survey, ids(reads), (), now_ms=1).revision == 3


def test_an_object_over_the_whole_budget_is_read_alone() -> None:
    assert starts(choose_reads([chain(3)], incremental=False, budget_bytes=1)) == [0]


def test_nothing_is_read_twice_in_one_run() -> None:
    survey = chain(4, state=ScrubState(revision=2, cursor=30))
    reads = choose_reads([survey], incremental=False, budget_bytes=10_000)
    assert sorted(starts(reads)) == [0, 10, 20, 30]


# ---- what is remembered ----


def test_a_full_run_ends_the_round() -> None:
    survey = chain(3, state=ScrubState(cursor=10))
    done = {each.object_id for each in survey.links}
    assert state_after(survey, done, (), now_ms=7) == ScrubState(revision=3, finished_ms=7)


def test_a_run_that_read_nothing_remembers_no_progress() -> None:
    survey = chain(3, state=ScrubState(revision=1, cursor=10, finished_ms=4))
    assert state_after(survey, (), (), now_ms=7) == survey.state


def test_the_memory_survives_its_encoding() -> None:
    state = ScrubState(5, 6, 7, ("a", "b"))
    assert decode_state(encode_state(state), "it") == state
    damaged = [f"data-{at}-{at}.dnb1" for at in range(SUSPECTS_MAX + 5)]
    many = replace(chain(0), links=tuple(link(at, at + 1) for at in range(SUSPECTS_MAX + 5)))
    assert len(state_after(many, damaged, damaged, 0).suspects) == SUSPECTS_MAX


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"revision":-1,"cursor":0,"finished_ms":0,"suspects":[]}',
        b'{"revision":1,"cursor":0,"finished_ms":0,"suspects":[1]}',
    ],
)
def test_what_is_no_memory_is_refused(data: bytes) -> None:
    with pytest.raises(DescriptorError, match="that file"):
        decode_state(data, "that file")


# ---- the chain ----


def flaws(record: TopicRecord, *links: Link) -> list[tuple[str, int, int]]:
    return [(each.kind, each.offset, each.messages) for each in chain_flaws(record, links)]


def test_a_whole_chain_has_no_flaw() -> None:
    record = TopicRecord(start_offset=10, verified=10, tail=30)
    assert flaws(record, link(10, 20), link(20, 30)) == []
    assert flaws(record, link(5, 20), link(20, 30)) == []
    assert flaws(TopicRecord()) == []


def test_gaps_are_found_but_for_what_is_recorded_as_lost() -> None:
    record = TopicRecord(tail=60, verified=0, lost=((10, 20), (35, 40)))
    assert flaws(record, link(0, 10), link(20, 35), link(40, 60)) == []
    assert flaws(record, link(20, 30), link(40, 50)) == [
        ("gap", 0, 10),
        ("gap", 30, 5),
        ("gap", 50, 10),
    ]


def test_overlaps_and_a_record_that_disagrees_are_found() -> None:
    record = TopicRecord(tail=25, verified=0)
    assert flaws(record, link(0, 20), link(15, 30)) == [("overlap", 15, 5), ("record", 25, 5)]
    assert flaws(TopicRecord(start_offset=5, verified=3, tail=5)) == [("record", 5, 0)]


def test_what_was_committed_after_the_record_was_read_is_no_flaw() -> None:
    assert flaws(TopicRecord(tail=20), link(0, 20), link(20, 30), link(50, 60)) == []


def test_a_flaw_says_what_is_missing() -> None:
    [flaw] = chain_flaws(TopicRecord(tail=20), [link(0, 15)])
    detail = "no object holds offsets 15 to 19, which are not recorded as lost"
    assert flaw == Flaw("gap", 15, 5, detail)
