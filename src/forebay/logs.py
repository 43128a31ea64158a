"""Structured log lines: an event in plain words, and fields.

The library logs through `logging`, below the logger `forebay`, and configures nothing. A line
reads `object committed topic=/default/orders object=data-0-9.dnb1`; `JsonFormatter` writes the
same as one JSON object. Warnings and errors are counted by their kind, whether or not a handler
takes them: the class of the error, or the event itself if there is none.

What a caller gets wrong: fields are for names, numbers and errors. Never a secret, a payload or
an option of the store.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any, Final

from forebay.metrics import Counter

ERRORS: Final = Counter(
    "forebay_errors_total",
    "What was logged as a warning or an error, by the class of the error, else by the event.",
    ["kind"],
)
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
    if level >= logging.WARNING:
        ERRORS.add(1, _kind(text, trace, fields))
    if logger.isEnabledFor(level):
        line = " ".join([text, *(f"{name}={_plain(value)}" for name, value in fields.items())])
        logger.log(level, "%s", line, exc_info=trace, extra={_FIELDS: (text, fields)}, stacklevel=2)


def _kind(text: str, trace: BaseException | None, fields: dict[str, object]) -> str:
    error = fields.get("error", trace)
    error = error if isinstance(error, BaseException) else trace
    return text if error is None else type(error).__name__


def _words(value: object) -> str:
    """Of an error without words, its name."""
    return str(value) or repr(value) if isinstance(value, BaseException) else str(value)


def _plain(value: object) -> str:
    """On one line: the name of a topic or the text of an error must not forge a second one."""
    text = f"{value:.3f}" if isinstance(value, float) else _words(value)
    plain = text.isprintable() and not set(text) & _QUOTED
    return text if text and plain else json.dumps(text, ensure_ascii=not text.isprintable())


def fields_of(record: logging.LogRecord) -> tuple[str, dict[str, object]]:
    """The event and its fields; of a line that `event` did not write, the line alone."""
    plain: tuple[str, dict[str, object]] = (record.getMessage(), {})
    found: tuple[str, dict[str, object]] = getattr(record, _FIELDS, plain)
    return found


class JsonFormatter(logging.Formatter):
    """One line of JSON for each record: `at`, `level`, `logger`, `event`, its fields, `trace`."""

    def format(self, record: logging.LogRecord) -> str:
        text, fields = fields_of(record)
        line: dict[str, Any] = {
            "at": _moment(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": text,
            **fields,
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=_words, ensure_ascii=False)


class ServerFormatter(logging.Formatter):
    """Text, for a process that runs for long: `2026-01-31T12:00:00.000Z error upload failed`."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{_moment(record)} {record.levelname.lower()} {super().format(record)}"


def _moment(record: logging.LogRecord) -> str:
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{at}.{int(record.msecs):03d}Z"
