"""Danube's files, written from the facts of its formats alone: no name or frame of ours is used.

bucket/storage/topics/<ns>/<topic>/objects/data-<start>-<end>.dnb1        v0.5.0
bucket/storage/topics/<ns>/<topic>/objects/data-<start>-<unix s>.dnb1     v0.6.2
bucket/storage/topics/<ns>/<topic>/segments/data-<start>-<unix s>.dnb1    later
wal/<ns>/<topic>/wal.log, wal.1.log, wal.ckpt, uploader.ckpt
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from forebay.format.message import MessageId, StreamMessage
from support.danube_messages import encoded, fixed, varint

WRITTEN_AT: Final = 1_768_625_254
"""A time in seconds, as it is in names since v0.6.2."""
GOLDEN_A: Final = bytes.fromhex(
    "050000000000000084000000d1d4be3c02000000000000000700000000000000"
    "0b000000000000002f64656661756c742f74310e000000000000003132372e30"
    "2e302e313a363635300500000000000000050000000000000068656c6c6f0068"
    "e5cf8b0100000200000000000000703101000000000000000001000000000000"
    "0001000000000000006b02000000000000007631"
)
"""A frame of v0.5.0: offset 5 of /default/t1, with the payload `hello`."""
GOLDEN_C: Final = bytes.fromhex(
    "05000000000000003e000000488ccf2802070b2f64656661756c742f74310e31"
    "32372e302e302e313a36363530050568656c6c6ffd0068e5cf8b010000027031"
    "010001016b0276310000010272" + "6b"
)
"""The same message as v0.15.1 writes it, with the routing key `rk`."""


def message(offset: int, topic: str = "/default/orders", text: str = "") -> StreamMessage:
    return StreamMessage(
        request_id=offset + 1,
        msg_id=MessageId(7, topic, "127.0.0.1:6650", offset),
        payload=f"{text}{topic} {offset}".encode(),
        publish_time=1_700_000_000_000 + offset,
        producer_name="p1",
        subscription_name="",
        attributes={"k": f"v{offset}"},
    )


def frame(offset: int, payload: bytes) -> bytes:
    head = struct.pack("<Q", offset) + struct.pack("<I", len(payload))
    return head + struct.pack("<I", zlib.crc32(payload)) + payload


def frames(
    offsets: Iterable[int], topic: str = "/default/orders", *, later: bool = False, text: str = ""
) -> bytes:
    """Frames of messages: bincode 1 as v0.5.0 wrote it, or bincode 2 with all fields."""
    number, appended = (varint, 3) if later else (fixed, 0)
    return b"".join(
        frame(offset, encoded(message(offset, topic, text), number, appended)) for offset in offsets
    )


@dataclass(frozen=True)
class Danube:
    """The directories of one Danube: a bucket on local disk, and the WAL."""

    path: Path

    @property
    def bucket(self) -> Path:
        return self.path / "bucket"

    @property
    def wal(self) -> Path:
        return self.path / "wal"

    def object(self, topic: str, name: str, data: bytes, folder: str = "objects") -> Path:
        path = self.bucket / f"storage/topics{topic}" / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def put(self, first: int, count: int, topic: str = "/default/orders") -> Path:
        """An object of v0.5.0."""
        data = frames(range(first, first + count), topic)
        return self.object(topic, f"data-{first}-{first + count - 1}.dnb1", data)

    def put_later(
        self, first: int, count: int, topic: str = "/default/orders", folder: str = "segments"
    ) -> Path:
        """An object of a later version, whose name has the time in it."""
        data = frames(range(first, first + count), topic, later=True)
        return self.object(topic, f"data-{first}-{WRITTEN_AT + first}.dnb1", data, folder)

    def write(self, seq: int, data: bytes, topic: str = "/default/orders") -> Path:
        """A WAL file, beside checkpoints that say nothing useful."""
        folder = self.wal / topic.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "wal.ckpt").write_bytes(bytes(43))
        (folder / "uploader.ckpt").write_bytes(b"torn")
        path = folder / ("wal.log" if seq == 0 else f"wal.{seq}.log")
        path.write_bytes(data)
        return path

    def state(self) -> dict[str, tuple[str, int]]:
        """Every file with a hash of its bytes and its time, to see that nothing was changed."""
        return {
            str(path.relative_to(self.path)): (
                hashlib.sha256(path.read_bytes()).hexdigest(),
                path.stat().st_mtime_ns,
            )
            for path in sorted(self.path.rglob("*"))
            if path.is_file()
        }


def descriptor(first: int, last: int, size: int, name: str, *, later: bool = False) -> bytes:
    """The value that Danube keeps in etcd: compact JSON, keys in alphabetical order."""
    body: dict[str, Any] = {
        "completed": True,
        "created_at": 1_700_000_000,
        "end_offset": last,
        "etag": None,
        "segment_id" if later else "object_id": name,
        "offset_index": [[first, 0]],
        "size": size,
        "start_offset": first,
    }
    return json.dumps(body, separators=(",", ":"), sort_keys=True).encode()


def descriptor_key(prefix: str, topic: str, first: int, folder: str = "objects") -> str:
    return f"{prefix}/storage/topics{topic}/{folder}/{first:020d}"
