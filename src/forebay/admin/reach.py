"""`Reach`: whether the object store answers, asked while somebody looks.

The client of a store tries again for minutes before it gives up, and uploads may run in another
process: neither tells in time that the store is away. So a thread asks for an object that is not
there. The answer that it is missing is a good one; an answer that does not come within seconds is
told while it is waited for.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from forebay.errors import ForebayError, ObjectMissing, ServiceUnavailable
from forebay.topic.store import Store

PROBE_KEY: Final = "forebay-is-the-store-there"
EVERY_SECONDS: Final = 3.0
PATIENCE_SECONDS: Final = 3.0
WATCHED_SECONDS: Final = 30.0
"""Nobody asked for so long: nobody is told, and the store is left alone."""


@dataclass(frozen=True, slots=True)
class Reached:
    state: Literal["unknown", "answers", "away"]
    since: float | None = None
    """When it got into this state, in seconds since 1970-01-01 UTC."""
    why: str | None = None


class Reach:
    """`ask` is for one thread, which it may hold up for minutes; the rest is for any."""

    def __init__(self, ask: Callable[[], None]) -> None:
        """`ask` raises a ForebayError if the store does not answer as it should."""
        self._ask = ask
        self._lock = threading.Lock()
        self._known = Reached("unknown")
        self._asked: float | None = None
        """When the question that is under way was asked, by the monotonic clock."""
        self._watched = -WATCHED_SECONDS

    def now(self) -> Reached:
        """What is known; being asked keeps the questions coming."""
        with self._lock:
            now = time.monotonic()
            self._watched = now
            if self._asked is not None and now - self._asked > PATIENCE_SECONDS:
                waited = now - self._asked
                self._learn(Reached("away", time.time() - waited, "it does not answer"))
            return self._known

    def watched(self) -> bool:
        return time.monotonic() - self._watched < WATCHED_SECONDS

    def ask(self) -> None:
        """One question, and its answer."""
        with self._lock:
            self._asked = time.monotonic()
        found = Reached("answers", time.time())
        try:
            self._ask()
        except ForebayError as error:
            found = Reached("away", time.time(), str(error))
        finally:
            with self._lock:
                self._asked = None
        with self._lock:
            self._learn(found)

    def _learn(self, found: Reached) -> None:
        if found.state != self._known.state:
            self._known = found


def _require_directory(path: Path) -> None:
    """A directory says that every object is missing, whatever is wrong with it."""
    if not path.exists():
        return  # the first upload makes it
    if not path.is_dir():
        raise ServiceUnavailable(f"{path} is not a directory")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ServiceUnavailable(f"{path} cannot be written to: check the permissions")


def asking(store: Store) -> Callable[[], None]:
    """Asks the store's own object store."""

    def ask() -> None:
        with store.view() as view:
            tiers = view.tiers()
            if tiers is None:
                return
            local = tiers.store.local_path(PROBE_KEY)
            if local is not None:
                _require_directory(local.parent)
                return
            with contextlib.suppress(ObjectMissing):
                tiers.store.head(PROBE_KEY)

    return ask
