"""Errors as HTTP responses: `{"error": {"kind": "OffsetOutOfRange", "message": "...", ...}}`.

Below PULSAR_PATHS there is a `reason` beside it, the message, which Pulsar's clients show.

`status_of` is where an error gets its status. The kind is the name of the class in `forebay.errors`
and the error's fields come with it, so that a client can raise the same error again. An exception
that is not a ForebayError is a bug: the response is a 500, and its text is only in the log.

`"taken": false` says that nothing of the request was applied, so that it can be sent again. Where
it is missing from the response to a request that changes the store, that is not known.
"""

from __future__ import annotations

import copy
import errno
import json
import logging
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Final

from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from forebay.admin.records import Record, json_response
from forebay.errors import (
    CommitRefused,
    DiskError,
    ForebayError,
    IncompatibleSchema,
    LogClosed,
    LogLocked,
    LogStopped,
    LostOffsets,
    MessageTooLarge,
    ObjectExists,
    OffloadInProgress,
    OffsetOutOfRange,
    SchemaMismatch,
    SchemasNotInstalled,
    ServiceRefused,
    ServiceUnavailable,
    SubscriptionBusy,
    TooManySubscriptions,
    TopicConflict,
    TopicDeleted,
    TopicFenced,
    TopicKindConflict,
    TopicOwned,
    UnknownSchema,
    UnknownSubscription,
    UnknownTopic,
    UsageError,
    WaitTimeout,
)
from forebay.logs import event
from forebay.metrics import Counter


class ErrorFields(Struct, frozen=True):
    """Some kinds of errors have more fields, such as `start` and `end`."""

    kind: Annotated[str, Meta(description="The name of the error's class in forebay.errors.")]
    message: Annotated[str, Meta(description="What is wrong, where, and what to do.")]
    taken: (
        Annotated[
            bool,
            Meta(
                description="`false`: nothing of the request was applied. Absent: that is unknown."
            ),
        ]
        | UnsetType
    ) = UNSET


class Error(Record, frozen=True):
    error: ErrorFields


class Refused(Exception):
    """A request that is refused with this status, which no error of `forebay.errors` has."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


PULSAR_PATHS: Final = "/admin/v2/"
_log: Final = logging.getLogger("forebay.admin")
ERRORS: Final = Counter(
    "forebay_http_errors_total", "Requests that failed, by kind of error.", ["kind"]
)
_STATUS: Final[Sequence[tuple[type[ForebayError], int]]] = (
    (LogStopped, 503),
    (UnknownTopic, 404),
    (UnknownSubscription, 404),
    (TooManySubscriptions, 409),
    (SubscriptionBusy, 409),
    (TopicKindConflict, 409),
    (TopicDeleted, 404),
    (TopicConflict, 409),
    (UnknownSchema, 404),
    (IncompatibleSchema, 409),
    (SchemaMismatch, 409),
    (SchemasNotInstalled, 501),
    (MessageTooLarge, 413),
    (UsageError, 400),
    (LostOffsets, 410),
    (OffsetOutOfRange, 416),
    (LogLocked, 409),
    (TopicOwned, 409),
    (CommitRefused, 409),
    (OffloadInProgress, 409),
    (TopicFenced, 503),
    (LogClosed, 503),
    (WaitTimeout, 504),
    (ServiceUnavailable, 503),
    (ServiceRefused, 502),
    (ObjectExists, 409),
)
"""The first class that the error is an instance of decides."""
_DISK_FULL: Final = {errno.ENOSPC, errno.EDQUOT}
RETRY_SECONDS: Final = 1
_SHOWN: Final = 200


def status_of(error: ForebayError) -> int:
    """507 for a full disk, whatever the error; 500 for one that the table does not have."""
    if _is_disk_full(error):
        return 507
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def _is_disk_full(error: BaseException) -> bool:
    """Whether a full disk caused it: the log's, or the catalog's."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _DISK_FULL:
            return True
        if isinstance(cause, sqlite3.Error) and cause.sqlite_errorcode == sqlite3.SQLITE_FULL:
            return True
        cause = cause.__cause__
    return False


def error_fields(error: ForebayError) -> dict[str, Any]:
    """The error as JSON has it: its kind, its message and its fields."""
    fields = {
        name: value
        for name, value in vars(error).items()
        if isinstance(value, str | int) or value is None
    }
    if isinstance(error, DiskError):
        fields["errno"] = error.errno
    return {"kind": type(error).__name__, "message": str(error), **fields}


@contextmanager
def nothing_taken() -> Iterator[None]:
    """Marks an error raised in the block with `"taken": false`: nothing was changed before it."""
    try:
        yield
    except ForebayError as error:
        # A copy: the same error object may be raised to other requests, which did change something.
        marked = copy.copy(error)
        vars(marked)["taken"] = False
        raise marked from error


def error_response(status: int, kind: str, message: str, **fields: Any) -> Response:
    """A counted error response, with `Retry-After` where it helps to try again."""
    ERRORS.add(1, kind)
    headers = {"Retry-After": str(RETRY_SECONDS)} if status in {429, 503, 507} else None
    body = {"error": {"kind": kind, "message": message, **fields}}
    return json_response(body, status, headers)


def in_form_of(path: str, response: Response) -> Response:
    """Returns an error response in the form that the clients of a path expect."""
    if not path.startswith(PULSAR_PATHS):
        return response
    body = json.loads(bytes(response.body))
    found = json_response({"reason": body["error"]["message"], **body}, response.status_code)
    kept = {"content-type", "content-length"}
    found.headers.update(
        {name: value for name, value in response.headers.items() if name not in kept}
    )
    return found


def log_bug(error: Exception, *, where: str) -> dict[str, str]:
    """Logs an exception that is a bug, and returns the fields of the error that a client sees."""
    event(_log, logging.ERROR, "a request failed", trace=error, where=where, error=repr(error))
    return {"kind": "InternalError", "message": "the server failed; see its log"}


# ---- the application's exception handlers ------------------------------------------------------


async def on_forebay_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ForebayError)
    fields = error_fields(error)
    response = error_response(status_of(error), fields.pop("kind"), fields.pop("message"), **fields)
    return in_form_of(request.url.path, response)


async def on_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return in_form_of(request.url.path, error_response(error.status, "UsageError", str(error)))


async def on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code == 404:
        message = f"there is nothing at {request.url.path[:_SHOWN]}"
    elif error.status_code == 405:
        message = f"{request.url.path[:_SHOWN]} does not allow {request.method}"
    response = error_response(error.status_code, "UsageError", message)
    response.headers.update(error.headers or {})
    return in_form_of(request.url.path, response)


async def on_bug(request: Request, error: Exception) -> Response:
    fields = log_bug(error, where=f"{request.method} {request.url.path}")
    response = error_response(500, fields["kind"], fields["message"])
    return in_form_of(request.url.path, response)
