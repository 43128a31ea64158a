"""What a sweep makes of one name: a pure decision on its row, its object and the topic's record.

    row            object       verdict
    committed      any          counts; whether it is there is looked at by its descriptor
    none           there        orphan, unless a descriptor names it
    none, gone     sidecar only stray sidecar
    gone           there        orphan: a late writer's; the name is never used again
    intended       any          orphan or pending; kept while its writer may still commit it
    replaced       any          kept for readers with an old plan, and to take the swap back
    deleting       any          the work of a sweep or of retention that died: to be finished

Whatever is to be removed must also be older than the grace time. The decision may be out of date
when it is carried out: the row is compared again before anything is deleted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

from forebay.catalog.records import Life, State, TopicRecord
from forebay.format.names import ObjectName, parse_object, parse_pending
from forebay.upload.listing import Stored


class Kind(StrEnum):
    ORPHAN = "orphan object"
    PENDING = "pending object"
    REPLACED = "replaced object"
    INTENT = "intent without an object"
    DELETING = "unfinished deletion"
    SIDECAR = "stray sidecar"
    UNKNOWN = "unknown file"
    MISSING = "missing object"
    """A descriptor names it: messages are gone. Never put right by a sweep."""
    RESIZED = "object of another size than its descriptor says"
    UNNAMED = "committed object that no descriptor names"
    UNRESTORED = "objects of a topic unknown to the catalog"
    TOPIC = "topic that could not be swept"


ALARMS: Final = frozenset({Kind.MISSING, Kind.RESIZED, Kind.UNNAMED, Kind.TOPIC})
"""What needs somebody's attention, besides what failed."""

NAMED_BY_NONE: Final = "no descriptor names it"
TOO_YOUNG: Final = "it is younger than the grace time"


class Chain(Protocol):
    """The committed objects, asked only where a row does not tell."""

    def names(self, object_id: str) -> bool:
        """Whether a descriptor names this object."""

    def joins(self, name: ObjectName) -> bool:
        """Whether the range is that of several neighbours: a compaction would make such a one."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What is the same for all names of a topic."""

    record: TopicRecord
    owned: bool
    """Whether a living process owns the topic."""
    now_ms: int
    grace_ms: float


class Verdict(NamedTuple):
    kind: Kind
    age_ms: int
    remove: bool
    reason: str


def judge(life: Life | None, stored: Stored, situation: Situation, chain: Chain) -> Verdict | None:
    """None for what counts, and for a mark of what is gone."""
    state = life.state if life is not None else None
    if life is None or state is State.GONE:
        return _without_row(stored, situation, chain)
    if state is State.COMMITTED:
        return None
    age_ms = situation.now_ms - life.updated_ms
    if state is State.REPLACED:
        return _aged(Kind.REPLACED, age_ms, situation, "a compaction replaced it")
    if state is State.DELETING:
        return _aged(Kind.DELETING, age_ms, situation, "its deletion was not finished")
    return _intended(life, stored, situation, chain)


def _without_row(stored: Stored, situation: Situation, chain: Chain) -> Verdict | None:
    meta = stored.object or stored.sidecar
    if meta is None or (stored.object is not None and chain.names(stored.object_id)):
        return None
    age_ms = situation.now_ms - meta.modified_ms
    if stored.object is None:
        return _aged(Kind.SIDECAR, age_ms, situation, "its object is not there")
    return _aged(_object_kind(stored), age_ms, situation, NAMED_BY_NONE)


def _intended(life: Life, stored: Stored, situation: Situation, chain: Chain) -> Verdict:
    """Old alone is not enough: a writer may stall for longer than any grace time."""
    since_ms = life.updated_ms
    kind = Kind.INTENT
    if stored.object is not None:
        kind = _object_kind(stored)
        since_ms = max(since_ms, stored.object.modified_ms)
    verdict = _aged(kind, situation.now_ms - since_ms, situation, NAMED_BY_NONE)
    if not verdict.remove or not situation.owned or life.epoch < situation.record.epoch:
        return verdict
    name = parse_object(stored.object_id)
    start = name.start if name is not None else parse_pending(stored.object_id)
    if start is None or start >= situation.record.tail:
        return verdict._replace(remove=False, reason="the topic's owner may still commit it")
    if name is not None and chain.joins(name):
        return verdict._replace(remove=False, reason="a compaction may still commit it")
    return verdict


def _object_kind(stored: Stored) -> Kind:
    return Kind.PENDING if parse_object(stored.object_id) is None else Kind.ORPHAN


def _aged(kind: Kind, age_ms: int, situation: Situation, reason: str) -> Verdict:
    old = age_ms >= situation.grace_ms
    return Verdict(kind, age_ms, old, reason if old else TOO_YOUNG)
