"""`import_danube`: Danube's topics become topics of a store, with the same offsets.

The driver lists Danube's bucket and WAL directory. Tasks read every file whole (`inspect`). The
driver then decides which file gives which offsets, and tasks compare what several files hold. That
is the plan, and without `apply` it is all. Otherwise the driver owns each topic while tasks copy
its frames, byte for byte, into new objects, which are read back and committed in order
(`upload.engine`). A topic is opened as usual afterwards, and its log continues after the import.

A topic that is being imported has the mark of a restore in its record (`catalog.adopt`), so nothing
opens or sweeps it. An import that was interrupted continues when it is run again: what is in the
target already is compared with the source, message by message, and not copied again.

Beware: only topics that nobody has opened are imported. Source and target must be different stores.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from forebay.catalog.adopt import importing, is_importing, is_restoring, unfinished
from forebay.catalog.catalog import Change
from forebay.catalog.connect import connect_kv
from forebay.catalog.job_state import ORIGIN_HERE, ORIGIN_NAME, read_job_state
from forebay.catalog.kv import Kv, Put
from forebay.catalog.ownership import Ownership, acquire
from forebay.catalog.records import TopicRecord, skip_holes
from forebay.errors import (
    CommitRefused,
    CorruptLog,
    ForebayError,
    MissingData,
    ServiceError,
    TopicFenced,
    TopicOwned,
    UsageError,
)
from forebay.files.local import LocalDisk
from forebay.format.danube import (
    DEFAULT_PREFIX,
    decode_danube_descriptor,
    descriptors_prefix,
    parse_descriptor_key,
)
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import TopicName, after_prefix, objects_prefix, parse_topic
from forebay.limits import CATALOG_PAGE
from forebay.logs import event
from forebay.objects.store import CloudStore, connect
from forebay.pipeline.execute import Executor, Progress, Runner, ThreadExecutor, executor_for
from forebay.pipeline.jobs.report import to_dataframe
from forebay.pipeline.jobs.restore import INLINE_BYTES, job_resources
from forebay.pipeline.jobs.waves import Waves
from forebay.pipeline.location import job_settings
from forebay.settings import CloudSettings, MetadataSettings, StoreSettings
from forebay.topic.resources import StoreResources, executor_resources
from forebay.upload import engine
from forebay.upload.danube import (
    Copy,
    Damage,
    DanubeSource,
    Inspected,
    Layout,
    Listing,
    Piece,
    Range,
    Run,
    SourceFile,
    SourceReaders,
    digest,
    inspect,
    lay_out,
    list_bucket,
    list_wal,
    measure,
    plan_objects,
)
from forebay.upload.engine import Uploaded, UploadTask
from forebay.upload.plan import Extent, PlannedObject
from forebay.upload.restore import shown

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_log: Final = logging.getLogger("forebay.upload")
_LABEL: Final = "forebay import-danube"
_LOOK_SECONDS: Final = 0.1
_NEXT_KEY: Final = "\1"

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class DanubeOrigin:
    """Where Danube's data is. Nothing there is changed."""

    bucket: CloudSettings | None = None
    wal: Path | None = None
    """Danube's `wal.dir`: the directory with one directory for each namespace."""
    etcd: MetadataSettings | None = None
    """The etcd with the descriptors; `prefix` is Danube's root, by default `/danube`."""


@dataclass(frozen=True, slots=True)
class ImportChoices:
    """The operator's choices. By default an import stops at everything that is not perfect."""

    apply: bool = False
    """Import. Otherwise nothing is changed."""
    skip_damage: bool = False
    """Leave damaged bytes out."""
    allow_gaps: bool = False
    """Record offsets that no file holds as lost."""
    allow_conflicts: bool = False
    """Where two files hold different messages of an offset, keep the first: see `Conflict`."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """Offsets, the end not included, that two files hold with different messages.

    Objects come before WAL files, and objects without a descriptor last.
    """

    start: int
    end: int
    kept: str
    dropped: str


@dataclass(slots=True)
class ImportRow:
    """What an import found of one topic, and what it did. Without `apply`: what it would do."""

    topic: str
    objects: int = 0
    """Objects in Danube's bucket."""
    wal_files: int = 0
    messages_found: int = 0
    """Messages in all files, copies included."""
    copies: int = 0
    """Messages that are in another file too."""
    messages: int = 0
    """Messages of the topic, each counted once."""
    bytes: int = 0
    """Bytes of their frames."""
    start_offset: int = 0
    next_offset: int = 0
    present: int = 0
    """Messages that were in the target before."""
    new_objects: int = 0
    new_messages: int = 0
    torn_bytes: int = 0
    """Bytes of an incomplete last frame in the newest WAL file."""
    pending: int = 0
    """Uploads that Danube did not finish."""
    undescribed: int = 0
    """Objects without a descriptor; 0 without etcd."""
    missing: list[str] = field(default_factory=list)
    """Objects with a descriptor that are not in the bucket."""
    gaps: list[Range] = field(default_factory=list)
    """Ranges of offsets, ends not included, that no file holds."""
    damage: list[Damage] = field(default_factory=list)
    conflicts: list[Conflict] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ImportSummary:
    """A row of the DataFrame: lists are counted."""

    topic: str
    messages: int
    bytes: int
    start_offset: int
    next_offset: int
    present: int
    new_objects: int
    new_messages: int
    copies: int
    gaps: int
    damage: int
    conflicts: int
    error: str | None


@dataclass(frozen=True, slots=True)
class ImportReport:
    applied: bool
    rows: tuple[ImportRow, ...]
    unknown: tuple[str, ...]
    """Files beside Danube's that were not read."""

    @property
    def ok(self) -> bool:
        return not any(row.error for row in self.rows)

    @property
    def messages(self) -> int:
        return sum(row.messages for row in self.rows)

    @property
    def bytes(self) -> int:
        return sum(row.bytes for row in self.rows)

    def dataframe(self, spark: SparkSession) -> DataFrame:
        names = [each.name for each in fields(ImportSummary)]
        rows = [
            ImportSummary(*(_counted(getattr(row, name)) for name in names)) for row in self.rows
        ]
        return to_dataframe(spark, ImportSummary, rows)


def _counted(value: Any) -> Any:
    return len(value) if isinstance(value, list) else value


def import_danube(
    target: str | Path | StoreSettings,
    origin: DanubeOrigin,
    topics: Sequence[str] | None = None,
    *,
    apply: bool = False,
    skip_damage: bool = False,
    allow_gaps: bool = False,
    allow_conflicts: bool = False,
    spark: SparkSession | None = None,
    runner: Runner = "spark",
    progress: Progress | None = None,
) -> ImportReport:
    """Imports the topics, or all topics of the origin, into the store `target`.

    Without `apply`, reads everything, changes nothing, and reports what an import would do. The
    other choices are those of `ImportChoices`. The error of a topic is in its row, and does not
    stop the others. `progress` is called with the tasks that are done in the current step, and all
    of them. Spark is not started for less than `INLINE_BYTES`, unless a session is given. Raises
    UsageError for an origin that cannot be right.
    """
    choices = ImportChoices(apply, skip_damage, allow_gaps, allow_conflicts)
    settings = job_settings(target)
    if origin.bucket is None and origin.wal is None:
        raise UsageError("there is nothing to import: name Danube's bucket, its WAL, or both")
    names = None if topics is None else [parse_topic(name) for name in topics]
    listing = _list(origin, settings)
    if origin.etcd is not None and origin.bucket is None:
        raise UsageError("descriptors in etcd are about objects: name Danube's bucket too")
    described = {} if origin.etcd is None else _described(origin.etcd)
    known = listing.topics.keys() | described.keys() | listing.pending.keys()
    absent = [str(name) for name in names or () if name not in known]
    if absent:
        raise UsageError(f"Danube's data has no topic {', '.join(absent)}")
    executor = executor_for(runner, spark, settings.spark)
    if runner == "spark" and spark is None and listing.size < INLINE_BYTES:
        executor = ThreadExecutor()
    source = None if origin.bucket is None else StoreSettings(data=None, cloud=origin.bucket)
    tasks = _Tasks(executor, settings, source, progress)
    chosen = sorted(known if names is None else set(names))
    plans = _plans(tasks, listing, described if origin.etcd is not None else None, chosen)
    rows: list[ImportRow] = []
    with job_resources(settings, dry_run=not apply) as resources:
        for plan in plans:
            _TopicImport(resources, plan, choices, tasks)()
            rows.append(plan.row)
    return ImportReport(apply, tuple(rows), tuple(listing.unknown))


def _list(origin: DanubeOrigin, settings: StoreSettings) -> Listing:
    listing = Listing()
    if origin.bucket is not None:
        if origin.bucket.backend == "fs" and not Path(origin.bucket.root or "").is_dir():
            raise UsageError(f"Danube's bucket {origin.bucket.root} is not a directory")
        data = Path(settings.data or "")
        with (
            closing(connect(origin.bucket)) as store,
            closing(connect(settings.cloud, data)) as own,
        ):
            if store.name == own.name:
                raise UsageError(
                    f"{store.name} is Danube's bucket and the target: choose another store for the "
                    "target, because an import changes nothing in its source"
                )
            list_bucket(store, listing)
    if origin.wal is not None:
        list_wal(LocalDisk(), origin.wal.absolute(), listing)
    return listing


_Described: TypeAlias = dict[tuple[str, str], ObjectDescriptor]
"""Descriptors by the folder and the name of their objects."""


def _described(settings: MetadataSettings) -> dict[TopicName, _Described]:
    """Reads the descriptors of all topics. Writes nothing."""
    root = settings.prefix if settings.prefix is not None else DEFAULT_PREFIX
    found: dict[TopicName, _Described] = {}
    with closing(connect_kv(settings, None)) as kv:
        for key, value in _values(kv, descriptors_prefix(root)):
            place = parse_descriptor_key(root, key)
            if place is None:
                continue
            topic, folder, start = place
            try:
                descriptor = decode_danube_descriptor(value)
            except ForebayError as error:
                raise CorruptLog(
                    f"{kv.name}: the descriptor {key} is damaged: {error}; without --etcd the "
                    "objects alone decide"
                ) from error
            if descriptor.start_offset != start:
                raise CorruptLog(
                    f"{kv.name}: the descriptor {key} begins at {descriptor.start_offset}; without "
                    "--etcd the objects alone decide"
                )
            found.setdefault(topic, {})[folder, descriptor.object_id] = descriptor
    return found


def _values(kv: Kv, prefix: str) -> Iterator[tuple[str, bytes]]:
    at, end = prefix, after_prefix(prefix)
    while page := kv.range(at, end, limit=CATALOG_PAGE):
        yield from ((entry.key, entry.value) for entry in page)
        at = page[-1].key + _NEXT_KEY


# ---- tasks ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Measure:
    """Finds where the frames of these offsets of a run begin."""

    file: SourceFile
    run: Run
    offsets: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.run.stop - self.run.position


@dataclass(frozen=True, slots=True)
class _Digest:
    """Hashes the frames of whole pieces."""

    files: dict[int, SourceFile]
    pieces: list[Piece]

    @property
    def size(self) -> int:
        return sum(each.run.stop - each.run.position for each in self.pieces)


@dataclass(frozen=True, slots=True)
class _Transfer:
    files: dict[int, SourceFile]
    upload: UploadTask

    @property
    def size(self) -> int:
        return self.upload.size


def _readers(source: StoreSettings | None) -> SourceReaders:
    def store() -> CloudStore:
        assert source is not None, "objects are listed in a bucket"
        return executor_resources(source).store

    return SourceReaders(store, LocalDisk())


def _inspect_task(source: StoreSettings | None, file: SourceFile) -> Inspected:
    with _readers(source) as readers:
        return inspect(file, readers.reader(file))


def _measure_task(source: StoreSettings | None, item: _Measure) -> list[int]:
    with _readers(source) as readers:
        return measure(item.file.name, readers.reader(item.file), item.run, item.offsets)


def _digest_task(source: StoreSettings | None, item: _Digest) -> str:
    with _readers(source) as readers:
        return digest(readers, item.files, item.pieces)


def _transfer_task(
    settings: StoreSettings, source: StoreSettings | None, item: _Transfer
) -> Uploaded:
    """Copies the frames into a new object, and reads it back. Commits nothing."""
    resources = executor_resources(settings)
    ports = replace(resources.upload_ports, verify=resources.read_back)
    with _readers(source) as readers:
        return engine.upload(ports, DanubeSource(readers, item.files), item.upload)


class _Tasks:
    """Runs the steps of an import on an executor, in waves."""

    def __init__(
        self,
        executor: Executor,
        settings: StoreSettings,
        source: StoreSettings | None,
        progress: Progress | None,
    ) -> None:
        self._executor = executor
        self._settings = settings
        self._source = source
        self._progress = progress

    def inspect(
        self, files: Iterable[SourceFile]
    ) -> Iterator[tuple[SourceFile, Inspected | ForebayError]]:
        work = partial(_inspect_task, self._source)
        return self._run(work, files, lambda file: file.size)

    def measure(
        self, items: Iterable[_Measure]
    ) -> Iterator[tuple[_Measure, list[int] | ForebayError]]:
        return self._run(partial(_measure_task, self._source), items, lambda item: item.size)

    def digest(self, items: Iterable[_Digest]) -> Iterator[tuple[_Digest, str | ForebayError]]:
        return self._run(partial(_digest_task, self._source), items, lambda item: item.size)

    def transfers(self) -> Waves[_Transfer, Uploaded]:
        work = partial(_transfer_task, self._settings, self._source)
        return Waves(
            self._executor, work, lambda item: item.size, label=_LABEL, progress=self._progress
        )

    def _run(
        self,
        work: Callable[[_Item], _Result],
        items: Iterable[_Item],
        size: Callable[[_Item], int],
    ) -> Iterator[tuple[_Item, _Result | ForebayError]]:
        waves = Waves(self._executor, work, size, label=_LABEL, progress=self._progress)
        for wave in waves.cut(items):
            for item, done in waves.run(wave):
                if done.result is not None:
                    yield item, done.result
                else:
                    assert done.error is not None, "an item has a result or an error"
                    yield item, done.error


# ---- the plan ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _Plan:
    """The plan of one topic."""

    topic: TopicName
    row: ImportRow
    files: list[SourceFile]
    """In the order in which they are preferred."""
    layout: Layout = field(default_factory=Layout)
    extents: list[Extent] = field(default_factory=list)

    def used(self, numbers: Iterable[int]) -> dict[int, SourceFile]:
        return {number: self.files[number] for number in set(numbers)}

    def digest_of(self, pieces: list[Piece]) -> _Digest:
        return _Digest(self.used(each.file for each in pieces), pieces)

    def fail(self, error: ForebayError | str) -> None:
        self.row.error = self.row.error or str(error)


def _plans(
    tasks: _Tasks,
    listing: Listing,
    described: dict[TopicName, _Described] | None,
    topics: Sequence[TopicName],
) -> list[_Plan]:
    """Reads all files of the topics, and plans each of them."""
    plans = [_begun(topic, listing, described) for topic in topics]
    owners = {file: plan for plan in plans for file in plan.files}
    found: dict[SourceFile, Inspected] = {}
    for file, result in tasks.inspect(file for plan in plans for file in plan.files):
        if isinstance(result, ForebayError):
            owners[file].fail(result)
        else:
            found[file] = result
    for plan in plans:
        rows = {} if described is None else described.get(plan.topic, {})
        expected = [(each.start_offset, each.next_offset) for each in rows.values()]
        inspected = [found.get(file, Inspected(file, (), (), 0)) for file in plan.files]
        plan.layout = lay_out(inspected, expected)
        _count(plan, inspected)
    _compare_copies(tasks, plans)
    _measure_all(tasks, plans)
    return plans


def _begun(
    topic: TopicName, listing: Listing, described: dict[TopicName, _Described] | None
) -> _Plan:
    files = listing.topics.get(topic, [])
    rows = {} if described is None else described.get(topic, {})

    def named(file: SourceFile) -> bool:
        return described is None or (file.folder, file.short_name) in rows

    def rank(file: SourceFile) -> int:
        return 1 if file.kind == "wal" else 0 if named(file) else 2

    files = sorted(files, key=lambda file: (rank(file), file.order, file.name))
    objects = [file for file in files if file.kind == "object"]
    there = {(file.folder, file.short_name) for file in objects}
    row = ImportRow(
        str(topic),
        objects=len(objects),
        wal_files=len(files) - len(objects),
        pending=listing.pending.get(topic, 0),
        undescribed=sum(not named(file) for file in objects),
        missing=sorted(name for folder, name in rows if (folder, name) not in there),
    )
    return _Plan(topic, row, files)


def _count(plan: _Plan, inspected: list[Inspected]) -> None:
    row, layout = plan.row, plan.layout
    row.messages_found = sum(each.messages for each in inspected)
    row.messages = sum(each.until - each.first for each in layout.pieces)
    row.copies = row.messages_found - row.messages
    row.start_offset, row.next_offset = layout.start, layout.end
    row.gaps = layout.gaps
    row.torn_bytes = sum(each.torn for each in inspected)
    row.damage = [damage for each in inspected for damage in each.damage]


def _exact(
    tasks: _Tasks, pieces: Sequence[tuple[_Plan, Piece]]
) -> list[tuple[_Plan, Piece | ForebayError]]:
    """Returns each piece with its own run, so that its bytes are known, or an error.

    A run that many pieces are parts of is read once.
    """
    cuts: dict[tuple[SourceFile, Run], set[int]] = {}
    for plan, piece in pieces:
        inside = {piece.first, piece.until} - {piece.run.start, piece.run.next}
        if inside:
            cuts.setdefault((plan.files[piece.file], piece.run), set()).update(inside)
    places: dict[tuple[SourceFile, Run, int], int] = {}
    failed: dict[SourceFile, ForebayError] = {}
    items = [_Measure(file, run, tuple(sorted(found))) for (file, run), found in cuts.items()]
    for item, result in tasks.measure(items):
        if isinstance(result, ForebayError):
            failed[item.file] = result
            continue
        for offset, position in zip(item.offsets, result, strict=True):
            places[item.file, item.run, offset] = position
    return [(plan, _placed(plan, piece, places, failed)) for plan, piece in pieces]


def _placed(
    plan: _Plan,
    piece: Piece,
    places: dict[tuple[SourceFile, Run, int], int],
    failed: dict[SourceFile, ForebayError],
) -> Piece | ForebayError:
    file, run = plan.files[piece.file], piece.run
    if file in failed and not piece.whole:
        return failed[file]
    start = run.position if piece.first == run.start else places[file, run, piece.first]
    stop = run.stop if piece.until == run.next else places[file, run, piece.until]
    return piece._replace(run=Run(piece.first, piece.until, start, stop))


def _compare_copies(tasks: _Tasks, plans: Sequence[_Plan]) -> None:
    """Finds the offsets that two files hold with different messages."""
    todo = [(plan, copy) for plan in plans if plan.row.error is None for copy in plan.layout.copies]
    exact = _exact(tasks, [(plan, piece) for plan, copy in todo for piece in copy])
    compared: list[tuple[_Plan, Copy]] = []
    items: list[_Digest] = []
    for (plan, copy), (_, kept), (_, dropped) in zip(todo, exact[::2], exact[1::2], strict=True):
        if isinstance(kept, ForebayError):
            plan.fail(kept)
        elif isinstance(dropped, ForebayError):
            plan.fail(dropped)
        else:
            compared.append((plan, copy))
            items += [plan.digest_of([kept]), plan.digest_of([dropped])]
    results = [result for _, result in tasks.digest(items)]
    for (plan, copy), one, other in zip(compared, results[::2], results[1::2], strict=True):
        for result in (one, other):
            if isinstance(result, ForebayError):
                plan.fail(result)
        if one != other and plan.row.error is None:
            names = [plan.files[piece.file].name for piece in copy]
            plan.row.conflicts.append(Conflict(copy.kept.first, copy.kept.until, *names))


def _measure_all(tasks: _Tasks, plans: Sequence[_Plan]) -> None:
    """Finds the bytes of all pieces."""
    good = [plan for plan in plans if plan.row.error is None]
    pieces = [(plan, piece) for plan in good for piece in plan.layout.pieces]
    for plan, found in _exact(tasks, pieces):
        if isinstance(found, ForebayError):
            plan.fail(found)
        else:
            plan.extents.append(_extent(plan, found))
    for plan in good:
        plan.row.bytes = sum(each.size for each in plan.extents)


def _extent(plan: _Plan, piece: Piece) -> Extent:
    run, path = piece.run, Path(plan.files[piece.file].name)
    return Extent(piece.file, path, run.position, run.stop, run.start, run.next)


# ---- one topic --------------------------------------------------------------------------------


class _TopicImport:
    """Imports one planned topic, or says in its row why not."""

    def __init__(
        self, resources: StoreResources, plan: _Plan, choices: ImportChoices, tasks: _Tasks
    ) -> None:
        self._resources = resources
        self._catalog = resources.catalog
        self._plan = plan
        self._topic = plan.topic
        self._row = plan.row
        self._choices = choices
        self._tasks = tasks

    def __call__(self) -> None:
        if self._row.error is not None:
            return
        try:
            self._require_sound()
            record = self._catalog.record(self._topic)
            self._require_importable(record)
            self._compare_present(record)
            planned = list(self._planned(record))
            self._row.new_objects = len(planned)
            self._row.new_messages = sum(each.next_offset - each.start_offset for each in planned)
            if self._choices.apply and not self._is_done(record):
                self._apply(record, planned)
        except ForebayError as error:
            self._plan.fail(error)

    def _is_done(self, record: TopicRecord | None) -> bool:
        if record is None or is_importing(record.log_id):
            return False
        return record.tail >= self._plan.layout.end

    # -- what stands in the way -----------------------------------------------------------------

    def _require_sound(self) -> None:
        row, choices = self._row, self._choices
        reasons = []
        if row.damage and not choices.skip_damage:
            first = row.damage[0]
            reasons.append(
                f"{len(row.damage)} damaged places, the first in {first.file} at position "
                f"{first.position}: {first.reason}; leave them out with --skip-damage"
            )
        if row.conflicts and not choices.allow_conflicts:
            one = row.conflicts[0]
            reasons.append(
                f"{one.kept} and {one.dropped} hold different messages of the offsets {one.start} "
                f"to {one.end - 1}{_more(row.conflicts)}; keep those of the first file with "
                "--allow-conflicts"
            )
        if row.gaps and not choices.allow_gaps:
            reasons.append(
                f"no file holds the offsets {shown(row.gaps)}; find their files, or record them "
                "as lost with --allow-gaps"
            )
        if reasons:
            raise MissingData(f"{self._topic}: {'. '.join(reasons)}")
        if not self._plan.extents:
            raise MissingData(f"{self._topic}: Danube's files hold no messages of the topic")

    def _require_importable(self, record: TopicRecord | None) -> None:
        """Raises UsageError if the target has the topic, unless from an import that fits."""
        resources, topic, layout = self._resources, self._topic, self._plan.layout
        if record is None:
            key = next(iter(resources.store.list(objects_prefix(topic))), None)
            if key is not None or resources.local_log(topic) is not None:
                raise UsageError(
                    f"{topic}: the target has a log or objects of a topic of this name; import "
                    "into an empty store"
                )
            return
        if is_restoring(record.log_id) and not is_importing(record.log_id):
            begun, command = unfinished(record.log_id)
            raise CommitRefused(f"{topic}: {begun} is not finished: run `{command}` first")
        if _is_more_than_imported(record):
            raise UsageError(
                f"{topic}: the topic is in {self._catalog.name} and has messages of its own: an "
                "import makes only new topics; import into another store"
            )
        holes = tuple(_clipped(layout.gaps, layout.start, record.tail))
        if record.start_offset != layout.start or record.holes != holes:
            raise UsageError(
                f"{topic}: the topic in {self._catalog.name} begins at another offset or has other "
                "gaps than Danube's files: import into an empty store"
            )

    def _compare_present(self, record: TopicRecord | None) -> None:
        """Raises CommitRefused if the target holds other messages than the source."""
        if record is None:
            return
        found = list(self._catalog.get_object_descriptors(self._topic))
        parts = [self._plan.layout.between(each.start_offset, each.next_offset) for each in found]
        for each, pieces in zip(found, parts, strict=True):
            if sum(piece.until - piece.first for piece in pieces) != each.count:
                raise self._other(each)
        exact = iter(self._exact([piece for pieces in parts for piece in pieces]))
        items = [self._plan.digest_of([next(exact) for _ in pieces]) for pieces in parts]
        for each, (_, result) in zip(found, self._tasks.digest(items), strict=True):
            if isinstance(result, ForebayError):
                raise result
            if result != each.content_hash:
                raise self._other(each)
        self._row.present = sum(each.count for each in found)

    def _exact(self, pieces: list[Piece]) -> Iterator[Piece]:
        for _, piece in _exact(self._tasks, [(self._plan, piece) for piece in pieces]):
            if isinstance(piece, ForebayError):
                raise piece
            yield piece

    def _other(self, descriptor: ObjectDescriptor) -> CommitRefused:
        return CommitRefused(
            f"{self._topic}: {descriptor.object_id} in the target does not hold the messages of "
            "Danube's files: was it imported from somewhere else? Import into an empty store"
        )

    def _planned(self, record: TopicRecord | None) -> Iterator[PlannedObject]:
        """Yields the objects to write: all that begin at the end of the target's chain or later."""
        tail = 0 if record is None else record.tail
        settings = self._resources.settings.uploader
        return plan_objects(self._from(tail), settings)

    def _from(self, offset: int) -> Iterator[Extent]:
        for extent, piece in zip(self._plan.extents, self._plan.layout.pieces, strict=True):
            if extent.next_offset <= offset:
                continue
            if extent.first_offset >= offset:
                yield extent
                continue
            [rest] = self._exact([piece.part(offset, piece.until)])
            yield _extent(self._plan, rest)

    # -- writing --------------------------------------------------------------------------------

    def _apply(self, seen: TopicRecord | None, planned: list[PlannedObject]) -> None:
        ownership, record = self._acquired(seen)
        try:
            self._write(record.epoch, planned)
            record = self._finish(record.epoch)
            ownership.release(record.tail, record.tail)
        except BaseException:
            self._give_up(ownership)
            raise
        event(
            _log,
            logging.INFO,
            "topic imported",
            topic=self._topic,
            objects=self._row.new_objects,
            messages=self._row.new_messages,
            next_offset=record.tail,
        )

    def _acquired(self, seen: TopicRecord | None) -> tuple[Ownership, TopicRecord]:
        """Takes the topic. Waits for the lease of an import that was killed."""
        start, end = self._plan.layout.start, self._plan.layout.end

        def settle(record: TopicRecord | None) -> TopicRecord:
            if record != seen:
                raise CommitRefused(
                    f"{self._topic}: the topic changed during the import; import again"
                )
            if record is None:
                record = TopicRecord(start_offset=start, tail=start, verified=start)
            reserved = max(record.reserved, end)
            return replace(record, log_id=importing(), assigned=reserved, reserved=reserved)

        session = self._resources.session
        clock = self._resources.clock
        deadline = clock.monotonic() + self._resources.settings.metadata.lease_seconds + 1
        while True:
            try:
                return acquire(session, self._topic, secrets.token_hex(16), settle)
            except TopicOwned:
                if clock.monotonic() >= deadline:
                    raise
                time.sleep(_LOOK_SECONDS)

    def _write(self, epoch: int, planned: list[PlannedObject]) -> None:
        """Writes the objects in waves, and commits those of a wave in order."""
        waves = self._tasks.transfers()
        for wave in waves.cut(self._intended(epoch, planned)):
            for item, done in waves.run(wave):
                task = item.upload
                if done.result is None:
                    assert done.error is not None, "an item has a result or an error"
                    store = self._resources.store
                    engine.set_aside(self._catalog, store, self._topic, task.intent, done.error)
                    raise done.error
                self._record_gap(epoch, task.planned.start_offset)
                engine.commit(self._catalog, self._topic, task.intent, done.result)

    def _intended(self, epoch: int, planned: list[PlannedObject]) -> Iterator[_Transfer]:
        store = self._resources.store
        for each in planned:
            files = self._plan.used(extent.seq for extent in each.extents)
            task = engine.intend(self._catalog, self._topic, epoch, each, store=store)
            yield _Transfer(files, task)

    def _record_gap(self, epoch: int, until: int) -> None:
        """Records the offsets from the tail to `until` as lost."""

        def change(record: TopicRecord) -> Change:
            if record.tail >= until:
                return Change(record)
            record = record.with_lost(record.tail, until)
            verified = skip_holes(record, record.verified)
            return Change(replace(record, tail=until, verified=verified))

        self._catalog.update(self._topic, epoch, change)

    def _finish(self, epoch: int) -> TopicRecord:
        """Removes the mark: the topic can be opened, and continues at its tail."""
        catalog, topic = self._catalog, self._topic
        self._record_gap(epoch, self._plan.layout.end)
        origin = catalog.keys.job_state(topic, ORIGIN_NAME)
        known = read_job_state(catalog, topic, ORIGIN_NAME) is not None

        def change(record: TopicRecord) -> Change:
            after = replace(
                record, log_id=None, nonce=None, assigned=record.tail, reserved=record.tail
            )
            return Change(after, () if known else (Put(origin, ORIGIN_HERE.encode()),))

        return catalog.update(topic, epoch, change)

    def _give_up(self, ownership: Ownership) -> None:
        """Releases the topic for the next attempt. Its mark stays."""
        with suppress(ServiceError, TopicFenced):
            record = self._catalog.record(self._topic)
            if record is not None:
                ownership.release(record.assigned, record.reserved)


def _is_more_than_imported(record: TopicRecord) -> bool:
    """Whether the record has a log, so that more than an import has written to the topic."""
    return not is_importing(record.log_id) and (
        record.log_id is not None or record.nonce is not None or record.marked > 0
    )


def _clipped(ranges: Iterable[Range], start: int, end: int) -> Iterator[Range]:
    for first, until in ranges:
        if first < end and start < until:
            yield max(first, start), min(until, end)


def _more(found: Sequence[object]) -> str:
    return f" (and {len(found) - 1} more ranges)" if len(found) > 1 else ""
