"""Threads that all logs share for writing and syncing, with timers.

A log is submitted when it has something to do, and runs on one thread at a time because it is
submitted again only by itself. A thousand idle logs cost a thousand objects and no thread.
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
"""Returns True to be run again, after others that are ready."""


class WriterPool:
    """Threads start as they are needed, up to `threads`, and end with `close`."""

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
        """Runs `job` on one of the threads, soon. It must not raise."""
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
        """Looks at the timers again: for clocks that a test moves."""
        with self._changed:
            self._changed.notify_all()

    def close(self, timeout: float | None = None) -> None:
        """Ends the threads once what was submitted has run; timers are forgotten.

        After `timeout` seconds those that still run are left to end by themselves.
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
        """Sees to it that a thread takes what is ready, or looks at the timers."""
        if self._idle:
            self._changed.notify()
        # A notified thread counts as idle until it wakes: one for each job is enough.
        wanted = max(len(self._ready), 1)
        if self._idle < wanted and len(self._threads) < self._threads_max and not self._closed:
            thread = threading.Thread(
                target=self._work, name=f"forebay-{self._name}-{len(self._threads)}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # no more threads to be had: those that exist will do
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
                _log.exception("a writer's job failed")

    def _alone(self, job: Job) -> bool:
        """Whether nothing else is ready; if something is, `job` goes behind it."""
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
                        self._provide_thread()  # which looks at the timers meanwhile
                    return job
                if self._closed:
                    return None
                self._idle += 1
                try:
                    self._changed.wait(pause)
                finally:
                    self._idle -= 1

    def _due(self) -> float | None:
        """Moves expired timers to the ready ones; returns the seconds to the next, if any."""
        now = self._clock.monotonic()
        while self._timers and self._timers[0][0] <= now:
            self._ready.append(heapq.heappop(self._timers)[2])
        if len(self._ready) > 1:
            self._changed.notify(len(self._ready) - 1)
        if not self._timers:
            return None
        return min(max(self._timers[0][0] - now, 0.0005), INTERVAL_SECONDS_MAX)
