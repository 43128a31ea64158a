"""Stores with several topics in objects, and their files to damage: for `verify` and `restore`."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from forebay.catalog.catalog import Catalog
from forebay.catalog.kv import Put, Remove
from forebay.catalog.sqlite import SqliteKv
from forebay.format.descriptor import ObjectDescriptor, encode_descriptor
from forebay.format.frame import HEADER_BYTES, frame_bytes
from forebay.format.names import TopicName, parse_topic
from forebay.settings import CloudSettings, StoreSettings
from forebay.topic.store import Store
from support.cli_runs import small_segments

DAYS: float = 24 * 3600


def payload(name: str, offset: int) -> bytes:
    return f"{name} {offset}".encode()


@dataclass(frozen=True)
class Folders:
    """A data directory whose objects are files, if the cloud is not another."""

    data: Path
    cloud: CloudSettings | None = None

    @property
    def settings(self) -> StoreSettings:
        settings = small_segments(self.data)
        return settings if self.cloud is None else replace(settings, cloud=self.cloud)

    def fill(self, names: Sequence[str], counts: Sequence[int] = (20, 20, 20)) -> None:
        """Appends to each topic so many messages, and uploads them, once for each count."""
        with Store(self.settings) as store:
            for name in names:
                topic = store.topic(name)
                for count in counts:
                    first = topic.watermarks().appended
                    topic.append_many(
                        [payload(name, first + at) for at in range(count)], durability="synced"
                    )
                    topic.upload()
                    topic.rotate()

    def messages(self, name: str) -> list[tuple[int, bytes]]:
        with Store(self.settings) as store:
            return [(each.offset, bytes(each.payload)) for each in store.topic(name).read(start=0)]

    def lose_all_but_the_objects(self) -> None:
        shutil.rmtree(self.data / "wal")
        for path in self.data.glob("catalog.db*"):
            path.unlink()

    # ---- files ----

    def objects(self, name: str) -> Path:
        return self.data / "objects" / "storage" / "topics" / "default" / name / "objects"

    def flip(self, name: str, object_id: str, frame: int = 0) -> int:
        """Damages a payload, or mends it; answers the position of its frame."""
        path = self.objects(name) / object_id
        data = bytearray(path.read_bytes())
        at = 0
        for _ in range(frame):
            at += frame_bytes(data, at) or 0
        data[at + HEADER_BYTES] ^= 1
        path.write_bytes(data)
        return at

    def drop_sidecars(self, name: str) -> None:
        for path in self.objects(name).glob("*.json"):
            path.unlink()

    # ---- the catalog ----

    @contextmanager
    def catalog(self) -> Iterator[Catalog]:
        with closing(Catalog(SqliteKv(self.data / "catalog.db"))) as catalog:
            yield catalog

    def descriptors(self, name: str) -> list[ObjectDescriptor]:
        with self.catalog() as catalog:
            return list(catalog.get_object_descriptors(topic_name(name)))

    def put_descriptor(self, name: str, descriptor: ObjectDescriptor) -> None:
        with self.catalog() as catalog:
            key = catalog.keys.descriptor(topic_name(name), descriptor.start_offset)
            catalog.kv.commit([], [Put(key, encode_descriptor(descriptor))])

    def forget_descriptor(self, name: str, start: int) -> None:
        with self.catalog() as catalog:
            catalog.kv.commit([], [Remove(catalog.keys.descriptor(topic_name(name), start))])


def topic_name(name: str) -> TopicName:
    return parse_topic(name)


def make_old(path: Path, days: float = 3) -> None:
    then = time.time() - days * DAYS
    os.utime(path, (then, then))
