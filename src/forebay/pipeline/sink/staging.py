"""Where rows wait between the tasks that write them and the driver that appends them.

    staging/<write>/<partition>-<attempt>.arrow    rows of one partition: an Arrow IPC stream
    staging/<write>/manifest.json                  which of those files make one batch

A task never appends. It writes its rows as one object, which is there whole or not at all, so a
killed task and one that is tried again leave files and nothing else. The driver appends what the
files of successful tasks hold, and deletes them. What nobody names any more is removed by age.

Everything that could make an append fail is checked before a row is staged (`columns.py`), so that
a batch does not stop in the middle because of one of its rows.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Final
from zlib import crc32

import pyarrow as pa

from forebay.clock import SYSTEM_CLOCK, Clock
from forebay.errors import FormatError, ObjectMissing
from forebay.format.names import STAGING_PREFIX, staging_manifest, write_of_staged
from forebay.limits import MIB
from forebay.objects.store import CloudStore, CloudWriter

AGE_HOURS: Final = 7 * 24
"""Files that are older belong to no job that can still use them."""

STAGED: Final = pa.schema(
    [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("key", pa.string()),
        pa.field("value", pa.binary(), nullable=False),
        pa.field("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())]))),
    ]
)
"""The columns of a staged file."""

_PIECE_BYTES: Final = 4 * MIB
"""Of one batch in a staged file, about: what the driver holds of it at a time."""
_READ_BYTES: Final = 4 * MIB
_CONCURRENT_PARTS: Final = 2
_MANIFEST_BYTES_MAX: Final = 64 * MIB
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Part:
    """The staged rows of one partition."""

    partition: int
    key: str | None
    """None: the partition has no rows."""
    rows: int
    bytes: int
    topics: Mapping[str, int] = field(default_factory=dict)
    """How many of the rows go to each topic."""
    digest: int = 0
    """The sum of the values' checksums: the same for the same rows, in whatever order."""


# ---- one partition's rows --------------------------------------------------------------------


def stage(
    store: CloudStore,
    key: str,
    partition: int,
    batches: Iterator[pa.RecordBatch],
    *,
    chunk_bytes: int,
) -> Part:
    """Writes the rows, which have the columns STAGED, as one object; nothing if there are none."""
    rows = digest = 0
    topics: dict[str, int] = {}
    writer: CloudWriter | None = None
    out: Any = None
    try:
        for batch in batches:
            if not batch.num_rows:
                continue
            if writer is None:
                writer = store.open_writer(
                    key, chunk_bytes=chunk_bytes, concurrent_parts=_CONCURRENT_PARTS
                )
                out = pa.ipc.new_stream(pa.PythonFile(_Sink(writer), mode="w"), STAGED)
            for piece in _pieces(batch):
                digest += _checksums(piece.column("value"))
                out.write_batch(piece)
            rows += batch.num_rows
            for found in batch.column("topic").value_counts():
                name = found["values"].as_py()
                topics[name] = topics.get(name, 0) + found["counts"].as_py()
        if writer is None:
            return Part(partition, None, 0, 0)
        out.close()
        return Part(partition, key, rows, writer.close().size, topics, digest)
    except BaseException:
        if writer is not None:
            writer.abort()
        raise


def _checksums(values: pa.Array) -> int:
    _, offsets, data = values.buffers()
    if data is None:
        return 0
    ends = memoryview(offsets).cast("i")[values.offset : values.offset + len(values) + 1]
    view = memoryview(data)
    return sum(crc32(view[begin:end]) for begin, end in pairwise(ends))


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The batch cut into pieces of a bounded size; a single row is never cut."""
    if batch.nbytes <= _PIECE_BYTES or batch.num_rows <= 1:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _pieces(batch.slice(0, half))
    yield from _pieces(batch.slice(half))


class _Sink(io.RawIOBase):
    """A writer of objects as Arrow wants it."""

    def __init__(self, writer: CloudWriter) -> None:
        super().__init__()
        self._writer = writer

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._writer.write(data)
        return memoryview(data).nbytes


def staged_rows(store: CloudStore, part: Part) -> Iterator[pa.RecordBatch]:
    """The rows of a part in their order, a bounded piece at a time."""
    if part.key is None:
        return
    with io.BufferedReader(_Source(store, part.key, part.bytes), _READ_BYTES) as file:
        try:
            yield from pa.ipc.open_stream(file)
        except pa.ArrowInvalid as error:
            raise FormatError(f"{store.name}: {part.key} is no staged file: {error}") from error


class _Source(io.RawIOBase):
    """An object as a file that is read from its beginning to its end."""

    def __init__(self, store: CloudStore, key: str, size: int) -> None:
        super().__init__()
        self._store = store
        self._key = key
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = min(view.nbytes, self._size - self._at, _READ_BYTES)
        if count > 0:
            view[:count] = self._store.get_range(self._key, self._at, self._at + count)
            self._at += count
        return count


# ---- the files of one batch ------------------------------------------------------------------


def write_manifest(store: CloudStore, write: str, parts: Sequence[Part]) -> None:
    """Names the files of a batch, before the first of their rows is appended."""
    body = {"version": _VERSION, "parts": [asdict(part) for part in parts]}
    store.put(staging_manifest(write), json.dumps(body, separators=(",", ":")).encode())


def read_manifest(store: CloudStore, write: str) -> list[Part] | None:
    """The parts of a batch whose files are all there still; None if any of them is gone."""
    key = staging_manifest(write)
    try:
        data = bytes(store.get(key, _MANIFEST_BYTES_MAX))
        parts = _decode_manifest(data, key)
        for part in parts:
            if part.key is not None:
                store.head(part.key)
    except ObjectMissing:
        return None
    return parts


def has_manifest(store: CloudStore, write: str) -> bool:
    try:
        store.head(staging_manifest(write))
    except ObjectMissing:
        return False
    return True


def _decode_manifest(data: bytes, key: str) -> list[Part]:
    try:
        body = json.loads(data)
        if body["version"] != _VERSION:
            raise FormatError(f"{key}: version {body['version']}; this program knows {_VERSION}")
        return [Part(**part) for part in body["parts"]]
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{key} is no manifest of staged files: {error}") from error


def discard(store: CloudStore, parts: Sequence[Part], *, manifests: bool = True) -> None:
    """Deletes the files of the parts, and with `manifests` what names them. Idempotent."""
    if manifests:
        # First: files that a manifest names must be there.
        for write in {write_of_staged(part.key) for part in parts if part.key is not None}:
            store.delete(staging_manifest(write))
    for part in parts:
        if part.key is not None:
            store.delete(part.key)


def sweep_staging(
    store: CloudStore, *, age_hours: float = AGE_HOURS, clock: Clock = SYSTEM_CLOCK
) -> int:
    """Deletes the staged files that are older; answers how many those were."""
    oldest_ms = clock.now_ms() - int(age_hours * 3_600_000)
    found = [meta.key for meta in store.list(STAGING_PREFIX) if meta.modified_ms < oldest_ms]
    for key in sorted(found, key=lambda key: not key.endswith("manifest.json")):
        store.delete(key)
    return len(found)
