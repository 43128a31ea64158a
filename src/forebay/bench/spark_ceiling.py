"""The fastest that a Python source can be in Spark: batches made in advance, yielded again.

Everything that Spark does with a batch is in it, and nothing of what makes one. The columns are
those that the benchmark reads: `offset` and `value`.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

BATCH_BYTES: Final = 2 * 1024 * 1024
_made: Final[dict[tuple[int, int], pa.RecordBatch]] = {}


class CeilingSource(DataSource):
    """Options: `rows`, `messageBytes`, `splits`."""

    @classmethod
    def name(cls) -> str:
        return "forebay-ceiling"

    def schema(self) -> str:
        return "offset bigint, value binary"

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002
        return _CeilingReader(self.options)


class _Part(InputPartition):
    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.rows = rows


class _CeilingReader(DataSourceReader):
    def __init__(self, options: MutableMapping[str, str]) -> None:
        self._rows = int(options["rows"])
        self._bytes = int(options["messageBytes"])
        self._splits = int(options["splits"])

    def partitions(self) -> Sequence[InputPartition]:
        each, rest = divmod(self._rows, self._splits)
        return [_Part(each + (number < rest)) for number in range(self._splits)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Part)
        rows = partition.rows
        size = max(BATCH_BYTES // self._bytes, 1)
        batch = _batch(size, self._bytes)
        while rows >= size:
            yield batch
            rows -= size
        if rows:
            yield batch.slice(0, rows)


def _batch(rows: int, message_bytes: int) -> pa.RecordBatch:
    """The same one for every partition of this worker."""
    key = (rows, message_bytes)
    if key not in _made:
        offsets = pa.array(range(rows), pa.int64())
        values = pa.array([b"x" * message_bytes] * rows, pa.binary())
        _made[key] = pa.RecordBatch.from_arrays([offsets, values], ["offset", "value"])
    return _made[key]
