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
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Final, TypeAlias

from forebay.clock import SYSTEM_CLOCK, Clock
from forebay.limits import INTERVAL_SECONDS_MAX, WRITER_THREADS

_log: Final = logging.getLogger("forebay.wal")
Job: TypeAlias = Callable[[], bool | None]
"""Returns True to be run again, after the other jobs that are ready."""


class WriterPool:
    """Starts threads as they are needed, up to `threads`; `close` ends them. Thread-safe."""

    def __init__(
        self, threads: int = WRITER_THREADS, clock: Clock = SYSTEM_CLOCK, name: str = "writer"
    ) -> None:
        self._threads_max = threads
        self._name = name
        self._clock = clock
        self._changed = threading.Condition(threading.Lock())
        self._ready: deque[Job] = deque()
        self._timers: list[tuple[float, int, Job]] = []
        self._order = count()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    @property
    def thread_count(self) -> int:
        return len(self._threads)

    def submit(self, job: Job) -> None:
        """Runs `job` on one of the threads as soon as one is free. `job` must not raise."""
        with self._changed:
            self._ready.append(job)
            self._provide_thread()

    def call_at(self, when: float, job: Job) -> None:
        """Submits `job` when the clock's monotonic time reaches `when`."""
        with self._changed:
            heapq.heappush(self._timers, (when, next(self._order), job))
            if self._timers[0][0] == when:
                self._provide_thread()

    def recheck(self) -> None:
        """Checks the timers again, for tests that move the clock."""
        with self._changed:
            self._changed.notify_all()

    def close(self, timeout: float | None = None) -> None:
        """Runs the jobs already submitted, drops the timers, and joins the threads.

        Threads still running after `timeout` seconds are left to finish on their own.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            self._closed = True
            self._timers.clear()
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(None if deadline is None else max(deadline - time.monotonic(), 0))

    def _provide_thread(self) -> None:
        """Wakes or starts a thread for the jobs that are ready, or for the timers."""
        if self._idle:
            self._changed.notify()
        # A notified thread counts as idle until it wakes, and its job as ready until then, so one
        # idle thread for each ready job is enough.
        wanted = max(len(self._ready), 1)
        if self._idle < wanted and len(self._threads) < self._threads_max and not self._closed:
            thread = threading.Thread(
                target=self._work, name=f"forebay-{self._name}-{len(self._threads)}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # the system has no more threads: the running ones suffice
                if not self._threads:
                    raise
                return
            self._threads.append(thread)

    def _work(self) -> None:
        while True:
            job = self._next_job()
            if job is None:
                return
            try:
                while job():
                    if not self._alone(job):
                        break
            except Exception:  # noqa: BLE001  # the thread serves other logs too
                _log.exception("a job of a writer thread failed")

    def _alone(self, job: Job) -> bool:
        """Returns True if no other job is ready; otherwise queues `job` behind the others."""
        with self._changed:
            self._due()
            if self._ready:
                self._ready.append(job)
            return not self._ready

    def _next_job(self) -> Job | None:
        with self._changed:
            while True:
                pause = self._due()
                if self._ready:
                    job = self._ready.popleft()
                    if self._timers:
                        self._provide_thread()  # to watch the timers while this one works
                    return job
                if self._closed:
                    return None
                self._idle += 1
                try:
                    self._changed.wait(pause)
                finally:
                    self._idle -= 1

    def _due(self) -> float | None:
        """Makes jobs of expired timers ready; returns the seconds until the next timer, if any."""
        now = self._clock.monotonic()
        while self._timers and self._timers[0][0] <= now:
            self._ready.append(heapq.heappop(self._timers)[2])
        if len(self._ready) > 1:
            self._changed.notify(len(self._ready) - 1)
        if not self._timers:
            return None
        return min(max(self._timers[0][0] - now, 0.0005), INTERVAL_SECONDS_MAX)
