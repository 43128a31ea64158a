"""Doubles of what Forebay stands on, for tests of Forebay and its users.

`CrashDisk` forgets what was not synced; `FaultDisk`, `FaultBackend` and `FaultKv` make any disk,
object store or catalog fail by plan; `ManualClock` moves when a test moves it. They pass the
contract suites that the real ones pass (`tests/contract/`): they are fakes, not mocks. None of
them is meant to hold data that anybody wants back. `FaultProxy` and `ProxyProcess` stand before a
real server and do to its traffic what `Faults` says; `LocalCluster` is a Spark cluster. These are
imported when they are first used.
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
