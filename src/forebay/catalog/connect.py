"""Opens the catalog that the settings name: `connect_kv` for any backend, `EtcdMetadata` for etcd.

gRPC is slow to import, so it is imported only for etcd.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from forebay.catalog.catalog import Catalog
from forebay.catalog.kv import Kv, ObservedKv
from forebay.catalog.sqlite import SqliteKv
from forebay.clock import SYSTEM_CLOCK, Clock
from forebay.settings import MetadataSettings

FILE_NAME = "catalog.db"


def connect_kv(settings: MetadataSettings, data: Path | None) -> Kv:
    """Returns the catalog that the settings name, measured by `ObservedKv`.

    SQLite's file is `settings.path`, or `catalog.db` in the directory `data`. Without either, the
    catalog is in memory.
    """
    if settings.backend == "sqlite":
        path = settings.path
        if path is None and data is not None:
            path = data / FILE_NAME
        return ObservedKv(SqliteKv(path, timeout_seconds=settings.timeout_seconds), "sqlite")
    from forebay.catalog.etcd import EtcdKv

    kv = EtcdKv(
        settings.endpoints,
        username=settings.username,
        password=settings.password,
        ca_file=_path(settings.ca_file),
        cert_file=_path(settings.cert_file),
        key_file=_path(settings.key_file),
        timeout_seconds=settings.timeout_seconds,
    )
    return ObservedKv(kv, "etcd")


def _path(setting: Path | str | None) -> Path | None:
    return None if setting is None else Path(setting)


class EtcdMetadata(Catalog):
    """A `Catalog` in the etcd cluster at `endpoints`, each `host:port`."""

    def __init__(
        self,
        endpoints: Sequence[str],
        root_prefix: str = "/forebay",
        *,
        settings: MetadataSettings | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`settings` provides user, certificates and timeouts; its endpoints are ignored."""
        if settings is None:
            settings = MetadataSettings(backend="etcd", endpoints=endpoints)
        else:
            settings = replace(settings, backend="etcd", endpoints=endpoints)
        super().__init__(connect_kv(settings, None), root_prefix, clock)
