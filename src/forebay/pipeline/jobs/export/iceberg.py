"""An Iceberg table as the target of exports, in a catalog of pyiceberg.

The next offset is a property of the table, and each partition of the topic has one. It is set by
the transaction that adds the files and new columns. The summary of the snapshot has it too, but
snapshots expire. The transaction requires that the current snapshot is the one that was compared.
pyiceberg's own retries are switched off for the table, because they would add the files to any
later snapshot.

The default catalog is the SQLite file `iceberg.db` in the parent directory of the table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import CommitRefused, ForebayError, UsageError
from forebay.pipeline.jobs.export.tables import (
    COMMIT_TRIES,
    Commit,
    Staged,
    Staging,
    TableState,
    decode_commit,
    encode_commit,
    library_errors,
    locked_directory,
    part_of,
    require_plain,
    require_topic,
    require_vacant,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table


CATALOG_FILE: Final = "iceberg.db"
NAMESPACE: Final = "forebay"
_TOPIC: Final = "forebay.topic"
_NEXT: Final = "forebay.next-offset"
_COMMIT: Final = "forebay.commit"
_RETRIES: Final = "commit.retry.num-retries"


class IcebergExport:
    """An `ExportTable` in Iceberg's format. Not thread-safe; processes may share the table."""

    def __init__(
        self,
        location: Path,
        topic: str,
        catalog: str | Mapping[str, str] | None = None,
        log: str | None = None,
    ) -> None:
        require_plain(location, "iceberg", "#?")
        self.location = location
        self.topic = topic
        # A tuple, because a dot in a string would separate namespaces.
        self.identifier = (NAMESPACE, location.name)
        self._place = catalog
        part = part_of(topic, log)
        self._next, self._commit_name = _NEXT, _COMMIT
        if part is not None:
            self._next, self._commit_name = f"{_NEXT}.{part}", f"{_COMMIT}.{part}"
        self._staging = Staging(location, part)

    @property
    def _full_name(self) -> str:
        return ".".join(self.identifier)

    @cached_property
    def _catalog(self) -> Catalog:
        return connect(self._place, self.location.parent)

    def table(self) -> Table | None:
        """The current version of the table; None if it does not exist."""
        require_pyiceberg()
        from pyiceberg.exceptions import NoSuchTableError

        if self._place is None and not (self.location.parent / CATALOG_FILE).exists():
            return None
        try:
            table = self._catalog.load_table(self.identifier)
        except NoSuchTableError:
            return None
        require_topic(self.location, table.properties.get(_TOPIC), self.topic)
        if table.location() != file_uri(self.location):
            raise UsageError(
                f"{self.location} is not the table {self._full_name}: the catalog has that at "
                f"{table.location()}. Choose another name or catalog"
            )
        return table

    def state(self) -> TableState:
        with library_errors(self.location):
            table = self.table()
            if table is None:
                require_vacant(self.location, {"data", "metadata"})
                return TableState()
            return TableState(self._next_of(table), self._schema(table))

    def last(self) -> Commit | None:
        with library_errors(self.location):
            table = self.table()
        text = None if table is None else table.properties.get(self._commit_name)
        return None if text is None else decode_commit(text, self._full_name)

    def _next_of(self, table: Table) -> int | None:
        text = table.properties.get(self._next)
        return None if text is None else int(text)

    def _schema(self, table: Table) -> str:
        from pyiceberg.io.pyarrow import schema_to_pyarrow
        from pyspark.sql.pandas.types import from_arrow_schema

        return from_arrow_schema(schema_to_pyarrow(table.schema(), include_field_ids=False)).json()

    def commit(self, staged: Staged, after: int | None, commit: Commit) -> None:
        with self._staging.moved_in(staged) as moved, library_errors(self.location):
            self._commit(moved, after, commit)

    def _commit(self, staged: Staged, after: int | None, commit: Commit) -> None:
        from pyiceberg.exceptions import CommitFailedException

        for _ in range(COMMIT_TRIES):
            table = self.table() or self._create(commit.schema)
            reached = self._next_of(table)
            if reached != after:
                raise CommitRefused(f"{self.location} now ends at {reached}, not at {after}")
            try:
                if table.properties.get(_RETRIES) != "0":
                    table.transaction().set_properties({_RETRIES: "0"}).commit_transaction()
                    continue
                self._add(table, staged, commit)
            except CommitFailedException:
                continue
            return
        raise CommitRefused(f"others keep changing {self.location}: export again later")

    def _add(self, table: Table, staged: Staged, commit: Commit) -> None:
        reached = {self._next: str(commit.end), self._commit_name: encode_commit(commit)}
        with table.transaction() as transaction:
            with transaction.update_schema() as update:
                update.union_by_name(arrow_schema(commit.schema))
            transaction.set_properties(reached)
            transaction.add_files(
                [file_uri(file.path) for file in staged.files],
                snapshot_properties={
                    "forebay.topic": commit.topic,
                    "forebay.start-offset": str(commit.start),
                    "forebay.end-offset": str(commit.end),
                },
                check_duplicate_files=False,
            )

    def _create(self, schema: str) -> Table:
        from pyiceberg.exceptions import TableAlreadyExistsError

        catalog = self._catalog  # opened before the lock, because opening takes the same lock
        # Without the lock, pyiceberg fails if another process creates the namespace first.
        with locked_directory(self.location.parent):
            catalog.create_namespace_if_not_exists(NAMESPACE)
        try:
            return catalog.create_table(
                self.identifier,
                arrow_schema(schema),
                location=file_uri(self.location),
                properties={_TOPIC: self.topic, _RETRIES: "0"},
            )
        except TableAlreadyExistsError as error:
            raise CommitRefused(f"another exporter has created {self._full_name}") from error

    def close(self) -> None:
        catalog = self.__dict__.pop("_catalog", None)
        if catalog is not None:
            catalog.close()

    def references(self, directory: Path) -> bool:
        with library_errors(self.location):
            table = self.table()
            if table is None or table.current_snapshot() is None:
                return False
            return any(
                Path(task.file.file_path).parent.name == directory.name
                for task in table.scan().plan_files()
            )


def arrow_schema(schema: str) -> pa.Schema:
    """An Arrow schema from Spark's JSON; all columns are nullable."""
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    return to_arrow_schema(StructType.fromJson(json.loads(schema)), timezone="UTC")


def file_uri(path: Path) -> str:
    """The URI of a path, not percent-encoded, because pyiceberg does not decode it."""
    return f"file://{path}"


def connect(catalog: str | Mapping[str, str] | None, warehouse: Path) -> Catalog:
    """The catalog: from properties of pyiceberg, from a URI, or the SQLite file in `warehouse`.

    UsageError or ServiceUnavailable if it cannot be opened.
    """
    from pyiceberg.catalog import load_catalog

    if catalog is None:
        warehouse.mkdir(parents=True, exist_ok=True)
        catalog = f"sqlite:///{warehouse / CATALOG_FILE}"
    properties: dict[str, Any] = {"uri": catalog} if isinstance(catalog, str) else dict(catalog)
    if "type" not in properties and not str(properties.get("uri", "")).startswith("http"):
        properties["type"] = "sql"
    properties.setdefault("warehouse", file_uri(warehouse))
    try:
        # Two processes must not create the SQL tables of a new catalog at the same time.
        with locked_directory(warehouse), library_errors("the Iceberg catalog cannot be opened"):
            return load_catalog(NAMESPACE, **properties)
    except ForebayError:
        raise
    except (ValueError, ImportError) as error:
        raise UsageError(f"the Iceberg catalog cannot be opened: {error}") from error


def require_pyiceberg() -> None:
    try:
        import pyiceberg  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "the format iceberg needs the package pyiceberg: pip install 'forebay[iceberg]'"
        ) from error
