"""From settings to a store.

The client of remote stores is imported only when one is asked for: it is large, and most commands
need none.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Final

from forebay.errors import InvalidSetting
from forebay.objects.backend import Backend
from forebay.objects.local import LocalBackend
from forebay.objects.memory import MemoryBackend
from forebay.objects.store import CloudStore
from forebay.settings import CloudSettings

_lock: Final = threading.Lock()
_in_memory: Final[dict[str, MemoryBackend]] = {}


def connect(settings: CloudSettings, data: Path | None = None) -> CloudStore:
    """The store that the settings name; below `data` if they name no directory.

    Nothing is sent yet: wrong credentials are found by the first request.
    """
    return CloudStore(_backend(settings, data))


def _backend(settings: CloudSettings, data: Path | None) -> Backend:
    if settings.backend in ("fs", "memory") and settings.options:
        raise InvalidSetting(f"the backend {settings.backend} has no options")
    if settings.backend == "memory":
        root = settings.root or ""
        with _lock:
            return _in_memory.setdefault(root, MemoryBackend(root))
    if settings.backend == "fs":
        if settings.root is None and data is None:
            raise InvalidSetting("cloud.root is needed: there is no data directory to put it in")
        return LocalBackend(settings.root or Path(data or "") / "objects")
    from forebay.objects.remote import RemoteBackend

    return RemoteBackend(settings)
