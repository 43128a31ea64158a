"""A server in a process of its own, ledgers on a real S3 server, and what pulsar-admin sends."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from forebay.format.names import objects_prefix, parse_ledger, parse_topic
from forebay.format.pulsar.index import LedgerIndex, decode_index
from forebay.objects.store import CloudStore, connect
from forebay.settings import CloudSettings
from support.pulsar_admin import PulsarAdmin, PulsarAdminError, until
from support.s3_server import S3Server
from support.server_processes import ServerProcess

pytestmark = [pytest.mark.long, pytest.mark.kill, pytest.mark.timeout(300)]

NAMESPACE = "public/default"
ORDERS = f"{NAMESPACE}/orders"


@dataclass(frozen=True)
class At:
    url: str


def configuration(folder: Path, cloud: CloudSettings) -> Path:
    """Nothing is offloaded by itself; a segment is a ledger."""
    path = folder / "forebay.yml"
    settings = {
        "data": str(folder / "data"),
        "storage": {
            "wal": {"rotate_max_bytes": "16KiB"},
            "uploader": {
                "format": "pulsar",
                "interval_seconds": 0.1,
                "max_object_bytes": "16KiB",
                "offload_threshold_bytes": None,
            },
            "cloud": {"backend": "s3", "root": cloud.root, "options": dict(cloud.options)},
        },
    }
    path.write_text(json.dumps(settings))  # JSON is YAML
    return path


def indexes(store: CloudStore) -> dict[int, LedgerIndex]:
    """The index objects in the bucket, by ledger."""
    found = {}
    for each in store.list(objects_prefix(parse_topic("orders"))):
        name = parse_ledger(each.key.rpartition("/")[2])
        if name is not None and name.is_index:
            metadata = store.head(each.key).metadata
            assert metadata["s3managedledgeroffloaderformatversion"] == "1"
            found[name.ledger_id] = decode_index(bytes(store.get_object(each.key, 2**20)))
    return found


def test_pulsars_commands_offload_a_topic_of_a_server_that_is_killed(
    tmp_path: Path, s3: S3Server
) -> None:
    cloud = s3.settings()
    path = configuration(tmp_path, cloud)
    sent = [f"message {number:05} {'x' * 80}" for number in range(2000)]
    with closing(connect(cloud)) as store:
        with ServerProcess("serve", path, tmp_path / "first.log") as server:
            server.wait_ready()
            admin = PulsarAdmin(At(server.where["url"]))
            server.produce("orders", sent[:1000])
            ledgers = admin.internal_stats(ORDERS)["ledgers"]
            assert len(ledgers) > 4
            keep = sum(each["size"] for each in ledgers[-2:])
            keep += admin.internal_stats(ORDERS)["currentLedgerSize"]
            assert admin.offload(ORDERS, keep).startswith("Offload triggered")
            done = admin.wait_for_offload(ORDERS)
            assert done["status"] == "SUCCESS", done
            first = done["firstUnoffloadedMessage"]["ledgerId"]
            stored = indexes(store)
            assert sorted(stored) == [
                each["ledgerId"] for each in ledgers if each["ledgerId"] < first
            ]
            for each in ledgers[: len(stored)]:
                index = stored[each["ledgerId"]]
                assert index.last_entry_id + 1 == each["entries"]
                assert index.metadata.managed_ledger == "public/default/persistent/orders"
            # From now on the namespace's threshold offloads by itself, in the background.
            admin.set_offload_threshold(NAMESPACE, 0)
            server.produce("orders", sent[1000:])
            all_closed_offloaded(admin)
            before = admin.internal_info(ORDERS)["ledgers"]
            server.kill()

        with ServerProcess("serve", path, tmp_path / "second.log") as server:
            server.wait_ready()
            admin = PulsarAdmin(At(server.where["url"]))
            assert admin.offload_status(ORDERS)["status"] == "NOT_RUN"
            assert admin.get_offload_threshold(NAMESPACE) == (0, -1)
            after = all_closed_offloaded(admin)
            known = {each["ledgerId"]: each for each in after}
            for each in before[:-1]:
                assert (
                    known[each["ledgerId"]]["offloadedContextUuid"]
                    == (each["offloadedContextUuid"])
                )
            scanned = admin.scan(NAMESPACE)
            assert {each["status"] for each in scanned["objects"]} == {"OK"}
            assert scanned["total"] == 2 * len(indexes(store))
            assert [each["payload"] for each in server.consume("orders")] == sent
            with pytest.raises(PulsarAdminError, match="invalid position"):
                admin.trigger_offload(ORDERS, 1)


def all_closed_offloaded(admin: PulsarAdmin) -> list[Any]:
    until(
        lambda: [each["offloaded"] for each in admin.internal_stats(ORDERS)["ledgers"]],
        lambda found: len(found) > 1 and all(found[:-1]),
    )
    found: list[Any] = admin.internal_info(ORDERS)["ledgers"]
    return found
