"""The process from which `Nursery` (`walk_process.py`) forks: it imports everything, opens nothing.

Argument: the descriptor of a socket. It says when it is ready, and then gets the sockets of
workers.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import socket
import struct
import sys
from importlib import import_module
from typing import Final

from support.walk_process import Channel, Process

MODULES: Final = (
    "forebay.admin.app",
    "forebay.admin.server",
    "forebay.catalog.etcd",
    "forebay.client.disk",
    "forebay.pipeline.jobs.compact",
    "forebay.pipeline.jobs.offload",
    "forebay.pipeline.jobs.restore",
    "forebay.pipeline.jobs.verify",
    "forebay.repair.repair",
    "forebay.upload.sweep",
    "pandas",
    "pyarrow.compute",
    "pyarrow.dataset",
    "pyspark.sql.types",
    "support.restores",
    "support.served",
    "support.walk_export",
)
"""What the processes use. What is imported here is not imported again in each of them."""


def _serve(descriptor: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    Process(Channel(socket.socket(fileno=descriptor))).run()


def main() -> None:
    for name in MODULES:
        import_module(name)
    faulthandler.register(signal.SIGUSR1)
    gc.collect()
    gc.freeze()  # what is imported is not looked at again in each fork
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    control.sendall(b".")
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        child = os.fork()
        if child == 0:
            control.close()
            _serve(descriptors[0])
        os.close(descriptors[0])
        control.sendall(struct.pack("<I", child))


if __name__ == "__main__":
    main()
