"""kill -9 in the middle of a commit: the next run of the batch completes it, row for row."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from forebay.pipeline.sink.commit import SinkBatch
from support import sinks
from support.sinks import OTHER, TOPIC, SinkSetup, marks, numbered

ROWS = 4000
KILLS = 20


@pytest.mark.timeout(600)
def test_twenty_kills_add_nothing_twice_and_lose_nothing(tmp_path: Path) -> None:
    data, seed = tmp_path / "data", time.time_ns()
    command = [sys.executable, sinks.__file__, *map(str, (data, ROWS, KILLS, seed))]
    batches = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    setup = SinkSetup(data)
    try:
        rows = numbered(0, 3 * ROWS, (TOPIC, OTHER))
        for topic in (TOPIC, OTHER):
            expected = [value for name, value in rows if name == topic]
            messages = setup.messages(topic)
            found = [message.payload.decode() for message in messages]
            assert found == expected * batches, f"seed {seed}"
            assert len(set(marks(messages))) == len(messages)
        again = setup.write(
            SinkBatch("killed", batches - 1, named=True),
            *(numbered(at * ROWS, ROWS, (TOPIC, OTHER)) for at in range(3)),
        )
        assert (again.appended, again.known) == (0, 3 * ROWS)
    finally:
        setup.close()
