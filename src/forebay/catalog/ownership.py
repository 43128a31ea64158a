"""Who may append to a topic: one lease for the process, one epoch for each topic (rule R5).

A process has one `Session`; a thread renews its lease. A topic that the process takes gets the next
epoch, and an owner key that exists as long as the lease. Every change of the catalog compares the
epoch. Nothing is acknowledged once the lease may have ended: the log calls `Ownership.confirm`
after every sync, before it acknowledges anything.

Beware: an expired lease does not mean that the topic is lost. `confirm` then asks the catalog, and
succeeds if no other process has taken the topic.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Final

from forebay.catalog.catalog import Catalog, Change, fenced
from forebay.catalog.job_state import ORIGIN_HERE, ORIGIN_NAME, origin_after
from forebay.catalog.kv import ABSENT, Compare, Put, Remove, respond_by
from forebay.catalog.nonreliable import require_not_nonreliable
from forebay.catalog.records import (
    Deletion,
    Owner,
    TopicRecord,
    decode_record,
    encode_record,
)
from forebay.clock import SYSTEM_CLOCK, Clock, since_1970
from forebay.errors import (
    LogClosed,
    ServiceError,
    ServiceRefused,
    TopicFenced,
    TopicOwned,
)
from forebay.format.names import TopicName
from forebay.logs import event
from forebay.metrics import Counter
from forebay.settings import MetadataSettings

_log: Final = logging.getLogger("forebay.catalog")
_lease_losses = Counter("forebay_lease_lost_total", "Leases of this process that expired.")
_TRIES: Final = 100


class Session:
    """The lease of this process, and the thread that renews it. Thread-safe.

    The lease is granted, and the thread started, when the first topic is taken.
    """

    def __init__(
        self, catalog: Catalog, settings: MetadataSettings, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.catalog = catalog
        self.clock = since_1970(clock)
        self.settings = settings
        self.name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._lock = threading.Lock()
        self._lease: int | None = None
        self._valid_until = float("-inf")
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._epochs: dict[TopicName, int] = {}
        """The epochs of the topics that this process owns, or believes it owns."""
        self._deadline = float("inf")
        self._kept: list[TopicName] = []
        """Topics that could not be given up: they are owned until the lease ends."""

    @property
    def valid_until(self) -> float:
        """When the lease ends, in the clock's monotonic time.

        Nothing is acknowledged in the last `lease_margin_seconds` before it.
        """
        return self._valid_until

    @property
    def alive(self) -> bool:
        margin = self.settings.lease_margin_seconds
        return self.clock.monotonic() < self._valid_until - margin

    @property
    def current(self) -> int | None:
        """The lease, without checking that it is alive; None if there is none."""
        return self._lease

    def epoch(self, topic: TopicName) -> int | None:
        """Returns the newest epoch with which this process took the topic.

        Returns None if the process released the topic or never had it.
        """
        return self._epochs.get(topic)

    def took(self, topic: TopicName, epoch: int) -> None:
        with self._lock:
            self._epochs[topic] = max(epoch, self._epochs.get(topic, 0))

    def gave_up(self, topic: TopicName, epoch: int) -> None:
        with self._lock:
            if self._epochs.get(topic) == epoch:
                del self._epochs[topic]

    def finish_by(self, deadline: float) -> None:
        """Limits the requests to the catalog from now on, of all topics together.

        They are given up at `deadline`, by `time.monotonic`. For a store that is being closed.
        """
        self._deadline = deadline

    def limited(self) -> AbstractContextManager[None]:
        """Within the block, requests to the catalog are given up as `finish_by` says."""
        return respond_by(self._deadline)

    def kept(self, topic: TopicName) -> None:
        """Records that the topic could not be given up."""
        with self._lock:
            self._kept.append(topic)

    def lease(self) -> int:
        """Returns the lease, renewed or replaced by a new one if it may have ended.

        Raises TopicFenced if the session was closed.
        """
        if not self.alive:
            with suppress(TopicFenced):
                self.renew()
        with self._lock:
            if self._stop.is_set():
                raise TopicFenced("this store was closed; open it again")
            if self._lease is None:
                before = self.clock.monotonic()
                self._lease = self.catalog.kv.grant(self.settings.lease_seconds)
                self._valid_until = before + self.settings.lease_seconds
                self._keep()
            return self._lease

    def renew(self) -> None:
        """Renews the lease. Raises TopicFenced if it has ended; `lease` then grants a new one."""
        with self._lock:
            lease = self._lease
        if lease is None:
            return
        before = self.clock.monotonic()
        try:
            seconds = self.catalog.kv.keep_alive(lease)
        except TopicFenced:
            with self._lock:
                if self._lease == lease:
                    self._lease, self._valid_until = None, float("-inf")
            _lease_losses.add()
            raise
        with self._lock:
            if self._lease == lease:
                self._valid_until = max(self._valid_until, before + seconds)

    def close(self) -> None:
        """Ends the lease, so that other processes can take the topics at once.

        If the catalog does not respond, within the time of `finish_by`, the lease is left to
        expire. That is logged once, with the number of topics that stay owned until then.
        """
        self._stop.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            left = max(self._deadline - time.monotonic(), 0)
            thread.join(min(self.settings.timeout_seconds + 1, left))
        with self._lock:
            lease, self._lease = self._lease, None
            self._valid_until = float("-inf")
        if lease is not None:
            try:
                with self.limited():
                    self.catalog.kv.revoke(lease)
            except ServiceError as error:
                event(
                    _log,
                    logging.WARNING,
                    "lease not revoked: its topics become free when it expires",
                    topics=len(self._kept),
                    seconds=self.settings.lease_seconds,
                    error=error,
                )

    def _keep(self) -> None:
        if self._thread is None and not self._stop.is_set():
            self._thread = threading.Thread(target=self._run, name="forebay-lease", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        pause = self.settings.lease_seconds / 4
        while not self._stop.wait(pause):
            try:
                self.renew()
            except LogClosed:
                return
            except (ServiceError, TopicFenced) as error:
                event(_log, logging.WARNING, "lease not renewed", error=error)


class Ownership:
    """A topic that this process owns, until it is fenced or released."""

    def __init__(
        self, session: Session, topic: TopicName, lock: str, record: TopicRecord, lease: int
    ) -> None:
        self._session = session
        self._catalog = session.catalog
        self._lock = lock
        self._lease = lease
        """The lease of the owner key; the session may have a newer one."""
        self._reserved = record.reserved
        self._admitted = self._written = 0
        """The end of the frames that may be written, and of those that are synced."""
        self._refusal: TopicFenced | None = None
        self._slow = threading.Lock()
        self.topic = topic
        self.epoch = record.epoch
        session.took(topic, record.epoch)

    # -- called by the log ----------------------------------------------------------------------

    def admit(self, end_offset: int) -> None:
        """Reserves the offsets below `end_offset` in the catalog.

        Call it before frames with these offsets are written. Raises TopicFenced if another process
        has taken the topic, or if this one has released it. Raises ServiceRefused if the log would
        run further past the last object than a restore allows for.
        """
        self._require_newest()
        self._admitted = end_offset
        if end_offset <= self._reserved:
            return
        wanted = end_offset + self._session.settings.offsets_reserved

        def change(record: TopicRecord) -> Change:
            if end_offset > record.offset_limit:
                raise ServiceRefused(
                    f"{self.topic}: the log has run too far past the last object, to offset "
                    f"{end_offset}; at most {record.offset_limit} is allowed: upload the topic "
                    "with `forebay offload`, then open it again"
                )
            return Change(
                replace(
                    record,
                    assigned=max(record.assigned, self._written),
                    reserved=max(record.reserved, min(wanted, record.offset_limit)),
                )
            )

        with self._session.limited():
            self._reserved = self._catalog.update(self.topic, self.epoch, change).reserved

    def confirm(self) -> None:
        """Returns if frames that were synced before the call may be acknowledged.

        Raises TopicFenced or ServiceError otherwise.
        """
        session = self._session
        self._require_newest()
        if not (session.alive and session.current == self._lease):
            with self._slow, session.limited():
                self._reclaim()
        self._written = self._admitted

    def refuse(self, error: TopicFenced) -> None:
        """Lets nothing more be written or acknowledged: both raise `error`."""
        self._refusal = error

    def _require_newest(self) -> None:
        """Raises TopicFenced if this process has released the topic, or taken it again."""
        if self._refusal is not None:
            raise self._refusal
        newest = self._session.epoch(self.topic)
        if newest is None:
            raise TopicFenced(f"{self.topic}: this process released the topic; open it again")
        if newest != self.epoch:
            raise fenced(self.topic, self.epoch, newest)

    def _reclaim(self) -> None:
        """Asks the catalog whether the topic is still ours, after the lease may have ended."""
        session = self._session
        with suppress(TopicFenced):  # the new lease is enough if nobody else took the topic
            session.renew()
        lease = session.lease()
        if not (session.alive and lease == self._lease):
            _hold(self._catalog, self.topic, self._owner(), lease, self._unchanged)
            self._lease = lease
        if not (session.alive and session.current == lease):
            raise TopicFenced(
                f"{self.topic}: the lease ended before {self._catalog.name} "
                "responded; open the topic again"
            )

    def _unchanged(self, record: TopicRecord | None, holder: Owner | None) -> TopicRecord:
        if record is None or record.is_deleted or record.epoch != self.epoch:
            raise fenced(self.topic, self.epoch, record)
        if holder is not None and (holder.epoch, holder.name) != (self.epoch, self._session.name):
            raise fenced(self.topic, self.epoch, holder.epoch)
        return record

    def _owner(self) -> Owner:
        return Owner(self.epoch, self._session.name, self._lock, self._session.clock.now_ms())

    # -- giving the topic up --------------------------------------------------------------------

    def release(self, next_offset: int, reserved: int | None = None) -> None:
        """Gives the topic up. The next owner continues at `next_offset`.

        Offsets from `next_offset` on, or from `reserved` on, are no longer reserved. An owner
        without the local log then records only the messages that were not uploaded as lost, and no
        unused offsets. Raises ServiceError if the catalog does not respond: the topic stays owned
        until the lease ends.
        """
        self._session.gave_up(self.topic, self.epoch)

        def change(record: TopicRecord) -> Change:
            owner = self._catalog.kv.get(self._catalog.keys.owner(self.topic))
            writes: list[Remove] = []
            compares: list[Compare] = []
            if owner is not None:
                writes.append(Remove(owner.key))
                compares.append(Compare(owner.key, owner.revision))
            return Change(
                replace(
                    record,
                    assigned=max(record.assigned, next_offset),
                    reserved=max(record.tail, next_offset if reserved is None else reserved),
                ),
                tuple(writes),
                tuple(compares),
            )

        try:
            with self._session.limited():
                self._catalog.update(self.topic, self.epoch, change)
        except ServiceError:
            self._session.kept(self.topic)
            raise


def acquire(
    session: Session,
    topic: TopicName,
    lock: str,
    settle: Callable[[TopicRecord | None], TopicRecord],
) -> tuple[Ownership, TopicRecord]:
    """Takes the topic for this process, with the next epoch; returns the ownership and the record.

    `settle` gets the current record, or None for a new topic, and returns the new one; the epoch
    becomes one more than in either. It may raise to refuse, and it may be called more than once.
    What it gets may be what is left of a deleted topic. `lock` names the local lock that this
    process holds. Raises TopicOwned while another process owns the topic. An owner that held the
    same `lock` must have ended, so its topic is taken at once. Raises TopicDeleted while a deletion
    is not finished.
    """

    def take(record: TopicRecord | None, holder: Owner | None) -> TopicRecord:
        if holder is not None and holder.lock != lock and holder.name != session.name:
            raise TopicOwned(
                f"{topic} is owned by {holder.name} (epoch {holder.epoch}), whose lease is alive: "
                "close it there, or wait until its lease ends"
            )
        if record is not None and record.deletion is Deletion.DELETING:
            raise fenced(topic, record.epoch, record)
        settled = settle(record)
        before = record.epoch if record else 0
        return replace(settled, epoch=max(before, settled.epoch) + 1)

    owner = Owner(0, session.name, lock, session.clock.now_ms())
    lease = session.lease()
    try:
        record = _hold(session.catalog, topic, owner, lease, take)
    except TopicFenced:  # the lease had ended
        with suppress(TopicFenced):
            session.renew()
        lease = session.lease()
        record = _hold(session.catalog, topic, owner, lease, take)
    return Ownership(session, topic, lock, record, lease), record


def _hold(
    catalog: Catalog,
    topic: TopicName,
    owner: Owner,
    lease: int,
    decide: Callable[[TopicRecord | None, Owner | None], TopicRecord],
) -> TopicRecord:
    """Writes the owner key and the record that `decide` returns, in one transaction.

    `decide` is called again when another process changed either key first. Raises
    TopicKindConflict if the topic has no record, and exists as one that is not stored.
    """
    record_key, owner_key = catalog.keys.record(topic), catalog.keys.owner(topic)
    for _ in range(_TRIES):
        entry, held = catalog.kv.get(record_key), catalog.kv.get(owner_key)
        record = None if entry is None else decode_record(entry.value, TopicRecord, record_key)
        absent = record is None or record.is_deleted
        if absent:
            require_not_nonreliable(catalog, topic)
        holder = None if held is None else decode_record(held.value, Owner, owner_key)
        wanted = decide(record, holder)
        writes = [
            Put(record_key, encode_record(wanted)),
            Put(owner_key, encode_record(replace(owner, epoch=wanted.epoch)), lease),
        ]
        origin = None
        if record is None and wanted.reserved == 0:
            origin = ORIGIN_HERE
        elif record is not None and record.is_deleted:
            origin = origin_after(wanted.epoch)
        if origin is not None:
            writes.append(Put(catalog.keys.job_state(topic, ORIGIN_NAME), origin.encode()))
        compares = [
            Compare(record_key, entry.revision if entry else ABSENT),
            Compare(owner_key, held.revision if held else ABSENT),
        ]
        if absent:
            compares.append(Compare(catalog.keys.nonreliable(topic), ABSENT))
        if catalog.kv.commit(compares, writes) is not None:
            return wanted
    raise TopicOwned(f"{topic}: other processes keep taking the topic over; try again")
