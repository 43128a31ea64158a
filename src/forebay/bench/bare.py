"""The limits of `forebay bench tier`: the same bytes moved with nothing of Forebay in between.

For a remote store that is its client alone, set up as Forebay sets it up, with the same sizes and
the same number of requests in flight; for local disk, plain system calls. Each function prepares,
and answers what is to be timed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from forebay.objects.remote import store_location
from forebay.settings import CloudReaderSettings, CloudSettings, UploaderSettings

KEY: Final = "bare"

Move: TypeAlias = Callable[[], int]
"""Moves all the bytes and answers how many."""

GetRange: TypeAlias = Callable[[str, int, int], int]
"""Reads the bytes from one position to another of an object, drops them and answers how many."""


def uploading(cloud: CloudSettings, source: Path, settings: UploaderSettings) -> Move:
    """One object with the file's bytes."""
    if cloud.backend == "fs":
        assert cloud.root is not None
        folder = Path(cloud.root)
        folder.mkdir(parents=True)
        return lambda: _write_file(folder, source, settings.stream_chunk_size)
    client = _client(cloud)
    return lambda: _upload_parts(client, source, settings)


def discard(cloud: CloudSettings) -> None:
    """Removes what was uploaded."""
    if cloud.backend == "fs":
        (Path(cloud.root or "") / KEY).unlink()
        return
    import obstore

    obstore.delete(_client(cloud), KEY)


def reading(
    cloud: CloudSettings,
    objects: Sequence[tuple[str, int]],
    settings: CloudReaderSettings,
    delay_seconds: float = 0,
) -> Move:
    """All of the objects (key and size) by ranged reads, as many at once as a reader has."""
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
            KEY,
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
    temporary.rename(folder / KEY)
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

    def work() -> None:
        while True:
            with turn:
                wanted = next(ranges, None)
            if wanted is None:
                return
            counts.append(get(*wanted))

    threads = [threading.Thread(target=work) for _ in range(1 + settings.read_ahead_chunks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts)
