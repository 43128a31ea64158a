"""`forebay consume --subscription` prints each message once, and acknowledges it afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.settings import StoreSettings, UploaderSettings
from forebay.topic.store import Store
from support.cli_runs import done, facts, refused
from support.served import served
from support.server_processes import PATIENCE, ServerProcess


def fill(data: Path, count: int = 10) -> None:
    settings = StoreSettings(data=data, uploader=UploaderSettings(enabled=False))
    with Store(settings) as store:
        topic = store.topic("orders")
        topic.append_many(
            [b"%d" % each for each in range(count)],
            routing_keys=["even" if each % 2 == 0 else "odd" for each in range(count)],
            durability="synced",
        )


def consume(*args: str | Path, data: Path) -> str:
    return done("consume", "orders", "--subscription", "billing", *args, "--data", data)


def test_without_a_server_a_subscription_goes_on_where_it_was(tmp_path: Path) -> None:
    fill(tmp_path)
    done("subscriptions", "create", "orders", "billing", "--earliest", "--data", tmp_path)
    assert consume("--limit", "4", data=tmp_path) == "0\n1\n2\n3\n"
    assert facts("subscriptions", "list", "orders", "--data", tmp_path)["position"] == 4
    line = json.loads(consume("--limit", "1", "--json", data=tmp_path))
    assert (line["offset"], line["payload"], line["routing_key"]) == (4, "4", "even")
    assert consume("--limit", "1", "--format", "%o:%v;", data=tmp_path) == "5:5;"


def test_only_messages_with_a_matching_key_are_printed(tmp_path: Path) -> None:
    fill(tmp_path)
    done(
        *("subscriptions", "create", "orders", "billing", "--type", "key-shared", "--earliest"),
        *("--data", str(tmp_path)),
    )
    said = consume("--filter", "o*", "--limit", "5", data=tmp_path)
    assert said == "1\n3\n5\n7\n9\n"
    shown = facts("subscriptions", "list", "orders", "--data", tmp_path)
    assert (shown["type"], shown["position"], shown["lag"]) == ("key-shared", 0, 5)


def test_a_type_that_differs_changes_a_subscription_that_nobody_uses(tmp_path: Path) -> None:
    fill(tmp_path)
    done("subscriptions", "create", "orders", "billing", "--earliest", "--data", tmp_path)
    assert consume("--limit", "1", "--type", "failover", data=tmp_path) == "0\n"
    shown = facts("subscriptions", "list", "orders", "--data", tmp_path)
    assert (shown["type"], shown["position"]) == ("failover", 1)


def test_a_server_without_a_broker_is_refused(tmp_path: Path) -> None:
    settings = StoreSettings(data=tmp_path, uploader=UploaderSettings(enabled=False))
    with served(settings) as server:
        server.store.topic("orders").append(b"x", durability="synced")
        said = refused("consume", "orders", "--subscription", "s", "--url", server.url)
    assert "runs no broker" in said


@pytest.mark.long
def test_a_server_delivers_and_an_interrupt_loses_nothing(tmp_path: Path) -> None:
    data = tmp_path / "data"
    fill(data)
    with ServerProcess("serve", data, tmp_path / "log") as server:
        done("subscriptions", "create", "orders", "billing", "--earliest", "--data", data)
        assert consume("--limit", "4", data=data) == "0\n1\n2\n3\n"
        command = [sys.executable, "-m", "forebay", "consume", "orders", "--data", str(data)]
        command += ["--subscription", "billing", "--consumer", "till-1"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
            assert running.stdout is not None
            assert [running.stdout.readline() for _ in range(6)] == [
                b"%d\n" % n for n in range(4, 10)
            ]
            shown = facts("subscriptions", "list", "orders", "--data", data)
            assert [each["name"] for each in shown["connected"]] == ["till-1"]
            os.kill(running.pid, signal.SIGINT)
            assert running.wait(PATIENCE) == 130
        shown = facts("subscriptions", "list", "orders", "--data", data)
        assert (shown["position"], shown["lag"], shown["live"]) == (10, 0, True)
        server.stop()
    assert facts("subscriptions", "list", "orders", "--data", data)["position"] == 10
