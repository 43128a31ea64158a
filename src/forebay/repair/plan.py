"""Decides what is wrong with a topic and how to repair it. `apply` carries it out.

    damage                                    remedy
    frames of a segment, in a good object     the segment is written again
    frames of an object, in a good segment    the object is written again, under its name
    checkpoint, position, index, sidecar      written again from their sources
    id of the log                             written again from its copy, never from the catalog
    frames that are nowhere else              if allowed, recorded as lost; the log begins after
    an older copy of the log                  if allowed, what came after it is recorded as lost
    frames damaged in object and segment      none

A log has no holes. So before a loss is recorded, the readable messages before it are uploaded, and
the local log then begins after it.

Beware: the id of a log is never taken from the catalog. A log that fits the objects was the topic's
log once, but another machine may have owned the topic since. If the old log got that machine's id,
it would assign offsets a second time that were acknowledged there.
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
    """The file, or the key of the object."""
    what: str
    remedy: str
    fixable: bool = True
    """Whether a repair with the given options can fix it."""
    repaired: bool = False


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A segment to write again, and the frames to write."""

    target: Target
    pieces: tuple[FrameSlice, ...]


@dataclass(frozen=True, slots=True)
class ObjectRewrite:
    descriptor: ObjectDescriptor
    pieces: tuple[FrameSlice, ...]


@dataclass(slots=True)
class LocalPlan:
    """What to do with the files of a log."""

    survey: Survey
    targets: list[Target] = field(default_factory=list)
    rewrites: list[Rewrite] = field(default_factory=list)
    removals: list[SegmentFound] = field(default_factory=list)
    indexes: list[Target] = field(default_factory=list)
    losses: list[Hole] = field(default_factory=list)
    checkpoints: bool = False
    """Whether the checkpoint and the published position are written again."""
    findings: list[Finding] = field(default_factory=list)
    obstacles: list[str] = field(default_factory=list)
    """Reasons why nothing of the log may be changed. Empty if it may."""

    def refuse(self, topic: str, where: str, why: str, kind: Kind = Kind.SEGMENT) -> None:
        """Records a reason why nothing of the log may be changed."""
        self.obstacles.append(why)
        remedy = "none: nothing of the log is changed; restore its files from a copy"
        self.findings.append(Finding(topic, kind, where, why, remedy, fixable=False))

    @property
    def changes(self) -> bool:
        return bool(self.rewrites or self.removals or self.checkpoints)


ObjectRuns = Callable[[int, int], list[FrameRun]]
"""Returns the runs of the committed objects that overlap a range of offsets."""


def plan_local(
    topic: str, found: Survey, record: TopicRecord | None, object_runs: ObjectRuns
) -> LocalPlan:
    """Plans the repair of a log: compares the files found with those that should exist."""
    survey = _after_losses(found, record)
    targets = survey.targets()
    tail = record.tail if record is not None else 0
    gap = (survey.start, targets[0].first) if targets else (0, 0)
    if gap[0] < gap[1]:
        # It is unknown which of the missing files held which of the first offsets.
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
        why = "files are missing or out of order, and it is unknown which offsets they held"
        plan.refuse(topic, str(survey.directory), why)
    kept = set(seqs)
    plan.removals = [each for seq, each in survey.segments.items() if seq not in kept]
    _plan_checkpoints(topic, plan)
    return plan


def plan_object(
    topic: str, key: str, descriptor: ObjectDescriptor, fault: str, runs: list[FrameRun]
) -> tuple[ObjectRewrite | None, Finding]:
    """Plans the repair of a damaged or missing object from `runs`: the segments' and its own."""
    pieces, holes = cover(descriptor.start_offset, descriptor.next_offset, runs)
    twice = contested(pieces, runs)
    if twice is not None:
        remedy = f"none: there are two different versions of offsets {_shown([twice])}"
        return None, Finding(topic, Kind.OBJECT, key, fault, remedy, fixable=False)
    if holes:
        remedy = (
            f"none: offsets {_shown(holes)} are in no local segment; restore the object from a "
            "copy of the bucket, let readers skip it with cloud_reader.lenient, or record what no "
            "copy holds as lost with `forebay restore --verify --allow-gaps`"
        )
        return None, Finding(topic, Kind.OBJECT, key, fault, remedy, fixable=False)
    finding = Finding(
        topic, Kind.OBJECT, key, fault, "it is written again from local segments and read back"
    )
    return ObjectRewrite(descriptor, tuple(pieces)), finding


def judge_id(
    topic: str, survey: Survey, record: TopicRecord | None
) -> tuple[str | None, Finding | None]:
    """Returns the id of the log, None if it is unknown, and what is wrong with its files.

    If the finding is fixable, writing the returned id fixes it.
    """
    own, copy = survey.ids.own, survey.ids.copy
    known = record.log_id if record is not None else None
    if own is not None and own in (copy, known):
        return own, None if copy == own else _of_copy(topic, survey)
    if copy is not None:
        what = _what(survey) if own is None else "it differs from its copy"
        remedy = f"it is written again from its copy, {LOG_ID_COPY_FILE}"
        return copy, _finding(topic, survey, what, remedy)
    if record is None or known is None:
        return own, _without_catalog(topic, survey)
    if not survey.begun:
        return own, None
    what = f"{_what(survey)}: opening it sets the log aside{_at_stake(survey, record)}"
    remedy = (
        f"none: if the topic was never opened on another machine, this is its log, and its id in "
        f"the catalog is {known}: write that into {LOG_ID_FILE}. Otherwise restore the file from a "
        "copy. If the topic continued on another machine, there is nothing to do"
    )
    return None, _finding(topic, survey, what, remedy, fixable=False)


def _in_order(plan: LocalPlan) -> bool:
    """Whether each segment begins where the one before it ends, and they cover the whole log."""
    if not plan.targets:
        return plan.survey.start == plan.survey.end
    first, last = plan.targets[0], plan.targets[-1]
    joined = all(
        (before.seq + 1, before.end) == (after.seq, after.first)
        for before, after in pairwise(plan.targets)
    )
    return joined and (first.first, last.end) == (plan.survey.start, plan.survey.end)


def _plan_beginning(topic: str, plan: LocalPlan, tail: int) -> None:
    """Plans for a log that begins after the end of the objects: the range between is lost."""
    survey = plan.survey
    what = f"the log begins at offset {survey.start}, but should begin at {tail} or before"
    pieces, _ = cover(tail, survey.start, survey.runs)
    if pieces:
        why = f"offset {pieces[0].first} is in {pieces[0].run.source.name}, where it should not be"
        plan.refuse(topic, str(survey.directory), f"{what}; {why}")
    else:
        _plan_loss(topic, plan, (tail, survey.start), str(survey.directory), what)


def _after_losses(survey: Survey, record: TopicRecord | None) -> Survey:
    """Moves the start of the log after a recorded hole in it, because a log has no holes.

    An older copy that ends before the objects do has nothing that they lack.
    """
    if survey.older and record is not None and survey.end < record.tail:
        survey = survey.begun_at(record.tail)
    for start, end in record.holes if record is not None else ():
        if start <= survey.end and end > survey.start:
            survey = survey.begun_at(end)
    return survey


def _plan_end(topic: str, plan: LocalPlan, record: TopicRecord | None) -> None:
    """Plans for a log that lost an unknown number of its newest messages.

    There were at most as many as offsets are reserved.
    """
    survey = plan.survey
    if survey.older:
        where = str(survey.directory)
        what = "the log is an older copy, and it is unknown how many messages came after it"
    else:
        where = str(survey.path(max(survey.segments)))
        what = "it holds nothing of the log, and it is unknown how many messages it held"
    if record is None:
        plan.refuse(topic, where, what)
    elif record.reserved > survey.end:
        _plan_loss(topic, plan, (survey.end, record.reserved), where, what)


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
                    "it is missing, damaged or belongs to another segment",
                    "it is built again from the segment",
                )
            )
        return
    pieces, holes = cover(target.first, target.end, survey.runs)
    doubtful = [(each.first, each.end) for each in pieces if not each.run.sure]
    from_objects = [run for start, end in (*holes, *doubtful) for run in object_runs(start, end)]
    runs = [*survey.runs, *from_objects]
    pieces, holes = cover(target.first, target.end, runs)
    twice = contested(pieces, runs)
    if twice is not None:
        why = f"there are two different versions of offsets {_shown([twice])}"
        plan.refuse(topic, str(path), f"{why}: one may be part of a payload")
    plan.rewrites.append(Rewrite(target, tuple(pieces)))
    lost = [(max(start, tail), end) for start, end in holes if end > tail]
    unrecoverable = [(start, min(end, tail)) for start, end in holes if start < tail]
    what = "it is missing" if segment is None else _damage(segment, target)
    if unrecoverable:
        why = f"no readable object holds offsets {_shown(unrecoverable)} either"
        plan.obstacles.append(why)
        plan.findings.append(
            Finding(topic, Kind.SEGMENT, str(path), what, f"none: {why}", fixable=False)
        )
    elif not lost:
        sources = _sources_of(pieces, path)
        plan.findings.append(
            Finding(topic, Kind.SEGMENT, str(path), what, f"it is written again {sources}")
        )
    for hole in lost:
        _plan_loss(topic, plan, hole, str(path), what)


def _sources_of(pieces: list[FrameSlice], path: Path) -> str:
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
            "--accept-loss records them as lost, and keeps what is before and after them",
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
    """Returns a description of the first damage of a segment."""
    run = segment.runs[0] if segment.runs else None
    if run is None or run.start:
        return f"damaged at position 0 (offset {target.first})"
    if run.stop < segment.size:
        return f"damaged at position {run.stop} (offset {run.end})"
    if run.first < target.first:
        return f"it holds offsets before {target.first}, which the log no longer has"
    return f"it ends at offset {run.end}, but should end at {target.end}"


def _plan_checkpoints(topic: str, plan: LocalPlan) -> None:
    survey = plan.survey
    if not survey.begun:
        return
    if plan.removals and not plan.findings:
        plan.findings.append(
            Finding(
                topic,
                Kind.SEGMENT,
                str(plan.removals[0].path),
                "it comes before a recorded loss, and the log begins after the loss",
                "it is removed: its readable messages are in objects",
            )
        )
    for kind, where, why in _checkpoint_faults(plan):
        plan.checkpoints = True
        plan.findings.append(
            Finding(topic, kind, where, why, "it is written again from the segments")
        )
    plan.checkpoints = plan.checkpoints or bool(plan.rewrites or plan.removals)
    if plan.checkpoints and plan.targets:
        # Before its end is published, the newest segment must be durable: write it to a new file.
        last = plan.targets[-1]
        if all(each.target != last for each in plan.rewrites):
            pieces, _ = cover(last.first, last.end, survey.runs)
            plan.rewrites.append(Rewrite(last, tuple(pieces)))


def _checkpoint_faults(plan: LocalPlan) -> list[tuple[Kind, str, str]]:
    survey = plan.survey
    checkpoint, published = survey.checkpoint, survey.published
    faults = []
    at = str(survey.directory / CHECKPOINT_FILE)
    if checkpoint is None:
        faults.append((Kind.CHECKPOINT, at, "it is missing or damaged"))
    elif not plan.rewrites and _contradicts(plan, checkpoint):
        faults.append((Kind.CHECKPOINT, at, "it does not match the segments"))
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


def _shown(holes: list[Hole]) -> str:
    return ", ".join(f"{start} to {end - 1}" for start, end in holes[:5])


def _what(survey: Survey) -> str:
    if not survey.ids.whole:
        return "it is damaged"
    if survey.ids.own is None:
        return "it is missing"
    return "it is not the id of the topic's log in the catalog"


def _at_stake(survey: Survey, record: TopicRecord) -> str:
    """Returns what would happen to the messages of this log, as the end of a sentence."""
    first = max(record.tail, survey.start)
    goes_on = max(record.tail, record.reserved, survey.end)
    if survey.end <= first:
        return f" and continues at offset {goes_on}; the objects have all of its messages"
    return (
        f" and continues at offset {goes_on}; {survey.end - first} messages of it, {first} to "
        f"{survey.end - 1}, are in no object"
    )


def _of_copy(topic: str, survey: Survey) -> Finding | None:
    """Returns the finding about the copy, or None. The next open creates a missing copy."""
    if survey.ids.copy is None and survey.ids.copy_whole:
        return None
    where = str(survey.directory / LOG_ID_COPY_FILE)
    what = "it is damaged" if survey.ids.copy is None else f"it differs from {LOG_ID_FILE}"
    return Finding(topic, Kind.LOG_ID, where, what, f"it is written again from {LOG_ID_FILE}")


def _without_catalog(topic: str, survey: Survey) -> Finding | None:
    """Returns a finding only for a damaged id: without one in the catalog, any id is accepted."""
    if survey.ids.whole:
        return None
    remedy = "none: remove it; the catalog names no log yet, so this one gets a new id"
    return _finding(topic, survey, "it is damaged", remedy, fixable=False)


def _finding(
    topic: str, survey: Survey, what: str, remedy: str, *, fixable: bool = True
) -> Finding:
    where = str(survey.directory / LOG_ID_FILE)
    return Finding(topic, Kind.LOG_ID, where, what, remedy, fixable)
