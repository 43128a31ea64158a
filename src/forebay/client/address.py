"""Where the server of a data directory is: a small file in it, written while the server runs.

    {"url": "http://127.0.0.1:8650", "instance": "<32 hex digits>", "pid": 4711,
     "store": "<32 hex digits>"}

A process that can read this file with the instance that it was told sees the server's own
directory, and needs no server to read it. After a crash the file stays: whoever finds it asks the
address which instance it is before believing it. The store stays the same from one run to the next
(`store.id` in the directory): a client that was given it holds every connection to it.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from forebay.client.http import ServerClient
from forebay.errors import ForebayError
from forebay.format.names import SERVER_FILE
from forebay.limits import KIB
from forebay.settings import ServerAddress, StoreSettings

TOKEN_VARIABLE: Final = "FOREBAY_TOKEN"  # noqa: S105  # the name of a variable
_NOTE_BYTES_MAX: Final = 4 * KIB
_ID: Final = re.compile(r"[0-9a-f]{32}")
_LOOK_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class ServerNote:
    """What a server says of itself in its data directory."""

    url: str
    instance: str
    pid: int
    store: str | None = None
    """None in a note of an older version."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def server_file(data: Path | str) -> Path:
    return Path(data) / SERVER_FILE


def read_note(data: Path | str) -> ServerNote | None:
    """What the file says; None if there is none here, or it cannot be read or is no such note."""
    try:
        with server_file(data).open("rb") as file:
            found: Any = json.loads(file.read(_NOTE_BYTES_MAX))
        note = ServerNote(
            str(found["url"]), str(found["instance"]), int(found["pid"]), found.get("store")
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    whole = note.url.startswith(("http://", "https://")) and is_id(note.instance)
    return note if whole and (note.store is None or is_id(note.store)) else None


def is_id(found: object) -> bool:
    """Whether it can be the id of a store, or of a run of a server."""
    return isinstance(found, str) and _ID.fullmatch(found) is not None


def known_token(settings: StoreSettings | None) -> str | None:
    """The token that requests bring: of the configuration, else of the environment."""
    configured = None if settings is None else settings.admin.token
    return configured or os.environ.get(TOKEN_VARIABLE) or None


def find_server(settings: StoreSettings) -> ServerAddress | None:
    """The server that runs on the store's data directory now; None if none answers."""
    note = None if settings.data is None else read_note(settings.data)
    if note is None:
        return None
    token, ca_file = known_token(settings), settings.admin.ca_file
    address = ServerAddress(note.url, note.instance, token, ca_file, note.store)
    try:
        # After a crash another program may have the address: it is to know no token.
        nobody = replace(address, token=None, store=None)
        with ServerClient(nobody, timeout_seconds=_LOOK_SECONDS) as client:
            found = client.who()
    except ForebayError:
        return None
    return address if found.instance == note.instance else None
