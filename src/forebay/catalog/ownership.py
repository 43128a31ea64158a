"""Who may append to a topic: a lease for the process, an epoch for each topic (rule R5).

A process has one `Session`, whose lease a thread keeps alive. A topic that it takes gets the next
epoch, and an owner key that lives as long as the lease. Everything that counts compares the
epoch, and nothing is acknowledged once the lease may have ended: `Ownership.confirm` is asked
after every sync, and before anybody is told.

What a caller gets wrong: a lease that ran out is not yet a topic that was lost. `confirm` then
asks the catalog, and goes on if nobody took the topic over meanwhile.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Final

from forebay.catalog.catalog import Catalog, Change, fenced
from forebay.catalog.job_state import ORIGIN_HERE, ORIGIN_NAME
from forebay.catalog.kv import ABSENT, Compare, Put, Remove
from forebay.catalog.records import Owner, TopicRecord, decode_record, encode_record
from forebay.clock import SYSTEM_CLOCK, Clock
from forebay.errors import LogClosed, ServiceError, TopicFenced, TopicOwned
from forebay.format.names import TopicName
from forebay.limits import OFFSET_MAX
from forebay.logs import event
from forebay.metrics import Counter
from forebay.settings import MetadataSettings

_log: Final = logging.getLogger("forebay.catalog")
_lease_losses = Counter("forebay_lease_lost_total", "Leases of this process that ran out.")
_TRIES: Final = 100


class Session:
    """The lease of this process, and the thread that keeps it. Thread-safe."""

    def __init__(
        self, catalog: Catalog, settings: MetadataSettings, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.catalog = catalog
        self.clock = clock
        self.settings = settings
        self.name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._lock = threading.Lock()
        self._lease: int | None = None
        self._valid_until = float("-inf")
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._epochs: dict[TopicName, int] = {}
        """Of the topics that this process owns, or believes to."""

    @property
    def valid_until(self) -> float:
        """On the clock's monotonic time; nothing is acknowledged in the margin before it."""
        return self._valid_until

    @property
    def alive(self) -> bool:
        margin = self.settings.lease_margin_seconds
        return self.clock.monotonic() < self._valid_until - margin

    @property
    def current(self) -> int | None:
        """The lease as it is, if there is one."""
        return self._lease

    def epoch(self, topic: TopicName) -> int | None:
        """With which this process took the topic last; None if it gave it up, or never had it."""
        return self._epochs.get(topic)

    def took(self, topic: TopicName, epoch: int) -> None:
        with self._lock:
            self._epochs[topic] = max(epoch, self._epochs.get(topic, 0))

    def gave_up(self, topic: TopicName, epoch: int) -> None:
        with self._lock:
            if self._epochs.get(topic) == epoch:
                del self._epochs[topic]

    def lease(self) -> int:
        """A lease that was alive a moment ago, a new one if need be."""
        if not self.alive:
            with suppress(TopicFenced):
                self.renew()
        with self._lock:
            if self._stop.is_set():
                raise TopicFenced("the store of this process was closed; open it again")
            if self._lease is None:
                before = self.clock.monotonic()
                self._lease = self.catalog.kv.grant(self.settings.lease_seconds)
                self._valid_until = before + self.settings.lease_seconds
                self._keep()
            return self._lease

    def renew(self) -> None:
        """Asks for more time. TopicFenced if the lease is gone: the next `lease` is a new one."""
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
        """Ends the lease: every topic of this process is free at once."""
        self._stop.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(self.settings.timeout_seconds + 1)
        with self._lock:
            lease, self._lease = self._lease, None
            self._valid_until = float("-inf")
        if lease is not None:
            try:
                self.catalog.kv.revoke(lease)
            except ServiceError as error:
                event(_log, logging.WARNING, "the lease was left to run out", error=error)

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
                event(_log, logging.WARNING, "the lease was not renewed", error=error)


class Ownership:
    """A topic that this process owns, until it is fenced or released."""

    def __init__(
        self, session: Session, topic: TopicName, lock: str, record: TopicRecord, lease: int
    ) -> None:
        self._session = session
        self._catalog = session.catalog
        self._lock = lock
        self._lease = lease
        """The one that the owner key has; the session may have a newer one."""
        self._reserved = record.reserved
        self._slow = threading.Lock()
        self.topic = topic
        self.epoch = record.epoch
        session.took(topic, record.epoch)

    # -- what the log asks ----------------------------------------------------------------------

    def admit(self, end_offset: int) -> None:
        """Before frames are written: sees to it that offsets up to `end_offset` are reserved."""
        self._require_newest()
        if end_offset <= self._reserved:
            return
        wanted = min(end_offset + self._session.settings.offsets_reserved, OFFSET_MAX)

        def change(record: TopicRecord) -> Change:
            return Change(replace(record, reserved=max(record.reserved, wanted)))

        self._reserved = self._catalog.update(self.topic, self.epoch, change).reserved

    def confirm(self) -> None:
        """After frames were synced: returns if they may be acknowledged, else raises."""
        session = self._session
        self._require_newest()
        if session.alive and session.current == self._lease:
            return
        with self._slow:
            self._reclaim()

    def _require_newest(self) -> None:
        """Raises if this process released the topic, or took it once more."""
        newest = self._session.epoch(self.topic)
        if newest is None:
            raise TopicFenced(f"{self.topic}: the topic was given up; open it again")
        if newest != self.epoch:
            raise fenced(self.topic, self.epoch, newest)

    def _reclaim(self) -> None:
        """The lease may have ended: the catalog tells whether the topic is still ours."""
        session = self._session
        with suppress(TopicFenced):  # a new lease follows, and counts if nobody took the topic
            session.renew()
        lease = session.lease()
        if not (session.alive and lease == self._lease):
            _hold(self._catalog, self.topic, self._owner(), lease, self._unchanged)
            self._lease = lease
        if not (session.alive and session.current == lease):
            raise TopicFenced(
                f"{self.topic}: the lease ran out before {self._catalog.name} "
                "answered; open the topic again"
            )

    def _unchanged(self, record: TopicRecord | None, holder: Owner | None) -> TopicRecord:
        if record is None or record.epoch != self.epoch:
            raise fenced(self.topic, self.epoch, record.epoch if record else 0)
        if holder is not None and (holder.epoch, holder.name) != (self.epoch, self._session.name):
            raise fenced(self.topic, self.epoch, holder.epoch)
        return record

    def _owner(self) -> Owner:
        return Owner(self.epoch, self._session.name, self._lock, self._session.clock.now_ms())

    # -- the end --------------------------------------------------------------------------------

    def release(self, next_offset: int) -> None:
        """Gives the topic up; nothing but `next_offset` will be handed out next.

        No offset from there on stays reserved: an owner without the local log then loses what was
        not uploaded, and not one offset more.
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
                replace(record, reserved=max(record.tail, next_offset)),
                tuple(writes),
                tuple(compares),
            )

        self._catalog.update(self.topic, self.epoch, change)


def acquire(
    session: Session,
    topic: TopicName,
    lock: str,
    settle: Callable[[TopicRecord | None], TopicRecord],
) -> tuple[Ownership, TopicRecord]:
    """Takes the topic for this process, with the next epoch.

    `settle` gets the record as it is, None for a new topic, and returns what it shall become, but
    for the epoch; it may raise to refuse. TopicOwned while another process holds the topic, and
    it did not hold the same `lock` as we do now (which proves that it is gone).
    """

    def take(record: TopicRecord | None, holder: Owner | None) -> TopicRecord:
        if holder is not None and holder.lock != lock and holder.name != session.name:
            raise TopicOwned(
                f"{topic} is owned by {holder.name} (epoch {holder.epoch}), whose lease is alive: "
                "close it there, or wait until its lease ends"
            )
        settled = settle(record)
        return replace(settled, epoch=(record.epoch if record else 0) + 1)

    owner = Owner(0, session.name, lock, session.clock.now_ms())
    lease = session.lease()
    try:
        record = _hold(session.catalog, topic, owner, lease, take)
    except TopicFenced:  # by the lease, which ended before we knew
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
    """Writes the owner key and the record that `decide` returns, in one transaction."""
    record_key, owner_key = catalog.keys.record(topic), catalog.keys.owner(topic)
    for _ in range(_TRIES):
        entry, held = catalog.kv.get(record_key), catalog.kv.get(owner_key)
        record = None if entry is None else decode_record(entry.value, TopicRecord, record_key)
        holder = None if held is None else decode_record(held.value, Owner, owner_key)
        wanted = decide(record, holder)
        writes = [
            Put(record_key, encode_record(wanted)),
            Put(owner_key, encode_record(replace(owner, epoch=wanted.epoch)), lease),
        ]
        if record is None and wanted.reserved == 0:
            writes.append(Put(catalog.keys.job_state(topic, ORIGIN_NAME), ORIGIN_HERE.encode()))
        compares = [
            Compare(record_key, entry.revision if entry else ABSENT),
            Compare(owner_key, held.revision if held else ABSENT),
        ]
        if catalog.kv.commit(compares, writes) is not None:
            return wanted
    raise TopicOwned(f"{topic}: others take the topic over all the time")
