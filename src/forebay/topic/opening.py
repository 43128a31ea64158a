"""Takes ownership of a topic: which offset comes next, and which offsets are lost (rule R4).

`settle` makes the decision without I/O. The catalog holds the id of the log with the topic's newest
messages, and up to where offsets are reserved. A local log with that id continues. With any other
log, or none, messages that were reserved but never uploaded may be elsewhere or gone. The new log
then begins after the reserved offsets, and the range in between is recorded as lost.

Beware: a topic that is not in the catalog but has objects is refused, because its offsets would be
assigned twice. Run `forebay restore` first.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from forebay.catalog.adopt import is_restoring
from forebay.catalog.ownership import Ownership, Session, acquire
from forebay.catalog.records import TopicRecord, skip_holes
from forebay.clock import Clock
from forebay.errors import (
    CommitRefused,
    LogClosed,
    MissingData,
    ServiceError,
    TopicFenced,
    TopicOwned,
)
from forebay.files.disk import Disk
from forebay.files.local import LocalDisk
from forebay.format.names import TopicName, objects_prefix, parse_object
from forebay.logs import event
from forebay.objects.store import CloudStore
from forebay.wal.identity import LocalLog, LogIdentity, new_log_id

_log: Final = logging.getLogger("forebay.topic")
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_LOOK_SECONDS: Final = 0.1


def settle(record: TopicRecord | None, local: LocalLog, fresh_id: str) -> TopicRecord:
    """Returns the record with which this process takes the topic. The caller sets the epoch.

    If its `log_id` is `fresh_id`, a new log begins at its `tail`, and the local log is set aside.
    A record without a log id was rebuilt from the objects, and the local log continues it. Raises
    MissingData if a restore is not finished, or if messages are in neither objects nor the log.
    """
    if record is None:
        start = local.start_offset
        return TopicRecord(
            log_id=local.log_id,
            start_offset=start,
            tail=start,
            verified=start,
            reserved=local.next_offset,
        )
    if is_restoring(record.log_id):
        raise MissingData("a restore of the topic is not finished: run `forebay restore` again")
    if record.log_id in (local.log_id, None) and local.next_offset >= record.tail:
        if local.start_offset > record.tail:
            raise MissingData(
                f"the objects end at offset {record.tail}, but the local log begins at "
                f"{local.start_offset}: the messages in between are missing"
            )
        reserved = max(record.reserved, local.next_offset)
        return replace(record, log_id=local.log_id, reserved=reserved)
    begin = max(record.tail, record.reserved, local.next_offset)
    lost = record.with_lost(record.tail, begin)
    return replace(
        lost,
        log_id=fresh_id,
        tail=begin,
        verified=skip_holes(lost, record.verified),
        reserved=begin,
    )


def lock_name(disk: Disk, directory: Path) -> str:
    """Returns a name of the lock on a directory; two processes get the same only for one lock."""
    if not isinstance(disk, LocalDisk):
        return secrets.token_hex(16)
    try:
        found = directory.stat()
        boot = _BOOT_ID.read_text().strip()
    except OSError:
        return secrets.token_hex(16)
    return f"{boot}:{found.st_dev}:{found.st_ino}"


class TopicClaim:
    """Takes and releases one topic for its log; implements the claim of `forebay.wal.identity`."""

    def __init__(
        self,
        session: Session,
        store: CloudStore,
        topic: TopicName,
        disk: Disk,
        directory: Path,
        *,
        wait_seconds: float,
    ) -> None:
        self._session = session
        self._store = store
        self._topic = topic
        self._disk = disk
        self._directory = directory
        self._wait_seconds = wait_seconds
        self._ownership: Ownership | None = None
        self.record: TopicRecord | None = None

    @property
    def ownership(self) -> Ownership:
        if self._ownership is None:
            raise TopicFenced(f"{self._topic}: this process has not taken the topic")
        return self._ownership

    def acquire(self, local: LocalLog) -> LogIdentity:
        """Takes the topic. Returns the id of the log to write and its next offset.

        Waits for another owner's lease to end, at most `wait_seconds`, then raises TopicOwned.
        Raises MissingData if objects or messages are not where they should be.
        """
        fresh_id = new_log_id()
        lock = lock_name(self._disk, self._directory)

        def decide(record: TopicRecord | None) -> TopicRecord:
            if record is None:
                self._require_no_objects()
            settled = settle(record, local, fresh_id)
            if record is not None and settled.log_id == fresh_id:
                self._require_none_behind(record.tail)
            return settled

        self._ownership, self.record = self._acquire(lock, decide)
        if self.record.log_id == fresh_id:
            self._log_lost_offsets(self.record)
            return LogIdentity(fresh_id, self.record.tail)
        return LogIdentity(local.log_id, local.next_offset)

    def _log_lost_offsets(self, record: TopicRecord) -> None:
        """Logs the range that this opening has recorded as lost. It ends where the log begins."""
        if record.lost and record.lost[-1][1] == record.tail:
            event(
                _log,
                logging.WARNING,
                "offsets are lost: their log is not here, and the topic continues after them",
                topic=self._topic,
                first=record.lost[-1][0],
                last=record.lost[-1][1] - 1,
            )

    def _acquire(
        self, lock: str, decide: Callable[[TopicRecord | None], TopicRecord]
    ) -> tuple[Ownership, TopicRecord]:
        """Waits, for a bounded time, until the lease of the current owner ends."""
        clock: Clock = self._session.clock
        deadline = clock.monotonic() + self._wait_seconds
        said = False
        while True:
            try:
                return acquire(self._session, self._topic, lock, decide)
            except TopicOwned as error:
                if clock.monotonic() >= deadline:
                    raise
                if not said:
                    event(_log, logging.INFO, "waiting for the owner's lease", reason=error)
                    said = True
                time.sleep(_LOOK_SECONDS)

    def _require_no_objects(self) -> None:
        """Raises MissingData if a topic that is not in the catalog has objects."""
        found = next(iter(self._store.list(objects_prefix(self._topic))), None)
        if found is not None:
            raise MissingData(
                f"{self._topic}: {self._store.name} holds objects of the topic, such as "
                f"{found.key}, but the topic is not in {self._session.catalog.name}: "
                "rebuild it with `forebay restore` before appending"
            )

    def _require_none_behind(self, tail: int) -> None:
        """Raises MissingData if objects after `tail` show that the catalog is an older copy.

        Without the local log, their offsets would be assigned again.
        """
        prefix = objects_prefix(self._topic)
        for found in self._store.list(prefix):
            name = parse_object(object_id := found.key.removeprefix(prefix))
            if name is None or name.start < tail:
                continue
            if self._session.catalog.life(self._topic, object_id) is None:
                raise MissingData(
                    f"{self._topic}: {self._store.name} holds {found.key}, but the objects end at "
                    f"offset {tail} in {self._session.catalog.name}: the catalog is older than the "
                    "objects; add them with `forebay restore` before appending"
                )

    def release(self, next_offset: int) -> None:
        """Gives the topic up. If that fails, the topic becomes free when the lease ends."""
        if self._ownership is not None:
            with suppress(ServiceError, TopicFenced, CommitRefused, LogClosed):
                self._ownership.release(next_offset)
