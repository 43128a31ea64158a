"""The Python client: `forebay.connect` and, for asyncio, `forebay.connect_async`.

    with forebay.connect("127.0.0.1:6650") as client:
        with client.producer("orders", name="shop-1", idempotent=True) as producer:
            offset = producer.send(b"...", attributes={"k": "v"})
        for message in client.read("orders"): ...
        with client.consumer("orders", subscription="billing") as consumer:
            for message in consumer:
                consumer.ack(message)

Both have the same methods; those of asyncio are awaited. The client for threads runs an event loop
on a thread of its own, and all its methods may be called by any thread.

A connection that is lost is made again, with growing waits, for `timeout` seconds. An idempotent
producer then repeats what was not answered, and the server knows its numbers: nothing is stored
twice and nothing is lost. Another producer raises MaybeStored for these messages. A reader goes on
at its offset, and a consumer gets again what it has not acknowledged.

Beware: `send` waits for the answer of each message, `submit` does not. Use `submit` or `send_many`
for high rates.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from forebay.broker.async_client import AsyncClient
from forebay.broker.blocking import Client
from forebay.broker.connection import Connection

TIMEOUT: Final = 60.0


def connect(
    address: str,
    *,
    token: str | None = None,
    tls: bool = False,
    ca_file: str | Path | None = None,
    timeout: float = TIMEOUT,
) -> Client:
    """Returns a client of the server at `host:port`. It connects when it is used.

    `tls` checks the server's certificate with the system's CA certificates, `ca_file` with those in
    the file. `timeout` is how long calls try to reach a server that does not respond, in seconds.
    """

    def made() -> Connection:
        return Connection(address, token=token, tls=tls, ca_file=ca_file)

    return Client(made, timeout)


def connect_async(
    address: str,
    *,
    token: str | None = None,
    tls: bool = False,
    ca_file: str | Path | None = None,
    timeout: float = TIMEOUT,
) -> AsyncClient:
    """`connect` for asyncio. Call it in the event loop that uses it."""
    connection = Connection(address, token=token, tls=tls, ca_file=ca_file)
    return AsyncClient(connection, timeout)
