"""One Spark session for all suites of a test process: a JVM takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from forebay.settings import SparkSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL = SparkSettings(
    master="local[2,4]",
    options={
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.streaming.metricsEnabled": "false",
        "spark.hadoop.test.secret.key": "not for everyone",
    },
)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session in local mode, which tries a failed task again."""
    pytest.importorskip("pyspark")
    from forebay.pipeline.session import spark_session

    place = tmp_path_factory.mktemp("spark")
    options = {
        **LOCAL.options,
        "spark.sql.warehouse.dir": str(place / "warehouse"),
        "spark.local.dir": str(place / "local"),
    }
    session = spark_session(SparkSettings(LOCAL.master, options), app_name="tests")
    yield session
    session.stop()
