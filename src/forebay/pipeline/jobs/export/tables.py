"""What an export needs of a table of any format, the staging of its files, and plain Parquet.

Spark writes the files of a batch into a staging directory beside the table, where no reader looks.
The driver then adds them to the table, in one transaction that also records their offsets. It is
refused if the table no longer ends where the batch begins. So a batch is in the table once or not
at all, even if the exporter dies or another one runs at the same time.

Layout, for a table `<parent>/<name>`:

    <parent>/.<name>.staging/<after>-<token>/   the files that Spark writes for a batch
    <parent>/.<name>.staging/<...>.moving       marks a batch that is being moved into the table
    <parent>/.<name>.staging/part-<n>/...       the same for a partition of the table's topic

The staging directory itself is locked while a batch is committed.

A table is of one topic with all its partitions, each of which is a separate log. The table has a
position for each log, and one schema. What it has of the topic's own log is stored as if there were
no partitions.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Protocol

from forebay.errors import (
    CommitRefused,
    CorruptLog,
    ForebayError,
    FormatError,
    MissingData,
    ServiceUnavailable,
    UsageError,
)
from forebay.format.names import parse_topic
from forebay.pipeline.jobs.export.plan import Batch

STALE_SECONDS: Final = 3600
"""How long to keep a staging directory that can no longer be committed: its exporter may still be
running, and notices that by itself."""

COMMIT_TRIES: Final = 5
"""How often to try a commit if somebody else changes the table, but not where it ends."""

OFFSET: Final = "offset"
TIMESTAMP: Final = "timestamp"
_MOVING: Final = ".moving"

_LIBRARIES: Final = {
    "_internal",  # the module name in deltalake's classes
    "deltalake",
    "pydantic_core",
    "pyiceberg",
    "requests",
    "sqlalchemy",
}
_MISTAKES: Final = {
    "ArgumentError",  # SQLAlchemy's, for a bad URI
    "BadRequestError",
    "DeltaProtocolError",
    "ForbiddenError",
    "NotInstalledError",
    "OAuthError",
    "SchemaMismatchError",
    "UnauthorizedError",
    "ValidationError",
    "ValueError",
}
"""Errors that a retry does not help against: they become UsageError."""


@dataclass(frozen=True, slots=True)
class Commit:
    """What a table records about a batch, in the transaction that adds it."""

    topic: str
    start: int
    end: int
    rows: int
    schema: str
    """The columns of the table after this commit: Spark's schema as JSON."""
    judged_by: str | None = None
    """In a table of rejected records, the fields by which they were rejected. If another run
    finishes the batch, it must use the same fields for the rest."""


@dataclass(frozen=True, slots=True)
class TableState:
    """Where a table ends."""

    next: int | None = None
    """The next offset; None if no batch was committed."""
    schema: str | None = None
    """The columns: Spark's schema as JSON."""


@dataclass(frozen=True, slots=True)
class StagedFile:
    path: Path
    size: int
    rows: int
    offsets: tuple[int, int]
    """The smallest and the largest offset."""
    times: tuple[datetime, datetime] | None


@dataclass(frozen=True, slots=True)
class Staged:
    """Complete files that Spark has written."""

    directory: Path
    files: tuple[StagedFile, ...]

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


class ExportTable(Protocol):
    """A table of one topic, with its position in one log of the topic."""

    location: Path

    def state(self) -> TableState:
        """Where the table ends in this log now; UsageError if it is not a table of this topic."""
        ...

    def last(self) -> Commit | None:
        """The record of the newest batch, if it can be found."""
        ...

    def commit(self, staged: Staged, after: int | None, commit: Commit) -> None:
        """Adds the files in one transaction; CommitRefused if the table does not end at `after`."""
        ...

    def references(self, directory: Path) -> bool:
        """Whether a file in this directory belongs to the table."""
        ...

    def close(self) -> None:
        """Closes the connection to the table's catalog, if there is one."""
        ...


@dataclass(frozen=True, slots=True)
class Task:
    """A batch, with the states of the tables when it was planned."""

    batch: Batch
    main: TableState
    side: TableState
    unfinished: Commit | None = None
    """The record of the batch in the rejected table, if it is committed there already."""


@dataclass(frozen=True, slots=True)
class Files:
    """The staged files of a batch, and what to record with them."""

    good: Staged
    schema: str
    rejected: Staged | None = None
    rejected_schema: str = ""
    judged_by: str | None = None


# ---- staging


class Staging:
    """The staging directory of a table, where batches of one log are prepared."""

    def __init__(self, location: Path, part: str | None = None) -> None:
        self.location = location
        self._whole = location.parent / f".{location.name}.staging"
        self.root = self._whole if part is None else self._whole / part

    def fresh(self, after: int) -> Path:
        """The path of a directory for one attempt; it does not exist yet."""
        self.root.mkdir(parents=True, exist_ok=True)
        return self.root / f"{after:020d}-{uuid.uuid4().hex}"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Locks out other exporters of this table, on all machines that share its file locks."""
        self.root.mkdir(parents=True, exist_ok=True)
        with locked_directory(self._whole):
            yield

    def discard(self, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)

    def abandon(self, directory: Path) -> None:
        """Removes an attempt: Spark's directory, and that of the collected files."""
        self.discard(directory)
        self.discard(_ready(directory))

    def sweep(self, next_offset: int, now: float, *, age: float = STALE_SECONDS) -> int:
        """Removes attempts before `next_offset`, which cannot be committed; returns how many."""
        removed = 0
        for entry in sorted(self.root.iterdir()) if self.root.is_dir() else ():
            ours = entry.is_dir() and entry.name.partition("-")[0].isdecimal()
            if not ours or _after(entry) >= next_offset:
                continue
            if now - entry.stat().st_mtime >= age:
                self.discard(entry)
                removed += 1
        return removed

    @contextmanager
    def moved_in(self, staged: Staged) -> Iterator[Staged]:
        """Moves the files below the table, so that the transaction in this block can name them.

        They are removed if the block raises CommitRefused. A marker exists from before the move
        until the end of the block. It stays if the exporter dies, or if an error leaves it unknown
        whether the transaction was committed; `settle` removes it later.
        """
        if not staged.files:
            self.discard(staged.directory)
            yield staged
            return
        target = self.location / "data" / staged.directory.name
        target.parent.mkdir(parents=True, exist_ok=True)
        marker = self.root / f"{target.name}{_MOVING}"
        write_whole(marker, "")
        staged.directory.rename(target)
        sync_directory(target.parent)
        files = tuple(replace(file, path=target / file.path.name) for file in staged.files)
        try:
            yield Staged(target, files)
        except CommitRefused:
            self.discard(target)
            marker.unlink(missing_ok=True)
            raise
        marker.unlink(missing_ok=True)

    def settle(self, table: ExportTable) -> None:
        """Removes files that dead exporters moved below the table and did not commit.

        Files that could still be committed are kept, because their exporter may be alive.
        """
        for marker in self.unsettled():
            directory = self.location / "data" / marker.name.removesuffix(_MOVING)
            if directory.is_dir() and not table.references(directory):
                reached = table.state().next
                if reached is None or _after(directory) >= reached:
                    continue
                shutil.rmtree(directory)
            marker.unlink(missing_ok=True)

    def unsettled(self) -> list[Path]:
        """The markers of batches that are being moved into the table, or were when a run died."""
        return sorted(self.root.glob(f"*{_MOVING}")) if self.root.is_dir() else []


def _after(directory: Path) -> int:
    """Where the table ended when the directory was created."""
    return int(directory.name.partition("-")[0])


def _ready(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}-ready")


def collect(directory: Path, start: int, end: int) -> Staged:
    """Moves the files that Spark wrote to another directory, and syncs them.

    Spark may have given up a task that still writes to Spark's directory. Such files do not get
    into the table. CorruptLog if a file has offsets outside `start..end`.
    """
    from pyarrow import parquet

    ready = _ready(directory)
    ready.mkdir()
    files = []
    for written in sorted(directory.glob("*.parquet")):
        footer = parquet.read_metadata(written)
        if footer.num_rows == 0:
            continue
        least, most = _bounds(footer, OFFSET)
        if not start <= least <= most < end:
            raise CorruptLog(
                f"{written} has offsets {least} to {most}, but the batch has {start} to "
                f"{end - 1}; nothing was committed"
            )
        path = written.rename(ready / written.name)
        _sync(path)
        times = _bounds(footer, TIMESTAMP)
        files.append(StagedFile(path, path.stat().st_size, footer.num_rows, (least, most), times))
    shutil.rmtree(directory, ignore_errors=True)
    sync_directory(ready)
    return Staged(ready, tuple(files))


def _bounds(footer: Any, column: str) -> Any:
    """The smallest and the largest value of a column; None if it has only nulls."""
    number = footer.schema.names.index(column)
    found = []
    for group in range(footer.num_row_groups):
        statistics = footer.row_group(group).column(number).statistics
        if statistics is not None and statistics.has_min_max:
            found.append((statistics.min, statistics.max))
    if not found:
        return None
    return min(least for least, _ in found), max(most for _, most in found)


# ---- small files


def encode_commit(commit: Commit) -> str:
    """The record as JSON, as described in docs/guide/spark.md."""
    return json.dumps({"version": 1, **asdict(commit)}, sort_keys=True)


def decode_commit(text: str, where: str) -> Commit:
    try:
        body = json.loads(text)
        if body.pop("version") != 1:
            raise FormatError(f"{where}: written by a newer version of Forebay")
        return Commit(**body)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FormatError(f"{where}: not the commit metadata of an export: {error}") from error


def write_whole(path: Path, text: str) -> None:
    """Writes the file atomically, and syncs it."""
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    draft.write_text(text, encoding="utf-8")
    _sync(draft)
    draft.replace(path)
    sync_directory(path.parent)


@contextmanager
def locked_directory(path: Path) -> Iterator[None]:
    """Locks the directory; the lock ends with the block or the process."""
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def sync_directory(path: Path) -> None:
    _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def library_errors(what: object) -> Iterator[None]:
    """Turns errors of table libraries into UsageError or ServiceUnavailable, in one line.

    `what` begins the message.
    """
    try:
        yield
    except ForebayError:
        raise
    except Exception as error:
        kinds = type(error).__mro__
        if not any(kind.__module__.partition(".")[0] in _LIBRARIES for kind in kinds):
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        text = f"{what}: {lines[0] if lines else type(error).__name__}"
        if any(kind.__name__ in _MISTAKES for kind in kinds):
            raise UsageError(text) from error
        raise ServiceUnavailable(text) from error


def require_plain(location: Path, kind: str, forbidden: str) -> None:
    """Raises UsageError if the path has one of the `forbidden` characters."""
    for character in forbidden:
        if character in str(location):
            raise UsageError(
                f"{location}: the path of a table in the format {kind} cannot contain "
                f"{character!r}, which its libraries interpret as part of a URL: choose another "
                "directory"
            )


def require_topic(location: Path, found: str | None, topic: str) -> None:
    """Raises UsageError unless an export of `topic` created the table, as `found` records."""
    if found is None:
        raise _taken(location)
    if found != topic:
        raise UsageError(f"{location} is the table of {found}: choose another one for {topic}")


def part_of(topic: str, log: str | None) -> str | None:
    """The name of a log in a table of the topic: `part-3`; None for the topic's own log."""
    return None if log in (None, topic) else f"part-{parse_topic(str(log)).partition}"


def require_vacant(location: Path, ours: Collection[str] = ()) -> None:
    """Raises UsageError for entries other than `ours`, which an interrupted export may leave."""
    if location.is_dir() and any(path.name not in ours for path in location.iterdir()):
        raise _taken(location)


def _taken(location: Path) -> UsageError:
    return UsageError(
        f"{location} exists, and was not created by an export: choose another directory"
    )


# ---- plain Parquet

COMMIT_FILE: Final = "_forebay.json"
_BATCH: Final = "batch="


class ParquetTable:
    """A table of plain Parquet files, for readers that support no table format.

        <table>/batch=<after>/part-....parquet   the files of one batch
        <table>/batch=<after>/_forebay.json      its offsets, and the columns of the table
        <table>/batch=part-<n>-<after>/...       the same for a partition of the topic

    One rename of its directory commits a batch. The name of the directory is the offset at which
    the table ended before. The file system refuses to rename onto a directory that has files, so
    one of two concurrent exporters succeeds. After a crash a batch exists completely or not at all,
    and nothing needs repair.

    Readers see `batch` as an additional column. A glob such as `<table>/**/*.parquet` finds only
    complete files of committed batches. Not thread-safe; several processes may share the table.
    """

    def __init__(self, location: Path, topic: str, log: str | None = None) -> None:
        self.location = location
        self.topic = topic
        part = part_of(topic, log)
        self._own = _BATCH if part is None else f"{_BATCH}{part}-"

    def state(self) -> TableState:
        newest = {_log_of(batch): batch for batch in self.batches()}
        if not newest:
            try:
                require_vacant(self.location)
            except UsageError:
                if not self.batches():
                    raise
                return self.state()  # another exporter has just committed the first batch
            return TableState()
        commits = {log: self._commit_of(batch) for log, batch in newest.items()}
        for log, commit in commits.items():
            made_by = commit.topic if log == _BATCH else parse_topic(commit.topic).base
            require_topic(self.location, made_by, self.topic)
        # Columns are only added, so the longest schema has them all.
        schema = max((commit.schema for commit in commits.values()), key=len)
        own = commits.get(self._own)
        return TableState(None if own is None else own.end, schema)

    def last(self) -> Commit | None:
        batches = [batch for batch in self.batches() if _log_of(batch) == self._own]
        return self._commit_of(batches[-1]) if batches else None

    def batches(self) -> list[Path]:
        """The directories of the batches, those of one log in the order of their offsets."""
        if not self.location.is_dir():
            return []
        return sorted(path for path in self.location.iterdir() if path.name.startswith(_BATCH))

    def files(self) -> list[Path]:
        """The data files of the table."""
        return [path for batch in self.batches() for path in sorted(batch.glob("*.parquet"))]

    def commit(self, staged: Staged, after: int | None, commit: Commit) -> None:
        state = self.state()
        if state.next != after:
            raise CommitRefused(f"{self.location} now ends at {state.next}, not at {after}")
        write_whole(staged.directory / COMMIT_FILE, encode_commit(commit))
        target = self.location / f"{self._own}{after or 0:020d}"
        self.location.mkdir(parents=True, exist_ok=True)
        try:
            staged.directory.rename(target)
        except OSError as error:
            if error.errno in {errno.ENOTEMPTY, errno.EEXIST}:
                raise CommitRefused(f"{target} exists already") from error
            raise
        sync_directory(self.location)

    def close(self) -> None:
        """Nothing is held open."""

    def references(self, directory: Path) -> bool:
        return directory.parent == self.location

    def _commit_of(self, batch: Path) -> Commit:
        path = batch / COMMIT_FILE
        try:
            return decode_commit(path.read_text(encoding="utf-8"), str(path))
        except FileNotFoundError as error:
            raise MissingData(
                f"{path} is missing: it is unknown which offsets are in the table; restore the file"
            ) from error


def _log_of(batch: Path) -> str:
    """The name of a batch's directory without the offset at its end."""
    return batch.name.rstrip("0123456789")
