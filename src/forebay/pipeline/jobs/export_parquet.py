"""A table of plain Parquet files, for readers that know no table format.

    <table>/batch=<after>/part-....parquet   the files of one batch
    <table>/batch=<after>/_forebay.json      which offsets they are, and the table's columns so far

A batch is made visible by one rename of its directory, whose name is the offset at which the
table ended before it. A rename onto a directory that has files in it is refused by the file
system, so of two exporters that both go on from there one succeeds. There is nothing else to
commit, and nothing to repair after a crash: a batch is there, whole, or it is not.

Readers see `batch` as a column more. A glob such as `<table>/**/*.parquet` finds whole files of
committed batches and nothing else.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final

from forebay.errors import CommitRefused, MissingData
from forebay.pipeline.jobs.export_tables import (
    Commit,
    Staged,
    TableState,
    decode_commit,
    encode_commit,
    require_topic,
    require_vacant,
    sync_directory,
    write_whole,
)

NOTE: Final = "_forebay.json"
_BATCH: Final = "batch="


class ParquetTable:
    """Not thread-safe; processes may share the table."""

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
        return self._note(batches[-1]) if batches else None

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
        write_whole(staged.directory / NOTE, encode_commit(commit))
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

    def _note(self, batch: Path) -> Commit:
        path = batch / NOTE
        try:
            return decode_commit(path.read_text(encoding="utf-8"), str(path))
        except FileNotFoundError as error:
            raise MissingData(
                f"{path} is missing: nobody knows which offsets are in the table"
            ) from error
