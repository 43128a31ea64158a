"""Which server a command goes through: the one that is named, or the one that runs on its store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click

from forebay.errors import ServiceRefused, UsageError
from forebay.format.names import SERVER_FILE
from forebay.settings import ServerAddress, StoreSettings

if TYPE_CHECKING:
    from forebay.remote import ServerClient

url_option = click.option(
    "--url",
    metavar="URL",
    help="A running server, such as http://127.0.0.1:8650.  [default: the one that runs on the "
    "data directory, if one does]",
)


def chosen_server(settings: StoreSettings, url: str | None) -> ServerAddress | None:
    """The server to ask; None where the command works on the data directory itself."""
    if url is None:
        if settings.data is None or not (Path(settings.data) / SERVER_FILE).exists():
            return None  # the client of a server takes a while to import
        from forebay.remote import find_server

        return find_server(settings)
    from forebay.remote.address import known_token

    try:
        parts = urlsplit(url)
        right = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:
        right = False
    if not right:
        raise UsageError(f"--url is {url[:80]!r}; it must be like http://127.0.0.1:8650")
    return ServerAddress(url, None, known_token(settings), settings.admin.ca_file)


def connected(address: ServerAddress) -> ServerClient:
    """A client of the store that is there now, and of no other that may come to be there."""
    from forebay.remote import ServerClient

    client = ServerClient(address)
    client.pin()
    return client


def refused_token(error: ServiceRefused, address: ServerAddress) -> ServiceRefused:
    """Says what to do where the server did not take the token, or wants one."""
    if vars(error).get("status") != 401:
        return error
    brought = "wants a token" if address.token is None else "does not take the token"
    return ServiceRefused(
        f"the server at {address.url} {brought}: set admin.token in the configuration, or "
        "FOREBAY_TOKEN"
    )
