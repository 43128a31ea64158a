"""Objects and descriptors as Danube v0.5.0 writes them, and ours as it reads them.

Danube's side is written here from its formats alone: it shares no code with the product.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from forebay.catalog.catalog import Catalog
from forebay.catalog.kv import Put
from forebay.catalog.sqlite import SqliteKv
from forebay.format.message import MessageId, StreamMessage
from forebay.objects.memory import MemoryBackend
from forebay.objects.store import CloudStore
from forebay.read.cloud_reader import CloudReader
from forebay.read.fetch_pool import FetchPool
from forebay.read.tiered_log import CatalogSource
from forebay.settings import CloudReaderSettings
from support.danube_messages import encoded, fixed
from support.tiered_stores import TOPIC, Setup, fill

_PREFIX = f"storage/topics{TOPIC}/objects/"


def danube_message(offset: int) -> StreamMessage:
    return StreamMessage(
        request_id=offset + 1,
        msg_id=MessageId(7, str(TOPIC), "127.0.0.1:6650", offset),
        payload=b"%010d" % offset,
        publish_time=1_700_000_000_000 + offset,
        producer_name="p1",
        subscription_name="",
        attributes={"k": f"v{offset}"},
    )


def danube_object(first: int, count: int) -> tuple[bytes, list[list[int]]]:
    """What v0.5.0's uploader writes: frames of bincode 1, and an index every 1,000 messages."""
    data, index = bytearray(), []
    for number in range(count):
        if number % 1000 == 0:
            index.append([first + number, len(data)])
        payload = encoded(danube_message(first + number), fixed, 0)
        data += struct.pack("<Q", first + number)
        data += struct.pack("<I", len(payload)) + struct.pack("<I", zlib.crc32(payload)) + payload
    return bytes(data), index


@pytest.fixture
def bucket() -> CloudStore:
    return CloudStore(MemoryBackend())


@pytest.fixture
def catalog() -> Iterator[Catalog]:
    catalog = Catalog(SqliteKv(None), "/danube")
    yield catalog
    catalog.close()


def put_danube_object(
    bucket: CloudStore, catalog: Catalog, first: int, count: int, *, indexed: bool
) -> None:
    data, index = danube_object(first, count)
    name = f"data-{first}-{first + count - 1}.dnb1"
    bucket.put_object(_PREFIX + name, data)
    body: dict[str, Any] = {
        "completed": True,
        "created_at": 1_700_000_000,
        "end_offset": first + count - 1,
        "etag": None,
        "object_id": name,
        "size": len(data),
        "start_offset": first,
    }
    if indexed:
        body["offset_index"] = index
    value = json.dumps(body, separators=(",", ":"), sort_keys=True).encode()
    key = f"/danube/storage/topics{TOPIC}/objects/"
    catalog.kv.commit([], [Put(f"{key}{first:020d}", value)])
    catalog.kv.commit([], [Put(key + "cur", b'{"start":"%020d"}' % first)])


@pytest.mark.parametrize("indexed", [True, False])
def test_what_danube_uploaded_is_read_as_it_is(
    bucket: CloudStore, catalog: Catalog, indexed: bool
) -> None:
    put_danube_object(bucket, catalog, 0, 2500, indexed=indexed)
    put_danube_object(bucket, catalog, 2500, 100, indexed=indexed)
    pool = FetchPool(2)
    source = CatalogSource(catalog, TOPIC)
    with CloudReader(TOPIC, bucket, source, CloudReaderSettings(), pool) as reader:
        for first, last in ((0, 2599), (1500, 1600), (2400, 2599), (2599, 2599)):
            found = list(reader.read_range(first, last))
            assert found == [danube_message(offset) for offset in range(first, last + 1)]
    pool.close()
    assert catalog.get_current_pointer(TOPIC) == 2500


class OldMessage(NamedTuple):
    request_id: int
    producer_id: int
    topic_name: str
    broker_addr: str
    topic_offset: int
    payload: bytes
    publish_time: int
    producer_name: str
    subscription_name: str | None
    attributes: dict[str, str]


class OldDecoder:
    """bincode 1 of v0.5.0's StreamMessage: fixed numbers, and bytes behind the last are ignored."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def message(self) -> OldMessage:
        return OldMessage(
            self._u64(),
            self._u64(),
            self._text(),
            self._text(),
            self._u64(),
            self._bytes(),
            self._u64(),
            self._text(),
            self._text() if self._byte() else None,
            {self._text(): self._text() for _ in range(self._u64())},
        )

    def _take(self, size: int) -> bytes:
        taken = self._data[self._at : self._at + size]
        assert len(taken) == size
        self._at += size
        return taken

    def _byte(self) -> int:
        [tag] = self._take(1)
        assert tag in (0, 1)
        return tag

    def _u64(self) -> int:
        return int.from_bytes(self._take(8), "little")

    def _bytes(self) -> bytes:
        return self._take(self._u64())

    def _text(self) -> str:
        return self._bytes().decode()


def old_frames(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        offset = int.from_bytes(data[at : at + 8], "little")
        length = int.from_bytes(data[at + 8 : at + 12], "little")
        crc = int.from_bytes(data[at + 12 : at + 16], "little")
        payload = data[at + 16 : at + 16 + length]
        assert len(payload) == length
        assert zlib.crc32(payload) == crc
        yield offset, payload
        at += 16 + length


def test_an_old_decoder_reads_what_we_uploaded(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    setup.catalog = Catalog(setup.kv, "/danube", setup.clock)
    setup.uploading(sidecars=False)
    with setup.topic() as topic:
        fill(topic, 1500)
        topic.append(
            b"1500", {"k": "v", "schlüssel": "größe"}, routing_key="r", durability="synced"
        )
        topic.upload()
    key = f"/danube/storage/topics{TOPIC}/objects/{0:020d}"
    entry = setup.kv.get(key)
    assert entry is not None
    body = json.loads(entry.value)
    assert list(body) == sorted(body)
    added = {"content_hash", "highest_publish_time"}  # which Danube's decoder ignores
    assert body.keys() - added == {
        "completed", "created_at", "end_offset", "etag",
        "object_id", "offset_index", "size", "start_offset",
    }  # fmt: skip
    data = bytes(setup.objects.get_object(_PREFIX + body["object_id"], 10**7))
    assert len(data) == body["size"]
    assert (body["object_id"], body["completed"]) == ("data-0-1500.dnb1", True)
    found = [(offset, OldDecoder(payload).message()) for offset, payload in old_frames(data)]
    assert [offset for offset, _ in found] == list(range(1501))
    assert all(message.topic_offset == offset for offset, message in found)
    assert all(int(message.payload[:10]) == offset for offset, message in found)
    assert found[-1][1].attributes == {"k": "v", "schlüssel": "größe"}
    assert found[-1][1].topic_name == str(TOPIC)
    for offset, position in body["offset_index"]:
        assert int.from_bytes(data[position : position + 8], "little") == offset
    current = setup.kv.get(f"/danube/storage/topics{TOPIC}/objects/cur")
    assert current is not None
    assert json.loads(current.value) == {"start": f"{0:020d}"}
