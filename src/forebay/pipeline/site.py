"""Where a store is, in words that hold in every process of a Spark application.

Executors have other working directories than the driver, so every path is made absolute before
settings travel. A store in memory is refused: no other process could see it. Where a server runs on
the data directory, the settings say so: it owns the topics, and executors that cannot see the
directory go through it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from forebay.config import settings_from
from forebay.errors import UsageError
from forebay.remote import find_server
from forebay.settings import StoreSettings


def site_settings(source: str | Path | StoreSettings) -> StoreSettings:
    """The settings of a store, from a data directory, a configuration file, or settings."""
    settings = settings_from(source)
    if settings.data is None:
        raise UsageError("a store in memory is its own process's alone: Spark needs a directory")
    cloud, metadata = settings.cloud, settings.metadata
    if cloud.backend == "memory":
        raise UsageError("objects in memory are their own process's alone: Spark needs a store")
    if cloud.backend == "fs" and cloud.root is not None and "://" not in cloud.root:
        cloud = replace(cloud, root=str(Path(cloud.root).absolute()))
    if metadata.path is not None:
        metadata = replace(metadata, path=Path(metadata.path).absolute())
    wal_root = settings.wal_root
    return replace(
        settings,
        data=Path(settings.data).absolute(),
        wal_root=None if wal_root is None else Path(wal_root).absolute(),
        cloud=cloud,
        metadata=metadata,
        server=find_server(settings),
    )
