"""The subjects of schemas as the page shows them, cheap to read repeatedly.

They are read from the catalog every few seconds, the first ones only. If the catalog does not
respond, the page shows what it said last; an alert says that it is away.
"""

from __future__ import annotations

import time
from itertools import islice
from typing import Annotated, Final

from msgspec import Meta

from forebay.admin.records import Count, Record
from forebay.errors import ForebayError
from forebay.schemas.registry import SchemaRegistry

ROWS_MAX: Final = 20
_COUNTED_MAX: Final = 1000
_FRESH_SECONDS: Final = 5.0


class SchemaLine(Record, frozen=True):
    """A subject, and its latest version."""

    subject: str
    id: Count
    type: str
    latest: Count
    versions: Count
    mode: str


class SchemaTable(Record, frozen=True):
    rows: Annotated[list[SchemaLine], Meta(description="The first subjects, by name.")]
    total: Annotated[Count, Meta(description=f"How many there are; counted up to {_COUNTED_MAX}.")]


class PageSchemas:
    """One thread reads at a time."""

    def __init__(self, registry: SchemaRegistry, *, stored: bool) -> None:
        self._registry = registry
        self._stored = stored
        self._table = SchemaTable([], 0)
        self._read_at = float("-inf")

    def table(self) -> SchemaTable:
        now = time.monotonic()
        if self._stored and now - self._read_at >= _FRESH_SECONDS:
            self._read_at = now
            self._table = self._read()
        return self._table

    def _read(self) -> SchemaTable:
        try:
            found = list(islice(self._registry.subjects(lambda _damaged: None), _COUNTED_MAX))
            rows = [
                SchemaLine(
                    row.name,
                    row.id,
                    self._registry.version(row).kind,
                    row.latest,
                    len(row.versions),
                    row.mode,
                )
                for row in found[:ROWS_MAX]
            ]
        except ForebayError:
            return self._table
        return SchemaTable(rows, len(found))
