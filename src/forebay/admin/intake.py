"""`Body`: the body of a request, read whole, within limits of size, memory and time.

It takes room as its bytes arrive, never by what its header says: whoever is silent holds nothing.
Each time it takes as much again as has come, so that a large body does not ask for room at every
piece. A client that gives nothing for some seconds is not waited for.

What a caller gets wrong: `release` it in the end, also when it was refused.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from forebay.admin.room import Room
from forebay.errors import MessageTooLarge, UsageError, WaitTimeout

BODY_SECONDS: Final = 60.0
"""For a whole body, and for the room that it needs."""
STALL_SECONDS: Final = 10.0
"""For its next piece."""


class Body:
    def __init__(
        self,
        receive: Receive,
        room: Room,
        headers: dict[bytes, bytes],
        bytes_max: int,
        limit: str,
        *,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        """MessageTooLarge if the header says so much already; `limit` is what it is called."""
        self._receive = receive
        self._room = room
        self._length = _length(headers)
        self._bytes_max = bytes_max
        self._limit = limit
        self._stall_seconds = stall_seconds
        self._taken = 0
        if self._length is not None and self._length > bytes_max:
            raise self._too_large()

    async def read(self) -> bytes:
        parts: list[bytes] = []
        size = 0
        clock = asyncio.get_running_loop().time
        last = clock() + BODY_SECONDS
        try:
            async with asyncio.timeout_at(min(clock() + self._stall_seconds, last)) as patience:
                more = True
                while more:
                    part, more = await self._next()
                    parts.append(part)
                    size += len(part)
                    await self._hold(size, more=more)
                    patience.reschedule(min(clock() + self._stall_seconds, last))
        except TimeoutError as error:
            raise WaitTimeout(
                f"the body did not come: {size} bytes of it did, and then none for "
                f"{self._stall_seconds:.0f} seconds, or not all within {BODY_SECONDS:.0f}: nothing "
                "of it was taken"
            ) from error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def release(self) -> None:
        """Gives its room back. Idempotent."""
        self._room.give(self._taken)
        self._taken = 0

    async def _next(self) -> tuple[bytes, bool]:
        message: Any = await self._receive()
        if message["type"] != "http.request":
            raise ClientDisconnect
        return message.get("body", b""), message.get("more_body", False)

    async def _hold(self, size: int, *, more: bool) -> None:
        """Sees to it that there is room for so much."""
        if size > self._bytes_max:
            raise self._too_large()
        if size > self._taken:
            most = self._bytes_max if self._length is None else max(self._length, size)
            step = (min(2 * size, most) if more else size) - self._taken
            await self._room.take(step)
            self._taken += step

    def _too_large(self) -> MessageTooLarge:
        return MessageTooLarge(
            f"the body is larger than {self._bytes_max} bytes ({self._limit}): send it in several "
            "requests; nothing of it was taken"
        )


def _length(headers: dict[bytes, bytes]) -> int | None:
    """What the body's size will be, where the request tells it."""
    told = headers.get(b"content-length")
    if told is None or b"transfer-encoding" in headers:
        return None
    if not told.isdigit() or len(told) > 19:
        raise UsageError("Content-Length is no number")
    return int(told)
