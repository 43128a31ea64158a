"""Steps that the suites of appends and readers share."""

from __future__ import annotations

from forebay.wal.log import Wal
from forebay.wal.reader import LogReader
from support.disks import texts


def synced(wal: Wal) -> int:
    return wal.watermarks().synced


def fill(wal: Wal, count: int, size: int = 0) -> list[bytes]:
    wanted = texts(0, count, size)
    wal.append_many(wanted, durability="synced")
    return wanted


def take(reader: LogReader, count: int) -> list[int]:
    return [next(reader).offset for _ in range(count)]
