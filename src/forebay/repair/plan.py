"""What is wrong with a topic, and what can be done about it: decided here, done in `apply`.

    damage                                    remedy
    frames of a segment, in a good object     the segment is written again
    frames of an object, in a good segment    the object is written again, under its name
    checkpoint, position, index, sidecar      written again from what it was made of
    id of the log                             written again from its copy; never from the catalog
    frames that are nowhere else              if allowed: recorded as lost, the log goes on behind
    frames that object and segment both lost  none here

A loss that is recorded ends the local log before it: what is readable before the hole goes into
objects, and the log begins behind it, as logs have no holes.

What a caller gets wrong: the id of a log is never taken from the catalog. That a log fits to the
objects shows that it was the topic's once, not that it still is: with another machine's id, an old
log would hand out offsets again that were acknowledged there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from pathlib import Path

from forebay.catalog.records import TopicRecord
from forebay.format.checkpoint import WalCheckpoint
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import (
    CHECKPOINT_FILE,
    LOG_ID_COPY_FILE,
    LOG_ID_FILE,
    PUBLISHED_FILE,
)
from forebay.repair.frames import FileBytes, FrameRun, FrameSlice, Hole, contested, cover
from forebay.repair.survey import SegmentFound, Survey, Target


class Kind(StrEnum):
    SEGMENT = "segment"
    CHECKPOINT = "checkpoint"
    POSITION = "published position"
    INDEX = "index"
    LOG_ID = "log id"
    OBJECT = "object"
    SIDECAR = "sidecar"
    LOSS = "loss"
    CATALOG = "catalog"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    topic: str
    kind: Kind
    where: str
    """The file or the key."""
    what: str
    remedy: str
    fixable: bool = True
    """Whether a repair can do it, as it was asked to run."""
    repaired: bool = False


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A segment that is written again."""

    target: Target
    pieces: tuple[FrameSlice, ...]


@dataclass(frozen=True, slots=True)
class ObjectRewrite:
    descriptor: ObjectDescriptor
    pieces: tuple[FrameSlice, ...]


@dataclass(slots=True)
class LocalPlan:
    """What is to be done to the files of a log."""

    survey: Survey
    targets: list[Target] = field(default_factory=list)
    rewrites: list[Rewrite] = field(default_factory=list)
    removals: list[SegmentFound] = field(default_factory=list)
    indexes: list[Target] = field(default_factory=list)
    losses: list[Hole] = field(default_factory=list)
    memories: bool = False
    """Whether checkpoint and position are written again."""
    findings: list[Finding] = field(default_factory=list)
    obstacles: list[str] = field(default_factory=list)
    """Why nothing of it may be changed, if so."""

    def refuse(self, topic: str, where: str, why: str, kind: Kind = Kind.SEGMENT) -> None:
        """Records that nothing may be changed, and why."""
        self.obstacles.append(why)
        remedy = "none: nothing of the log is changed; put its files back from a copy"
        self.findings.append(Finding(topic, kind, where, why, remedy, fixable=False))

    @property
    def changes(self) -> bool:
        return bool(self.rewrites or self.removals or self.memories)


ObjectRuns = Callable[[int, int], list[FrameRun]]
"""The runs of committed objects that hold some of the offsets."""


def plan_local(
    topic: str, found: Survey, record: TopicRecord | None, object_runs: ObjectRuns
) -> LocalPlan:
    """Compares the log with what it should be."""
    survey = _behind_losses(found, record)
    targets = survey.targets()
    tail = record.tail if record is not None else 0
    gap = (survey.start, targets[0].first) if targets else (0, 0)
    if gap[0] < gap[1]:
        # Nothing tells how the first offsets were spread over files that are gone.
        survey = survey.begun_at(gap[1])
    plan = LocalPlan(survey, targets)
    if record is None and gap[0] < gap[1]:
        _plan_beginning(topic, plan, gap[0])
    elif record is not None and survey.start > tail:
        _plan_beginning(topic, plan, tail)
    if survey.end_unknown:
        _plan_end(topic, plan, record)
    newest = plan.targets[-1].seq if plan.targets else None
    for target in plan.targets:
        _plan_segment(topic, plan, target, tail, object_runs, newest=target.seq == newest)
    seqs = [target.seq for target in plan.targets]
    if not _in_order(plan):
        why = "files are missing or in disorder, and nothing tells which offsets were in them"
        plan.refuse(topic, str(survey.directory), why)
    kept = set(seqs)
    plan.removals = [each for seq, each in survey.segments.items() if seq not in kept]
    _plan_memories(topic, plan)
    return plan


def plan_object(
    topic: str, key: str, descriptor: ObjectDescriptor, fault: str, runs: list[FrameRun]
) -> tuple[ObjectRewrite | None, Finding]:
    """For an object that is damaged or missing: `runs` are those of segments and its own."""
    pieces, holes = cover(descriptor.start_offset, descriptor.next_offset, runs)
    twice = contested(pieces, runs)
    if twice is not None:
        remedy = f"none: offsets {_spell([twice])} are there twice, and not the same"
        return None, Finding(topic, Kind.OBJECT, key, fault, remedy, fixable=False)
    if holes:
        remedy = (
            f"none: offsets {_spell(holes)} are in no local segment; put the object back from a "
            "copy of the bucket, or read on with cloud_reader.lenient"
        )
        return None, Finding(topic, Kind.OBJECT, key, fault, remedy, fixable=False)
    finding = Finding(
        topic, Kind.OBJECT, key, fault, "it is written again from local segments, and read back"
    )
    return ObjectRewrite(descriptor, tuple(pieces)), finding


def judge_id(
    topic: str, survey: Survey, record: TopicRecord | None
) -> tuple[str | None, Finding | None]:
    """The id of the log as far as it can be known, and what is wrong with the files.

    A finding that is fixable is put right by writing the id.
    """
    own, copy = survey.ids.own, survey.ids.copy
    known = record.log_id if record is not None else None
    if own is not None and own in (copy, known):
        return own, None if copy == own else _of_copy(topic, survey)
    if copy is not None:
        what = _what(survey) if own is None else "it does not say what its copy says"
        remedy = f"it is written again from its copy, {LOG_ID_COPY_FILE}"
        return copy, _finding(topic, survey, what, remedy)
    if record is None or known is None:
        return own, _without_catalog(topic, survey)
    if not survey.begun:
        return own, None
    what = f"{_what(survey)}: opening it sets the log aside{_at_stake(survey, record)}"
    remedy = (
        f"none: if the topic was never open on another machine, this is its log, with the id "
        f"{known} by the catalog: write that into {LOG_ID_FILE}. Otherwise put the file back from "
        "a copy; where the topic went on elsewhere, there is nothing to do"
    )
    return None, _finding(topic, survey, what, remedy, fixable=False)


def _in_order(plan: LocalPlan) -> bool:
    """Whether each segment begins where the one before it ends, and all of them are the log."""
    if not plan.targets:
        return plan.survey.start == plan.survey.end
    first, last = plan.targets[0], plan.targets[-1]
    joined = all(
        (before.seq + 1, before.end) == (after.seq, after.first)
        for before, after in pairwise(plan.targets)
    )
    return joined and (first.first, last.end) == (plan.survey.start, plan.survey.end)


def _plan_beginning(topic: str, plan: LocalPlan, tail: int) -> None:
    """Of a log that begins behind the end of the objects: what is between is gone."""
    survey = plan.survey
    what = f"the log begins at offset {survey.start}, and should at {tail} or before"
    pieces, _ = cover(tail, survey.start, survey.runs)
    if pieces:
        why = f"offset {pieces[0].first} is in {pieces[0].run.source.name}, where it should not be"
        plan.refuse(topic, str(survey.directory), f"{what}; {why}")
    else:
        _plan_loss(topic, plan, (tail, survey.start), str(survey.directory), what)


def _behind_losses(survey: Survey, record: TopicRecord | None) -> Survey:
    """A log has no holes: one with a recorded loss in it begins behind the loss."""
    for start, end in record.lost if record is not None else ():
        if start <= survey.end and end > survey.start:
            survey = survey.begun_at(end)
    return survey


def _plan_end(topic: str, plan: LocalPlan, record: TopicRecord | None) -> None:
    """Of a log whose newest messages are gone, nobody knows how many: no more than are reserved."""
    survey = plan.survey
    path = str(survey.path(max(survey.segments)))
    what = "it holds nothing of the log, and nothing tells how many messages it held"
    if record is None:
        plan.refuse(topic, path, what)
    elif record.reserved > survey.end:
        _plan_loss(topic, plan, (survey.end, record.reserved), path, what)


def _plan_segment(
    topic: str,
    plan: LocalPlan,
    target: Target,
    tail: int,
    object_runs: ObjectRuns,
    *,
    newest: bool,
) -> None:
    survey = plan.survey
    segment = survey.segments.get(target.seq)
    path = survey.path(target.seq)
    if segment is not None and _whole(segment, target, newest=newest):
        if not newest and not segment.index_whole:
            index = survey.directory / survey.names.index(target.seq)
            plan.indexes.append(target)
            plan.findings.append(
                Finding(
                    topic,
                    Kind.INDEX,
                    str(index),
                    "it is missing, damaged or of another segment",
                    "it is built again from the segment",
                )
            )
        return
    pieces, holes = cover(target.first, target.end, survey.runs)
    doubtful = [(each.first, each.end) for each in pieces if not each.run.sure]
    borrowed = [run for start, end in (*holes, *doubtful) for run in object_runs(start, end)]
    runs = [*survey.runs, *borrowed]
    pieces, holes = cover(target.first, target.end, runs)
    twice = contested(pieces, runs)
    if twice is not None:
        why = f"offsets {_spell([twice])} are there twice, and not the same"
        plan.refuse(topic, str(path), f"{why}: some may be part of a payload")
    plan.rewrites.append(Rewrite(target, tuple(pieces)))
    lost = [(max(start, tail), end) for start, end in holes if end > tail]
    hopeless = [(start, min(end, tail)) for start, end in holes if start < tail]
    what = "it is missing" if segment is None else _damage(segment, target)
    if hopeless:
        why = f"offsets {_spell(hopeless)}: no object that can be read holds them either"
        plan.obstacles.append(why)
        plan.findings.append(
            Finding(topic, Kind.SEGMENT, str(path), what, f"none: {why}", fixable=False)
        )
    elif not lost:
        borrow = _whence(pieces, path)
        plan.findings.append(
            Finding(topic, Kind.SEGMENT, str(path), what, f"it is written again {borrow}")
        )
    for hole in lost:
        _plan_loss(topic, plan, hole, str(path), what)


def _whence(pieces: list[FrameSlice], path: Path) -> str:
    names = {each.run.source.name for each in pieces}
    if names <= {str(path)}:
        return "from its own frames"
    local = all(isinstance(each.run.source, FileBytes) for each in pieces)
    return "from the files that hold its frames" if local else "from objects"


def _plan_loss(topic: str, plan: LocalPlan, hole: Hole, where: str, what: str) -> None:
    plan.losses.append(hole)
    plan.findings.append(
        Finding(
            topic,
            Kind.LOSS,
            where,
            f"{what}; offsets {hole[0]} to {hole[1] - 1} are nowhere else",
            "--accept-loss records them as lost, and keeps what is before and behind",
        )
    )


def _whole(segment: SegmentFound, target: Target, *, newest: bool) -> bool:
    runs = segment.runs
    if target.first == target.end:
        return not runs and (not segment.size or segment.torn)
    if len(runs) != 1:
        return False
    run = runs[0]
    ends = run.stop == segment.size or newest  # a torn tail is cut when the log is opened
    return (run.first, run.end, run.start) == (target.first, target.end, 0) and ends


def _damage(segment: SegmentFound, target: Target) -> str:
    """Where the first damage of a segment is."""
    run = segment.runs[0] if segment.runs else None
    if run is None or run.start:
        return f"damaged at position 0 (offset {target.first})"
    if run.stop < segment.size:
        return f"damaged at position {run.stop} (offset {run.end})"
    if run.first < target.first:
        return f"it holds offsets before {target.first}, which the log no longer has"
    return f"it ends at offset {run.end}, and should at {target.end}"


def _plan_memories(topic: str, plan: LocalPlan) -> None:
    survey = plan.survey
    if not survey.begun:
        return
    if plan.removals and not plan.findings:
        plan.findings.append(
            Finding(
                topic,
                Kind.SEGMENT,
                str(plan.removals[0].path),
                "it is before a loss that is recorded, and the log begins behind it",
                "it is removed: objects hold what could be read of it",
            )
        )
    for kind, where, why in _memory_faults(plan):
        plan.memories = True
        plan.findings.append(
            Finding(topic, kind, where, why, "it is written again from the segments")
        )
    plan.memories = plan.memories or bool(plan.rewrites or plan.removals)
    if plan.memories and plan.targets:
        # What the position is said of must be durable: the newest segment goes to a new file.
        last = plan.targets[-1]
        if all(each.target != last for each in plan.rewrites):
            pieces, _ = cover(last.first, last.end, survey.runs)
            plan.rewrites.append(Rewrite(last, tuple(pieces)))


def _memory_faults(plan: LocalPlan) -> list[tuple[Kind, str, str]]:
    survey = plan.survey
    checkpoint, published = survey.checkpoint, survey.published
    faults = []
    at = str(survey.directory / CHECKPOINT_FILE)
    if checkpoint is None:
        faults.append((Kind.CHECKPOINT, at, "it is missing or damaged"))
    elif not plan.rewrites and _contradicts(plan, checkpoint):
        faults.append((Kind.CHECKPOINT, at, "it is not of these segments"))
    at = str(survey.directory / PUBLISHED_FILE)
    if published is None:
        faults.append((Kind.POSITION, at, "it is missing or damaged"))
    elif published.position and not plan.rewrites:
        segment = survey.segments.get(published.seq)
        if segment is None or segment.size < published.position:
            faults.append((Kind.POSITION, at, "it is beyond the end of the segments"))
    return faults


def _contradicts(plan: LocalPlan, checkpoint: WalCheckpoint) -> bool:
    firsts = {target.seq: target.first for target in plan.targets}
    return checkpoint.start_offset < plan.survey.start or any(
        firsts.get(each.seq) != each.first_offset
        for each in checkpoint.segments
        if each.seq in firsts or each.first_offset < plan.survey.end
    )


def _spell(holes: list[Hole]) -> str:
    return ", ".join(f"{start} to {end - 1}" for start, end in holes[:5])


def _what(survey: Survey) -> str:
    if not survey.ids.whole:
        return "it is damaged"
    if survey.ids.own is None:
        return "it is missing"
    return "it is not the id of the log that the topic goes on in"


def _at_stake(survey: Survey, record: TopicRecord) -> str:
    """What would not be readable any more."""
    first = max(record.tail, survey.start)
    goes_on = max(record.tail, record.reserved, survey.end)
    if survey.end <= first:
        return f", and goes on at offset {goes_on}; the objects have all of its messages"
    return (
        f", and goes on at offset {goes_on}; {survey.end - first} messages of it, {first} to "
        f"{survey.end - 1}, are in no object"
    )


def _of_copy(topic: str, survey: Survey) -> Finding | None:
    """One that is missing is made by the next open."""
    if survey.ids.copy is None and survey.ids.copy_whole:
        return None
    where = str(survey.directory / LOG_ID_COPY_FILE)
    what = "it is damaged" if survey.ids.copy is None else f"it is no copy of {LOG_ID_FILE}"
    return Finding(topic, Kind.LOG_ID, where, what, f"it is written again from {LOG_ID_FILE}")


def _without_catalog(topic: str, survey: Survey) -> Finding | None:
    """Where the catalog knows no id, opening takes the log whatever its id is."""
    if survey.ids.whole:
        return None
    remedy = "none: remove it; the catalog knows of no log yet, so this one gets a new id"
    return _finding(topic, survey, "it is damaged", remedy, fixable=False)


def _finding(
    topic: str, survey: Survey, what: str, remedy: str, *, fixable: bool = True
) -> Finding:
    where = str(survey.directory / LOG_ID_FILE)
    return Finding(topic, Kind.LOG_ID, where, what, remedy, fixable)
