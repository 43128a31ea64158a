"""Where a walk (`walk.py`) takes place: its bucket, its catalog, and what befalls them.

`LocalPlace` is a directory and SQLite; its faults are inside the processes. `RemotePlace` is a
real S3 server and a real etcd, each behind a proxy that makes the faults.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

from forebay.catalog.catalog import Catalog
from forebay.catalog.connect import connect_kv
from forebay.catalog.kv import Put, Remove
from forebay.format.names import after_prefix, parse_topic
from forebay.limits import KIB
from forebay.objects.store import CloudStore, connect
from forebay.settings import (
    AdminSettings,
    CloudSettings,
    DeleterSettings,
    MetadataSettings,
    RemoteRetentionSettings,
    StoreSettings,
    UploaderSettings,
    WalSettings,
)
from support.etcd_server import EtcdServer
from support.proxy import FaultProxy, Faults
from support.s3_server import S3Server
from support.walk_process import ProcessDied, Worker

TOPICS: Final = ("/default/orders", "/default/events")
LEASE_SECONDS: Final = 2.0
MARGIN_SECONDS: Final = 0.4


class Place(Protocol):
    """The services of a walk, and what can befall them."""

    folder: Path
    store: CloudStore
    """The bucket, without faults."""

    def settings(self, machine: str) -> StoreSettings: ...

    def catalog(self) -> Catalog:
        """A catalog without faults, to be closed."""

    def end_leases(self) -> None:
        """Time passes: the leases of processes that ended are over. Nobody else has one."""

    def copy_catalog(self) -> Any: ...

    def put_back_catalog(self, copy: Any) -> None: ...

    def lose_catalog(self) -> None: ...

    def faults(self, worker: Worker, where: str, how: str) -> Any:
        """A context in which the store or the catalog is away, loses responses, or is slow."""

    def held_up(self) -> bool:
        """Whether a stopped process keeps others from the catalog."""

    def close(self) -> None: ...


def _settings(
    data: Path, cloud: CloudSettings, metadata: MetadataSettings, dice: random.Random
) -> StoreSettings:
    """Small files, so that a few messages fill them; nothing happens behind the walk's back."""
    rolling = dice.random() < 0.3
    return StoreSettings(
        data=data,
        wal=WalSettings(rotate_max_bytes=2500, cache_capacity=24),
        uploader=UploaderSettings(
            enabled=False,
            rolling=rolling,
            format="pulsar" if not rolling and dice.random() < 0.4 else "dnb1",
            ledger_block_bytes=KIB,
            offload_threshold_bytes=dice.choice((0, 3000, None)),
            sidecars=dice.random() < 0.8,
            max_object_bytes=dice.choice((1500, 4000, 9000)),
            max_open_seconds=0,
        ),
        cloud=cloud,
        deleter=DeleterSettings(
            retention_time_minutes=0, retention_size_mb=0, deletion_lag_minutes=0
        ),
        metadata=metadata,
        remote_retention=RemoteRetentionSettings(size_mb=0.06),
        admin=AdminSettings(listen="127.0.0.1:0"),
    )


class LocalPlace:
    """A bucket that is a directory, and SQLite."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self._seed = seed
        self._cloud = CloudSettings(root=str(folder / "objects"))
        self._path = folder / "catalog.db"
        self._metadata = MetadataSettings(
            path=self._path,
            timeout_seconds=5,
            lease_seconds=LEASE_SECONDS,
            lease_margin_seconds=MARGIN_SECONDS,
            offsets_reserved=40,
        )
        (folder / "objects").mkdir(parents=True)
        self.store = connect(self._cloud)

    def settings(self, machine: str) -> StoreSettings:
        dice = random.Random(self._seed)
        return _settings(self.folder / machine, self._cloud, self._metadata, dice)

    def catalog(self) -> Catalog:
        # An empty one in memory, if there is none: to look creates no file.
        path = self._path if self._path.exists() else None
        kv = connect_kv(replace(self._metadata, path=path), None)
        return Catalog(kv, self.settings("a").uploader.root_prefix)

    def end_leases(self) -> None:
        if self._path.exists():
            with (
                closing(sqlite3.connect(self._path)) as connection,
                suppress(sqlite3.OperationalError),
            ):
                connection.execute("UPDATE leases SET expires = 0")
                connection.commit()

    def copy_catalog(self) -> dict[str, bytes]:
        names = ("catalog.db", "catalog.db-wal")
        paths = [self.folder / name for name in names]
        return {path.name: path.read_bytes() for path in paths if path.exists()}

    def put_back_catalog(self, copy: dict[str, bytes]) -> None:
        self.lose_catalog()
        for name, data in copy.items():
            (self.folder / name).write_bytes(data)

    def lose_catalog(self) -> None:
        for path in self.folder.glob("catalog.db*"):
            path.unlink()

    @contextmanager
    def faults(self, worker: Worker, where: str, how: str) -> Iterator[None]:
        values = {
            "away": {"away": where},
            "lost": {"away": where, "lost": True},
            "slow": {"pause": 0.003},
        }
        with suppress(ProcessDied):
            worker.ask("faults", values[how], None)
        yield
        with suppress(ProcessDied):
            if not worker.ended:
                worker.ask("faults", {"away": None, "lost": False, "pause": 0.0}, None)

    def held_up(self) -> bool:
        with closing(sqlite3.connect(self._path, timeout=0.2)) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                return True
            connection.rollback()
        return False

    def close(self) -> None:
        self.store.close()


class RemotePlace:
    """A bucket on a real S3 server, and etcd, both behind a proxy."""

    def __init__(self, folder: Path, seed: int, s3: S3Server, etcd: EtcdServer) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._seed = seed
        self._direct = s3.settings()
        self._s3_proxy = FaultProxy(s3.endpoint.removeprefix("http://"), http=True, seed=seed)
        self._etcd_proxy = FaultProxy(etcd.endpoint, seed=seed)
        self._cloud = replace(
            self._direct,
            options={**self._direct.options, "endpoint": self._s3_proxy.url},
            request_timeout_seconds=2,
            retry_timeout_seconds=3,
            max_retries=2,
        )
        self._metadata = MetadataSettings(
            backend="etcd",
            endpoints=(self._etcd_proxy.address,),
            prefix=f"/{str(self._direct.root).rpartition('/')[2]}",
            timeout_seconds=1,
            lease_seconds=LEASE_SECONDS,
            lease_margin_seconds=MARGIN_SECONDS,
            offsets_reserved=40,
        )
        self._plain = replace(self._metadata, endpoints=(etcd.endpoint,), timeout_seconds=20)
        self.store = connect(self._direct)
        self._kv = connect_kv(self._plain, None)
        self._bounds = (f"{self._metadata.prefix}/", after_prefix(f"{self._metadata.prefix}/"))

    def settings(self, machine: str) -> StoreSettings:
        dice = random.Random(self._seed)
        return _settings(self.folder / machine, self._cloud, self._metadata, dice)

    def catalog(self) -> Catalog:
        return Catalog(connect_kv(self._plain, None), str(self._metadata.prefix))

    def end_leases(self) -> None:
        keys = Catalog(self._kv, str(self._metadata.prefix)).keys
        self._kv.commit([], [Remove(keys.owner(parse_topic(name))) for name in TOPICS])

    def copy_catalog(self) -> dict[str, bytes]:
        found = self._kv.range(*self._bounds, limit=10_000)
        return {entry.key: entry.value for entry in found}

    def put_back_catalog(self, copy: dict[str, bytes]) -> None:
        self.lose_catalog()
        self._written([Put(key, value) for key, value in copy.items()])

    def lose_catalog(self) -> None:
        self._written([Remove(key) for key in self.copy_catalog()])

    def _written(self, writes: list[Put] | list[Remove]) -> None:
        for at in range(0, len(writes), 50):
            assert self._kv.commit([], writes[at : at + 50]) is not None

    @contextmanager
    def faults(self, _worker: Worker, where: str, how: str) -> Iterator[None]:
        proxy = self._s3_proxy if where == "store" else self._etcd_proxy
        with proxy.faults(_PROXIED[where, how]):
            yield

    def held_up(self) -> bool:
        return False

    def close(self) -> None:
        self._s3_proxy.close()
        self._etcd_proxy.close()
        self._kv.close()
        self.store.close()


_PROXIED: Final = {
    ("store", "away"): Faults(http_error_rate=1),
    ("store", "lost"): Faults(timeout_after_success_rate=0.5, hang_seconds=0.05),
    ("store", "slow"): Faults(latency_ms=10),
    ("catalog", "away"): Faults(refuse=True, black_hole=True),
    ("catalog", "lost"): Faults(timeout_after_success_rate=0.3, hang_seconds=0.05),
    ("catalog", "slow"): Faults(latency_ms=5),
}
