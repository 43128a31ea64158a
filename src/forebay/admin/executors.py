"""The bytes of segments and objects over HTTP, for executors that cannot see the server's disk.

    GET      /v1/topics/{namespace}/{topic}/segments/{file}   raw bytes of a segment
    HEAD/GET /v1/objects/{key}                                 an object, or its size
    PUT      /v1/objects/{key}                                 writes an object or staged rows

`Range: bytes=a-b` requests a part of a segment or an object.

Segments: only the bytes that the owner published as synced are served. A log that replaced another
one has segments with the same names. With `log=`, a request is refused if the topic has another log
id.

Objects: they are served only if the store keeps them in files on the server's machine. Executors
access any other store directly. Staged rows (`staging/...`) can be written through the server to
every kind of store. An object or a sidecar can be written if the catalog has an intent for it. A
request with the bytes that are already stored succeeds and changes nothing. Other bytes are refused
(409) for objects and staged rows, and for the sidecar of an object that is committed. An object
becomes visible when its last byte has arrived. If the client disconnects before that, nothing is
stored.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import secrets
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Final, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forebay.admin.context import ServerContext
from forebay.admin.errors import error_response
from forebay.admin.operations import BYTES, RAW, Endpoint, Operation, Reply
from forebay.admin.records import Count, Record, json_response
from forebay.admin.request import LONG_STALL_SECONDS, read_query, topic_of
from forebay.admin.response import (
    PIECE_BYTES,
    Client,
    ClientStalled,
    ResponseMemory,
    Share,
    disconnected,
    report_drop,
)
from forebay.catalog.catalog import Catalog
from forebay.catalog.records import State
from forebay.errors import (
    CommitRefused,
    ForebayError,
    ObjectExists,
    ObjectMissing,
    OffsetOutOfRange,
    ServiceUnavailable,
    UnknownTopic,
    UsageError,
)
from forebay.files.local import LocalDisk
from forebay.format.checkpoint import Published
from forebay.format.names import (
    STAGING_PREFIX,
    SegmentNames,
    TopicName,
    is_finished,
    is_staged_file,
    object_files,
    object_metadata,
    object_of_file,
    staged_file,
    topic_of_key,
)
from forebay.limits import DESCRIPTOR_BYTES_MAX, LEDGER_INDEX_BYTES_MAX, MIB, OBJECT_BYTES_MAX
from forebay.metrics import Counter
from forebay.objects.backend import ObjectMeta, check_key
from forebay.objects.store import CloudStore
from forebay.wal.checkpoints import read_published
from forebay.wal.identity import read_log_id

TRANSFERS: Final = Counter(
    "forebay_http_transfer_bytes_total",
    "Bytes of segments, objects and staged rows that passed through the server: sent (down) and "
    "received (up).",
    ("kind", "direction"),
)
CHUNK_BYTES: Final = 1 * MIB
MODIFIED: Final = "Forebay-Modified-Ms"
_THREADS: Final = 8
_SLOTS: Final = 256
_RANGE: Final = re.compile(r"bytes=(?P<first>[0-9]{1,19})?-(?P<last>[0-9]{1,19})?")
_PUBLISHED_READS_MAX: Final = 100
_COMPARE_BYTES: Final = 8 * MIB
_CONCURRENT_PARTS: Final = 2
_LOCKS: Final = 64
_Result = TypeVar("_Result")


# ---- records and operations --------------------------------------------------------------------


class SegmentQuery(Struct, frozen=True):
    log: (
        Annotated[str, Meta(description="The id of the log that the segment must belong to.")]
        | UnsetType
    ) = UNSET


class StoredObject(Record, frozen=True):
    key: str
    size: Count
    etag: str | None
    modified_ms: Count


_RANGE_HEADER: Final = {
    "Range": Annotated[
        str, Meta(pattern="^bytes=[0-9]{1,18}-[0-9]{0,18}$", description="A part of the bytes.")
    ]
}
_RANGED: Final = {"Accept-Ranges": str, "Content-Length": Count}
_OBJECT_HEADERS: Final = {**_RANGED, "ETag": str | UnsetType, MODIFIED: Count}
READ_SEGMENT: Final = Operation(
    "readSegment",
    "cluster",
    "Reads the synced bytes of a segment.",
    {
        200: Reply("All bytes.", RAW, BYTES, _RANGED),
        206: Reply("A part of the bytes.", RAW, BYTES, _RANGED),
    },
    errors=(400, 404, 409, 416),
    query=SegmentQuery,
    headers=_RANGE_HEADER,
)
READ_OBJECT: Final = Operation(
    "readObject",
    "cluster",
    "Reads the bytes of an object, if the store keeps objects in files on the server.",
    {
        200: Reply("All bytes.", RAW, BYTES, _OBJECT_HEADERS),
        206: Reply("A part of the bytes.", RAW, BYTES, _OBJECT_HEADERS),
    },
    errors=(400, 404, 409, 416, 502),
    headers=_RANGE_HEADER,
)
LOOK_AT_OBJECT: Final = Operation(
    "lookAtObject",
    "cluster",
    "Returns the size of an object in `Content-Length`.",
    {200: Reply("The object exists.", headers=_OBJECT_HEADERS)},
    errors=(400, 404, 409, 502),
    method="HEAD",
)
WRITE_OBJECT: Final = Operation(
    "writeObject",
    "cluster",
    "Writes an object that has an intent in the catalog, or staged rows.",
    {200: Reply("The object is stored.", StoredObject)},
    errors=(400, 404, 409, 502, 507),
    method="PUT",
    body={BYTES: RAW},
)


def routes(context: ServerContext) -> list[Endpoint]:
    memory = context.response_memory
    return [
        *_segment_routes(context, Transfers(memory)),
        *_object_routes(context, Transfers(memory)),
    ]


# ---- transfers --------------------------------------------------------------------------------


class Transfers:
    """The threads and slots that all transfers share. Each transfer has one chunk in memory.

    A transfer is refused if no slot is free, and ended if its client neither reads nor sends for
    LONG_STALL_SECONDS. What is sent counts for the budget of all responses. While a client does not
    read, its chunk is dropped.
    """

    def __init__(self, memory: ResponseMemory) -> None:
        self.memory = memory
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="transfer")
        self._used = 0

    async def run(self, action: Callable[[], _Result]) -> _Result:
        """Runs the action on one of the threads, and returns its result."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, action)

    def submit(self, action: Callable[[], None]) -> None:
        """Runs the action on one of the threads without waiting, even in a cancelled task."""
        self._pool.submit(action)

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Holds a slot, in the event loop's thread. Raises ServiceUnavailable if none is free."""
        if self._used >= _SLOTS:
            raise ServiceUnavailable(f"{_SLOTS} transfers are under way: try again later")
        self._used += 1
        try:
            yield
        finally:
            self._used -= 1

    def response(
        self,
        request: Request,
        read: Callable[[int, int], bytes],
        size: int,
        *,
        kind: str,
        name: str,
        headers: dict[str, str],
    ) -> Response:
        """Responds with the requested bytes. `read` returns the bytes between two positions."""
        head = {"Accept-Ranges": "bytes", **headers}
        if request.method == "HEAD":
            return Response(headers={**head, "Content-Length": str(size)}, media_type=BYTES)
        part = byte_range(request.headers.get("range"), size, name)
        head["Content-Length"] = str(part.end - part.start)
        if not part.whole:
            head["Content-Range"] = f"bytes {part.start}-{part.end - 1}/{size}"
        status = 200 if part.whole else 206
        return _PartResponse(self, partial(self._read, read, kind), part, name, status, head)

    async def _read(
        self, read: Callable[[int, int], bytes], kind: str, start: int, end: int
    ) -> bytes:
        chunk = await self.run(partial(read, start, end))
        TRANSFERS.add(len(chunk), kind, "down")
        return chunk


class _PartResponse(Response):
    """A response with a part of a file or an object. It holds a slot while it is sent."""

    def __init__(
        self,
        transfers: Transfers,
        read: Callable[[int, int], Awaitable[bytes]],
        part: ByteRange,
        name: str,
        status: int,
        headers: dict[str, str],
    ) -> None:
        super().__init__(None, status, headers, media_type=BYTES)
        self._transfers = transfers
        self._read = read
        self._part = part
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        memory = self._transfers.memory
        client, share = Client(scope, send, memory, LONG_STALL_SECONDS), Share(memory)
        with self._transfers.slot():
            gone = client.gone = asyncio.create_task(disconnected(receive))
            sending = asyncio.create_task(self._send(client, share))
            try:
                await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (sending, gone):
                    task.cancel()
                await asyncio.wait({sending, gone})
                share.give_back()
                client.close()
        if not sending.cancelled():
            sending.result()

    async def _send(self, client: Client, share: Share) -> None:
        await client.start(self.status_code, self.raw_headers)
        position, size = self._part.start, CHUNK_BYTES
        try:
            while position < self._part.end:
                await share.acquire(size)
                position, taken = await self._send_chunk(client, position, size)
                share.give_back()
                size = CHUNK_BYTES if taken else PIECE_BYTES
                if not taken:
                    await client.drained()
            await client.end()
        except ClientDisconnect:
            pass
        except ClientStalled:
            report_drop(self._name, position)

    async def _send_chunk(self, client: Client, start: int, size: int) -> tuple[int, bool]:
        """Sends bytes from `start` on. Returns where they end, and whether the client read them."""
        chunk = await self._read(start, min(start + size, self._part.end))
        for at in range(0, len(chunk), PIECE_BYTES):
            piece = chunk[at : at + PIECE_BYTES]
            await client.write(piece)
            if not await client.takes():
                return start + at + len(piece), False
        return start + len(chunk), True


@dataclass(frozen=True, slots=True)
class ByteRange:
    """The bytes `start..end` of a segment or an object, without `end`."""

    start: int
    end: int
    whole: bool
    """Whether the request has no `Range` header."""


def byte_range(header: str | None, size: int, name: str) -> ByteRange:
    """Parses a `Range` header. The end is limited to the size.

    Raises OffsetOutOfRange if no byte is in the range, and UsageError for another header.
    """
    if header is None:
        return ByteRange(0, size, whole=True)
    match = _RANGE.fullmatch(header.strip())
    if match is None or (match["first"] is None and match["last"] is None):
        raise UsageError(f"the range {header!r} is invalid: use a form such as bytes=0-1023")
    if match["first"] is None:
        start, end = max(size - int(match["last"]), 0), size
    else:
        start = int(match["first"])
        end = size if match["last"] is None else min(int(match["last"]) + 1, size)
    if start >= size or end <= start:
        raise OffsetOutOfRange(
            f"{name} has {size} bytes: there are none in the range {header}", start=0, end=size
        )
    return ByteRange(start, end, whole=False)


# ---- segments ---------------------------------------------------------------------------------


def _segment_routes(context: ServerContext, transfers: Transfers) -> list[Endpoint]:
    def find(topic: TopicName, name: str, log_id: str | None) -> SegmentFile | None:
        if context.settings.data is None:
            raise UsageError("a store in memory has no segments")
        with context.store.view() as view:
            directory = view.directory(topic)
        if not directory.is_dir():
            raise UnknownTopic(f"this server has no log of {topic}")
        return find_segment(directory, context.settings.wal.file_name, name, log_id)

    async def segment(request: Request) -> Response:
        topic, name = topic_of(request.path_params), request.path_params["file"]
        query = read_query(request.scope["query_string"], SegmentQuery, lenient=True)
        log_id = None if query.log is UNSET else query.log
        found = await transfers.run(partial(find, topic, name, log_id))
        if found is None:
            return error_response(404, "ObjectMissing", f"{topic} has no segment {name!r}")
        read = partial(read_exactly, found.path)
        return transfers.response(
            request, read, found.size, kind="segment", name=f"{topic}: {name}", headers={}
        )

    return [Endpoint("/v1/topics/{namespace}/{topic}/segments/{file}", segment, READ_SEGMENT)]


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """The synced part of a segment."""

    path: Path
    size: int


def find_segment(
    directory: Path, file_name: str, name: str, log_id: str | None = None
) -> SegmentFile | None:
    """Returns the segment `name` of a topic's directory; None if it does not exist.

    Raises CommitRefused if the log in the directory does not have the id `log_id`.
    """
    disk = LocalDisk()
    seq = SegmentNames(file_name).parse(name)
    published = _read_published(disk, directory)
    if log_id is not None and read_log_id(disk, directory) != log_id:
        raise CommitRefused(
            f"{directory.name}: the segments do not belong to the log {log_id} any more"
        )
    if seq is None or published is None or seq > published.seq:
        return None
    path = directory / name
    try:
        size = published.position if seq == published.seq else disk.size(path)
        return SegmentFile(path, size) if disk.exists(path) else None
    except FileNotFoundError:  # retention has deleted it
        return None


def _read_published(disk: LocalDisk, directory: Path) -> Published | None:
    """Reads the record again if it is invalid, because the owner may be overwriting it."""
    found = (read_published(disk, directory) for _ in range(_PUBLISHED_READS_MAX))
    return next((each for each in found if each is not None), None)


def read_exactly(path: Path, start: int, end: int) -> bytes:
    """Reads the bytes `start..end`. Raises OSError if the file is missing or too short."""
    with path.open("rb", buffering=0) as file:
        data = os.pread(file.fileno(), end - start, start)
        while len(data) < end - start:
            more = os.pread(file.fileno(), end - start - len(data), start + len(data))
            if not more:
                raise OSError(f"{path} ends before {end}")
            data += more
    return data


# ---- objects ----------------------------------------------------------------------------------


def _object_routes(context: ServerContext, transfers: Transfers) -> list[Endpoint]:
    objects = ObjectAccess(context)

    async def get(request: Request) -> Response:
        key = request.path_params["key"]
        try:
            meta = await transfers.run(partial(objects.head, key))
        except ObjectMissing as error:
            return error_response(404, "ObjectMissing", str(error))
        except ObjectsElsewhere as error:
            return error_response(409, "UsageError", str(error))
        store = objects.store()

        def read(start: int, end: int) -> bytes:
            return bytes(store.get_range(key, start, end))

        return transfers.response(
            request, read, meta.size, kind="object", name=key, headers=_headers(meta)
        )

    async def put(request: Request) -> Response:
        body = request.stream()
        try:
            try:
                with transfers.slot():
                    target = target_of(request.path_params["key"])
                    upload = await transfers.run(partial(objects.begin, target))
                    meta = await _receive(body, transfers, upload)
            except (CommitRefused, UsageError):
                # The client reads the response only after it has sent the whole body.
                while await _next_chunk(body) is not None:
                    pass
                raise
        except ClientDisconnect:
            return error_response(
                400, "UsageError", "the client disconnected before the end of the body"
            )
        except ObjectsElsewhere as error:
            return error_response(409, "UsageError", str(error))
        stored = StoredObject(meta.key, meta.size, meta.etag, meta.modified_ms)
        return json_response(stored, headers=_headers(meta))

    path = "/v1/objects/{key:path}"
    return [Endpoint(path, get, READ_OBJECT, LOOK_AT_OBJECT), Endpoint(path, put, WRITE_OBJECT)]


def _headers(meta: ObjectMeta) -> dict[str, str]:
    etag = {} if meta.etag is None else {"ETag": f'"{meta.etag.strip(chr(34))}"'}
    return {MODIFIED: str(meta.modified_ms), **etag}


async def _receive(
    body: AsyncIterator[bytes], transfers: Transfers, upload: ObjectUpload
) -> ObjectMeta:
    """Writes the body to the upload, a chunk at a time, and publishes it."""
    published = False
    try:
        held = bytearray()
        while (chunk := await _next_chunk(body)) is not None:
            held += chunk
            if len(held) >= CHUNK_BYTES:
                await transfers.run(partial(upload.write, bytes(held)))
                held.clear()
        if held:
            await transfers.run(partial(upload.write, bytes(held)))
        meta = await transfers.run(upload.publish)
        published = True
        return meta
    finally:
        if not published:
            transfers.submit(upload.abort)


async def _next_chunk(body: AsyncIterator[bytes]) -> bytes | None:
    """The next bytes of a body, None at its end. Raises ClientDisconnect after a long silence."""
    try:
        async with asyncio.timeout(LONG_STALL_SECONDS):
            return await anext(body, None)
    except TimeoutError:
        raise ClientDisconnect from None


class ObjectsElsewhere(UsageError):
    """The objects are in a store that executors can access directly."""


@dataclass(frozen=True, slots=True)
class PutTarget:
    """A key that may be written: an object, its sidecar, or staged rows."""

    key: str
    topic: TopicName | None
    object_id: str
    bytes_max: int
    written_once: bool
    """False for a sidecar, which differs from one attempt to the next."""

    @property
    def kind(self) -> str:
        return "staging" if self.topic is None else "object"

    @property
    def metadata(self) -> dict[str, str]:
        """The user metadata, which the name tells; sidecars and staged rows have none."""
        if self.topic is None or not self.written_once:
            return {}
        return object_metadata(self.topic, self.key.rpartition("/")[2])

    def state(self, catalog: Catalog) -> State | None:
        """The object's state in the catalog; None if the catalog does not have it."""
        assert self.topic is not None, "staged rows are not in the catalog"
        life = catalog.life(self.topic, self.object_id)
        return None if life is None else life.state


def target_of(key: str) -> PutTarget:
    """Parses the key of a PUT. Raises UsageError for a key that clients may not write."""
    check_key(key)
    if is_staged_file(key):
        return PutTarget(key, None, "", OBJECT_BYTES_MAX, written_once=True)
    found = topic_of_key(key)
    if found is not None:
        topic, name = found
        object_id = object_of_file(name)
        if is_finished(object_id):
            is_object = name in object_files(object_id)
            most = OBJECT_BYTES_MAX if name == object_id else DESCRIPTOR_BYTES_MAX
            if is_object and name != object_id:
                most = LEDGER_INDEX_BYTES_MAX
            return PutTarget(key, topic, object_id, most, written_once=is_object)
    raise UsageError(
        f"{key!r} cannot be written: it is neither an object of a topic nor staged rows"
    )


class ObjectAccess:
    """The objects of the server that executors may read and write. Thread-safe."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._locks = [threading.Lock() for _ in range(_LOCKS)]

    def store(self) -> CloudStore:
        return self._ports()[0]

    def head(self, key: str) -> ObjectMeta:
        self._require_here(check_key(key))
        return self.store().head(key)

    def begin(self, target: PutTarget) -> ObjectUpload:
        """Begins an upload. Raises CommitRefused if the catalog does not know the object."""
        self._require_here(target.key)
        store, catalog = self._ports()
        dead = (None, State.DELETING, State.GONE)
        if target.topic is not None and target.state(catalog) in dead:
            raise CommitRefused(
                f"{target.key}: the catalog has no intent for this object: create one before "
                "the upload"
            )
        lock = self._locks[hash(target.key) % _LOCKS]
        chunk_bytes = self._context.settings.uploader.stream_chunk_size
        return ObjectUpload(store, catalog, target, chunk_bytes, lock)

    def _require_here(self, key: str) -> None:
        """Raises ObjectsElsewhere unless the key is of staged rows or objects are local files."""
        backend = self._context.settings.cloud.backend
        if backend != "fs" and not key.startswith(STAGING_PREFIX):
            raise ObjectsElsewhere(
                f"the objects are in {self.store().name}: access that store directly"
            )

    def _ports(self) -> tuple[CloudStore, Catalog]:
        with self._context.store.view() as view:
            resources = view.resources()
        assert resources is not None, "a store that is open has a catalog"
        return resources.store, resources.catalog


class ObjectUpload:
    """One object being written. A lock serialises its calls: a cancelled call may still run."""

    def __init__(
        self,
        store: CloudStore,
        catalog: Catalog,
        target: PutTarget,
        chunk_bytes: int,
        publishing: threading.Lock,
    ) -> None:
        self._store = store
        self._catalog = catalog
        self._target = target
        self._publishing = publishing
        self._lock = threading.Lock()
        self._digest = hashlib.sha256()
        self._size = 0
        self._writer = store.open_streaming_writer(
            target.key,
            chunk_bytes=chunk_bytes,
            concurrent_parts=_CONCURRENT_PARTS,
            metadata=target.metadata,
            create=target.written_once,
        )

    def write(self, data: bytes) -> None:
        with self._lock:
            self._size += len(data)
            if self._size > self._target.bytes_max:
                raise UsageError(f"{self._target.key}: larger than {self._target.bytes_max} bytes")
            self._digest.update(data)
            if not self._writer.ended:
                try:
                    self._writer.write(data)
                except ObjectExists:  # `publish` compares the rest by its hash
                    self._writer.abort()
        TRANSFERS.add(len(data), self._target.kind, "up")

    def publish(self) -> ObjectMeta:
        """Makes the object visible.

        Raises ObjectExists or CommitRefused if that would change a stored object.
        """
        with self._lock, self._publishing:
            present = self._present()
            if present is not None and self._is_same(present):
                self._writer.abort()
                return present
            self._require_writable(present)
            return self._create() if self._target.written_once else self._replace(present)

    def abort(self) -> None:
        with self._lock:
            self._writer.abort()

    def _present(self) -> ObjectMeta | None:
        try:
            return self._store.head(self._target.key)
        except ObjectMissing:
            return None

    def _is_same(self, present: ObjectMeta) -> bool:
        if present.size != self._size:
            return False
        digest = hashlib.sha256()
        for start in range(0, present.size, _COMPARE_BYTES):
            end = min(start + _COMPARE_BYTES, present.size)
            digest.update(self._store.get_range(present.key, start, end))
        return digest.digest() == self._digest.digest()

    def _require_writable(self, present: ObjectMeta | None) -> None:
        target = self._target
        if target.topic is not None and target.state(self._catalog) != State.INTENDED:
            raise self._refused(present, CommitRefused)
        if present is not None and target.written_once:
            raise self._refused(present, ObjectExists)

    def _create(self) -> ObjectMeta:
        if self._writer.ended:
            raise ServiceUnavailable(
                f"{self._target.key} existed when the request began, and is deleted now; try again"
            )
        try:
            return self._writer.close()
        except ObjectExists:  # created after `publish` looked
            present = self._present()
            if present is not None and self._is_same(present):
                return present
            raise self._refused(present, ObjectExists) from None

    def _replace(self, present: ObjectMeta | None) -> ObjectMeta:
        """Replaces a sidecar; puts it back if its object was committed meanwhile.

        The backup has the name of a staged file. If this process dies, a sweep of old staged files
        deletes it.
        """
        if present is None:
            return self._writer.close()
        backup = staged_file(secrets.token_hex(8), 0, 0)
        self._store.copy_object(present.key, backup)
        try:
            meta = self._writer.close()
            if self._target.state(self._catalog) != State.INTENDED:
                self._store.copy_object(backup, meta.key)
                raise self._refused(present, CommitRefused)
            return meta
        finally:
            self._store.delete_object(backup)

    def _refused(self, present: ObjectMeta | None, kind: type[ForebayError]) -> ForebayError:
        there = "is gone" if present is None else f"exists with {present.size} bytes"
        return kind(
            f"{self._target.key} {there}, and the request has {self._size} other bytes: "
            "a stored object is never changed"
        )
