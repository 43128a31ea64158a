"""The part of an export that runs on Spark: writes a range of a topic to Parquet files.

The driver plans the range once. Tasks read their splits with the code of the format `forebay`, and
Spark writes the rows. No value passes through the driver.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forebay.errors import ForebayError, FormatError
from forebay.pipeline.execute import is_from_spark, reason_of
from forebay.pipeline.jobs.export.json_columns import (
    columns_for,
    decode_fields,
    encode_fields,
    good_rows,
    infer,
    known_fields,
    merge,
    rejected_rows,
)
from forebay.pipeline.jobs.export.plan import Batch
from forebay.pipeline.jobs.export.tables import Files, Staged, Task, collect
from forebay.pipeline.session import slots, spark_session
from forebay.pipeline.source.plan import Split, plan_topic, splits
from forebay.pipeline.source.scan import read_split
from forebay.settings import StoreSettings
from forebay.topic.view import TopicView

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


_READ: Final = ("offset", "timestamp", "key", "value", "headers", "topic", "partition")
_RAW: Final = (
    "offset bigint, timestamp timestamp, key binary, value binary, headers map<string,string>, "
    "topic string, partition int"
)

OPTIONS: Final = {
    # Delta and Iceberg do not have the type of Spark's default, INT96.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # In JSON, `a` and `A` are different fields.
    "spark.sql.caseSensitive": "true",
    "spark.sql.session.timeZone": "UTC",
}


def export_session(spark: SparkSession) -> SparkSession:
    """A new session of the same application, with options that do not affect other sessions."""
    session = spark.newSession()
    for name, value in OPTIONS.items():
        session.conf.set(name, value)
    return session


def raw_columns() -> StructType:
    return _parse(_RAW)


def rejected_columns() -> StructType:
    return _parse(f"{_RAW}, reason string")


def json_columns(fields: StructType, *, keep_value: bool) -> StructType:
    """The columns of the table: offset, timestamp and so on first, then those of the fields.

    The value is text, not binary as in raw tables: that tells a table of JSON from a raw one.
    """
    from pyspark.sql.types import StringType, StructField, StructType

    ours = [each for each in raw_columns().fields if each.name != "value"]
    value = [StructField("value", StringType())] if keep_value else []
    return StructType([*ours, *value, *columns_for(fields).fields])


def _parse(ddl: str) -> StructType:
    from pyspark.sql.types import (
        BinaryType,
        DataType,
        IntegerType,
        LongType,
        MapType,
        StringType,
        StructField,
        StructType,
        TimestampType,
    )

    # Spark's own parser needs a running session.
    known: dict[str, DataType] = {
        "bigint": LongType(),
        "timestamp": TimestampType(),
        "binary": BinaryType(),
        "map<string,string>": MapType(StringType(), StringType()),
        "string": StringType(),
        "int": IntegerType(),
    }
    parts = [part.split(" ") for part in ddl.split(", ")]
    return StructType([StructField(name, known[kind]) for name, kind in parts])


# ---- reading


def read_range(
    spark: SparkSession, settings: StoreSettings, view: TopicView, start: int, end: int
) -> DataFrame:
    """The messages `start..end` of the topic; LostOffsets or MissingData if some are gone."""
    from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

    from forebay.pipeline.source.data_source import scan_schema
    from forebay.pipeline.source.options import ScanOptions

    planned = splits(plan_topic(view, start, end), least=slots(spark))
    schema = scan_schema(ScanOptions(settings, columns=_READ))
    numbers = spark.range(0, len(planned), 1, len(planned))
    rows = numbers.mapInArrow(partial(_read_splits, settings, planned), schema)
    pairs = F.transform("headers", lambda pair: F.struct(pair["key"], pair["value"].cast("string")))
    return rows.withColumn("headers", F.map_from_entries(pairs))


def _read_splits(
    settings: StoreSettings, planned: Sequence[Split], numbers: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    for batch in numbers:
        for number in batch.column(0).to_pylist():
            yield from read_split(settings, planned[number], _READ)


# ---- writing


def write(records: DataFrame, directory: Path, batch: Batch) -> Staged:
    """Writes Parquet files into a directory that does not exist yet, and syncs them."""
    # Not as_uri(), because Hadoop does not decode percent-encoding.
    records.write.parquet(f"file://{directory}")
    return collect(directory, batch.start, batch.end)


class SparkStager:
    """Writes the files of batches with Spark. Starts a session at the first batch if needed."""

    def __init__(
        self,
        settings: StoreSettings,
        view: TopicView,
        spark: SparkSession | None,
        *,
        keep_value: bool = True,
    ) -> None:
        self._settings = settings
        self._view = view
        self._given = spark
        self._keep_value = keep_value

    @cached_property
    def _spark(self) -> SparkSession:
        return export_session(self._given or spark_session(self._settings.spark))

    def stage(self, task: Task, place: Path, side: Path | None = None) -> Files:
        batch = task.batch
        records = read_range(self._spark, self._settings, self._view, batch.start, batch.end)
        try:
            if side is None:
                good = write(records, place, batch)
                return Files(good, raw_columns().json())
            return self._stage_json(records, task, place, side)
        except Exception as error:
            if not is_from_spark(error):
                raise
            raise ForebayError(
                f"{self._view.topic}: Spark could not export offsets {batch.start} to "
                f"{batch.end - 1}: {reason_of(error)}"
            ) from error

    def _stage_json(self, records: DataFrame, task: Task, place: Path, side: Path) -> Files:
        from pyspark import StorageLevel

        # Cached, because the values are used three times: to find fields, and to write two tables.
        records = records.persist(StorageLevel.DISK_ONLY)
        try:
            known = _table_columns(task)
            fields = self._fields(records, known, task)
            columns = json_columns(fields, keep_value=self._keep_value)
            good = write(good_records(records, fields, columns), place, task.batch)
            # A column that the table has stays, even if this batch is written without it.
            keep = self._keep_value or "value" in known.names
            schema = json_columns(fields, keep_value=keep).json()
            if task.unfinished is not None or good.rows == task.batch.count:
                return Files(good, schema)
            rejected = write(rejected_records(records, fields), side, task.batch)
            return Files(good, schema, rejected, rejected_columns().json(), encode_fields(fields))
        finally:
            records.unpersist()

    def _fields(self, records: DataFrame, known: StructType, task: Task) -> StructType:
        """The fields for the values of the batch: the recorded ones if it is unfinished."""
        if task.unfinished is None:
            return merge(known_fields(known), infer(records))
        if task.unfinished.judged_by is None:
            raise FormatError(
                f"{self._view.topic}: the commit of the rejected records does not have their fields"
            )
        try:
            return decode_fields(task.unfinished.judged_by)
        except FormatError as error:
            raise FormatError(
                f"{self._view.topic}: a batch is not finished, and {error}"
            ) from error


def _table_columns(task: Task) -> StructType:
    from pyspark.sql.types import StructType

    table = task.main.schema
    return StructType() if table is None else StructType.fromJson(json.loads(table))


def good_records(records: DataFrame, fields: StructType, columns: StructType) -> DataFrame:
    return records.mapInArrow(partial(good_rows, fields, columns), columns)


def rejected_records(records: DataFrame, fields: StructType) -> DataFrame:
    return records.mapInArrow(partial(rejected_rows, fields), rejected_columns())
