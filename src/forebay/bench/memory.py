"""How much memory a growing log takes: peaks of a process of its own.

A process writes and replays a million messages, and then nine million more; what its peak grew by
in between is what depends on the amount of data.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from forebay.bench.measure import scratch
from forebay.settings import WalSettings
from forebay.wal.log import Wal

_MEMORY_SCRIPT: Final = """
import sys
from pathlib import Path
from forebay.bench.memory import memory_child
memory_child(Path(sys.argv[1]), [int(n) for n in sys.argv[2:]])
"""


def memory_child(path: Path, marks: list[int]) -> None:
    """Prints the process's peak memory in KiB when the log has grown to each mark."""
    wal = Wal(WalSettings(dir=path / "wal"), "bench")
    batch = [bytes(range(100))] * 5000
    for mark in marks:
        while wal.current_offset() < mark:
            wal.append_many(batch[: mark - wal.current_offset()])
        wal.flush()
        for _ in wal.tail_reader(0, end=mark).frames():
            pass
        status = Path("/proc/self/status").read_text()
        print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
    wal.shutdown()


def measure_memory(parent: Path | None) -> dict[str, Any]:
    """Peak memory of a process that writes and replays 1 and then 10 million messages."""
    with scratch(parent) as path:
        command = [sys.executable, "-c", _MEMORY_SCRIPT, str(path), "1000000", "10000000"]
        output = subprocess.run(  # noqa: S603  # this interpreter, our own script
            command, check=True, capture_output=True, text=True, timeout=1800
        ).stdout
    first, second = (int(line) / 1024 for line in output.split())
    return {
        "mib_at_1_million": first,
        "mib_at_10_million": second,
        "growth_mib": second - first,
        "goal_mib": 32,
    }
