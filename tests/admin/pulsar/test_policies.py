"""Offload policies as Pulsar's commands set and get them, on a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from forebay.config.offload_policies import (
    BLOCK_BYTES,
    DELETION_LAG,
    THRESHOLD_BYTES,
    THRESHOLD_SECONDS,
)
from forebay.limits import GIB, MIB
from forebay.settings import AdminSettings, StoreSettings, UploaderSettings
from forebay.topic.store import Topic
from support.pulsar_admin import COMPUTED, PulsarAdmin, PulsarAdminError, policies
from support.raw_http import ask
from support.served import Served, served

NAMESPACE = "public/default"
ORDERS = f"{NAMESPACE}/orders"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    off = UploaderSettings(enabled=False)
    with served(StoreSettings(data=tmp_path, uploader=off)) as found:
        found.store.topic("orders").append(b"one", durability="synced")
        yield found


@pytest.fixture
def admin(server: Served) -> PulsarAdmin:
    return PulsarAdmin(server)


def setting(topic: Topic, key: str) -> tuple[Any, str]:
    return next((each.value, each.source) for each in topic.settings() if each.key == key)


# ---- thresholds and lag of a namespace --------------------------------------------------------


def test_thresholds_are_set_and_read_as_the_commands_do(admin: PulsarAdmin) -> None:
    assert admin.get_offload_threshold(NAMESPACE) == (-1, -1)
    admin.set_offload_threshold(NAMESPACE, 10 * MIB, 3 * 3600)
    assert admin.get_offload_threshold(NAMESPACE) == (10 * MIB, 3 * 3600)
    admin.set_offload_threshold(NAMESPACE, 0)
    assert admin.get_offload_threshold(NAMESPACE) == (0, -1)
    admin.set_offload_threshold(NAMESPACE, -5)
    assert admin.get_offload_threshold(NAMESPACE) == (-5, -1)


def test_a_deletion_lag_is_set_shown_and_cleared(admin: PulsarAdmin) -> None:
    assert admin.get_offload_deletion_lag(NAMESPACE).startswith("Unset for namespace.")
    admin.set_offload_deletion_lag(NAMESPACE, 4 * 3_600_000)
    assert admin.get_offload_deletion_lag(NAMESPACE) == "240 minute(s)"
    admin.clear_offload_deletion_lag(NAMESPACE)
    assert admin.get_offload_deletion_lag(NAMESPACE).startswith("Unset for namespace.")
    admin.clear_offload_deletion_lag(NAMESPACE)


def test_what_a_namespace_sets_is_in_effect_for_its_topics_at_once(
    server: Served, admin: PulsarAdmin
) -> None:
    orders, other = server.store.topic("orders"), server.store.topic("/other/orders")
    admin.set_offload_threshold(NAMESPACE, 10 * MIB, 60)
    admin.set_offload_deletion_lag(NAMESPACE, -1)
    in_effect = orders.in_effect
    assert in_effect is not None
    assert in_effect.uploader.offload_threshold_bytes == 10 * MIB
    assert in_effect.uploader.offload_threshold_seconds == 60
    assert in_effect.deleter.deletion_lag_minutes is None
    assert setting(orders, "deletion_lag_minutes") == (None, "namespace")
    assert setting(other, "deletion_lag_minutes") == (240, "default")


def test_minus_one_leaves_a_threshold_to_the_store_and_less_switches_it_off(
    server: Served, admin: PulsarAdmin
) -> None:
    orders = server.store.topic("orders")
    admin.set_offload_threshold(NAMESPACE, -1)
    assert setting(orders, "offload_threshold_bytes") == (0, "default")
    admin.set_offload_threshold(NAMESPACE, -2)
    assert setting(orders, "offload_threshold_bytes") == (None, "namespace")


@pytest.mark.parametrize("path", ["offloadThreshold", "offloadDeletionLagMs"])
@pytest.mark.parametrize("body", [b"", b"ten", b'"10"', b"1.5", b"[]", b"null", b"1" * 30, b"\xff"])
def test_what_is_no_number_is_a_bad_request(server: Served, path: str, body: bytes) -> None:
    said = ask(server, "PUT", f"/admin/v2/namespaces/{NAMESPACE}/{path}", body)
    assert said.status == 400
    assert "the body" in said.json()["reason"]
    assert PulsarAdmin(server).get_offload_policies(NAMESPACE) is None


def test_a_threshold_that_retention_would_reach_first_is_refused(admin: PulsarAdmin) -> None:
    with pytest.raises(PulsarAdminError, match="lower than retention_size_mb") as caught:
        admin.set_offload_threshold(NAMESPACE, 10 * GIB)
    assert caught.value.status == 412
    admin.set_offload_threshold(NAMESPACE, 10 * GIB - 1)
    with pytest.raises(PulsarAdminError, match="lower than retention_time_minutes"):
        admin.call("PUT", f"namespaces/{NAMESPACE}/offloadThresholdInSeconds", 86_400)
    assert admin.get_offload_threshold(NAMESPACE) == (10 * GIB - 1, -1)


def test_a_lag_beyond_ten_years_is_refused(admin: PulsarAdmin) -> None:
    with pytest.raises(PulsarAdminError, match=DELETION_LAG) as caught:
        admin.set_offload_deletion_lag(NAMESPACE, 2**62)
    assert caught.value.status == 412


# ---- policies of a namespace ------------------------------------------------------------------


def test_policies_are_set_shown_and_removed(admin: PulsarAdmin) -> None:
    assert admin.get_offload_policies(NAMESPACE) is None
    sent = policies(**{THRESHOLD_BYTES: 10 * MIB, THRESHOLD_SECONDS: 600, DELETION_LAG: 60_000})
    admin.set_offload_policies(NAMESPACE, {**sent, **COMPUTED})
    assert admin.get_offload_policies(NAMESPACE) == sent
    assert admin.get_offload_threshold(NAMESPACE) == (10 * MIB, 600)
    admin.remove_offload_policies(NAMESPACE)
    assert admin.get_offload_policies(NAMESPACE) is None
    assert admin.get_offload_threshold(NAMESPACE) == (-1, -1)
    admin.remove_offload_policies(NAMESPACE)


def test_policies_without_a_threshold_keep_the_one_that_was_set(admin: PulsarAdmin) -> None:
    admin.set_offload_threshold(NAMESPACE, 5)
    admin.set_offload_deletion_lag(NAMESPACE, 7)
    admin.set_offload_policies(NAMESPACE, policies())
    found = admin.get_offload_policies(NAMESPACE)
    assert (found[THRESHOLD_BYTES], found[DELETION_LAG]) == (5, 7)
    other = policies(managedLedgerOffloadBucket="other")
    del other["s3ManagedLedgerOffloadRegion"]
    admin.set_offload_policies(NAMESPACE, other)
    found = admin.get_offload_policies(NAMESPACE)
    assert found["managedLedgerOffloadBucket"] == "other"
    assert "s3ManagedLedgerOffloadRegion" not in found


REFUSED = [
    (None, "OffloadPolicies is empty"),
    ({}, "is not supported; it must be one of S3, aws-s3"),
    (policies(managedLedgerOffloadDriver="tape"), "'tape', which is not supported"),
    ({"managedLedgerOffloadDriver": "aws-s3"}, "the bucket must be given"),
    (policies(s3ManagedLedgerOffloadCredentialId="AKIA"), "policies cannot have credentials"),
    (policies(s3ManagedLedgerOffloadCredentialSecret="hunter2"), "policies cannot have"),
    (policies(managedLedgerOffloadMaxBlockSizeInBytes=1), "5242880 to"),
    ([1], "must be a JSON object"),
]


@pytest.mark.parametrize(("body", "reason"), REFUSED)
def test_policies_that_pulsar_refuses_are_refused(
    admin: PulsarAdmin, body: Any, reason: str
) -> None:
    for path in (f"namespaces/{NAMESPACE}", f"persistent/{ORDERS}"):
        with pytest.raises(PulsarAdminError) as caught:
            admin.call("POST", f"{path}/offloadPolicies", body)
        assert caught.value.status == 412
        assert reason in caught.value.reason
        assert "hunter2" not in caught.value.reason
    assert admin.get_offload_policies(NAMESPACE) is None
    assert admin.topic_policies(ORDERS) is None


def test_no_body_and_no_json_are_told_apart(server: Served) -> None:
    path = f"/admin/v2/namespaces/{NAMESPACE}/offloadPolicies"
    assert ask(server, "POST", path).status == 412
    for body in (b"{", b"\xff", b"[" * 20_000, b'{"a":"' + b"x" * 40_000 + b'"}'):
        said = ask(server, "POST", path, body)
        assert said.status == 400
        assert said.json()["reason"] == said.json()["error"]["message"]


# ---- policies of a topic ----------------------------------------------------------------------


def test_a_topics_policies_are_settings_of_its_own(server: Served, admin: PulsarAdmin) -> None:
    orders = server.store.topic("orders")
    assert admin.topic_policies(ORDERS) is None
    sent = policies(**{THRESHOLD_BYTES: 7, DELETION_LAG: 90_000, BLOCK_BYTES: 8 * MIB})
    admin.set_topic_policies(ORDERS, {**sent, **COMPUTED})
    assert admin.topic_policies(ORDERS) == sent
    assert setting(orders, "offload_threshold_bytes") == (7, "topic")
    assert setting(orders, "deletion_lag_minutes") == (1.5, "topic")
    assert setting(orders, "ledger_block_bytes") == (8 * MIB, "topic")
    in_effect = orders.in_effect
    assert in_effect is not None
    assert in_effect.deleter.deletion_lag_minutes == 1.5
    orders.configure(deletion_lag_minutes=2, max_open_seconds=5)
    assert admin.topic_policies(ORDERS)[DELETION_LAG] == 120_000
    admin.remove_topic_policies(ORDERS)
    assert admin.topic_policies(ORDERS) is None
    assert setting(orders, "deletion_lag_minutes") == (240, "default")
    assert setting(orders, "max_open_seconds") == (5, "topic")


def test_what_applies_to_a_topic_is_its_own_then_its_namespaces_then_the_stores(
    admin: PulsarAdmin,
) -> None:
    assert admin.topic_policies(ORDERS, applied=True) == {
        "managedLedgerOffloadDriver": "filesystem",
        THRESHOLD_BYTES: 0,
        THRESHOLD_SECONDS: -2,
        DELETION_LAG: 14_400_000,
        BLOCK_BYTES: 64 * MIB,
    }
    admin.set_offload_threshold(NAMESPACE, 100, 60)
    admin.set_topic_policies(ORDERS, policies(**{THRESHOLD_BYTES: 7}))
    found = admin.topic_policies(ORDERS, applied=True)
    assert (found[THRESHOLD_BYTES], found[THRESHOLD_SECONDS]) == (7, 60)
    assert found[DELETION_LAG] == 14_400_000
    assert found["managedLedgerOffloadDriver"] == "aws-s3"


def test_a_partition_has_the_name_that_pulsar_gives_it(server: Served, admin: PulsarAdmin) -> None:
    server.store.create("clicks", partitions=2)
    admin.set_topic_policies(f"{NAMESPACE}/clicks-partition-1", policies(**{THRESHOLD_BYTES: 9}))
    assert setting(server.store.topic("clicks-part-1"), "offload_threshold_bytes")[0] == 9
    assert setting(server.store.topic("clicks-part-0"), "offload_threshold_bytes")[0] == 0


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("namespaces/acme/default/offloadThreshold", 404),
        ("namespaces/public/no.dots/offloadThreshold", 412),
        ("persistent/acme/default/orders/offloadPolicies", 404),
        ("persistent/public/default/no.dots/offloadPolicies", 412),
        ("persistent/public/default/missing/offloadPolicies", 404),
        ("persistent/public/default/missing-partition-1/offloadPolicies", 404),
        ("non-persistent/public/default/orders/offloadPolicies", 404),
        ("namespaces/public/default/retention", 404),
    ],
)
def test_a_path_that_names_nothing_is_answered_in_pulsars_form(
    admin: PulsarAdmin, path: str, status: int
) -> None:
    with pytest.raises(PulsarAdminError) as caught:
        admin.call("GET", path)
    assert caught.value.status == status
    assert caught.value.reason


def test_policies_of_a_missing_topic_create_nothing(server: Served, admin: PulsarAdmin) -> None:
    with pytest.raises(PulsarAdminError) as caught:
        admin.set_topic_policies(f"{NAMESPACE}/missing", policies())
    assert caught.value.status == 404
    assert server.store.topics() == ["/default/orders"]


def test_another_method_is_refused_in_pulsars_form(server: Served) -> None:
    said = ask(server, "PATCH", f"/admin/v2/namespaces/{NAMESPACE}/offloadThreshold", b"1")
    assert said.status == 405
    assert "does not allow PATCH" in said.json()["reason"]


def test_a_store_in_memory_has_no_policies() -> None:
    with served(StoreSettings(data=None)) as server:
        server.store.topic("orders")
        with pytest.raises(PulsarAdminError, match="a store in memory has no offload policies"):
            PulsarAdmin(server).get_offload_policies(NAMESPACE)


def test_policies_survive_a_restart(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        PulsarAdmin(server).set_offload_policies(NAMESPACE, policies())
    with served(tmp_path) as server:
        assert PulsarAdmin(server).get_offload_policies(NAMESPACE) == policies()


def test_changes_at_the_same_time_lose_nothing(admin: PulsarAdmin) -> None:
    def change(number: int) -> None:
        if number % 2:
            admin.set_offload_deletion_lag(NAMESPACE, number)
        else:
            admin.call("PUT", f"namespaces/{NAMESPACE}/offloadThreshold", number)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(change, range(2, 26)))
    found = admin.get_offload_policies(NAMESPACE)
    assert found[DELETION_LAG] % 2 == 1
    assert found[THRESHOLD_BYTES] % 2 == 0


# ---- who may ----------------------------------------------------------------------------------


def test_policies_need_the_token_and_tell_so_in_pulsars_form(tmp_path: Path) -> None:
    token = AdminSettings(token="letmein")
    with served(StoreSettings(data=tmp_path, admin=token)) as server:
        server.store.topic("orders")
        for method, path in (
            ("GET", f"namespaces/{NAMESPACE}/offloadPolicies"),
            ("PUT", f"namespaces/{NAMESPACE}/offloadThreshold"),
            ("DELETE", f"persistent/{ORDERS}/offloadPolicies"),
        ):
            with pytest.raises(PulsarAdminError, match="requires a token") as caught:
                PulsarAdmin(server).call(method, path, 1)
            assert caught.value.status == 401
        # Pulsar's plugin for tokens sends the same header.
        allowed = PulsarAdmin(server, {"Authorization": "Bearer letmein"})
        assert allowed.get_offload_policies(NAMESPACE) is None


def test_pages_of_other_sites_change_no_policies(server: Served) -> None:
    path = f"/admin/v2/namespaces/{NAMESPACE}/offloadThreshold"
    said = ask(server, "PUT", path, b"5", {"Origin": "http://evil.example"})
    assert said.status == 403
    assert said.json()["reason"] == "pages of other sites may not send requests to this server"
    said = ask(server, "PUT", path, b"5", {"Content-Encoding": "gzip"})
    assert (said.status, "Accept-Encoding" in said.headers) == (415, True)


def test_nothing_of_a_secret_is_in_the_catalog_after_a_refusal(
    server: Served, admin: PulsarAdmin
) -> None:
    secret = policies(s3ManagedLedgerOffloadCredentialSecret="hunter2")
    with pytest.raises(PulsarAdminError):
        admin.set_offload_policies(NAMESPACE, secret)
    catalog = server.store.catalog
    assert catalog is not None
    rows = catalog.kv.range("", "\U0010ffff", limit=1000)
    assert rows
    assert not any(b"hunter2" in each.value for each in rows)
    assert "hunter2" not in json.dumps(admin.topic_policies(ORDERS, applied=True))
