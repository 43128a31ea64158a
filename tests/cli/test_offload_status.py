"""`forebay offload-status`, beside a server and without one; `describe` shows ledgers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from forebay.errors import ServiceRefused
from forebay.format.names import parse_ledger
from forebay.objects.memory import MemoryBackend
from forebay.objects.store import CloudStore
from forebay.settings import StoreSettings, UploaderSettings
from forebay.testing.objects import FaultBackend, ObjectFault
from forebay.topic.store import Store
from support.cli_runs import done, facts
from support.pulsar_admin import PulsarAdmin
from support.served import PATIENCE, Served, served

ORDERS = "public/default/orders"
LEDGERS = UploaderSettings(enabled=False, format="pulsar", max_object_messages=10)


def fill(store: Store) -> None:
    topic = store.topic("orders")
    for _ in range(2):
        topic.append_many([b"x"] * 10, durability="synced")
        topic.rotate()
    topic.append(b"open", durability="synced")


@pytest.fixture
def objects() -> FaultBackend:
    return FaultBackend(MemoryBackend())


@pytest.fixture
def server(tmp_path: Path, objects: FaultBackend) -> Iterator[Served]:
    settings = StoreSettings(data=tmp_path / "data", uploader=LEDGERS)
    with served(settings, CloudStore(objects)) as found:
        fill(found.store)
        yield found


def test_before_an_offload_it_says_that_none_was_asked_for(server: Served) -> None:
    words = done("offload-status", "orders", "--url", server.url)
    assert words == (
        "/default/orders: no offload was asked for since the server opened the topic\n"
        "  ledgers that are offloaded: 0 of 3, the open one included\n"
        "  next offset to upload: 0\n"
    )


def test_after_a_success_it_says_what_is_offloaded(server: Served) -> None:
    admin = PulsarAdmin(server)
    ids = [each["ledgerId"] for each in admin.internal_stats(ORDERS)["ledgers"]]
    admin.trigger_offload(ORDERS, ids[1])
    found = facts("offload-status", "orders", "--wait", "--url", server.url)
    assert found == {
        "topic": "/default/orders",
        "status": "SUCCESS",
        "last_error": None,
        "first_unoffloaded": [ids[1], 0],
        "ledgers": 3,
        "offloaded": 1,
        "uploaded": 10,
    }
    words = done("offload-status", "orders", "--url", server.url)
    assert "the last offload was a success" in words
    assert f"it offloaded everything before {ids[1]}:0" in words


def test_a_failure_is_named_and_ends_with_one(server: Served, objects: FaultBackend) -> None:
    objects.inject(ObjectFault("any", ServiceRefused, key="-ledger-", times=None))
    PulsarAdmin(server).offload(ORDERS, 0)
    words = done("offload-status", "orders", "--wait", "--url", server.url, code=1)
    assert "the last offload failed: memory://: a planned fault of" in words
    found = facts("offload-status", "orders", "--url", server.url, code=1)
    assert (found["status"], found["offloaded"]) == ("ERROR", 0)


def test_without_waiting_a_running_offload_is_shown(server: Served, objects: FaultBackend) -> None:
    go_on = Event()

    def hold(key: str) -> None:
        assert "-ledger-" not in key or go_on.wait(PATIENCE)

    objects.hook("open_writer", hold)
    objects.hook("put", hold)
    try:
        PulsarAdmin(server).offload(ORDERS, 0)
        words = done("offload-status", "orders", "--url", server.url)
        assert "an offload is running" in words
    finally:
        go_on.set()
    found = facts("offload-status", "orders", "--wait", "--url", server.url)
    assert (found["status"], found["offloaded"]) == ("SUCCESS", 2)


def test_without_a_server_the_catalog_says_what_is_offloaded(tmp_path: Path) -> None:
    with Store(StoreSettings(data=tmp_path, uploader=LEDGERS)) as store:
        fill(store)
        store.topic("orders").upload()
    found = facts("offload-status", "orders", "--data", tmp_path)
    assert found == {
        "topic": "/default/orders",
        "status": None,
        "last_error": None,
        "first_unoffloaded": None,
        "ledgers": None,
        "offloaded": 3,
        "uploaded": 21,
    }
    words = done("offload-status", "orders", "--data", tmp_path)
    assert "no server runs on the store" in words


def test_describe_shows_ledgers_with_their_ids_and_entries(tmp_path: Path) -> None:
    with Store(StoreSettings(data=tmp_path, uploader=LEDGERS)) as store:
        fill(store)
        first, *_ = store.topic("orders").upload()
    name = parse_ledger(first.object_id)
    assert name is not None
    words = done("describe", "orders", "--data", tmp_path)
    assert f"(ledger {name.ledger_id}, 10 entries)" in words
    assert facts("describe", "orders", "--data", tmp_path)["objects"][0]["ledger_id"] == (
        name.ledger_id
    )


def test_the_threshold_and_the_format_of_a_topic_are_settings(tmp_path: Path) -> None:
    with Store(StoreSettings(data=tmp_path)) as store:
        store.topic("orders")
    words = done(
        "topics", "configure", "orders", "format=pulsar", "offload_threshold_bytes=10MiB",
        "offload_threshold_seconds=3h", "--data", tmp_path,
    )  # fmt: skip
    for line in ("offload_threshold_bytes", "10MiB", "3h", "this topic"):
        assert line in words
