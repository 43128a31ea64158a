"""`Sweeper`: sweeps a whole store now and then, as background work of the processes that use it.

Every process that has topics of the store open may do it. A row in the catalog says when the last
sweep began: whoever finds it older than the interval replaces it by compare-and-set, and sweeps.
Two processes that sweep at the same time, because their clocks differ, do no harm, as `sweep`
changes nothing without a compare-and-set of its own.

A sweep runs on a thread of its own, so that it takes no thread from uploads, and ends at its next
request when the store is closed. While the object store or the catalog is away, a sweep is given
up with one log line, and the next one begins after the interval.

Beware: the first sweep is not at the start of a process, but some minutes later, so that commands
that run for seconds do not list the store.
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from forebay.catalog.catalog import Catalog
from forebay.catalog.kv import ABSENT, Compare, Entry, Put
from forebay.clock import Clock
from forebay.errors import ForebayError, LogClosed
from forebay.limits import CLOSE_SECONDS_MAX
from forebay.logs import event
from forebay.metrics import SECONDS, Counter, Histogram
from forebay.objects.store import CloudStore
from forebay.settings import SweeperSettings
from forebay.upload.sweep import STAGED_HOURS, Action, SweepReport, sweep, sweep_staging
from forebay.wal.pool import WriterPool

SWEEPS: Final = Counter(
    "forebay_sweeps_total", "Sweeps of the background work, by outcome.", ["outcome"]
)
SWEEP_SECONDS: Final = Histogram(
    "forebay_sweep_duration_seconds", "Duration of sweeps of the background work.", SECONDS
)
FIRST_SECONDS: Final = 300.0
"""The longest delay of the first look at the catalog, unless the interval is shorter."""

_log: Final = logging.getLogger("forebay.upload")
_SPREAD: Final = 0.1
"""The part of the interval by which processes that wait for the same turn are spread."""


@dataclass(frozen=True, slots=True)
class Swept:
    """What one sweep of the background work did."""

    report: SweepReport
    staged: int
    """Abandoned files of staged rows that were removed."""


class Sweeper:
    """The sweeps of one process. Thread-safe."""

    def __init__(
        self,
        catalog: Catalog,
        store: CloudStore,
        settings: SweeperSettings,
        pool: WriterPool,
        clock: Clock,
        *,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        """`pool` is only used for its timers. `before` is called before it looks at the catalog."""
        self._before = before
        self._catalog = catalog
        self._store = store
        self._settings = settings
        self._pool = pool
        self._clock = clock
        self._seconds = settings.interval_minutes * 60
        self._started = False
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Plans the first sweep, unless that was done before."""
        if self._started or not self._settings.enabled:
            return
        self._started = True
        self._plan(min(self._seconds, FIRST_SECONDS) * random.uniform(0.5, 1))  # noqa: S311

    def stop(self) -> None:
        """Lets no new sweep begin, and ends a running one at its next step. Does not wait."""
        self._stopping.set()

    def close(self, seconds: float = CLOSE_SECONDS_MAX) -> None:
        """Stops, and waits for a running sweep, at most `seconds`."""
        self.stop()
        thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def run_if_due(self) -> Swept | None:
        """Sweeps the store if the last sweep of any process began longer ago than the interval.

        Raises LogClosed after `stop`, and ServiceError if the store or the catalog is away.
        """
        self._require_going()
        if not self._take_turn():
            return None
        started = time.monotonic()
        minutes = self._settings.grace_minutes
        report = sweep(
            self._catalog,
            self._store,
            grace_minutes=minutes,
            dry_run=False,
            clock=self._clock,
            check=self._require_going,
            through_outages=False,
        )
        staged = sweep_staging(
            self._store,
            age_hours=max(STAGED_HOURS, minutes / 60),
            clock=self._clock,
            check=self._require_going,
        )
        seconds = time.monotonic() - started
        SWEEPS.add(1, "done")
        SWEEP_SECONDS.observe(seconds)
        event(
            _log,
            logging.INFO,
            "sweep done",
            topics=report.topics,
            removed=report.counts[Action.REMOVED],
            bytes=report.bytes[Action.REMOVED],
            staged=staged,
            errors=report.errors,
            seconds=seconds,
        )
        return Swept(report, staged)

    # -- when -----------------------------------------------------------------------------------

    def _plan(self, seconds: float) -> None:
        self._pool.call_at(self._clock.monotonic() + seconds, self._begin)

    def _begin(self) -> None:
        """Runs on a thread of the pool, and only starts another one."""
        if not self._stopping.is_set():
            self._thread = threading.Thread(target=self._run, name="forebay-sweeper", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        wait = self._seconds
        try:
            self._before()
            self.run_if_due()
            wait = self._wait_seconds(self._catalog.kv.get(self._catalog.keys.sweep()))
        except LogClosed:
            return
        except Exception as error:  # noqa: BLE001  # reported, and tried again
            if self._stopping.is_set():
                return
            SWEEPS.add(1, "failed")
            expected = isinstance(error, ForebayError)
            event(
                _log,
                logging.WARNING if expected else logging.ERROR,
                "sweep failed: the next one begins after the interval",
                trace=None if expected else error,
                error=error,
            )
        self._plan(wait + self._seconds * _SPREAD * random.random())  # noqa: S311

    def _require_going(self) -> None:
        if self._stopping.is_set():
            raise LogClosed("the store is being closed: the sweep has ended")

    # -- whose turn it is -----------------------------------------------------------------------

    def _take_turn(self) -> bool:
        """Records that a sweep begins now; False if none is due, or another process was first."""
        key = self._catalog.keys.sweep()
        entry = self._catalog.kv.get(key)
        if self._wait_seconds(entry) > 0:
            return False
        value = json.dumps({"began_ms": self._clock.now_ms()}).encode()
        compare = Compare(key, ABSENT if entry is None else entry.revision)
        return self._catalog.kv.commit([compare], [Put(key, value)]) is not None

    def _wait_seconds(self, entry: Entry | None) -> float:
        """The time until the next sweep of the store is due; 0 if it is due."""
        try:
            began_ms = int(json.loads(entry.value)["began_ms"]) if entry is not None else 0
        except (ValueError, KeyError, TypeError):  # not our row: replaced by ours
            began_ms = 0
        passed = (self._clock.now_ms() - began_ms) / 1000
        # A sweep in the future was begun by a clock that was wrong.
        return max(self._seconds - passed, 0) if passed >= 0 else 0
