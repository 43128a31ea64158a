"""The work that goes on behind a store: upload and retention of every topic, on few threads.

Each topic has two timers, not threads. A failed run is logged by whoever failed, counted, and
tried again at the next turn; a topic that was fenced stops for good.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Final, Protocol

from forebay.clock import Clock
from forebay.errors import ForebayError, LogClosed, TopicFenced
from forebay.logs import event
from forebay.wal.pool import WriterPool

_log: Final = logging.getLogger("forebay.topic")


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
            except ForebayError as error:
                event(_log, logging.WARNING, "background work failed", topic=name, error=error)
            except OSError as error:
                event(_log, logging.ERROR, "background work failed", topic=name, error=error)
            self._pool.call_at(self._clock.monotonic() + seconds, run)

        delay = seconds if first is None else first
        self._pool.call_at(self._clock.monotonic() + delay, run)
