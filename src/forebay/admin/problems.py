"""Errors as answers: `{"error": {"kind": "OffsetOutOfRange", "message": "...", ...}}`.

The kind is the name of the class in `forebay.errors`, whose fields come with it, so that a client
raises the same again. What nobody raises on purpose is a bug: its words stay in the log.

`"taken": false` says that nothing of the request was taken, for sure: it can be sent again. Where
it is missing from the answer to something that changes the store, nobody knows.
"""

from __future__ import annotations

import copy
import errno
import logging
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
_SHOWN: Final = 200


def status_of(error: ForebayError) -> int:
    if _is_full(error):
        return 507
    if isinstance(error, LogStopped):
        return 503
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def _is_full(error: BaseException) -> bool:
    """Whether a full disk is behind it: the log's, or the catalog's."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _FULL:
            return True
        if isinstance(seen, sqlite3.Error) and seen.sqlite_errorcode == sqlite3.SQLITE_FULL:
            return True
        seen = seen.__cause__
    return False


def facts_of(error: ForebayError) -> dict[str, Any]:
    """What goes over the wire of an error."""
    fields = {
        name: each
        for name, each in vars(error).items()
        if isinstance(each, str | int) or each is None
    }
    if isinstance(error, DiskError):
        fields["errno"] = error.errno
    return {"kind": type(error).__name__, "message": str(error), **fields}


@contextmanager
def nothing_taken() -> Iterator[None]:
    """What is raised in the block is told with `"taken": false`: nothing was changed before it."""
    try:
        yield
    except ForebayError as error:
        told = copy.copy(error)  # the error itself may be raised to others too, of whom it is false
        vars(told)["taken"] = False
        raise told from error


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


async def on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code == 404:
        message = f"there is nothing at {request.url.path[:_SHOWN]}"
    elif error.status_code == 405:
        message = f"{request.method} is not for {request.url.path[:_SHOWN]}"
    answer = problem(error.status_code, "UsageError", message)
    answer.headers.update(error.headers or {})
    return answer


async def on_bug(request: Request, error: Exception) -> Response:
    told = told_bug(error, where=f"{request.method} {request.url.path}")
    return problem(500, told["kind"], told["message"])


def told_bug(error: Exception, *, where: str) -> dict[str, str]:
    """Logs what nobody raised on purpose, and answers what its client is told."""
    event(_log, logging.ERROR, "a request failed", trace=error, where=where, error=repr(error))
    return {"kind": "InternalError", "message": "the server failed; its log says why"}
