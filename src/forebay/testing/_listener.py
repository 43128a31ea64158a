"""The proxy inside its loop: accepts connections, hands them out to relays, and ends them all."""

from __future__ import annotations

import asyncio
import socket
from typing import Final

from forebay.testing._connection import Address, Connection, reset_socket
from forebay.testing._http_relay import HttpConnection
from forebay.testing._relay import Traffic
from forebay.testing.network_faults import Faults, ProxyStats

CONNECTIONS_MAX: Final = 1024
ACCEPT_RETRY_SECONDS: Final = 0.1


class Listener:
    """Called in the loop's thread only, but for its constructor."""

    def __init__(
        self, traffic: Traffic, listening: socket.socket, upstream: Address, *, http: bool
    ) -> None:
        self._traffic = traffic
        self._loop: asyncio.AbstractEventLoop = traffic.loop
        self._listening = listening
        self._upstream = upstream
        self._relay = HttpConnection if http else Connection
        self._open: set[Connection] = set()
        self._retry: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listening, self._accept)

    def change(self, faults: Faults) -> None:
        if faults.bytes_per_second != self._traffic.faults.bytes_per_second:
            self._traffic.up.free_at = self._traffic.down.free_at = 0.0
        self._traffic.faults = faults
        for connection in list(self._open):
            connection.faults_changed()

    def close(self) -> None:
        """Ends everything; the clients see a reset or an end."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listening)
        self._listening.close()
        for connection in list(self._open):
            connection.reset()

    def stats(self) -> ProxyStats:
        traffic = self._traffic
        return ProxyStats(
            connections=traffic.connections,
            connections_open=len(self._open),
            bytes_up=traffic.bytes_up,
            bytes_down=traffic.bytes_down,
            requests=dict(traffic.methods),
            faults=dict(traffic.injected),
            failures=dict(traffic.failures),
        )

    def _accept(self) -> None:
        try:
            client, _ = self._listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:
            # No more descriptors: the connection waits in the backlog, and others may end.
            self._traffic.failures["over_limit"] += 1
            self._loop.remove_reader(self._listening)
            self._retry = self._loop.call_later(ACCEPT_RETRY_SECONDS, self.start)
            return
        self._traffic.connections += 1
        if self._traffic.faults.refuse:
            self._traffic.injected["refused"] += 1
            reset_socket(client)
        elif len(self._open) >= CONNECTIONS_MAX:
            self._traffic.failures["over_limit"] += 1
            reset_socket(client)
        else:
            self._begin(client)

    def _begin(self, client: socket.socket) -> None:
        try:
            connection = self._relay(self._traffic, client, self._upstream, self._open.discard)
        except OSError:
            self._traffic.failures["over_limit"] += 1
            reset_socket(client)
            return
        self._open.add(connection)
        connection.start()
