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


def event(logger: logging.Logger, level: int, text: str, /, **fields: object) -> None:
    """Logs what happened, with the fields behind it."""
    if logger.isEnabledFor(level):
        line = " ".join([text, *(f"{name}={_plain(value)}" for name, value in fields.items())])
        logger.log(level, "%s", line, extra={_FIELDS: (text, fields)}, stacklevel=2)


def _plain(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return json.dumps(text, ensure_ascii=False) if not text or " " in text else text


class JsonFormatter(logging.Formatter):
    """One line of JSON for each record: `at`, `level`, `logger`, `event`, and its fields."""

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
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)
