"""The part of an export that runs on Spark: a range of a topic into Parquet files.

The driver plans the range once, tasks read their splits with the code of the format `forebay`, and
Spark writes what they read. No value passes through the driver.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forebay.errors import ForebayError, FormatError
from forebay.pipeline.execute import is_from_spark, reason_of
from forebay.pipeline.jobs.export.job import ExportReport, Files, Run, Target, Task
from forebay.pipeline.jobs.export.json_columns import (
    Fields,
    columns_for,
    decode_fields,
    encode_fields,
    good_columns,
    infer,
    judged,
    known_fields,
    merge,
)
from forebay.pipeline.jobs.export.plan import Batch
from forebay.pipeline.jobs.export.tables import Staged, collect
from forebay.pipeline.session import slots, spark_session
from forebay.pipeline.source.plan import Split, plan_topic, splits
from forebay.pipeline.source.scan import read_split
from forebay.settings import StoreSettings
from forebay.topic.view import TopicView

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType
import re
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal

from forebay.errors import (
    UsageError,
)
from forebay.format.names import parse_topic
from forebay.limits import GIB
from forebay.pipeline.execute import Progress
from forebay.pipeline.jobs.export.plan import Bounds
from forebay.pipeline.jobs.export.tables import (
    ExportTable,
    Staging,
)
from forebay.pipeline.location import job_settings
from forebay.topic.view import StoreView

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


# ---- `export`: a topic to a table of Parquet, Delta or Iceberg, each message exactly once.
#
# The table itself says how far it has got. A run goes on from there to the end of what is
# synced, in batches of bounded size: Spark writes the files of a batch beside the table, and the
# driver commits them together with the offsets that they hold. A run that is killed leaves
# committed batches and nothing else that a reader sees; the next one goes on.
#
# With JSON values there are two tables. Rejected records are committed first, together with the
# columns by which they were judged; if the exporter dies before the other commit, the next one
# finishes that batch by the same columns. So a record is in one of the tables, and once.
#
# What a caller gets wrong: `start` is for a table that is not there yet.


Format = Literal["parquet", "delta", "iceberg"]
Values = Literal["raw", "json"]

_URL: Final = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]+):/+(?P<rest>.*)")
BATCH_ROWS: Final = 10_000_000
BATCH_BYTES: Final = 1 * GIB


def export(
    source: str | Path | StoreSettings,
    topic: str,
    table: str | Path,
    *,
    format: Format = "parquet",  # noqa: A002  # what Spark calls it
    catalog: str | Mapping[str, str] | None = None,
    value: Values = "raw",
    start: int | None = None,
    end: int | None = None,
    max_batch_rows: int = BATCH_ROWS,
    max_batch_bytes: int = BATCH_BYTES,
    allow_gaps: bool = False,
    spark: SparkSession | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ExportReport:
    """Brings the table up to the topic's synced end as it is now, or to `end`.

    `catalog` is for Iceberg: a URI, or properties of pyiceberg's; by default a SQLite file beside
    the table. Offsets that are gone end the run with an error in its report, after what comes
    before them was committed; with `allow_gaps` it goes on behind them.
    """
    settings = job_settings(source)
    name = str(parse_topic(topic))
    if value not in ("raw", "json"):
        raise UsageError(f"value is {value!r}; it must be 'raw' or 'json'")
    if max_batch_rows < 1 or max_batch_bytes < 1:
        raise UsageError("a batch holds at least one row and one byte")
    if start is not None and start < 0:
        raise UsageError(f"start is {start}; offsets begin at 0")
    if end is not None and end < 0:
        raise UsageError(f"end is {end}; offsets begin at 0")
    location = table_location(table)
    main = open_target(format, location, name, catalog)
    side = None
    if value == "json":
        side = open_target(format, rejected_location(location), name, catalog)
    with ExitStack() as stack:
        for target in filter(None, (main, side)):
            stack.callback(target.table.close)
        view = stack.enter_context(StoreView(settings)).topic(name)
        if start is not None and start > view.end_offset:
            raise UsageError(
                f"start is {start}, and {name} is synced up to offset {view.end_offset}: begin "
                "there or before"
            )
        stop = view.end_offset if end is None else min(end, view.end_offset)
        bounds = Bounds(max_batch_rows, max_batch_bytes)
        stager = SparkStager(settings, view, spark)
        run = Run(view, stager, format, main, side, bounds, start, stop, allow_gaps)
        rows = run.rehearse() if dry_run else run.perform(progress)
        return run.report(rows, dry_run=dry_run)


def table_location(table: str | Path) -> Path:
    """The table's directory; UsageError for a place that Spark cannot write to."""
    # One slash: a Path has made it of two.
    match = _URL.match(str(table))
    if match is not None and match["scheme"] != "file":
        raise UsageError(
            f"{table} is not a directory: the file systems of object stores are not in Spark's "
            "Python package; export to a directory, which may be a mounted bucket's"
        )
    return Path(str(table) if match is None else f"/{match['rest']}").absolute()


def rejected_location(location: Path) -> Path:
    return location.with_name(f"{location.name}_rejected")


def open_target(
    kind: str, location: Path, topic: str, catalog: str | Mapping[str, str] | None
) -> Target:
    """The table of a format, whether it is there already or not."""
    if catalog is not None and kind != "iceberg":
        raise UsageError(f"a catalog is for Iceberg's tables; this one is {kind}")
    table: ExportTable
    if kind == "parquet":
        from forebay.pipeline.jobs.export.tables import ParquetTable

        table = ParquetTable(location, topic)
    elif kind == "delta":
        from forebay.pipeline.jobs.export.delta import DeltaExport

        table = DeltaExport(location, topic)
    elif kind == "iceberg":
        from forebay.pipeline.jobs.export.iceberg import IcebergExport

        table = IcebergExport(location, topic, catalog)
    else:
        raise UsageError(f"format is {kind!r}; it must be 'parquet', 'delta' or 'iceberg'")
    return Target(table, Staging(location))


_READ: Final = ("offset", "timestamp", "key", "value", "headers", "topic", "partition")
_KEPT: Final = ("offset", "timestamp", "key", "headers", "topic", "partition")
_RAW: Final = (
    "offset bigint, timestamp timestamp, key binary, value binary, headers map<string,string>, "
    "topic string, partition int"
)

OPTIONS: Final = {
    # Spark's default, INT96, is none of the types of Delta and Iceberg.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # JSON has fields `a` and `A`.
    "spark.sql.caseSensitive": "true",
    "spark.sql.session.timeZone": "UTC",
}


def export_session(spark: SparkSession) -> SparkSession:
    """A session of the same application whose settings are this export's alone."""
    session = spark.newSession()
    for name, value in OPTIONS.items():
        session.conf.set(name, value)
    return session


def raw_columns() -> StructType:
    return _parse(_RAW)


def rejected_columns() -> StructType:
    return _parse(f"{_RAW}, reason string")


def json_columns(fields: Fields) -> StructType:
    """The table's columns, ours first."""
    from pyspark.sql.types import StructType

    ours = [each for each in raw_columns().fields if each.name != "value"]
    return StructType([*ours, *columns_for(fields.schema).fields])


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

    # Without a parser: Spark's own needs a running session.
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


# ---- reading ------------------------------------------------------------------------------------


def read_range(
    spark: SparkSession, settings: StoreSettings, view: TopicView, start: int, end: int
) -> DataFrame:
    """The messages `start..end` of the topic; LostOffsets or MissingData if one is not there."""
    from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

    from forebay.pipeline.source.batch import scan_schema
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


# ---- writing ------------------------------------------------------------------------------------


def write(records: DataFrame, directory: Path, batch: Batch) -> Staged:
    """Parquet files in a directory that is not there yet."""
    # Not as_uri: Hadoop takes the characters of a path as they are.
    records.write.parquet(f"file://{directory}")
    return collect(directory, batch.start, batch.end)


class SparkStager:
    """Writes the files of batches on a Spark session, which it starts when there is a batch."""

    def __init__(
        self, settings: StoreSettings, view: TopicView, spark: SparkSession | None
    ) -> None:
        self._settings = settings
        self._view = view
        self._given = spark

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

        # Read once: the values are looked at for their fields, and written, and written once more.
        records = records.persist(StorageLevel.DISK_ONLY)
        try:
            fields = self._fields(records, task)
            good = write(good_records(records, fields), place, task.batch)
            schema = json_columns(fields).json()
            if task.unfinished is not None or good.rows == task.batch.count:
                return Files(good, schema)
            rejected = write(rejected_records(records, fields), side, task.batch)
            columns = rejected_columns().json()
            return Files(good, schema, rejected, columns, encode_fields(fields))
        finally:
            records.unpersist()

    def _fields(self, records: DataFrame, task: Task) -> Fields:
        """What the values of the batch are read as."""
        from pyspark.sql.types import StructType

        if task.unfinished is None:
            table = task.main.schema
            known = StructType() if table is None else StructType.fromJson(json.loads(table))
            return merge(known_fields(known), infer(self._spark, records))
        if task.unfinished.judged_by is None:
            raise FormatError(f"{self._view.topic}: rejected records, and no fields noted")
        return decode_fields(task.unfinished.judged_by)


def good_records(records: DataFrame, fields: Fields) -> DataFrame:
    found = judged(records, fields, _KEPT)
    return found.filter(found["reason"].isNull()).select(*_KEPT, *good_columns(fields))


def rejected_records(records: DataFrame, fields: Fields) -> DataFrame:
    found = judged(records, fields, _KEPT)
    names = rejected_columns().names
    return found.filter(found["reason"].isNotNull()).select(*names)
