"""`EtcdMetadata`: the catalog in etcd, by the name that the design documents give it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from forebay.catalog.catalog import Catalog
from forebay.catalog.connect import connect_kv
from forebay.clock import SYSTEM_CLOCK, Clock
from forebay.settings import MetadataSettings


class EtcdMetadata(Catalog):
    """Like `Catalog`, on the etcd at `endpoints` (`host:port`); see `MetadataSettings`."""

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
