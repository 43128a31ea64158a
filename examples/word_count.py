"""A streaming word count that writes from one topic to another, exactly once.

    python examples/word_count.py

The query reads lines and appends the words of each line to a second topic. It stops, more lines
are appended, and the next run continues from the checkpoint. No word is missing or repeated.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import forebay
from forebay.pipeline import spark_session

LINES = ["the log is the table", "the table is the log", "a log of words"]


def run_query(data: Path, checkpoint: Path) -> None:
    """Processes everything that is there, and stops."""
    from pyspark.sql import functions as f

    lines = (
        spark_session()
        .readStream.format("forebay")
        .option("path", str(data))
        .option("subscribe", "lines")
        .option("startingOffsets", "earliest")
        .option("columns", "value")
        .load()
    )
    words = lines.select(f.explode(f.split(f.col("value").cast("string"), " ")).alias("value"))
    query = (
        words.writeStream.format("forebay")
        .option("path", str(data))
        .option("topic", "words")
        .option("sinkId", "word-count")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def main(data: Path) -> dict[str, int]:
    """Returns how often each word occurs."""
    checkpoint = data.parent / "checkpoint"
    for round_ in range(2):
        with forebay.open(data) as store:
            store.topic("lines").append_many([line.encode() for line in LINES])
        run_query(data, checkpoint)
        with forebay.open(data) as store:
            counts = Counter(message.payload.decode() for message in store.topic("words").read(0))
        print(f"after round {round_ + 1}: {dict(counts.most_common(3))}")
    return dict(counts)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(Path(directory) / "data")
