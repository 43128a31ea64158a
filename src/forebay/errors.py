"""Every error that Forebay raises on purpose, named by what the caller can do about it.

    ForebayError
    ├── UsageError            fix the call (also a ValueError)
    │   ├── InvalidTopicName
    │   ├── InvalidSetting
    │   ├── UnknownTopic
    │   └── MessageTooLarge
    ├── OffsetOutOfRange      choose another offset
    │   └── LostOffsets       go on after the range, which is recorded as lost
    ├── LogLocked             find the process that owns the topic
    ├── TopicOwned            another process holds the topic's lease: wait, or find it
    ├── TopicFenced           another process took the topic over: open it again
    ├── LogClosed             open the log again
    ├── DiskError             the log cannot be opened: free space, raise a limit, fix permissions
    ├── LogStopped            the disk failed: page someone, then open the log again
    ├── WaitTimeout           wait again, or give up (also a TimeoutError)
    ├── ServiceError          the object store or the catalog
    │   ├── ServiceUnavailable   try again later; what was asked may have happened
    │   ├── ServiceRefused       fix the credentials, the permissions or the configuration
    │   └── ObjectMissing        no such object (also a FileNotFoundError)
    ├── CommitRefused         plan again: the catalog has moved on
    ├── FormatError           these bytes are not what they should be
    │   ├── MessageError
    │   ├── CheckpointError
    │   └── DescriptorError
    └── CorruptLog            stored data is damaged or missing: page someone
        ├── CorruptFrame
        └── MissingData

What a caller gets wrong: a `LogStopped` from an append that waited does not mean that the message
is absent. It means that nobody knows: read the log after opening it again.
"""

from __future__ import annotations

import errno
from typing import Any, Final

_REMEDIES: Final = {
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "the system's limit of open files is reached",
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or raise the quota",
    errno.EACCES: "check the permissions",
    errno.EPERM: "check the permissions",
    errno.EROFS: "the filesystem is read-only",
    errno.ENOTDIR: "a part of the path is not a directory",
    errno.EEXIST: "a part of the path is not a directory",
}


def remedy(error: BaseException) -> str:
    """What to do about an error of the operating system, as the end of a sentence."""
    number = error.errno if isinstance(error, OSError) else None
    return _REMEDIES.get(number, "check the disk") if number is not None else "check the disk"


class ForebayError(Exception):
    """Anything that Forebay raises on purpose. It survives the way from one process to another."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self.args, dict(self.__dict__))


def _rebuilt(
    kind: type[ForebayError], args: tuple[Any, ...], state: dict[str, Any]
) -> ForebayError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class UsageError(ForebayError, ValueError):
    """The call cannot be right whatever the state of the log."""


class InvalidTopicName(UsageError):
    """A topic name that breaks the naming rule."""


class InvalidSetting(UsageError):
    """A setting that is out of range, or that contradicts another."""


class UnknownTopic(UsageError):
    """Neither the catalog nor a local directory knows the topic."""


class MessageTooLarge(UsageError):
    """A message over the limit."""


class OffsetOutOfRange(ForebayError, LookupError):
    """The offset is not in the log: below its start, or beyond its end."""

    def __init__(self, message: str, *, start: int, end: int) -> None:
        super().__init__(message)
        self.start = start
        self.end = end


class LostOffsets(OffsetOutOfRange):
    """Offsets that were handed out and whose messages are gone; `end` is the next one to read."""


class TopicOwned(ForebayError):
    """Another process holds the topic's lease."""


class TopicFenced(ForebayError):
    """The topic's lease ran out, or another process took the topic over: nothing more counts."""


class LogLocked(ForebayError):
    """Another process, or another handle of this one, owns the topic's directory."""


class LogClosed(ForebayError):
    """The log was shut down."""


class DiskError(ForebayError, OSError):
    """An error of the disk while a log was opened."""

    def __str__(self) -> str:
        return str(self.strerror)


class LogStopped(ForebayError):
    """The log stopped itself after an error of the disk; appends from `synced` on are unknown."""

    def __init__(self, message: str, *, synced: int) -> None:
        super().__init__(message)
        self.synced = synced


class WaitTimeout(ForebayError, TimeoutError):
    """What was waited for did not happen in time; it may still happen."""


class ServiceError(ForebayError):
    """An object store or a catalog did not do what it was asked."""


class ServiceUnavailable(ServiceError):
    """No answer, or one that says to come back later. The request may have been carried out."""


class ServiceRefused(ServiceError):
    """Asking again will not help: credentials, permissions, or a configuration that is wrong."""


class ObjectMissing(ServiceError, FileNotFoundError):
    """There is no object of that key."""


class CommitRefused(ForebayError):
    """The catalog no longer is as the plan saw it; nothing was changed."""


class FormatError(ForebayError):
    """Bytes that do not have the format they should have."""


class MessageError(FormatError):
    """A frame's payload that is none of the known message encodings."""


class CheckpointError(FormatError):
    """A checkpoint that is damaged, truncated or of an unknown version."""


class DescriptorError(FormatError):
    """A descriptor, or another record of the catalog, that cannot be one."""


class CorruptLog(ForebayError):
    """Stored data that was complete once and is not now. Nothing was deleted because of it."""


class CorruptFrame(CorruptLog):
    """A damaged frame, with the file, the byte position and the offset where it was expected."""

    def __init__(self, reason: str, *, file: str, position: int, offset: int | None) -> None:
        where = "unknown" if offset is None else str(offset)
        super().__init__(f"{file}: {reason} at position {position} (offset {where})")
        self.reason = reason
        self.file = file
        self.position = position
        self.offset = offset


class MissingData(CorruptLog):
    """Offsets that were acknowledged and are in no file."""
