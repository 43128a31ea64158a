"""The limits of `forebay bench tier`: the same bytes, moved with nothing of Forebay in between.

For a remote store that is its client alone, set up as Forebay sets it up, with the same sizes and
the same number of requests in flight. For local disk it is plain system calls.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeAlias

from forebay.bench.history import History
from forebay.bench.measure import in_threads
from forebay.objects.remote import store_location
from forebay.settings import CloudSettings, UploaderSettings

BARE_KEY: Final = "bare"

Move: TypeAlias = Callable[[], int]
"""Moves all the bytes and returns their number."""

GetRange: TypeAlias = Callable[[str, int, int], int]
"""Reads an object from one position to another, drops the bytes and returns their number."""


def bare_upload(cloud: CloudSettings, source: Path, settings: UploaderSettings) -> Move:
    """Connects, and returns what writes one object with the bytes of the file `source`."""
    if cloud.backend == "fs":
        assert cloud.root is not None
        folder = Path(cloud.root)
        folder.mkdir(parents=True)
        return lambda: _write_file(folder, source, settings.stream_chunk_size)
    client = _client(cloud)
    return lambda: _upload_parts(client, source, settings)


def bare_read(history: History) -> Move:
    """Connects, and returns what reads all objects, as many ranges at once as a reader does."""
    cloud, delay_seconds = history.settings.cloud, history.delay_seconds
    get = _file_ranges(cloud) if cloud.backend == "fs" else _object_ranges(_client(cloud))

    def get_late(key: str, start: int, end: int) -> int:
        time.sleep(delay_seconds)
        return get(key, start, end)

    return lambda: _in_ranges(get_late if delay_seconds else get, history)


def _client(settings: CloudSettings) -> Any:
    """With a connection, as Forebay has one once a topic is open."""
    import obstore
    from obstore.store import AzureStore, GCSStore, S3Store

    kinds: dict[str, Any] = {"s3": S3Store, "gcs": GCSStore, "azure": AzureStore}
    location = store_location(settings)
    client = kinds[location.kind](
        location.bucket,
        prefix=location.prefix or None,
        config=dict(location.config),
        client_options={"allow_http": location.allow_http},
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


def _in_ranges(get: GetRange, history: History) -> int:
    """Calls `get` for every chunk, on a thread for each request that a reader has in flight."""
    settings = history.settings.cloud_reader
    chunk_bytes = settings.fetch_chunk_size
    ranges = (
        (key, start, min(start + chunk_bytes, size))
        for key, size in history.objects
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
