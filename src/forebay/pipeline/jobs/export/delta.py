"""A Delta table as the target of exports.

The next offset is stored as the version of the transaction identifier `forebay:<topic>`, or
`forebay:<topic>-part-<n>` for a partition. That is Delta's means for this purpose, and survives
checkpoints and log clean-ups. One commit adds the files and sets that version. It succeeds only as
the table version right after the one that was compared. New columns are added in a commit before
it, which is harmless if no other follows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import CommitRefused, UsageError
from forebay.pipeline.jobs.export.tables import (
    COMMIT_TRIES,
    Commit,
    Staged,
    StagedFile,
    Staging,
    TableState,
    decode_commit,
    encode_commit,
    library_errors,
    part_of,
    require_plain,
    require_topic,
    require_vacant,
)

if TYPE_CHECKING:
    from deltalake import DeltaTable


_TOPIC: Final = "forebay.topic"
_COMMIT: Final = "forebay.commit"
_HISTORY: Final = 100
"""How many commits to search for the last one of an export."""


class DeltaExport:
    """An `ExportTable` in Delta's format. Not thread-safe; processes may share the table."""

    def __init__(self, location: Path, topic: str, log: str | None = None) -> None:
        require_deltalake()
        require_plain(location, "delta", "%#?")
        self.location = location
        self.topic = topic
        self._log = log or topic
        self._application = f"forebay:{self._log}"
        self._staging = Staging(location, part_of(topic, log))

    def table(self) -> DeltaTable | None:
        """The current version of the table; None if it does not exist."""
        from deltalake import DeltaTable

        if not DeltaTable.is_deltatable(str(self.location)):
            require_vacant(self.location, {"data", "_delta_log"})
            return None
        table = DeltaTable(str(self.location))
        require_topic(self.location, table.metadata().configuration.get(_TOPIC), self.topic)
        return table

    def state(self) -> TableState:
        with library_errors(self.location):
            table = self.table()
            if table is None:
                return TableState()
            reached = table.transaction_version(self._application)
            return TableState(reached, table.schema().to_json())

    def last(self) -> Commit | None:
        with library_errors(self.location):
            table = self.table()
        if table is None:
            return None
        # Commits of the topic's other logs may be newer, any number of them.
        for limit in (_HISTORY, None):
            with library_errors(self.location):
                entries = table.history(limit)
            for entry in entries:
                if _COMMIT in entry:
                    commit = decode_commit(entry[_COMMIT], f"{self.location}, {entry['version']}")
                    if commit.topic == self._log:
                        return commit
        return None

    def commit(self, staged: Staged, after: int | None, commit: Commit) -> None:
        with self._staging.moved_in(staged) as moved, library_errors(self.location):
            self._commit(moved, after, commit)

    def _commit(self, staged: Staged, after: int | None, commit: Commit) -> None:
        from deltalake import CommitProperties, Transaction
        from deltalake.exceptions import CommitFailedError

        adds: list[Any] = [self._add(file) for file in staged.files]
        for _ in range(COMMIT_TRIES):
            try:
                table = self._with_columns(commit.schema)
            except CommitFailedError:
                continue
            reached = table.transaction_version(self._application)
            if reached != after:
                raise CommitRefused(f"{self.location} now ends at {reached}, not at {after}")
            properties = CommitProperties(
                custom_metadata={_COMMIT: encode_commit(commit)},
                # No retries: commit only as the version after the one that was compared.
                max_commit_retries=0,
                app_transactions=[Transaction(self._application, commit.end, None)],
            )
            try:
                table.create_write_transaction(
                    adds, "append", table.schema(), commit_properties=properties
                )
            except CommitFailedError:
                continue
            return
        raise CommitRefused(f"others keep changing {self.location}: export again later")

    def _with_columns(self, schema: str) -> DeltaTable:
        """The table with all columns that the files have; creates it if it does not exist."""
        from deltalake import DeltaTable, Schema

        wanted = Schema.from_json(schema)
        table = self.table()
        if table is None:
            made = DeltaTable.create(
                str(self.location),
                wanted,
                mode="ignore",
                configuration={_TOPIC: self.topic},
                raise_if_key_not_exists=False,
            )
            require_topic(self.location, made.metadata().configuration.get(_TOPIC), self.topic)
            table = made
        known = {field.name: field for field in table.schema().fields}
        new = [field for field in wanted.fields if known.get(field.name) != field]
        if new:
            table.alter.add_columns(new)
            table = DeltaTable(str(self.location))
        return table

    def _add(self, file: StagedFile) -> Any:
        from deltalake.transaction import AddAction

        return AddAction(
            path=file.path.relative_to(self.location).as_posix(),
            size=file.size,
            partition_values={},
            modification_time=int(time.time() * 1000),
            data_change=True,
            stats=json.dumps(statistics(file)),
        )

    def close(self) -> None:
        """Nothing is held open."""

    def references(self, directory: Path) -> bool:
        with library_errors(self.location):
            table = self.table()
            names = () if table is None else table.file_uris()
        return any(Path(name).parent.name == directory.name for name in names)


def statistics(file: StagedFile) -> Mapping[str, Any]:
    """The statistics by which readers of Delta skip files."""
    least: dict[str, Any] = {"offset": file.offsets[0]}
    most: dict[str, Any] = {"offset": file.offsets[1]}
    if file.times is not None:
        least["timestamp"] = _milliseconds(file.times[0])
        # Rounded up: readers would miss rows if the bound were too small.
        most["timestamp"] = _milliseconds(file.times[1] + timedelta(microseconds=999))
    return {"numRecords": file.rows, "minValues": least, "maxValues": most, "nullCount": {}}


def _milliseconds(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"


def require_deltalake() -> None:
    try:
        import deltalake  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "the format delta needs the package deltalake: pip install 'forebay[delta]'"
        ) from error
