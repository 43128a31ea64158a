"""Requests as bytes and answers as they are, for tests of what a server says."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from support.served import Served

SECONDS = 60.0
NDJSON = {"Content-Type": "application/x-ndjson"}


@dataclass(frozen=True, slots=True)
class Said:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.body.splitlines()]

    @property
    def error(self) -> tuple[int, str, str]:
        """Status, kind and message."""
        told = self.json()["error"]
        return self.status, told["kind"], told["message"]


class AtUrl(Protocol):
    """A server that is somewhere."""

    @property
    def url(self) -> str: ...


def ask(
    server: AtUrl,
    method: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
) -> Said:
    """One request on a connection of its own."""
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=SECONDS)
    try:
        connection.request(method, path, body=body, headers=dict(headers or {}))
        response = connection.getresponse()
        return Said(response.status, response.headers, response.read())
    finally:
        connection.close()


def plain_socket(server: Served) -> socket.socket:
    parts = urlsplit(server.url)
    return socket.create_connection((parts.hostname or "", parts.port or 0), timeout=SECONDS)
