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

Without faults the doubles pass the same contract suites as the real ones (in `tests/`). They
are for tests: do not keep data in them.
"""

from forebay.testing.clock import ManualClock
from forebay.testing.crash import CrashDisk
from forebay.testing.faults import Fault, FaultDisk
from forebay.testing.kv import FaultKv
from forebay.testing.objects import FaultBackend, ObjectFault

__all__ = [
    "CrashDisk",
    "Fault",
    "FaultBackend",
    "FaultDisk",
    "FaultKv",
    "ManualClock",
    "ObjectFault",
]
