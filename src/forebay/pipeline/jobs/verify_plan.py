"""The pure decisions of `verify`: which objects to read, what to record, and flaws of a chain.

A run reads everything, or the objects since the last run, or as much as a budget allows. With a
budget it reads new objects first, then continues where the last run stopped, in rounds, so that
runs of bounded cost cover all objects in the end. An object is new if its descriptor was written
after the catalog revision that the last run recorded. Clocks do not matter. So an object whose
descriptor the last run corrected is read once more.

The state of each topic is a job state in the catalog, as JSON:

    {"revision": 812, "cursor": 40000, "finished_ms": 1790000000000, "suspects": []}

Every object with a revision up to `revision` has been read. The current round continues at the
offset `cursor`, and the round before ended at `finished_ms`. `suspects` are objects that were
damaged. Every run reads them again, so that damage is reported until it is repaired.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final, NamedTuple

from forebay.catalog.records import TopicRecord
from forebay.errors import DescriptorError
from forebay.format.names import TopicName

STATE_NAME: Final = "verify"
SUSPECTS_MAX: Final = 500
"""The most suspects in a state, which must fit into 64 KiB."""


class Link(NamedTuple):
    """The part of a descriptor that planning needs."""

    start: int
    next_offset: int
    size: int
    object_id: str
    revision: int


class Flaw(NamedTuple):
    """Something wrong with a chain, found in the catalog without reading objects."""

    kind: str
    offset: int
    messages: int
    detail: str


@dataclass(frozen=True, slots=True)
class ScrubState:
    """What earlier runs recorded about a topic; see the module."""

    revision: int = 0
    cursor: int = 0
    finished_ms: int = 0
    suspects: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Survey:
    """A topic's chain at one revision of the catalog."""

    topic: TopicName
    record: TopicRecord
    links: tuple[Link, ...]
    revision: int
    flaws: tuple[Flaw, ...] = ()
    state: ScrubState = ScrubState()

    def is_new(self, link: Link) -> bool:
        return link.revision > self.state.revision or link.object_id in self.state.suspects


class Read(NamedTuple):
    topic: TopicName
    link: Link


# ---- the state --------------------------------------------------------------------------------


def encode_state(state: ScrubState) -> bytes:
    return json.dumps(asdict(state), separators=(",", ":")).encode()


def decode_state(data: bytes, what: str) -> ScrubState:
    """The inverse of `encode_state`; DescriptorError, which names `what`, for anything else."""
    try:
        body = json.loads(data)
        suspects = tuple(body["suspects"])
        numbers = [body[name] for name in ("revision", "cursor", "finished_ms")]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DescriptorError(f"{what} is not a state of verify: {error}") from error
    if not all(type(each) is int and each >= 0 for each in numbers) or not all(
        isinstance(each, str) for each in suspects
    ):
        raise DescriptorError(f"{what} is not a state of verify: a field has a wrong value")
    revision, cursor, finished_ms = numbers
    return ScrubState(revision, cursor, finished_ms, suspects)


def state_after(
    survey: Survey, done: Collection[str], damaged: Collection[str], now_ms: int
) -> ScrubState:
    """The new state after the objects `done` were read, of which some were `damaged`."""
    state = survey.state
    if not done:
        return state
    unread = [
        link.revision
        for link in survey.links
        if link.revision > state.revision and link.object_id not in done
    ]
    kept = [each for each in state.suspects if each not in done]
    there = {link.object_id for link in survey.links}
    suspects = [each for each in dict.fromkeys([*kept, *sorted(damaged)]) if each in there]
    return replace(
        _moved_on(survey, done, now_ms),
        revision=min(unread) - 1 if unread else survey.revision,
        suspects=tuple(suspects[:SUSPECTS_MAX]),
    )


def _moved_on(survey: Survey, done: Collection[str], now_ms: int) -> ScrubState:
    """The state with its cursor moved past the objects that were read without a gap."""
    state = survey.state
    if all(link.object_id in done for link in survey.links):
        return replace(state, cursor=0, finished_ms=now_ms)
    ahead, behind = _rotated(survey)
    for link in ahead:
        if link.object_id not in done:
            return state
        state = replace(state, cursor=link.next_offset)
    state = replace(state, cursor=0, finished_ms=now_ms)
    for link in behind:
        if link.object_id not in done:
            break
        state = replace(state, cursor=link.next_offset)
    return state


def _rotated(survey: Survey) -> tuple[list[Link], list[Link]]:
    """The rest of the current round, and the beginning of the next one."""
    cursor = survey.state.cursor
    ahead = [link for link in survey.links if link.next_offset > cursor]
    return ahead, [link for link in survey.links if link.next_offset <= cursor]


# ---- what to read -----------------------------------------------------------------------------


def choose_reads(
    surveys: Sequence[Survey], *, incremental: bool, budget_bytes: int | None
) -> list[Read]:
    """The objects to read, each once; with a budget, the most urgent first.

    An object that is larger than the whole budget is read alone. Otherwise it would never be read.
    """
    if budget_bytes is None:
        return [
            Read(survey.topic, link)
            for survey in surveys
            for link in survey.links
            if not incremental or survey.is_new(link)
        ]
    chosen: list[Read] = []
    left = budget_bytes
    seen: set[tuple[TopicName, str]] = set()
    for read in _by_urgency(surveys):
        if (read.topic, read.link.object_id) in seen:
            continue
        if read.link.size > left and chosen:
            break
        seen.add((read.topic, read.link.object_id))
        chosen.append(read)
        left -= read.link.size
    return chosen


def _by_urgency(surveys: Sequence[Survey]) -> Iterator[Read]:
    """New objects by age, then rounds that have begun, then topics by when their last round ended.

    An object may come twice.
    """
    new = [Read(each.topic, link) for each in surveys for link in each.links if each.is_new(link)]
    yield from sorted(new, key=lambda read: (read.link.revision, read.topic, read.link.start))
    waiting = sorted(
        surveys, key=lambda each: (not each.state.cursor, each.state.finished_ms, each.topic)
    )
    for survey in waiting:
        yield from (Read(survey.topic, link) for link in _rotated(survey)[0])
    for survey in waiting:
        yield from (Read(survey.topic, link) for link in _rotated(survey)[1])


# ---- the chain (I4) ---------------------------------------------------------------------------


def chain_flaws(record: TopicRecord, links: Sequence[Link]) -> list[Flaw]:
    """Gaps and overlaps of the chain, and contradictions with the record.

    A hole that the record has is not a gap. Read the record before the links: links that
    begin at its tail or later are ignored.
    """
    found: list[Flaw] = []
    if not record.start_offset <= record.verified <= record.tail:
        numbers = f"start {record.start_offset}, verified {record.verified}, tail {record.tail}"
        found.append(Flaw("record", record.start_offset, 0, f"its numbers disagree: {numbers}"))
    expected = record.start_offset
    first = True
    for link in links:
        if link.start >= record.tail:
            break
        if link.start < expected and not first:
            shared = min(expected, link.next_offset) - link.start
            detail = f"{link.object_id} begins at {link.start}; it should begin at {expected}"
            found.append(Flaw("overlap", link.start, shared, detail))
        found += _gaps(record, expected, link.start)
        expected = max(expected, link.next_offset)
        first = False
    found += _gaps(record, expected, record.tail)
    if expected > record.tail:
        detail = f"an object holds offsets up to {expected - 1}, but the tail is {record.tail}"
        found.append(Flaw("record", record.tail, expected - record.tail, detail))
    return found


def _gaps(record: TopicRecord, start: int, end: int) -> Iterator[Flaw]:
    """Yields a flaw for each part of `start..end` that is in no recorded hole."""
    for hole_start, hole_end in (*record.holes, (max(start, end), max(start, end))):
        stop = min(hole_start, end)
        if start < stop:
            detail = (
                f"no object holds offsets {start} to {stop - 1}, which are not recorded as lost"
            )
            yield Flaw("gap", start, stop - start, detail)
        start = max(start, hole_end)
