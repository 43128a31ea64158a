"""`FrameStream`: frames of a topic over a FetchStream, in order, without gaps, across restarts.

It keeps the next offset. If the connection is lost, or the server stops, it opens the stream again
there. Every frame is checked: its checksum, and that its offset is the next one.

`AsyncReader` and `Reader` in `forebay.broker.client` are the public interfaces.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import grpc

from forebay.broker import streams_pb2 as pb
from forebay.broker.connection import Attempts, Connection
from forebay.errors import CorruptFrame, ServiceUnavailable, UsageError
from forebay.format.frame import End, Scan, scan
from forebay.limits import OFFSET_MAX
from forebay.read.by_time import milliseconds

Start = int | datetime | Literal["earliest", "latest"]


@dataclass(frozen=True, slots=True)
class ReadOptions:
    topic: str
    start: Start = "earliest"
    end: int | None = None
    max_bytes: int = 0
    timeout: float = 60.0
    """How long to try to reach the server before the reader raises ServiceUnavailable."""


class FrameStream:
    """One reader. One task at a time may use it."""

    def __init__(self, connection: Connection, options: ReadOptions) -> None:
        self._connection = connection
        self._options = options
        self._attempts = Attempts(options.timeout)
        self._call: grpc.aio.StreamStreamCall[Any, Any] | None = None
        self.position: int | None = None
        """The next offset; None until the stream was open."""

    async def open(self) -> int:
        """Opens the stream, if it is not, and returns the next offset."""
        while self._call is None or self.position is None:
            try:
                await self._open()
            except grpc.aio.AioRpcError as error:
                await self._lost(error)
        return self.position

    async def _open(self) -> None:
        self._call = call = self._connection.stream("FetchStream")
        await call.write(open_request(self._options, self.position))
        await call.done_writing()
        raw = await call.read()
        if not isinstance(raw, bytes):
            raise ServiceUnavailable("the server has ended the stream")
        self.position = pb.FetchResponse.FromString(raw).next_offset

    async def next_frames(self) -> Scan | None:
        """Returns the next frames, at least one; None at the end. Waits for new messages."""
        end = self._options.end
        while end is None or self.position is None or self.position < end:
            await self.open()
            assert self._call is not None
            try:
                raw = await self._call.read()
            except grpc.aio.AioRpcError as error:
                await self._lost(error)
                continue
            if not isinstance(raw, bytes):
                self.close()
                if end is None or (self.position or 0) < end:
                    raise ServiceUnavailable("the server has ended the stream too early")
                return None
            self._attempts.succeeded()
            return self._checked(pb.FetchResponse.FromString(raw).frames)
        self.close()
        return None

    def _checked(self, frames: bytes) -> Scan:
        found = scan(frames, expected=self.position, consecutive=True)
        if found.end is not End.COMPLETE or not len(found):
            raise CorruptFrame(
                found.end.describe(),
                file=f"the stream of {self._connection.address}",
                position=found.safe_length,
                offset=self.position,
            )
        self.position = found.offsets[-1] + 1
        return found

    async def _lost(self, error: grpc.aio.AioRpcError) -> None:
        self.close()
        raised = self._connection.error(error)
        if not isinstance(raised, ServiceUnavailable):
            raise raised from None
        await self._attempts.failed(raised)

    def close(self) -> None:
        """Ends the stream. The next call opens it again."""
        if self._call is not None:
            self._call.cancel()
            self._call = None


def open_request(options: ReadOptions, position: int | None) -> bytes:
    opened = pb.OpenFetch(topic=options.topic, max_bytes=options.max_bytes)
    start = options.start if position is None else position
    if isinstance(start, datetime):
        opened.time_ms = milliseconds(start)
    elif start in ("earliest", "latest"):
        opened.position = str(start)
    elif type(start) is int and 0 <= start <= OFFSET_MAX:
        opened.offset = start
    else:
        raise UsageError(
            f"start is {start!r}; it must be an offset, a datetime, 'earliest' or 'latest'"
        )
    if options.end is not None:
        opened.end_offset = options.end
    return pb.FetchRequest(open=opened).SerializeToString()
