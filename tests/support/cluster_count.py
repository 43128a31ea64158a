"""A job of four tasks on a cluster: says which workers ran what, and waits to be let go on.

Arguments: the master and a folder. Every task leaves a mark there, with the number of its worker's
session, and ends when there is a file `go`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path

from forebay.pipeline.execute import SparkExecutor
from forebay.pipeline.session import slots, spark_session
from forebay.settings import SparkSettings

TASKS = 4


def counted(folder: Path, first: int) -> tuple[int, int]:
    """The worker, and a sum that is right when nothing was left out."""
    worker = os.getsid(0)
    (folder / f"task-{first}-{worker}").touch()
    deadline = time.monotonic() + 400
    while not (folder / "go").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return worker, sum(range(first, first + 1000))


def main(settings: SparkSettings, folder: Path) -> None:
    spark = spark_session(settings)
    tasks = [[number * 1000] for number in range(TASKS)]
    done = SparkExecutor(spark).run(tasks, partial(counted, folder), "count")
    print("slots", slots(spark))
    print("found", json.dumps([each.result for task in done for each in task]))
    spark.stop()


if __name__ == "__main__":
    main(SparkSettings(sys.argv[1], json.loads(sys.argv[3])), Path(sys.argv[2]))
