"""The work that goes on behind a store: upload and retention of every topic, on few threads.

Each topic has two timers, not threads. A run that failed is logged, counted, and tried again at
the next turn, whatever failed: a bug must not end a topic's uploads in silence. A topic that was
closed or fenced stops for good.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Final, Protocol

from forebay.clock import Clock
from forebay.errors import ForebayError, LogClosed, TopicFenced
from forebay.logs import event
from forebay.metrics import Counter
from forebay.wal.pool import WriterPool

_log: Final = logging.getLogger("forebay.topic")
FAILURES: Final = Counter(
    "forebay_background_failures_total",
    "Runs of background work that ended with an error, by kind.",
    ["kind"],
)


class Tended(Protocol):
    """What has work to be done behind it."""

    @property
    def name(self) -> str: ...

    def fence(self, error: TopicFenced) -> None: ...


class Background:
    """Runs chores on a pool, each again so many seconds after it ended."""

    def __init__(self, pool: WriterPool, clock: Clock) -> None:
        self._pool = pool
        self._clock = clock

    def every(
        self,
        seconds: float,
        owner: Tended,
        chore: Callable[[Tended], None],
        *,
        first: float | None = None,
    ) -> None:
        """Runs `chore(owner)` again and again, for as long as somebody else holds the owner.

        It ends when the chore says LogClosed or TopicFenced.
        """
        reference = weakref.ref(owner)
        name = owner.name

        def run() -> None:
            alive = reference()
            if alive is None:
                return
            try:
                chore(alive)
            except LogClosed:
                return
            except TopicFenced as error:
                alive.fence(error)
                return
            except Exception as error:  # noqa: BLE001  # told, and tried again: it must not end
                _report(name, error)
            self._pool.call_at(self._clock.monotonic() + seconds, run)

        delay = seconds if first is None else first
        self._pool.call_at(self._clock.monotonic() + delay, run)


def _report(topic: str, error: Exception) -> None:
    """What nobody raises on purpose is a bug, and told with its traceback."""
    FAILURES.add(1, type(error).__name__)
    expected = isinstance(error, ForebayError | OSError)
    event(
        _log,
        logging.WARNING if isinstance(error, ForebayError) else logging.ERROR,
        "background work failed",
        trace=None if expected else error,
        topic=topic,
        error=error if expected else repr(error),
    )
