"""`ServerClients`: connections to one server, kept for the next request, for many threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from typing import Final

from forebay.errors import ForebayError, ServiceUnavailable
from forebay.remote import ServerClient
from forebay.settings import ServerAddress

_SECONDS_MAX: Final = 60.0
"""Of silence."""
_KEPT_MAX: Final = 8


class ServerClients:
    """Thread-safe. A connection is its borrower's alone; after an error it is closed."""

    def __init__(self, address: ServerAddress) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._idle: list[ServerClient] = []
        self._pid = os.getpid()

    @contextmanager
    def borrowed(self, *, fresh: bool = False) -> Iterator[ServerClient]:
        """A client, whose answers are to be read to their end inside the block.

        An answer that breaks off is ServiceUnavailable. A kept connection may have been closed by
        the server; what cannot be sent twice wants a fresh one.
        """
        client = self._new() if fresh else self._take()
        whole = False
        try:
            yield client
            whole = True
        except ForebayError:
            raise
        except (OSError, HTTPException) as error:
            raise ServiceUnavailable(
                f"the server at {self.address.url} broke off: {error!r}"
            ) from error
        finally:
            if whole:
                self._give_back(client)
            else:
                client.close()

    def _take(self) -> ServerClient:
        with self._lock:
            if self._pid != os.getpid():  # a connection of the process that forked is its own
                self._idle, self._pid = [], os.getpid()
            if self._idle:
                return self._idle.pop()
        return self._new()

    def _new(self) -> ServerClient:
        return ServerClient(self.address, timeout_seconds=_SECONDS_MAX)

    def _give_back(self, client: ServerClient) -> None:
        with self._lock:
            if len(self._idle) < _KEPT_MAX:
                self._idle.append(client)
                return
        client.close()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for client in idle:
            client.close()
