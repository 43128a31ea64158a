"""A server in a process of its own, which tests kill. Arguments: the data directory, and a key.

Writes the note into the directory as a server does, prints its URL, and serves until it is killed.
A request that reads the object of that key waits for ever.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forebay.client.address import ServerInfo, server_file
from forebay.objects.local import LocalBackend
from forebay.objects.store import CloudStore
from forebay.testing.objects import FaultBackend
from support.paths import TESTS
from support.served import served


def main() -> None:
    data, held = Path(sys.argv[1]), sys.argv[2]

    def hold(key: str) -> None:
        if key == held:
            threading.Event().wait()

    backend = FaultBackend(LocalBackend(data / "objects"))
    backend.hook("get_range", hold)
    with served(data, CloudStore(backend)) as server:
        note = ServerInfo(server.url, server.context.instance, 0, server.context.store_id)
        server_file(data).write_bytes(note.encode())
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        signal.pause()


@contextmanager
def serving_process(data: Path, held: str = "") -> Iterator[subprocess.Popen[str]]:
    """A server that answers when the block begins; killed at its end, if not before."""
    process = subprocess.Popen(
        [sys.executable, "-m", "support.serving_process", str(data), held],
        stdout=subprocess.PIPE,
        text=True,
        cwd=TESTS,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://"), "the server did not start"
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


if __name__ == "__main__":
    main()
