"""Buckets with the ledgers that a Pulsar cluster offloaded."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from forebay.format.names import ledger_name
from forebay.format.pulsar.index import LedgerIndex, encode_index
from forebay.format.pulsar.ledger_metadata import MANAGED_LEDGER, LedgerMetadata
from forebay.objects.store import CloudStore, connect
from forebay.settings import CloudSettings
from support.ledgers import packed

ORDERS: Final = "public/default/persistent/orders"
TOPIC: Final = "persistent://public/default/orders"


def at(path: Path) -> CloudStore:
    """The store of a directory."""
    path.mkdir(exist_ok=True)
    return connect(CloudSettings(backend="fs", root=str(path)))


def objects_of(
    entries: Iterable[bytes],
    *,
    managed_ledger: str | None = ORDERS,
    block_bytes: int = 4096,
    created_ms: int | None = None,
    custom: Sequence[tuple[str, bytes]] = (),
) -> tuple[bytes, bytes]:
    """The data object and the index object of a ledger."""
    data, packer = packed(entries, block_bytes)
    named = () if managed_ledger is None else ((MANAGED_LEDGER, managed_ledger.encode()),)
    metadata = LedgerMetadata(
        packer.entry_bytes,
        packer.entry_id - 1,
        created_ms=created_ms,
        custom=(*named, *custom),
    )
    index = LedgerIndex(len(data), metadata, tuple(packer.blocks))
    return data, encode_index(index)


def put_ledger(
    store: CloudStore,
    ledger_id: int,
    entries: Iterable[bytes],
    *,
    managed_ledger: str | None = ORDERS,
    block_bytes: int = 4096,
    created_ms: int | None = None,
    custom: Sequence[tuple[str, bytes]] = (),
    folder: str = "",
    uid: str | None = None,
) -> str:
    """Writes both objects as an offload does, the index last; returns the key of the first."""
    data, index = objects_of(
        entries,
        managed_ledger=managed_ledger,
        block_bytes=block_bytes,
        created_ms=created_ms,
        custom=custom,
    )
    name = ledger_name(uid or str(uuid.uuid4()), ledger_id)
    store.put_object(f"{folder}{name.data_name}", data)
    store.put_object(f"{folder}{name.index_name}", index)
    return f"{folder}{name.data_name}"
