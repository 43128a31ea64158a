"""What settings are checked with: each takes the owner and the names of its fields.

All raise InvalidSetting with a message that starts with the field's name, which is what the
configuration file's loader puts the file, the line and the section in front of.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from forebay.errors import InvalidSetting
from forebay.limits import OFFSET_MAX

_SECRET: Final = re.compile(
    r"secret|passw|passphrase|token|credential|signature|(access|account|private|shared)key"
    r"|(?<![a-z])(key|sas|sig|pwd)(?![a-z])",
    re.IGNORECASE,
)


def is_secret(name: str) -> bool:
    """Whether the value of a setting of that name is kept from errors, logs and dumps.

    Names of files are not secret, what is in them is: `key_file` is shown.
    """
    return _SECRET.search(name) is not None and not name.lower().endswith(("file", "path"))


def _shown(name: str, value: object) -> str:
    return "***" if is_secret(name) else repr(value)


def require(
    owner: object,
    *names: str,
    least: float,
    most: float = OFFSET_MAX,
    whole: bool = False,
    optional: bool = False,
) -> None:
    """InvalidSetting unless each is a number in `least..most`, or None where that is allowed."""
    kind = "whole number" if whole else "number"
    for name in names:
        value = getattr(owner, name)
        if optional and value is None:
            continue
        right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not right or not least <= value <= most:  # which refuses nan too
            raise InvalidSetting(
                f"{name} is {value!r}; it must be a {kind} of at least {least} and at most {most}"
            )


def as_path(owner: object, name: str) -> None:
    """Makes the setting a Path where it is a str; InvalidSetting where it is neither nor None."""
    value = getattr(owner, name)
    if isinstance(value, str) and value and "\0" not in value:
        object.__setattr__(owner, name, Path(value))
    elif value is not None and not isinstance(value, Path):
        raise InvalidSetting(f"{name} is {value!r}; it must be a path, or None")


def require_type(owner: object, name: str, kind: type, *, optional: bool = False) -> None:
    value = getattr(owner, name)
    if not isinstance(value, kind) and not (optional and value is None):
        raise InvalidSetting(f"{name} is {_shown(name, value)}; it must be a {kind.__name__}")


def require_choice(owner: object, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(owner, name)
    if value not in choices:
        raise InvalidSetting(f"{name} is {value!r}; it must be one of {', '.join(choices)}")


def as_options(owner: object, name: str) -> None:
    """Makes the setting a dict of its own; InvalidSetting unless it maps text to text."""
    value = getattr(owner, name)
    if not isinstance(value, Mapping) or not all(
        isinstance(key, str) and isinstance(each, str) for key, each in value.items()
    ):
        raise InvalidSetting(f"{name} is not a mapping of text to text")
    object.__setattr__(owner, name, dict(value))


def require_address(owner: object, name: str) -> None:
    value = getattr(owner, name)
    host, colon, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    digits = port.isascii() and port.isdigit() and len(port) <= 5
    if not (host and colon and digits and int(port) < 65536):
        raise InvalidSetting(f"{name} is {value!r}; it must be host:port, such as 127.0.0.1:8650")


def holds_password(url: str) -> bool:
    """Whether it is `scheme://user:password@...`."""
    return re.search(r"://[^/@]*:[^/]*@", url) is not None
