"""Doubles for the tests of programs that use Forebay.

    CrashDisk      a disk in memory that loses what was not synced
    FaultDisk      any disk, with calls that fail
    FaultBackend   any object store, with calls that fail or wait
    FaultKv        any catalog, with calls that fail
    ManualClock    a clock that a test moves

`forebay.Store` takes them in place of the real ones. This store touches neither disk nor network:

>>> from forebay import Catalog, CloudStore, Store, StoreSettings
>>> from forebay.catalog.sqlite import SqliteKv
>>> from forebay.objects.memory import MemoryBackend
>>> from forebay.testing import CrashDisk, FaultBackend, FaultKv, ManualClock
>>> store = Store(
...     StoreSettings(data="/data"),
...     disk=CrashDisk(),
...     clock=ManualClock(),
...     catalog=Catalog(FaultKv(SqliteKv(None))),
...     store=CloudStore(FaultBackend(MemoryBackend())),
... )
>>> store.topic("orders").append(b"one", durability="uploaded")
0
>>> store.close()

Without faults the doubles pass the same contract suites as the real ones (`tests/contract/`). They
are for tests: do not keep data in them.
"""

from typing import TYPE_CHECKING

from forebay.testing.clock import ManualClock
from forebay.testing.crash import CrashDisk
from forebay.testing.faults import Fault, FaultDisk
from forebay.testing.kv import FaultKv
from forebay.testing.objects import FaultBackend, ObjectFault

if TYPE_CHECKING:
    from forebay.testing._relay import Faults, ProxyStats
    from forebay.testing.proxy import FaultProxy, ProxyProcess
    from forebay.testing.spark_cluster import LocalCluster

__all__ = [
    "CrashDisk",
    "Fault",
    "FaultBackend",
    "FaultDisk",
    "FaultKv",
    "FaultProxy",
    "Faults",
    "LocalCluster",
    "ManualClock",
    "ObjectFault",
    "ProxyProcess",
    "ProxyStats",
]


def __getattr__(name: str) -> object:
    # Imported here, the module that is run as the proxy's process would be imported twice.
    if name in {"FaultProxy", "Faults", "ProxyProcess", "ProxyStats"}:
        from forebay.testing import proxy

        return getattr(proxy, name)
    if name == "LocalCluster":
        from forebay.testing import spark_cluster

        return spark_cluster.LocalCluster
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
