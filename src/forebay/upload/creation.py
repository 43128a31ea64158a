"""`NewObject`: writes a data object under its name, which gets its bytes once (rule R8).

An object is created, never replaced. If its name is taken, the object that is there was written by
an earlier attempt of the same upload (a client that sent a request again, a task that runs twice, a
process that died before its commit), or by somebody else. The bytes tell which: the same size and
content hash are a success, and anything else raises ForeignObject. Nothing is changed then.

Sidecars are not written with this: they carry the time of the attempt, and the last one is right.

Beware: an upload that was read back and found damaged keeps its name occupied. Call `set_aside`, so
that the next attempt gets another name.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Final

from forebay.catalog.catalog import Catalog, Intent
from forebay.catalog.records import State
from forebay.errors import (
    CorruptLog,
    ForebayError,
    ForeignObject,
    MissingData,
    ObjectExists,
    ObjectMissing,
    ServiceError,
    ServiceUnavailable,
)
from forebay.format.content import ContentHash
from forebay.format.layout import Buffer
from forebay.format.names import TopicName, object_key
from forebay.limits import MIB
from forebay.logs import event
from forebay.objects.backend import ObjectMeta
from forebay.objects.store import CloudStore
from forebay.settings import UploaderSettings

_log: Final = logging.getLogger("forebay.upload")
_COMPARE_BYTES: Final = 4 * MIB


class NewObject:
    """An object that is being created. Not thread-safe.

    Leaving its `with` block without `finish` publishes nothing.
    """

    def __init__(
        self, store: CloudStore, topic: TopicName, object_id: str, settings: UploaderSettings
    ) -> None:
        self._store = store
        self._topic = topic
        self._object_id = object_id
        self._size = 0
        self._writer = store.open_streaming_writer(
            object_key(topic, object_id),
            chunk_bytes=settings.stream_chunk_size,
            concurrent_parts=settings.concurrent_parts,
            create=True,
        )

    def write(self, data: Buffer) -> None:
        """Takes all of `data`. Once the name is known to be taken, the bytes are only counted."""
        self._size += memoryview(data).nbytes
        if not self._writer.ended:
            try:
                self._writer.write(data)
            except ObjectExists:
                self._writer.abort()

    def finish(self, content_hash: str) -> ObjectMeta:
        """Publishes the object, or finds the same one. `content_hash` is that of all its frames.

        Raises ForeignObject if the name belongs to other bytes, and CorruptLog if the store has
        published another number of bytes than were written.
        """
        if not self._writer.ended:
            try:
                meta = self._writer.close()
            except ObjectExists:
                self._writer.abort()
            else:
                require_size(self._store, meta, self._size)
                return meta
        return require_same(self._store, self._topic, self._object_id, self._size, content_hash)

    def __enter__(self) -> NewObject:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if not self._writer.ended:
            self._writer.abort()


def require_size(store: CloudStore, meta: ObjectMeta, size: int) -> None:
    if meta.size != size:
        raise CorruptLog(f"{store.name}: {meta.key} has {meta.size} bytes, but {size} were written")


def require_same(
    store: CloudStore, topic: TopicName, object_id: str, size: int, content_hash: str
) -> ObjectMeta:
    """Returns the stored object, whose size and content are those given.

    Raises ForeignObject if they are not. An object of the same size is read to its end.
    """
    key = object_key(topic, object_id)
    try:
        meta = store.head(key)
        found = _hash(store, meta) if meta.size == size else "not read"
    except ObjectMissing:
        raise ServiceUnavailable(
            f"{store.name}: {key} existed when it was to be created, and is gone now; try again"
        ) from None
    if (meta.size, found) != (size, content_hash):
        raise ForeignObject(
            f"{store.name}: {key} exists with {meta.size} bytes (content {found}), but the "
            f"messages to upload under this name have {size} bytes (content {content_hash}). The "
            "object was not changed. The log and the catalog are probably older copies than the "
            "objects: stop the topic's owner and put the newest ones back, or run `forebay restore "
            f"{topic}`"
        )
    event(_log, logging.INFO, "object was written before", topic=topic, object=object_id)
    return meta


def _hash(store: CloudStore, meta: ObjectMeta) -> str:
    content = ContentHash()
    for chunk in store.open_ranged_reader(meta.key, end=meta.size, chunk_bytes=_COMPARE_BYTES):
        content.add(chunk)
    return content.value


def set_aside(
    catalog: Catalog, store: CloudStore, topic: TopicName, intent: Intent, error: ForebayError
) -> None:
    """After a failed upload: frees the name, if the error says that the new object is damaged.

    The next attempt gets another name, and a sweep deletes the damaged object after its grace time.
    Without this, every further attempt would find the damaged bytes under its name. The object of
    somebody else (ForeignObject) is left alone. Raises nothing if a service fails: the caller has
    an error to raise already.
    """
    if not isinstance(error, CorruptLog) or isinstance(error, ForeignObject | MissingData):
        return
    with suppress(ServiceError):  # ObjectMissing, if the object was never published
        life = catalog.life(topic, intent.object_id)
        if life is None or life.token != intent.token or life.state is not State.INTENDED:
            return
        store.head(object_key(topic, intent.object_id))
        if catalog.condemn(topic, intent.object_id, life) is None:
            return
        event(
            _log,
            logging.WARNING,
            "damaged upload set aside: the next attempt uses another name",
            topic=topic,
            object=intent.object_id,
            error=error,
        )
