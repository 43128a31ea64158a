"""What the client's errors mean for the caller, in words without secrets.

The client raises one kind of error for most things, with the whole answer of the server in its
text. The remedy is told from the HTTP status and from the server's code, such as `NoSuchBucket`.
Of the server's text only code and message are taken over: the rest may hold what was signed, with
tokens in it. Queries of URLs go, for they are signatures, and so does every known secret.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from forebay.errors import ObjectMissing, ServiceError, ServiceRefused, ServiceUnavailable
from forebay.objects.backend import CopyUnsupported

_STATUS: Final = re.compile(r"status code: (\d{3})")
_CODE: Final = re.compile(r"<Code>\s*(\w{1,80})\s*</Code>")
_MESSAGE: Final = re.compile(r"<Message>\s*([^<\r\n]{1,200})")
_QUERY: Final = re.compile(r"\?[^\s\"'<>)]*")
_USER_INFO: Final = re.compile(r"(?<=://)[^/\s@]*@")
_REASON_LENGTH_MAX: Final = 300

_PLACE_MISSING: Final = {"NoSuchBucket", "ContainerNotFound", "BucketNotFound", "AccountNotFound"}
_COME_BACK_CODES: Final = {"RequestTimeout", "SlowDown", "ServerBusy", "OperationTimedOut"}
_COME_BACK_STATUSES: Final = {408, 409, 423, 425, 429}
_NO_COPY_CODES: Final = {"NotImplemented", "MethodNotAllowed", "InvalidRequest", "EntityTooLarge"}
_NO_COPY_STATUSES: Final = {405, 501}
_WRONG_CONFIGURATION: Final = (
    "InvalidCertificate",
    "UnknownConfigurationKey",
    "MissingBucketName",
    "UnableToParse",
    "builder error",
)
_REFUSING: Final = {"PermissionDeniedError", "UnauthenticatedError", "UnknownConfigurationKeyError"}
_MISSING: Final = ("head", "get_range", "copy", "delete")


def translated(
    error: Exception, *, operation: str, key: str, name: str, secrets: Sequence[str]
) -> ServiceError:
    """The error to raise instead; raise it outside of the `except`, so that it carries no other."""
    text = str(error)
    reason = f"{name}: {operation} of {key!r}: {scrubbed(_summary(text), secrets)}"
    status = int(found[1]) if (found := _STATUS.search(text)) else None
    code = found[1] if (found := _CODE.search(text)) else ""
    if code in _PLACE_MISSING:
        return ServiceRefused(reason)
    if isinstance(error, FileNotFoundError) and operation in _MISSING:
        return ObjectMissing(f"{name}: there is no object {key!r}")
    if operation == "copy" and _no_copy(error, status, code):
        return CopyUnsupported(reason)
    if type(error).__name__ in _REFUSING or isinstance(error, ValueError):
        return ServiceRefused(reason)
    if any(mark in text for mark in _WRONG_CONFIGURATION):
        return ServiceRefused(reason)
    # 404 of a write is an upload that the server no longer knows: it was done, or given up.
    passing = status is None or status >= 500 or status in _COME_BACK_STATUSES
    if passing or code in _COME_BACK_CODES or isinstance(error, FileNotFoundError):
        return ServiceUnavailable(reason)
    return ServiceRefused(reason)


def is_past_the_end(error: Exception) -> bool:
    """Whether a ranged read failed because the object has no such bytes."""
    text = str(error)
    found = _STATUS.search(text)
    return (found is not None and found[1] == "416") or "Wanted range starting at" in text


def scrubbed(text: str, secrets: Sequence[str]) -> str:
    """The text without queries, user names in URLs, and the secrets."""
    text = _USER_INFO.sub("", _QUERY.sub("", text))
    for secret in secrets:
        text = text.replace(secret, "***")
    return text


def _no_copy(error: Exception, status: int | None, code: str) -> bool:
    unsupported = type(error).__name__ == "NotSupportedError"
    unsupported = unsupported or isinstance(error, NotImplementedError)
    return unsupported or status in _NO_COPY_STATUSES or code in _NO_COPY_CODES


def _summary(text: str) -> str:
    """The client's own sentence, and of the server's answer its code and message."""
    sentence = text.split("\n\nDebug source", 1)[0].split("<", 1)[0]
    sentence = " ".join(sentence.split())[:_REASON_LENGTH_MAX]
    code, message = _CODE.search(text), _MESSAGE.search(text)
    parts = [sentence.rstrip(": ")]
    parts += [found[1].strip() for found in (code, message) if found is not None]
    return ": ".join(parts)
