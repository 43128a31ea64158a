"""What a compaction did, and what it left."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from forebay.metrics import Counter
from forebay.pipeline.jobs.report import to_dataframe

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

OBJECTS: Final = Counter(
    "forebay_compact_objects_total",
    "Objects that compactions wrote, by what became of them.",
    ["outcome"],
)
REPLACED: Final = Counter(
    "forebay_compact_replaced_total", "Objects that larger ones took the place of."
)
BYTES: Final = Counter("forebay_compact_bytes_total", "Bytes that compactions rewrote.")


@dataclass(frozen=True, slots=True)
class CompactRow:
    """One object that took the place of several, or should have; of an undo, the other way."""

    topic: str
    object_id: str | None
    """The large object; None where the topic could not be compacted at all."""
    replaced: int
    """How many small ones there are."""
    start_offset: int
    end_offset: int
    """Of the last message."""
    messages: int
    bytes: int
    sha256_before: str | None
    """Of all frames as they were read from the small objects; None if nothing was read."""
    sha256_after: str | None
    """Of all frames as they were read back from the large one."""
    error: str | None


@dataclass(frozen=True, slots=True)
class CompactReport:
    rows: tuple[CompactRow, ...]
    """One for each swap, in the order of the commits; objects of one round are replaced in the
    next."""
    dry_run: bool
    rounds: int = 0
    refused: int = 0
    """Swaps for which somebody else was faster: what they were to do was planned anew."""
    left_groups: int = 0
    """For which the budget was not enough."""
    left_bytes: int = 0

    @property
    def ok(self) -> bool:
        return all(row.error is None for row in self.rows)

    @property
    def errors(self) -> int:
        return sum(row.error is not None for row in self.rows)

    @property
    def objects(self) -> int:
        """Swaps that were made, or would be."""
        return len(self.rows) - self.errors

    @property
    def replaced(self) -> int:
        return sum(row.replaced for row in self.rows if row.error is None)

    @property
    def bytes(self) -> int:
        return sum(row.bytes for row in self.rows if row.error is None)

    def dataframe(self, spark: SparkSession) -> DataFrame:
        return to_dataframe(spark, CompactRow, self.rows)

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "dry_run": self.dry_run,
            "ok": self.ok,
            "rounds": self.rounds,
            "refused": self.refused,
            "objects": self.objects,
            "replaced": self.replaced,
            "bytes": self.bytes,
            "left_groups": self.left_groups,
            "left_bytes": self.left_bytes,
            "rows": [asdict(row) for row in self.rows],
        }
