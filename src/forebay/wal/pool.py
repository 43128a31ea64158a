"""Threads, with timers, that all logs share for writing and syncing.

A log submits a job when it has something to write, and submits no second one before the first has
run. One log therefore commits on one thread at a time, and an idle log costs no thread.

Beware: jobs that block delay all other logs once every thread is busy. A job submitted after
`close` may never run.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections.abc import Callable
from itertools import count
from math import inf
from typing import Final, Literal, NamedTuple, TypeAlias

from forebay.clock import SYSTEM_CLOCK, Clock
from forebay.interrupts import WorkerThreads
from forebay.limits import INTERVAL_SECONDS_MAX, WRITER_THREADS
from forebay.logs import event

_log: Final = logging.getLogger("forebay.wal")
Job: TypeAlias = Callable[[], bool | None]
"""Returns True to be run again, after the other jobs that are ready."""


class _Timer(NamedTuple):
    when: float
    job: Job


_LOOK: Final[Literal["look"]] = "look"
"""Makes a thread look at the timers, and end if the pool was closed."""
_Item: TypeAlias = Job | _Timer | Literal["look"]


class WriterPool:
    """Starts threads as they are needed, up to `threads`; `close` ends them. Thread-safe.

    A call may be interrupted anywhere: all it does is to put one item into a queue. The threads do
    the rest, and no signal reaches them.
    """

    def __init__(
        self, threads: int = WRITER_THREADS, clock: Clock = SYSTEM_CLOCK, name: str = "writer"
    ) -> None:
        self._clock = clock
        self._workers: WorkerThreads[_Item] = WorkerThreads(threads, name, self._work)
        self._closed = False
        # The rest belongs to the threads.
        self._lock = threading.Lock()
        self._timers: list[tuple[float, int, Job]] = []
        self._order = count()
        self._alarms: list[float] = []
        """When the idle threads will look at the timers."""

    @property
    def thread_count(self) -> int:
        return self._workers.started

    @property
    def idle_count(self) -> int:
        """Threads that wait for a job."""
        return self._workers.idle

    def submit(self, job: Job) -> None:
        """Runs `job` on one of the threads as soon as one is free. `job` must not raise."""
        self._workers.put(job)

    def call_at(self, when: float, job: Job) -> None:
        """Submits `job` when the clock's monotonic time reaches `when`."""
        self._workers.put(_Timer(when, job))

    def recheck(self) -> None:
        """Checks the timers again, for tests that move the clock."""
        self._workers.put(_LOOK)

    def close(self, timeout: float | None = None) -> None:
        """Runs the jobs already submitted, drops the timers, and joins the threads.

        Threads still running after `timeout` seconds are left to finish on their own. If this is
        interrupted, call it again: it then waits for the rest.
        """
        self._closed = True
        self._workers.close(_LOOK)
        self._workers.join(timeout)

    def _work(self) -> None:
        while (job := self._next_job()) is not None:
            try:
                while job():
                    if not self._alone(job):
                        break
            except Exception as error:  # noqa: BLE001  # the thread serves other logs too
                event(
                    _log, logging.ERROR, "a job of a writer thread failed", trace=error, error=error
                )
            del job  # an idle thread must not keep a log alive

    def _alone(self, job: Job) -> bool:
        """Returns True if no other job is ready; otherwise queues `job` behind the others."""
        self._submit_due()
        if self._workers.empty:
            return True
        self._workers.put(job)
        return False

    def _next_job(self) -> Job | None:
        while True:
            item = self._wait(self._submit_due())
            if isinstance(item, _Timer):
                with self._lock:
                    heapq.heappush(self._timers, (item.when, next(self._order), item.job))
            elif item is not None and not isinstance(item, str):
                self._keep_watch()
                return item
            elif item is None and self._closed:
                return None

    def _submit_due(self) -> float | None:
        """Submits the jobs of expired timers; returns when the next one expires, if any."""
        with self._lock:
            if self._closed:
                self._timers.clear()
            now = self._clock.monotonic()
            while self._timers and self._timers[0][0] <= now:
                self._workers.put(heapq.heappop(self._timers)[2])
            return self._timers[0][0] if self._timers else None

    def _wait(self, alarm: float | None) -> _Item | None:
        """Waits for an item, or until the clock reaches `alarm`; not at all in a closed pool."""
        if self._closed:
            return self._workers.get_nowait()
        if alarm is None:
            return self._workers.get()
        with self._lock:
            self._alarms.append(alarm)
        try:
            pause = alarm - self._clock.monotonic()
            return self._workers.get(min(max(pause, 0.0005), INTERVAL_SECONDS_MAX))
        finally:
            with self._lock:
                self._alarms.remove(alarm)

    def _keep_watch(self) -> None:
        """Lets another thread watch the timers while this one works, if none does."""
        with self._lock:
            watched = not self._timers or min(self._alarms, default=inf) <= self._timers[0][0]
        if watched:
            return
        if self._workers.idle:
            self._workers.put(_LOOK)
        else:
            self._workers.provide(1)
