"""Errors as answers: `{"error": {"kind": "OffsetOutOfRange", "message": "...", ...}}`.

The kind is the name of the class in `forebay.errors`, whose fields come with it, so that a client
raises the same again. What nobody raises on purpose is a bug: its words stay in the log.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from forebay.errors import (
    CommitRefused,
    DiskError,
    ForebayError,
    LogClosed,
    LogLocked,
    LogStopped,
    LostOffsets,
    MessageTooLarge,
    OffsetOutOfRange,
    ServiceRefused,
    ServiceUnavailable,
    TopicFenced,
    TopicOwned,
    UnknownTopic,
    UsageError,
    WaitTimeout,
)
from forebay.logs import event
from forebay.metrics import Counter

_log: Final = logging.getLogger("forebay.admin")
ERRORS: Final = Counter(
    "forebay_http_errors_total", "Requests that were answered with an error, by kind.", ["kind"]
)
_STATUS: Final[Sequence[tuple[type[ForebayError], int]]] = (
    (UnknownTopic, 404),
    (MessageTooLarge, 413),
    (UsageError, 400),
    (LostOffsets, 410),
    (OffsetOutOfRange, 416),
    (LogLocked, 409),
    (TopicOwned, 409),
    (CommitRefused, 409),
    (TopicFenced, 503),
    (LogClosed, 503),
    (WaitTimeout, 504),
    (ServiceUnavailable, 503),
    (ServiceRefused, 502),
)
"""The first that fits counts."""
_FULL: Final = {errno.ENOSPC, errno.EDQUOT}
RETRY_SECONDS: Final = 1


def status_of(error: ForebayError) -> int:
    if isinstance(error, DiskError):
        return 507 if error.errno in _FULL else 500
    if isinstance(error, LogStopped):
        cause = error.__cause__
        return 507 if isinstance(cause, OSError) and cause.errno in _FULL else 503
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def facts_of(error: ForebayError) -> dict[str, Any]:
    """What goes over the wire of an error."""
    fields = {
        name: each
        for name, each in vars(error).items()
        if isinstance(each, str | int) or each is None
    }
    return {"kind": type(error).__name__, "message": str(error), **fields}


def problem(status: int, kind: str, message: str, **fields: Any) -> JSONResponse:
    """An answer that says what is wrong; `Retry-After` where it helps to come back."""
    ERRORS.add(1, kind)
    headers = {"Retry-After": str(RETRY_SECONDS)} if status in {429, 503, 507} else None
    body = {"error": {"kind": kind, "message": message, **fields}}
    return JSONResponse(body, status, headers)


async def on_forebay_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ForebayError)
    facts = facts_of(error)
    return problem(status_of(error), facts.pop("kind"), facts.pop("message"), **facts)


async def on_http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = problem(error.status_code, "UsageError", error.detail)
    answer.headers.update(error.headers or {})
    return answer


async def on_bug(request: Request, error: Exception) -> Response:
    event(
        _log,
        logging.ERROR,
        "a request failed",
        trace=error,
        method=request.method,
        path=request.url.path,
        error=repr(error),
    )
    return problem(500, "InternalError", "the server failed; its log says why")
