"""Topics to export, and the tables that exports made, as other programs read them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import duckdb
import pyarrow as pa
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog

from forebay.pipeline.jobs.export.job import Format
from forebay.settings import DeleterSettings, StoreSettings, UploaderSettings, WalSettings
from forebay.topic.store import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FORMATS: tuple[Format, ...] = get_args(Format)


def settings(data: Path) -> StoreSettings:
    return StoreSettings(
        data=data,
        wal=WalSettings(rotate_max_bytes=4000),
        uploader=UploaderSettings(enabled=False),
        deleter=DeleterSettings(retention_size_mb=0, deletion_lag_minutes=0),
    )


def append(data: Path, values: list[bytes], *, upload: bool = False) -> None:
    with Store(settings(data)) as store:
        topic = store.topic("orders")
        for value in values:
            topic.append(value, attributes={"n": str(len(value))}, routing_key="k")
        topic.flush()
        if upload:
            topic.rotate()
            topic.upload()
            topic.trim_local()


def arrow_table(kind: str, location: Path) -> pa.Table:
    """Through the format's own library; plain Parquet through DuckDB."""
    if kind == "delta":
        return DeltaTable(str(location)).to_pyarrow_table()
    if kind == "iceberg":
        return iceberg_table(location).scan().to_arrow()
    glob = f"{location}/**/*.parquet"
    query = f"select * from read_parquet('{glob}', union_by_name=true, hive_partitioning=true)"
    with duckdb.connect() as connection:
        found = connection.sql(query)
        assert found is not None
        return found.to_arrow_table()


def iceberg_table(location: Path) -> Any:
    uri = f"sqlite:///{location.parent / 'iceberg.db'}"
    catalog = load_catalog("forebay", type="sql", uri=uri)
    try:
        return catalog.load_table(f"forebay.{location.name}")
    finally:
        catalog.close()


def query(kind: str, location: Path, select: str) -> list[tuple[Any, ...]]:
    """A query of DuckDB over the table, which it calls `t`."""
    t = arrow_table(kind, location)  # noqa: F841  # DuckDB finds it by its name
    with duckdb.connect() as connection:
        found = connection.sql(f"select {select} from t")
        assert found is not None
        return list(found.fetchall())


def data_files(kind: str, location: Path) -> list[str]:
    """The files of the table as it is now, as the table says."""
    if kind == "delta":
        return list(DeltaTable(str(location)).file_uris())
    if kind == "iceberg":
        return [task.file.file_path for task in iceberg_table(location).scan().plan_files()]
    return [str(path) for path in location.glob("*/*.parquet")]


def spark_table(spark: SparkSession, kind: str, location: Path) -> DataFrame:
    """Spark's own reader on the table's files."""
    return spark.read.option("mergeSchema", "true").parquet(*data_files(kind, location))


def offsets(kind: str, location: Path) -> list[int]:
    """All of them, sorted."""
    if not location.exists():
        return []
    return sorted(arrow_table(kind, location).column("offset").to_pylist())
