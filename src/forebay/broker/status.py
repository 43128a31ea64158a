"""Errors as gRPC status codes: `status_of` is the only place where an error gets its code.

Danube's clients act on the code. They try again after UNAVAILABLE, DEADLINE_EXCEEDED and
RESOURCE_EXHAUSTED, and raise everything else to the application at once. So an error that passes by
itself, such as a log that is being opened again, must be UNAVAILABLE, and an error that does not
must never be.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import grpc

from forebay.errors import (
    CommitRefused,
    ForebayError,
    IncompatibleSchema,
    LogClosed,
    LogLocked,
    LogStopped,
    LostOffsets,
    MessageTooLarge,
    OffsetOutOfRange,
    OutOfSequence,
    SchemaMismatch,
    SchemasNotInstalled,
    ServiceError,
    SubscriptionBusy,
    TooManyProducers,
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

_log: Final = logging.getLogger("forebay.broker")
ERRORS: Final = Counter(
    "forebay_broker_errors_total", "Calls that failed, by method and status.", ["method", "status"]
)
_DETAILS_CHARACTERS_MAX: Final = 1000
"""Clients refuse trailers that are too large, with a status of their own. An error may quote what
the client sent."""

_STATUS: Final[Sequence[tuple[type[ForebayError], grpc.StatusCode]]] = (
    (UnknownTopic, grpc.StatusCode.NOT_FOUND),
    (TopicDeleted, grpc.StatusCode.NOT_FOUND),
    (UnknownSubscription, grpc.StatusCode.NOT_FOUND),
    (SubscriptionBusy, grpc.StatusCode.PERMISSION_DENIED),
    (TooManySubscriptions, grpc.StatusCode.PERMISSION_DENIED),
    (TopicConflict, grpc.StatusCode.ALREADY_EXISTS),
    (TopicKindConflict, grpc.StatusCode.FAILED_PRECONDITION),
    (UnknownSchema, grpc.StatusCode.NOT_FOUND),
    (IncompatibleSchema, grpc.StatusCode.FAILED_PRECONDITION),
    (SchemaMismatch, grpc.StatusCode.FAILED_PRECONDITION),
    (SchemasNotInstalled, grpc.StatusCode.UNIMPLEMENTED),
    (MessageTooLarge, grpc.StatusCode.INVALID_ARGUMENT),
    (LostOffsets, grpc.StatusCode.DATA_LOSS),
    (OffsetOutOfRange, grpc.StatusCode.OUT_OF_RANGE),
    (UsageError, grpc.StatusCode.INVALID_ARGUMENT),
    (OutOfSequence, grpc.StatusCode.FAILED_PRECONDITION),
    (TooManyProducers, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (LogStopped, grpc.StatusCode.UNAVAILABLE),
    (LogLocked, grpc.StatusCode.UNAVAILABLE),
    (TopicOwned, grpc.StatusCode.UNAVAILABLE),
    (TopicFenced, grpc.StatusCode.UNAVAILABLE),
    (LogClosed, grpc.StatusCode.UNAVAILABLE),
    (CommitRefused, grpc.StatusCode.UNAVAILABLE),
    (ServiceError, grpc.StatusCode.UNAVAILABLE),
    (WaitTimeout, grpc.StatusCode.DEADLINE_EXCEEDED),
)
"""The first class that the error is an instance of decides."""


class Refused(ForebayError):
    """A call that is refused with a status of its own."""

    def __init__(self, status: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.status = status


def status_of(error: Exception) -> grpc.StatusCode:
    """INTERNAL for an error that the table does not have: damaged data, or a bug."""
    if isinstance(error, Refused):
        return error.status
    return next(
        (status for kind, status in _STATUS if isinstance(error, kind)), grpc.StatusCode.INTERNAL
    )


def details_of(error: Exception, method: str) -> str:
    """The text of the status. A bug is logged, and its text is only in the log."""
    if isinstance(error, ForebayError):
        return str(error)[:_DETAILS_CHARACTERS_MAX]
    event(_log, logging.ERROR, "a call failed", trace=error, method=method, error=repr(error))
    return "the server failed; see its log"


def trailers_of(error: Exception) -> tuple[tuple[str, str], ...]:
    """What a client of Forebay's own needs to raise the same error: its class, and its numbers.

    Other clients ignore it.
    """
    if not isinstance(error, ForebayError) or isinstance(error, Refused):
        return ()
    numbers = ((name, getattr(error, name, None)) for name in ("start", "end", "expected"))
    found = [(f"forebay-{name}", str(value)) for name, value in numbers if type(value) is int]
    return (("forebay-error", type(error).__name__), *found)
