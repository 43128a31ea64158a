"""Group commit: the queue in front of a log's files, and the one writer that empties it.

Everything in the queue is written and synced together. That happens at once if somebody waits for
it, otherwise after `fsync_interval_ms` or when `fsync_max_batch_bytes` are queued. The writer runs
on threads that all logs share. An append that finds the queue full waits until a commit makes room.

There are two locks. `_files` is held while files are written, rotated or removed, and is taken
first. `lock` guards the queue, the cache, the watermarks and the waiters, and is held for
microseconds.

A call may be interrupted anywhere, by Ctrl-C or the exception of another signal handler. Each that
takes `lock` ends with `mend` if it raises anything: that releases the lock, computes again what is
derived from the queue and the waiters, and repeats the wake-ups that are due. The files are touched
only on threads that signals do not reach.

The order of a commit: write, sync, check that the files are in their place, confirm the ownership,
publish the position for other processes, acknowledge.

Beware: after a disk error nothing is retried. The log stops and every waiter gets the error. Only
opening the log again shows what the device holds.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Concatenate, Final, ParamSpec, Protocol, TypeAlias, TypeVar

from forebay.clock import Clock
from forebay.errors import (
    DiskError,
    ForebayError,
    LogClosed,
    LogStopped,
    ServiceError,
    TopicDeleted,
    TopicFenced,
    UsageError,
    WaitTimeout,
    remedy,
)
from forebay.forks import disown_after_fork
from forebay.format.layout import Buffer
from forebay.interrupts import give_up, held, run_aside
from forebay.limits import (
    ENCODE_BYTES_MAX,
    FRAME_BATCH_BYTES_MAX,
    GATHER_PASSED_MAX,
    GATHER_SECONDS_MAX,
    QUEUE_BATCHES_MAX,
)
from forebay.logs import event
from forebay.settings import WalSettings
from forebay.wal.identity import WriteGuard
from forebay.wal.journal import AnyJournal
from forebay.wal.memory import FrameBatch, FrameCache, Queue, batches_since, merged
from forebay.wal.pool import WriterPool
from forebay.wal.segment import Segment
from forebay.wal.watermarks import (
    TaskWaiter,
    ThreadWaiter,
    Visibility,
    Waiter,
    Waiters,
    Watermarks,
)

_log: Final = logging.getLogger("forebay.wal")

Encode: TypeAlias = Callable[[int, int, int], tuple[Buffer, int]]
"""(offset, index, bytes_max) -> (frames, next index).

Encodes the messages of a batch from `index` on, the first at `offset`, into about `bytes_max`.
"""
_REFUSE: Final = -1
"""A queue limit that is always exceeded: every append takes the slow path and waits or raises."""
_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


class _Mendable(Protocol):
    def require_outside(self) -> None: ...

    def mend(self) -> None: ...


_Self = TypeVar("_Self", bound=_Mendable)


def mended(
    method: Callable[Concatenate[_Self, _Params], _Result],
) -> Callable[Concatenate[_Self, _Params], _Result]:
    """For methods that take the log's lock, and are not called with it: see `GroupCommit.mend`."""

    @wraps(method)
    def call(self: _Self, /, *args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        self.require_outside()
        try:
            return method(self, *args, **kwargs)
        except BaseException:
            self.mend()
            raise

    return call


def _batch_bytes(settings: WalSettings) -> int:
    """Returns how large a batch of frames in the queue grows."""
    return min(
        FRAME_BATCH_BYTES_MAX,
        settings.fsync_max_batch_bytes,
        settings.queue_max_bytes,
        settings.rotate_max_bytes or FRAME_BATCH_BYTES_MAX,
    )


class GroupCommit:
    """Queues the appends of one log and commits them to its journal. Thread-safe.

    `Wal.append` does a single append itself, under `lock`, because one more call would make it 5 %
    slower. It calls `wait_for_room` unless `queued_bytes` is below `queued_max`, and adds a frame
    to `queue.tail`. Then it calls `after_append`, or `join` to wait for the commit.
    """

    def __init__(
        self,
        topic: str,
        settings: WalSettings,
        clock: Clock,
        journal: AnyJournal,
        ownership: WriteGuard,
        pool: WriterPool | None,
    ) -> None:
        self._topic = topic
        self._settings = settings
        self._clock = clock
        self._journal = journal
        self._ownership = ownership
        self._own_pool = pool is None
        self._pool = pool or WriterPool(1, clock)
        self._files = threading.Lock()
        self.lock = threading.RLock()
        self.queue = Queue(journal.next_offset)
        self._in_flight = Queue(journal.next_offset)
        self.queued_bytes = 0
        """Bytes in flight and in closed batches of the queue, without the growing tail."""
        self.queued_max = settings.queue_max_bytes
        self.notice_bytes = 0
        """An append that makes the tail this long must call `after_append`."""
        self._batch_bytes = _batch_bytes(settings)
        self.cache = FrameCache(settings.cache_capacity, settings.cache_max_bytes)
        self.synced = journal.next_offset
        self._waiters: dict[Visibility, Waiters] = {"synced": Waiters(), "buffered": Waiters()}
        self._sync_waiters = self._waiters["synced"]
        self._buffered_waiters = self._waiters["buffered"]
        self._gather = _Gather()
        self._room_waiters: list[Waiter] = []
        self._exclusive: object | None = None
        """The batch that is being appended in parts; other appends wait meanwhile."""
        self._scheduled = False
        self._timer_set = False
        self._rotation_armed = False
        self._closed = self._released = self._forked = False
        self._error: BaseException | None = None
        disown_after_fork(self)
        with self.lock:
            self._arm_rotation()

    # -- interrupts -----------------------------------------------------------------------------

    def require_outside(self) -> None:
        """Raises UsageError if the calling thread is in the middle of a call that has the lock."""
        if held(self.lock):
            raise inside(self._topic)

    def mend(self) -> None:
        """Repairs what a call that raised may have left behind, wherever it was left.

        The calling thread must not be inside another call. The state that matters, the queue and
        the waiters, changes in steps that cannot be interrupted; the rest follows from it.
        """
        give_up(self.lock)
        with self.lock:
            self._mend()

    def _mend(self) -> None:
        self.queued_bytes = self._in_flight.total_bytes + self.queue.closed_bytes
        self.queued_max = self._queue_limit()
        self.notice_bytes = 0
        if self._error is not None or self._released:
            self._end()
            return
        self._sync_waiters.wake_reached(self.synced)
        self._buffered_waiters.wake_reached(self.queue.next_offset)
        self._gather.counted(self._sync_waiters.producers)
        self._wake_room_waiters()
        if self.queue.next_offset > self.synced:
            self.after_append()

    def _queue_limit(self) -> int:
        refuse = self._closed or self._error is not None or self._exclusive is not None
        return _REFUSE if refuse else self._settings.queue_max_bytes

    # -- state ----------------------------------------------------------------------------------

    @mended
    def watermarks(self) -> Watermarks:
        with self.lock:
            return Watermarks(self.queue.next_offset, self.synced)

    def watermark(self, visibility: Visibility) -> int:
        """The next offset to become visible. Call with `lock` held."""
        return self.synced if visibility == "synced" else self.queue.next_offset

    @property
    def stopped(self) -> bool:
        """Whether an error ended this log; opening it again recovers it."""
        return self._error is not None

    @property
    def ended(self) -> bool:
        """Whether the log takes no more appends: it was closed, or an error ended it."""
        return self._error is not None or self._closed

    @property
    def deletion(self) -> TopicDeleted | None:
        """The error for readers, if the log ended because its topic was deleted."""
        return self._error if isinstance(self._error, TopicDeleted) else None

    @property
    def released(self) -> bool:
        """Whether `close` has finished: nothing is written from then on."""
        return self._released

    def _require_open(self) -> None:
        if self._error is not None:
            raise _stopped(self._topic, self._error, self.synced) from self._error
        if self._forked:
            raise LogClosed(
                f"{self._topic}: the log was opened before this process was forked and belongs to "
                "its parent; open stores after forking"
            )
        if self._closed:
            raise LogClosed(f"{self._topic}: the log is closed; open it again")

    # -- appending (with `lock` held, except for batches) ---------------------------------------

    def wait_for_room(self) -> None:
        """Blocks until the queue has room for an append; raises if the log has ended."""
        while not self._has_room():
            self._wait_in_line()

    def room_waiter(self) -> TaskWaiter | None:
        """Returns None if the queue has room, otherwise a waiter to await before asking again."""
        if self._has_room():
            return None
        waiter = TaskWaiter()
        self._room_waiters.append(waiter)
        return waiter

    def after_append(self) -> None:
        """Starts a commit, or sets a timer for it; wakes readers of unsynced messages."""
        if self.queue.tail_bytes >= self._batch_bytes:
            self._close_tail()
        if self._commit_due():
            self._schedule()
        else:
            self._set_timer()
        if len(self._buffered_waiters):
            self._buffered_waiters.wake_reached(self.queue.next_offset)
        # While anyone waits, every append calls this; otherwise only the one that fills a batch.
        idle = not len(self._buffered_waiters) and not len(self._sync_waiters)
        self.notice_bytes = self._batch_bytes if idle else 0

    def _set_timer(self) -> None:
        if not self._timer_set:
            self._call_in(self._settings.fsync_interval_ms / 1000, self._sync_interval_passed)
            self._timer_set = True

    def join(self, target: int) -> ThreadWaiter:
        """Adds the calling producer to the next commit; pass the result to `await_commit`."""
        waiter = ThreadWaiter(producer=True)
        self._join(target, waiter)
        return waiter

    def join_task(self, target: int) -> TaskWaiter:
        """`join` for asyncio; pass the result to `await_task`.

        The commit begins after the callbacks that are ready now, so that other producers join it.
        """
        waiter = TaskWaiter(producer=True)
        self._join(target, waiter)
        return waiter

    def _join(self, target: int, waiter: Waiter) -> None:
        self._sync_waiters.add(target, waiter)
        self.notice_bytes = 0
        if self.queue.tail_bytes >= self._batch_bytes:
            self._close_tail()
        if isinstance(waiter, TaskWaiter) and not self._scheduled:
            self._set_timer()  # if the loop ends before that
            waiter.call_soon(self._commit_joined)
        else:
            self._schedule()
        self._gather.arrived()
        if len(self._buffered_waiters):
            self._buffered_waiters.wake_reached(self.queue.next_offset)

    @mended
    def _commit_joined(self) -> None:
        with self.lock:
            if self._commit_due():
                self._schedule()

    def append_batch(self, count: int, encode: Encode) -> range:
        """Appends `count` messages with consecutive offsets and returns them as a range.

        Other appends wait meanwhile. A batch larger than the queue is added in parts, as the writer
        makes room. If this raises, nothing was appended, unless the batch had to wait for room:
        then the messages before the failed one were appended.
        """
        self.require_outside()
        batch = object()
        try:
            self.lock.acquire()
            self.wait_for_room()
            self._exclusive, self.queued_max = batch, _REFUSE
            offsets = self._enqueue(count, encode, patient=True)
            self._end_exclusive(batch)
            self.lock.release()
        except BaseException:
            give_up(self.lock)
            with self.lock:
                self._end_exclusive(batch)
            self.mend()
            raise
        return offsets

    def _end_exclusive(self, batch: object) -> None:
        if self._exclusive is batch:
            self._exclusive = None
        self.queued_max = self._queue_limit()
        self._wake_room_waiters()

    async def append_batch_async(self, count: int, encode: Encode) -> range:
        """`append_batch` for asyncio; a batch larger than the queue is appended on a thread."""
        try:
            while isinstance(offsets := self._enqueue_or_wait(count, encode), TaskWaiter):
                await offsets.future
        except _NoRoomError:
            return await asyncio.to_thread(self.append_batch, count, encode)
        return offsets

    @mended
    def _enqueue_or_wait(self, count: int, encode: Encode) -> range | TaskWaiter:
        with self.lock:
            return self.room_waiter() or self._enqueue(count, encode, patient=False)

    def _enqueue(self, count: int, encode: Encode, *, patient: bool) -> range:
        self._close_tail()
        before, before_bytes, waited = self.queue, self.queued_bytes, False
        first, index = before.next_offset, 0
        queue_max = self._settings.queue_max_bytes
        rotate_max = self._settings.rotate_max_bytes or ENCODE_BYTES_MAX
        bytes_max = min(ENCODE_BYTES_MAX, rotate_max, queue_max)
        try:
            while index < count:
                while self.queued_bytes >= queue_max:
                    if not patient:
                        raise _NoRoomError  # noqa: TRY301  # undone below, as any error is
                    waited = True
                    self._schedule()
                    self._wait_in_line()
                    self._require_open()
                data, after = encode(first + index, index, bytes_max)
                self.queue = self.queue.with_batch(data, after - index)
                self.queued_bytes += len(data)
                index = after
                self.after_append()
        except BaseException:
            if not waited:
                self.queue, self.queued_bytes = before, before_bytes
            raise
        return range(first, first + index)

    def _has_room(self) -> bool:
        """Whether the queue has room; if not, starts a commit to make some."""
        self._require_open()
        if self._exclusive is None and self.queued_bytes < self._settings.queue_max_bytes:
            return True
        self._schedule()
        return False

    def _wait_in_line(self) -> None:
        """Releases the lock, waits until there may be room, and takes the lock again.

        If it raises, the lock may be free or taken: the caller must end with `mend`.
        """
        self._room_waiters.append(waiter := ThreadWaiter())
        self.lock.release()
        waiter.wait()
        self.lock.acquire()

    def _wake_room_waiters(self) -> None:
        for waiter in self._room_waiters:
            waiter.wake()
        self._room_waiters.clear()

    def _close_tail(self) -> None:
        """Turns the growing tail into a closed batch, and counts its bytes."""
        tail_bytes = self.queue.tail_bytes
        self.queue = self.queue.closed()
        self.queued_bytes += tail_bytes - self.queue.tail_bytes

    # -- reading (with `lock` held) -------------------------------------------------------------

    def batches_from(self, offset: int) -> list[FrameBatch]:
        """The batches in memory from `offset` on; empty if `offset` must be read from a file."""
        cached = self.cache.since(offset)
        if cached is not None or offset < self.synced:
            return cached or []
        self._close_tail()
        if self._commit_due():
            self._schedule()
        self._in_flight = self._in_flight.closed()
        queued = batches_since(self.queue.batches, offset)
        if queued and queued[0].first_offset <= offset:
            return queued
        return [*batches_since(self._in_flight.batches, offset), *queued]

    # -- the writer -----------------------------------------------------------------------------

    def _commit_due(self) -> bool:
        return (
            self.queued_bytes >= self._settings.fsync_max_batch_bytes
            or self._sync_waiters.nearest <= self.queue.next_offset
            or len(self.queue.batches) >= QUEUE_BATCHES_MAX
        )

    def _schedule(self) -> None:
        if not self._scheduled and self._error is None:
            # In this order, an interrupt in between makes it run twice, which is harmless.
            self._pool.submit(self._run)
            self._scheduled = True

    def _call_in(self, seconds: float, method: Callable[[], bool | None]) -> None:
        """Runs a method of this object on the pool later, unless the object is gone by then."""
        reference = weakref.WeakMethod(method)

        def call() -> bool | None:
            alive = reference()
            return alive() if alive is not None else None

        self._pool.call_at(self._clock.monotonic() + seconds, call)

    def _sync_interval_passed(self) -> None:
        with self.lock:
            self._timer_set = False
            self.notice_bytes = 0
            if self.queue.next_offset > self.synced:
                self._schedule()

    def _run(self) -> bool:
        """Does one group commit, on a pool thread; returns True if the next one is due already."""
        with self.lock:
            gate = self._gather.begin()
        if gate is not None:
            self._gather.hold(gate)
        with self._files:
            return self._commit()

    def _commit(self) -> bool:
        with self.lock:
            self._gather.end()
            if self._error is not None:
                return False
            self._in_flight, self.queue = self.queue, Queue(self.queue.next_offset)
            self.queued_bytes += self._in_flight.tail_bytes
        started = self._clock.monotonic()
        try:
            batches = merged(self._in_flight.closed().batches, self._batch_bytes)
            if batches:
                self._ownership.admit(batches[-1].end_offset)
                self._journal.commit(batches)
                self._ownership.confirm()
                # A reader in another process must not see what a fenced owner never acknowledges.
                self._journal.publish()
            return self._committed(batches, self._clock.monotonic() - started)
        except BaseException as error:
            self._stop(error)
            if not isinstance(error, Exception):
                raise
            return False

    def _committed(self, batches: list[FrameBatch], seconds: float) -> bool:
        with self.lock:
            self._in_flight = Queue(self.queue.tail_first)
            if batches:
                self.synced = batches[-1].end_offset
                self.cache.extend(batches)
            self.queued_bytes = self.queue.closed_bytes
            released = self._sync_waiters.wake_reached(self.synced)
            stay = self._gather.committed(released, seconds if batches else None)
            pending = self.queue.next_offset > self.synced
            self._scheduled = stay or (pending and self._commit_due())
            if not self._scheduled:
                self.notice_bytes = 0
                if pending:
                    self.after_append()
            self._arm_rotation()
            self._wake_room_waiters()
            return self._scheduled

    # -- rotation and removal -------------------------------------------------------------------

    @mended
    def configure_rotation(self, bytes_max: int | None, seconds_max: float | None) -> None:
        """Rotates by these limits from now on: at the next write, or when the segment is old."""
        with self.lock:
            self._settings = replace(
                self._settings, rotate_max_bytes=bytes_max, rotate_max_seconds=seconds_max
            )
            self._batch_bytes = _batch_bytes(self._settings)
            self.notice_bytes = 0
            self._journal.configure(self._settings)
            if not self._closed:
                self._rotation_armed = False  # the timer that is set may be too late
                self._arm_rotation()

    def rotate(self) -> None:
        """Seals the active segment; the next commit begins a new one. Raises if the log ended."""
        self.require_outside()
        run_aside(self._rotate)

    def _rotate(self) -> None:
        with self._files:
            with self.lock:
                self._require_open()
            self._rotate_or_stop()
        with self.lock:
            self._require_open()

    def remove_segments(
        self, choose: Callable[[Sequence[Segment]], list[Segment]]
    ) -> list[Segment]:
        """Removes the segments that `choose` picks, which must be the oldest, and returns them.

        `choose` is called with `lock` held.
        """
        self.require_outside()
        return run_aside(lambda: self._remove_segments(choose))

    def _remove_segments(
        self, choose: Callable[[Sequence[Segment]], list[Segment]]
    ) -> list[Segment]:
        with self._files:
            with self.lock:
                self._require_open()
                chosen = choose([segment for segment in self._journal.segments if segment.count])
                if not chosen:
                    return []
                self._journal.forget(chosen, chosen[-1].end_offset)
            try:
                self._journal.remove(chosen)
            except BaseException as error:
                self._stop(error)
                raise
        return chosen

    def _rotate_or_stop(self) -> None:
        """Rotates with `_files` held; a disk error stops the log."""
        try:
            self._journal.rotate()
        except BaseException as error:
            self._stop(error)
            if not isinstance(error, Exception):
                raise

    def _arm_rotation(self) -> None:
        """Sets the rotation timer. One is enough: if it fires early, it is set again."""
        if self._rotation_armed:
            return
        due = self._journal.rotation_due()
        if due is not None:
            self._call_in(max(due - self._clock.monotonic(), 0), self._rotate_if_due)
            self._rotation_armed = True

    def _rotate_if_due(self) -> None:
        with self._files:
            due = self._journal.rotation_due()
            with self.lock:
                self._rotation_armed = False
                if self._closed or self._error is not None or due is None:
                    return
                if self._clock.monotonic() < due:
                    self._arm_rotation()
                    return
            self._rotate_or_stop()

    # -- waiting --------------------------------------------------------------------------------

    @mended
    def enlist(self, target: int, waiter: Waiter, visibility: Visibility) -> bool:
        """Wakes `waiter` once the watermark reaches `target`; returns False if it already has.

        Raises if the log has ended, so that the target will never be reached.
        """
        with self.lock:
            if self.watermark(visibility) >= target:
                return False
            self._require_open()
            self._waiters[visibility].add(target, waiter)
            self.notice_bytes = 0
            if visibility == "synced" and target <= self.queue.next_offset:
                self._schedule()
            if waiter.producer:
                self._gather.arrived()
            return True

    @mended
    def delist(self, waiter: Waiter, visibility: Visibility) -> bool:
        """Removes a waiter that gave up; returns False if it was woken already."""
        with self.lock:
            there = self._waiters[visibility].discard(waiter)
            if there and waiter.producer:
                self._gather.left(1)
            return there

    @mended
    def await_synced(self, target: int, timeout: float | None = None) -> None:
        """Blocks until every offset below `target` is synced.

        Raises WaitTimeout after `timeout` seconds, and LogStopped, TopicFenced or LogClosed if the
        log ends first. After any of them the messages may or may not be stored.
        """
        with self.lock:
            if self.synced >= target:
                return
            self._require_open()
            waiter = self.join(target)
        self.await_commit(waiter, target, timeout)

    def await_commit(self, waiter: ThreadWaiter, target: int, timeout: float | None = None) -> None:
        """Blocks until the commit that `join` returned `waiter` for is done.

        Raises as `await_synced` does.
        """
        try:
            woken = waiter.wait(timeout)
        except BaseException:
            self.delist(waiter, "synced")
            raise
        if not woken and self.delist(waiter, "synced"):
            raise WaitTimeout(
                f"{self._topic}: offset {target - 1} was not synced within {timeout} s; "
                "it may still be: wait again"
            )
        if self.synced < target:
            self._require_reached(target, "synced")

    async def await_watermark(
        self, target: int, visibility: Visibility, *, producer: bool = False
    ) -> None:
        """Waits in asyncio until the watermark reaches `target`; may be cancelled at any time."""
        waiter = TaskWaiter(producer=producer)
        if self.enlist(target, waiter, visibility):
            await self.await_task(waiter, target, visibility)

    async def await_task(self, waiter: TaskWaiter, target: int, visibility: Visibility) -> None:
        """Waits for a waiter that was enlisted; may be cancelled at any time."""
        try:
            await waiter.future
        except GeneratorExit:
            # The coroutine is being garbage-collected, perhaps on a thread that holds the lock:
            # take no lock here.
            raise
        except BaseException:
            self.delist(waiter, visibility)
            raise
        if visibility != "synced" or self.synced < target:
            self._require_reached(target, visibility)

    @mended
    def _require_reached(self, target: int, visibility: Visibility) -> None:
        """Called after waking: raises the error of the log if the watermark was not reached."""
        with self.lock:
            if self.watermark(visibility) < target:
                self._require_open()

    # -- the end --------------------------------------------------------------------------------

    @mended
    def close(self) -> None:
        """Syncs the queue, writes a checkpoint, and releases the files. Idempotent.

        Raises LogStopped or TopicFenced if messages in the queue could not be synced.
        """
        with self.lock:
            self._closed = True
            self.queued_max = _REFUSE
            self._wake_room_waiters()
        if not self._forked:
            run_aside(self._close)
        with self.lock:
            if self.queue.next_offset > self.synced and not self._forked:
                self._require_open()

    def _close(self) -> None:
        try:
            with self._files:
                self._release()
        finally:
            if self._own_pool:
                self._pool.close()

    def fence(self, error: TopicFenced) -> None:
        """Stops the log because another process owns the topic now."""
        self.require_outside()
        run_aside(lambda: self._fence(error))

    def _fence(self, error: TopicFenced) -> None:
        with self._files:
            if self._error is None and not self._closed:
                self._stop(error)

    def disown(self) -> None:
        """Closes the log in a forked child without writing: the parent writes what it queued."""
        self._files = threading.Lock()
        self.lock = threading.RLock()
        self._closed = self._released = self._forked = True
        self.queued_max = _REFUSE
        self._journal.close(clean=False)  # a child that outlives its parent must not keep the lock

    def _release(self) -> None:
        """Takes effect once; a later call finishes what an interrupted one began."""
        if self._released:
            return
        if self._error is None:
            self._commit()
        with self.lock:
            self._end()
        self._released = True
        self._journal.close(clean=self._error is None)

    def _stop(self, error: BaseException) -> None:
        """Ends the log after an error: nothing more is written, and every waiter gets the error."""
        level = logging.INFO if isinstance(error, TopicDeleted) else logging.ERROR
        event(_log, level, "log stopped", topic=self._topic, at=self.synced, error=error)
        with self.lock:
            self._error = error
            self._end()
        try:
            self._journal.mark_failed(error)
        except OSError as second:
            event(_log, logging.ERROR, "failed sync not recorded", topic=self._topic, error=second)

    def _end(self) -> None:
        """Refuses appends from now on and wakes every waiter. Call with `lock` held."""
        self.queued_max = _REFUSE
        for waiters in self._waiters.values():
            waiters.wake_all()
        self._gather.left(self._gather.waiting)
        self._wake_room_waiters()


def inside(topic: str) -> UsageError:
    """The error for a call by a signal handler or finaliser in the middle of another call."""
    return UsageError(
        f"{topic}: a signal handler or a finaliser called the log in the middle of another call on "
        "the same thread; hand the call to another thread"
    )


class _NoRoomError(Exception):
    """The queue has no room for the rest of a batch, and the caller must not block."""


def _stopped(topic: str, error: BaseException, synced: int) -> ForebayError:
    """The exception for users of a log that ended with `error`."""
    if isinstance(error, TopicDeleted):
        return TopicDeleted(str(error))
    unknown = f"messages from offset {synced} on may or may not be stored"
    if isinstance(error, TopicFenced | ServiceError):
        return TopicFenced(f"{topic}: this process may no longer append; {unknown}; {error}")
    if isinstance(error, DiskError):
        return LogStopped(f"{topic}: the log stopped: {error}; {unknown}", synced=synced)
    return LogStopped(
        f"{topic}: the log stopped after a disk error: {error!r}; {unknown}; "
        f"{remedy(error)}, then open the log again",
        synced=synced,
    )


class _Gather:
    """Delays a group commit for producers that are about to join it.

    Producers that wait for each commit all append again when it is done. The first of them would
    start the next commit alone, and the others would wait for the one after: two syncs for work
    that fits into one. So a commit waits, at most as long as a sync takes, until as many producers
    wait as took part in the last one. A lone producer is never delayed. Producers that append at
    times of their own do not come back then: while waiting was in vain, it is only tried again now
    and then.

    The lock of the group commit guards every method except `hold`, which is called without it.
    """

    def __init__(self) -> None:
        self.waiting = 0
        """Producers waiting for a sync now."""
        self._cohort = 0
        self._gate: ThreadWaiter | None = None
        self._sync_seconds = 0.0
        self._worth = 0
        """Rises when waiting was worth it, and falls when it was in vain; below 0 nobody waits."""
        self._passed = 0
        """Commits that did not wait since the last one that did."""

    def arrived(self) -> None:
        """Counts a producer that begins to wait."""
        self.counted(self.waiting + 1)

    def counted(self, producers: int) -> None:
        """Sets the number of producers that wait."""
        self.waiting = producers
        if self._gate is not None and producers >= self._cohort:
            self._gate.wake()
            self._gate = None

    def left(self, producers: int) -> None:
        """Counts producers that no longer wait: a commit woke them, or they gave up."""
        # A producer that `mend` has counted out may leave after that.
        self.waiting = max(self.waiting - producers, 0)

    def committed(self, producers: int, seconds: float | None) -> bool:
        """Records a commit that woke `producers` and took `seconds`, None if it wrote nothing.

        Returns True if the writer should stay and wait for these producers to append again.
        """
        self.left(producers)
        self._cohort = producers + self.waiting
        if seconds is not None:
            self._sync_seconds += (seconds - self._sync_seconds) / 8
        return producers > 1 and self._worth >= 0

    def begin(self) -> ThreadWaiter | None:
        """Returns a gate to `hold` before the commit, or None if no producer is missing."""
        if self._cohort > 1 and self.waiting < self._cohort:
            self._passed += 1
            if self._worth >= 0 or self._passed >= GATHER_PASSED_MAX:
                self._passed = 0
                self._gate = ThreadWaiter()
        return self._gate

    def hold(self, gate: ThreadWaiter) -> None:
        """Waits for the missing producers, at most as long as a sync takes."""
        before = self.waiting
        full = gate.wait(min(self._sync_seconds, GATHER_SECONDS_MAX))
        missing, came = self._cohort - before, self.waiting - before
        change = 1 if full or 2 * came >= missing else -2
        self._worth = min(max(self._worth + change, -2), 8)

    def end(self) -> None:
        self._gate = None
