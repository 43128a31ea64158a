"""The order of a commit: synced, confirmed by the owner, published for others, acknowledged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from forebay.errors import ServiceUnavailable, TopicFenced
from forebay.wal.identity import LocalLog, LogIdentity, WriteGuard
from forebay.wal.log import Wal
from forebay.wal.view import LogView
from support.disks import LogDirectory, payloads, texts


@dataclass
class Guarded:
    """A claim whose `confirm` calls what the test sets."""

    on_confirm: Callable[[], None] = field(default=lambda: None)

    def acquire(self, local: LocalLog) -> LogIdentity:
        return LogIdentity(local.log_id, local.next_offset)

    @property
    def ownership(self) -> WriteGuard:
        return self

    def admit(self, end_offset: int) -> None: ...

    def confirm(self) -> None:
        self.on_confirm()


def open_guarded(directory: LogDirectory, **changes: int) -> tuple[Wal, Guarded]:
    claim = Guarded()
    wal = Wal(directory.settings(**changes), disk=directory.disk, claim=claim)
    directory.opened.append(wal)
    return wal, claim


def published(directory: LogDirectory) -> int:
    return LogView(directory.path, disk=directory.disk).end_offset


@pytest.mark.parametrize("error", [TopicFenced("taken over"), ServiceUnavailable("no answer")])
@pytest.mark.parametrize("rotate_max_bytes", [64 << 20, 200])
def test_readers_of_other_processes_never_see_what_a_fenced_owner_did_not_acknowledge(
    directory: LogDirectory, error: Exception, rotate_max_bytes: int
) -> None:
    wal, claim = open_guarded(directory, rotate_max_bytes=rotate_max_bytes)
    for payload in texts(0, 3):
        wal.append(payload, durability="synced")
    assert published(directory) == 3

    def refuse() -> None:
        raise error

    claim.on_confirm = refuse
    with pytest.raises(TopicFenced):
        wal.append_many(texts(3, 9), durability="synced")
    wal.abandon()
    assert published(directory) == 3
    with LogView(directory.path, disk=directory.disk).reader(0) as reader:
        assert [message.payload for message in reader] == texts(0, 3)


def test_a_commit_is_published_after_it_is_confirmed_and_before_it_is_acknowledged(
    directory: LogDirectory,
) -> None:
    wal, claim = open_guarded(directory)
    seen: list[int] = []
    claim.on_confirm = lambda: seen.append(published(directory))
    for offset, payload in enumerate(texts(0, 4)):
        wal.append(payload, durability="synced")
        assert published(directory) == offset + 1
    assert seen == [0, 1, 2, 3]


def test_frames_that_were_synced_and_never_published_are_kept_by_the_next_opening(
    directory: LogDirectory,
) -> None:
    """The published position may be behind what is synced, and never ahead."""
    wal, claim = open_guarded(directory)
    wal.append(b"message 0", durability="synced")

    def refuse() -> None:
        raise TopicFenced("taken over")

    claim.on_confirm = refuse
    with pytest.raises(TopicFenced):
        wal.append(b"message 1", durability="synced")
    wal.abandon()
    assert payloads(directory.open()) == texts(0, 2)
    assert published(directory) == 2
