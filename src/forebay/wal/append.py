"""Appending to a log: offset, frame and place in the queue, given in one step under one lock.

Whatever way a message comes in, it gets the next offset and the next place. `append` is the hot
path, and is written for speed: one call of the codec puts the frame where it belongs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, Literal, TypeAlias, TypeVar

from forebay.clock import Clock
from forebay.errors import OffsetOutOfRange, UsageError
from forebay.format.codec import append_one, encode_many
from forebay.format.frame import encode_frame
from forebay.format.layout import Buffer
from forebay.format.message import StreamMessage, encode_head, encode_message, encode_middle
from forebay.format.pure import add_frame
from forebay.limits import ENCODE_BYTES_MAX
from forebay.settings import WalSettings
from forebay.wal import metrics
from forebay.wal.claim import Claim
from forebay.wal.commit import REFUSE, GroupCommit
from forebay.wal.journal import AnyJournal
from forebay.wal.pool import WriterPool
from forebay.wal.waiters import TaskWaiter

Durability: TypeAlias = Literal["buffered", "synced"]
_TURNS: Final = 32
_DURABILITIES: Final = frozenset({"buffered", "synced"})


class Appender(GroupCommit):
    def __init__(
        self,
        topic: str,
        settings: WalSettings,
        clock: Clock,
        journal: AnyJournal,
        pool: WriterPool,
        claim: Claim,
    ) -> None:
        super().__init__(topic, settings, clock, journal, pool, claim)
        self._now_ms = clock.now_ms
        self._now_ns = clock.now_ns
        self._head = encode_head(0, 0, topic, "")
        self._middle = encode_middle("", None)

    @property
    def start_offset(self) -> int:
        """The oldest offset that can be read."""
        if self.settings.dir is None:
            first = self._cache.first
            return self._synced if first is None else first
        return self._journal.start_offset

    def append(
        self,
        payload: Buffer,
        attributes: Mapping[str, str] | None = None,
        routing_key: str | None = None,
        durability: Durability = "buffered",
    ) -> int:
        """Appends one message and answers its offset; `synced` returns when it would survive."""
        if durability not in _DURABILITIES:
            raise _unknown_durability(durability)
        if attributes is not None and type(attributes) is not dict:
            attributes = dict(attributes)  # whose code must not run under the lock
        if self._lock.locked() and durability == "buffered":
            self._step_aside()
        # `with`, though `acquire` and `release` cost less: between `acquire` and `try` there is
        # room for an interrupt that leaves the lock taken for ever.
        with self._lock:
            if self._queued_bytes >= self._queued_max:
                self._wait_for_room()
            queue = self._queue
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
                waiter = self._join_commit(offset + 1)
            elif len(tail) >= self._notice_bytes:
                self._notice()
        if durability == "synced":
            self._await_commit(waiter, offset + 1, None)
        return offset

    def _step_aside(self) -> None:
        """Lets whoever was interrupted while holding the lock go on first.

        Waiting for the lock itself would make each of its releases wake somebody, which costs
        several times what a buffered append does.
        """
        for _ in range(_TURNS):
            time.sleep(0)
            if not self._lock.locked():
                return

    def append_message(self, message: StreamMessage, durability: Durability = "buffered") -> int:
        """Appends a message with all its fields as they are, but for the offset.

        One without a topic's name gets this topic's.
        """
        if durability not in _DURABILITIES:
            raise _unknown_durability(durability)
        if not message.msg_id.topic_name:
            message = replace(message, msg_id=replace(message.msg_id, topic_name=self.topic))
        with self._lock:
            if self._queued_bytes >= self._queued_max:
                self._wait_for_room()
            offset = self._queue.next_offset
            add_frame(self._queue.tail, encode_frame(offset, encode_message(message, offset)))
            self._notice()
        if durability == "synced":
            self.await_synced(offset + 1)
        return offset

    def append_many(
        self,
        payloads: Iterable[Buffer],
        attributes: Iterable[Mapping[str, str] | None] | None = None,
        routing_keys: Iterable[str | None] | None = None,
        durability: Durability = "buffered",
    ) -> range:
        """Appends messages with consecutive offsets; other appends wait meanwhile.

        A batch larger than the queue's bound is taken in pieces, as the writer makes room. If it
        raises, none of the batch was appended, unless it had to wait for room: then the messages
        before the one at fault were.
        """
        if durability not in _DURABILITIES:
            raise _unknown_durability(durability)
        columns = _columns(payloads, attributes, routing_keys)
        with self._lock:
            self._wait_for_room()
            try:
                self._exclusive, self._queued_max = True, REFUSE
                offsets = self._enqueue_many(*columns)
            finally:
                self._exclusive = False
                if not self._closed and self._error is None:
                    self._queued_max = self.settings.queue_max_bytes
                self._let_in()
        if durability == "synced" and offsets:
            self.await_synced(offsets.stop)
        return offsets

    async def append_many_async(
        self,
        payloads: Iterable[Buffer],
        attributes: Iterable[Mapping[str, str] | None] | None = None,
        routing_keys: Iterable[str | None] | None = None,
        durability: Durability = "buffered",
    ) -> range:
        """`append_many` for asyncio: neither a full queue nor a sync blocks the event loop.

        A batch that is larger than the queue is taken on a thread, as room is made for it.
        """
        if durability not in _DURABILITIES:
            raise _unknown_durability(durability)
        columns = _columns(payloads, attributes, routing_keys)
        while True:
            with self._lock:
                if self._has_room():
                    try:
                        offsets = self._enqueue_many(*columns, patient=False)
                    except _NoRoomError:
                        offsets = None
                    break
                waiter = TaskWaiter()
                self._room_waiters.append(waiter)
            await waiter.future
        if offsets is None:
            offsets = await asyncio.to_thread(self.append_many, *columns)
        if durability == "synced" and offsets:
            # Not as a producer that the others' commits are held back for: the next batch of one
            # event loop is made while this one is synced.
            began = time.monotonic()
            await self.await_watermark(offsets.stop, "synced")
            metrics.append_seconds.observe(time.monotonic() - began)
        return offsets

    def _enqueue_many(
        self,
        payloads: Sequence[Buffer],
        attributes: Sequence[Mapping[str, str] | None] | None,
        routing_keys: Sequence[str | None] | None,
        *,
        patient: bool = True,
    ) -> range:
        self._close_tail()
        before, before_bytes, waited = self._queue, self._queued_bytes, False
        first, index = before.next_offset, 0
        rotate = self.settings.rotate_max_bytes or ENCODE_BYTES_MAX
        piece_bytes = min(ENCODE_BYTES_MAX, rotate, self.settings.queue_max_bytes)
        try:
            while index < len(payloads):
                while self._queued_bytes >= self.settings.queue_max_bytes:
                    if not patient:
                        raise _NoRoomError  # noqa: TRY301  # undone below, as any error is
                    waited = True
                    self._schedule()
                    self._step_out()
                    self._require_open()
                data, after = encode_many(
                    self._head,
                    self._middle,
                    first + index,
                    payloads,
                    index,
                    self._now_ms(),
                    attributes,
                    routing_keys,
                    piece_bytes,
                )
                self._queue = self._queue.with_run(data, after - index)
                self._queued_bytes += len(data)
                index = after
                self._notice()
        except BaseException:
            if not waited:
                self._queue, self._queued_bytes = before, before_bytes
            raise
        return range(first, first + index)

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
        while True:
            with self._lock:
                if self._has_room():
                    queue, now = self._queue, self._now_ms()
                    head, middle, first = self._head, self._middle, queue.tail_first
                    offset: int = append_one(
                        queue.tail, first, head, middle, payload, now, attributes, routing_key
                    )
                    self._notice()
                    break
                waiter = TaskWaiter()
                self._room_waiters.append(waiter)
            await waiter.future
        if durability == "synced":
            await self.wait_async(offset)
        return offset

    def wait(self, offset: int, timeout: float | None = None) -> None:
        """Returns when the message at `offset` would survive a crash."""
        self._require_appended(offset)
        self.await_synced(offset + 1, timeout)

    async def wait_async(self, offset: int) -> None:
        """`wait` for asyncio; cancelling it changes nothing about the message."""
        self._require_appended(offset)
        await self.await_watermark(offset + 1, "synced", producer=True)

    def flush(self, timeout: float | None = None) -> None:
        """Returns when everything appended so far is synced."""
        self.await_synced(self.current_offset(), timeout)

    def _require_appended(self, offset: int) -> None:
        end = self.current_offset()
        if not 0 <= offset < end:
            raise self._out_of_range(offset, f"it was never appended; the next one is {end}")

    def _out_of_range(self, offset: int, why: str) -> OffsetOutOfRange:
        return OffsetOutOfRange(
            f"{self.topic}: offset {offset} is not in the log: {why}",
            start=self.start_offset,
            end=self.current_offset(),
        )


def _unknown_durability(durability: object) -> UsageError:
    return UsageError(
        f"durability is {durability!r}; it must be 'buffered', 'synced' or, of a topic, 'uploaded'"
    )


class _NoRoomError(Exception):
    """The queue has no room for the rest of a batch, and its caller must not wait."""


_Columns: TypeAlias = tuple[
    Sequence[Buffer],
    Sequence[Mapping[str, str] | None] | None,
    Sequence[str | None] | None,
]


def _columns(
    payloads: Iterable[Buffer],
    attributes: Iterable[Mapping[str, str] | None] | None,
    routing_keys: Iterable[str | None] | None,
) -> _Columns:
    """A batch whose parts are lists of one length."""
    payloads = _listed("payloads", payloads)
    if attributes is not None:
        attributes = [each and dict(each) for each in _listed("attributes", attributes)]
    routing_keys = None if routing_keys is None else _listed("routing_keys", routing_keys)
    for name, column in (("attributes", attributes), ("routing_keys", routing_keys)):
        if column is not None and len(column) != len(payloads):
            raise UsageError(f"{len(payloads)} payloads, but {len(column)} {name}")
    return payloads, attributes, routing_keys


_Item = TypeVar("_Item")


def _listed(name: str, items: Iterable[_Item]) -> Sequence[_Item]:
    """One item for each message, of anything that can be iterated but a single value."""
    if isinstance(items, str | bytes | bytearray | memoryview | Mapping):
        raise UsageError(f"{name} is one {type(items).__name__}; give a list, one for each message")
    return items if isinstance(items, list | tuple) else list(items)
