"""Structured log lines: an event in plain words, and fields.

The library logs through `logging`, below the logger `forebay`, and does not configure it. A line
reads `object committed topic=/default/orders object=data-0-9.dnb1`; `JsonFormatter` writes the same
as a JSON object. Warnings and errors are counted in `forebay_errors_total`, even if no handler
prints them. Their kind is the class of the error, or the text of the event if there is no error.

Beware: fields are for names, numbers and errors. Never pass a secret, a payload or an option of the
object store.
"""

from __future__ import annotations

import json
import logging
import time
from math import isfinite
from typing import Any, Final

from forebay.metrics import Counter

ERRORS: Final = Counter(
    "forebay_errors_total",
    "Warnings and errors that were logged, by the class of the error, otherwise by the event.",
    ["kind"],
)
_FIELDS: Final = "forebay_fields"
_QUOTED: Final = frozenset(' "=\\')
"""Values with one of these characters are quoted, as in JSON."""


def event(
    logger: logging.Logger,
    level: int,
    text: str,
    /,
    trace: BaseException | None = None,
    **fields: object,
) -> None:
    """Logs `text` followed by the fields, and the traceback of `trace`; counts warnings and errors.

    `text` must be constant for a kind of event, because it may become a label of the metric.
    """
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
    """The value as text; an error with an empty message is shown by its `repr`."""
    return str(value) or repr(value) if isinstance(value, BaseException) else str(value)


def _plain(value: object) -> str:
    """The value on one line, quoted if needed, so that no value can forge a second log line."""
    text = f"{value:.3f}" if isinstance(value, float) else _words(value)
    plain = text.isprintable() and not set(text) & _QUOTED
    return text if text and plain else json.dumps(text, ensure_ascii=not text.isprintable())


def _value(value: object) -> object:
    """The value in JSON: numbers, flags and null as they are, all else as in the text.

    A topic's name is a tuple in Python, and would become a list.
    """
    if isinstance(value, float) and not isfinite(value):
        return str(value)  # JSON has no infinity
    return value if value is None or isinstance(value, bool | int | float) else _words(value)


def fields_of(record: logging.LogRecord) -> tuple[str, dict[str, object]]:
    """The event and its fields; for a record that `event` did not log, the message and none."""
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
            **{name: _value(value) for name, value in fields.items()},
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class ServerFormatter(logging.Formatter):
    """Text with time and level, for servers: `2026-01-31T12:00:00.000Z error upload failed`."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{_moment(record)} {record.levelname.lower()} {super().format(record)}"


def _moment(record: logging.LogRecord) -> str:
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{at}.{int(record.msecs):03d}Z"
