"""What a scrub reads, what it remembers, and what a chain says of itself: pure decisions.

Everything, or what is new since the last run, or as much as a budget allows: the new first, then
on from where the last run stopped, round and round, so that runs of bounded cost cover all. Which
objects are new the catalog's revisions tell, and no clock: a descriptor that was written after
the revision that the last run remembers.

The state of a scrub is one note for each topic, JSON:

    {"revision": 812, "cursor": 40000, "finished_ms": 1790000000000, "suspects": []}

Every object with a revision up to `revision` has been read. The present round goes on at the
offset `cursor`, and the one before ended at `finished_ms`. `suspects` were damaged when they were
read last: they are read again in every run, so that damage is told until it is mended.
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
"""That a note remembers, within its 64 KiB."""


class Link(NamedTuple):
    """A descriptor, as far as planning needs it."""

    start: int
    next_offset: int
    size: int
    object_id: str
    revision: int


class Flaw(NamedTuple):
    """What is wrong with a chain, by the catalog alone."""

    kind: str
    offset: int
    messages: int
    detail: str


@dataclass(frozen=True, slots=True)
class ScrubState:
    """What is known of a topic from earlier runs."""

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
    """DescriptorError, saying `what`, for anything but a state."""
    try:
        body = json.loads(data)
        suspects = tuple(body["suspects"])
        numbers = [body[name] for name in ("revision", "cursor", "finished_ms")]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DescriptorError(f"{what} is no memory of a scrub: {error}") from error
    if not all(type(each) is int and each >= 0 for each in numbers) or not all(
        isinstance(each, str) for each in suspects
    ):
        raise DescriptorError(f"{what} is no memory of a scrub")
    revision, cursor, finished_ms = numbers
    return ScrubState(revision, cursor, finished_ms, suspects)


def state_after(
    survey: Survey, done: Collection[str], damaged: Collection[str], now_ms: int
) -> ScrubState:
    """What to remember after these objects were read, the damaged ones among them."""
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
    """The cursor, behind everything that was read in one piece from where it was."""
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
    """The rest of the present round, and what the next one begins with."""
    cursor = survey.state.cursor
    ahead = [link for link in survey.links if link.next_offset > cursor]
    return ahead, [link for link in survey.links if link.next_offset <= cursor]


# ---- what to read -----------------------------------------------------------------------------


def choose_reads(
    surveys: Sequence[Survey], *, incremental: bool, budget_bytes: int | None
) -> list[Read]:
    """The objects to read, each once; with a budget in the order in which it is spent.

    An object that is larger than the whole budget is read all the same, alone: it would never be
    else.
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
    """The new by age, then rounds that have begun, then topics by when they were last done."""
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
    """Gaps and overlaps, but for ranges that are recorded as lost, and a record that disagrees.

    The record must be older than the links: those that begin at its tail are not looked at.
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
            detail = f"{link.object_id} begins at {link.start}, the chain was at {expected}"
            found.append(Flaw("overlap", link.start, shared, detail))
        found += _gaps(record, expected, link.start)
        expected = max(expected, link.next_offset)
        first = False
    found += _gaps(record, expected, record.tail)
    if expected > record.tail:
        detail = f"an object holds offsets up to {expected - 1}, the tail is {record.tail}"
        found.append(Flaw("record", record.tail, expected - record.tail, detail))
    return found


def _gaps(record: TopicRecord, start: int, end: int) -> Iterator[Flaw]:
    """What of `start..end` is not recorded as lost."""
    for lost_start, lost_end in (*record.lost, (max(start, end), max(start, end))):
        stop = min(lost_start, end)
        if start < stop:
            detail = f"offsets {start} to {stop - 1} are in no object, and not recorded as lost"
            yield Flaw("gap", start, stop - start, detail)
        start = max(start, lost_end)
