"""A server in a process of its own, which tests kill. Arguments: the data directory.

Writes the note into the directory as a server does, prints its URL, and serves until it is killed.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forebay.client.address import ServerInfo, server_file
from support.paths import TESTS
from support.served import served


def main() -> None:
    data = Path(sys.argv[1])
    with served(data) as server:
        note = ServerInfo(server.url, server.context.instance, 0, server.context.store_id)
        server_file(data).write_bytes(note.encode())
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        signal.pause()


@contextmanager
def serving_process(data: Path) -> Iterator[subprocess.Popen[str]]:
    """A server that answers when the block begins; killed at its end, if not before."""
    process = subprocess.Popen(
        [sys.executable, "-m", "support.serving_process", str(data)],
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
