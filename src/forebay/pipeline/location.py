"""Where a store is: settings that are valid in every process of a job, and Spark's options for it.

| option            | what it is                                                              |
|-------------------|-------------------------------------------------------------------------|
| `path`            | a data directory or a configuration file; also the argument of `load`   |
| `catalog`         | a SQLite file, `sqlite:PATH`, or `etcd://host:port,host2:port/prefix`   |
| `catalog.<name>`  | username, password, ca_file, cert_file, key_file of etcd                |
| `store`           | a directory, or `s3://`, `gs://`, `azure://` with bucket and prefix     |
| `store.<name>`    | an option of the store, such as `store.endpoint`                        |

With `catalog` and `store` there is no local log, so messages that are not uploaded yet are not
seen. Put secrets into the environment of the executors. A secret that is given as an option works,
and appears in no error message of ours.

The sink also takes `server`, the URL of a running server that owns the topics. It is given alone,
with `path`, whose configuration describes the store, or with a `store` that is not a directory. The
server's token comes from the configuration, or from FOREBAY_TOKEN of the driver. It is never an
option, because Spark shows options in query plans.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from forebay.client.address import find_server, known_token
from forebay.client.http import ServerClient
from forebay.config import settings_from
from forebay.errors import UsageError
from forebay.settings import CloudSettings, MetadataSettings, ServerAddress, StoreSettings

ADDRESS_NAMES: Final = ("path", "catalog", "store")
SERVER: Final = "server"
"""The option of the sink that names a running server."""
_HEALTH_SECONDS: Final = 10.0

NO_DATA: Final = Path(os.devnull)
"""Stands for the data directory of a store that is given by `catalog` and `store`."""

_ETCD: Final = frozenset({"username", "password", "ca_file", "cert_file", "key_file"})
_BACKENDS: Final = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "azure": "azure",
    "az": "azure",
    "abfs": "azure",
    "abfss": "azure",
}
_CANONICAL: Final = {"s3": "s3", "gcs": "gs", "azure": "azure"}


def job_settings(source: str | Path | StoreSettings) -> StoreSettings:
    """The settings of a store, valid in every process of a job.

    `source` is a data directory, a configuration file, or settings. All paths in the result are
    absolute, as executors have other working directories than the driver. If a server runs on the
    data directory, the result names it: it owns the topics, and executors that cannot see the
    directory read through it. UsageError for a store in memory, which no other process could see.
    """
    settings = settings_from(source)
    if settings.data is None:
        raise UsageError(
            "the store is in memory, where other processes cannot see it: Spark needs a directory"
        )
    cloud, metadata = settings.cloud, settings.metadata
    if cloud.backend == "memory":
        raise UsageError(
            "the objects are in memory, where other processes cannot see them: Spark needs an "
            "object store"
        )
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


def is_address(name: str) -> bool:
    """Whether the option, given in lower case, is one of the options in the table above."""
    return name in ADDRESS_NAMES or name.startswith(("catalog.", "store."))


def store_settings(options: Mapping[str, str]) -> StoreSettings:
    """The settings that the options of a source or a job describe; other options are ignored.

    UsageError or InvalidSetting if they do not describe a store.
    """
    given = {name.lower(): value for name, value in options.items() if is_address(name.lower())}
    path = given.get("path")
    if path is not None:
        others = sorted(name for name in given if name != "path")
        if others:
            raise UsageError(
                f"path already says where the store is: leave out {', '.join(others)}, or put "
                "them into a configuration file"
            )
        return job_settings(path)
    if "catalog" not in given or "store" not in given:
        raise UsageError(
            "the options do not say where the store is: give path (a data directory or a "
            "configuration file), or catalog and store together"
        )
    metadata = _metadata(given["catalog"], _below("catalog.", given))
    cloud = cloud_settings(given["store"], _below("store.", given))
    return job_settings(StoreSettings(data=NO_DATA, cloud=cloud, metadata=metadata))


def sink_settings(options: Mapping[str, str]) -> StoreSettings:
    """The settings that the options of a sink describe, which may name a server.

    ServiceError if that server does not respond; otherwise like `store_settings`.
    """
    given = {name.lower(): value for name, value in options.items()}
    if "token" in given:
        raise UsageError(
            "there is no option 'token', because Spark shows options in query plans: set "
            "FOREBAY_TOKEN for the driver, or admin.token in a configuration file that 'path' names"
        )
    url = given.get(SERVER)
    if url is None:
        return store_settings(options)
    if "path" in given:
        settings = store_settings(options)
    else:
        settings = StoreSettings(data=NO_DATA, cloud=_staging_store(given))
    address = ServerAddress(url.rstrip("/"), None, known_token(settings), settings.admin.ca_file)
    return replace(settings, server=_identified(address))


def _staging_store(given: Mapping[str, str]) -> CloudSettings:
    """The object store for staged rows: the given one, or the server's, through the server."""
    refused = sorted(name for name in given if name.startswith("catalog"))
    if refused:
        raise UsageError(f"the server has its own catalog: leave out {', '.join(refused)}")
    if "store" not in given:
        return CloudSettings()
    cloud = cloud_settings(given["store"], _below("store.", given))
    if cloud.backend == "fs":
        raise UsageError(
            "store is a directory: with 'server' it must be the URL of the server's object store; "
            "leave it out to send the rows through the server"
        )
    return cloud


def _identified(address: ServerAddress) -> ServerAddress:
    """The address, with the ids of the server's run and of its store, which the server sends."""
    with ServerClient(replace(address, token=None), timeout_seconds=_HEALTH_SECONDS) as client:
        health = client.json("GET", "/healthz")
    return replace(address, instance=health.get("instance"), store=health.get("store"))


def _below(prefix: str, given: Mapping[str, str]) -> dict[str, str]:
    return {
        name.removeprefix(prefix): value for name, value in given.items() if name.startswith(prefix)
    }


def _metadata(catalog: str, options: dict[str, str]) -> MetadataSettings:
    unknown = sorted(options.keys() - _ETCD)
    if unknown:
        raise UsageError(
            f"there is no option catalog.{unknown[0]}; there are {', '.join(sorted(_ETCD))}"
        )
    if catalog.startswith("etcd://"):
        hosts, _, prefix = catalog.removeprefix("etcd://").partition("/")
        endpoints = tuple(host.strip() for host in hosts.split(","))
        plain: dict[str, Any] = dict(options)
        return MetadataSettings(
            backend="etcd", endpoints=endpoints, prefix=f"/{prefix}" if prefix else None, **plain
        )
    scheme, separator, _ = catalog.partition("://")
    if separator:
        raise UsageError(
            f"catalog has the scheme {scheme!r}; it must be a file, sqlite:PATH, or "
            "etcd://host:port/prefix"
        )
    if options:
        raise UsageError(f"catalog.{min(options)} is for etcd; {catalog!r} is a file")
    path = Path(catalog.removeprefix("sqlite:"))
    if not path.is_file():
        raise UsageError(f"catalog is {catalog!r}; there is no such file")
    return MetadataSettings(backend="sqlite", path=path)


def cloud_settings(store: str, options: dict[str, str]) -> CloudSettings:
    """The object store that a directory or a URL means; UsageError for an unknown scheme."""
    scheme, separator, rest = store.partition("://")
    if not separator or scheme == "file":
        if options:
            raise UsageError(f"store.{min(options)} is for a remote store, not a directory")
        return CloudSettings(backend="fs", root=rest if separator else store)
    backend: Any = _BACKENDS.get(scheme)
    if backend is None:
        raise UsageError(
            f"store has the scheme {scheme!r}; it must be a directory, or begin with s3://, gs:// "
            "or azure://"
        )
    return CloudSettings(backend=backend, root=f"{_CANONICAL[backend]}://{rest}", options=options)
