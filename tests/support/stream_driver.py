"""A streaming query in a process of its own: all that there is, so many messages a batch.

Arguments: the store, a folder for checkpoint and results, the messages of a batch, and where to
stand still, as in `writing 3` (before the file of batch 3 has its name) or `written 3` (after
that, and before Spark knows); any other word to go through to the end.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from forebay.pipeline.session import spark_session
from forebay.settings import SparkSettings
from support.stream_sinks import to_files


def main(store: str, folder: Path, rows: str, what: str, number: int) -> None:
    options = {"spark.sql.shuffle.partitions": "2", "spark.driver.memory": "512m"}
    spark = spark_session(SparkSettings("local[2,4]", options))

    def said(now: str, batch: int) -> None:
        print(now, batch, flush=True)
        if (now, batch) == (what, number):
            threading.Event().wait()

    query = (
        spark.readStream.format("forebay")
        .option("subscribePattern", ".*")
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", rows)
        .load(store)
        .writeStream.foreachBatch(to_files(folder / "results", said))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
