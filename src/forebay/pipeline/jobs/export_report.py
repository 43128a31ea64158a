"""What a run of `export` committed, row by row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from forebay.metrics import Counter
from forebay.pipeline.report import to_dataframe

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS: Final = Counter("forebay_export_rows_total", "Records committed to tables.", ["format"])
REJECTED: Final = Counter(
    "forebay_export_rejected_total", "Records committed to tables of rejected ones.", ["format"]
)
COMMITS: Final = Counter("forebay_export_commits_total", "Batches committed.", ["format"])


@dataclass(frozen=True, slots=True)
class ExportRow:
    """One batch that was committed, or would be, or why there are no more."""

    topic: str
    table: str
    start_offset: int | None
    end_offset: int | None
    """One more than the last."""
    records: int
    """In the table."""
    rejected: int
    """In the table of rejected records."""
    skipped: int
    """Offsets right before the batch that are gone."""
    files: int
    bytes: int
    error: str | None


@dataclass(frozen=True, slots=True)
class ExportReport:
    topic: str
    table: str
    rejected_table: str | None
    """Where there may be one."""
    format: str
    dry_run: bool
    next_offset: int | None
    """Where the next export goes on."""
    lost_races: int
    """Batches that somebody else committed first."""
    rows: tuple[ExportRow, ...]

    @property
    def ok(self) -> bool:
        return all(row.error is None for row in self.rows)

    @property
    def records(self) -> int:
        return sum(row.records for row in self.rows)

    @property
    def rejected(self) -> int:
        return sum(row.rejected for row in self.rows)

    @property
    def skipped(self) -> int:
        return sum(row.skipped for row in self.rows)

    @property
    def commits(self) -> int:
        return sum(row.error is None for row in self.rows)

    def dataframe(self, spark: SparkSession) -> DataFrame:
        """The rows, one column for each of their fields."""
        return to_dataframe(spark, ExportRow, self.rows)
