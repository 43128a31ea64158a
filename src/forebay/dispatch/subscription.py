"""`Subscription`: one subscription of a stored topic, at work: reads, sends, and remembers.

`Window` makes all decisions. This is the shell around it, in one event loop: a task that reads what
the window wants and puts it into the outboxes of consumers, a timer for the next time-out, and the
cursor, which goes to the topic's cursors soon after every change.

The task is woken by every event that may give it work: a consumer that comes, goes or has room, an
acknowledgement, a timer, a new message. It then works until there is nothing to do. The mark that
it was woken is cleared before it looks, so no wake-up is lost.

Beware: the cursor in the catalog is some seconds behind. After a crash, consumers get again what
they acknowledged in these seconds. They never miss a message. What is not synced is never in that
cursor, though consumers of a buffered feed may have acknowledged it: other messages could get its
offsets.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, TypeAlias

from forebay.dispatch import metrics
from forebay.dispatch.feed import Chunk, Delivery, Feed
from forebay.dispatch.policy import Policy, SubscriptionType
from forebay.dispatch.window import Verdict, Window
from forebay.errors import (
    ForebayError,
    LostOffsets,
    MessageTooLarge,
    MissingData,
    OffsetOutOfRange,
)
from forebay.format.cursor import Cursor
from forebay.limits import (
    ACKS_AHEAD_MAX,
    ACKS_HELD_MAX,
    OUTBOX_BYTES_MAX,
    OUTBOXES_BYTES_MAX,
    REDELIVERIES_AT_ONCE,
)
from forebay.logs import event

_log: Final = logging.getLogger("forebay.dispatch")
_RETRY_SECONDS: Final = 1.0
_RETRY_SECONDS_MAX: Final = 30.0
_CURSOR_SECONDS: Final = 0.2
"""How long acknowledgements are collected before the topic's cursors get them."""
_TOO_LARGE_DELAY_MS: Final = 60_000
_STALL_SECONDS: Final = 5.0
"""A consumer that has read nothing for this long may be disconnected if there is no room."""


class _PassedError(Exception):
    """The offset has no message, and the subscription went past it."""


Encode: TypeAlias = Callable[[Delivery], bytes]
"""Makes what a client gets of a message; MessageTooLarge if this client cannot get it."""


class Outboxes:
    """What waits to be written to all consumers of a server, within one limit of bytes.

    When it is reached, nothing is delivered until a consumer has read. Consumers that have not read
    for some time are disconnected then: what they hold would hold back everybody. Call every method
    in one event loop.
    """

    def __init__(
        self, bytes_max: int = OUTBOXES_BYTES_MAX, stall_seconds: float = _STALL_SECONDS
    ) -> None:
        self._bytes_max = bytes_max
        self._stall_seconds = stall_seconds
        self._waiting: dict[Callable[[], None], None] = {}
        self._holders: dict[Consumer, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.bytes = 0

    @property
    def full(self) -> bool:
        return self.bytes >= self._bytes_max

    def add(self, consumer: Consumer, size: int) -> None:
        self._holders[consumer] = None
        self.bytes += size
        if self.full and self._timer is None:
            self._look()

    def remove(self, consumer: Consumer, size: int, *, all_gone: bool) -> None:
        if all_gone:
            self._holders.pop(consumer, None)
        self.bytes -= size
        if self._waiting and not self.full:
            waiting, self._waiting = self._waiting, {}
            for wake in waiting:
                wake()

    def wake_when_free(self, wake: Callable[[], None]) -> None:
        self._waiting[wake] = None

    def _look(self) -> None:
        """Disconnects those that do not read, while there is no room."""
        self._timer = None
        if not self.full:
            return
        before = time.monotonic() - self._stall_seconds
        stalled = [each for each in self._holders if each.taken_at < before]
        for consumer in stalled:
            consumer.cut.set()
        if stalled:
            event(
                _log,
                logging.WARNING,
                "consumers that do not read are disconnected: there is no room for others",
                consumers=len(stalled),
                first=stalled[0].name,
            )
        later = asyncio.get_running_loop().call_later
        self._timer = later(min(self._stall_seconds / 2, 1.0), self._look)


class Consumer:
    """A consumer with a stream, and the messages that wait to be written to it.

    They wait in an outbox, encoded, within a limit of bytes. A consumer that does not read fills
    its outbox and gets no more until it has room: it holds back nobody else. What `take` returned
    counts until it is called again, when that was written.
    """

    def __init__(
        self,
        number: int,
        name: str,
        filters: tuple[str, ...],
        encode: Encode,
        outboxes: Outboxes | None = None,
    ) -> None:
        self.number = number
        self.name = name
        self.filters = filters
        self.encode = encode
        self.delivered = 0
        self.on_room: Callable[[], None] = lambda: None
        self.cut = asyncio.Event()
        """Set when the stream is to end although the subscription does not."""
        self.taken_at = float("inf")
        """When what is being written was taken, in monotonic time; infinity if nothing is."""
        self._outboxes = outboxes or Outboxes()
        self._queue: deque[bytes] = deque()
        self._bytes = 0
        self._written = 0
        """Bytes of what is being written: a part of `_bytes`."""
        self._ended = False
        self._waiting: asyncio.Future[None] | None = None

    @property
    def full(self) -> bool:
        return self._bytes >= OUTBOX_BYTES_MAX

    @property
    def crowded(self) -> bool:
        """Whether the consumers together have no room, whoever holds it."""
        return self._outboxes.full

    def put(self, data: bytes) -> None:
        self._queue.append(data)
        self._bytes += len(data)
        self._outboxes.add(self, len(data))
        self.delivered += 1
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def take(self) -> list[bytes]:
        """Waits for messages, and returns all that are there. One task at a time may call it.

        Returns nothing if the subscription has ended.
        """
        self._release(self._written)
        while not self._queue and not self._ended:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        taken = list(self._queue)
        self._queue.clear()
        self._written = self._bytes
        self.taken_at = time.monotonic()
        return taken

    def _release(self, size: int) -> None:
        """So many bytes are gone from the outbox."""
        self._written = 0
        self.taken_at = float("inf")
        if size:
            was_full = self.full
            self._bytes -= size
            self._outboxes.remove(self, size, all_gone=not self._bytes)
            if was_full and not self.full:
                self.on_room()

    def clear(self) -> None:
        """Drops what waits; what is being written still counts."""
        self._queue.clear()
        written, taken_at = self._written, self.taken_at
        self._release(self._bytes - written)
        self._written, self.taken_at = written, taken_at

    def leave(self) -> None:
        """The stream has ended: nothing is being written any more."""
        self._queue.clear()
        self._release(self._bytes)

    def end(self) -> None:
        """Ends the stream."""
        self._ended = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


@dataclass(slots=True)
class LostCounts:
    """Offsets that the subscription went past without delivering them."""

    lost: int = 0
    """Recorded as lost, or accepted as such."""
    removed: int = 0
    """Removed by retention before the subscription read them."""
    skipped: int = 0
    """Messages that an operator skipped."""


class Subscription:
    """Call every method in the event loop that runs it."""

    def __init__(
        self,
        name: str,
        window: Window,
        feed: Feed,
        save: Callable[[Cursor], bool],
        dead_letter: Callable[[Delivery, str], Awaitable[None]],
        *,
        skip_lost: bool = True,
        outboxes: Outboxes | None = None,
    ) -> None:
        """`save` gets the cursor after changes, and returns False if it has to get it again.

        `dead_letter` stores a message elsewhere.
        """
        self.name = name
        self.window = window
        self.feed = feed
        self.counts = LostCounts()
        self.problem: str | None = None
        """Why nothing is delivered: the last error of reading."""
        self.read_publish_ms: int | None = None
        """When the message that was delivered last was published."""
        self._save = save
        self._dead_letter = dead_letter
        self._skip_lost = skip_lost
        self._outboxes = outboxes or Outboxes()
        self._consumers: dict[int, Consumer] = {}
        self._standby: list[Consumer] = []
        """Streams that get nothing for now: of another consumer of an exclusive subscription, or
        older ones of a consumer that is connected. The last one comes first."""
        self._delivered_before = 0
        """What consumers that have left got."""
        self._frozen = False
        self._held: list[tuple[int, int]] = []
        """What was acknowledged while it was frozen."""
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = 0
        """When the timer fires."""
        self._at_end = False
        """Whether everything that there is was delivered: only what wakes the task gives it more to
        do, and acknowledgements do not."""
        self._cursor_timer: asyncio.TimerHandle | None = None
        self._pause = _RETRY_SECONDS
        self._stopped = False
        self._closed = False

    @property
    def topic(self) -> str:
        return self.feed.topic.name

    # -- consumers ------------------------------------------------------------------------------

    def join(self, consumer: Consumer, policy: Policy | None = None) -> None:
        """Begins to deliver to the consumer. One with the same number is replaced.

        A second consumer of an exclusive subscription gets nothing until the first one leaves.
        """
        if self._closed:
            consumer.end()
            return
        if policy is not None:
            self.window.configure(policy, _now_ms())
        others = self._consumers.keys() - {consumer.number}
        if self.window.kind is SubscriptionType.EXCLUSIVE and others:
            self._standby.append(consumer)
            return
        self.window.join(consumer.number, consumer.name, consumer.filters, _now_ms())
        self._replace(consumer)
        consumer.on_room = lambda: self._has_room(consumer)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        self._wake()

    def _replace(self, consumer: Consumer) -> None:
        before = self._consumers.get(consumer.number)
        if before is not None:
            self._standby.append(before)
            self._set_aside(before)
        self._consumers[consumer.number] = consumer

    def _set_aside(self, consumer: Consumer) -> None:
        consumer.clear()
        self._delivered_before += consumer.delivered
        consumer.delivered = 0

    def leave(self, consumer: Consumer) -> None:
        """Ends the delivery; what the consumer has not acknowledged is delivered to others."""
        consumer.leave()
        if consumer in self._standby:
            self._standby.remove(consumer)
        if self._consumers.get(consumer.number) is not consumer:
            return  # another stream has taken its place
        del self._consumers[consumer.number]
        self._set_aside(consumer)
        self.window.leave(consumer.number, _now_ms())
        self._join_next(consumer.number)
        self._wake()

    def _join_next(self, number: int) -> None:
        """Lets a stream that was set aside take the place of one that has left."""
        exclusive = self.window.kind is SubscriptionType.EXCLUSIVE
        for consumer in reversed(self._standby):
            if exclusive or consumer.number == number:
                self._standby.remove(consumer)
                self.join(consumer)
                return

    @property
    def delivered(self) -> int:
        """Messages delivered since the server started, redeliveries included."""
        return self._delivered_before + sum(each.delivered for each in self.consumers)

    def lag(self, synced: int) -> int:
        """Synced messages that are not acknowledged, offsets in holes included."""
        window = self.window
        unread = max(synced - window.next_offset, 0)
        return unread + window.outstanding + window.waiting + window.kept

    @property
    def consumers(self) -> list[Consumer]:
        return list(self._consumers.values())

    def _has_room(self, consumer: Consumer) -> None:
        if self._consumers.get(consumer.number) is consumer:
            self.window.resume(consumer.number)
            self._wake()

    # -- answers --------------------------------------------------------------------------------

    def ack(self, start: int, end: int) -> None:
        """Acknowledges the offsets from `start` to before `end`.

        Those that were never read count too: this server may have delivered them before it was
        started again. Beyond a limit they are ignored, and delivered once more.
        """
        if self._frozen:  # it is being moved elsewhere
            if len(self._held) < ACKS_HELD_MAX:
                self._held.append((start, end))
            return
        window = self.window
        if end > window.next_offset:
            known = min(self.feed.topic.synced_offset, window.next_offset + ACKS_AHEAD_MAX)
            end = min(end, max(known, window.next_offset))
        if start < end and window.ack_unread(start, end):
            self._changed(wake=not self._at_end)

    def nack(self, offset: int, delay_ms: int | None) -> None:
        self.window.nack(offset, delay_ms, _now_ms())
        self._changed()

    def seek(self, cursor: Cursor) -> None:
        """Starts again at the cursor, which the caller has stored."""
        self.window.seek(cursor)
        for consumer in self._consumers.values():
            consumer.clear()
            self.window.resume(consumer.number)
        self.problem = None
        self._wake()

    def go_back(self, end: int) -> None:
        """Starts again at `end` if it was beyond it: the log has ended, and only that was synced.

        Later offsets were delivered from memory. Their messages may be gone, and others may have
        got them.
        """
        cursor = self.window.cursor()
        kept = cursor.before(end)
        if self.window.next_offset > end or kept is not cursor:
            event(
                _log,
                logging.WARNING,
                "a subscription goes back: what it delivered last was not synced",
                topic=self.topic,
                subscription=self.name,
                delivered=self.window.next_offset,
                synced=end,
            )
            self.seek(kept)

    def skip(self, ranges: Sequence[tuple[int, int]], messages: int) -> None:
        """Counts offsets as acknowledged, which have so many messages; the caller has stored that.

        Consumers keep what they have been sent of them.
        """
        for start, end in ranges:
            self.window.skip(start, end)
        self.counts.skipped += messages
        self.problem = None
        self._wake()

    def _changed(self, *, wake: bool = True) -> None:
        if self._cursor_timer is None:
            loop = asyncio.get_running_loop()
            self._cursor_timer = loop.call_later(_CURSOR_SECONDS, self.save)
        if wake:
            self._wake()

    def save(self) -> None:
        """Hands the cursor to the topic's cursors."""
        if self._cursor_timer is not None:
            self._cursor_timer.cancel()
            self._cursor_timer = None
        if self._frozen:
            return
        try:
            if not self._save(self.window.cursor()) and not self._closed:
                self._changed(wake=False)
        except ForebayError as error:
            # The next change hands it over again; until then consumers would get more again.
            self._report(error)

    @contextmanager
    def frozen(self, *, moves: bool = True) -> Iterator[None]:
        """Within the block nothing is acknowledged, and the cursor is not handed over.

        Acknowledgements that came meanwhile count afterwards, unless the block `moves` the
        subscription and does not raise: then they are for what was delivered before.
        """
        self._frozen = True
        try:
            yield
            if moves:
                self._held.clear()
        finally:
            self._frozen = False
            held, self._held = self._held, []
            for start, end in held:
                self.ack(start, end)
            self._changed()

    # -- the task -------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._woken.set()

    async def _run(self) -> None:
        while not self._stopped:
            await self._woken.wait()
            self._woken.clear()
            self._at_end = False
            try:
                while await self._step():
                    self._recovered()
                    await asyncio.sleep(0)  # a step may need no wait, and others wait too
            except _PassedError:
                self._wake()
            except Exception as error:  # noqa: BLE001  # reported, and tried again
                self._failed(error)
            self._arm()

    async def _step(self) -> bool:
        """Does one piece of work; returns False if there is none."""
        if self._stopped:
            return False
        window, now = self.window, _now_ms()
        window.expire(now)
        await self._write_dead_letters()
        if self._outboxes.full:
            self._outboxes.wake_when_free(self._wake)
            return False
        due = window.due(now, REDELIVERIES_AT_ONCE)
        if due:
            return await self._deliver(due)
        if not self._consumers or not window.wants_new():
            return False
        offset = window.next_offset
        chunk = await self._read(offset)
        if window.next_offset != offset:
            return True  # it was moved meanwhile
        if chunk is None:
            self._at_end = not window.waiting and not window.kept
            self.feed.wake_beyond(offset, self._arrived)
            return False
        if chunk.first > offset:
            self._pass_over(offset, chunk.first, "lost")
        return self._offer_new(chunk)

    def _arrived(self) -> None:
        """There is a message where the task waits for one, or the log has ended."""
        delivered = False
        try:
            with suppress(ForebayError):  # the task meets it again, and reports it
                delivered = self._deliver_at_end()
        finally:
            if not delivered:
                self._wake()

    def _deliver_at_end(self) -> bool:
        """Delivers new messages that are in memory, sooner than the task would.

        Returns False if the task has something to do.
        """
        window = self.window
        if self._stopped or self._woken.is_set() or not self._at_end:
            return False
        if self._outboxes.full or not self._consumers or not window.wants_new():
            return False
        chunk = self.feed.read_now(window.next_offset)
        if chunk is None or window.next_offset not in chunk:
            return False
        self._offer_new(chunk)
        if window.next_offset != chunk.end or window.waiting or window.kept:
            return False
        self.feed.wake_beyond(window.next_offset, self._arrived)
        self._arm()
        return True

    async def _deliver(self, due: list[int]) -> bool:
        """Reads messages again and offers them; they may be in different places."""
        chunk: Chunk | None = None
        progress = False
        for offset in due:
            if chunk is None or offset not in chunk:
                chunk = await self._read(offset)
            if offset > self.window.next_offset or self._outboxes.full:
                return True  # it was moved back meanwhile, or there is no room: look again
            if chunk is None:
                raise MissingData(
                    f"{self.topic}: offset {offset} was delivered, and is not in the log any more"
                )
            if chunk.first > offset:
                self._pass_over(offset, chunk.first, "lost")
                progress = True
            else:
                progress |= self._offer(chunk, offset)
        return progress

    def _offer_new(self, chunk: Chunk) -> bool:
        """Returns whether anything came of it. If not, only another event can change that."""
        before = self.window.next_offset
        while (offset := self.window.next_offset) in chunk and self.window.wants_new():
            if self._outboxes.full or not self._offer(chunk, offset):
                break
        return self._outboxes.full or self.window.next_offset != before

    def _offer(self, chunk: Chunk, offset: int) -> bool:
        """Returns False if nobody can take it now."""
        delivery = chunk[offset]
        verdict, number = self.window.offer(offset, delivery.message.routing_key, _now_ms())
        if verdict is Verdict.SENT and number is not None:
            self._put(self._consumers[number], delivery)
        return verdict is not Verdict.FULL

    def _put(self, consumer: Consumer, delivery: Delivery) -> None:
        try:
            consumer.put(consumer.encode(delivery))
        except MessageTooLarge as error:
            # Not lost: another consumer may take it, or the policy for poison messages applies.
            self.window.nack(delivery.offset, _TOO_LARGE_DELAY_MS, _now_ms())
            self._report(error)
            return
        self.read_publish_ms = delivery.message.publish_time
        if consumer.full:
            self.window.pause(consumer.number)

    async def _read(self, offset: int) -> Chunk | None:
        """Reads a chunk, or returns None if it is not there yet.

        Goes past what is recorded as lost or was removed by retention, and raises _PassedError.
        """
        try:
            return await self.feed.read(offset)
        except LostOffsets as error:
            if not self._skip_lost:
                raise
            self._pass_over(offset, error.end, "lost")
        except OffsetOutOfRange as error:
            if error.start <= offset:
                raise
            self._pass_over(offset, error.start, "removed")
        raise _PassedError

    def _pass_over(self, start: int, end: int, why: str) -> None:
        """Counts offsets without messages as acknowledged, and says so."""
        event(
            _log,
            logging.WARNING,
            "a subscription goes past messages that are gone",
            topic=self.topic,
            subscription=self.name,
            first=start,
            last=end - 1,
            why="retention removed them" if why == "removed" else "they are recorded as lost",
        )
        if why == "removed":
            self.counts.removed += end - start
        else:
            self.counts.lost += end - start
        metrics.GONE.add(end - start, self.topic, self.name, why)
        self.window.skip(start, end)
        self._changed()

    async def _write_dead_letters(self) -> None:
        for offset in self.window.poisoned():
            try:
                chunk = await self._read(offset)
                if chunk is not None and offset in chunk:
                    await self._dead_letter(chunk[offset], self.name)
            except _PassedError:
                continue
            except Exception as error:  # noqa: BLE001  # reported, and tried again
                event(
                    _log,
                    logging.ERROR,
                    "a dead letter was not stored; it is tried again",
                    topic=self.topic,
                    subscription=self.name,
                    offset=offset,
                    error=error if isinstance(error, ForebayError) else repr(error),
                )
                self.window.unpoison(offset, _now_ms())
                continue
            if offset < self.window.next_offset:  # or it was moved back meanwhile
                self.window.ack(offset, offset + 1)
                self._changed()

    def _recovered(self) -> None:
        self.problem, self._pause = None, _RETRY_SECONDS

    def _failed(self, error: Exception) -> None:
        """Nothing is skipped after an error: the same offset is read again, after a pause."""
        self._report(error)
        asyncio.get_running_loop().call_later(self._pause, self._wake)
        self._pause = min(self._pause * 2, _RETRY_SECONDS_MAX)

    def _report(self, error: Exception) -> None:
        """Logs an error once, and keeps its text for those who look at the subscription."""
        if self.problem != str(error):
            expected = isinstance(error, ForebayError)
            event(
                _log,
                logging.ERROR,
                "a subscription cannot deliver a message; it is tried again",
                trace=None if expected else error,
                topic=self.topic,
                subscription=self.name,
                error=error if expected else repr(error),
            )
        self.problem = str(error)

    def _arm(self) -> None:
        """Sets the timer for the next time-out or redelivery, unless one fires before that."""
        at = self.window.next_time_ms()
        if self._timer is not None:
            if at is not None and self._timer_ms <= at:
                return
            self._timer.cancel()
            self._timer = None
        if at is not None:
            seconds = max(at - _now_ms(), 1) / 1000
            self._timer_ms = at
            self._timer = asyncio.get_running_loop().call_later(seconds, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        self._wake()

    # -- the end --------------------------------------------------------------------------------

    def stop_delivering(self) -> None:
        """Delivers nothing more; acknowledgements still count."""
        self._stopped = True
        self._wake()

    def end_streams(self) -> None:
        for consumer in [*self._consumers.values(), *self._standby]:
            consumer.end()

    async def close(self, *, save: bool = True) -> None:
        """Ends the task and the streams, and hands the last cursor over."""
        self._stopped = self._closed = True
        self.end_streams()
        self.feed.wake_no_more(self._arrived)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        if save:
            self.save()
        elif self._cursor_timer is not None:
            self._cursor_timer.cancel()


def _now_ms() -> int:
    """Milliseconds that never go back."""
    return time.monotonic_ns() // 1_000_000
