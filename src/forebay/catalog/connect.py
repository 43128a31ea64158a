"""From settings to a catalog: `connect_kv` for any backend, and the seeds' `EtcdMetadata`.

gRPC is imported only where etcd is asked for: it is slow to import.
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
    """The catalog of the store in `data`; with neither that nor a path it is in memory."""
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
    """The `Catalog` in the etcd at `endpoints` (`host:port`), under the seeds' name."""

    def __init__(
        self,
        endpoints: Sequence[str],
        root_prefix: str = "/forebay",
        *,
        settings: MetadataSettings | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`settings` has the rest: user, certificates, timeouts."""
        if settings is None:
            settings = MetadataSettings(backend="etcd", endpoints=endpoints)
        else:
            settings = replace(settings, backend="etcd", endpoints=endpoints)
        super().__init__(connect_kv(settings, None), root_prefix, clock)
