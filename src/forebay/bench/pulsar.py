"""`forebay bench pulsar`: offloads ledgers of Pulsar and reads them, beside the bare client.

It measures local disk, and with `--config` also the object store of a configuration. The ledger is
in memory: messages of one size, each an entry. Its objects go below a new prefix of the store's
root, and are deleted.

An offload writes data and index. Its limit is the same client that writes one object with the same
bytes, in parts of the size of a block, as many at a time. A read finds every entry, and compares
the checksum of each. Its limit are the same ranges of the same object, as many at a time. What is
read from local disk comes from the kernel's cache, for both.

Rows with "+ 30 ms" wait before each request. There eight readers of one handle are compared with
one of them, each of which reads the whole ledger. Without read-ahead a reader has one request at a
time, as in a broker; with read-ahead, one reader already keeps several requests under way.

The last row is Spark over a ledger (`pulsar_spark`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from forebay.bench.bare_store import bare_read, bare_upload
from forebay.bench.history import History, payloads
from forebay.bench.measure import (
    Measurement,
    Timed,
    in_threads,
    progress_line,
    rate_of,
    result_of,
    run_rounds,
    scratch,
)
from forebay.bench.tier import LATENCY_MS, Place, configured_place, local_place
from forebay.config import load_config
from forebay.format.pulsar.blocks import Entry
from forebay.format.pulsar.entry import MessageMetadata, encode_entry
from forebay.format.pulsar.ledger_metadata import LedgerMetadata
from forebay.limits import FETCH_THREADS, MIB
from forebay.objects.store import CloudStore, connect
from forebay.pulsar.offloader import LedgerOffloader, OffloadSettings
from forebay.pulsar.read_handle import OffloadedReadHandle, ReadSettings
from forebay.read.fetch_pool import FetchPool
from forebay.settings import StoreSettings
from forebay.testing import FaultBackend

OFFLOAD_GOAL: Final = 0.7
READ_GOAL: Final = 0.7
READERS: Final = 8
READERS_GOAL: Final = 4.0
PARTS: Final = 4
_LEDGER_ID: Final = 1
_ALONE: Final = ReadSettings(read_ahead_chunks=0)


def run(
    directory: Path | None,
    *,
    rounds: int,
    mib: int,
    message_bytes: int,
    config: Path | None,
    spark: bool = False,
    progress: bool,
) -> dict[str, Any]:
    """All measurements, as data for `forebay.bench.measure.show`."""
    started = time.time()
    say = progress_line(progress=progress)
    with scratch(directory) as home, ExitStack() as stack:
        places = [local_place(home)]
        if config is not None:
            places.append(configured_place(load_config(config)))
        say("preparing")
        ledger = BenchLedger(mib, message_bytes)
        rows: list[Measurement] = []
        for number, place in enumerate(places):
            settings = stack.enter_context(place.new_store(home / f"ledger-{number}"))
            stored = store_ledger(settings, ledger)
            plain = home / f"plain-{number}"
            write_plain(settings, stored, plain)
            rows += _rows(place, settings, ledger, stored, plain, message_bytes)
        if spark:
            from forebay.bench.pulsar_spark import decoding

            rows += stack.enter_context(decoding(home / "spark", mib, message_bytes))
        results = run_rounds(rows, rounds, directory, say)
    say("")
    return result_of(
        "pulsar",
        rounds,
        directory,
        mib=mib,
        results=[result.as_json() for result in results],
        seconds=time.time() - started,
    )


class BenchLedger:
    """A closed ledger in memory, whose entries are messages that repeat. A `ReadHandle`."""

    ledger_id = _LEDGER_ID
    closed = True

    def __init__(self, mib: int, message_bytes: int) -> None:
        self._entries = _entries(message_bytes)
        count = max(mib * MIB // len(self._entries[0]), 1)
        self.last_add_confirmed = count - 1
        self.length = sum(len(self._entries[at % len(self._entries)]) for at in range(count))
        self.metadata = LedgerMetadata(self.length, self.last_add_confirmed)

    def read(self, first: int, last: int) -> Iterator[Entry]:
        views = [memoryview(entry) for entry in self._entries]
        for entry_id in range(first, last + 1):
            yield Entry(entry_id, views[entry_id % len(views)])

    def close(self) -> None:
        """Nothing to do."""


def _entries(message_bytes: int) -> Sequence[bytes]:
    return [
        encode_entry(MessageMetadata("bench", number, 1_700_000_000_000), payload)
        for number, payload in enumerate(payloads(message_bytes))
    ]


@dataclass(frozen=True, slots=True)
class StoredLedger:
    """A ledger in a store."""

    uid: str
    data_key: str
    data_bytes: int


def offload_settings(reading: ReadSettings | None = None) -> OffloadSettings:
    return OffloadSettings(parts=PARTS, reading=reading or ReadSettings())


def store_ledger(settings: StoreSettings, ledger: BenchLedger) -> StoredLedger:
    store = connect(settings.cloud)
    try:
        offloader, uid = LedgerOffloader(store, offload_settings()), str(uuid4())
        index = offloader.offload(ledger, uid)
        return StoredLedger(uid, offloader.objects(_LEDGER_ID, uid).data, index.data_bytes)
    finally:
        store.close()


def write_plain(settings: StoreSettings, stored: StoredLedger, target: Path) -> None:
    """Writes a file with the bytes of the data object, for the limit of an offload."""
    store = connect(settings.cloud)
    try:
        with target.open("wb") as file:
            for chunk in store.open_ranged_reader(stored.data_key, chunk_bytes=8 * MIB):
                file.write(chunk)
    finally:
        store.close()


# ---- the measurements ----


def _rows(
    place: Place,
    settings: StoreSettings,
    ledger: BenchLedger,
    stored: StoredLedger,
    plain: Path,
    size: int,
) -> list[Measurement]:
    far = not place.local  # the goals are for stores that cost a request
    written = "bare write + fsync + rename" if place.local else "bare multipart upload"
    rows = [
        Measurement(
            f"offload a ledger, {place.name}", size, "MiB/s",
            partial(_offload, place, ledger), written,
            partial(_bare_offload, place, plain), OFFLOAD_GOAL if far else None,
        ),
        Measurement(
            f"read a ledger, {place.name}", size, "MiB/s",
            _reading(settings, stored), "bare ranged reads",
            partial(_bare_read, settings, stored), READ_GOAL if far else None,
        ),
        Measurement(
            f"read a ledger, an object for each entry, {place.name}", size, "MiB/s",
            _reading(settings, stored, read=read_entries), "bare ranged reads",
            partial(_bare_read, settings, stored),
        ),
    ]  # fmt: skip
    for reading, name, goal in (
        (_ALONE, "without read-ahead", READERS_GOAL),
        (ReadSettings(), "with read-ahead", None),
    ):
        rows.append(
            Measurement(
                f"{READERS} readers {name}, {place.name} + {LATENCY_MS} ms", size, "MiB/s",
                _reading(settings, stored, READERS, LATENCY_MS / 1000, reading),
                "one of them",
                _reading(settings, stored, 1, LATENCY_MS / 1000, reading), goal,
            )
        )  # fmt: skip
    return rows


def _offload(place: Place, ledger: BenchLedger, path: Path) -> float:
    with place.new_store(path / "store") as settings:
        store = connect(settings.cloud)
        try:
            _warm(store)
            offloader = LedgerOffloader(store, offload_settings())
            return rate_of(ledger.length / MIB, lambda: offloader.offload(ledger, str(uuid4())))
        finally:
            store.close()


def _warm(store: CloudStore) -> None:
    """Connects, as the limit has before it is measured."""
    next(iter(store.list("")), None)


def _bare_offload(place: Place, plain: Path, path: Path) -> float:
    with place.new_store(path / "store") as settings:
        blocks = offload_settings()
        uploader = replace(
            settings.uploader,
            stream_chunk_size=blocks.block_bytes,
            concurrent_parts=blocks.parts,
        )
        move = bare_upload(settings.cloud, plain, uploader)
        return rate_of(plain.stat().st_size / MIB, move)


def _reading(
    settings: StoreSettings,
    stored: StoredLedger,
    readers: int = 1,
    delay_seconds: float = 0,
    reading: ReadSettings | None = None,
    read: Callable[[OffloadedReadHandle], None] | None = None,
) -> Timed:
    """The rate of one reader, or of several together, each of which reads the whole ledger."""

    def measure(_path: Path) -> float:
        with opened(settings, stored, delay_seconds, reading or ReadSettings()) as handle:
            amount = readers * stored.data_bytes / MIB
            return rate_of(
                amount, lambda: in_threads(readers, lambda _number: (read or read_whole)(handle))
            )

    return measure


@contextmanager
def opened(
    settings: StoreSettings, stored: StoredLedger, delay_seconds: float, reading: ReadSettings
) -> Iterator[OffloadedReadHandle]:
    """A handle with a pool for as many requests as its readers have under way."""
    store = connect(settings.cloud)
    if delay_seconds:
        backend = FaultBackend(store)
        backend.hook("get_range", lambda _key: time.sleep(delay_seconds))
        store = CloudStore(backend)
    pool = FetchPool(READERS * (1 + reading.read_ahead_chunks) if delay_seconds else FETCH_THREADS)
    try:
        offloader = LedgerOffloader(store, offload_settings(reading), pool=pool)
        with offloader.read_offloaded(_LEDGER_ID, stored.uid) as handle:
            yield handle
    finally:
        pool.close()
        store.close()


def read_whole(handle: OffloadedReadHandle) -> None:
    """Passes all entries in batches, and counts their bytes."""
    batches = handle.scan(0, handle.last_add_confirmed)
    assert sum(sum(batch.lengths) for batch in batches) == handle.length, "every entry was read"


def read_entries(handle: OffloadedReadHandle) -> None:
    """Passes all entries one by one, and looks at the size of each."""
    size = 0
    for entry in handle.read(0, handle.last_add_confirmed):
        size += len(entry.data)
    assert size == handle.length, "every entry was read"


def _bare_read(settings: StoreSettings, stored: StoredLedger, _path: Path) -> float:
    reading = ReadSettings()
    reader = replace(
        settings.cloud_reader,
        fetch_chunk_size=reading.read_bytes,
        read_ahead_chunks=reading.read_ahead_chunks,
    )
    history = History(
        replace(settings, cloud_reader=reader), ((stored.data_key, stored.data_bytes),), 0
    )
    return rate_of(stored.data_bytes / MIB, bare_read(history))
