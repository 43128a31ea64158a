"""`forebay bench pulsar` at a small size: what it measures, and that the bytes really move."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forebay.bench.pulsar import (
    BenchLedger,
    opened,
    read_entries,
    read_whole,
    store_ledger,
    write_plain,
)
from forebay.objects.store import connect
from forebay.pulsar.read_handle import ReadSettings
from forebay.settings import CloudSettings, StoreSettings
from support.s3_server import S3Server

ROWS = {
    "offload a ledger, {}": 0.7,
    "read a ledger, {}": 0.7,
    "read a ledger, an object for each entry, {}": None,
    "8 readers without read-ahead, {} + 30 ms": 4.0,
    "8 readers with read-ahead, {} + 30 ms": None,
}


@pytest.fixture
def local(tmp_path: Path) -> StoreSettings:
    return StoreSettings(data=None, cloud=CloudSettings(root=str(tmp_path / "objects")))


@pytest.mark.long
def test_all_rows_are_measured_on_both_stores(tmp_path: Path, s3: S3Server) -> None:
    config = tmp_path / "forebay.yml"
    cloud = s3.settings()
    configured = {"backend": "s3", "root": cloud.root, "options": dict(cloud.options)}
    config.write_text(json.dumps({"storage": {"cloud": configured}}))
    command = [sys.executable, "-m", "forebay", "bench", "pulsar", "--dir", str(tmp_path / "b")]
    done = subprocess.run(
        [*command, "--mib", "2", "--rounds", "1", "--json", "--config", str(config)],
        check=True,
        capture_output=True,
        text=True,
        timeout=110,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    local_goals = dict.fromkeys(ROWS) | {"8 readers without read-ahead, {} + 30 ms": 4.0}
    wanted = {row.format("local disk"): goal for row, goal in local_goals.items()}
    wanted |= {row.format("S3"): goal for row, goal in ROWS.items()}
    wanted["spark.read of a ledger"] = 0.5
    assert {row["name"]: row["goal"] for row in found["results"]} == wanted
    assert all(row["rate"] > 0 and row["limit"] > 0 for row in found["results"])
    store = connect(cloud)
    try:
        assert list(store.list("")) == []
    finally:
        store.close()


def test_readers_find_every_byte_of_the_ledger(local: StoreSettings, tmp_path: Path) -> None:
    ledger = BenchLedger(2, 1000)
    stored = store_ledger(local, ledger)
    assert stored.data_bytes > 2_000_000
    for settings in (ReadSettings(), ReadSettings(read_ahead_chunks=0)):
        with opened(local, stored, 0.001, settings) as handle:
            read_whole(handle)
            read_entries(handle)
            assert handle.length == ledger.length
    write_plain(local, stored, tmp_path / "plain")
    assert (tmp_path / "plain").stat().st_size == stored.data_bytes


def test_a_ledger_that_says_another_length_is_noticed(local: StoreSettings) -> None:
    stored = store_ledger(local, BenchLedger(1, 1000))
    with opened(local, stored, 0, ReadSettings()) as handle:
        longer = replace(handle.metadata, length=handle.length + 1)
        handle.index = replace(handle.index, metadata=longer)
        with pytest.raises(AssertionError, match="every entry"):
            read_whole(handle)
