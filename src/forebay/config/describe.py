"""Settings back to the shape of the file, for people to look at: no secret is in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from forebay.checks import is_secret
from forebay.config.keys import LOOSE, SECTIONS, keys_of
from forebay.settings import StoreSettings

HIDDEN: Final = "***"
_USER: Final = re.compile(r"(?<=://)[^/@\s]*:[^/@\s]*(?=@)")
_QUERY: Final = re.compile(r"(://[^?\s]*\?)\S+")


def describe(settings: StoreSettings) -> dict[str, Any]:
    """The settings as plain dicts, lists, texts and numbers, all keys given.

    Secrets, and passwords and queries of URLs, are `***`. Without any, a file of what it returns
    loads as the same settings.
    """
    found: dict[str, Any] = {}
    for path, name in LOOSE.items():
        _section(found, path[:-1])[path[-1]] = _plain(path[-1], getattr(settings, name))
    for path, kind in SECTIONS.items():
        owner = getattr(settings, path[-1])
        section = _section(found, path)
        for name in keys_of(kind):
            section[name] = _plain(name, getattr(owner, name))
    found["storage"]["wal"]["dir"] = _plain("dir", settings.wal_root)
    return found


def _section(found: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for name in path:
        found = found.setdefault(name, {})
    return found


def _plain(name: str, value: object) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(key, each) for key, each in value.items()}
    if value is not None and is_secret(name):
        return HIDDEN
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str):
        return _QUERY.sub(rf"\1{HIDDEN}", _USER.sub(HIDDEN, value))
    if isinstance(value, list | tuple):
        return [_plain(name, each) for each in value]
    return value
