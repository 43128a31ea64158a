"""What a run of `replay` did, batch by batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forebay.pipeline.report import to_dataframe

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """A range of the source, the end not included, and what became of it."""

    start_offset: int
    end_offset: int
    appended: int
    """Messages; of a dry run, those that would be."""
    known: int
    """Messages that were there from an earlier run."""
    bytes: int
    """About how many were read."""
    error: str | None


@dataclass(frozen=True, slots=True)
class ReplayReport:
    dry_run: bool
    topic: str
    into: str
    sink_id: str
    """Which replay of this range it is: given again, a run goes on with this one."""
    start_offset: int
    end_offset: int
    rows: tuple[ReplayRow, ...]

    @property
    def ok(self) -> bool:
        return all(row.error is None for row in self.rows)

    @property
    def appended(self) -> int:
        return sum(row.appended for row in self.rows)

    @property
    def known(self) -> int:
        return sum(row.known for row in self.rows)

    def dataframe(self, spark: SparkSession) -> DataFrame:
        """The rows, one column for each of their fields."""
        return to_dataframe(spark, ReplayRow, self.rows)
