"""Offloads as Pulsar's commands start and watch them, on a real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import ServiceRefused
from forebay.format.names import objects_prefix, parse_ledger, parse_topic
from forebay.objects.memory import MemoryBackend
from forebay.objects.store import CloudStore
from forebay.pulsar.managed_ledger import OFFLOADS
from forebay.settings import AdminSettings, StoreSettings, UploaderSettings
from forebay.testing.objects import FaultBackend, ObjectFault
from forebay.topic.store import Topic
from support.pulsar_admin import PulsarAdmin, PulsarAdminError, until
from support.raw_http import ask
from support.served import PATIENCE, Served, served

ORDERS = "public/default/orders"
NO_UPLOADS = UploaderSettings(enabled=False, format="pulsar", max_object_messages=10)
"""Ten messages are a segment of `filled`, so a ledger is one of these."""
EARLIEST = {"ledgerId": -1, "entryId": -1, "partitionIndex": -1}


@pytest.fixture
def objects() -> FaultBackend:
    return FaultBackend(MemoryBackend())


@pytest.fixture
def server(tmp_path: Path, objects: FaultBackend) -> Iterator[Served]:
    settings = StoreSettings(data=tmp_path, uploader=NO_UPLOADS)
    with served(settings, CloudStore(objects)) as found:
        yield found


@pytest.fixture
def admin(server: Served) -> PulsarAdmin:
    return PulsarAdmin(server)


def filled(server: Served, name: str = "orders", segments: int = 3) -> Topic:
    """A topic with so many sealed segments of ten messages, and two messages in the open one."""
    topic = server.store.topic(name)
    for segment in range(segments):
        topic.append_many([b"%d-%d" % (segment, at) for at in range(10)], durability="synced")
        topic.rotate()
    topic.append_many([b"open", b"too"], durability="synced")
    return topic


def ledger_files(server: Served, name: str = "orders") -> list[str]:
    topic = parse_topic(name)
    with server.store.view() as view:
        resources = view.resources()
        assert resources is not None
        keys = [each.key for each in resources.store.list(objects_prefix(topic))]
    return [key for key in keys if parse_ledger(key.rpartition("/")[2]) is not None]


# ---- what there is ----------------------------------------------------------------------------


def test_the_ledgers_of_a_topic_are_its_sealed_segments_and_an_open_one(
    server: Served, admin: PulsarAdmin
) -> None:
    filled(server)
    stats = admin.internal_stats(ORDERS)
    sizes = [each["size"] for each in stats["ledgers"]]
    ids = [each["ledgerId"] for each in stats["ledgers"]]
    assert [each["entries"] for each in stats["ledgers"]] == [10, 10, 10, 0]
    assert ids == sorted(set(ids))
    assert all(sizes[:3])
    assert sizes[3] == 0
    assert not any(each["offloaded"] or each["underReplicated"] for each in stats["ledgers"])
    assert (stats["currentLedgerEntries"], stats["numberOfEntries"]) == (2, 32)
    assert stats["totalSize"] == sum(sizes) + stats["currentLedgerSize"]
    assert stats["state"] == "LedgerOpened"
    assert stats["lastConfirmedEntry"] == f"{ids[3]}:1"
    assert stats["cursors"] == {}
    info = admin.internal_info(ORDERS)["ledgers"]
    assert [each["ledgerId"] for each in info] == ids
    assert all(each["timestamp"] > 1_600_000_000_000 for each in info[:3])
    assert info[3] == {
        "ledgerId": ids[3],
        "entries": 0,
        "size": 0,
        "timestamp": 0,
        "isOffloaded": False,
        "offloadedContextUuid": None,
    }


def test_asking_for_the_status_does_not_open_a_topic(tmp_path: Path) -> None:
    settings = StoreSettings(data=tmp_path, uploader=NO_UPLOADS)
    with served(settings) as server:
        filled(server)
    with served(settings) as server:
        assert PulsarAdmin(server).offload_status(ORDERS)["status"] == "NOT_RUN"
        assert server.store.opened("orders") is None
        assert len(PulsarAdmin(server).internal_stats(ORDERS)["ledgers"]) == 4
        assert server.store.opened("orders") is not None


def test_a_topic_without_messages_has_one_open_ledger(server: Served, admin: PulsarAdmin) -> None:
    server.store.topic("orders")
    stats = admin.internal_stats(ORDERS)
    assert [each["entries"] for each in stats["ledgers"]] == [0]
    assert admin.offload(ORDERS, 0) == "Nothing to offload"


# ---- an offload -------------------------------------------------------------------------------


def test_the_command_offloads_all_but_what_is_below_the_threshold(
    server: Served, admin: PulsarAdmin
) -> None:
    filled(server)
    stats = admin.internal_stats(ORDERS)
    keep = stats["currentLedgerSize"] + stats["ledgers"][2]["size"]
    successes = OFFLOADS.value("success")
    assert admin.offload_status(ORDERS) == {
        "status": "NOT_RUN",
        "lastError": "",
        "firstUnoffloadedMessage": EARLIEST,
    }
    ids = [each["ledgerId"] for each in stats["ledgers"]]
    assert admin.offload(ORDERS, keep).endswith(f"before {ids[2]}:0:-1")
    assert admin.wait_for_offload(ORDERS) == {
        "status": "SUCCESS",
        "lastError": "",
        "firstUnoffloadedMessage": {"ledgerId": ids[2], "entryId": 0, "partitionIndex": -1},
    }
    assert OFFLOADS.value("success") == successes + 1
    after = admin.internal_stats(ORDERS)["ledgers"]
    assert [each["ledgerId"] for each in after] == ids, "ids that were shown are kept"
    assert [each["offloaded"] for each in after] == [True, True, False, False]
    info = admin.internal_info(ORDERS)["ledgers"]
    assert [each["isOffloaded"] for each in info] == [True, True, False, False]
    uids = [each["offloadedContextUuid"] for each in info[:2]]
    named = {
        f"{uid}-ledger-{ledger}{ending}"
        for uid, ledger in zip(uids, ids[:2], strict=True)
        for ending in ("", "-index")
    }
    assert {key.rpartition("/")[2] for key in ledger_files(server)} == named


def test_with_nothing_to_keep_everything_closed_is_offloaded(
    server: Served, admin: PulsarAdmin
) -> None:
    topic = filled(server)
    admin.offload(ORDERS, 0)
    found = admin.wait_for_offload(ORDERS)
    assert found["status"] == "SUCCESS"
    ledgers = admin.internal_stats(ORDERS)["ledgers"]
    assert [each["offloaded"] for each in ledgers] == [True, True, True, False]
    assert found["firstUnoffloadedMessage"]["ledgerId"] == ledgers[3]["ledgerId"]
    assert [each.payload for each in topic.read(start=8, end=12)] == [
        b"0-8",
        b"0-9",
        b"1-0",
        b"1-1",
    ]
    assert admin.offload(ORDERS, 10**9) == "Nothing to offload"


def test_an_offload_that_has_nothing_to_do_is_a_success(server: Served, admin: PulsarAdmin) -> None:
    filled(server)
    first = admin.internal_stats(ORDERS)["ledgers"][0]["ledgerId"]
    admin.trigger_offload(ORDERS, first)
    found = admin.wait_for_offload(ORDERS)
    assert (found["status"], found["firstUnoffloadedMessage"]["ledgerId"]) == ("SUCCESS", first)
    assert ledger_files(server) == []


def test_an_offload_that_fails_says_why_and_can_be_repeated(
    server: Served, admin: PulsarAdmin, objects: FaultBackend
) -> None:
    filled(server)
    objects.inject(ObjectFault("any", ServiceRefused, key="-ledger-", times=None))
    admin.offload(ORDERS, 0)
    found = admin.wait_for_offload(ORDERS)
    assert found["status"] == "ERROR"
    assert found["lastError"]
    assert found["firstUnoffloadedMessage"] == EARLIEST
    objects.clear()
    admin.offload(ORDERS, 0)
    assert admin.wait_for_offload(ORDERS)["status"] == "SUCCESS"
    assert len(ledger_files(server)) == 6


def test_a_second_offload_of_the_same_topic_is_a_conflict(
    server: Served, admin: PulsarAdmin, objects: FaultBackend
) -> None:
    filled(server)
    filled(server, "other", 1)
    go_on = threading.Event()

    def hold(key: str) -> None:
        assert "-ledger-" not in key or go_on.wait(PATIENCE)

    objects.hook("open_writer", hold)
    objects.hook("put", hold)
    try:
        admin.offload(ORDERS, 0)
        with ThreadPoolExecutor(4) as threads:
            tries = [threads.submit(admin.offload, ORDERS, 0) for _ in range(4)]
        for each in tries:
            error = each.exception()
            assert isinstance(error, PulsarAdminError)
            assert error.status == 409
            assert "running" in error.reason
        assert admin.offload_status(ORDERS)["status"] == "RUNNING"
    finally:
        go_on.set()
    assert admin.wait_for_offload(ORDERS)["status"] == "SUCCESS"
    admin.offload("public/default/other", 0)
    assert admin.wait_for_offload("public/default/other")["status"] == "SUCCESS"


# ---- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "messageId is null"),
        (b"null", "messageId is null"),
        (b"{", "the body is not JSON"),
        (b"[]", "the body is a list"),
        (b'{"ledgerId":1}', "'entryId' is missing"),
        (b'{"ledgerId":"1","entryId":0}', "ledgerId is text"),
        (b'{"ledgerId":1.5,"entryId":0}', "ledgerId is a number"),
        (b'{"ledgerId":99999999999999999999,"entryId":0}', "ledgerId"),
        (b" " * 40_000, "larger than 32768 bytes"),
    ],
)
def test_a_body_that_is_no_message_id_is_a_bad_request(
    server: Served, body: bytes, reason: str
) -> None:
    filled(server)
    said = ask(server, "PUT", f"/admin/v2/persistent/{ORDERS}/offload", body)
    assert said.status == 400
    assert reason in said.json()["reason"]
    assert PulsarAdmin(server).offload_status(ORDERS)["status"] == "NOT_RUN"


@pytest.mark.parametrize("position", [(-1, -1), (2**63 - 1, 2**63 - 1), (0, 0), (12345, 0)])
def test_a_position_in_none_of_the_ledgers_is_refused(
    server: Served, admin: PulsarAdmin, position: tuple[int, int]
) -> None:
    filled(server)
    with pytest.raises(PulsarAdminError, match="invalid position") as caught:
        admin.trigger_offload(ORDERS, *position)
    assert caught.value.status == 412


def test_fields_of_a_message_id_that_are_not_known_are_ignored(
    server: Served, admin: PulsarAdmin
) -> None:
    filled(server)
    ledger = admin.internal_stats(ORDERS)["ledgers"][1]["ledgerId"]
    sent = {"ledgerId": ledger, "entryId": 0, "partitionIndex": -1, "batchIndex": 3}
    admin.call("PUT", f"persistent/{ORDERS}/offload", sent)
    assert admin.wait_for_offload(ORDERS)["status"] == "SUCCESS"


def test_a_topic_of_frames_offloads_nothing_until_its_format_is_changed(
    server: Served, admin: PulsarAdmin
) -> None:
    topic = filled(server)
    topic.configure(format="dnb1")
    ledgers = admin.internal_stats(ORDERS)["ledgers"]
    with pytest.raises(PulsarAdminError, match="does not support offload") as caught:
        admin.trigger_offload(ORDERS, ledgers[-1]["ledgerId"])
    assert caught.value.status == 412
    topic.configure(format="pulsar")
    admin.offload(ORDERS, 0)
    assert admin.wait_for_offload(ORDERS)["status"] == "SUCCESS"


@pytest.mark.parametrize("call", ["offload", "internalStats", "internal-info"])
def test_a_topic_that_is_not_there_is_not_created(
    server: Served, admin: PulsarAdmin, call: str
) -> None:
    for topic, status in (
        ("public/default/missing", 404),
        ("public/default/missing-partition-0", 404),
        ("acme/default/orders", 404),
        ("public/default/no.dots", 412),
    ):
        with pytest.raises(PulsarAdminError) as caught:
            admin.call("GET", f"persistent/{topic}/{call}")
        assert caught.value.status == status
    with pytest.raises(PulsarAdminError):
        admin.trigger_offload("public/default/missing", 1)
    assert server.store.topics() == []


def test_a_store_in_memory_offloads_nothing() -> None:
    with served(StoreSettings(data=None)) as server:
        filled(server)
        with pytest.raises(PulsarAdminError, match="store in memory") as caught:
            PulsarAdmin(server).internal_stats(ORDERS)
        assert caught.value.status == 400


def test_offloads_need_the_token(tmp_path: Path) -> None:
    settings = StoreSettings(
        data=tmp_path, uploader=NO_UPLOADS, admin=AdminSettings(token="letmein")
    )
    with served(settings) as server:
        filled(server)
        with pytest.raises(PulsarAdminError, match="requires a token"):
            PulsarAdmin(server).offload(ORDERS, 0)
        allowed = PulsarAdmin(server, {"Authorization": "Bearer letmein"})
        allowed.offload(ORDERS, 0)
        assert allowed.wait_for_offload(ORDERS)["status"] == "SUCCESS"


def test_partitions_are_offloaded_by_the_names_that_pulsar_gives_them(
    server: Served, admin: PulsarAdmin
) -> None:
    server.store.create("clicks", partitions=2)
    filled(server, "clicks-part-1", 1)
    admin.offload("public/default/clicks-partition-1", 0)
    found = admin.wait_for_offload("public/default/clicks-partition-1")
    assert found["status"] == "SUCCESS"
    assert len(ledger_files(server, "clicks-part-1")) == 2
    managed = {each["managedLedgerName"] for each in admin.scan("public/default")["objects"]}
    assert managed == {"public/default/persistent/clicks-partition-1"}


# ---- automatic --------------------------------------------------------------------------------


def test_a_namespaces_threshold_offloads_topics_by_itself(tmp_path: Path) -> None:
    uploader = replace(
        NO_UPLOADS, enabled=True, interval_seconds=0.05, offload_threshold_bytes=None
    )
    with served(StoreSettings(data=tmp_path, uploader=uploader)) as server:
        admin = PulsarAdmin(server)
        filled(server)
        filled(server, "/quiet/orders")
        stats = admin.internal_stats(ORDERS)
        sizes = [each["size"] for each in stats["ledgers"]]
        # Keeps the newest closed ledger; that of the one before crosses the threshold.
        admin.set_offload_threshold("public/default", sizes[2])

        def offloaded() -> Any:
            return [each["offloaded"] for each in admin.internal_stats(ORDERS)["ledgers"]]

        until(offloaded, lambda found: found[:2] == [True, True])
        assert offloaded() == [True, True, False, False]
        admin.set_offload_threshold("public/default", -2, 0)
        until(offloaded, lambda found: found == [True, True, True, False])
        assert admin.offload_status(ORDERS)["status"] == "NOT_RUN", "only what was asked for"
        assert ledger_files(server, "/quiet/orders") == []
        assert len(ledger_files(server)) == 6


def test_requests_while_the_background_offloads_end_in_the_same_ledgers(tmp_path: Path) -> None:
    uploader = replace(NO_UPLOADS, enabled=True, interval_seconds=0.02)
    with served(StoreSettings(data=tmp_path, uploader=uploader)) as server:
        admin = PulsarAdmin(server)
        topic = server.store.topic("orders")
        stop = threading.Event()
        refused: list[int] = []

        def asking() -> None:
            while not stop.is_set():
                try:
                    admin.offload(ORDERS, 0)
                except PulsarAdminError as error:
                    refused.append(error.status)

        with ThreadPoolExecutor(2) as threads:
            askers = [threads.submit(asking) for _ in range(2)]
            for number in range(20):
                topic.append(b"%d" % number, durability="synced")
                topic.rotate()
            until(
                lambda: [each["offloaded"] for each in admin.internal_stats(ORDERS)["ledgers"]],
                lambda found: all(found[:-1]),
            )
            stop.set()
            for each in askers:
                each.result()
        assert [each.payload for each in topic.read(start=0)] == [b"%d" % at for at in range(20)]
        # One that runs, or a position that was moved on from since the stats.
        assert set(refused) <= {409, 412}
        scanned = admin.scan("public/default")
        assert {each["status"] for each in scanned["objects"]} == {"OK"}
        assert scanned["total"] == len(ledger_files(server))
