"""The steps that upload one object: intend, transfer, read back, sidecar, commit.

    intend      writes a row to the catalog, so that a sweep knows the name
    transfer    streams raw frames into the object, in bounded memory, and builds its sparse index
    read back   compares every frame with the descriptor
    sidecar     writes a copy of the descriptor beside the object
    commit      changes descriptor, tail and verified watermark in one transaction

A topic's background thread runs all of them (`uploader`). In a Spark job the driver runs `intend`
and `commit`, and executors run `upload` in between (`pipeline.jobs.offload`). A crash between two
steps leaves either a committed object or an orphan that a sweep removes.

Beware: a sweep revokes an intent that is older than its grace time, unless the topic's owner is
alive. A job that owns no topic must renew its intents while it runs (`Renewal`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, TypeVar

from forebay.catalog.catalog import Catalog, Intent
from forebay.catalog.records import State, TopicRecord
from forebay.clock import Clock
from forebay.errors import (
    CommitRefused,
    CorruptLog,
    ForebayError,
    ForeignObject,
    MessageTooLarge,
    MissingData,
    ObjectExists,
    ObjectMissing,
    ServiceError,
    ServiceUnavailable,
)
from forebay.format.blocks import BlockAssembler
from forebay.format.content import ContentHash, MessageSurvey
from forebay.format.descriptor import (
    PULSAR,
    ZSTD,
    Index,
    Ledger,
    ObjectDescriptor,
    encode_descriptor,
)
from forebay.format.frame import Scan
from forebay.format.index import ObjectIndex
from forebay.format.layout import Buffer
from forebay.format.names import (
    LedgerName,
    TopicName,
    is_compressed,
    is_ledger,
    object_key,
    object_metadata,
    parse_ledger,
    parse_object,
    sidecar,
)
from forebay.format.pulsar.frames import EntryAssembler
from forebay.format.pulsar.index import encode_index
from forebay.format.pulsar.topic_ledger import LedgerContent, ledger_facts, topic_ledger_index
from forebay.limits import LEDGER_ENTRY_BYTES_MAX, LEDGER_INDEX_BYTES_MAX, MIB
from forebay.logs import event
from forebay.objects.backend import Backend, ObjectMeta
from forebay.objects.store import CloudStore
from forebay.settings import UploaderSettings
from forebay.upload import metrics
from forebay.upload.compression import BlockWriter, FrameWriter
from forebay.upload.ledgers import LedgerWriter, remove_attempt
from forebay.upload.plan import Closed, Extent, PlannedObject

T = TypeVar("T")

_log: Final = logging.getLogger("forebay.upload")
_READ_BACK_TRIES: Final = 2
"""Two, so that one failed request of the store does not make the whole transfer start over."""
_COMPARE_BYTES: Final = 4 * MIB
_RENEW_SECONDS_MAX: Final = 300.0
_RENEW_SECONDS_MIN: Final = 0.1


@dataclass(frozen=True, slots=True)
class UploadPorts:
    """What the uploads of all topics in one process share."""

    store: CloudStore
    settings: UploaderSettings
    verify: Callable[[TopicName, ObjectDescriptor], None]
    """Raises if the object is not what its descriptor says. The settings choose how it checks."""
    clock: Clock
    verify_committed: Callable[[TopicName, ObjectDescriptor], ObjectDescriptor]
    """The same for an object of the chain. Returns the descriptor that it should have."""


@dataclass(frozen=True, slots=True)
class UploadTask:
    """An object whose intent is in the catalog, and that is to be written."""

    topic: TopicName
    intent: Intent
    planned: PlannedObject
    log_id: str | None = None
    """The log whose segments were planned; None if the catalog names none."""
    settings: UploaderSettings | None = None
    """The settings of the topic, if they are not those of the ports."""
    written: ObjectDescriptor | None = None
    """Of a ledger that was written before, and only has to be read back."""

    @property
    def size(self) -> int:
        return self.planned.size


@dataclass(frozen=True, slots=True)
class Uploaded:
    """An object that was written and read back. It does not count until it is committed."""

    descriptor: ObjectDescriptor
    seconds: float
    chunks: int | None = None
    """The chunks of frames that were written; None if it was not written here."""
    closed_by: Closed | None = None
    """The threshold at which it was complete."""


class FrameSource(Protocol):
    """Where the frames of an object come from: the segments of a log, or files of Danube."""

    def frames(self, extents: Iterable[Extent]) -> Iterator[Scan]:
        """Yields whole frames in order, checked. Each scan begins at the start of its buffer."""


# -- the steps ----------------------------------------------------------------------------------


def intend(
    catalog: Catalog,
    topic: TopicName,
    epoch: int,
    planned: PlannedObject,
    log_id: str | None = None,
    *,
    store: Backend,
) -> UploadTask:
    """Announces the object. Removes what an attempt at the same ledger left that failed."""
    if planned.ledger:
        wanted = catalog.intend_ledger(topic, epoch, planned.span)
        intent = wanted.intent
        previous = wanted.previous
        if previous is not None:
            removed = remove_attempt(catalog, store, topic, previous.object_id)
            if not removed and previous.span != planned.span:
                raise ServiceUnavailable(
                    f"{topic}: {previous.object_id}, which failed, cannot be removed now, and has "
                    "other messages than the ledger that gets its id; try again"
                )
    else:
        intent = catalog.intend(topic, epoch, planned.name)
    event(
        _log,
        logging.INFO,
        "object started",
        topic=topic,
        object=intent.object_id,
        start=planned.start_offset,
        end=planned.next_offset - 1,
        bytes=planned.size,
        segments=len(planned.extents),
        closed_by=planned.closed_by,
    )
    return UploadTask(topic, intent, planned, log_id)


def take_over(
    catalog: Catalog, topic: TopicName, epoch: int, planned: PlannedObject
) -> UploadTask | None:
    """Returns the task to read back a ledger that was written ahead of the chain; None if none was.

    It is committed like any other then, also by another process than the one that wrote it.
    """
    if not planned.ledger:
        return None
    known = catalog.ledgers(topic).attempt_at(planned.start_offset)
    if known is None or known.descriptor is None or known.span != planned.span:
        return None
    try:
        intent = catalog.intend(topic, epoch, known.object_id)
    except CommitRefused:  # it is being deleted
        return None
    return UploadTask(topic, intent, planned, written=known.descriptor)


def upload(
    ports: UploadPorts,
    source: FrameSource,
    task: UploadTask,
    progress: Callable[[int], None] | None = None,
) -> Uploaded:
    """Transfers the object, reads it back and writes its sidecar.

    It can be repeated, and two processes may do it at the same time: a name determines the frames
    of its object, and who comes second finds the same ones under it (`NewObject`). Raises
    ForeignObject if they are not the same. `progress` gets the number of bytes read so far, and
    may raise to stop the upload.
    """
    started = ports.clock.monotonic()
    planned, object_id = task.planned, task.intent.object_id
    if task.written is not None:
        read_back(ports, task.topic, task.written)
        seconds = ports.clock.monotonic() - started
        return Uploaded(task.written, seconds, closed_by=planned.closed_by)
    transferred = _transfer(ports, source, task, progress)
    now_ms = ports.clock.now_ms()
    descriptor = describe(object_id, planned.start_offset, planned.next_offset, transferred, now_ms)
    if progress is not None:
        progress(planned.size)
    read_back_and_put_sidecar(ports, task.topic, descriptor)
    seconds = ports.clock.monotonic() - started
    return Uploaded(descriptor, seconds, transferred.chunks, planned.closed_by)


def _transfer(
    ports: UploadPorts,
    source: FrameSource,
    task: UploadTask,
    progress: Callable[[int], None] | None,
) -> Transferred:
    """Writes the planned object. After an error there is no object.

    A message that does not fit into a block of a ledger makes its blocks larger.
    """
    settings = ports.settings
    while True:
        try:
            return _transfer_once(replace(ports, settings=settings), source, task, progress)
        except MessageTooLarge:
            larger = 2 * settings.ledger_block_bytes
            if not task.planned.ledger or larger > 2 * LEDGER_ENTRY_BYTES_MAX:
                raise
            settings = replace(settings, ledger_block_bytes=larger)


def _transfer_once(
    ports: UploadPorts,
    source: FrameSource,
    task: UploadTask,
    progress: Callable[[int], None] | None,
) -> Transferred:
    with NewObject(ports.store, task.topic, task.intent.object_id, ports.settings) as made:
        builder = made.builder(new_index(ports.settings))
        for frames in source.frames(task.planned.extents):
            builder.add(frames)
            if progress is not None:
                progress(builder.size)
        if builder.size != task.size:
            raise CorruptLog(
                f"{task.topic}: {builder.size} bytes were read for {task.intent.object_id}, but "
                f"{task.size} were planned"
            )
        return builder.finish(made)


def read_back_and_put_sidecar(
    ports: UploadPorts, topic: TopicName, descriptor: ObjectDescriptor
) -> None:
    """Reads the object back, then writes its sidecar, so that no sidecar is of unread bytes."""
    read_back(ports, topic, descriptor)
    if ports.settings.sidecars:
        put_sidecar(ports.store, topic, descriptor)


def read_back(ports: UploadPorts, topic: TopicName, descriptor: ObjectDescriptor) -> None:
    """Raises if the object is not what its descriptor says. Tries again if the store fails."""
    _repeated(lambda: ports.verify(topic, descriptor))


def read_back_committed(
    ports: UploadPorts, topic: TopicName, descriptor: ObjectDescriptor
) -> ObjectDescriptor:
    """Reads back an object of the chain, and returns the descriptor that it should have.

    Raises if the object is damaged or another one. A wrong index is no damage: see `correct`.
    """
    return _repeated(lambda: ports.verify_committed(topic, descriptor))


def _repeated(verify: Callable[[], T]) -> T:
    """Calls `verify` again if the store failed, and counts the outcome."""
    for attempt in range(1, _READ_BACK_TRIES + 1):
        try:
            found = verify()
        except ForebayError as error:
            if isinstance(error, ServiceUnavailable) and attempt < _READ_BACK_TRIES:
                continue
            metrics.verified.add(1, "failed")
            raise
        metrics.verified.add(1, "good")
        return found
    raise AssertionError("the last attempt returns or raises")


def correct(
    catalog: Catalog,
    store: CloudStore,
    topic: TopicName,
    said: ObjectDescriptor,
    found: ObjectDescriptor,
    *,
    sidecars: bool,
) -> bool:
    """Replaces a descriptor by what its object showed; False if it has changed meanwhile.

    Call it after the object was read whole. An index that is wrong would otherwise mislead every
    reader; if its sidecar may have it too, the sidecar is written again.
    """
    if not catalog.replace_descriptor(topic, said, found):
        return False
    pairs = (
        ("index", said.offset_index == found.offset_index),
        ("hash", said.content_hash == found.content_hash),
        ("etag", said.etag == found.etag),
    )
    changed = [name for name, same in pairs if not same]
    for name in changed:
        metrics.descriptors_corrected.add(1, name)
    if sidecars and "index" in changed:
        put_sidecar(store, topic, found)
    event(
        _log,
        logging.WARNING if "index" in changed else logging.INFO,
        "descriptor corrected",
        topic=topic,
        object=said.object_id,
        what=" and ".join(changed) or "publish time",
    )
    return True


def commit(catalog: Catalog, topic: TopicName, intent: Intent, uploaded: Uploaded) -> TopicRecord:
    """Commits an object that was read back, and returns the topic's new record.

    See `Catalog.put_object_descriptor` for the errors.
    """
    descriptor = uploaded.descriptor
    record = catalog.put_object_descriptor(topic, intent, descriptor, verified=True)
    metrics.objects_created.add()
    metrics.bytes_uploaded.add(descriptor.size)
    metrics.logical_bytes_uploaded.add(descriptor.logical_size)
    metrics.bytes_per_object.observe(descriptor.size)
    metrics.msgs_per_object.observe(descriptor.count)
    event(
        _log,
        logging.INFO,
        "object committed",
        topic=topic,
        object=descriptor.object_id,
        bytes=descriptor.size,
        raw_bytes=descriptor.logical_size,
        messages=descriptor.count,
        chunks=uploaded.chunks,
        seconds=uploaded.seconds,
        closed_by=uploaded.closed_by,
    )
    return record


# -- parts of the steps -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Transferred:
    """An object that was written completely and not read back yet."""

    meta: ObjectMeta
    index: Index
    content_hash: str
    highest_publish_time: int | None
    chunks: int
    raw_size: int | None = None
    """Bytes of the frames; None if the object is these bytes."""
    ledger: Ledger | None = None
    """About the ledger, if the object is one."""


def new_index(settings: UploaderSettings) -> ObjectIndex:
    """Returns an empty index with the intervals of the settings."""
    return ObjectIndex(
        every_messages=settings.index_every_messages, every_bytes=settings.index_every_bytes
    )


@dataclass(slots=True)
class ObjectBuilder:
    """Writes frames to a writer, indexes and hashes them, and counts bytes and messages."""

    writer: FrameWriter
    level: int | None = None
    """The level of compression; None writes the frames as they are, or entries of a ledger."""
    index: ObjectIndex = field(default_factory=ObjectIndex)
    content: ContentHash = field(default_factory=ContentHash)
    survey: MessageSurvey = field(default_factory=MessageSurvey)
    size: int = 0
    """Bytes of the frames, before compression."""
    messages: int = 0
    chunks: int = 0
    ledger_block_bytes: int | None = None
    """The size of blocks of a ledger; None for other objects."""
    blocks: BlockWriter | LedgerWriter | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.level is not None:
            self.blocks = BlockWriter(self.writer, self.index, self.level)
        elif self.ledger_block_bytes is not None:
            self.blocks = LedgerWriter(self.writer, self.index, self.ledger_block_bytes)

    @property
    def stored(self) -> int:
        """Bytes that were passed to the writer. A compressed object is complete after `flush`."""
        return self.size if self.blocks is None else self.blocks.stored

    def add(self, frames: Scan) -> None:
        view = frames.raw if len(frames) else memoryview(b"")
        if self.blocks is None:
            self.index.add(frames, self.size)
            self.writer.write(view)
        else:
            self.blocks.add(frames)
        self.content.add(view)
        self.survey.add(frames)
        metrics.stream_chunk_bytes.observe(len(view))
        self.size += len(view)
        self.messages += len(frames)
        self.chunks += 1

    def flush(self) -> None:
        """Passes everything that was added to the writer. Call it before the writer is closed."""
        if self.blocks is not None:
            self.blocks.flush()

    def drain(self) -> None:
        """Passes all complete blocks to the writer. For a pause: less stays in memory."""
        if self.blocks is not None:
            self.blocks.drain()

    def finish(self, made: NewObject) -> Transferred:
        """Publishes what was added to the new object: see `NewObject.finish`.

        The index object of a ledger comes after its data: while it exists, the data are complete.
        """
        self.flush()
        start = self.index.entries[0][0] if self.index.entries else 0
        done = self.transferred(made.finish(self.size, self.content.value, start))
        if not isinstance(self.blocks, LedgerWriter):
            return done
        return replace(done, ledger=made.put_index(self.ledger_index(made.topic), self.blocks))

    def ledger_index(self, topic: TopicName) -> bytes:
        """Returns the index object of the ledger that was made."""
        assert isinstance(self.blocks, LedgerWriter), "only ledgers have an index object"
        content = LedgerContent(
            topic,
            self.index.entries[0][0],
            self.messages,
            self.blocks.entry_bytes,
            self.blocks.stored,
            self.size,
            self.content.value,
            self.survey.highest_publish_time,
        )
        return encode_index(topic_ledger_index(content, self.blocks.blocks))

    def transferred(self, stored: StoredObject) -> Transferred:
        """Describes what was added, once it is in the store."""
        return Transferred(
            stored.meta,
            self.index.frozen() if stored.index is None else stored.index,
            self.content.value,
            self.survey.highest_publish_time,
            self.chunks,
            None if self.blocks is None else self.size,
        )


def describe(
    object_id: str, start_offset: int, next_offset: int, done: Transferred, now_ms: int
) -> ObjectDescriptor:
    return ObjectDescriptor(
        object_id=object_id,
        start_offset=start_offset,
        end_offset=next_offset - 1,
        size=done.meta.size,
        etag=done.meta.etag,
        created_at=now_ms // 1000,
        offset_index=done.index,
        content_hash=done.content_hash,
        highest_publish_time=done.highest_publish_time,
        raw_size=done.raw_size,
        codec=ZSTD if is_compressed(object_id) else None,
        format=None if done.ledger is None else PULSAR,
        ledger=done.ledger,
    )


def put_sidecar(store: CloudStore, topic: TopicName, descriptor: ObjectDescriptor) -> None:
    """Writes a copy of the descriptor beside the object, so that a restore needs only the store."""
    key = object_key(topic, sidecar(descriptor.object_id))
    store.put_object(key, encode_descriptor(descriptor))


# -- a name gets its bytes once (rule R8) --------------------------------------------------------
#
# An object is created, never replaced. If its name is taken, the object there was written by
# an earlier attempt of the same upload (a client that sent a request again, a task that runs twice,
# a process that died before its commit), or by somebody else. The frames tell which. Compressed
# objects with the same frames may have different bytes, so their frames are compared. Sidecars are
# exempt: they carry the time of their attempt.


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object under its name in the store."""

    meta: ObjectMeta
    index: Index | None = None
    """Its index, if it is a compressed one that was written before: its blocks may differ."""


class NewObject:
    """A data object that is being created. Not thread-safe.

    Leaving its `with` block without `finish` publishes nothing. An upload that was read back and
    found damaged keeps its name occupied: call `set_aside`.
    """

    def __init__(
        self, store: CloudStore, topic: TopicName, object_id: str, settings: UploaderSettings
    ) -> None:
        self._store = store
        self.topic = self._topic = topic
        self._object_id = object_id
        self._size = 0
        self._block_bytes = settings.ledger_block_bytes if is_ledger(object_id) else None
        self.level = level_of(object_id, settings)
        """The level of compression; None for an object that is not compressed."""
        self._writer = store.open_streaming_writer(
            object_key(topic, object_id),
            chunk_bytes=settings.stream_chunk_size,
            concurrent_parts=settings.concurrent_parts,
            metadata=object_metadata(topic, object_id),
            create=True,
        )

    def builder(self, index: ObjectIndex) -> ObjectBuilder:
        """Returns what makes an object of the kind that the name says."""
        return ObjectBuilder(self, self.level, index, ledger_block_bytes=self._block_bytes)

    def put_index(self, data: bytes, written: LedgerWriter) -> Ledger:
        """Writes the index object of a ledger, or finds the same one; returns what is known of it.

        Raises ForeignObject if its name belongs to other bytes.
        """
        name = parse_ledger(self._object_id)
        assert name is not None, "only ledgers have an index object"
        put_ledger_index(self._store, self._topic, name, data)
        return ledger_facts(name, written.block_bytes, len(data))

    def write(self, data: Buffer) -> None:
        """Takes all of `data`. Once the name is known to be taken, the bytes are only counted."""
        self._size += memoryview(data).nbytes
        if not self._writer.ended:
            try:
                self._writer.write(data)
            except ObjectExists:
                self._writer.abort()

    def finish(self, raw_size: int, content_hash: str, start_offset: int = 0) -> StoredObject:
        """Publishes the object, or finds the same one: with so many bytes of frames and this hash.

        `start_offset` is that of the first message, which the name of a ledger does not say.

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
                return StoredObject(meta)
        found = require_same(
            self._store, self._topic, self._object_id, raw_size, content_hash, start_offset
        )
        if self._block_bytes is not None and found.meta.size != self._size:
            raise ForeignObject(
                f"{self._store.name}: {found.meta.key} has {found.meta.size} bytes, and an upload "
                f"of the same messages {self._size}: it was written with other blocks"
            )
        return found

    def __enter__(self) -> NewObject:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if not self._writer.ended:
            self._writer.abort()


def level_of(object_id: str, settings: UploaderSettings) -> int | None:
    """The level of compression for an object of this name; None if it is not to be compressed."""
    return settings.compression_level if is_compressed(object_id) else None


def require_size(store: CloudStore, meta: ObjectMeta, size: int) -> None:
    if meta.size != size:
        raise CorruptLog(f"{store.name}: {meta.key} has {meta.size} bytes, but {size} were written")


def require_same(
    store: CloudStore,
    topic: TopicName,
    object_id: str,
    raw_size: int,
    content_hash: str,
    start_offset: int = 0,
) -> StoredObject:
    """Returns the stored object, whose frames have the given size and hash.

    Raises ForeignObject if they do not. An object that may have them is read to its end.
    """
    key = object_key(topic, object_id)
    index: Index | None = None
    try:
        meta = store.head(key)
        if is_compressed(object_id):
            size, found, index = _uncompressed(store, meta, object_id)
        elif is_ledger(object_id):
            size, found = _as_frames(store, meta, start_offset)
        else:
            size = meta.size
            found = _hash(store, meta) if size == raw_size else "not read"
    except ObjectMissing:
        raise ServiceUnavailable(
            f"{store.name}: {key} existed when it was to be created, and is gone now; try again"
        ) from None
    if (size, found) != (raw_size, content_hash):
        raise ForeignObject(
            f"{store.name}: {key} exists with {size} bytes (content {found}), but the messages "
            f"to upload under this name have {raw_size} bytes (content {content_hash}). The "
            "object was not changed. The log and the catalog are probably older copies than the "
            "objects: stop the topic's owner and put the newest ones back, or run `forebay restore "
            f"{topic}`"
        )
    event(_log, logging.INFO, "object was written before", topic=topic, object=object_id)
    return StoredObject(meta, index)


def _hash(store: CloudStore, meta: ObjectMeta) -> str:
    content = ContentHash()
    for chunk in _chunks(store, meta):
        content.add(chunk)
    return content.value


def _uncompressed(store: CloudStore, meta: ObjectMeta, object_id: str) -> tuple[int, str, Index]:
    """Returns size and hash of the frames of a compressed object, and its index.

    In place of the hash of a damaged object it returns what is wrong.
    """
    name = parse_object(object_id)
    assert name is not None, "only finished objects are compared"
    blocks = BlockAssembler(name.start, 0, meta.size)
    size, content, index = 0, ContentHash(), ObjectIndex()
    for chunk in _chunks(store, meta):
        for frames in blocks.feed(chunk):
            raw = frames.raw
            index.add_block(frames.offsets[0], len(frames), len(raw), blocks.block_position)
            content.add(raw)
            size += len(raw)
    blocks.require_end(name.end + 1)
    damage = blocks.corruption
    return size, content.value if damage is None else damage.reason, index.frozen()


def _as_frames(store: CloudStore, meta: ObjectMeta, start_offset: int) -> tuple[int, str]:
    """Returns size and hash of the frames of a ledger; in place of the hash, what is wrong."""
    entries = EntryAssembler(start_offset, 0, meta.size, start_offset, max(meta.size, 1))
    size, content = 0, ContentHash()
    for chunk in _chunks(store, meta):
        for frames in entries.feed(chunk):
            content.add(frames.raw)
            size += len(frames.raw)
    entries.require_end(None)
    damage = entries.corruption
    return size, content.value if damage is None else damage.reason


def put_ledger_index(
    store: CloudStore, topic: TopicName, name: LedgerName, data: bytes, *, create: bool = True
) -> None:
    """Writes the index object of a ledger.

    With `create` it replaces nothing: raises ForeignObject if another one is there.
    """
    key = object_key(topic, name.index_name)
    try:
        store.put_object(key, data, object_metadata(topic, name.index_name), create=create)
    except ObjectExists:
        if bytes(store.get_object(key, LEDGER_INDEX_BYTES_MAX)) != data:
            raise ForeignObject(
                f"{store.name}: {key} exists, and is not the index of this ledger. It was not "
                "changed"
            ) from None


def _chunks(store: CloudStore, meta: ObjectMeta) -> Iterator[Buffer]:
    return store.open_ranged_reader(meta.key, end=meta.size, chunk_bytes=_COMPARE_BYTES)


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


# -- keeping intents alive ----------------------------------------------------------------------


class Renewal:
    """Renews intents in a thread while its `with` block runs.

    Without it a sweep revokes intents that are older than its grace time, unless the topic's owner
    is alive. A renewal that fails is logged and tried again; a revoked intent shows at the commit.
    """

    def __init__(
        self,
        catalog: Catalog,
        intents: Iterable[tuple[TopicName, Intent]],
        grace_minutes: float,
    ) -> None:
        self._catalog = catalog
        self._intents = list(intents)
        quarter = grace_minutes * 60 / 4
        self._seconds = min(max(quarter, _RENEW_SECONDS_MIN), _RENEW_SECONDS_MAX)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forebay-renewal", daemon=True)

    def __enter__(self) -> Renewal:
        if self._intents:
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._over.set()
        if self._intents:
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._seconds):
            failed: list[ForebayError] = []
            for topic, intent in self._intents:
                if self._over.is_set():
                    return
                try:
                    self._catalog.renew(topic, intent)
                except ForebayError as error:  # tried again the next time
                    failed.append(error)
            if failed:
                first = failed[0]
                event(
                    _log,
                    logging.WARNING,
                    "intents not renewed",
                    count=len(failed),
                    error=first,
                )
