"""A topic whose messages are in objects: what `forebay bench tier` and `tuning` upload and read.

Everything is done through `forebay.open` and the topic that it returns. A history is a store of its
own whose messages were appended, uploaded, and removed from the local log, so that a reader has to
fetch them from the object store. One last message stays in the log, because a log keeps its newest
segment.

Distance is a wait before each request to the object store, by `forebay.testing.FaultBackend`. It
costs no processor time, as a distant store does not.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, TypeAlias

from forebay.bench.measure import open_topic
from forebay.format.names import object_key, parse_topic
from forebay.limits import MIB
from forebay.objects.store import CloudStore, connect
from forebay.settings import CloudSettings, DeleterSettings, StoreSettings
from forebay.testing import FaultBackend
from forebay.topic.store import Store, Topic

BATCH: Final = 1000
"""Messages in each `append_many`."""
Content: TypeAlias = Literal["random", "JSON"]
"""What payloads are made of: bytes that do not compress, or events as JSON."""
_REPEATED_BYTES: Final = 2 * MIB
"""JSON payloads repeat after so many bytes: blocks, which have half of it, hold no repetition."""
_GOODS: Final = ("apple juice", "brown bread", "cotton shirt", "desk lamp", "fountain pen")
_REMOVE_ALL: Final = DeleterSettings(retention_time_minutes=0, deletion_lag_minutes=0)


@dataclass(frozen=True, slots=True)
class History:
    """A store with one topic, whose messages are in objects."""

    settings: StoreSettings
    objects: tuple[tuple[str, int], ...]
    """Key and size of each."""
    messages: int
    delay_seconds: float = 0
    """A delay before each request to the object store."""
    cached: bool = False
    """Whether objects on local disk may come from the kernel's cache."""
    raw_size: int = 0
    """Bytes of the frames in the objects, before compression."""

    @property
    def size(self) -> int:
        return sum(size for _, size in self.objects)


def payloads(message_bytes: int, content: Content = "random") -> list[bytes]:
    """The payloads of one `append_many`, the same in every run."""
    source = random.Random(message_bytes)
    if content == "JSON":
        count = max(BATCH, -(-_REPEATED_BYTES // message_bytes))
        return [_event(source, number, message_bytes) for number in range(count)]
    return [source.randbytes(message_bytes) for _ in range(BATCH)]


def _event(source: random.Random, number: int, message_bytes: int) -> bytes:
    """An event of a shop as JSON, with as many items as fit, cut to `message_bytes`."""
    items: list[dict[str, object]] = []
    event: dict[str, object] = {
        "id": 1_000_000 + number,
        "time": f"2026-11-18T{number // 3600 % 24:02}:{number // 60 % 60:02}:{number % 60:02}Z",
        "session": f"{source.getrandbits(128):032x}",
        "user": {"id": source.randrange(100_000), "country": source.choice(("DE", "FR", "IN"))},
        "event": source.choice(("view", "click", "add to cart", "checkout")),
        "path": f"/shop/category-{source.randrange(40)}/item-{source.randrange(10_000)}",
        "agent": source.choice(("Mozilla/5.0 (X11; Linux x86_64)", "Mozilla/5.0 (iPhone)")),
        "items": items,
    }
    while len(json.dumps(event)) < message_bytes:
        sku, price = source.randrange(1_000_000), source.randrange(100, 100_000) / 100
        items.append({"sku": sku, "name": source.choice(_GOODS), "price": price})
    return json.dumps(event).encode()[:message_bytes]


def fill(topic: Topic, mib: int, message_bytes: int, content: Content = "random") -> None:
    """Appends and syncs messages that take so many MiB in the log of an empty topic."""
    batch = payloads(message_bytes, content)
    topic.append_many(batch)
    topic.flush()
    each = sum(segment.size for segment in topic.segments())
    for _ in range(-(-mib * MIB // each) - 1):
        topic.append_many(batch)
    topic.flush()


def write_plain(target: Path, scratch: Path, mib: int, message_bytes: int) -> int:
    """Writes a plain file with the bytes that `fill` leaves in segments; returns its size."""
    with open_topic(scratch) as topic, target.open("wb") as file:
        fill(topic, mib, message_bytes)
        for segment in topic.segments():
            with segment.path.open("rb") as source:
                shutil.copyfileobj(source, file, MIB)
    return target.stat().st_size


def write_history(
    settings: StoreSettings, mib: int, message_bytes: int, content: Content = "random"
) -> History:
    """Appends, uploads, and removes what was uploaded from the log."""
    settings = replace(settings, deleter=_REMOVE_ALL)
    with open_topic(settings) as topic:
        fill(topic, mib, message_bytes, content)
        name = parse_topic(topic.name)
        made = topic.upload()
        objects = tuple((object_key(name, each.object_id), each.size) for each in made)
        topic.rotate()
        last = topic.append(b"stays in the log", durability="synced")
        topic.trim_local()
        assert [segment.first_offset for segment in topic.segments()] == [last]
    raw_size = sum(each.logical_size for each in made)
    return History(settings, objects, last + 1, raw_size=raw_size)


@contextmanager
def open_history(history: History, read_ahead_chunks: int | None = None) -> Iterator[Topic]:
    """The topic, opened at the history's distance."""
    settings = history.settings
    if read_ahead_chunks is not None:
        threads = max(settings.cloud_reader.fetch_threads, read_ahead_chunks)
        reader = replace(
            settings.cloud_reader, read_ahead_chunks=read_ahead_chunks, fetch_threads=threads
        )
        settings = replace(settings, cloud_reader=reader)
    if not history.delay_seconds:
        with open_topic(settings) as topic:
            yield topic
        return
    distant = FaultBackend(connect(settings.cloud))
    distant.hook("any", lambda _key: time.sleep(history.delay_seconds))
    try:
        with Store(settings, store=CloudStore(distant)) as store:
            yield store.topic("bench")
    finally:
        distant.close()


def read_frames(topic: Topic) -> int:
    """Reads the whole topic as checked frames; returns the number of messages."""
    return sum(len(frames) for frames in topic.read(0).frames())


def read_messages(topic: Topic) -> int:
    """Reads the whole topic as message objects; returns their number."""
    return sum(1 for _ in topic.read(0))


def warm_disk(folder: Path, mib: int) -> None:
    """Writes so much and removes it: virtual disks are slower where nothing was written before."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "warm"
    piece = bytes(MIB)
    with path.open("wb", buffering=0) as file:
        for _ in range(mib):
            file.write(piece)
        os.fsync(file.fileno())
    path.unlink()


def drop_cached(history: History) -> None:
    """Removes objects on local disk from the kernel's cache, so that a read comes from the disk."""
    cloud = history.settings.cloud
    if cloud.backend == "fs" and not history.cached:
        for path in Path(cloud.root or "").rglob("*.dnb1*"):
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def discard(cloud: CloudSettings) -> None:
    """Deletes every object below the root."""
    if cloud.backend == "fs":
        shutil.rmtree(cloud.root or "", ignore_errors=True)
        return
    store = connect(cloud)
    try:
        for meta in list(store.list("")):
            store.delete_object(meta.key)
    finally:
        store.close()
