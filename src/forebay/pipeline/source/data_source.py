"""`spark.read.format("forebay")`: both tiers of any number of topics as one DataFrame.

Spark creates the source in several processes, and pickles the reader into every task. These objects
therefore hold only the options; each partition carries what its task needs of the plan.

`pushFilters` is left out on purpose: in Spark 4.3, a filter that is pushed into a Python source
also affects the next query of the same DataFrame. Offset and time ranges are options instead.

Beware: a DataFrame is a snapshot. Call `load()` again to see newer messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from forebay.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter

    from forebay.pipeline.source.options import ScanOptions
    from forebay.pipeline.source.plan import Split


_HEADER = StructType([StructField("key", StringType()), StructField("value", BinaryType())])
SPARK_TYPES: dict[str, DataType] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "timestampType": IntegerType(),
    "headers": ArrayType(_HEADER),
}


def register(spark: SparkSession) -> None:
    """Registers the formats `forebay` and `pulsar-offload` in the session.

    Needed only if Spark does not find them by name. It finds them where the modules
    `pyspark_forebay` and `pyspark_forebay_pulsar` can be imported.
    """
    from forebay.pipeline.pulsar.data_source import PulsarDataSource

    spark.dataSource.register(ForebayDataSource)
    spark.dataSource.register(PulsarDataSource)


def scan_schema(options: ScanOptions) -> StructType:
    """The columns that the options choose."""
    return StructType([StructField(name, SPARK_TYPES[name]) for name in options.columns])


class ForebayDataSource(DataSource):
    """The format `forebay`, for reading and writing, in batches and in streams."""

    @classmethod
    def name(cls) -> str:
        return "forebay"

    def schema(self) -> StructType:
        from forebay.pipeline.source.options import columns_of

        return StructType(
            [StructField(name, SPARK_TYPES[name]) for name in columns_of(self.options)]
        )

    def reader(self, schema: StructType) -> DataSourceReader:
        from forebay.pipeline.source.options import scan_options

        options = scan_options(self.options)
        _require_schema(schema, options)
        return ForebayReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        from forebay.pipeline.source.options import scan_options
        from forebay.pipeline.source.stream import ForebayStreamReader

        options = scan_options(self.options, streaming=True)
        _require_schema(schema, options)
        return ForebayStreamReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        from forebay.pipeline.sink.writer import ForebayWriter

        return ForebayWriter(self.options, schema, overwrite)

    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamArrowWriter:
        from forebay.pipeline.sink.writer import ForebayStreamWriter

        return ForebayStreamWriter(self.options, schema, overwrite)


class ForebayReader(DataSourceReader):
    """One scan. Pickled into every task."""

    def __init__(self, options: ScanOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        from forebay.pipeline.source.scan import plan_scan

        return [InputPartition(split) for split in plan_scan(self._options)]

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a partition. Spark passes None if the plan has no partitions."""
        split: Split | None = None if partition is None else partition.value
        if split is None:
            return
        from forebay.pipeline.source.scan import read_split

        yield from read_split(self._options.settings, split, self._options.columns)


def _require_schema(schema: StructType, options: ScanOptions) -> None:
    """Raises UsageError if the user gave a schema that differs from that of the source."""
    ours = scan_schema(options)
    if schema.simpleString() != ours.simpleString():
        raise UsageError(
            f"the schema {schema.simpleString()} is not that of the source, "
            f"{ours.simpleString()}: leave out .schema(...), and choose columns with the option "
            "'columns'"
        )
