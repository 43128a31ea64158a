"""What a `FaultProxy` does to a connection that passes through it, and what it counts.

`Faults` are data: the proxy reads the newest ones at every event, so that a change takes effect at
once, on open connections too; bytes that already wait in a delay keep their time. A `Connection`
joins a client's socket to one of the upstream: bytes are read, counted, perhaps lost or cut short,
and given to the `Lane` of their direction. It knows no protocol; `support.proxy_http` has the
one that does. There are no tasks: everything is a callback of a socket or a timer in the proxy's
loop, and closing removes them all.

Beware: `Lane.push` copies what it cannot send at once, so that the buffer it was
given may be used again as soon as it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import socket
import struct
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from forebay.errors import InvalidSetting
from forebay.limits import GIB, KIB, MIB

_RATES: Final = ("reset_rate", "http_error_rate", "timeout_after_success_rate")
_AMOUNTS: Final = ("latency_ms", "jitter_ms", "bytes_per_second", "hang_seconds")


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults of a proxy. Rates are probabilities, drawn from the proxy's seed.

    latency_ms    a round trip's: half of it on the bytes of each direction, however many there are
    jitter_ms     up to so much more for a round trip, drawn for each burst of a direction
    bytes_per_second    of the link, in each direction, shared by all connections; 0 is no limit
    refuse        new connections are reset at once
    black_hole    everything is read and dropped, nothing is answered; connections that lost bytes
                  by it are reset when it ends. Only a client's own end reaches the upstream
    reset_rate    for each `reset_after_bytes_max` bytes (both directions) of a connection: the
                  probability that it is reset, at a random one of those bytes
    http_error_rate    of requests: answered with `http_error_status`, never forwarded
    timeout_after_success_rate    of requests: forwarded whole, the answer read and not delivered,
                  the connection closed `hang_seconds` later. Without HTTP, of turns (client bytes
                  after upstream bytes): answers are dropped from then on, and the connection is
                  reset `hang_seconds` after the first that was
    """

    latency_ms: float = 0.0
    jitter_ms: float = 0.0
    bytes_per_second: int = 0
    refuse: bool = False
    black_hole: bool = False
    reset_rate: float = 0.0
    reset_after_bytes_max: int = 1 << 20
    http_error_rate: float = 0.0
    http_error_status: int = 503
    timeout_after_success_rate: float = 0.0
    hang_seconds: float = 0.2

    def __post_init__(self) -> None:
        for name in _RATES:
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidSetting(f"{name} is a probability, not {getattr(self, name)}")
        for name in _AMOUNTS:
            if getattr(self, name) < 0:
                raise InvalidSetting(f"{name} is {getattr(self, name)}, below 0")
        if self.http_error_rate + self.timeout_after_success_rate > 1:
            raise InvalidSetting("a request fails in one way: the two rates add up to at most 1")
        if self.reset_after_bytes_max < 1:
            raise InvalidSetting("reset_after_bytes_max must be at least 1")
        if not 400 <= self.http_error_status <= 599:
            raise InvalidSetting(f"http_error_status {self.http_error_status} is not 400 to 599")


@dataclass(frozen=True, slots=True)
class ProxyStats:
    """What a proxy has counted since its start. All is counted before the client can see it.

    `requests` are the request heads read from clients, by method, those that got a fault included.
    `bytes_up` were read from clients and `bytes_down` from the upstream; an injected answer is in
    neither. `faults` are those injected, by kind: "refused", "black_hole" (connections),
    "reset", "http_error" and "timeout_after_success". `failures` are not faults but troubles:
    "upstream" (no connection to it), "malformed" (not HTTP/1.1, or over a limit), "over_limit"
    (too many connections).
    """

    connections: int = 0
    connections_open: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    requests: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)


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
        self.jitters = random.Random(f"jitter {seed}")
        self.resets = random.Random(f"reset {seed}")
        self.requests = random.Random(f"request {seed}")
        self.connections = 0
        self.bytes_up = 0
        self.bytes_down = 0
        self.methods: Counter[str] = Counter()
        self.injected: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()


class _Waiting(NamedTuple):
    """Bytes, or the end of the stream, and when they are due."""

    due: float
    data: memoryview
    end: End | None


_NOTHING: Final = memoryview(b"")


class Lane:
    """One direction of a connection: bytes that wait for their time, then go into a socket.

    It delays and never limits: whatever comes in is due after its own delay, so that any number of
    requests in flight are each late by the latency. A lane that is `full` asks its owner to stop
    reading; one whose socket failed drops what it gets, because the other direction may still
    carry an answer.
    """

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
        self._queue: deque[_Waiting] = deque()
        self._bytes = 0
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
        if not self._queue:
            self._jitter = self._traffic.jitters.uniform(0, faults.jitter_ms)
        return now + (faults.latency_ms + self._jitter) / 2000

    @property
    def full(self) -> bool:
        faults = self._traffic.faults
        delay = (faults.latency_ms + faults.jitter_ms) / 2000
        room = min(LANE_BYTES_MAX, LANE_BYTES_MIN + delay * DELAYED_BYTES_PER_SECOND)
        self._was_full = self._bytes >= room
        return self._was_full

    def push(self, data: bytes | memoryview, due: float) -> None:
        """Sends the bytes at `due`, but never before what was pushed earlier."""
        if self.ended or not data:
            return
        view = memoryview(data)
        if not self._queue and not self._blocked and due <= self._loop.time():
            view = view[self._send(view) :]
            if not view:
                return
        self._put(_Waiting(due, memoryview(bytes(view)), None))

    def end(self, end: End, due: float) -> None:
        """Ends or resets the sink, after all that was pushed."""
        self._put(_Waiting(due, _NOTHING, end))

    def _put(self, waiting: _Waiting) -> None:
        if self.ended:
            return
        self._queue.append(waiting)
        self._bytes += len(waiting.data)
        if len(self._queue) == 1:
            self._pump()

    def drop(self) -> bool:
        """Forgets what waits; returns whether there was anything."""
        lost = bool(self._queue)
        self._queue.clear()
        self._bytes = 0
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
        while self._queue and not self._blocked:
            waiting = self._queue[0]
            if waiting.due > self._loop.time():
                self._timer = self._loop.call_at(waiting.due, self._pump)
                break
            if waiting.end is not None:
                self.close()
                self._on_end(waiting.end)
                return
            sent = self._send(waiting.data)
            if self.ended:
                return
            self._bytes -= sent
            if sent == len(waiting.data):
                self._queue.popleft()
            else:
                self._queue[0] = waiting._replace(data=waiting.data[sent:])
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


Address: TypeAlias = tuple[socket.AddressFamily, Any]
"""A family and what its `connect` takes, as `socket.getaddrinfo` returns them."""

_LINGER_ZERO: Final = struct.pack("ii", 1, 0)


def reset_socket(sock: socket.socket) -> None:
    """Closes it with a reset instead of an end."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
    sock.close()


class _Side:
    """One end of the connection: its socket, and whether it may be read now."""

    def __init__(
        self,
        traffic: Traffic,
        sock: socket.socket,
        on_readable: Callable[[], None],
    ) -> None:
        self._loop = traffic.loop
        self.sock = sock
        self._on_readable = on_readable
        self._reading = False
        self._turn: asyncio.TimerHandle | None = None
        self.ready = False
        self.ended = False
        self.lane: Lane  # where the bytes read here go

    def update(self) -> None:
        """Starts or stops reading, as the state of this side and of its lane allows."""
        wanted = self.ready and not self.ended and self._turn is None and not self.lane.full
        if wanted and not self._reading:
            self._loop.add_reader(self.sock, self._on_readable)
        elif not wanted and self._reading:
            self._loop.remove_reader(self.sock)
        self._reading = wanted

    def wait_until(self, time: float) -> None:
        """Reads no more until then: the link is taken."""
        self._turn = self._loop.call_at(time, self._take_turn)
        self.update()

    def refresh(self) -> None:
        """Decides again whether to read, after a change of the faults."""
        if self._turn is not None:
            self._turn.cancel()
        self._take_turn()

    def _take_turn(self) -> None:
        self._turn = None
        self.update()

    def close(self) -> None:
        self.ready = False
        self.ended = True
        if self._turn is not None:
            self._turn.cancel()
        if self._reading:
            self._loop.remove_reader(self.sock)
            self._reading = False


class Connection:
    """Relays between `client`, just accepted, and a new connection to `upstream`."""

    def __init__(
        self,
        traffic: Traffic,
        client: socket.socket,
        upstream: Address,
        on_closed: Callable[[Connection], None],
    ) -> None:
        self.traffic = traffic
        self._on_closed = on_closed
        family, self._address = upstream
        server = socket.socket(family, socket.SOCK_STREAM)
        for sock in (client, server):
            sock.settimeout(0)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._client = _Side(traffic, client, self._read_client)
        self._server = _Side(traffic, server, self._read_server)
        self.up = self._lane(traffic.up, self._client, self._server)
        self.down = self._lane(traffic.down, self._server, self._client)
        self.closed = False
        self._timers: list[asyncio.TimerHandle] = []
        self._holed = False
        self._connecting = False
        self._window: tuple[object, int, int | None] = (None, 0, None)
        # A turn begins with client bytes after upstream bytes.
        self._turned = True
        self.dropping = False
        """Answers are read and dropped: a timeout after success."""
        self._hangs = False

    def _lane(self, link: Link, source: _Side, sink: _Side) -> Lane:
        lane = Lane(
            self.traffic,
            link,
            sink.sock,
            on_room=source.update,
            on_end=lambda end: self._lane_ended(end, sink),
        )
        source.lane = lane
        return lane

    def start(self) -> None:
        self._client.ready = True
        self._client.update()
        self.down.open()
        if self.traffic.faults.black_hole:
            self._fall()
            return
        self._connecting = True
        number = self._server.sock.connect_ex(self._address)
        if number in {0, errno.EINPROGRESS}:
            self.traffic.loop.add_writer(self._server.sock, self._connected)
        else:
            self._connect_failed()

    def _connected(self) -> None:
        self.traffic.loop.remove_writer(self._server.sock)
        if self._server.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._connect_failed()
            return
        self._connecting = False
        self._server.ready = True
        self._server.update()
        self.up.open()

    def _connect_failed(self) -> None:
        self.traffic.failures["upstream"] += 1
        self.reset()

    # ---- what a protocol may see and change ----

    def client_bytes(self, data: memoryview, due: float) -> None:
        faults = self.traffic.faults
        if self._turned:
            self._turned = False
            if self.traffic.requests.random() < faults.timeout_after_success_rate:
                self.dropping = True
        self.up.push(data, due)

    def server_bytes(self, data: memoryview, due: float) -> None:
        self._turned = True
        if not self.dropping:
            self.down.push(data, due)
        elif not self._hangs:
            self.timed_out(self.reset)

    def server_ended(self, end: End, due: float) -> None:
        if not self.dropping:
            self.down.end(end, due)
        elif not self._hangs:
            self.reset()

    def timed_out(self, then: Callable[[], None]) -> None:
        """The upstream has answered and the client will never know."""
        self._hangs = self.dropping = True
        self.traffic.injected["timeout_after_success"] += 1
        self.later(self.traffic.faults.hang_seconds, then)

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Calls once, unless the connection is closed by then."""
        self._timers.append(self.traffic.loop.call_later(seconds, call))

    # ---- changes of the faults ----

    def faults_changed(self) -> None:
        if self.traffic.faults.black_hole:
            lost_up, lost_down = self.up.drop(), self.down.drop()
            if lost_up or lost_down or self._connecting:
                self._fall()
        elif self._holed:
            self.reset()
        self._client.refresh()
        self._server.refresh()

    def _fall(self) -> None:
        if not self._holed:
            self._holed = True
            self.traffic.injected["black_hole"] += 1

    # ---- reading ----

    def _read_client(self) -> None:
        data = self._read(self._client)
        if data is None:
            return
        if isinstance(data, str):
            if self.traffic.faults.black_hole or self._hangs:
                self.close()
            else:
                self.up.end(data, self.up.due(self.traffic.loop.time()))
            return
        self.traffic.bytes_up += len(data)
        self._relay(data, self._client, self.client_bytes)

    def _read_server(self) -> None:
        data = self._read(self._server)
        if data is None:
            return
        if isinstance(data, str):
            if self.traffic.faults.black_hole:
                self._fall()
            else:
                self.server_ended(data, self.down.due(self.traffic.loop.time()))
            return
        self.traffic.bytes_down += len(data)
        self._relay(data, self._server, self.server_bytes)

    def _read(self, side: _Side) -> memoryview | End | None:
        rate = self.traffic.faults.bytes_per_second
        size = min(READ_BYTES, max(1, rate // RATE_STEPS_PER_SECOND)) if rate else READ_BYTES
        try:
            count = side.sock.recv_into(self.traffic.buffer, size)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            side.close()
            return "reset"
        if not count:
            side.close()
            return "eof"
        return self.traffic.buffer[:count]

    def _relay(
        self, data: memoryview, side: _Side, deliver: Callable[[memoryview, float], None]
    ) -> None:
        faults = self.traffic.faults
        if faults.black_hole:
            self._fall()
            return
        lane = side.lane
        now = self.traffic.loop.time()
        if faults.bytes_per_second:
            leaves = lane.link.depart(len(data), faults.bytes_per_second, now)
            side.wait_until(leaves)
            due = lane.due(leaves) or leaves
        else:
            due = lane.due(now)
        spared = self._spared(len(data)) if faults.reset_rate else len(data)
        deliver(data[:spared], due)
        if spared < len(data) and not self.closed:
            self.traffic.injected["reset"] += 1
            self.reset()
        elif not self.closed:
            side.update()

    def _spared(self, count: int) -> int:
        """How many of the next bytes pass before the connection is reset; all, if it is not."""
        faults = self.traffic.faults
        drawn_for, left, point = self._window
        passed = 0
        while passed < count:
            if drawn_for is not faults or not left:
                draw = self.traffic.resets
                hit = draw.random() < faults.reset_rate
                drawn_for, left = faults, faults.reset_after_bytes_max
                point = draw.randrange(left) if hit else None
            step = min(left, count - passed)
            if point is not None and point < step:
                return passed + point
            point = None if point is None else point - step
            left -= step
            passed += step
        self._window = (drawn_for, left, point)
        return count

    # ---- ending ----

    def _lane_ended(self, end: End, sink: _Side) -> None:
        if end == "reset":
            self.reset()
            return
        with contextlib.suppress(OSError):
            sink.sock.shutdown(socket.SHUT_WR)
        if self.up.ended and self.down.ended:
            self.close()

    def reset(self) -> None:
        self._close(reset_socket)

    def close(self) -> None:
        self._close(socket.socket.close)

    def _close(self, end: Callable[[socket.socket], None]) -> None:
        if self.closed:
            return
        self.closed = True
        for timer in self._timers:
            timer.cancel()
        for part in (self.up, self.down, self._client, self._server):
            part.close()
        end(self._client.sock)
        end(self._server.sock)
        self._on_closed(self)
