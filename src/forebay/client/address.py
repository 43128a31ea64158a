"""How to find the server of a data directory: it writes `server.json` there while it runs.

    {"url": "http://127.0.0.1:8650", "instance": "<32 hex digits>", "pid": 4711,
     "store": "<32 hex digits>", "broker": "http://127.0.0.1:6650"}

`instance` is new with each start of the server. A process that finds the expected instance in this
file sees the server's own directory, and can read it without the server. `store` is the same in
every run (`store.id` in the directory). A client that knows it checks it on every connection.
`broker` is the gRPC server's address, or null if there is none.

Beware: after a crash the file is still there. Before trusting it, ask the address for its instance,
as `find_server` does.
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
from forebay.settings import ServerAddress, StoreSettings

TOKEN_VARIABLE: Final = "FOREBAY_TOKEN"  # noqa: S105  # the name of a variable
_FILE_BYTES_MAX: Final = 4 * KIB
_ID: Final = re.compile(r"[0-9a-f]{32}")
_TIMEOUT_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server writes about itself into its data directory."""

    url: str
    instance: str
    pid: int
    store: str | None = None
    """None if an older version wrote the file."""
    broker: str | None = None
    """The URL of the gRPC server; None if there is none."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def server_file(data: Path | str) -> Path:
    return Path(data) / SERVER_FILE


def read_server_info(data: Path | str) -> ServerInfo | None:
    """Reads the server's file; None if it does not exist, cannot be read or is not valid."""
    try:
        with server_file(data).open("rb") as file:
            found: Any = json.loads(file.read(_FILE_BYTES_MAX))
        broker = found.get("broker")
        info = ServerInfo(
            str(found["url"]),
            str(found["instance"]),
            int(found["pid"]),
            found.get("store"),
            broker if isinstance(broker, str) else None,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    whole = info.url.startswith(("http://", "https://")) and is_id(info.instance)
    return info if whole and (info.store is None or is_id(info.store)) else None


def is_id(found: object) -> bool:
    """Whether `found` has the form of an id of a store or of a server's instance."""
    return isinstance(found, str) and _ID.fullmatch(found) is not None


def known_token(settings: StoreSettings | None) -> str | None:
    """Returns the token for requests: from the settings, else from `FOREBAY_TOKEN`, else None."""
    configured = None if settings is None else settings.admin.token
    return configured or os.environ.get(TOKEN_VARIABLE) or None


def find_server(settings: StoreSettings) -> ServerAddress | None:
    """Returns the address of the server that runs on the data directory; None if none responds."""
    info = None if settings.data is None else read_server_info(settings.data)
    if info is None:
        return None
    from forebay.client.http import ServerClient

    token, ca_file = known_token(settings), settings.admin.ca_file
    address = ServerAddress(info.url, info.instance, token, ca_file, info.store)
    try:
        # After a crash another program may listen at this address. It must not get the token.
        anonymous = replace(address, token=None, store=None)
        with ServerClient(anonymous, timeout_seconds=_TIMEOUT_SECONDS) as client:
            found = client.identity()
    except ForebayError:
        return None
    return address if found.instance == info.instance else None


def wal_root(settings: StoreSettings) -> Path:
    """Returns the directory of all topics' logs: `wal_root`, or `wal` in the data directory."""
    root = settings.wal_root
    return Path(settings.data or "") / "wal" if root is None else Path(root).absolute()
