"""What an export needs of a table, whatever its format, and the files on their way into one.

Spark writes the files of a batch into a directory of its own beside the table, where no reader
looks. The driver then makes the table name them, in one transaction that also says which offsets
they are, and that is refused if the table no longer ends where the batch begins. So a batch is in
the table once or not at all, also if the exporter dies, or another one exports at the same time.

Layout, for a table `<parent>/<name>`:

    <parent>/.<name>.staging/<after>-<token>/   what Spark writes; nobody reads it
    <parent>/.<name>.staging/<...>.moving       a batch is on its way into the table

The staging directory itself is locked while a batch is committed.
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
from forebay.pipeline.jobs.export.plan import Batch

STALE_SECONDS: Final = 3600
"""A staging directory that can no longer be committed is left alone for so long: its writer may
still be at it, and finds out by itself."""

COMMIT_TRIES: Final = 5
"""How often a commit is tried again when somebody else changed the table, but not its end."""

OFFSET: Final = "offset"
TIMESTAMP: Final = "timestamp"
_MOVING: Final = ".moving"

_LIBRARIES: Final = {
    "_internal",  # what deltalake's classes say of themselves
    "deltalake",
    "pydantic_core",
    "pyiceberg",
    "requests",
    "sqlalchemy",
}
_MISTAKES: Final = {
    "ArgumentError",  # SQLAlchemy's, of a URI
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
"""Kinds of errors that trying again does not help against."""


@dataclass(frozen=True, slots=True)
class Commit:
    """What a table's transaction says of the batch in it."""

    topic: str
    start: int
    end: int
    rows: int
    schema: str
    """The columns of the table after this commit: Spark's schema as JSON."""
    judged_by: str | None = None
    """In a table of rejected records: the fields by which they were. The run that
    finishes the batch, whose other records are committed after these, must judge by the same."""


@dataclass(frozen=True, slots=True)
class TableState:
    """Where a table has got to. `next` is None while nothing is in it."""

    next: int | None = None
    schema: str | None = None
    """Its columns: Spark's schema as JSON."""


@dataclass(frozen=True, slots=True)
class StagedFile:
    path: Path
    size: int
    rows: int
    offsets: tuple[int, int]
    """The smallest and the largest."""
    times: tuple[datetime, datetime] | None


@dataclass(frozen=True, slots=True)
class Staged:
    """Files that Spark has written, and that are whole."""

    directory: Path
    files: tuple[StagedFile, ...]

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


class ExportTable(Protocol):
    """A table of one topic."""

    location: Path

    def state(self) -> TableState:
        """What is in the table now; UsageError if it is not a table of this topic."""
        ...

    def last(self) -> Commit | None:
        """What the newest batch's transaction said, if that can be found."""
        ...

    def commit(self, staged: Staged, after: int | None, commit: Commit) -> None:
        """Adds the files, if the table still ends at `after`; CommitRefused if it does not."""
        ...

    def references(self, directory: Path) -> bool:
        """Whether a file in this directory is one of the table's."""
        ...

    def close(self) -> None:
        """Lets go of what the table's catalog holds open."""
        ...


@dataclass(frozen=True, slots=True)
class Task:
    """A batch with what the tables were like when it was planned."""

    batch: Batch
    main: TableState
    side: TableState
    unfinished: Commit | None = None
    """The batch's rejected records are committed already, and this is what they said."""


@dataclass(frozen=True, slots=True)
class Files:
    """What is on its way into the tables."""

    good: Staged
    schema: str
    rejected: Staged | None = None
    rejected_schema: str = ""
    judged_by: str | None = None


# ---- staging


class Staging:
    """The place beside a table where batches are prepared."""

    def __init__(self, location: Path) -> None:
        self.location = location
        self.root = location.parent / f".{location.name}.staging"

    def fresh(self, after: int) -> Path:
        """A directory for one attempt, which is not there yet."""
        self.root.mkdir(parents=True, exist_ok=True)
        return self.root / f"{after:020d}-{uuid.uuid4().hex}"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Alone among the exporters of this table on machines that share its file locks."""
        self.root.mkdir(parents=True, exist_ok=True)
        with locked_directory(self.root):
            yield

    def discard(self, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)

    def abandon(self, directory: Path) -> None:
        """Removes an attempt: what Spark wrote, and what was made ready of it."""
        self.discard(directory)
        self.discard(_ready(directory))

    def sweep(self, next_offset: int, now: float, *, age: float = STALE_SECONDS) -> int:
        """Removes what can never be committed, as the table is past it; how many they were."""
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
        """Puts the files below the table, where the transaction inside this block can name them.

        They are removed if it raises CommitRefused. A marker is there from before the move until
        the end of the block; one that stays is of an exporter that died, or does not know whether
        it committed.
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
        """Removes what exporters that died had moved and not committed.

        Only once the table is past it: until then its exporter may be alive, and commit.
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
        """Markers of batches that are on their way into the table, or were."""
        return sorted(self.root.glob(f"*{_MOVING}")) if self.root.is_dir() else []


def _after(directory: Path) -> int:
    """Where the table ended when this was prepared."""
    return int(directory.name.partition("-")[0])


def _ready(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}-ready")


def collect(directory: Path, start: int, end: int) -> Staged:
    """What Spark wrote, moved to a directory of its own and made durable.

    A task whose machine was given up may still be writing to Spark's directory; nothing that it
    does there gets into a table. CorruptLog if an offset is in a file that should not be.
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
                f"{written}: offsets {least} to {most} were written for a batch of {start} to "
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
    """The smallest and the largest value of a column, None where there are only nulls."""
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
    """As JSON; docs/guide/spark.md describes it."""
    return json.dumps({"version": 1, **asdict(commit)}, sort_keys=True)


def decode_commit(text: str, where: str) -> Commit:
    try:
        body = json.loads(text)
        if body.pop("version") != 1:
            raise FormatError(f"{where}: written by a newer version of Forebay")
        return Commit(**body)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FormatError(f"{where}: not the note of an export: {error}") from error


def write_whole(path: Path, text: str) -> None:
    """There with all of it, or not there."""
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    draft.write_text(text, encoding="utf-8")
    _sync(draft)
    draft.replace(path)
    sync_directory(path.parent)


@contextmanager
def locked_directory(path: Path) -> Iterator[None]:
    """Holds the directory's lock, which goes with the process."""
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
    """Raises errors of the libraries that tables are written with as ours, in one line."""
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
    """The path has none of the characters that a format's libraries take for something else."""
    for character in forbidden:
        if character in str(location):
            raise UsageError(
                f"{location}: the path of a table in the format {kind} cannot have "
                f"{character!r} in it, which its libraries take for a part of a URL: choose "
                "another place"
            )


def require_topic(location: Path, found: str | None, topic: str) -> None:
    """A table holds one topic, and is made by exports alone."""
    if found is None:
        raise _taken(location)
    if found != topic:
        raise UsageError(f"{location} is the table of {found}; {topic} needs one of its own")


def require_vacant(location: Path, ours: Collection[str] = ()) -> None:
    """Nothing is there but what an export that died may have left."""
    if location.is_dir() and any(path.name not in ours for path in location.iterdir()):
        raise _taken(location)


def _taken(location: Path) -> UsageError:
    return UsageError(f"{location} is there, and no export made it: choose another place")


# ---- plain Parquet

COMMIT_FILE: Final = "_forebay.json"
_BATCH: Final = "batch="


class ParquetTable:
    """A table of plain Parquet files, for readers that know no table format.

        <table>/batch=<after>/part-....parquet   the files of one batch
        <table>/batch=<after>/_forebay.json      which offsets they are, and the columns so far

    A batch is made visible by one rename of its directory, whose name is the offset at which the
    table ended before it. A rename onto a directory that has files in it is refused by the file
    system, so of two exporters that both go on from there one succeeds. There is nothing else to
    commit, and nothing to repair after a crash: a batch is there, whole, or it is not.

    Readers see `batch` as a column more. A glob such as `<table>/**/*.parquet` finds whole files
    of committed batches and nothing else. Not thread-safe; processes may share the table.
    """

    def __init__(self, location: Path, topic: str) -> None:
        self.location = location
        self.topic = topic

    def state(self) -> TableState:
        last = self.last()
        if last is None:
            require_vacant(self.location)
            return TableState()
        require_topic(self.location, last.topic, self.topic)
        return TableState(last.end, last.schema)

    def last(self) -> Commit | None:
        batches = self.batches()
        return self._commit_of(batches[-1]) if batches else None

    def batches(self) -> list[Path]:
        """The directories of the batches, in the order of their offsets."""
        if not self.location.is_dir():
            return []
        return sorted(path for path in self.location.iterdir() if path.name.startswith(_BATCH))

    def files(self) -> list[Path]:
        """The data files of the table."""
        return [path for batch in self.batches() for path in sorted(batch.glob("*.parquet"))]

    def commit(self, staged: Staged, after: int | None, commit: Commit) -> None:
        state = self.state()
        if state.next != after:
            raise CommitRefused(f"{self.location} now ends at {state.next}, and not at {after}")
        write_whole(staged.directory / COMMIT_FILE, encode_commit(commit))
        target = self.location / f"{_BATCH}{after or 0:020d}"
        self.location.mkdir(parents=True, exist_ok=True)
        try:
            staged.directory.rename(target)
        except OSError as error:
            if error.errno in {errno.ENOTEMPTY, errno.EEXIST}:
                raise CommitRefused(f"{target} is there already") from error
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
                f"{path} is missing: nobody knows which offsets are in the table"
            ) from error
