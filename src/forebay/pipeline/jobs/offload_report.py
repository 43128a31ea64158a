"""What a run of `offload` made, row by row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forebay.errors import ForebayError
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import ObjectName, TopicName
from forebay.pipeline.jobs.report import to_dataframe
from forebay.upload.plan import PlannedObject

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True)
class OffloadRow:
    """One object that was committed, or would be, or why a topic went no further."""

    topic: str
    object_id: str | None
    start_offset: int | None
    end_offset: int | None
    messages: int
    bytes: int
    seconds: float
    error: str | None


@dataclass(frozen=True, slots=True)
class OffloadReport:
    dry_run: bool
    topics: int
    """That were looked at."""
    waves: int
    """Spark jobs that it took."""
    rows: tuple[OffloadRow, ...]

    @property
    def ok(self) -> bool:
        return all(row.error is None for row in self.rows)

    @property
    def objects(self) -> int:
        return sum(row.error is None for row in self.rows)

    @property
    def messages(self) -> int:
        return sum(row.messages for row in self.rows)

    @property
    def bytes(self) -> int:
        return sum(row.bytes for row in self.rows)

    def dataframe(self, spark: SparkSession) -> DataFrame:
        """The rows, one column for each of their fields."""
        return to_dataframe(spark, OffloadRow, self.rows)


def made(topic: TopicName, descriptor: ObjectDescriptor, seconds: float = 0.0) -> OffloadRow:
    return OffloadRow(
        str(topic),
        descriptor.object_id,
        descriptor.start_offset,
        descriptor.end_offset,
        descriptor.count,
        descriptor.size,
        seconds,
        None,
    )


def failed(topic: TopicName, error: ForebayError) -> OffloadRow:
    return OffloadRow(str(topic), None, None, None, 0, 0, 0.0, str(error))


def would_be(planned: PlannedObject) -> ObjectDescriptor:
    """What a dry run says of an object."""
    name = ObjectName(planned.start_offset, planned.next_offset - 1)
    return ObjectDescriptor(str(name), name.start, name.end, planned.size, None, 0)
