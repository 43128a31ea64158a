"""`spark.read.format("pulsar-offload")`: Pulsar's offloaded ledgers, without a broker.

    spark.read.format("pulsar-offload").load("s3://bucket/prefix")

Spark creates the source in several processes, and pickles the reader into every task. These objects
therefore hold only the options; each partition carries what its task needs of the plan.

Beware: a DataFrame is a snapshot of the ledgers that were in the bucket when it was planned. Call
`load()` again to see newer ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
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

from forebay.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from forebay.pipeline.pulsar.options import PulsarOptions
    from forebay.pipeline.pulsar.plan import Split

SPARK_TYPES: Final[dict[str, DataType]] = {
    "value": BinaryType(),
    "__key": BinaryType(),
    "__topic": StringType(),
    "__messageId": BinaryType(),
    "__publishTime": TimestampType(),
    "__eventTime": TimestampType(),
    "__messageProperties": MapType(StringType(), StringType()),
    "__ledgerId": LongType(),
    "__entryId": LongType(),
    "__batchIndex": IntegerType(),
    "__partition": IntegerType(),
    "__kind": StringType(),
    "__sequenceId": LongType(),
    "__producerName": StringType(),
    "__schemaVersion": LongType(),
    "__orderingKey": BinaryType(),
    "__index": LongType(),
}


class PulsarDataSource(DataSource):
    """The format `pulsar-offload`, for reading, in batches and in streams."""

    @classmethod
    def name(cls) -> str:
        return "pulsar-offload"

    def schema(self) -> StructType:
        from forebay.pipeline.pulsar.options import columns_of

        names = columns_of(self.options)
        return StructType([StructField(name, SPARK_TYPES[name]) for name in names])

    def reader(self, schema: StructType) -> DataSourceReader:
        from forebay.pipeline.pulsar.options import pulsar_options

        options = pulsar_options(self.options)
        self._require_schema(schema)
        return PulsarReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        from forebay.pipeline.pulsar.options import pulsar_options
        from forebay.pipeline.pulsar.stream import PulsarStreamReader

        options = pulsar_options(self.options, streaming=True)
        self._require_schema(schema)
        return PulsarStreamReader(options)

    def _require_schema(self, schema: StructType) -> None:
        """Raises UsageError if the user gave a schema that differs from that of the source."""
        ours = self.schema()
        if schema.simpleString() != ours.simpleString():
            raise UsageError(
                f"the schema {schema.simpleString()} is not that of the source, "
                f"{ours.simpleString()}: leave out .schema(...), and choose columns with the "
                "option 'columns'"
            )


class PulsarReader(DataSourceReader):
    """One scan. Pickled into every task."""

    def __init__(self, options: PulsarOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        from forebay.pipeline.pulsar.scan import plan_scan

        return [InputPartition(split) for split in plan_scan(self._options)]

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a partition. Spark passes None if the plan has no partitions."""
        split: Split | None = None if partition is None else partition.value
        if split is None:
            return
        from forebay.pipeline.pulsar.scan import read_split

        yield from read_split(self._options, split)
