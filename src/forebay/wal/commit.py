"""Group commit: the queue in front of a log's files, its one writer, and who waits for it.

Whatever is queued is written and synced together: at once while somebody waits for it, else after
`fsync_interval_ms` or `fsync_max_batch_bytes`. The writer runs on threads that all logs share.

Two locks: `_lock` guards queue, cache, watermarks and waiters, and is held for microseconds;
`_files` is held by whoever writes, rotates or removes files, and is taken first.

What a reader of this code gets wrong: after an error of the disk nothing is tried again here. The
log stops, everybody who waits is told, and only opening it anew finds out what the device holds.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Final, Literal, TypeAlias

from forebay.clock import Clock
from forebay.errors import LogClosed, TopicFenced, WaitTimeout
from forebay.forks import disown_after_fork
from forebay.limits import QUEUE_RUNS_MAX, RUN_BYTES_MAX
from forebay.logs import event
from forebay.settings import WalSettings
from forebay.wal.cache import Run, RunCache
from forebay.wal.claim import Claim, stopped
from forebay.wal.gather import Gather
from forebay.wal.journal import AnyJournal
from forebay.wal.pool import WriterPool
from forebay.wal.queue import Queue
from forebay.wal.waiters import TaskWaiter, ThreadWaiter, Waiter, Waiters, wait_released, wake
from forebay.wal.watermarks import Watermarks

_log: Final = logging.getLogger("forebay.wal")

Visibility: TypeAlias = Literal["synced", "buffered"]
REFUSE: Final = -1
"""A queue bound that no queue is under: every append takes the slow way in."""


class GroupCommit:
    def __init__(
        self,
        topic: str,
        settings: WalSettings,
        clock: Clock,
        journal: AnyJournal,
        pool: WriterPool,
        claim: Claim,
    ) -> None:
        self.topic = topic
        self.settings = settings
        self._clock = clock
        self._journal = journal
        self._pool = pool
        self._claim = claim
        self._files = threading.Lock()
        self._lock = threading.Lock()
        self._queue = Queue(journal.next_offset)
        self._flight = Queue(journal.next_offset)
        self._queued_bytes = 0
        """In flight and in closed runs of the queue; the growing tail is not counted."""
        self._run_bytes = min(
            RUN_BYTES_MAX,
            settings.fsync_max_batch_bytes,
            settings.queue_max_bytes,
            settings.rotate_max_bytes or RUN_BYTES_MAX,
        )
        self._queued_max = settings.queue_max_bytes
        self._notice_bytes = 0
        self._cache = RunCache(settings.cache_capacity, settings.cache_max_bytes)
        self._synced = journal.next_offset
        self._waiters: dict[Visibility, Waiters] = {"synced": Waiters(), "buffered": Waiters()}
        self._sync_waiters, self._peekers = self._waiters["synced"], self._waiters["buffered"]
        self._gather = Gather()
        self._scheduled = False
        self._timer_set = False
        self._rotation_armed = False
        self._exclusive = False
        self._room_waiters: list[Waiter] = []
        self._closed = self._released = False
        self._forked = False
        self._error: BaseException | None = None
        disown_after_fork(self)
        with self._lock:
            self._arm_rotation()

    def disown(self) -> None:
        """In a forked child: the log belongs to the parent, whose threads are not here.

        Whatever the parent had queued is the parent's to write; here the log is closed.
        """
        self._files = threading.Lock()
        self._lock = threading.Lock()
        self._closed = self._released = self._forked = True
        self._queued_max = REFUSE
        self._journal.close(clean=False)  # lest a child that lives longer keeps the lock

    def current_offset(self) -> int:
        """The offset that the next append will get."""
        return self._queue.next_offset

    def watermarks(self) -> Watermarks:
        with self._lock:
            return Watermarks(self._queue.next_offset, self._synced)

    @property
    def stopped(self) -> bool:
        """Whether an error of the disk ended this log; opening it anew recovers."""
        return self._error is not None

    @property
    def ended(self) -> bool:
        """Whether nothing can be appended any more, for whatever reason."""
        return self._error is not None or self._closed

    # -- the queue (callers hold _lock) ---------------------------------------------------------

    def _require_open(self) -> None:
        if self._error is not None:
            raise stopped(self.topic, self._error, self._synced) from self._error
        if self._forked:
            raise LogClosed(
                f"{self.topic}: the log was opened before this process was forked and belongs to "
                "its parent; open stores after forking"
            )
        if self._closed:
            raise LogClosed(f"{self.topic}: the log is closed")

    def _wait_for_room(self) -> None:
        """Blocks until an append may enter; raises when it never will."""
        while not self._has_room():
            self._step_out()

    def _step_out(self) -> None:
        """Waits for room without the lock (with _lock held, and held again when it ends)."""
        self._room_waiters.append(waiter := ThreadWaiter())
        wait_released(self._lock, waiter)

    def _has_room(self) -> bool:
        """Whether an append may enter; if not, a commit is under way to make room."""
        self._require_open()
        if not self._exclusive and self._queued_bytes < self.settings.queue_max_bytes:
            return True
        self._schedule()
        return False

    def _let_in(self) -> None:
        """Has all who wait for room look again."""
        waiters, self._room_waiters = self._room_waiters, []
        wake(waiters)

    def _close_tail(self) -> None:
        """Makes the growing tail a run like the others, and counts it."""
        tail_bytes = self._queue.tail_bytes
        self._queue = self._queue.closed()
        self._queued_bytes += tail_bytes - self._queue.tail_bytes

    def _notice(self) -> None:
        """After an append: starts a commit if one is due, else sees to it that one will be."""
        if self._queue.tail_bytes >= self._run_bytes:
            self._close_tail()
        if self._commit_due():
            self._schedule()
        elif not self._timer_set:
            self._call_in(self.settings.fsync_interval_ms / 1000, self._tick)
            self._timer_set = True
        peekers = self._peekers
        if len(peekers):
            wake(peekers.reached(self._queue.next_offset))
        # While somebody waits, every append comes here; else only the one that fills a run.
        idle = not len(peekers) and not len(self._sync_waiters)
        self._notice_bytes = self._run_bytes if idle else 0

    def _commit_due(self) -> bool:
        return (
            self._queued_bytes >= self.settings.fsync_max_batch_bytes
            or self._sync_waiters.nearest <= self._queue.next_offset
            or len(self._queue.runs) >= QUEUE_RUNS_MAX
        )

    def _call_in(self, seconds: float, method: Callable[[], bool | None]) -> None:
        """Runs a method of this log on the pool later, if the log still exists by then."""
        reference = weakref.WeakMethod(method)

        def call() -> bool | None:
            alive = reference()
            return alive() if alive is not None else None

        self._pool.call_at(self._clock.monotonic() + seconds, call)

    def _tick(self) -> None:
        with self._lock:
            self._timer_set = False
            self._notice_bytes = 0
            if self._queue.next_offset > self._synced:
                self._schedule()

    # -- the writer -----------------------------------------------------------------------------

    def _schedule(self) -> None:
        if not self._scheduled and self._error is None:
            # In this order: an interrupt in between has it run twice, which does no harm.
            self._pool.submit(self._run)
            self._scheduled = True

    def _run(self) -> bool:
        """One group commit, on a thread of the pool; True if the next one is due already."""
        with self._lock:
            gate = self._gather.begin()
        if gate is not None:
            self._gather.hold(gate)
        with self._files:
            return self._commit()

    def _commit(self) -> bool:
        with self._lock:
            self._gather.end()
            if self._error is not None:
                return False
            self._flight, self._queue = self._queue, Queue(self._queue.next_offset)
            self._queued_bytes += self._flight.tail_bytes
        started = self._clock.monotonic()
        try:
            runs = self._flight.closed().runs
            if runs:
                self._claim.admit(runs[-1].end)
                self._journal.commit(runs)
                self._claim.confirm()
            return self._committed(runs, self._clock.monotonic() - started)
        except BaseException as error:
            self._stop(error)
            if not isinstance(error, Exception):
                raise
            return False

    def _committed(self, runs: list[Run], seconds: float) -> bool:
        with self._lock:
            self._flight = Queue(self._queue.tail_first)
            if runs:
                self._synced = runs[-1].end
                self._cache.extend(runs)
            self._queued_bytes = self._queue.closed_bytes
            woken = self._sync_waiters.reached(self._synced)
            released = wake(woken)
            stay = self._gather.committed(released, seconds if runs else None)
            pending = self._queue.next_offset > self._synced
            self._scheduled = stay or (pending and self._commit_due())
            if not self._scheduled:
                self._notice_bytes = 0
                if pending:
                    self._notice()
            self._arm_rotation()
            self._let_in()
            return self._scheduled

    def _stop(self, error: BaseException) -> None:
        """The disk failed: nothing is written any more, and everybody is told."""
        event(_log, logging.ERROR, "log stopped", topic=self.topic, at=self._synced, error=error)
        with self._lock:
            self._error = error
            self._end()
        try:
            self._journal.mark_failed(error)
        except OSError as second:
            event(_log, logging.ERROR, "its failure is not noted", topic=self.topic, error=second)

    def fence(self, error: TopicFenced) -> None:
        """Ends the log because another process owns the topic now."""
        with self._files:
            if self._error is None and not self._closed:
                self._stop(error)

    def _end(self) -> None:
        """Lets nobody in any more, and wakes all who wait (with _lock held)."""
        self._queued_max = REFUSE
        woken = [waiter for waiters in self._waiters.values() for waiter in waiters.take_all()]
        self._gather.left(self._gather.waiting)
        self._let_in()
        wake(woken)

    # -- rotation by age ------------------------------------------------------------------------

    def _arm_rotation(self) -> None:
        """One timer is enough: when it fires for a segment that is gone, it is set anew."""
        if self._rotation_armed:
            return
        due = self._journal.rotation_due_ms()
        if due is not None:
            self._call_in(max(due - self._clock.now_ms(), 0) / 1000, self._rotate_if_due)
            self._rotation_armed = True

    def _rotate_if_due(self) -> None:
        with self._files:
            due = self._journal.rotation_due_ms()
            with self._lock:
                self._rotation_armed = False
                if self._closed or self._error is not None or due is None:
                    return
                if self._clock.now_ms() < due:
                    self._arm_rotation()
                    return
            self._guarded_rotate()

    def _guarded_rotate(self) -> None:
        """Seals the active segment (with _files held); an error of the disk stops the log."""
        try:
            self._journal.rotate()
        except BaseException as error:
            self._stop(error)
            if not isinstance(error, Exception):
                raise

    # -- waiting --------------------------------------------------------------------------------

    def enlist(self, target: int, waiter: Waiter, visibility: Visibility) -> bool:
        """Has `waiter` woken when the watermark reaches `target`; False if it has already.

        Raises if the log has ended and the target will never be reached.
        """
        with self._lock:
            appended = self._queue.next_offset
            if (self._synced if visibility == "synced" else appended) >= target:
                return False
            self._require_open()
            self._waiters[visibility].add(target, waiter)
            self._notice_bytes = 0
            if visibility == "synced" and target <= appended:
                self._schedule()
            if waiter.producer:
                self._gather.arrived()
            return True

    def delist(self, waiter: Waiter, visibility: Visibility) -> bool:
        """For a waiter that gives up; False if it was woken meanwhile."""
        with self._lock:
            there = self._waiters[visibility].discard(waiter)
            if there and waiter.producer:
                self._gather.left(1)
            return there

    def _settled(self, target: int, visibility: Visibility) -> None:
        """After being woken: returns if the watermark was reached, else says why not."""
        if visibility == "synced" and self._synced >= target:
            return
        with self._lock:
            reached = self._synced if visibility == "synced" else self._queue.next_offset
            if reached < target:
                self._require_open()

    def _join_commit(self, target: int) -> ThreadWaiter:
        """Makes the calling producer part of the next commit (with _lock held)."""
        waiter = ThreadWaiter(producer=True)
        self._sync_waiters.add(target, waiter)
        self._notice_bytes = 0
        if self._queue.tail_bytes >= self._run_bytes:
            self._close_tail()
        self._schedule()
        self._gather.arrived()
        if len(self._peekers):
            wake(self._peekers.reached(self._queue.next_offset))
        return waiter

    def _await_commit(self, waiter: ThreadWaiter, target: int, timeout: float | None) -> None:
        try:
            woken = waiter.wait(timeout)
        except BaseException:
            self.delist(waiter, "synced")
            raise
        if not woken and self.delist(waiter, "synced"):
            raise WaitTimeout(f"{self.topic}: offset {target - 1} not synced within {timeout} s")
        self._settled(target, "synced")

    def await_synced(self, target: int, timeout: float | None = None) -> None:
        """Blocks a producer until the synced watermark reaches `target`."""
        with self._lock:
            if self._synced >= target:
                return
            self._require_open()
            waiter = self._join_commit(target)
        self._await_commit(waiter, target, timeout)

    async def await_watermark(
        self, target: int, visibility: Visibility, *, producer: bool = False
    ) -> None:
        """Waits in asyncio until the watermark reaches `target`; may be cancelled at any point."""
        waiter = TaskWaiter(producer=producer)
        if not self.enlist(target, waiter, visibility):
            return
        try:
            await waiter.future
        except GeneratorExit:
            # Collected, perhaps by a thread that holds the lock: take none here.
            raise
        except BaseException:
            self.delist(waiter, visibility)
            raise
        self._settled(target, visibility)
