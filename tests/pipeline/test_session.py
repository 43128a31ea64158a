"""What a session is made with, and who gets to see it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.pipeline.session import public_options
from support.spark_fixtures import LOCAL

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SECRET = "spark.hadoop.test.secret.key"


def test_secret_options_are_in_no_arguments_and_in_the_session(spark: SparkSession) -> None:
    value = LOCAL.options[SECRET]
    seen = b"".join(arguments_and_environment(pid) for pid in below(os.getpid()))
    assert b"spark.sql.shuffle.partitions=2" in seen, "the JVM was looked at"
    assert value.encode() not in seen
    assert spark.sparkContext.getConf().get(SECRET) == value


def test_options_are_secret_by_their_names() -> None:
    options = {
        "spark.hadoop.fs.s3a.secret.key": "a",
        "spark.hadoop.fs.azure.account.key.store.dfs.core.windows.net": "b",
        "spark.ssl.keyPassword": "c",
        "spark.driver.memory": "1g",
        "spark.jars": "d",
    }
    assert set(public_options(options)) == {"spark.driver.memory", "spark.jars"}


def below(pid: int) -> list[int]:
    """The processes that a process started, and those that they did."""
    found = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *below(child)]
    return found


def arguments_and_environment(pid: int) -> bytes:
    with suppress(OSError):
        folder = Path(f"/proc/{pid}")
        return (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
    return b""
