"""Responses that are sent in chunks: what they hold in memory, and what a slow client costs.

`ResponseMemory` is one byte budget for all of them. A response acquires bytes before it reads, as a
`Share`, and waits for its turn if none are left. It never waits for bytes while it holds some, so
responses cannot wait for each other in a circle.

`Client` sends the chunks, and tells whether the client reads them. If the socket stays full for
some seconds, the response drops what it has read, gives back its share, and reads again at the same
place when the client goes on. All that is left meanwhile is the connection's write buffer, which
has at most WRITE_BUFFER_BYTES and one piece. So no piece may be larger than PIECE_BYTES.

Beware: call `Client.takes` after each piece. uvicorn accepts a piece at once, and waits for the
client with the next one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from forebay.admin.request import ByteBudget
from forebay.limits import KIB, MIB
from forebay.logs import event
from forebay.metrics import Counter, Gauge
from forebay.objects.buffers import return_free_memory
from forebay.settings import AdminSettings

_log: Final = logging.getLogger("forebay.admin")
WRITE_BUFFER_BYTES: Final = 64 * KIB
"""A connection with more bytes in its write buffer is full, until a quarter of them are left."""
IS_FULL: Final = "forebay.is_full"
"""The key of a request's scope for a function that returns whether the write buffer is full. Only
then does a send wait, and needs a time limit."""
PIECE_BYTES: Final = 256 * KIB
FIRST_READ_BYTES: Final = 256 * KIB
_FIRST_READ_BYTES_MIN: Final = 64 * KIB
PATIENCE_SECONDS: Final = 2.0
"""How long a response keeps what it has read although the socket is full."""
_CONTENDED_PATIENCE_SECONDS: Final = 0.25
"""How long it does so while another one waits for its turn."""
_TURN_SECONDS: Final = 0.5
"""How long a response waits before those that hold bytes, however few, wait for their turn too.
Otherwise one that needs many could wait for ever for others that never pause."""
_TRIM_SECONDS: Final = 2.0
"""Free memory is returned to the system this long after responses gave theirs back."""
_TRIM_BYTES_MIN: Final = 8 * MIB
HELD: Final = Gauge(
    "forebay_http_stream_bytes", "Bytes of admin.stream_bytes_max that responses hold."
)
WAITING: Final = Gauge(
    "forebay_http_streams_waiting", "Responses that wait for bytes of admin.stream_bytes_max."
)
STALLED: Final = Gauge(
    "forebay_http_streams_stalled", "Responses whose clients have read nothing for some seconds."
)
DROPPED: Final = Counter(
    "forebay_http_streams_dropped_total",
    "Responses that the server ended because their clients read nothing for too long.",
)


class ResponseMemory:
    """The bytes that all responses of a server hold together. For one event loop."""

    def __init__(self, settings: AdminSettings) -> None:
        self.bytes_max: Final = settings.stream_bytes_max
        self._budget = ByteBudget(self.bytes_max, None, "admin.stream_bytes_max", HELD)
        each = self.bytes_max // 2 // settings.streams_max
        # A read takes its bytes twice for a moment: in a buffer, and decoded.
        self.first_read_bytes: Final = max(min(each // 2, FIRST_READ_BYTES), _FIRST_READ_BYTES_MIN)
        """What a reader reads at first: half of the budget has room for all, if possible."""
        self._peak = 0
        self._trim: asyncio.TimerHandle | None = None

    @property
    def contended(self) -> bool:
        """Whether a response waits for bytes."""
        return self._budget.contended

    @property
    def overdue(self) -> bool:
        """Whether one has waited for so long that all must give back their bytes for it."""
        return self._budget.waited_seconds() > _TURN_SECONDS

    async def acquire(self, size: int) -> int:
        """Waits for `size` bytes, or for the whole budget if it is smaller; returns how many."""
        size = min(size, self.bytes_max)
        WAITING.add(1)
        try:
            await self._budget.acquire(size)
        finally:
            WAITING.add(-1)
        self._peak = max(self._peak, self._budget.used)
        return size

    def extend(self, more: int) -> bool:
        """Acquires bytes at once if half of the budget is left to others; returns whether."""
        if not self._budget.try_acquire(more, self.bytes_max // 2):
            return False
        self._peak = max(self._peak, self._budget.used)
        return True

    def release(self, size: int) -> None:
        self._budget.release(size)
        if self._peak >= _TRIM_BYTES_MIN and self._budget.used <= self._peak // 2:
            self.trim_later()

    def trim_later(self) -> None:
        """Returns free memory to the system after some seconds; once for all calls before that."""
        if self._trim is None:
            loop = asyncio.get_running_loop()
            self._trim = loop.call_later(_TRIM_SECONDS, self._run_trim, loop)

    def _run_trim(self, loop: asyncio.AbstractEventLoop) -> None:
        self._trim = None
        self._peak = self._budget.used
        loop.run_in_executor(None, return_free_memory)


class Share:
    """The bytes of the budget that one response holds."""

    def __init__(self, memory: ResponseMemory) -> None:
        self._memory = memory
        self.held = 0

    async def acquire(self, size: int) -> None:
        """Gives back what it holds, then waits for `size` bytes or for the whole budget."""
        self.give_back()
        self.held = await self._memory.acquire(size)

    def extend(self, size: int) -> bool:
        """Holds `size` bytes instead of fewer, if there is room now; returns whether it does."""
        if size > self.held:
            if not self._memory.extend(size - self.held):
                return False
            self.held = size
        return True

    def give_back(self) -> None:
        """Gives back all bytes. Idempotent."""
        held, self.held = self.held, 0
        if held:
            self._memory.release(held)


class ClientStalled(Exception):
    """The client has read nothing for longer than allowed."""


class Client:
    """The client of one response. One task sends to it at a time."""

    def __init__(
        self,
        scope: Scope,
        send: Send,
        memory: ResponseMemory,
        stall_seconds: float,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        """`stall_seconds` is how long it may read nothing; `patience_seconds` is for `takes`."""
        self._asgi_send = send
        self._is_full: Callable[[], bool] = scope.get(IS_FULL, _maybe)
        self._memory = memory
        self._stall_seconds = stall_seconds
        self._patience_seconds = patience_seconds
        self._full_since: float | None = None
        self._was_stalled = False
        self.gone: asyncio.Task[None] | None = None
        """Ends when the client disconnects."""
        self.waited_seconds = 0.0
        """How long the response has waited for the client, without times in which it stalled."""

    def stalled_seconds(self) -> float:
        """How long the client has not read what was sent to it."""
        return 0.0 if self._full_since is None else time.monotonic() - self._full_since

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        # uvicorn sends the headers only with the first part of the body.
        await self.write(b"")

    async def write(self, piece: bytes) -> None:
        """Sends a piece of the body. Raises ClientStalled if the socket is full for too long."""
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def takes(self) -> bool:
        """Waits a moment until more can be sent; False if the response has to release its memory.

        In that case, do so and call `drained`.
        """
        if not self._is_full():
            return True
        began = self._full_since = time.monotonic()
        patience = self._patience_seconds
        for seconds in (min(_CONTENDED_PATIENCE_SECONDS, patience), patience):
            try:
                async with asyncio.timeout(max(began + seconds - time.monotonic(), 0.0)):
                    await self._asgi_send(_NOTHING)
            except TimeoutError:
                if self._memory.contended:
                    break
            else:
                self.waited_seconds += time.monotonic() - began
                self._full_since = None
                return True
        return False

    async def drained(self) -> None:
        """Waits until the client reads again.

        Raises ClientStalled if it does not in time, and ClientDisconnect if it has disconnected, so
        that nothing more is read for it.
        """
        self._was_stalled = True
        STALLED.add(1)
        try:
            await self._send(_NOTHING)
        finally:
            STALLED.add(-1)
        if self.gone is not None and self.gone.done():
            raise ClientDisconnect

    def close(self) -> None:
        """Call it when the response has ended."""
        if self._was_stalled:  # its write buffer was full, and is free now
            self._memory.trim_later()

    async def _send(self, message: Message) -> None:
        if self._full_since is None and not self._is_full():
            await self._asgi_send(message)
            return
        if self._full_since is None:
            self._full_since = time.monotonic()
        try:
            async with asyncio.timeout(max(self._stall_seconds - self.stalled_seconds(), 0.0)):
                await self._asgi_send(message)
        except TimeoutError:
            raise ClientStalled from None
        finally:
            self._full_since = None


def report_drop(source: str, position: int) -> None:
    """Logs and counts a response that is ended because its client reads nothing."""
    DROPPED.add()
    event(
        _log,
        logging.INFO,
        "a client that reads nothing is dropped",
        source=source,
        position=position,
    )


async def disconnected(receive: Receive) -> None:
    """Waits until the client has gone, or until its response has ended."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _maybe() -> bool:
    return True


_NOTHING: Final[Message] = {"type": "http.response.body", "body": b"", "more_body": True}
"""Sends no bytes. uvicorn returns once the write buffer has room."""
