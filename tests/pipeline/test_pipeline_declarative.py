"""Spark Declarative Pipelines: a streaming table over a topic, and a view over the table."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from forebay.topic.store import Store
from support.connect_fixtures import ConnectServer
from support.driver_processes import DriverProcess
from support.paths import ROOT
from support.scan_stores import settings_of
from support.spark_cluster import spark_home

PROJECT = ROOT / "examples" / "declarative"
QUERY = """
import json, sys
from pyspark.sql import SparkSession
spark = SparkSession.builder.remote(sys.argv[1]).getOrCreate()
rows = spark.table("pieces_by_item").orderBy("item").collect()
print("rows", json.dumps([row.asDict() for row in rows]))
print("offsets", json.dumps([row[0] for row in spark.table("orders").select("offset").collect()]))
spark.stop()
"""


def run(server: ConnectServer, project: Path, data: Path) -> None:
    done = subprocess.run(
        [spark_home() / "bin" / "spark-pipelines", "run", "--remote", server.remote],
        env={**server.environment, "FOREBAY_DATA": str(data), "SPARK_CONNECT_MODE": "1"},
        cwd=project,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def tables(server: ConnectServer, folder: Path) -> dict[str, Any]:
    program = folder / "query.py"
    program.write_text(QUERY)
    with DriverProcess([program, server.remote], server.environment) as client:
        lines = client.finish()
    said = dict(line.split(" ", 1) for line in lines if line.startswith(("rows ", "offsets ")))
    return {name: json.loads(text) for name, text in said.items()}


@pytest.mark.soak  # two runs of half a minute each
@pytest.mark.timeout(900)
def test_a_pipeline_takes_what_is_new_in_every_run(
    connect_server: ConnectServer, tmp_path: Path
) -> None:
    data, project = tmp_path / "data", tmp_path / "project"
    shutil.copytree(PROJECT, project)
    spec = project / "spark-pipeline.yml"
    document = yaml.safe_load(spec.read_text())
    document["storage"] = f"file://{tmp_path}/storage"
    spec.write_text(yaml.safe_dump(document))
    with Store(settings_of(data)) as store:
        topic = store.topic("orders")
        topic.append_many([b'{"item": "tea", "pieces": 2}', b'{"item": "milk", "pieces": 1}'])
        topic.flush()
        run(connect_server, project, data)
        assert tables(connect_server, tmp_path) == {
            "rows": [
                {"item": "milk", "pieces": 1, "orders": 1},
                {"item": "tea", "pieces": 2, "orders": 1},
            ],
            "offsets": [0, 1],
        }
        topic.rotate()
        topic.upload()
        topic.append(b'{"item": "tea", "pieces": 5}', durability="synced")
        run(connect_server, project, data)
        found = tables(connect_server, tmp_path)
    assert found["rows"] == [
        {"item": "milk", "pieces": 1, "orders": 1},
        {"item": "tea", "pieces": 7, "orders": 2},
    ]
    assert sorted(found["offsets"]) == [0, 1, 2]
