"""Where the store is, by options: `path`, or `catalog` and `store`.

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
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from forebay.errors import UsageError
from forebay.pipeline.site import site_settings
from forebay.settings import CloudSettings, MetadataSettings, StoreSettings

ADDRESS_NAMES: Final = ("path", "catalog", "store")

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
        return site_settings(path)
    if "catalog" not in given or "store" not in given:
        raise UsageError(
            "say where the store is: path (a data directory or a configuration file), or catalog "
            "and store together"
        )
    metadata = _metadata(given["catalog"], _below("catalog.", given))
    cloud = _cloud(given["store"], _below("store.", given))
    return site_settings(StoreSettings(data=NO_DATA, cloud=cloud, metadata=metadata))


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
