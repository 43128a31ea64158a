"""A client of Spark Connect, which has no JVM and no Spark context, reads and writes by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.topic.store import Store
from support.connect_fixtures import ConnectServer
from support.driver_processes import DriverProcess
from support.paths import SUPPORT
from support.scan_stores import fill_both_tiers, settings_of


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_client_of_spark_connect_reads_streams_and_writes(
    connect_server: ConnectServer, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    with Store(settings_of(data)) as store:
        fill_both_tiers(store.topic("orders"))
    arguments = [
        str(SUPPORT / "connect_driver.py"),
        connect_server.remote,
        str(data),
        str(tmp_path),
    ]
    with DriverProcess(arguments, connect_server.environment) as client:
        lines = client.finish()
    said = dict(line.split(" ", 1) for line in lines if " " in line)
    assert said["session"] == "pyspark.sql.connect.session"
    assert said["batch"] == said["stream"] == f"120 {sum(range(120))}"
    assert said["written"] == "10"
    assert "classic Spark session" in said["jobs"]
