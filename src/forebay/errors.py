"""Every error that Forebay raises on purpose, named by what the caller can do about it.

    ForebayError
    ├── UsageError            fix the call (also a ValueError)
    │   ├── InvalidTopicName
    │   ├── InvalidSetting
    │   ├── UnknownTopic
    │   ├── UnknownSubscription
    │   ├── TooManySubscriptions
    │   ├── SubscriptionBusy     other consumers use it, and do not allow this one
    │   ├── TopicConflict        a topic is either partitioned or not
    │   ├── TopicKindConflict
    │   ├── InvalidSchema        fix the definition of the schema
    │   ├── UnknownSchema
    │   ├── IncompatibleSchema   change the schema, or the mode of its subject
    │   ├── SchemaMismatch       send what the topic's schema says
    │   ├── InvalidPayload       fix the payload of the message
    │   ├── SchemasNotInstalled  install the library of this kind of schema
    │   ├── InvalidPosition      no ledger of the topic has it
    │   └── MessageTooLarge
    ├── OutOfSequence         send the messages of an idempotent producer from `expected` on
    ├── TooManyProducers      close some producers of the topic
    ├── ProducerReplaced      another process uses the name of the idempotent producer: find it
    ├── MaybeStored           read the topic, or send the message again and have it twice
    ├── OffsetOutOfRange      choose another offset (also a LookupError)
    │   └── LostOffsets       continue after the range, which is recorded as lost
    ├── LogLocked             find the process that has the topic's directory open
    ├── TopicOwned            another process holds the topic's lease: wait, or find it
    ├── TopicFenced           another process took the topic over: open it again
    │   └── TopicDeleted      the topic was deleted: create it again, or choose another
    ├── LogClosed             open the log again
    ├── DiskError             the log cannot be opened: free space, raise a limit, fix permissions
    ├── LogStopped            the disk failed: page someone, then open the log again
    ├── WaitTimeout           wait again, or give up (also a TimeoutError)
    ├── ServiceError          the object store or the catalog failed
    │   ├── ServiceUnavailable   try again later; the request may have been carried out
    │   ├── ServiceRefused       fix the credentials, the permissions or the configuration
    │   ├── ObjectMissing        there is no such object (also a FileNotFoundError)
    │   ├── ObjectChanged        the object has another etag: read it whole and compare
    │   └── ObjectExists         the name is taken: compare the bytes (also a FileExistsError)
    ├── CommitRefused         plan again: the catalog has changed
    ├── OffloadInProgress     an offload of the topic runs: wait for its end
    ├── FormatError           bytes that do not have the expected format
    │   ├── MessageError
    │   ├── CheckpointError
    │   ├── DescriptorError
    │   └── LedgerError       an object of Pulsar's tiered storage is damaged, or unknown
    └── CorruptLog            stored data is damaged or missing: page someone
        ├── CorruptFrame
        ├── MissingData
        └── ForeignObject     other bytes have the object's name: compare catalog and store

Beware: after `LogStopped`, `TopicFenced`, `WaitTimeout` or `ServiceUnavailable` from an append, the
message may or may not be stored. Read the log to find out. If it has ended, open it again first.
"""

from __future__ import annotations

import errno
from typing import Any, Final

_REMEDIES: Final = {
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the system's limit of open files (fs.file-max)",
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or raise the quota",
    errno.EACCES: "check the permissions",
    errno.EPERM: "check the permissions",
    errno.EROFS: "mount the file system writable",
    errno.ENOTDIR: "choose another path: a part of it is not a directory",
    errno.EEXIST: "choose another path: a part of it is not a directory",
}


def remedy(error: BaseException) -> str:
    """What to do about an error of the operating system, in the imperative: "free some space"."""
    number = error.errno if isinstance(error, OSError) else None
    return _REMEDIES.get(number, "check the disk") if number is not None else "check the disk"


class ForebayError(Exception):
    """The base of all errors that Forebay raises on purpose. All can be pickled."""

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
    """The call is wrong, whatever the state of the store."""


class InvalidTopicName(UsageError):
    """A topic name that breaks the naming rule."""


class InvalidSetting(UsageError):
    """A setting that is out of range or contradicts another."""


class UnknownTopic(UsageError):
    """There is no such topic, neither in the catalog nor as a local directory."""


class UnknownSubscription(UsageError):
    """The topic has no subscription of that name."""


class TooManySubscriptions(UsageError):
    """The topic has as many subscriptions as it may have: delete one first."""


class SubscriptionBusy(UsageError):
    """Consumers that are connected to the subscription do not allow another one."""


class TopicConflict(UsageError):
    """A plain topic and partitions of the same base name exclude each other."""


class TopicKindConflict(UsageError):
    """The topic exists as the other kind: one is stored, the other is not."""


class InvalidSchema(UsageError):
    """The definition of a schema is not valid, or too large or too deep."""


class UnknownSchema(UsageError):
    """There is no such subject, or no such version of it."""


class IncompatibleSchema(UsageError):
    """The schema breaks the compatibility mode of its subject."""


class SchemaMismatch(UsageError):
    """A producer or a message names no schema, or another one than the topic has."""


class InvalidPayload(UsageError):
    """The payload of a message is not as the schema of the topic says."""


class SchemasNotInstalled(UsageError):
    """The library of this kind of schema is not installed: `pip install 'forebay[schemas]'`."""


class InvalidPosition(UsageError):
    """A position, as Pulsar names messages, that is in none of the topic's ledgers."""


class MessageTooLarge(UsageError):
    """A message, or its number of attributes, is over the limit."""


class OutOfSequence(ForebayError):
    """A message of an idempotent producer is missing: the next one must have `expected`."""

    def __init__(self, message: str, *, expected: int) -> None:
        super().__init__(message)
        self.expected = expected


class TooManyProducers(ForebayError):
    """As many idempotent producers of the topic are connected as there can be."""


class ProducerReplaced(ForebayError):
    """Another producer with the same name was opened, and messages of this one are refused."""


class MaybeStored(ForebayError):
    """The connection broke before the server answered: the message may or may not be stored."""


class OffsetOutOfRange(ForebayError, LookupError):
    """The offset is not in the log, which holds the offsets from `start` to before `end`."""

    def __init__(self, message: str, *, start: int, end: int) -> None:
        super().__init__(message)
        self.start = start
        self.end = end


class LostOffsets(OffsetOutOfRange):
    """The messages of these offsets are lost; `end` is the next offset that can be read."""


class TopicOwned(ForebayError):
    """Another process holds the topic's lease."""


class TopicFenced(ForebayError):
    """The topic's lease expired, or another process took the topic over: writes are refused."""


class TopicDeleted(TopicFenced):
    """The topic was deleted, or is being deleted. If it is created again, it has new offsets."""


class LogLocked(ForebayError):
    """Another process, or another handle in this one, has the topic's directory open."""


class LogClosed(ForebayError):
    """The log was shut down."""


class DiskError(ForebayError, OSError):
    """A disk error while a log was opened."""

    def __str__(self) -> str:
        return str(self.strerror)


class LogStopped(ForebayError):
    """The log stopped after a disk error; messages from offset `synced` on may be lost."""

    def __init__(self, message: str, *, synced: int) -> None:
        super().__init__(message)
        self.synced = synced


class WaitTimeout(ForebayError, TimeoutError):
    """The wait ended before the event happened; it may still happen."""


class ServiceError(ForebayError):
    """A request to the object store or the catalog failed."""


class ServiceUnavailable(ServiceError):
    """No response, or one that asks to retry later. The request may have been carried out."""


class ServiceRefused(ServiceError):
    """A retry will not help: the credentials, permissions or configuration are wrong."""


class ObjectMissing(ServiceError, FileNotFoundError):
    """There is no object with that key."""


class ObjectChanged(ServiceError):
    """The object has another etag than the caller expected: `etag`, or None if it is unknown."""

    def __init__(self, message: str, etag: str | None) -> None:
        super().__init__(message)
        self.etag = etag

    def __reduce__(self) -> tuple[type[ObjectChanged], tuple[str, str | None]]:
        return type(self), (str(self), self.etag)


class ObjectExists(ServiceError, FileExistsError):
    """An object was to be created, and its key is taken; nothing was changed.

    A request that the client repeated after a lost response may raise it for its own object.
    Whoever knows the bytes compares them.
    """


class CommitRefused(ForebayError):
    """The catalog has changed since the plan was made; nothing was committed."""


class FormatError(ForebayError):
    """Bytes that do not have the expected format."""


class MessageError(FormatError):
    """The payload of a frame is not in a known message encoding."""


class CheckpointError(FormatError):
    """A checkpoint is damaged, truncated or of an unknown version."""


class DescriptorError(FormatError):
    """A descriptor, or another record of the catalog, is malformed."""


class OffloadInProgress(ForebayError):
    """An offload of the topic is running already. Only one runs at a time."""


class LedgerError(FormatError):
    """Bytes of a Pulsar ledger that are damaged, cut off, or of a version that is not known."""


class CorruptLog(ForebayError):
    """Stored data is damaged or missing. Nothing was deleted because of it."""


class CorruptFrame(CorruptLog):
    """A damaged frame at byte `position` of `file`, where `offset` was expected (None: unknown)."""

    def __init__(self, reason: str, *, file: str, position: int, offset: int | None) -> None:
        where = "unknown" if offset is None else str(offset)
        super().__init__(
            f"{file}: {reason} at position {position} (offset {where}); see what can be put right "
            "with `forebay repair`"
        )
        self.reason = reason
        self.file = file
        self.position = position
        self.offset = offset


class MissingData(CorruptLog):
    """Messages that were acknowledged are in no file."""


class ForeignObject(CorruptLog):
    """The store has an object of the same name with other bytes. It was not changed."""
