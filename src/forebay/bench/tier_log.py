"""What `forebay bench tier` moves: one sealed log, with Forebay and with nothing of it in between.

The log is written once. An upload takes it with a catalog and a root of objects of its own, so
every round uploads the same segments again.

The limits (`bare_upload`, `bare_read`) move the same bytes: for a remote store that is its client
alone, set up as Forebay sets it up, with the same sizes and the same number of requests in flight;
for local disk, plain system calls.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from forebay.bench.measure import in_threads
from forebay.catalog.catalog import Catalog
from forebay.catalog.connect import connect_kv
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.layout import Buffer
from forebay.format.names import TopicName, object_key, parse_topic
from forebay.limits import MIB
from forebay.objects.remote import store_location
from forebay.objects.store import connect
from forebay.read.cloud_reader import CloudReader
from forebay.read.object_stream import FetchPool, RangeStore
from forebay.read.tiered_log import CatalogSource
from forebay.settings import (
    CloudReaderSettings,
    CloudSettings,
    MetadataSettings,
    StoreSettings,
    UploaderSettings,
)
from forebay.topic.factory import WalStorageFactory
from forebay.topic.storage import WalStorage
from forebay.upload.uploader import Uploader

TOPIC: Final = parse_topic("/bench/tier")
BATCH: Final = 1000
IDLE: Final = UploaderSettings(enabled=False)
"""The defaults, but nothing is uploaded behind the measurement's back."""
BARE_KEY: Final = "bare"


def payloads(message_bytes: int) -> list[bytes]:
    """What one `append_many` gets."""
    source = random.Random(message_bytes)
    return [source.randbytes(message_bytes) for _ in range(BATCH)]


@contextmanager
def opened(data: Path, cloud: CloudSettings, wal_root: Path) -> Iterator[WalStorage]:
    settings = StoreSettings(data=data, wal_root=wal_root, cloud=cloud, uploader=IDLE)
    factory = WalStorageFactory(settings)
    try:
        yield factory.for_topic(str(TOPIC))
    finally:
        factory.close()


@dataclass(frozen=True, slots=True)
class BenchLog:
    """A topic's sealed segments, and one plain file with the same bytes."""

    wal_root: Path
    plain: Path
    size: int
    messages: int


def write_log(home: Path, mib: int, message_bytes: int) -> BenchLog:
    wal_root, plain = home / "wal", home / "plain"
    batch = payloads(message_bytes)
    with opened(home, CloudSettings("memory"), wal_root) as storage:
        wal = storage.wal
        while sum(segment.size for segment in wal.segments()) < mib * MIB:
            wal.append_many(batch)
            wal.flush()
        wal.rotate()
        segments = [segment for segment in wal.segments() if segment.count]
        with plain.open("wb") as target:
            for segment in segments:
                with segment.path.open("rb") as source:
                    shutil.copyfileobj(source, target, MIB)
    size = sum(segment.size for segment in segments)
    return BenchLog(wal_root, plain, size, segments[-1].end_offset)


@dataclass(frozen=True, slots=True)
class Uploaded:
    """What an upload cycle did, and how long it took without and with reading back."""

    objects: list[ObjectDescriptor]
    upload_seconds: float
    verify_seconds: float

    @property
    def size(self) -> int:
        return sum(descriptor.size for descriptor in self.objects)


def upload(log: BenchLog, data: Path, cloud: CloudSettings) -> Uploaded:
    """One forced cycle: plan, transfer, sidecar, commit; and reading back, timed apart.

    A message counts as uploaded after both.
    """
    with opened(data, cloud, log.wal_root) as storage:
        ready = storage.uploader
        assert ready is not None
        verify_seconds = 0.0

        def verify(topic: TopicName, descriptor: ObjectDescriptor) -> None:
            nonlocal verify_seconds
            started = time.perf_counter()
            ready.ports.verify(topic, descriptor)
            verify_seconds += time.perf_counter() - started

        ports = replace(ready.ports, verify=verify)
        uploader = Uploader(TOPIC, storage.wal, ready.epoch, ready.catalog, ports)
        started = time.perf_counter()
        objects = uploader.run_once(force=True)
        seconds = time.perf_counter() - started
        uploader.close()
    return Uploaded(objects, seconds - verify_seconds, verify_seconds)


@dataclass(frozen=True, slots=True)
class History:
    """The log as objects, with their catalog: all that a cold reader needs."""

    data: Path
    cloud: CloudSettings
    objects: list[ObjectDescriptor]
    delay_seconds: float = 0
    """How long every read of an object waits first."""
    cached: bool = False
    """Whether objects on local disk may come from the kernel's cache."""

    @property
    def size(self) -> int:
        return sum(descriptor.size for descriptor in self.objects)

    @property
    def messages(self) -> int:
        return self.objects[-1].next_offset

    def objects_by_key(self) -> list[tuple[str, int]]:
        """Of each object its key and size."""
        return [(object_key(TOPIC, each.object_id), each.size) for each in self.objects]


def write_history(log: BenchLog, data: Path, cloud: CloudSettings) -> History:
    return History(data, cloud, upload(log, data, cloud).objects)


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


def chill(history: History) -> None:
    """Has the kernel forget the objects on local disk, so that a read comes from the disk."""
    if history.cloud.backend == "fs" and not history.cached:
        for path in Path(history.cloud.root or "").rglob("*.dnb1"):
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


class FarStore:
    """A store whose every read waits for so long first: distance that costs no processor."""

    def __init__(self, store: RangeStore, seconds: float) -> None:
        self._store = store
        self._seconds = seconds

    @property
    def name(self) -> str:
        return self._store.name

    def get_range(self, key: str, start: int, end: int) -> Buffer:
        time.sleep(self._seconds)
        return self._store.get_range(key, start, end)


@contextmanager
def reader(history: History, settings: CloudReaderSettings) -> Iterator[CloudReader]:
    """A reader of the objects alone: it owns nothing, and needs no log."""
    catalog = Catalog(connect_kv(MetadataSettings(), history.data), IDLE.root_prefix)
    store = connect(history.cloud, history.data)
    pool = FetchPool(settings.fetch_threads)
    try:
        source = CatalogSource(catalog, TOPIC)
        far = FarStore(store, history.delay_seconds) if history.delay_seconds else store
        with CloudReader(TOPIC, far, source, settings, pool) as found:
            yield found
    finally:
        pool.close()
        store.close()
        catalog.close()


def read_through(found: CloudReader) -> int:
    """Reads everything, with every frame checked, and returns the number of its bytes."""
    with found.stream(0) as stream:
        while stream.next() is not None:
            pass
        return stream.bytes_used


# ---- the limits ----

Move: TypeAlias = Callable[[], int]
"""Moves all the bytes and returns their number."""

GetRange: TypeAlias = Callable[[str, int, int], int]
"""Reads an object from one position to another, drops the bytes and returns their number."""


def bare_upload(cloud: CloudSettings, source: Path, settings: UploaderSettings) -> Move:
    """Prepares to write one object with the file's bytes, and returns what is to be timed."""
    if cloud.backend == "fs":
        assert cloud.root is not None
        folder = Path(cloud.root)
        folder.mkdir(parents=True)
        return lambda: _write_file(folder, source, settings.stream_chunk_size)
    client = _client(cloud)
    return lambda: _upload_parts(client, source, settings)


def discard_bare(cloud: CloudSettings) -> None:
    """Removes what was uploaded."""
    if cloud.backend == "fs":
        (Path(cloud.root or "") / BARE_KEY).unlink()
        return
    import obstore

    obstore.delete(_client(cloud), BARE_KEY)


def bare_read(
    cloud: CloudSettings,
    objects: Sequence[tuple[str, int]],
    settings: CloudReaderSettings,
    delay_seconds: float = 0,
) -> Move:
    """The same for reading objects (key and size) by ranges, as many at once as a reader has."""
    get = _file_ranges(cloud) if cloud.backend == "fs" else _object_ranges(_client(cloud))
    if not delay_seconds:
        return lambda: _in_ranges(get, objects, settings)

    def get_late(key: str, start: int, end: int) -> int:
        time.sleep(delay_seconds)
        return get(key, start, end)

    return lambda: _in_ranges(get_late, objects, settings)


def _object_ranges(client: Any) -> GetRange:
    import obstore

    return lambda key, start, end: len(obstore.get_range(client, key, start=start, end=end))


def _file_ranges(cloud: CloudSettings) -> GetRange:
    root = Path(cloud.root or "")

    def get(key: str, start: int, end: int) -> int:
        file = os.open(root / key, os.O_RDONLY)
        try:
            return len(os.pread(file, end - start, start))
        finally:
            os.close(file)

    return get


def _client(settings: CloudSettings) -> Any:
    """With a connection, as Forebay has one once a topic is open."""
    import obstore
    from obstore.store import S3Store

    place = store_location(settings)
    config: Any = dict(place.config)  # its names are checked by `store_location`
    client = S3Store(
        place.bucket,
        prefix=place.prefix,
        config=config,
        client_options={"allow_http": place.allow_http},
    )
    next(iter(obstore.list(client, chunk_size=1)), None)
    return client


def _upload_parts(client: Any, source: Path, settings: UploaderSettings) -> int:
    import obstore

    sent = 0
    with (
        source.open("rb", buffering=0) as file,
        obstore.open_writer(
            client,
            BARE_KEY,
            buffer_size=settings.stream_chunk_size,
            max_concurrency=settings.concurrent_parts,
        ) as writer,
    ):
        while piece := file.read(settings.stream_chunk_size):
            writer.write(piece)
            sent += len(piece)
    return sent


def _write_file(folder: Path, source: Path, piece_bytes: int) -> int:
    """Written, synced, renamed, and the directory synced: what makes a file durable."""
    sent = 0
    temporary = folder / "temporary"
    buffer = memoryview(bytearray(piece_bytes))
    with source.open("rb", buffering=0) as file, temporary.open("wb", buffering=0) as target:
        while taken := file.readinto(buffer):
            sent += target.write(buffer[:taken])
        os.fsync(target.fileno())
    temporary.rename(folder / BARE_KEY)
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return sent


def _in_ranges(
    get: GetRange, objects: Sequence[tuple[str, int]], settings: CloudReaderSettings
) -> int:
    """Calls `get` for every chunk, on a thread for each request that a reader has in flight."""
    chunk_bytes = settings.fetch_chunk_size
    ranges = (
        (key, start, min(start + chunk_bytes, size))
        for key, size in objects
        for start in range(0, size, chunk_bytes)
    )
    turn = threading.Lock()
    counts: list[int] = []

    def work(_number: int) -> None:
        while True:
            with turn:
                wanted = next(ranges, None)
            if wanted is None:
                return
            counts.append(get(*wanted))

    in_threads(1 + settings.read_ahead_chunks, work)
    return sum(counts)
