"""`Notices`: the last warnings and errors of the process, for people who look at the page.

What is said again and again is one notice with a count and the time of the last. Which notice a
line belongs to is told by its words and by the fields that name things, so that two topics with
the same trouble are two notices.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from forebay.logs import fields_of

NOTICES_MAX: Final = 200
TEXT_MAX: Final = 1000
"""Characters of a text or of a field; what is longer is cut, and says so."""
FIELDS_MAX: Final = 20
_NAMING: Final = ("topic", "kind", "job", "file", "object", "path")


@dataclass(frozen=True, slots=True)
class Notice:
    level: str
    """`warning` or `error`."""
    text: str
    logger: str
    first: float
    """When it was said first, and last: seconds since 1970-01-01 UTC."""
    last: float
    count: int = 1
    fields: Mapping[str, str] = field(default_factory=dict)
    """As they were the last time."""


class Notices(logging.Handler):
    """A handler for the logger `forebay`. Thread-safe; keeps at most `most` notices."""

    def __init__(self, most: int = NOTICES_MAX) -> None:
        super().__init__(logging.WARNING)
        self._most = most
        self._notices: OrderedDict[tuple[str, ...], Notice] = OrderedDict()
        self._guard = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        text, given = fields_of(record)
        fields = {name: _cut(str(value)) for name, value in list(given.items())[:FIELDS_MAX]}
        naming = (fields.get(name, "") for name in _NAMING)
        key = (record.levelname, record.name, _cut(text), *naming)
        level = "error" if record.levelno >= logging.ERROR else "warning"
        said = Notice(level, _cut(text), record.name, record.created, record.created, 1, fields)
        with self._guard:
            before = self._notices.pop(key, None)
            if before is not None:
                said = replace(said, first=before.first, count=before.count + 1)
            self._notices[key] = said
            while len(self._notices) > self._most:
                self._notices.popitem(last=False)

    def recent(self, limit: int = NOTICES_MAX) -> list[Notice]:
        """The newest first."""
        with self._guard:
            found = list(self._notices.values())
        return found[::-1][:limit]


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_MAX else text[:TEXT_MAX] + " …"
