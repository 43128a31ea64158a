"""The scan of offloaded ledgers: what each object is said to be, and that the answer is JSON."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.catalog.kv import Put
from forebay.errors import ServiceRefused
from forebay.format.names import object_key, objects_prefix, parse_ledger, parse_topic
from forebay.objects.memory import MemoryBackend
from forebay.objects.store import CloudStore
from forebay.settings import StoreSettings, UploaderSettings
from forebay.testing.objects import FaultBackend, ObjectFault
from support.pulsar_admin import PulsarAdmin, PulsarAdminError, until
from support.raw_http import ask, plain_socket
from support.served import Served, served

NAMESPACE = "public/default"
ORDERS = parse_topic("orders")
PATH = f"/admin/v2/namespaces/{NAMESPACE}/scanOffloadedLedgers"
OTHER = "00000000-0000-4000-8000-000000000000"


@pytest.fixture
def objects() -> FaultBackend:
    return FaultBackend(MemoryBackend())


@pytest.fixture
def server(tmp_path: Path, objects: FaultBackend) -> Iterator[Served]:
    uploader = UploaderSettings(enabled=False, format="pulsar")
    with served(StoreSettings(data=tmp_path, uploader=uploader), CloudStore(objects)) as found:
        yield found


@pytest.fixture
def admin(server: Served) -> PulsarAdmin:
    return PulsarAdmin(server)


def offloaded(server: Served, name: str = "orders", ledgers: int = 1) -> None:
    topic = server.store.topic(name)
    for number in range(ledgers):
        topic.append_many([b"%d" % number, b"x"], durability="synced")
        topic.upload()


def by_name(answer: Any) -> dict[str, str]:
    return {each["name"]: each["status"] for each in answer["objects"]}


def test_what_the_catalog_knows_is_ok_data_and_index_alike(
    server: Served, admin: PulsarAdmin, objects: FaultBackend
) -> None:
    offloaded(server, ledgers=2)
    offloaded(server, "/other/orders")
    found = admin.scan(NAMESPACE)
    assert (found["total"], found["errors"], found["unknown"]) == (4, 0, 0)
    assert "error" not in found
    keys = {
        key.key.rpartition("/")[2]
        for key in objects.list(objects_prefix(ORDERS))
        if parse_ledger(key.key.rpartition("/")[2])
    }
    assert by_name(found) == dict.fromkeys(keys, "OK")
    for each in found["objects"]:
        name = parse_ledger(each["name"])
        assert name is not None
        assert (each["ledger"], each["uuid"]) == (name.ledger_id, name.uid)
        assert (each["numEntries"], each["offloaded"]) == (2, True)
        assert each["managedLedgerName"] == "public/default/persistent/orders"
        assert each["size"] > 0
        assert each["lastModified"] > 0
        assert each["uri"].endswith(each["name"])


def test_a_namespace_without_ledgers_gives_an_empty_list(
    server: Served, admin: PulsarAdmin
) -> None:
    expected = {"objects": [], "total": 0, "errors": 0, "unknown": 0}
    assert admin.scan(NAMESPACE) == expected
    server.store.topic("orders").configure(format="dnb1")
    offloaded(server)
    assert admin.scan(NAMESPACE) == expected


def test_what_the_catalog_does_not_know_is_told_apart(
    server: Served, admin: PulsarAdmin, objects: FaultBackend
) -> None:
    offloaded(server)
    ledger = admin.scan(NAMESPACE)["objects"][0]["ledger"]
    made = {
        object_key(ORDERS, f"{OTHER}-ledger-{ledger}"): "BAD-UUID",
        object_key(ORDERS, f"{OTHER}-ledger-{ledger}-index"): "BAD-UUID",
        object_key(ORDERS, f"{OTHER}-ledger-77"): "NOT-FOUND",
        object_key(parse_topic("gone"), f"{OTHER}-ledger-78"): "NOT-FOUND",
        f"storage/topics/default/{OTHER}-ledger-79": "UNKNOWN",
    }
    for key in made:
        objects.put_object(key, b"x")
    objects.put_object(object_key(ORDERS, "a-ledger-5"), b"x")
    found = admin.scan(NAMESPACE)
    names = by_name(found)
    assert {key: names[key.rpartition("/")[2]] for key in made} == made
    assert (found["total"], found["errors"], found["unknown"]) == (7, 4, 1)
    others = [each for each in found["objects"] if each["status"] in {"NOT-FOUND", "UNKNOWN"}]
    assert not any("offloaded" in each or "numEntries" in each for each in others)


def test_what_an_offload_has_written_so_far_is_not_offloaded(
    server: Served, admin: PulsarAdmin, objects: FaultBackend
) -> None:
    topic = server.store.topic("orders")
    topic.append(b"one", durability="synced")
    scans: list[Any] = []

    def scan(key: str) -> None:
        if key.endswith("-index"):
            scans.append(admin.scan(NAMESPACE))

    objects.hook("put", scan)
    topic.upload()
    (found,) = scans
    assert list(by_name(found).values()) == ["NOT-OFFLOADED"]
    assert found["objects"][0]["offloaded"] is False
    assert (found["total"], found["errors"], found["unknown"]) == (1, 1, 0)
    assert set(by_name(admin.scan(NAMESPACE)).values()) == {"OK"}


def test_thousands_of_objects_are_one_json_value(
    server: Served, admin: PulsarAdmin, objects: FaultBackend
) -> None:
    for number in range(1234):
        objects.put_object(object_key(ORDERS, f"{OTHER}-ledger-{number}"), b"x")
    said = ask(server, "GET", PATH)
    assert said.headers["Content-Type"] == "application/json"
    assert said.headers["Transfer-Encoding"] == "chunked"
    found = json.loads(said.body)
    assert [each["ledger"] for each in found["objects"]] == sorted(
        range(1234), key=lambda number: f"{number}"
    )
    assert found["total"] == found["errors"] == 1234


def test_a_bucket_that_does_not_answer_is_an_error_with_a_status(
    server: Served, admin: PulsarAdmin, objects: FaultBackend
) -> None:
    offloaded(server)
    objects.inject(ObjectFault("list", ServiceRefused, times=None))
    with pytest.raises(PulsarAdminError, match="a planned fault of list") as caught:
        admin.scan(NAMESPACE)
    assert caught.value.status == 502


def test_a_catalog_that_fails_on_the_way_ends_the_list_with_an_error_and_it_is_still_json(
    server: Served, admin: PulsarAdmin, objects: FaultBackend
) -> None:
    for number in range(250):
        objects.put_object(object_key(parse_topic("a"), f"{OTHER}-ledger-{number}"), b"x")
    objects.put_object(object_key(parse_topic("b"), f"{OTHER}-ledger-1"), b"x")
    catalog = server.store.catalog
    assert catalog is not None
    key = catalog.keys.ledger_attempt(parse_topic("b"), 0)
    catalog.kv.commit([], [Put(key, b"damaged")])
    found = admin.scan(NAMESPACE)
    assert found["total"] == len(found["objects"]) == 250
    assert found["error"]["kind"] == "DescriptorError"
    assert key in found["error"]["message"]


def test_a_scan_of_another_tenant_or_of_a_store_in_memory_is_refused(admin: PulsarAdmin) -> None:
    with pytest.raises(PulsarAdminError) as caught:
        admin.scan("acme/default")
    assert caught.value.status == 404
    with (
        served(StoreSettings(data=None)) as server,
        pytest.raises(PulsarAdminError, match="store in memory"),
    ):
        PulsarAdmin(server).scan(NAMESPACE)


def test_a_client_that_goes_away_ends_its_scan_and_others_are_refused_meanwhile(
    server: Served, admin: PulsarAdmin, objects: FaultBackend
) -> None:
    for number in range(30_000):
        objects.put_object(object_key(ORDERS, f"{OTHER}-ledger-{number}"), b"x")
    waiting = []
    try:
        for _ in range(4):
            waiting.append(plain_socket(server))
            # A small window: the server cannot send all of it before it is read.
            waiting[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            waiting[-1].sendall(f"GET {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            assert waiting[-1].recv(15) == b"HTTP/1.1 200 OK"
        with pytest.raises(PulsarAdminError, match="4 scans are running") as caught:
            admin.scan(NAMESPACE)
        assert caught.value.status == 503
    finally:
        for each in waiting:
            each.close()

    def found() -> int:
        said = ask(server, "GET", PATH)
        return said.status if said.status != 200 else int(said.json()["total"])

    until(found, lambda total: total == 30_000)


def test_a_head_of_the_scan_lists_nothing(server: Served, objects: FaultBackend) -> None:
    before = objects.calls("list")
    said = ask(server, "HEAD", PATH)
    assert (said.status, said.body, objects.calls("list")) == (200, b"", before)
