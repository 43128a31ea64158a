"""`BrokerServer`: the gRPC server on its address.

It runs in the event loop of the service, beside the HTTP server. gRPC binds its address itself, and
only once the loop runs. So `bind` reserves the port with a socket that never listens; gRPC shares
the port with that socket (SO_REUSEPORT).

Stopping takes three steps. Calls that begin are refused, and nothing more is delivered. Then
consumers have a moment to acknowledge what they got. Then streams end. Every message that was
acknowledged to a producer is in the log by then.

Beware: a stream that ends makes Danube's client open it again at once, some 2,000 times a second.
Only a server that stops ends streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import resource
import socket
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc

from forebay.broker import consumers, discovery, producers, schemas, streams
from forebay.broker.calls import Calls
from forebay.broker.context import BrokerContext
from forebay.errors import UsageError
from forebay.limits import MIB
from forebay.listening import bind_socket, host_and_port, shown_address
from forebay.logs import event
from forebay.settings import BrokerSettings

_log: Final = logging.getLogger("forebay.broker")
_STOP_SECONDS: Final = 2.0
_REPLACED_MAX: Final = 4
"""Servers that a malformed call has ended and whose other calls may go on."""
_CALLS_MAX: Final = 16_384
"""Calls at the same time, streams included; more are refused with RESOURCE_EXHAUSTED."""
_CONNECTIONS_MAX: Final = 8_192
_DESCRIPTORS_SHARE: Final = 4
_RECEIVED_MORE: Final = 4 * MIB
"""How much more than the largest message gRPC receives: so that the broker refuses a message that
is somewhat too large with INVALID_ARGUMENT. gRPC would refuse it with RESOURCE_EXHAUSTED, and
Danube's client repeats that for ever."""


class BrokerServer:
    """Binds, serves until it is stopped, and lets running calls end."""

    def __init__(self, settings: BrokerSettings) -> None:
        self._settings = settings
        self._reserved: socket.socket | None = None
        self._address = ""
        self._stop = asyncio.Event()
        self._crashed = asyncio.Event()
        self._replaced: deque[grpc.aio.Server] = deque()
        """Servers whose loops have ended. Calls that had begun go on."""
        self.started = False

    def bind(self) -> str:
        """Reserves the address and returns it; UsageError if it cannot be used."""
        found = bind_socket(self._settings)
        host, _ = host_and_port(self._settings.listen)
        name = found.getsockname()
        family = found.family
        found.close()  # it was bound without SO_REUSEPORT: nobody else has the port
        self._reserved = socket.socket(family, socket.SOCK_STREAM)
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._reserved.bind(name)
        self._address = shown_address(host, name[1])
        return self._settings.url or self._address

    async def serve(self, context: BrokerContext) -> None:
        """Serves until `stop`."""
        assert self._reserved is not None, "bind it first"
        calls = Calls(context.gate)
        handlers = [
            handler
            for each in (producers, consumers, discovery, schemas, streams)
            for handler in each.services(context, calls)
        ]
        async with context.running():
            server = await self._start(handlers)
            self.started = True
            while not await self._stops_by_request():
                server = await self._replace(server, handlers)
            await context.drain()
            await context.gate.quiet()
            await asyncio.gather(
                *(each.stop(_STOP_SECONDS) for each in (server, *self._replaced)),
                return_exceptions=True,
            )

    async def _start(self, handlers: Sequence[grpc.GenericRpcHandler]) -> grpc.aio.Server:
        server = grpc.aio.server(options=self._options(), maximum_concurrent_rpcs=_CALLS_MAX)
        server.add_generic_rpc_handlers(handlers)
        self._add_port(server)
        self._crashed = crashed = asyncio.Event()
        before = asyncio.all_tasks()
        await server.start()
        # gRPC's loop that takes calls ends with the first error, and tells nobody: a path that is
        # not UTF-8 is enough. It is a coroutine of Cython, unlike what else may have begun.
        for task in asyncio.all_tasks() - before:
            if not inspect.iscoroutine(task.get_coro()):
                task.add_done_callback(partial(_note_crash, crashed))
        return server

    async def _stops_by_request(self) -> bool:
        """Waits until the server is to stop, or its loop has ended; returns whether it is to."""
        tasks = [asyncio.create_task(each.wait()) for each in (self._stop, self._crashed)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        return self._stop.is_set()

    async def _replace(
        self, old: grpc.aio.Server, handlers: Sequence[grpc.GenericRpcHandler]
    ) -> grpc.aio.Server:
        """A new server on the same port. The calls of the old one may end, for some time."""
        event(_log, logging.ERROR, "the gRPC server ended after a malformed call: it starts again")
        self._replaced.append(old)
        if len(self._replaced) > _REPLACED_MAX:
            with contextlib.suppress(Exception):
                await self._replaced.popleft().stop(None)
        return await self._start(handlers)

    def _options(self) -> list[tuple[str, int]]:
        return [
            ("grpc.max_receive_message_length", self._settings.message_bytes_max + _RECEIVED_MORE),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 1),
            # From 1,000 waiting calls on, gRPC would cancel some, and Danube's client gives up.
            # Beyond our own limit it gets RESOURCE_EXHAUSTED, and sends again.
            ("grpc.server.max_pending_requests", _CALLS_MAX),
            ("grpc.server.max_pending_requests_hard_limit", _CALLS_MAX),
            ("grpc.max_allowed_incoming_connections", _connections_max()),
            # A consumer whose machine is gone is noticed, so that others get its messages.
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ]

    def _add_port(self, server: grpc.aio.Server) -> None:
        settings = self._settings
        try:
            if settings.cert_file is None or settings.key_file is None:
                server.add_insecure_port(self._address)
                return
            key, chain = Path(settings.key_file).read_bytes(), Path(settings.cert_file).read_bytes()
            server.add_secure_port(self._address, grpc.ssl_server_credentials([(key, chain)]))
        except RuntimeError as error:
            raise UsageError(
                f"cannot listen on {self._address}: {error}; choose another address with --broker"
            ) from error

    def stop(self) -> None:
        """Asks the server to stop. Call it on the event loop's thread or in a signal handler."""
        self._stop.set()

    def close(self) -> None:
        if self._reserved is not None:
            self._reserved.close()


def _note_crash(crashed: asyncio.Event, task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        crashed.set()


def _connections_max() -> int:
    """Leaves most file descriptors to the logs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _CONNECTIONS_MAX
    return max(min(soft // _DESCRIPTORS_SHARE, _CONNECTIONS_MAX), 16)
