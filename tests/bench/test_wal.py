"""`forebay bench wal` at a small size: what it measures, and that it leaves nothing."""

from __future__ import annotations

import json
import time
from pathlib import Path

from click.testing import CliRunner

from forebay.cli import main
from forebay.format.codec import COMPILED

ROWS = [
    "append buffered, 1 thread",
    "append buffered, 4 threads",
    "append synced, 1 thread",
    "append synced, 4 threads",
    "append_many synced",
    "live read to frames",
    "live read to messages",
    "replay to columns",
    "replay to messages",
]


def test_it_measures_every_row_for_every_size_and_leaves_nothing(tmp_path: Path) -> None:
    started = time.monotonic()
    options = ["--dir", str(tmp_path), "--rounds", "1", "--mib", "1", "--json"]
    shown = CliRunner().invoke(main, ["bench", "wal", *options])
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert 0 < found["seconds"] <= time.monotonic() - started + 1
    rows = {(row["name"], row["message_bytes"]): row for row in found["results"]}
    assert list(rows) == [(name, size) for size in (100, 1024, 16384) for name in ROWS]
    assert all(row["rate"] > 0 and row["limit"] > 0 for row in rows.values())
    goals = {key: row["goal"] for key, row in rows.items() if row["goal"] is not None}
    loop = {("append buffered, 1 thread", 100): 0.35} if COMPILED else {}
    assert goals == loop | {
        ("append synced, 4 threads", 100): 3.0,
        ("append_many synced", 1024): 0.6,
        ("replay to columns", 100): 0.25,
        ("replay to columns", 1024): 0.5,
    }
    assert list(tmp_path.iterdir()) == []
