"""A client of Spark Connect, which has no JVM: reads and writes the format `forebay` by its name.

Arguments: the server's address, the store and a folder. Says what it found, a line for each.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from forebay.errors import UsageError
from forebay.pipeline.execute import SparkExecutor


def main(remote: str, store: str, folder: Path) -> None:
    spark = SparkSession.builder.remote(remote).getOrCreate()
    print("session", type(spark).__module__)

    orders = spark.read.format("forebay").option("subscribe", "orders").load(store)
    [row] = orders.agg(f.count("*"), f.sum("offset")).collect()
    print("batch", row[0], row[1])

    query = (
        spark.readStream.format("forebay")
        .option("subscribe", "orders")
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", "50")
        .load(store)
        .writeStream.format("parquet")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(folder / "rows"))
    )
    query.awaitTermination()
    [row] = spark.read.parquet(str(folder / "rows")).agg(f.count("*"), f.sum("offset")).collect()
    print("stream", row[0], row[1])

    some = orders.where("offset < 10").select("value")
    some.write.format("forebay").option("topic", "copies").mode("append").save(store)
    copies = spark.read.format("forebay").option("subscribe", "copies").load(store)
    print("written", copies.count())

    try:
        SparkExecutor(spark).run([[1]], abs, "a job")
    except UsageError as error:
        print("jobs", error)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
