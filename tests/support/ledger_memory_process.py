"""A process whose memory is measured while it offloads a ledger and reads it: MIB, DIRECTORY.

It prints `{"idle": KiB, "offload": KiB, "read": KiB}`, the peaks so far.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from forebay.bench.pulsar import BenchLedger, read_whole
from forebay.limits import MIB
from forebay.objects.store import connect
from forebay.pulsar.offloader import LedgerOffloader, OffloadSettings
from forebay.read.fetch_pool import FetchPool
from forebay.settings import CloudSettings
from support.memory_process import status

UID = "7f0e0000-0000-4000-8000-00000000002a"


def main(mib: int, directory: Path) -> None:
    store, pool = connect(CloudSettings(root=str(directory))), FetchPool()
    offloader = LedgerOffloader(store, OffloadSettings(block_bytes=5 * MIB), pool=pool)
    small = BenchLedger(6, 1000)
    offloader.offload(small, UID)
    offloader.delete_offloaded(small.ledger_id, UID)
    found = {"idle": status("VmHWM")}
    ledger = BenchLedger(mib, 1000)
    offloader.offload(ledger, UID)
    found["offload"] = status("VmHWM")
    with offloader.read_offloaded(ledger.ledger_id, UID) as handle:
        read_whole(handle)
    found["read"] = status("VmHWM")
    pool.close()
    store.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
