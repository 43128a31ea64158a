"""A server of Spark Connect for the suites whose clients have no JVM of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from forebay.pipeline.session import OPTIONS
from support.s3_server import free_ports
from support.spark_cluster import end_session, spark_environment, spark_home

START_SECONDS_MAX: Final = 400.0


@dataclass(frozen=True)
class ConnectServer:
    """`remote` is for a client's `SparkSession.builder.remote`."""

    remote: str
    environment: dict[str, str]


@pytest.fixture(scope="session")
def connect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConnectServer]:
    """Running; its settings are those of a session of ours, given to the server at its start."""
    pytest.importorskip("pyspark")
    place = tmp_path_factory.mktemp("connect")
    [port] = free_ports(1)
    options = {
        **OPTIONS,
        "spark.driver.host": "127.0.0.1",
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(place / "warehouse"),
        "spark.local.dir": str(place / "local"),
    }
    command = [str(spark_home() / "bin" / "spark-submit"), "--master", "local[2,4]"]
    for name, value in options.items():
        command += ["--conf", f"{name}={value}"]
    command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    environment = {**os.environ, **spark_environment(), "SPARK_CONNECT_MODE": "0"}
    with (place / "server.out").open("wb") as output:
        process = subprocess.Popen(
            [*command, "spark-internal"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=place,
            start_new_session=True,
        )
    try:
        _wait(process, port, place / "server.out")
        yield ConnectServer(f"sc://127.0.0.1:{port}", environment)
    finally:
        end_session(process)


def _wait(process: subprocess.Popen[bytes], port: int, output: Path) -> None:
    deadline = time.monotonic() + START_SECONDS_MAX
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            said = output.read_text(errors="replace")[-3000:]
            assert process.poll() is None, f"the server ended: {said}"
            assert time.monotonic() < deadline, f"the server is not ready: {said}"
            time.sleep(0.1)
        else:
            return
