"""What watches a store while its server runs: notices, history, and the object store's answers.

Two threads: one samples every two seconds, one asks the object store while somebody looks at the
page. They begin and end with the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable
from typing import Final

from forebay.admin.history import INTERVAL_SECONDS, History
from forebay.admin.notices import Notices
from forebay.admin.reach import EVERY_SECONDS, Reach, asking
from forebay.admin.topic_states import TopicStates
from forebay.errors import ForebayError, LogClosed
from forebay.logs import event
from forebay.topic.store import Store

_log: Final = logging.getLogger("forebay.admin")
_END_SECONDS: Final = 3.0


class Watch:
    """The watchers of one server. What they know can be asked for before they start."""

    def __init__(self, store: Store) -> None:
        self.states = TopicStates(store)
        self.history = History(store, self.states)
        self.notices = Notices()
        self.reach = Reach(asking(store))
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        logging.getLogger("forebay").addHandler(self.notices)
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._sample, name="forebay-history", daemon=True),
            threading.Thread(target=self._ask, name="forebay-reach", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Waits for the threads, but not for a store that does not answer."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(_END_SECONDS)
        logging.getLogger("forebay").removeHandler(self.notices)

    def _sample(self) -> None:
        self._every(INTERVAL_SECONDS, self.history.sample)

    def _ask(self) -> None:
        self._every(EVERY_SECONDS, lambda: self.reach.ask() if self.reach.watched() else None)

    def _every(self, seconds: float, act: Callable[[], None]) -> None:
        stopping = self._stopping
        while True:
            try:
                act()
            except LogClosed:
                return
            except (ForebayError, OSError) as error:
                event(_log, logging.WARNING, "watching the store failed", error=error)
            if stopping.wait(seconds):
                return


@contextlib.asynccontextmanager
async def watching(watch: Watch) -> AsyncIterator[None]:
    """Around the life of a server."""
    watch.start()
    try:
        yield
    finally:
        await asyncio.to_thread(watch.stop)
