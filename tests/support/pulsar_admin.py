"""The requests that Pulsar's admin client sends, and what it makes of the answers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from support.raw_http import AtUrl, Said, ask
from support.served import PATIENCE

_HEADERS = {"Accept": "application/json", "Content-Type": "application/json"}


class PulsarAdminError(Exception):
    """What the client raises: the status, and the reason that it shows."""

    def __init__(self, said: Said) -> None:
        self.status = said.status
        self.reason = said.json()["reason"]
        super().__init__(f"{self.reason} ({self.status})")


@dataclass(frozen=True)
class PulsarAdmin:
    """Sends each call as the Java client does: JSON, with an entity for each PUT and POST."""

    server: AtUrl
    headers: Mapping[str, str] = field(default_factory=dict)

    def call(self, method: str, path: str, *entity: Any) -> Any:
        """Returns the entity of the answer; None for 204, as the client does."""
        body = json.dumps(entity[0]).encode() if entity else None
        headers = {**_HEADERS, **self.headers}
        said = ask(self.server, method, f"/admin/v2/{path}", body, headers)
        if said.status >= 300:
            raise PulsarAdminError(said)
        if said.status == 204:
            assert said.body == b""
            return None
        assert said.headers["Content-Type"] == "application/json"
        return said.json()

    # ---- namespaces

    def set_offload_threshold(self, namespace: str, size: int, seconds: int | None = None) -> None:
        """`namespaces set-offload-threshold`: it sends the time in any case."""
        self.call("PUT", f"namespaces/{namespace}/offloadThreshold", size)
        seconds = -1 if seconds is None else seconds
        self.call("PUT", f"namespaces/{namespace}/offloadThresholdInSeconds", seconds)

    def get_offload_threshold(self, namespace: str) -> tuple[int, int]:
        size = self.call("GET", f"namespaces/{namespace}/offloadThreshold")
        return size, self.call("GET", f"namespaces/{namespace}/offloadThresholdInSeconds")

    def set_offload_deletion_lag(self, namespace: str, lag_ms: int) -> None:
        self.call("PUT", f"namespaces/{namespace}/offloadDeletionLagMs", lag_ms)

    def get_offload_deletion_lag(self, namespace: str) -> str:
        """What the command prints."""
        lag_ms = self.call("GET", f"namespaces/{namespace}/offloadDeletionLagMs")
        if lag_ms is None:
            return "Unset for namespace. Defaulting to broker setting."
        return f"{lag_ms // 60_000} minute(s)"

    def clear_offload_deletion_lag(self, namespace: str) -> None:
        self.call("DELETE", f"namespaces/{namespace}/offloadDeletionLagMs")

    def set_offload_policies(self, namespace: str, policies: Any) -> None:
        self.call("POST", f"namespaces/{namespace}/offloadPolicies", policies)

    def get_offload_policies(self, namespace: str) -> Any:
        return self.call("GET", f"namespaces/{namespace}/offloadPolicies")

    def remove_offload_policies(self, namespace: str) -> None:
        self.call("DELETE", f"namespaces/{namespace}/removeOffloadPolicies")

    # ---- topics

    def topic_policies(self, topic: str, *, applied: bool = False) -> Any:
        query = f"applied={str(applied).lower()}&isGlobal=false"
        return self.call("GET", f"persistent/{topic}/offloadPolicies?{query}")

    def set_topic_policies(self, topic: str, policies: Any) -> None:
        self.call("POST", f"persistent/{topic}/offloadPolicies?isGlobal=false", policies)

    def remove_topic_policies(self, topic: str) -> None:
        self.call("DELETE", f"persistent/{topic}/offloadPolicies?isGlobal=false")

    def internal_stats(self, topic: str) -> Any:
        return self.call("GET", f"persistent/{topic}/internalStats")

    def internal_info(self, topic: str) -> Any:
        return self.call("GET", f"persistent/{topic}/internal-info")

    def trigger_offload(self, topic: str, ledger: int, entry: int = 0) -> None:
        message = {"ledgerId": ledger, "entryId": entry, "partitionIndex": -1}
        self.call("PUT", f"persistent/{topic}/offload", message)

    def offload(self, topic: str, size_threshold: int) -> str:
        """`topics offload -s`: it finds the first ledger to keep itself."""
        stats = self.internal_stats(topic)
        ledgers = stats["ledgers"]
        if not ledgers:
            return "Topic doesn't have any data"
        ledgers[-1]["size"] = stats["currentLedgerSize"]
        suffix, previous = 0, ledgers[-1]["ledgerId"]
        for ledger in reversed(ledgers):
            suffix += ledger["size"]
            if suffix > size_threshold:
                self.trigger_offload(topic, previous)
                return f"Offload triggered for {topic} for messages before {previous}:0:-1"
            previous = ledger["ledgerId"]
        return "Nothing to offload"

    def offload_status(self, topic: str) -> Any:
        return self.call("GET", f"persistent/{topic}/offload")

    def wait_for_offload(self, topic: str) -> Any:
        """`topics offload-status -w`."""
        return until(lambda: self.offload_status(topic), lambda found: found["status"] != "RUNNING")

    def scan(self, namespace: str) -> Any:
        return self.call("GET", f"namespaces/{namespace}/scanOffloadedLedgers")


def until(ask_for: Callable[[], Any], is_over: Callable[[Any], bool]) -> Any:
    """Asks until the answer is that; as the client does, but more often."""
    deadline = time.monotonic() + PATIENCE
    while not is_over(found := ask_for()):
        assert time.monotonic() < deadline, found
        threading.Event().wait(0.02)
    return found


def policies(**changes: Any) -> dict[str, Any]:
    """What `set-offload-policies -d aws-s3 -r eu-west-1 -b ledgers` sends."""
    found = {
        "offloadersDirectory": "./offloaders",
        "managedLedgerOffloadDriver": "aws-s3",
        "managedLedgerOffloadMaxThreads": 2,
        "managedLedgerOffloadPrefetchRounds": 1,
        "managedLedgerOffloadedReadPriority": "TIERED_STORAGE_FIRST",
        "s3ManagedLedgerOffloadRegion": "eu-west-1",
        "s3ManagedLedgerOffloadBucket": "ledgers",
        "s3ManagedLedgerOffloadMaxBlockSizeInBytes": 67108864,
        "s3ManagedLedgerOffloadReadBufferSizeInBytes": 1048576,
        "s3ManagedLedgerOffloadRoleSessionName": "pulsar-s3-offload",
        "gcsManagedLedgerOffloadMaxBlockSizeInBytes": 67108864,
        "gcsManagedLedgerOffloadReadBufferSizeInBytes": 1048576,
        "managedLedgerOffloadBucket": "ledgers",
        "managedLedgerOffloadRegion": "eu-west-1",
        "managedLedgerOffloadMaxBlockSizeInBytes": 67108864,
        "managedLedgerOffloadReadBufferSizeInBytes": 1048576,
    }
    return {**found, **changes}


COMPUTED = {"s3Driver": True, "gcsDriver": False, "fileSystemDriver": False}
"""What the client's serializer adds to policies."""
