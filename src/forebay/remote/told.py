"""What a server tells: errors as ours, whether it took what was sent, and who it is. Pure.

An error that a server tells is the class that the server raised, with its fields. It has the
`status` of the answer; where it has `taken` as False, nothing of the request was taken for sure.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from forebay import errors
from forebay.errors import (
    CommitRefused,
    DiskError,
    ForebayError,
    ObjectMissing,
    ServiceError,
    ServiceRefused,
    ServiceUnavailable,
)

STORE_HEADER: Final = "Forebay-Store"
"""Of a request: the store that it is meant for."""
INSTANCE_HEADER: Final = "Forebay-Instance"
"""Of an answer: the run of the server that gave it."""
_SILENT: Final[Mapping[int, type[ForebayError]]] = {
    401: ServiceRefused,
    403: ServiceRefused,
    404: ObjectMissing,
    409: CommitRefused,
    412: ServiceUnavailable,
    503: ServiceUnavailable,
}
"""What the answer to a HEAD means, which has no words."""
_REFUSED: Final = {400, 401, 403, 404, 413}
"""With these, a request was looked at and not carried out."""
_Error = TypeVar("_Error", bound=ForebayError)


@dataclass(frozen=True, slots=True)
class Who:
    """A server, by what `/healthz` says."""

    instance: str
    store: str | None
    """None of an older version."""


def told_who(body: bytes) -> Who | None:
    """None if it is no Forebay server's answer."""
    try:
        told: Any = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(told, dict) or not isinstance(told.get("instance"), str):
        return None
    store = told.get("store")
    return Who(told["instance"], store if isinstance(store, str) else None)


def told_error(told: Mapping[str, Any]) -> ForebayError:
    """The error that a server tells: `{"kind": ..., "message": ..., ...}`."""
    message = str(told.get("message", "the server told an error without words"))
    kind = getattr(errors, str(told.get("kind")), None)
    if not (isinstance(kind, type) and issubclass(kind, ForebayError)):
        kind = ServiceError
    fields = {name: each for name, each in told.items() if name not in {"kind", "message"}}
    if issubclass(kind, DiskError):
        number = fields.pop("errno", None)
        error: ForebayError = kind(number if isinstance(number, int) else errno.EIO, message)
    else:
        error = kind.__new__(kind, message)
        error.args = (message,)
    vars(error).update(fields)
    return error


def error_of(url: str, status: int, body: bytes) -> ForebayError:
    """What an answer with a status of 400 or more says."""
    error: ForebayError
    if not body and status in _SILENT:
        error = _SILENT[status](f"{url} answered with status {status}")
    else:
        try:
            error = told_error(json.loads(body)["error"])
        except (ValueError, KeyError, TypeError, AttributeError):
            error = ServiceError(f"{url} answered with status {status}, and is no Forebay server")
    vars(error)["status"] = status
    return error


def untaken(error: _Error) -> _Error:
    """The error, of a request that never got to a server."""
    vars(error)["taken"] = False
    return error


def took_nothing(error: ForebayError) -> bool:
    """Whether nothing of the request was taken for sure. Without that, nobody knows."""
    known = vars(error)
    return known.get("taken") is False or known.get("status") in _REFUSED


def is_busy(error: ForebayError) -> bool:
    """Whether the server took nothing and may take it in a moment."""
    known = vars(error)
    return known.get("taken") is False and known.get("status") == 503
