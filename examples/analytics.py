"""One DataFrame over a topic's whole history and its live tail.

    python examples/analytics.py

Orders are appended in two halves. The first half is offloaded to objects, and its segments are
deleted. The second half is only in the local log. Spark reads both as one table.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import forebay
from forebay.pipeline import offload, spark_session
from forebay.settings import DeleterSettings, StoreSettings

ORDERS = 20_000


def order(number: int) -> bytes:
    return json.dumps({"id": number, "country": "ABCD"[number % 4], "cents": number % 997}).encode()


def main(data: Path) -> dict[str, tuple[int, int]]:
    """Returns the number of orders and the turnover in cents, by country."""
    from pyspark.sql import functions as f

    spark = spark_session()
    settings = StoreSettings(
        data=data, deleter=DeleterSettings(retention_size_mb=0, deletion_lag_minutes=0)
    )
    with forebay.open(settings) as store:
        topic = store.topic("orders")
        topic.append_many([order(number) for number in range(ORDERS // 2)])
        topic.rotate()
        offload(settings, spark=spark)
        topic.trim_local()
        topic.append_many([order(number) for number in range(ORDERS // 2, ORDERS)])
        topic.flush()

        table = (
            spark.read.format("forebay")
            .option("path", str(data))
            .option("subscribe", "orders")
            .option("columns", "offset,value")
            .load()
        )
        parsed = table.select(
            f.from_json(f.col("value").cast("string"), "id long, country string, cents long").alias(
                "o"
            )
        )
        found = parsed.groupBy("o.country").agg(
            f.count("*").alias("n"), f.sum("o.cents").alias("s")
        )
        result = {row["country"]: (row["n"], row["s"]) for row in found.collect()}
    for country, (count, cents) in sorted(result.items()):
        print(f"{country}: {count} orders, {cents / 100:.2f}")
    return result


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(Path(directory) / "data")
