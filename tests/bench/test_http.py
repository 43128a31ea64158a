"""`forebay bench http` at a small size: what it measures, and that messages really move."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.bench.http import Connection, bare_server, lines_of, our_server, post
from forebay.bench.measure import in_threads
from forebay.errors import ServiceError

SMALL = "bench http --rounds 1 --requests 8 --follow-seconds 0.1 --json"
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
    assert {name: row["goal"] for name, row in rows.items()} == {
        "POST 256 messages, synced": 0.3,
        "POST 256 messages, buffered": None,
    }
    assert all(row["rate"] > 0 and row["limit"] > 0 for row in rows.values())
    follow = found["follow"]
    assert (follow["rate"], follow["messages"]) == (1000, 100)
    assert 0 < follow["p50_ms"] <= follow["p99_ms"] <= follow["max_ms"]
    assert list(tmp_path.iterdir()) == []


def test_both_servers_read_the_same_requests(tmp_path: Path) -> None:
    body = lines_of(5, 100)
    assert len(body.splitlines()) == 5
    with our_server(tmp_path) as ours, bare_server() as bare:
        for port, key, expected in ((ours, "count", 5), (bare, "bytes", len(body))):
            connection = Connection(port)
            try:
                assert json.loads(connection.ask(post(body)))[key] == expected
                with pytest.raises(ServiceError, match="404"):
                    connection.ask(post(body, "/nothing"))
            finally:
                connection.close()


def test_what_fails_in_a_thread_is_no_measurement() -> None:
    def fail(number: int) -> None:
        if number == 2:
            raise ServiceError("broken")

    with pytest.raises(ServiceError, match="broken"):
        in_threads(4, fail)
    nowhere = our_server(Path("/proc/no"))
    with pytest.raises(ServiceError, match="ended before it listened"), nowhere:
        pass
