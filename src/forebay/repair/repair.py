"""`repair`: finds damage in a store, and repairs what can be repaired.

Without `apply` it changes nothing. It must have the topics to itself: it holds the lock on each
directory while it works, and refuses to run while a server runs. An object that overlaps the local
log is read completely, because segments can repair it. For the other objects only existence and
size are checked; `forebay verify` reads everything.

Beware: a repair without findings proves nothing about objects that it did not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from forebay.catalog.adopt import is_restoring, unfinished
from forebay.catalog.chain import stored
from forebay.catalog.records import TopicRecord
from forebay.client.address import find_server
from forebay.clock import SYSTEM_CLOCK, Clock
from forebay.errors import (
    CheckpointError,
    DescriptorError,
    ObjectMissing,
    ServiceError,
    UnknownTopic,
    UsageError,
)
from forebay.files.disk import Disk, read_file
from forebay.format.checkpoint import UploaderCheckpoint, decode_checkpoint
from forebay.format.descriptor import ObjectDescriptor, decode_descriptor, like
from forebay.format.names import (
    PUBLISHED_FILE,
    TOPICS_PREFIX,
    UPLOADER_CHECKPOINT_FILE,
    SegmentNames,
    TopicName,
    object_key,
    objects_prefix,
    parse_topic,
    sidecar,
    topic_of_key,
)
from forebay.limits import CHECKPOINT_BYTES_MAX, DESCRIPTOR_BYTES_MAX
from forebay.objects.store import connect
from forebay.read.verify import FaultKind, examine_object
from forebay.repair.apply import (
    Copies,
    LocalRepair,
    drop_uploader_checkpoint,
    put_log_id,
    record_losses,
    rewrite_object,
    with_loss,
)
from forebay.repair.frames import FrameRun, find_runs, frames_in_object
from forebay.repair.plan import (
    Finding,
    Kind,
    LocalPlan,
    ObjectRewrite,
    judge_id,
    plan_local,
    plan_object,
)
from forebay.repair.survey import Survey, survey_log
from forebay.settings import StoreSettings
from forebay.topic.opening import Standing, stand, uncommitted_object
from forebay.topic.resources import StoreResources, catalog_file
from forebay.topic.view import StoreView
from forebay.upload.engine import correct, put_sidecar
from forebay.wal.checkpoints import Publisher
from forebay.wal.identity import LocalLog, read_nonces, set_aside

_INDEX: Final = "its frames are right: its descriptor gets the right index"
Repair: TypeAlias = tuple[Callable[[], None], Finding]
"""A finding, and the action that fixes it if it is fixable."""


@dataclass(slots=True)
class RepairReport:
    """The findings in all topics. `left` are those that are not repaired."""

    applied: bool
    topics: int = 0
    findings: list[Finding] = field(default_factory=list)
    copies: str | None = None
    """The directory with copies of everything that was changed; None if nothing was."""

    @property
    def left(self) -> list[Finding]:
        return [each for each in self.findings if not each.repaired]


def repair(
    settings: StoreSettings,
    topics: Sequence[str] = (),
    *,
    apply: bool = False,
    accept_loss: bool = False,
    disk: Disk | None = None,
    clock: Clock = SYSTEM_CLOCK,
    resources: StoreResources | None = None,
) -> RepairReport:
    """Checks the named topics, or all. With `apply`, repairs all that can be repaired.

    `accept_loss` allows recording offsets as lost whose messages are nowhere. Raises UsageError
    while a server runs on the store, LogLocked while another process has a topic open, and
    UnknownTopic.
    """
    if settings.data is None:
        raise UsageError("a store in memory cannot be repaired")
    server = find_server(settings)
    if server is not None:
        raise UsageError(f"a server runs on {settings.data}, at {server.url}: stop it first")
    names = [parse_topic(name) for name in topics]
    report = RepairReport(apply)
    with closing(StoreView(resources or settings, disk=disk, clock=clock)) as view:
        copies = Copies(view.disk, Path(view.name), view.clock.now_ms())
        for topic in names or _all_topics(view):
            _TopicRepair(view, topic, report, copies, accept_loss=accept_loss).run()
            report.topics += 1
        report.copies = str(copies.folder) if copies.count else None
    return report


def _all_topics(view: StoreView) -> list[TopicName]:
    known = {parse_topic(name) for name in view.topics()}
    if view.resources() is None:
        with closing(connect(view.settings.cloud, Path(view.name))) as store:
            found = (topic_of_key(meta.key) for meta in store.list(TOPICS_PREFIX))
            known |= {each[0] for each in found if each is not None}
    return sorted(known)


class _TopicRepair:
    """Checks and repairs one topic."""

    def __init__(
        self,
        view: StoreView,
        topic: TopicName,
        report: RepairReport,
        copies: Copies,
        *,
        accept_loss: bool,
    ) -> None:
        self._view = view
        self._disk = view.disk
        self._topic = topic
        self._report = report
        self._copies = copies
        self._accept_loss = accept_loss
        self._directory = view.directory(topic)
        self._names = SegmentNames(view.settings.wal.file_name)
        self._resources = view.resources()
        self._record = None if self._resources is None else self._resources.catalog.record(topic)
        self._objects = (
            None
            if self._resources is None or self._record is None
            else _ObjectRepair(self._resources, topic, copies)
        )
        self._findings: list[Finding] = []

    def run(self) -> None:
        if not self._known():
            return
        with ExitStack() as stack:
            publisher = None
            if self._disk.exists(self._directory):
                publisher = stack.enter_context(self._locked())
            self._repair(publisher)
        self._report.findings += self._findings

    def _known(self) -> bool:
        """False if the topic must be restored first. Raises UnknownTopic if it does not exist."""
        if self._record is not None and is_restoring(self._record.log_id):
            begun, command = unfinished(self._record.log_id)
            self._point_to_restore(f"{begun} of the topic is not finished", command)
            return False
        if self._record is not None:
            return True
        self._require_not_deleted()
        if self._has_objects():
            self._point_to_restore("the store has objects of a topic that is not in the catalog")
            return False
        if not self._disk.exists(self._directory):
            raise UnknownTopic(f"there is no topic {self._topic} in {self._view.name}")
        return True

    def _require_not_deleted(self) -> None:
        left = None if self._resources is None else self._resources.catalog.find(self._topic)
        if left is not None and left.is_deleted:
            raise UnknownTopic(
                f"there is no topic {self._topic} in {self._view.name}: it was deleted"
            )

    def _has_objects(self) -> bool:
        prefix = objects_prefix(self._topic)
        if self._resources is not None:
            return next(iter(self._resources.store.list(prefix)), None) is not None
        with closing(connect(self._view.settings.cloud, Path(self._view.name))) as store:
            return next(iter(store.list(prefix)), None) is not None

    def _point_to_restore(self, what: str, command: str = "forebay restore") -> None:
        path = catalog_file(self._view.settings)
        where = str(path) if path is not None else "the catalog"
        self._report.findings.append(
            Finding(
                str(self._topic),
                Kind.CATALOG,
                where,
                what,
                f"none here: run `{command} {self._topic}`",
                fixable=False,
            )
        )

    @contextmanager
    def _locked(self) -> Iterator[Publisher]:
        """Holds the lock on the directory. Removes the lock's file again if it stayed empty."""
        path = self._directory / PUBLISHED_FILE
        there = self._disk.exists(path)
        publisher = Publisher(self._disk, self._directory)
        try:
            yield publisher
        finally:
            if not there and not self._disk.size(path):
                self._disk.unlink(path)
            publisher.close()

    # -- the steps ------------------------------------------------------------------------------

    def _repair(self, publisher: Publisher | None) -> None:
        """Repairs objects, then the log.

        The log may hold the last good copy of messages that are damaged in objects, and recording a
        loss cuts it.
        """
        survey = None if publisher is None else self._survey(publisher)
        whole = self._repair_objects(survey)
        if publisher is not None and survey is not None:
            self._repair_log(publisher, survey, objects_whole=whole)

    def _repair_objects(self, survey: Survey | None) -> bool:
        """Repairs objects and sidecars. Returns whether all objects are, or can be, repaired."""
        if self._objects is None:
            return True
        whole = True
        for action, finding in self._objects.look(survey.runs if survey is not None else []):
            self._settle(finding, action)
            whole = whole and finding.fixable
        for action, finding in self._objects.look_at_sidecars():
            self._settle(finding, action)
        return whole

    def _settle(self, finding: Finding, action: Callable[[], None]) -> None:
        """Fixes the finding if it is fixable and `apply` was given, and records it."""
        if self._report.applied and finding.fixable:
            action()
            finding = replace(finding, repaired=True)
        self._findings.append(finding)

    # -- the local log --------------------------------------------------------------------------

    def _survey(self, publisher: Publisher) -> Survey | None:
        """Reads the local log. Returns None if there is none, or if it is not the topic's log."""
        survey = survey_log(self._disk, self._directory, self._names, str(self._topic))
        log_id, finding = judge_id(str(self._topic), survey, self._record)
        if finding is not None:
            self._settle(finding, partial(self._put_log_id, log_id))
        known = self._record.log_id if self._record is not None else None
        if not survey.begun:
            return None
        if known not in (None, log_id):
            self._settle_other(survey, publisher, log_id)
            return None
        return replace(survey, older=self._is_older(log_id, survey))

    def _settle_other(self, survey: Survey, publisher: Publisher, log_id: str | None) -> None:
        """Sets another log than the topic's aside, if opening cannot, because it is damaged."""
        topic = str(self._topic)
        if log_id is None or not plan_local(topic, survey, None, lambda _start, _end: []).findings:
            return
        what = "another log than the topic's newest is here, and it is damaged"
        where = str(self._directory)
        self._settle(
            Finding(topic, Kind.SEGMENT, where, what, "its files are set aside as they are"),
            partial(set_aside, self._disk, self._directory, self._names, publisher, log_id),
        )

    def _is_older(self, log_id: str | None, survey: Survey) -> bool:
        """Whether opening would refuse the log as an older copy."""
        if self._record is None or log_id is None:
            return False
        nonces = read_nonces(self._disk, self._directory)
        local = LocalLog(log_id, survey.start, survey.end, nonces)
        return stand(self._record, local) is Standing.OLDER

    def _put_log_id(self, log_id: str | None) -> None:
        assert log_id is not None, "a finding about an unknown id is not fixable"
        put_log_id(self._disk, self._topic, self._directory, log_id, self._copies)

    def _repair_log(self, publisher: Publisher, survey: Survey, *, objects_whole: bool) -> None:
        self._repair_uploader_checkpoint()
        plan = self._plan(survey, self._record, objects_whole=objects_whole)
        if not self._report.applied or not self._allowed(plan):
            work = LocalRepair(self._disk, self._topic, plan, publisher, self._copies)
            if plan.findings or self._would_open(plan, work):
                self._findings += self._as_left(plan)
            return
        after = plan
        if plan.losses:
            assert self._record is not None, "otherwise no loss is allowed"
            record = reduce(with_loss, sorted(plan.losses), self._record)
            after = self._plan(survey, record, objects_whole=objects_whole)
        work = LocalRepair(self._disk, self._topic, after, publisher, self._copies)
        if not self._would_open(after, work):
            self._findings += [replace(each, fixable=False) for each in plan.findings]
            return
        if plan.losses:
            assert self._resources is not None
            record_losses(self._resources, self._disk, self._topic, plan, plan.losses)
        work.finish()
        self._findings += [replace(each, repaired=True) for each in plan.findings]

    def _would_open(self, plan: LocalPlan, work: LocalRepair) -> bool:
        """Writes the new files beside the log, and lets recovery check them.

        If recovery would refuse the log, this is a bug of the plan: it becomes a finding, and
        nothing is changed.
        """
        why = work.stage() if not (plan.losses or plan.obstacles) else "the plan has a hole"
        if why is not None:
            work.discard()
            remedy = "none: nothing of the log is changed; please report this"
            what = "the repaired log" if plan.changes else "the log"
            what = f"{what} would not open: {why}"
            where = str(self._directory)
            self._findings.append(
                Finding(str(self._topic), Kind.SEGMENT, where, what, remedy, fixable=False)
            )
        return why is None

    def _plan(
        self, survey: Survey, record: TopicRecord | None, *, objects_whole: bool
    ) -> LocalPlan:
        plan = plan_local(str(self._topic), survey, record, self._object_runs)
        if plan.losses and survey.older and (found := self._uncommitted()) is not None:
            why = f"{found} was not committed: run `forebay restore {self._topic}` first"
            plan.refuse(str(self._topic), str(self._directory), why)
        if (plan.losses or plan.removals) and not objects_whole:
            why = "the log may hold the last copy of messages that are damaged in an object"
            plan.refuse(str(self._topic), str(self._directory), why)
        return plan

    def _uncommitted(self) -> str | None:
        if self._resources is None or self._record is None:
            return None
        store, catalog = self._resources.store, self._resources.catalog
        return uncommitted_object(store, catalog, self._topic, self._record.tail)

    def _allowed(self, plan: LocalPlan) -> bool:
        if plan.obstacles:
            return False
        return not plan.losses or (self._accept_loss and self._record is not None)

    def _as_left(self, plan: LocalPlan) -> list[Finding]:
        """Returns the findings of a log that is not changed.

        A log is repaired completely or not at all, so none is fixable if the plan is not allowed.
        """
        fixable = self._allowed(plan)
        return [replace(each, fixable=each.fixable and fixable) for each in plan.findings]

    def _object_runs(self, start: int, end: int) -> list[FrameRun]:
        return [] if self._objects is None else self._objects.runs(start, end)

    def _repair_uploader_checkpoint(self) -> None:
        path = self._directory / UPLOADER_CHECKPOINT_FILE
        if not self._disk.exists(path):
            return
        try:
            data = read_file(self._disk, path, bytes_max=CHECKPOINT_BYTES_MAX)
            decode_checkpoint(data, UploaderCheckpoint)
        except (CheckpointError, ValueError):
            finding = Finding(
                str(self._topic),
                Kind.CHECKPOINT,
                str(path),
                "it is damaged",
                "it is removed: the next upload finds its position and writes it again",
            )
            self._settle(
                finding,
                lambda: drop_uploader_checkpoint(
                    self._disk, self._topic, self._directory, self._copies
                ),
            )


class _ObjectRepair:
    """Checks and repairs the objects of a topic, and reads valid frames from them."""

    def __init__(self, resources: StoreResources, topic: TopicName, copies: Copies) -> None:
        self._resources = resources
        self._store = resources.store
        self._topic = topic
        self._copies = copies

    def runs(self, start: int, end: int) -> list[FrameRun]:
        """Returns the runs of the committed objects that overlap the range."""
        found: list[FrameRun] = []
        for each in self._resources.catalog.get_object_descriptors_range(self._topic, start, end):
            found += self._runs_of(each)
        return found

    def _runs_of(self, descriptor: ObjectDescriptor) -> list[FrameRun]:
        try:
            source = frames_in_object(self._store, self._key(descriptor), descriptor)
        except ObjectMissing:
            return []
        start, end = descriptor.start_offset, descriptor.next_offset
        return list(find_runs(source, start, end, str(self._topic)))

    def _key(self, descriptor: ObjectDescriptor) -> str:
        return object_key(self._topic, descriptor.object_id)

    def look(self, local: Sequence[FrameRun]) -> Iterator[Repair]:
        """Yields the damaged and missing objects. `local` are the runs of the log."""
        for descriptor in self._resources.catalog.get_object_descriptors(self._topic):
            fault = self._fault(descriptor, local)
            if fault is None:
                continue
            key = self._key(descriptor)
            if fault.found is not None:
                finding = Finding(str(self._topic), Kind.OBJECT, key, fault.what, _INDEX)
                yield partial(self._correct, descriptor, fault.found), finding
                continue
            # The frames of another object are valid, and must not be taken for this one's.
            own = [] if fault.kind is FaultKind.CONTENT else self._runs_of(descriptor)
            wanted, finding = plan_object(
                str(self._topic), key, descriptor, fault.what, [*local, *own]
            )
            yield _nothing if wanted is None else partial(self._rewrite, wanted), finding

    def _correct(self, said: ObjectDescriptor, found: ObjectDescriptor) -> None:
        resources = self._resources
        sidecars = resources.settings.uploader.sidecars
        correct(resources.catalog, self._store, self._topic, said, found, sidecars=sidecars)

    def _rewrite(self, wanted: ObjectRewrite) -> None:
        rewrite_object(self._resources, self._topic, wanted, self._copies)

    def _fault(
        self, descriptor: ObjectDescriptor, local: Sequence[FrameRun]
    ) -> _ObjectFault | None:
        start, end = descriptor.start_offset, descriptor.next_offset
        if any(run.first < end and run.end > start for run in local):
            reader = self._resources.settings.cloud_reader
            seen = examine_object(
                self._store, self._resources.pool, reader, self._topic, descriptor
            )
            if seen.fault is None:
                return None
            return _ObjectFault(seen.fault.kind, str(seen.fault.error), seen.found)
        try:
            size = self._store.head(self._key(descriptor)).size
        except ObjectMissing:
            what = "it is missing, but its descriptor is in the catalog"
            return _ObjectFault(FaultKind.MISSING, what)
        if size == descriptor.size:
            return None
        what = f"it has {size} bytes, but its descriptor says {descriptor.size}"
        return _ObjectFault(FaultKind.RESIZED, what)

    # -- sidecars -------------------------------------------------------------------------------

    def look_at_sidecars(self) -> Iterator[Repair]:
        if not self._resources.settings.uploader.sidecars:
            return
        for descriptor in self._resources.catalog.get_object_descriptors(self._topic):
            key = object_key(self._topic, sidecar(descriptor.object_id))
            what = self._sidecar_fault(key, descriptor)
            if what is not None:
                remedy = "it is written again from the catalog"
                finding = Finding(str(self._topic), Kind.SIDECAR, key, what, remedy)
                yield partial(self._put_sidecar, descriptor, key), finding

    def _sidecar_fault(self, key: str, descriptor: ObjectDescriptor) -> str | None:
        try:
            found = decode_descriptor(bytes(self._store.get_object(key, DESCRIPTOR_BYTES_MAX)))
        except ObjectMissing:
            return "it is missing"
        except (DescriptorError, ServiceError) as error:
            return f"it is damaged: {error}"
        same = like(found, descriptor)
        return None if descriptor in (same, stored(same)) else "it differs from the catalog"

    def _put_sidecar(self, descriptor: ObjectDescriptor, key: str) -> None:
        self._copies.keep_object(self._topic, self._store, key)
        put_sidecar(self._store, self._topic, descriptor)


class _ObjectFault(NamedTuple):
    kind: FaultKind
    what: str
    found: ObjectDescriptor | None = None
    """The descriptor with the right index, if only the index is wrong."""


def _nothing() -> None: ...
