"""How tests start JVMs, of which they need many that live for seconds.

Without the second compiler and with the plain collector the start of a Spark session takes 8
seconds of CPU time instead of 14. An archive of Spark's classes saves 3 more: `python -m
support.jvm FILE` makes it with a program that does what the tests do. A JVM ignores an archive that
does not fit it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ARCHIVE: Final = Path(sys.prefix) / "spark.jsa"
_SHORT_LIVED: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
LAUNCHER_OPTIONS: Final = _SHORT_LIVED
"""Of the JVM that only puts a command together."""
SPARK_OPTIONS: Final = (
    f"{_SHORT_LIVED} -XX:SharedArchiveFile={ARCHIVE} -Xlog:cds=off"
    if ARCHIVE.exists()
    else _SHORT_LIVED
)
"""Of a JVM of Spark: a driver, an executor, a master or a worker."""


def exercise(folder: Path) -> None:
    """Loads the classes: a job, a query, a stream and a write."""
    import forebay
    from forebay.pipeline import offload, spark_session
    from forebay.settings import SparkSettings

    data = folder / "data"
    with forebay.open(data) as store:
        store.topic("orders").append_many([b"%d" % number for number in range(100)])
    spark = spark_session(SparkSettings("local[2,4]", {"spark.sql.shuffle.partitions": "2"}))
    assert offload(data, spark=spark).ok
    rows = spark.read.format("forebay").option("subscribe", "orders").load(str(data))
    assert rows.groupBy("topic").count().collect()
    rows.select("value").write.format("forebay").mode("append").option("topic", "copy").save(
        str(data)
    )
    stream = spark.readStream.format("forebay").option("subscribe", "orders").load(str(data))
    query = (
        stream.writeStream.foreachBatch(lambda batch, _number: print(batch.count()))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


def make(archive: Path) -> None:
    """A JVM writes it when it ends; nothing is there if that fails."""
    draft = archive.with_name(f"{archive.name}.{os.getpid()}")
    flags = f"{_SHORT_LIVED} -XX:ArchiveClassesAtExit={draft} -Xlog:cds=off -Xlog:cds+dynamic=off"
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "support.jvm", "--exercise", folder],
            env={**os.environ, "SPARK_SUBMIT_OPTS": flags},
            capture_output=True,  # which ends when the JVM has ended, after Python
            check=True,
            timeout=900,
        )
    draft.replace(archive)


if __name__ == "__main__":
    if sys.argv[1] == "--exercise":
        exercise(Path(sys.argv[2]))
    else:
        make(Path(sys.argv[1]))
