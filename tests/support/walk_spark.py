"""The steps of a walk that need a real Spark session."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.errors import ForebayError
from forebay.pipeline.execute import is_from_spark, reason_of
from forebay.pipeline.jobs.compact import compact
from forebay.pipeline.jobs.offload import offload
from forebay.pipeline.jobs.verify import verify
from forebay.settings import StoreSettings
from forebay.topic.resources import close_executor_resources
from forebay.topic.view import StoreView
from support.walk_process import Reading, number_of, payload

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def on_spark(
    spark: SparkSession, settings: StoreSettings, work: str, name: str, numbers: Sequence[int]
) -> Reading | None:
    """Does the work, and returns what it read, if it reads. Raises ForebayError."""
    try:
        if work == "offload":
            offload(settings, spark=spark)
        elif work == "compact":
            compact(settings, target_bytes=8000, spark=spark)
        elif work == "verify":
            verify(settings, spark=spark)
        elif work == "write":
            _write(spark, settings, name, numbers)
        else:
            return _read(spark, settings, name)
    except Exception as error:
        if not is_from_spark(error):
            raise
        raise ForebayError(reason_of(error)) from error
    finally:
        close_executor_resources()
    return None


def _read(spark: SparkSession, settings: StoreSettings, name: str) -> Reading:
    with StoreView(settings) as store, store.topic(name) as view:
        reading = Reading(view.start_offset, view.end_offset)
    options = {"subscribe": name, "failOnDataLoss": "false", "columns": "offset,value"}
    options["endingOffsets"] = f'{{"{name}":{{"0":{reading.end}}}}}'
    frame = spark.read.format("forebay").options(**options).load(str(_file(settings)))
    reading.found = sorted((row.offset, number_of(row.value)) for row in frame.toLocalIterator())
    return reading


def _write(spark: SparkSession, settings: StoreSettings, name: str, numbers: Sequence[int]) -> None:
    frame = spark.createDataFrame([(payload(each),) for each in numbers], "value binary")
    options = {"topic": name, "sinkId": f"walk-{numbers[0]}"}
    frame.write.format("forebay").options(**options).mode("append").save(str(_file(settings)))


def _file(settings: StoreSettings) -> Path:
    """The settings as a file, as users have them."""
    assert settings.data is not None
    data = Path(settings.data)
    data.mkdir(parents=True, exist_ok=True)
    path = data / "walk.yaml"
    metadata = settings.metadata
    path.write_text(
        f"""
storage:
  wal: {{dir: {data / "wal"}, rotate_max_bytes: {settings.wal.rotate_max_bytes}}}
  uploader: {{enabled: false, max_object_bytes: {settings.uploader.max_object_bytes}}}
  cloud: {{backend: fs, root: {settings.cloud.root}}}
metadata:
  backend: sqlite
  path: {metadata.path}
  lease_seconds: {metadata.lease_seconds}
  lease_margin_seconds: {metadata.lease_margin_seconds}
  offsets_reserved: {metadata.offsets_reserved}
"""
    )
    return path
