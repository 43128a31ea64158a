"""A client's connection and the one to the upstream that belongs to it.

Bytes are read, counted, perhaps lost or cut short by a fault, and given to the lane of their
direction. This class knows no protocol; `forebay.testing._http_relay` has the one that does. There
are no tasks: everything is a callback of a socket or a timer, and `close` removes them all.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from forebay.testing._relay import RATE_STEPS_PER_SECOND, READ_BYTES, End, Lane, Link, Traffic

Address: TypeAlias = tuple[socket.AddressFamily, Any]
"""A family and what its `connect` takes, as `socket.getaddrinfo` answers them."""

_LINGER_ZERO: Final = struct.pack("ii", 1, 0)


def reset_socket(sock: socket.socket) -> None:
    """Closes it with a reset instead of an end."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
    sock.close()


class _Side:
    """One end of the connection: its socket, and what stands against reading from it."""

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
        """Reads if nothing stands against it."""
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
        """Looks again at what stands against reading, after a change of the faults."""
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
