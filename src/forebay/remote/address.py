"""Where the server of a data directory is: a small file in it, written while the server runs.

    {"url": "http://127.0.0.1:8650", "instance": "<32 hex digits>", "pid": 4711}

A process that can read this file with the instance that it was told sees the server's own
directory, and needs no server to read it. After a crash the file stays: whoever finds it asks the
address which instance it is before believing it.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from forebay.errors import ForebayError
from forebay.format.names import SERVER_FILE
from forebay.limits import KIB
from forebay.remote.client import ServerClient
from forebay.settings import ServerAddress, StoreSettings

TOKEN_VARIABLE: Final = "FOREBAY_TOKEN"  # noqa: S105  # the name of a variable
_NOTE_BYTES_MAX: Final = 4 * KIB
_INSTANCE: Final = re.compile(r"[0-9a-f]{32}")
_LOOK_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class ServerNote:
    """What a server says of itself in its data directory."""

    url: str
    instance: str
    pid: int

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def server_file(data: Path | str) -> Path:
    return Path(data) / SERVER_FILE


def read_note(data: Path | str) -> ServerNote | None:
    """What the file says; None if there is none here, or it cannot be read or is no such note."""
    try:
        with server_file(data).open("rb") as file:
            found: Any = json.loads(file.read(_NOTE_BYTES_MAX))
        note = ServerNote(str(found["url"]), str(found["instance"]), int(found["pid"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    whole = note.url.startswith(("http://", "https://")) and _INSTANCE.fullmatch(note.instance)
    return note if whole else None


def known_token(settings: StoreSettings | None) -> str | None:
    """The token that requests bring: of the configuration, else of the environment."""
    configured = None if settings is None else settings.admin.token
    return configured or os.environ.get(TOKEN_VARIABLE) or None


def find_server(settings: StoreSettings) -> ServerAddress | None:
    """The server that runs on the store's data directory now; None if none answers."""
    note = None if settings.data is None else read_note(settings.data)
    if note is None:
        return None
    address = ServerAddress(note.url, note.instance, known_token(settings), settings.admin.ca_file)
    try:
        # After a crash another program may have the address: it is to know no token.
        with ServerClient(replace(address, token=None), timeout_seconds=_LOOK_SECONDS) as client:
            answer = client.json("GET", "/healthz")
    except ForebayError:
        return None
    return address if answer.get("instance") == note.instance else None
