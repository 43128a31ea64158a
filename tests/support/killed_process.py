"""Runs one scenario of uploads again and again, each time killed at another call.

Arguments: a folder, `planned`, `rolling` or `ledgers`, the first call and the step. For each, a
child is forked; it kills itself with SIGKILL before its n-th call of the object store or the
catalog, or right after the n-th that changes something. Every acknowledged message is counted in
the file `acks` of its folder. One line for each child, `killed N`; the last is `passed N`, when a
scenario came to its end.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from forebay.catalog.catalog import Catalog
from forebay.catalog.kv import Compare, Put, Remove
from forebay.catalog.sqlite import SqliteKv
from forebay.limits import KIB
from forebay.objects.local import LocalBackend
from forebay.objects.store import CloudStore
from forebay.settings import DeleterSettings, StoreSettings, UploaderSettings, WalSettings
from forebay.testing.kv import FaultKv
from forebay.testing.objects import FaultBackend
from forebay.topic.store import Store
from support.storages import storage_of

TOPIC: Final = "/default/orders"


class Death:
    """Counts calls, and comes at one of them."""

    def __init__(self, number: int) -> None:
        self._left = number

    def call(self, _what: str = "") -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class DeadlyKv(FaultKv):
    """Counts before every call, and after every commit."""

    def __init__(self, path: Path, death: Death) -> None:
        super().__init__(SqliteKv(path), death.call)
        self._death = death

    def commit(self, compares: Sequence[Compare], writes: Sequence[Put | Remove]) -> int | None:
        done = super().commit(compares, writes)
        self._death.call()
        return done


def settings(folder: Path, uploading: str) -> StoreSettings:
    """Small segments and objects; nothing happens behind the scenario's back."""
    return StoreSettings(
        folder,
        wal=WalSettings(rotate_max_bytes=700, cache_capacity=4),
        uploader=UploaderSettings(
            enabled=False,
            rolling=uploading == "rolling",
            format="pulsar" if uploading == "ledgers" else "dnb1",
            ledger_block_bytes=KIB,
            max_object_bytes=1000,
            max_open_seconds=60,
        ),
        deleter=DeleterSettings(retention_size_mb=0, deletion_lag_minutes=0),
    )


def payload(number: int) -> bytes:
    """Of the message at that offset."""
    return b"%06d" % number + bytes(150)


def scenario(folder: Path, uploading: str, death: Death) -> None:
    folder.mkdir(parents=True)
    backend = FaultBackend(LocalBackend(folder / "objects"))
    backend.hook("any", death.call)
    for operation in ("put", "complete", "copy", "delete"):
        backend.hook(operation, death.call, when="after")
    catalog = Catalog(DeadlyKv(folder / "catalog.db", death))
    acks = os.open(folder / "acks", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    numbers = itertools.count()
    with Store(settings(folder, uploading), catalog=catalog, store=CloudStore(backend)) as store:
        topic = store.topic(TOPIC)
        for count in (4, 5):
            payloads = [payload(next(numbers)) for _ in range(count)]
            topic.append_many(payloads, durability="synced")
            os.write(acks, b"." * count)
            storage_of(topic).upload_due()
        topic.append(payload(next(numbers)), durability="uploaded")
        os.write(acks, b".")
        topic.rotate()
        topic.trim_local()


def main() -> None:
    folder, uploading, first, step = sys.argv[1:]
    for number in itertools.count(int(first), int(step)):
        child = os.fork()  # nothing here has started a thread
        if child == 0:
            scenario(Path(folder) / str(number), uploading, Death(number))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        ended = os.waitstatus_to_exitcode(status)
        if ended not in (0, -signal.SIGKILL):
            sys.exit(ended)
        sys.stdout.write(f"{'killed' if ended else 'passed'} {number}\n")
        sys.stdout.flush()
        if ended == 0:
            return


if __name__ == "__main__":
    main()
