"""Where a store is: the settings that every process of a job shares, and Spark's options for it.

| option            | what it is                                                              |
|-------------------|-------------------------------------------------------------------------|
| `path`            | a data directory or a configuration file; also the argument of `load`   |
| `catalog`         | a SQLite file, `sqlite:PATH`, or `etcd://host:port,host2:port/prefix`   |
| `catalog.<name>`  | username, password, ca_file, cert_file, key_file of etcd                |
| `store`           | a directory, or `s3://`, `gs://`, `azure://` with bucket and prefix     |
| `store.<name>`    | an option of the store, such as `store.endpoint`                        |

With `catalog` and `store` there is no local log: what was not uploaded yet is not seen. Secrets
belong into the environment of the executors. Those that are given as options are taken, and are in
no message.

The sink also takes `server`, the URL of a running server that owns the topics: with `path`, whose
configuration says what the store is, with a `store` that is no directory, or alone. Its token is
the configuration's, or FOREBAY_TOKEN of the driver: never an option, as options are shown in plans.
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
"""The data directory of a store that is known by its catalog and its objects alone."""

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
    """The settings of a store as they hold in every process of a job.

    From a data directory, a configuration file, or settings. Executors have other working
    directories than the driver, so every path is absolute. A store in memory is refused: no other
    process could see it. Where a server runs on the data directory, the settings name it: it owns
    the topics, and executors that cannot see the directory go through it.
    """
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


def is_address(name: str) -> bool:
    """Whether the option, in lower case, says something about where the store is."""
    return name in ADDRESS_NAMES or name.startswith(("catalog.", "store."))


def store_settings(options: Mapping[str, str]) -> StoreSettings:
    """UsageError, or InvalidSetting, for an address that cannot be one."""
    given = {name.lower(): value for name, value in options.items() if is_address(name.lower())}
    path = given.get("path")
    if path is not None:
        others = sorted(name for name in given if name != "path")
        if others:
            raise UsageError(
                f"path says all about where the store is: leave out {', '.join(others)}, or write "
                "them into a configuration file"
            )
        return job_settings(path)
    if "catalog" not in given or "store" not in given:
        raise UsageError(
            "say where the store is: path (a data directory or a configuration file), or catalog "
            "and store together"
        )
    metadata = _metadata(given["catalog"], _below("catalog.", given))
    cloud = _cloud(given["store"], _below("store.", given))
    return job_settings(StoreSettings(data=NO_DATA, cloud=cloud, metadata=metadata))


def sink_settings(options: Mapping[str, str]) -> StoreSettings:
    """Of a sink, which may name a server. ServiceError if that one does not answer."""
    given = {name.lower(): value for name, value in options.items()}
    if "token" in given:
        raise UsageError(
            "there is no option 'token': Spark shows options to everybody. Set FOREBAY_TOKEN for "
            "the driver, or admin.token in a configuration file that 'path' names"
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
    """Where rows wait: the store that is given, or the server's own, through the server."""
    refused = sorted(name for name in given if name.startswith("catalog"))
    if refused:
        raise UsageError(f"the server knows its catalog: leave out {', '.join(refused)}")
    if "store" not in given:
        return CloudSettings()
    cloud = _cloud(given["store"], _below("store.", given))
    if cloud.backend == "fs":
        raise UsageError(
            "the server takes the rows itself: leave out 'store', which may be the address of the "
            "server's store and is no directory"
        )
    return cloud


def _identified(address: ServerAddress) -> ServerAddress:
    """The address with the instance and the store of the server that runs there."""
    with ServerClient(replace(address, token=None), timeout_seconds=_HEALTH_SECONDS) as client:
        answer = client.json("GET", "/healthz")
    return replace(address, instance=answer.get("instance"), store=answer.get("store"))


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
            f"catalog is of scheme {scheme!r}; it must be a file, sqlite:PATH, or "
            "etcd://host:port/prefix"
        )
    if options:
        raise UsageError(f"catalog.{min(options)} is for etcd; {catalog!r} is a file")
    path = Path(catalog.removeprefix("sqlite:"))
    if not path.is_file():
        raise UsageError(f"catalog is {catalog!r}; there is no such file")
    return MetadataSettings(backend="sqlite", path=path)


def _cloud(store: str, options: dict[str, str]) -> CloudSettings:
    scheme, separator, rest = store.partition("://")
    if not separator or scheme == "file":
        if options:
            raise UsageError(f"store.{min(options)} is for a remote store, not a directory")
        return CloudSettings(backend="fs", root=rest if separator else store)
    backend: Any = _BACKENDS.get(scheme)
    if backend is None:
        raise UsageError(
            f"store is of scheme {scheme!r}; it must be a directory, or begin with s3://, gs:// or "
            "azure://"
        )
    return CloudSettings(backend=backend, root=f"{_CANONICAL[backend]}://{rest}", options=options)
