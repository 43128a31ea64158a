"""Doubles of the disk and the clock, for Forebay's own tests and for those of its users.

`CrashDisk` forgets what was not synced, `FaultDisk` makes any disk fail by plan, `ManualClock`
moves when told. The disks pass the contract suite that the real one passes
(`tests/contract/test_disk.py`): they are fakes, not mocks. None of them is meant to hold data
that anybody wants back.
"""

from forebay.testing.clock import ManualClock
from forebay.testing.crash import CrashDisk
from forebay.testing.faults import Fault, FaultDisk

__all__ = ["CrashDisk", "Fault", "FaultDisk", "ManualClock"]
