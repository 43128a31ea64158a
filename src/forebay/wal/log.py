"""`Wal`: the write-ahead log of one topic.

An append assigns the offset, encodes the message, queues it and returns. The group commit
(`commit`) writes and syncs the queue. Offset and place in the queue are assigned under one lock, so
frames reach the file in offset order, whatever the number of producers. A reader calls `plan`
before every chunk to learn where its next offset is: in memory, in a segment, or not there yet.

Beware: a `buffered` append that returned is in memory only. It is lost in a crash unless `wait` or
`flush` returned after it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias, TypeVar, get_args

from forebay.clock import SYSTEM_CLOCK, Clock, since_1970
from forebay.errors import (
    ForebayError,
    LogClosed,
    LogStopped,
    MissingData,
    OffsetOutOfRange,
    TopicDeleted,
    TopicFenced,
    UsageError,
)
from forebay.files.disk import Disk
from forebay.files.local import LocalDisk
from forebay.format.codec import append_one, encode_many
from forebay.format.frame import encode_frame, scan
from forebay.format.layout import Buffer
from forebay.format.message import (
    StreamMessage,
    decode_messages,
    encode_head,
    encode_message,
    encode_middle,
)
from forebay.format.names import SegmentNames, parse_topic
from forebay.format.pure import add_frame
from forebay.limits import READER_PIN_SECONDS_MAX
from forebay.settings import WalSettings
from forebay.wal import metrics
from forebay.wal.checkpoints import CheckpointStore
from forebay.wal.commit import Encode, GroupCommit, inside, mended
from forebay.wal.identity import Claim, Unclaimed
from forebay.wal.journal import open_journal
from forebay.wal.memory import FrameBatch
from forebay.wal.pool import WriterPool
from forebay.wal.reader import AsyncLogReader, LogReader, Plan, ReadableLog
from forebay.wal.retention import Deleter
from forebay.wal.segment import Segment, SegmentIndexes
from forebay.wal.watermarks import TaskWaiter, Visibility, Waiter, Watermarks

Durability: TypeAlias = Literal["buffered", "synced"]
_DURABILITIES: Final = frozenset(get_args(Durability))
_VISIBILITIES: Final = frozenset(get_args(Visibility))
_YIELDS_MAX: Final = 32


@dataclass(frozen=True, slots=True)
class ProducerParts:
    """The parts of a message that name its producer, encoded: see `Wal.producer`."""

    head: bytes
    middle: bytes


class Wal:
    """One topic's log. Thread-safe.

    Opening locks the directory and recovers the log in it. Raises LogLocked if another process or
    instance has it open, DiskError if files cannot be opened or written, CorruptLog if stored data
    is damaged or missing, and what `claim` raises. `known_offset` is an offset before which
    everything is known to be synced: a log that ends earlier raises MissingData.
    """

    def __init__(
        self,
        settings: WalSettings,
        topic: str = "/default/topic",
        *,
        disk: Disk | None = None,
        clock: Clock = SYSTEM_CLOCK,
        pool: WriterPool | None = None,
        known_offset: int = 0,
        claim: Claim | None = None,
    ) -> None:
        self.topic = str(parse_topic(topic))
        self.settings = settings
        self._disk = disk or LocalDisk()
        self._clock = clock = since_1970(clock)
        claim = claim or Unclaimed()
        self._journal = open_journal(self._disk, settings, clock, claim, known_offset, self.topic)
        try:
            self._committer = GroupCommit(
                self.topic, settings, clock, self._journal, claim.ownership, pool
            )
        except BaseException:
            self._journal.close(clean=False)
            raise
        self._now_ms = clock.now_ms
        self._now_ns = clock.now_ns
        nobody = self.producer(0, "")
        self._head, self._middle = nobody.head, nobody.middle
        self.indexes = SegmentIndexes(self._disk, SegmentNames(settings.file_name))
        self._readers: weakref.WeakSet[LogReader] = weakref.WeakSet()

    # -- appending ------------------------------------------------------------------------------

    def append(
        self,
        payload: Buffer,
        attributes: Mapping[str, str] | None = None,
        routing_key: str | None = None,
        durability: Durability = "buffered",
    ) -> int:
        """Appends one message and returns its offset.

        With `durability="synced"` it returns once the message would survive a power loss. With
        "buffered" it returns once the message is queued. Waits while the queue is full. Raises
        MessageTooLarge, and LogStopped, TopicFenced or LogClosed if the log has ended.

        This is the hot path: one call of the codec adds the frame to the queue.
        """
        if durability not in _DURABILITIES:
            raise _unknown_durability(durability)
        if attributes is not None and type(attributes) is not dict:
            attributes = dict(attributes)  # a Mapping's own code must not run under the lock
        committer = self._committer
        lock = committer.lock
        if lock._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001  # `held`, without a call
            raise inside(self.topic)
        try:
            # Not `with`: an interrupt before its block, or behind it, would leave the lock taken.
            # Here `mend` releases it, wherever the interrupt comes.
            if not lock.acquire(False):  # noqa: FBT003  # a keyword would cost a tenth of an append
                self._wait_for_lock(durability)
            if committer.queued_bytes >= committer.queued_max:
                committer.wait_for_room()
            queue = committer.queue
            tail = queue.tail
            offset: int = append_one(
                tail,
                queue.tail_first,
                self._head,
                self._middle,
                payload,
                self._now_ns() // 1_000_000,
                attributes,
                routing_key,
            )
            if durability == "synced":
                waiter = committer.join(offset + 1)
            elif len(tail) >= committer.notice_bytes:
                committer.after_append()
            lock.release()
        except BaseException:
            committer.mend()
            raise
        if durability == "synced":
            committer.await_commit(waiter, offset + 1)
        return offset

    def _wait_for_lock(self, durability: Durability) -> None:
        """Takes the lock that another thread has.

        A buffered append first lets a thread run that was preempted while it holds the lock. If
        this thread blocked on the lock, the release would have to wake it, which costs several
        times as much as the append.
        """
        lock = self._committer.lock
        if durability == "buffered":
            for _ in range(_YIELDS_MAX):
                time.sleep(0)
                if lock.acquire(blocking=False):
                    return
        lock.acquire()

    def append_message(self, message: StreamMessage, durability: Durability = "buffered") -> int:
        """Appends a message with all its fields except the offset, and returns the new offset.

        A message without a topic name gets the name of this topic.
        """
        if durability not in _DURABILITIES:
            raise _unknown_durability(durability)
        if not message.msg_id.topic_name:
            message = replace(message, msg_id=replace(message.msg_id, topic_name=self.topic))
        offset = self._append_message(message)
        if durability == "synced":
            self._committer.await_synced(offset + 1)
        return offset

    @mended
    def _append_message(self, message: StreamMessage) -> int:
        committer = self._committer
        committer.lock.acquire()
        committer.wait_for_room()
        offset = self._add_message(message)
        committer.lock.release()
        return offset

    def _add_message(self, message: StreamMessage) -> int:
        offset = self._encode_to_queue(message)
        self._committer.after_append()
        return offset

    def _encode_to_queue(self, message: StreamMessage) -> int:
        queue = self._committer.queue
        offset = queue.next_offset
        add_frame(queue.tail, encode_frame(offset, encode_message(message, offset)))
        return offset

    async def append_message_async(
        self, message: StreamMessage, durability: Durability = "buffered"
    ) -> int:
        """`append_message` for asyncio: neither a full queue nor a sync blocks the event loop."""
        if durability not in _DURABILITIES:
            raise _unknown_durability(durability)
        while isinstance(added := self._append_message_or_wait(message, durability), TaskWaiter):
            await added.future
        offset, waiter = added
        if waiter is not None:
            await self._committer.await_task(waiter, offset + 1, "synced")
        return offset

    @mended
    def _append_message_or_wait(
        self, message: StreamMessage, durability: Durability
    ) -> TaskWaiter | tuple[int, TaskWaiter | None]:
        """Appends the message, or returns a waiter to await before the next try.

        The offset comes with a waiter for the commit, if the message is to be synced.
        """
        committer = self._committer
        with committer.lock:
            no_room = committer.room_waiter()
            if no_room is not None:
                return no_room
            offset = self._encode_to_queue(message)
            if durability == "synced":
                return offset, committer.join_task(offset + 1)
            committer.after_append()
            return offset, None

    async def append_async(
        self,
        payload: Buffer,
        attributes: Mapping[str, str] | None = None,
        routing_key: str | None = None,
        durability: Durability = "buffered",
    ) -> int:
        """`append` for asyncio: neither a full queue nor a sync blocks the event loop."""
        if durability not in _DURABILITIES:
            raise _unknown_durability(durability)
        attributes = None if attributes is None else dict(attributes)
        while isinstance(
            offset := self._append_or_wait(payload, attributes, routing_key), TaskWaiter
        ):
            await offset.future
        if durability == "synced":
            await self.wait_async(offset)
        return offset

    @mended
    def _append_or_wait(
        self, payload: Buffer, attributes: Mapping[str, str] | None, routing_key: str | None
    ) -> int | TaskWaiter:
        """Appends the message, or returns a waiter to await before the next try."""
        committer = self._committer
        with committer.lock:
            waiter = committer.room_waiter()
            if waiter is not None:
                return waiter
            queue, now = committer.queue, self._now_ms()
            head, middle, first = self._head, self._middle, queue.tail_first
            offset: int = append_one(
                queue.tail, first, head, middle, payload, now, attributes, routing_key
            )
            committer.after_append()
            return offset

    def append_many(
        self,
        payloads: Iterable[Buffer],
        attributes: Iterable[Mapping[str, str] | None] | None = None,
        routing_keys: Iterable[str | None] | None = None,
        durability: Durability = "buffered",
    ) -> range:
        """Appends messages with consecutive offsets and returns them as a range.

        Other appends wait meanwhile. A batch larger than the queue is added in parts, as the writer
        makes room. If this raises, nothing was appended, unless the batch had to wait for room:
        then the messages before the failed one were appended.
        """
        if durability not in _DURABILITIES:
            raise _unknown_durability(durability)
        count, encode = self._batch(payloads, attributes, routing_keys)
        offsets = self._committer.append_batch(count, encode)
        if durability == "synced" and offsets:
            self._committer.await_synced(offsets.stop)
        return offsets

    async def append_many_async(
        self,
        payloads: Iterable[Buffer],
        attributes: Iterable[Mapping[str, str] | None] | None = None,
        routing_keys: Iterable[str | None] | None = None,
        durability: Durability = "buffered",
        *,
        producer: ProducerParts | None = None,
        first_request_id: int | None = None,
    ) -> range:
        """`append_many` for asyncio: neither a full queue nor a sync blocks the event loop.

        The messages name `producer`, if it is given. With `first_request_id`, the first message has
        that number, and each further one a number higher by one.

        A batch larger than the queue is appended on a thread, which goes on if the call is
        cancelled.
        """
        if durability not in _DURABILITIES:
            raise _unknown_durability(durability)
        count, encode = self._batch(payloads, attributes, routing_keys, producer, first_request_id)
        offsets = await self._committer.append_batch_async(count, encode)
        if durability == "synced" and offsets:
            # Not with `producer=True`: commits must not be delayed for this caller, because an
            # event loop prepares its next batch while this one is being synced.
            began = time.monotonic()
            await self._committer.await_watermark(offsets.stop, "synced")
            metrics.append_seconds.observe(time.monotonic() - began)
        return offsets

    def _batch(
        self,
        payloads: Iterable[Buffer],
        attributes: Iterable[Mapping[str, str] | None] | None,
        routing_keys: Iterable[str | None] | None,
        producer: ProducerParts | None = None,
        first_request_id: int | None = None,
    ) -> tuple[int, Encode]:
        """Returns the number of messages and a function that encodes them."""
        values = _listed("payloads", payloads)
        properties = None
        if attributes is not None:
            properties = [each and dict(each) for each in _listed("attributes", attributes)]
        keys = None if routing_keys is None else _listed("routing_keys", routing_keys)
        for name, column in (("attributes", properties), ("routing_keys", keys)):
            if column is not None and len(column) != len(values):
                raise UsageError(
                    f"{len(values)} payloads, but {len(column)} {name}; give one for each payload"
                )

        head, middle = self._head, self._middle
        if producer is not None:
            head, middle = producer.head, producer.middle

        def encode(offset: int, index: int, bytes_max: int) -> tuple[Buffer, int]:
            now = self._now_ms()
            number = None if first_request_id is None else first_request_id + index
            return encode_many(
                head, middle, offset, values, index, now, properties, keys, bytes_max, number
            )

        return len(values), encode

    def producer(self, producer_id: int, name: str, broker_addr: str = "") -> ProducerParts:
        """Encodes what the messages of a producer have in common, for `append_many_async`."""
        head = encode_head(0, producer_id, self.topic, broker_addr)
        return ProducerParts(head, encode_middle(name, None))

    # -- waiting --------------------------------------------------------------------------------

    def wait(self, offset: int, timeout: float | None = None) -> None:
        """Returns once the message at `offset` would survive a power loss.

        Raises OffsetOutOfRange if it was never appended, WaitTimeout after `timeout` seconds, and
        LogStopped, TopicFenced or LogClosed if the log ends first.
        """
        self._require_appended(offset)
        self._committer.await_synced(offset + 1, timeout)

    async def wait_async(self, offset: int) -> None:
        """`wait` for asyncio; cancelling it does not affect the message."""
        self._require_appended(offset)
        await self._committer.await_watermark(offset + 1, "synced", producer=True)

    def flush(self, timeout: float | None = None) -> None:
        """Returns once everything appended so far is synced; raises as `wait` does."""
        self._committer.await_synced(self.current_offset(), timeout)

    def await_synced(self, target: int, timeout: float | None = None) -> None:
        """Blocks until every offset below `target` is synced; raises as `wait` does."""
        self._committer.await_synced(target, timeout)

    async def await_synced_async(self, target: int) -> None:
        """`await_synced` for asyncio, for callers that prepare more appends while they wait.

        Unlike `wait_async`, it never delays a commit for its caller.
        """
        await self._committer.await_watermark(target, "synced")

    def _require_appended(self, offset: int) -> None:
        end = self.current_offset()
        if not 0 <= offset < end:
            raise self._out_of_range(offset, f"it was never appended; the next offset is {end}")

    def _out_of_range(self, offset: int, why: str) -> OffsetOutOfRange:
        return OffsetOutOfRange(
            f"{self.topic}: offset {offset} is not in the log: {why}",
            start=self.start_offset,
            end=self.current_offset(),
        )

    # -- state ----------------------------------------------------------------------------------

    @property
    def start_offset(self) -> int:
        """The oldest offset that can be read."""
        if self.settings.dir is None:
            first = self._committer.cache.first_offset
            return self._committer.synced if first is None else first
        return self._journal.start_offset

    def current_offset(self) -> int:
        """The offset of the next append."""
        return self._committer.queue.next_offset

    def watermarks(self) -> Watermarks:
        return self._committer.watermarks()

    @property
    def synced_offset(self) -> int:
        """The offset before which everything is synced; `watermarks` without the lock."""
        return self._committer.synced

    @property
    def stopped(self) -> bool:
        """Whether an error ended this log; opening it again recovers it."""
        return self._committer.stopped

    @property
    def ended(self) -> bool:
        """Whether the log takes no more appends: it was shut down, or an error ended it."""
        return self._committer.ended

    @property
    def deletion(self) -> TopicDeleted | None:
        """The error for readers, if the log ended because its topic was deleted."""
        return self._committer.deletion

    @property
    def released(self) -> bool:
        """Whether `shutdown` has finished: nothing is written from then on."""
        return self._committer.released

    # -- files ----------------------------------------------------------------------------------

    def segments(self) -> list[Segment]:
        """The segments, oldest first, with their synced parts."""
        return list(self._journal.segments)

    @property
    def names(self) -> SegmentNames:
        return SegmentNames(self.settings.file_name)

    @property
    def disk(self) -> Disk:
        return self._disk

    @property
    def checkpoints(self) -> CheckpointStore | None:
        """The topic's checkpoints; None if the log is in memory only."""
        return self._journal.checkpoints

    def rotate(self) -> None:
        """Syncs and seals the active segment; the next commit begins a new one."""
        self.flush()
        self._committer.rotate()

    def configure_rotation(self, bytes_max: int | None, seconds_max: float | None) -> None:
        """Changes when segments are rotated; None sets no limit."""
        settings = self.settings
        if (settings.rotate_max_bytes, settings.rotate_max_seconds) != (bytes_max, seconds_max):
            self._committer.configure_rotation(bytes_max, seconds_max)
            self.settings = replace(
                settings, rotate_max_bytes=bytes_max, rotate_max_seconds=seconds_max
            )

    def retain(self, deleter: Deleter, committed_offset: int) -> list[Segment]:
        """Removes the segments below `committed_offset` that the deleter chooses; returns them."""

        def choose(segments: Sequence[Segment]) -> list[Segment]:
            return deleter.choose(
                segments,
                committed_offset=committed_offset,
                pinned=self._pinned(),
                now_ms=self._clock.now_ms(),
            )

        return self._committer.remove_segments(choose)

    def _pinned(self) -> set[int]:
        oldest = self._clock.monotonic() - READER_PIN_SECONDS_MAX
        return {
            reader.pinned
            for reader in self._readers
            if reader.pinned is not None and reader.moved_at >= oldest
        }

    # -- reading --------------------------------------------------------------------------------

    def tail_reader(
        self,
        from_offset: int | Literal["latest"],
        *,
        end: int | None = None,
        visibility: Visibility = "synced",
        through: ReadableLog | None = None,
    ) -> LogReader:
        """Returns a reader that starts at an offset.

        It stops before offset `end`; without one, it waits for new messages at the end of the log.
        `visibility="buffered"` also returns messages that are not synced yet and can be lost in a
        crash. `through` is a longer log that ends with this one, such as a tiered log; the reader
        then reads that. Raises OffsetOutOfRange.
        """
        if visibility not in _VISIBILITIES:
            raise UsageError(f"visibility is {visibility!r}; it must be 'synced' or 'buffered'")
        next_offset = self.current_offset()
        start = next_offset if from_offset == "latest" else from_offset
        if start > next_offset:
            raise self._out_of_range(start, f"the next offset is {next_offset}")
        if through is None and start < self.start_offset:
            raise self._out_of_range(start, f"the oldest offset here is {self.start_offset}")
        log = through or self
        reader = LogReader(log, self._disk, self.indexes, start, end=end, visibility=visibility)
        self._add_reader(reader)
        metrics.readers.add()
        return reader

    @mended
    def _add_reader(self, reader: LogReader) -> None:
        with self._committer.lock:
            self._readers.add(reader)

    def async_reader(
        self,
        from_offset: int | Literal["latest"],
        *,
        end: int | None = None,
        visibility: Visibility = "synced",
        through: ReadableLog | None = None,
        threads: Executor | None = None,
        locate: Callable[[], int] | None = None,
    ) -> AsyncLogReader:
        """`tail_reader` for asyncio; files are read on `threads`, by default the event loop's.

        `locate` finds the offset to start at instead. It is called there, before the first read.
        """
        reader = self.tail_reader(from_offset, end=end, visibility=visibility, through=through)
        return AsyncLogReader(through or self, reader, threads, locate)

    @mended
    def read_cached_since(self, after_offset: int) -> tuple[list[tuple[int, StreamMessage]], int]:
        """The synced messages after `after_offset` that are in memory, and the synced watermark.

        The list starts at the oldest cached message; older ones are in the files.
        """
        with self._committer.lock:
            synced, cache = self._committer.synced, self._committer.cache
            start = max(after_offset + 1, cache.first_offset or 0)
            batches = cache.since(start) or []
        messages = [
            (message.offset, message)
            for batch in batches
            for message in decode_messages(
                scan(batch.data, expected=batch.first_offset, consecutive=True)
            )
            if message.offset >= start
        ]
        return messages, synced

    @mended
    def cached_batches(self) -> list[FrameBatch]:
        """The synced frames that are in memory, with the same bytes as on disk."""
        cache = self._committer.cache
        with self._committer.lock:
            return cache.since(cache.first_offset or 0) or []

    @mended
    def in_memory(self) -> range:
        """The offsets that are in memory: cached, or not synced yet."""
        committer = self._committer
        with committer.lock:
            first = committer.cache.first_offset
            return range(committer.synced if first is None else first, committer.queue.next_offset)

    @mended
    def plan(self, reader: LogReader) -> Plan:
        """Says where the reader's next offset is now.

        Raises OffsetOutOfRange if it was removed, and TopicDeleted if the whole topic was.
        """
        offset, committer = reader.wanted, self._committer
        with committer.lock:
            reader.pinned = None
            if (deletion := committer.deletion) is not None:
                raise TopicDeleted(str(deletion))
            if offset >= committer.watermark(reader.visibility):
                return None
            batches = committer.batches_from(offset)
            if batches:
                return batches
            segment = self._journal.segments.find(offset)
            if segment is None:
                raise self._out_of_range(offset, f"the oldest offset here is {self.start_offset}")
            reader.pinned = segment.seq
            reader.moved_at = self._clock.monotonic()
            return segment

    def gone(self, reader: LogReader, segment: Segment) -> ForebayError:
        """Returns the error for a reader whose planned segment is not in the directory."""
        if reader.wanted < self.start_offset:
            return self._out_of_range(
                reader.wanted, f"the oldest offset here is {self.start_offset}"
            )
        if (deletion := self._committer.deletion) is not None:
            return TopicDeleted(str(deletion))
        if self.ended:  # the directory's next owner may have removed it, or set it aside
            return LogClosed(
                f"{self.topic}: the log is no longer open here, and {segment.path} was removed "
                "since; open it again"
            )
        return MissingData(
            f"{segment.path} is missing, with the offsets from {segment.first_offset} on; put the "
            "file back, or run `forebay repair`"
        )

    def enlist(self, target: int, waiter: Waiter, visibility: Visibility) -> bool:
        """Wakes `waiter` once the watermark reaches `target`; returns False if it already has."""
        return self._committer.enlist(target, waiter, visibility)

    def delist(self, waiter: Waiter, visibility: Visibility) -> bool:
        """Removes a waiter that gave up; returns False if it was woken already."""
        return self._committer.delist(waiter, visibility)

    # -- interrupts -----------------------------------------------------------------------------

    def require_outside(self) -> None:
        """Raises UsageError if the calling thread is in the middle of a call that has the lock."""
        self._committer.require_outside()

    def mend(self) -> None:
        """Repairs what a call that raised may have left behind; see `GroupCommit.mend`."""
        self._committer.mend()

    # -- the end --------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Syncs the queue, writes a checkpoint, and releases the directory. Idempotent.

        Raises LogStopped or TopicFenced if messages in the queue could not be synced.
        """
        self._committer.close()

    def abandon(self) -> None:
        """Releases the directory of a stopped log, so that it can be opened again."""
        with suppress(LogStopped, TopicFenced):  # the waiters got the error when the log stopped
            self.shutdown()

    def fence(self, error: TopicFenced) -> None:
        """Stops the log because another process owns the topic now."""
        self._committer.fence(error)


def _unknown_durability(durability: object) -> UsageError:
    return UsageError(
        f"durability is {durability!r}; it must be 'buffered', 'synced' or, for `Topic.append`, "
        "'uploaded'"
    )


_Item = TypeVar("_Item")


def _listed(name: str, items: Iterable[_Item]) -> Sequence[_Item]:
    """The items as a list or tuple; refuses a single value passed by mistake."""
    if isinstance(items, str | bytes | bytearray | memoryview | Mapping):
        raise UsageError(f"{name} is one {type(items).__name__}; give a list, one for each message")
    return items if isinstance(items, list | tuple) else list(items)
