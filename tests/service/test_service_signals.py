"""How a server ends: by one signal cleanly, by a second one at once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import forebay
from forebay.client.http import topic_path
from forebay.format.names import parse_topic
from support.server_processes import ServerProcess

TOPIC = "/default/orders"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_with_everything_synced(tmp_path: Path, number: signal.Signals) -> None:
    with ServerProcess("serve", tmp_path / "data", tmp_path / "log") as server:
        server.client.request(
            "POST",
            topic_path(parse_topic(TOPIC), "messages"),
            query={"durability": "buffered"},
            body=b"x",
        ).read()
        assert server.stop(number) == 0, server.said
    assert not (tmp_path / "data" / "server.json").exists()
    with forebay.open(tmp_path / "data") as store:
        assert [message.payload for message in store.topic(TOPIC).read()] == [b"x"]


def test_streams_end_when_it_stops(tmp_path: Path) -> None:
    with ServerProcess("serve", tmp_path / "data", tmp_path / "log") as server:
        server.produce(TOPIC, ["a"])
        with server.new_client() as client:
            path = topic_path(parse_topic(TOPIC), "messages")
            lines = client.lines(path, {"start": "earliest", "follow": "true"})
            assert b'"a"' in next(lines)
            assert server.stop() == 0, server.said
            list(lines)


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with ServerProcess("serve", tmp_path / "data", tmp_path / "log") as server:
        server.wait_ready()
        os.kill(server.pid, signal.SIGSTOP)  # so that both are there when it looks
        os.kill(server.pid, signal.SIGINT)
        os.kill(server.pid, signal.SIGTERM)
        os.kill(server.pid, signal.SIGCONT)
        assert server.wait() in {128 + signal.SIGINT, 128 + signal.SIGTERM}


def test_a_server_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    ignoring = ("sh", "-c", "trap '' HUP && exec \"$@\"", "sh")
    with ServerProcess("serve", tmp_path / "data", tmp_path / "log", ignoring) as server:
        server.wait_ready()
        os.kill(server.pid, signal.SIGHUP)
        assert ignores(server.pid, signal.SIGHUP)
        server.produce(TOPIC, ["a"])
        assert server.stop() == 0, server.said


def ignores(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    [mask] = [line.split()[1] for line in status.splitlines() if line.startswith("SigIgn")]
    return bool(int(mask, 16) >> (number - 1) & 1)
