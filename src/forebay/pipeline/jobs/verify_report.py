"""What `verify` found: a row for each finding, and one for each topic of what is good.

    severity   kinds
    good       ok, planned
    note       etag, and what a sweep keeps or takes away in the normal course of things
    warning    sidecar, orphan, pending, stray, unrestored: nothing is lost, something is not right
    error      missing, resized, corrupt, index, gap, overlap, record, descriptor, unnamed,
               unreadable

A report holds a bounded number of findings and counts the rest. Notes do not make it bad.
"""

from __future__ import annotations

import logging
from collections import Counter as Tally
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from forebay.format.names import TopicName
from forebay.logs import event
from forebay.metrics import Counter
from forebay.pipeline.jobs.report import to_dataframe
from forebay.upload.sweep import Action, Kind, SweepItem

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_log: Final = logging.getLogger("forebay.pipeline")
ROWS_MAX: Final = 10_000
"""Findings that a report holds; the rest is counted, and logged."""

GOOD: Final = "good"
NOTE: Final = "note"
WARNING: Final = "warning"
ERROR: Final = "error"

OBJECTS: Final = Counter("forebay_verify_objects_total", "Objects that were read back.", ["result"])
BYTES: Final = Counter("forebay_verify_bytes_total", "Bytes of objects that were read back.")
FINDINGS: Final = Counter(
    "forebay_verify_findings_total", "What verifying found wrong, by kind.", ["kind", "severity"]
)

_SWEPT: Final = {
    Kind.ORPHAN: ("orphan", WARNING),
    Kind.PENDING: ("pending", WARNING),
    Kind.SIDECAR: ("stray", WARNING),
    Kind.REPLACED: ("replaced", NOTE),
    Kind.INTENT: ("intent", NOTE),
    Kind.DELETING: ("deleting", NOTE),
    Kind.UNKNOWN: ("unknown", NOTE),
    Kind.MISSING: ("missing", ERROR),
    Kind.RESIZED: ("resized", ERROR),
    Kind.UNNAMED: ("unnamed", ERROR),
    Kind.UNRESTORED: ("unrestored", WARNING),
    Kind.TOPIC: ("unreadable", ERROR),
}
"""What a sweep would take away, or sounds an alarm for; what it keeps is a note."""


@dataclass(frozen=True, slots=True)
class VerifyRow:
    topic: str
    object_id: str | None
    kind: str
    severity: str
    position: int | None
    """In the object."""
    offset: int | None
    detail: str
    objects: int
    bytes: int
    messages: int


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Of one run; after a dry run `objects` and `bytes` are what would be read."""

    dry_run: bool
    topics: int
    objects: int
    bytes: int
    messages: int
    errors: int
    warnings: int
    notes: int
    rows: tuple[VerifyRow, ...]
    rows_left_out: int

    @property
    def ok(self) -> bool:
        return not self.errors and not self.warnings

    @property
    def findings(self) -> tuple[VerifyRow, ...]:
        return tuple(row for row in self.rows if row.severity != GOOD)

    def facts(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"ok": self.ok, **asdict(self)}

    def dataframe(self, spark: SparkSession) -> DataFrame:
        return to_dataframe(spark, VerifyRow, self.rows)


class Ledger:
    """Collects findings as they come; tells the log and the metrics at once."""

    def __init__(self) -> None:
        self._rows: list[VerifyRow] = []
        self._good: dict[str, list[int]] = {}
        self._kept: dict[tuple[str, str, str], list[int]] = {}
        self._severities: Tally[str] = Tally()
        self._objects_told: set[tuple[str, str]] = set()
        self.left_out = 0

    def good(self, topic: TopicName, size: int, messages: int) -> None:
        total = self._good.setdefault(str(topic), [0, 0, 0])
        for at, amount in enumerate((1, size, messages)):
            total[at] += amount

    def topic(self, topic: TopicName) -> None:
        """So that one without objects has a row too."""
        self._good.setdefault(str(topic), [0, 0, 0])

    def find(
        self,
        topic: TopicName,
        kind: str,
        severity: str,
        detail: str,
        *,
        object_id: str | None = None,
        position: int | None = None,
        offset: int | None = None,
        size: int = 0,
        messages: int = 0,
    ) -> None:
        if severity == ERROR and object_id is not None:
            self._objects_told.add((str(topic), object_id))
        row = VerifyRow(
            str(topic),
            object_id,
            kind,
            severity,
            position,
            offset,
            detail,
            int(object_id is not None),
            size,
            messages,
        )
        self._add(row)
        if severity == NOTE:
            return
        event(
            _log,
            logging.ERROR if severity == ERROR else logging.WARNING,
            f"verify: {kind}",
            topic=row.topic,
            object=object_id,
            position=position,
            offset=offset,
            detail=detail,
        )

    def swept(self, item: SweepItem) -> None:
        """What a sweep without consequences says; what reading has told is not told again."""
        kind, severity = _SWEPT[item.kind]
        name = item.key.rpartition("/")[2]
        if kind in ("missing", "resized") and (str(item.topic), name) in self._objects_told:
            return
        if item.action is Action.KEPT and severity == WARNING and kind != "unrestored":
            severity = NOTE
        if severity == NOTE:
            total = self._kept.setdefault((str(item.topic), kind, item.reason), [0, 0])
            total[0] += 1
            total[1] += item.bytes
            return
        remedy = "; `forebay sweep` removes it" if item.action is Action.WOULD_REMOVE else ""
        self.find(
            item.topic,
            kind,
            severity,
            item.reason + remedy,
            object_id=name or None,
            size=item.bytes,
        )

    def report(self, *, dry_run: bool) -> VerifyReport:
        for (topic, kind, reason), (count, size) in self._kept.items():
            self._add(VerifyRow(topic, None, kind, NOTE, None, None, reason, count, size, 0))
        kind = "planned" if dry_run else "ok"
        said = "would be read" if dry_run else "read and found right"
        totals = tuple(
            VerifyRow(topic, None, kind, GOOD, None, None, f"{count} objects {said}", *total)
            for topic, total in sorted(self._good.items())
            for count in total[:1]
        )
        return VerifyReport(
            dry_run=dry_run,
            topics=len(totals),
            objects=sum(row.objects for row in totals),
            bytes=sum(row.bytes for row in totals),
            messages=sum(row.messages for row in totals),
            errors=self._severities[ERROR],
            warnings=self._severities[WARNING],
            notes=self._severities[NOTE],
            rows=(*totals, *sorted(self._rows, key=_by_weight)),
            rows_left_out=self.left_out,
        )

    def _add(self, row: VerifyRow) -> None:
        self._severities[row.severity] += 1
        FINDINGS.add(1, row.kind, row.severity)
        if len(self._rows) < ROWS_MAX:
            self._rows.append(row)
        else:
            self.left_out += 1


def _by_weight(row: VerifyRow) -> tuple[int, str, int, str]:
    weight = (ERROR, WARNING, NOTE).index(row.severity)
    return weight, row.topic, -1 if row.offset is None else row.offset, row.object_id or ""
