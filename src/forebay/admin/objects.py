"""`HEAD`, `GET` and `PUT /v1/objects/{key}`: the object store, for executors that cannot see it.

For a store whose objects are files of the server's machine; any other store executors ask
themselves. Rows of the sink (`staging/...`) may be put through the server into every store.

What may be put: the rows of a write, and objects and their sidecars that the catalog has as
intended. What is there is never changed into something else: the same bytes again succeed and
change nothing, and other bytes are refused, unless nobody has committed the object yet. An object
is visible when its last byte has come, and a client that breaks off leaves nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from forebay.admin.problems import problem
from forebay.admin.site import Site
from forebay.admin.transfers import PIECE_BYTES, STALL_SECONDS_MAX, TRANSFERS, Transfers
from forebay.catalog.catalog import Catalog
from forebay.catalog.records import State
from forebay.errors import CommitRefused, ObjectMissing, UsageError
from forebay.format.names import (
    SIDECAR_ENDING,
    STAGING_PREFIX,
    TopicName,
    is_staged_file,
    parse_object,
    staged_file,
    topic_of_key,
)
from forebay.limits import DESCRIPTOR_BYTES_MAX, GIB, MIB
from forebay.objects.backend import ObjectMeta, check_key
from forebay.objects.store import CloudStore

OBJECT_BYTES_MAX: Final = 64 * GIB
"""Of one body."""
_COMPARE_BYTES: Final = 8 * MIB
_CONCURRENT_PARTS: Final = 2
_LOCKS: Final = 64
MODIFIED: Final = "Forebay-Modified-Ms"


class NotThisWay(UsageError):
    """The objects are where executors can go themselves."""


@dataclass(frozen=True, slots=True)
class Target:
    """A key that may be written: an object, its sidecar, or staged rows."""

    key: str
    topic: TopicName | None
    object_id: str
    bytes_max: int

    @property
    def kind(self) -> str:
        return "staging" if self.topic is None else "object"


def target_of(key: str) -> Target:
    """UsageError for a key that nobody but the server itself writes."""
    check_key(key)
    if is_staged_file(key):
        return Target(key, None, "", OBJECT_BYTES_MAX)
    found = topic_of_key(key)
    if found is not None:
        topic, name = found
        object_id = name.removesuffix(SIDECAR_ENDING)
        if parse_object(object_id) is not None:
            most = OBJECT_BYTES_MAX if name == object_id else DESCRIPTOR_BYTES_MAX
            return Target(key, topic, object_id, most)
    raise UsageError(f"{key!r} is no object of a topic, and no rows of a write: it cannot be put")


class ObjectDoor:
    """What may be read and written of a server's objects. Thread-safe."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._locks = [threading.Lock() for _ in range(_LOCKS)]

    def require_here(self, key: str) -> None:
        """Unless the key is of staged rows, the objects have to be files of this machine."""
        backend = self._site.settings.cloud.backend
        if backend != "fs" and not key.startswith(STAGING_PREFIX):
            raise NotThisWay(f"the objects are in {self.store().name}: ask that store itself")

    def store(self) -> CloudStore:
        return self._ports()[0]

    def _ports(self) -> tuple[CloudStore, Catalog]:
        with self._site.store.view() as view:
            tiers = view.tiers()
        assert tiers is not None, "a store that is open has a catalog"
        return tiers.store, tiers.catalog

    def head(self, key: str) -> ObjectMeta:
        self.require_here(check_key(key))
        return self.store().head(key)

    def begin(self, target: Target) -> Upload:
        """CommitRefused if nobody intends to write the object."""
        self.require_here(target.key)
        store, catalog = self._ports()
        dead = (None, State.DELETING, State.GONE)
        if target.topic is not None and _life(catalog, target) in dead:
            raise CommitRefused(
                f"{target.key}: nobody intends to write this object: plan it, and announce it in "
                "the catalog"
            )
        lock = self._locks[hash(target.key) % _LOCKS]
        return Upload(store, catalog, target, self._site.settings.uploader.stream_chunk_size, lock)


def _life(catalog: Catalog, target: Target) -> State | None:
    assert target.topic is not None, "rows have no life in the catalog"
    life = catalog.life(target.topic, target.object_id)
    return None if life is None else life.state


class Upload:
    """One object on its way in. Its calls wait for each other: a cancelled one may still run."""

    def __init__(
        self,
        store: CloudStore,
        catalog: Catalog,
        target: Target,
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
        self._writer = store.open_writer(
            target.key, chunk_bytes=chunk_bytes, concurrent_parts=_CONCURRENT_PARTS
        )

    def write(self, data: bytes) -> None:
        with self._lock:
            self._size += len(data)
            if self._size > self._target.bytes_max:
                raise UsageError(f"{self._target.key}: over {self._target.bytes_max} bytes")
            self._writer.write(data)
            self._digest.update(data)
        TRANSFERS.add(len(data), self._target.kind, "up")

    def publish(self) -> ObjectMeta:
        """Makes it the object of its key; CommitRefused if that would change what is there."""
        with self._lock, self._publishing:
            present = self._present()
            if present is not None and self._is_same(present):
                self._writer.abort()
                return present
            self._require_open(present)
            kept = self._keep(present)
            try:
                meta = self._writer.close()
                if kept is not None and not self._is_right(meta):
                    self._store.copy(kept, meta.key)
                    raise self._refused(present)
            finally:
                if kept is not None:
                    self._store.delete(kept)
            return meta

    def abort(self) -> None:
        with self._lock:
            self._writer.abort()

    def _keep(self, present: ObjectMeta | None) -> str | None:
        """Another name for what is to be replaced: somebody may commit it at this very moment.

        It is a name of staged rows, which are removed in time if nobody lives to do it.
        """
        if present is None:
            return None
        kept = staged_file(secrets.token_hex(8), 0, 0)
        self._store.copy(present.key, kept)
        return kept

    def _is_right(self, meta: ObjectMeta) -> bool:
        """Whether what has just come is not in the place of something that was committed."""
        target = self._target
        if target.topic is None or _life(self._catalog, target) == State.INTENDED:
            return True
        committed = (
            (each.size, each.etag)
            for each in self._catalog.all_descriptors(target.topic)
            if each.object_id == target.object_id and target.key.endswith(each.object_id)
        )
        return next(committed, None) in ((meta.size, meta.etag), (meta.size, None))

    def _require_open(self, present: ObjectMeta | None) -> None:
        target = self._target
        if target.topic is None:
            changeable = present is None  # rows are written once, under a name of their own
        else:
            changeable = _life(self._catalog, target) == State.INTENDED
        if not changeable:
            raise self._refused(present)

    def _refused(self, present: ObjectMeta | None) -> CommitRefused:
        there = "is gone" if present is None else f"is there with {present.size} bytes"
        return CommitRefused(
            f"{self._target.key} {there}, and these are {self._size} bytes that nobody waits for: "
            "what is stored is not changed"
        )

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


def _facts(meta: ObjectMeta) -> dict[str, str]:
    etag = {} if meta.etag is None else {"ETag": f'"{meta.etag.strip(chr(34))}"'}
    return {MODIFIED: str(meta.modified_ms), **etag}


async def _receive(body: AsyncIterator[bytes], transfers: Transfers, upload: Upload) -> ObjectMeta:
    """Takes the body in, a piece at a time."""
    whole = False
    try:
        held = bytearray()
        while (chunk := await _next(body)) is not None:
            held += chunk
            if len(held) >= PIECE_BYTES:
                await transfers.run(partial(upload.write, bytes(held)))
                held.clear()
        if held:
            await transfers.run(partial(upload.write, bytes(held)))
        meta = await transfers.run(upload.publish)
        whole = True
        return meta
    finally:
        if not whole:
            transfers.run_unheard(upload.abort)


async def _next(body: AsyncIterator[bytes]) -> bytes | None:
    """The next bytes of a body, None at its end; a client that is silent for long has gone."""
    try:
        async with asyncio.timeout(STALL_SECONDS_MAX):
            return await anext(body, None)
    except TimeoutError:
        raise ClientDisconnect from None


async def _drain(body: AsyncIterator[bytes]) -> None:
    """A client hears of a refusal when it has sent everything, and not before."""
    while await _next(body) is not None:
        pass


def routes(site: Site) -> list[BaseRoute]:
    transfers, door = Transfers(), ObjectDoor(site)

    async def get(request: Request) -> Response:
        key = request.path_params["key"]
        try:
            meta = await transfers.run(partial(door.head, key))
        except ObjectMissing as error:
            return problem(404, "ObjectMissing", str(error))
        except NotThisWay as error:
            return problem(409, "UsageError", str(error))
        store = door.store()

        def read(start: int, end: int) -> bytes:
            return bytes(store.get_range(key, start, end))

        return transfers.answer(
            request, read, meta.size, kind="object", what=key, headers=_facts(meta)
        )

    async def put(request: Request) -> Response:
        body = request.stream()
        try:
            try:
                with transfers.place():
                    target = target_of(request.path_params["key"])
                    upload = await transfers.run(partial(door.begin, target))
                    meta = await _receive(body, transfers, upload)
            except (CommitRefused, UsageError):
                await _drain(body)
                raise
        except ClientDisconnect:
            return problem(400, "UsageError", "the request broke off")
        except NotThisWay as error:
            return problem(409, "UsageError", str(error))
        return JSONResponse(_described(meta), headers=_facts(meta))

    path = "/v1/objects/{key:path}"
    return [Route(path, get, methods=["GET"]), Route(path, put, methods=["PUT"])]


def _described(meta: ObjectMeta) -> Mapping[str, object]:
    return {
        "key": meta.key,
        "size": meta.size,
        "etag": meta.etag,
        "modified_ms": meta.modified_ms,
    }
