"""Structured log lines: an event in plain words, and fields.

The library logs through `logging`, below the logger `forebay`, and configures nothing. A line
reads `object committed topic=/default/orders object=data-0-9.dnb1`; `JsonFormatter` writes the
same as one JSON object.

What a caller gets wrong: fields are for names, numbers and errors. Never a secret, a payload or
an option of the store.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any, Final

_FIELDS: Final = "forebay_fields"
_QUOTED: Final = frozenset(' "=\\')
"""Values with one of these are quoted, as JSON does it."""


def event(
    logger: logging.Logger,
    level: int,
    text: str,
    /,
    trace: BaseException | None = None,
    **fields: object,
) -> None:
    """Logs what happened, with the fields behind it, and the traceback of `trace` below it."""
    if logger.isEnabledFor(level):
        line = " ".join([text, *(f"{name}={_plain(value)}" for name, value in fields.items())])
        logger.log(level, "%s", line, exc_info=trace, extra={_FIELDS: (text, fields)}, stacklevel=2)


def _plain(value: object) -> str:
    """On one line, whatever it is: who can name a topic or raise an error must not forge a line."""
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    plain = text.isprintable() and not set(text) & _QUOTED
    return text if text and plain else json.dumps(text, ensure_ascii=not text.isprintable())


class JsonFormatter(logging.Formatter):
    """One line of JSON for each record: `at`, `level`, `logger`, `event`, its fields, `trace`."""

    def format(self, record: logging.LogRecord) -> str:
        plain: tuple[str, dict[str, object]] = (record.getMessage(), {})
        text, fields = getattr(record, _FIELDS, plain)
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "at": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": text,
            **fields,
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)
