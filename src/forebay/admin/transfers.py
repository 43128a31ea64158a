"""Bytes of segments and objects on their way through the server, in bounded pieces.

All of them share some threads, and a number of places: whoever finds none is told to come back. One
transfer holds one piece in memory, and ends when its client neither takes nor gives for minutes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from forebay.errors import OffsetOutOfRange, ServiceUnavailable, UsageError
from forebay.limits import MIB
from forebay.metrics import Counter

_Answer = TypeVar("_Answer")
TRANSFERS: Final = Counter(
    "forebay_http_transfer_bytes_total",
    "Bytes of segments, objects and staged rows that passed through the server: sent (down) and "
    "received (up).",
    ("kind", "direction"),
)
PIECE_BYTES: Final = 1 * MIB
_BYTES: Final = "application/octet-stream"
_THREADS: Final = 8
_PLACES: Final = 256
STALL_SECONDS_MAX: Final = 600.0
"""Of silence; whoever stages rows may wait for them for long."""
_RANGE: Final = re.compile(r"bytes=(?P<first>[0-9]{1,19})?-(?P<last>[0-9]{1,19})?")


@dataclass(frozen=True, slots=True)
class ByteRange:
    """The bytes `start..end` of something, the end not included."""

    start: int
    end: int
    whole: bool
    """Whether nobody asked for a part."""


def byte_range(header: str | None, size: int, what: str) -> ByteRange:
    """What a `Range` header asks for, cut at the size; OffsetOutOfRange if that is nothing."""
    if header is None:
        return ByteRange(0, size, whole=True)
    match = _RANGE.fullmatch(header.strip())
    if match is None or (match["first"] is None and match["last"] is None):
        raise UsageError(f"the range {header!r} is not understood: it is like bytes=0-1023")
    if match["first"] is None:
        start, end = max(size - int(match["last"]), 0), size
    else:
        start = int(match["first"])
        end = size if match["last"] is None else min(int(match["last"]) + 1, size)
    if start >= size or end <= start:
        raise OffsetOutOfRange(
            f"{what} has {size} bytes: there are none in the range {header}", start=0, end=size
        )
    return ByteRange(start, end, whole=False)


class Transfers:
    """The threads and places of one server's transfers."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="transfer")
        self._taken = 0

    async def run(self, action: Callable[[], _Answer]) -> _Answer:
        """On one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, action)

    def run_unheard(self, action: Callable[[], None]) -> None:
        """On one of the threads, some time; also when the one who asks is being cancelled."""
        self._pool.submit(action)

    @contextmanager
    def place(self) -> Iterator[None]:
        """One of the places, for the event loop's thread; ServiceUnavailable if none is free."""
        if self._taken >= _PLACES:
            raise ServiceUnavailable(f"{_PLACES} transfers are under way: come back later")
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1

    def answer(
        self,
        request: Request,
        read: Callable[[int, int], bytes],
        size: int,
        *,
        kind: str,
        what: str,
        headers: dict[str, str],
    ) -> Response:
        """The bytes that the request asks for; `read` gives those between two positions."""
        head = {"Accept-Ranges": "bytes", **headers}
        if request.method == "HEAD":
            return Response(headers={**head, "Content-Length": str(size)}, media_type=_BYTES)
        wanted = byte_range(request.headers.get("range"), size, what)
        head["Content-Length"] = str(wanted.end - wanted.start)
        if not wanted.whole:
            head["Content-Range"] = f"bytes {wanted.start}-{wanted.end - 1}/{size}"
        status = 200 if wanted.whole else 206
        pieces = self._pieces(read, wanted, kind)
        return _Placed(self, pieces, status, head)

    async def _pieces(
        self, read: Callable[[int, int], bytes], wanted: ByteRange, kind: str
    ) -> AsyncIterator[bytes]:
        for start in range(wanted.start, wanted.end, PIECE_BYTES):
            end = min(start + PIECE_BYTES, wanted.end)
            piece = await self.run(partial(read, start, end))
            TRANSFERS.add(len(piece), kind, "down")
            yield piece


class _Placed(StreamingResponse):
    """An answer that has a place while it is sent."""

    def __init__(
        self,
        transfers: Transfers,
        pieces: AsyncIterator[bytes],
        status: int,
        headers: dict[str, str],
    ) -> None:
        super().__init__(pieces, status, headers, media_type=_BYTES)
        self._transfers = transfers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._transfers.place():
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(STALL_SECONDS_MAX):
                await send(message)

        await super().stream_response(send_in_time)
