"""`Room`: how many bytes of requests the server holds at a time; what is over waits its turn.

For one event loop. Who waits is let in in the order of coming, so that a large request is not
passed by small ones for ever; who waits too long is told to come back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import Final

from forebay.errors import ServiceUnavailable
from forebay.metrics import Gauge

PENDING: Final = Gauge("forebay_http_pending_bytes", "Bodies of requests that are under way.")
ROOM_SECONDS: Final = 5.0
"""How long a request may wait."""


class Room:
    def __init__(self, bytes_max: int, wait_seconds: float, limit: str) -> None:
        """`limit` is what the bound is called."""
        self._limit = limit
        self._bytes_max = bytes_max
        self._wait_seconds = wait_seconds
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.used = 0

    async def take(self, size: int) -> None:
        """Returns once there is room; ServiceUnavailable if there is none in time."""
        if not self._waiting and self.used + size <= self._bytes_max:
            self._grant(size)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            async with asyncio.timeout(self._wait_seconds):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self.give(size)  # let in at the very moment of giving up
            else:
                with suppress(ValueError):  # passed over already, by somebody who left
                    self._waiting.remove((size, turn))
                self._let_in()
            if isinstance(error, TimeoutError):
                raise ServiceUnavailable(
                    f"the server holds {self.used} bytes of other requests "
                    f"({self._limit}) and got no room in time: nothing of this one was taken, "
                    "send it again"
                ) from error
            raise

    def give(self, size: int) -> None:
        """Takes back what `take` gave."""
        self._grant(-size)
        self._let_in()

    def _grant(self, size: int) -> None:
        self.used += size
        PENDING.add(size)

    def _let_in(self) -> None:
        while self._waiting and self.used + self._waiting[0][0] <= self._bytes_max:
            size, turn = self._waiting.popleft()
            if not turn.done():
                self._grant(size)
                turn.set_result(None)
