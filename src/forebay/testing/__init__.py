"""Doubles of what Forebay stands on, for tests of Forebay and its users.

`CrashDisk` forgets what was not synced; `FaultDisk`, `FaultBackend` and `FaultKv` make any disk,
object store or catalog fail by plan; `ManualClock` moves when a test moves it. They pass the
contract suites that the real ones pass (`tests/`): they are fakes, not mocks. None of
them is meant to hold data that anybody wants back.
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
