"""What a session is made with, and who gets to see it."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
import pytest

from forebay.pipeline.session import public_options, spark_home_without_zip
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


def test_python_processes_of_spark_import_the_installed_package(spark: SparkSession) -> None:
    """Not the zip file of its source, which each of them would have to compile."""
    # Functions of the library: a worker cannot import this module.
    names = spark.sparkContext.parallelize(["pyspark"], 1)
    found = names.map(find_spec).map(attrgetter("origin")).collect()
    assert found == [pyspark.__file__]
    assert "SPARK_HOME" not in os.environ


def test_a_spark_home_is_linked_as_often_as_it_is_asked_for(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    home = spark_home_without_zip(environment)
    assert spark_home_without_zip(environment) == home
    assert (home / "bin" / "spark-submit").is_file()
    assert any((home / "jars").glob("spark-core*.jar"))
    assert not (home / "python").exists()


def test_a_user_without_a_home_has_no_spark_home_of_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """An OSError, for which a session starts with the whole SPARK_HOME."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(OSError, match="XDG_CACHE_HOME"):
        spark_home_without_zip({})


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
