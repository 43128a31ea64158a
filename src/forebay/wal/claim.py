"""The right to write a log: what its owner has to prove, and when (rules R4 and R5).

A log that stands alone needs no proof. One that belongs to a store asks its claim three times:
when it is opened, before it writes frames, and after it synced them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from forebay.errors import ForebayError, LogStopped, ServiceError, TopicFenced, remedy


@dataclass(frozen=True, slots=True)
class LocalLog:
    """What recovery found in a directory."""

    log_id: str
    start_offset: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class Settled:
    """How the log goes on: under its own id, or as a new one from `next_offset` on."""

    log_id: str
    next_offset: int


class Claim(Protocol):
    """All of them raise TopicFenced, TopicOwned or ServiceError where the answer is no."""

    def settle(self, local: LocalLog) -> Settled:
        """Once the directory is locked and recovered."""

    def admit(self, end_offset: int) -> None:
        """Before frames up to `end_offset` are written."""

    def confirm(self) -> None:
        """After frames were synced, and before anybody is told."""


class Unclaimed:
    """For a log that stands alone: everything is allowed."""

    def settle(self, local: LocalLog) -> Settled:
        return Settled(local.log_id, local.next_offset)

    def admit(self, end_offset: int) -> None: ...

    def confirm(self) -> None: ...


def stopped(topic: str, error: BaseException, synced: int) -> ForebayError:
    """What to tell those who use a log that ended with `error`."""
    unknown = f"messages from offset {synced} on may or may not be there"
    if isinstance(error, TopicFenced | ServiceError):
        return TopicFenced(f"{topic}: nothing more is appended here; {unknown}; {error}")
    return LogStopped(
        f"{topic}: the log stopped after an error of the disk: {error!r}; {unknown}; "
        f"{remedy(error)}, then open the log again",
        synced=synced,
    )
