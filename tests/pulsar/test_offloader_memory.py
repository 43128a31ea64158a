"""The memory of an offload and of a reader does not depend on the size of the ledger."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from support.paths import TESTS

LEDGER_MIB: Final = 256
ABOVE_IDLE_MAX: Final = 32
"""MiB: blocks of 5 MiB and requests of 1 MiB, of which seven are ahead, and room for the client.
A process that held the ledger whole would take eight times as much."""


@pytest.mark.long
def test_a_large_ledger_takes_the_memory_of_a_few_blocks(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "support.ledger_memory_process", str(LEDGER_MIB), str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        timeout=200,
        cwd=TESTS,
    )
    found = json.loads(done.stdout)
    assert (found["offload"] - found["idle"]) / 1024 <= ABOVE_IDLE_MAX, found
    assert (found["read"] - found["idle"]) / 1024 <= ABOVE_IDLE_MAX, found
