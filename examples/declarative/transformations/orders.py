"""A streaming table of a topic's JSON values, and a view that sums them up."""

from __future__ import annotations

import os
from pathlib import Path

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

# The server may run in another working directory than the command that starts the pipeline.
STORE = str(Path(os.environ["FOREBAY_DATA"]).absolute())
ORDER = "item STRING, pieces BIGINT"


@dp.table
def orders() -> DataFrame:
    """One row for each message. The pipeline's checkpoint records what was read."""
    spark = SparkSession.active()
    messages = (
        spark.readStream.format("forebay")
        .option("subscribe", "orders")
        .option("startingOffsets", "earliest")
        .option("columns", "value,offset,timestamp")
        .load(STORE)
    )
    parsed = f.from_json(messages.value.cast("string"), ORDER).alias("parsed")
    return messages.select("offset", "timestamp", parsed).select("offset", "timestamp", "parsed.*")


@dp.materialized_view
def pieces_by_item() -> DataFrame:
    """Computed from the whole table in every run."""
    rows = SparkSession.active().read.table("orders")
    return rows.groupBy("item").agg(f.sum("pieces").alias("pieces"), f.count("*").alias("orders"))
