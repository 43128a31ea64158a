"""`forebay bench broker` at a small size: what it measures, and that messages really move."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SMALL = "bench broker --rounds 1 --messages 64 --seconds 0.05 --json"
COMMAND = [sys.executable, "-m", "forebay", *SMALL.split()]


def test_it_measures_both_servers_and_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--dir", str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        timeout=110,
    )
    found = json.loads(done.stdout)
    rows = {row["name"]: row for row in found["results"]}
    assert set(rows) == {
        f"{what}, {stage}{more}"
        for stage in ("synced", "buffered")
        for what, more in (
            ("send", ", 1 in flight"),
            ("send", ", 8 in flight"),
            ("send", ", 64 in flight"),
            ("consume with ack", ""),
            ("ProduceStream", ""),
            ("FetchStream", ""),
        )
    }
    assert all(row["rate"] > 0 and row["limit"] > 0 for row in rows.values())
    goals = {name: row["goal"] for name, row in rows.items()}
    assert all(goal == (0.4 if "Stream" in name else 0.6) for name, goal in goals.items())
    delays = {row["name"]: row for row in found["delays"]}
    assert set(delays) == {"p50, synced", "p99, synced", "p50, buffered", "p99, buffered"}
    assert all(row["ms"] > 0 and row["bare_ms"] > 0 for row in delays.values())
    assert list(tmp_path.iterdir()) == []


def test_without_the_client_it_says_how_to_install_it(tmp_path: Path) -> None:
    hidden = "import sys; sys.modules['danube'] = None; from forebay.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", hidden, *SMALL.split(), "--dir", str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "pip install 'danube-client" in done.stderr
