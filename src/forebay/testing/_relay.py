"""One direction of a relayed connection: bytes that wait for their time, then go into a socket.

A `Lane` delays and never limits: whatever comes in is due after its own delay, so that any number
of requests in flight are each late by the latency. A lane that holds `full` bytes asks its owner to
stop reading; a lane whose socket failed drops what it is given, because the other direction may
still carry an answer. All of it is called in the proxy's loop only.

What a caller gets wrong: `push` copies what it cannot send at once, so that the buffer it was given
may be used again as soon as it returns.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter, deque
from collections.abc import Callable
from typing import Final, Literal, NamedTuple, TypeAlias

from forebay.limits import GIB, KIB, MIB
from forebay.testing.network_faults import Faults

READ_BYTES: Final = 512 * KIB
LANE_BYTES_MIN: Final = MIB
LANE_BYTES_MAX: Final = 32 * MIB
DELAYED_BYTES_PER_SECOND: Final = GIB
"""The speed up to which a latency does not limit a connection, within LANE_BYTES_MAX."""

RATE_STEPS_PER_SECOND: Final = 50
"""A rate limit lets through so many parts of a second's bytes."""

End: TypeAlias = Literal["eof", "reset"]


class Link:
    """What all lanes of one direction share: the time at which a limited link is free again."""

    __slots__ = ("free_at",)

    def __init__(self) -> None:
        self.free_at = 0.0

    def depart(self, count: int, bytes_per_second: int, now: float) -> float:
        """When the last of `count` bytes leaves."""
        self.free_at = max(self.free_at, now) + count / bytes_per_second
        return self.free_at


class Traffic:
    """What the connections of a proxy share. Only the loop's thread changes it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, faults: Faults, seed: int) -> None:
        self.loop = loop
        self.faults = faults
        self.buffer = memoryview(bytearray(READ_BYTES))
        self.up = Link()
        self.down = Link()
        # One sequence for each kind of draw: the k-th request has the k-th draw, whatever the
        # number of reads that brought it.
        self.jitters = random.Random(f"jitter {seed}")  # noqa: S311 - repeatable, not secret
        self.resets = random.Random(f"reset {seed}")  # noqa: S311 - repeatable, not secret
        self.requests = random.Random(f"request {seed}")  # noqa: S311 - repeatable, not secret
        self.connections = 0
        self.bytes_up = 0
        self.bytes_down = 0
        self.methods: Counter[str] = Counter()
        self.injected: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()


class _Parcel(NamedTuple):
    due: float
    data: memoryview
    end: End | None


_NOTHING: Final = memoryview(b"")


class Lane:
    def __init__(
        self,
        traffic: Traffic,
        link: Link,
        sink: socket.socket,
        *,
        on_room: Callable[[], None],
        on_end: Callable[[End], None],
    ) -> None:
        self._traffic = traffic
        self._loop = traffic.loop
        self.link = link
        self._sink = sink
        self._on_room = on_room
        self._on_end = on_end
        self._parcels: deque[_Parcel] = deque()
        self._waiting = 0
        self._jitter = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._blocked = True
        self._was_full = False
        self.ended = False

    def open(self) -> None:
        """The socket is connected: what was pushed until now may go."""
        self._blocked = False
        self._pump()

    def due(self, now: float) -> float:
        """When bytes that leave now arrive; 0 is at once."""
        faults = self._traffic.faults
        if not faults.latency_ms and not faults.jitter_ms:
            return 0.0
        if not self._parcels:
            self._jitter = self._traffic.jitters.uniform(0, faults.jitter_ms)
        return now + (faults.latency_ms + self._jitter) / 2000

    @property
    def full(self) -> bool:
        faults = self._traffic.faults
        delay = (faults.latency_ms + faults.jitter_ms) / 2000
        room = min(LANE_BYTES_MAX, LANE_BYTES_MIN + delay * DELAYED_BYTES_PER_SECOND)
        self._was_full = self._waiting >= room
        return self._was_full

    def push(self, data: bytes | memoryview, due: float) -> None:
        """Sends the bytes at `due`, but never before what was pushed earlier."""
        if self.ended or not data:
            return
        view = memoryview(data)
        if not self._parcels and not self._blocked and due <= self._loop.time():
            view = view[self._send(view) :]
            if not view:
                return
        self._put(_Parcel(due, memoryview(bytes(view)), None))

    def end(self, end: End, due: float) -> None:
        """After all that was pushed: the sink is told that no more comes, or is reset."""
        self._put(_Parcel(due, _NOTHING, end))

    def _put(self, parcel: _Parcel) -> None:
        if self.ended:
            return
        self._parcels.append(parcel)
        self._waiting += len(parcel.data)
        if len(self._parcels) == 1:
            self._pump()

    def drop(self) -> bool:
        """Forgets what waits; whether there was anything."""
        lost = bool(self._parcels)
        self._parcels.clear()
        self._waiting = 0
        self._cancel_timer()
        return lost

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        self.ended = True
        self.drop()
        if self._sink.fileno() >= 0:
            self._loop.remove_writer(self._sink)

    def _pump(self) -> None:
        self._cancel_timer()
        while self._parcels and not self._blocked:
            parcel = self._parcels[0]
            if parcel.due > self._loop.time():
                self._timer = self._loop.call_at(parcel.due, self._pump)
                break
            if parcel.end is not None:
                self.close()
                self._on_end(parcel.end)
                return
            sent = self._send(parcel.data)
            if self.ended:
                return
            self._waiting -= sent
            if sent == len(parcel.data):
                self._parcels.popleft()
            else:
                self._parcels[0] = parcel._replace(data=parcel.data[sent:])
        if self._was_full and not self.full:
            self._on_room()

    def _send(self, data: memoryview) -> int:
        try:
            sent = self._sink.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self.close()
            self._on_end("eof")
            self._on_room()
            return 0
        if sent < len(data):
            self._blocked = True
            self._loop.add_writer(self._sink, self._writable)
        return sent

    def _writable(self) -> None:
        self._loop.remove_writer(self._sink)
        self.open()
