"""`ManagedLedger`: a topic's history as Pulsar sees it, as ledgers, and the offload of a prefix.

A ledger is one object of the topic, and its entry `n` is the message with the offset `start + n`.
Sealed segments that are not offloaded yet are shown as the ledgers that they would make now, with
the ids that these would get. The last ledger is open, and never offloaded. Objects that are not
ledgers, because the topic had another format, are left out: their messages have no position.

`offload_prefix` follows `asyncOffloadPrefix` of Pulsar. Only the ledger id of the position matters.
What it does is an upload like any other, by `Uploader.offload`.

Beware: a ledger may be cut another way when it is offloaded, if the settings of the topic change
before. Its id and its offsets are settled when the first attempt to write it begins.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

from forebay.catalog.ledgers import LedgerAttempt, LedgerIds
from forebay.catalog.records import TopicRecord
from forebay.errors import (
    ForebayError,
    InvalidPosition,
    OffloadInProgress,
    ServiceUnavailable,
    UsageError,
)
from forebay.format.descriptor import ObjectDescriptor, decode_outline
from forebay.format.names import parse_ledger
from forebay.interrupts import run_aside
from forebay.logs import event
from forebay.metrics import Counter
from forebay.topic.storage import WalStorage
from forebay.upload.plan import PlannedObject
from forebay.upload.uploader import Uploader
from forebay.wal.segment import Segment

_log: Final = logging.getLogger("forebay.pulsar")
_TRIES: Final = 100
OFFLOADS: Final = Counter(
    "forebay_pulsar_offloads_total",
    "Offloads of a prefix of a topic's ledgers that were asked for, by result.",
    ["result"],
)


class Position(NamedTuple):
    """A message as Pulsar names it."""

    ledger_id: int
    entry_id: int

    def __str__(self) -> str:
        return f"{self.ledger_id}:{self.entry_id}"


EARLIEST: Final = Position(-1, -1)
LATEST: Final = Position(2**63 - 1, 2**63 - 1)


@dataclass(frozen=True, slots=True)
class OffloadContext:
    """What is known of the offload of one ledger."""

    uid: str
    """The UUID of the last attempt."""
    complete: bool = False
    """Whether the ledger is in the object store, and committed."""
    local_deleted: bool = False
    """Whether no local segment has its messages any more."""
    timestamp_ms: int = 0
    """When the offload was complete; 0 before."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """One ledger of a topic."""

    ledger_id: int
    start_offset: int
    next_offset: int
    size: int
    """Bytes of the messages as frames."""
    closed_ms: int | None
    """When its last message was written, as far as that is known; None while it is open."""
    context: OffloadContext | None = None
    """None if no attempt to offload it was made."""

    @property
    def entries(self) -> int:
        return self.next_offset - self.start_offset

    @property
    def offloaded(self) -> bool:
        """Whether its offload is complete."""
        return self.context is not None and self.context.complete


class OffloadState(StrEnum):
    """What became of the last offload of a prefix in this process."""

    NOT_RUN = "NOT_RUN"
    RUNNING = "RUNNING"
    SUCCESS = "SUCCESS"
    ERROR = "ERROR"


@dataclass(frozen=True, slots=True)
class OffloadStatus:
    state: OffloadState = OffloadState.NOT_RUN
    error: str = ""
    first_unoffloaded: Position | None = None
    """After a success: before it everything is offloaded."""


# -- what there is: pure --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class History:
    """What a topic's ledgers are made of."""

    objects: Sequence[ObjectDescriptor]
    """Without their indexes, of which each may have thousands of entries."""
    planned: Sequence[PlannedObject]
    """The ledgers that the sealed segments after the objects make."""
    attempts: Sequence[LedgerAttempt]
    """Attempts that are not committed."""
    ids: LedgerIds
    local_start: int
    """The oldest offset in a local segment."""
    end: int
    """Where the topic ends."""
    open_size: int
    """Bytes of the messages that are in no sealed segment."""
    closed_ms: Sequence[int]
    """When the last message of each planned ledger was written."""


def ledgers_of(history: History) -> list[Ledger]:
    """Returns a topic's ledgers, oldest first. The last one is open."""
    found = [_committed(each, history.local_start) for each in history.objects if each.is_ledger]
    # Whoever writes a ledger that begins there takes its id, even if it ends elsewhere now.
    attempts = {each.start: each for each in history.attempts}
    given = 0
    for planned, closed_ms in zip(history.planned, history.closed_ms, strict=True):
        attempt = attempts.get(planned.start_offset)
        if attempt is None:
            ledger_id, context = history.ids.at(history.ids.given + given), None
            given += 1
        else:
            name = attempt.name
            ledger_id = name.ledger_id
            context = OffloadContext(name.uid)
        found.append(
            Ledger(
                ledger_id,
                planned.start_offset,
                planned.next_offset,
                planned.size,
                closed_ms,
                context,
            )
        )
    last = history.objects[-1].next_offset if history.objects else history.local_start
    begin = history.planned[-1].next_offset if history.planned else last
    open_id = history.ids.at(history.ids.given + given)
    end = max(history.end, begin)
    found.append(Ledger(open_id, begin, end, history.open_size, None))
    return found


def _committed(descriptor: ObjectDescriptor, local_start: int) -> Ledger:
    name = parse_ledger(descriptor.object_id)
    assert name is not None, "the format of a descriptor and its name agree"
    made_ms = descriptor.created_at * 1000
    deleted = local_start >= descriptor.next_offset
    return Ledger(
        name.ledger_id,
        descriptor.start_offset,
        descriptor.next_offset,
        descriptor.logical_size,
        descriptor.highest_publish_time or made_ms,
        OffloadContext(name.uid, complete=True, local_deleted=deleted, timestamp_ms=made_ms),
    )


def require_position(ledgers: Sequence[Ledger], position: Position) -> None:
    """Raises InvalidPosition unless a ledger has the entry, or the open one could have it next."""
    for ledger in ledgers:
        if ledger.ledger_id == position.ledger_id:
            last = ledger.entries if ledger.closed_ms is None else ledger.entries - 1
            if 0 <= position.entry_id <= last:
                return
    raise InvalidPosition(
        f"invalid position for an offload: {position} is in none of the topic's ledgers, "
        f"{ledgers[0].ledger_id} to {ledgers[-1].ledger_id}"
    )


def before(ledgers: Sequence[Ledger], position: Position) -> tuple[list[Ledger], Position]:
    """Returns the ledgers to offload, and the first position that stays unoffloaded.

    These are the ledgers before the one of the position, without those that are offloaded. The open
    one is never among them.
    """
    number = [each.ledger_id for each in ledgers].index(position.ledger_id)
    closed = ledgers[: min(number, len(ledgers) - 1)]
    chosen = [each for each in closed if not each.offloaded and each.entries]
    return chosen, Position(ledgers[len(closed)].ledger_id, 0)


# -- one topic ------------------------------------------------------------------------------------


class ManagedLedger:
    """The ledgers of a topic that this process owns. Thread-safe. See `managed_ledger`."""

    def __init__(self, storage: WalStorage) -> None:
        self._storage = storage
        self._lock = threading.Lock()
        self._status = OffloadStatus()

    def ledgers(self) -> list[Ledger]:
        """Returns the topic's ledgers, oldest first; the last one is open. Asks the catalog."""
        return run_aside(self._ledgers)

    def _ledgers(self) -> list[Ledger]:
        storage, uploader = self._storage, self._storage.uploader
        if uploader is None or storage.settings is None:
            raise UsageError(f"{storage.name}: a store in memory offloads nothing")
        rows = uploader.catalog.ledgers(uploader.topic)
        for _ in range(_TRIES):
            ids, record = rows.settled_ids(), uploader.record()
            history = self._history(storage, uploader, record, ids)
            # An offload that began or ended meanwhile would give a ledger two ids, or none.
            if (rows.ids(), uploader.record().tail) == (ids, record.tail):
                return ledgers_of(history)
        raise ServiceUnavailable(f"{storage.name}: its ledgers kept changing; try again")

    def _history(
        self, storage: WalStorage, uploader: Uploader, record: TopicRecord, ids: LedgerIds
    ) -> History:
        rows = uploader.catalog.ledgers(uploader.topic)
        segments = list(storage.wal.segments())
        planned = uploader.planned_ledgers(record.tail, force=True) if self._offloads() else []
        return History(
            list(uploader.catalog.get_object_descriptors(uploader.topic, decoder=decode_outline)),
            planned,
            list(rows.attempts(record.tail)),
            ids,
            _local_start(segments, record),
            storage.wal.watermarks().synced,
            sum(each.size for each in segments if not each.sealed),
            [_closed_ms(segments, each) for each in planned],
        )

    def _offloads(self) -> bool:
        settings = self._storage.settings
        return settings is not None and settings.uploader.ledgers

    def status(self) -> OffloadStatus:
        """Returns what became of the last `offload_prefix` since the topic was opened."""
        with self._lock:
            return self._status

    def offload_prefix(self, position: Position) -> Position:
        """Offloads the closed ledgers before that of the position; returns what stays first.

        Nothing to offload is a success. A ledger that fails does not stop the others; then the
        first error is raised. Raises UsageError if the topic is not uploaded as ledgers,
        InvalidPosition, and OffloadInProgress if another offload of the topic runs.
        """
        chosen, first = self._begin(position)
        return self._run(chosen, first)

    def start_offload(self, position: Position) -> None:
        """The same in the background: `status` says what becomes of it. Raises the same errors."""
        chosen, first = self._begin(position)
        name = "forebay-offload"
        thread = threading.Thread(
            target=self._run_quietly, args=(chosen, first), name=name, daemon=True
        )
        thread.start()

    def _begin(self, position: Position) -> tuple[list[Ledger], Position]:
        with self._lock:
            self._require_none()  # before all ledgers are listed, which may be many
        self._storage.refresh_settings()
        if not self._offloads():
            raise UsageError(
                f"{self._storage.name} does not support offload: its format is 'dnb1'; set the "
                "topic's format to 'pulsar'"
            )
        ledgers = self.ledgers()
        require_position(ledgers, position)
        chosen, first = before(ledgers, position)
        with self._lock:
            self._require_none()
            self._status = OffloadStatus(OffloadState.RUNNING)
        return chosen, first

    def _require_none(self) -> None:
        if self._status.state is OffloadState.RUNNING:
            raise OffloadInProgress(
                f"{self._storage.name}: an offload of the topic is running; try again when it has "
                "ended"
            )

    def _run(self, chosen: Sequence[Ledger], first: Position) -> Position:
        try:
            if chosen:
                self._storage.offload(chosen[-1].next_offset)
        except BaseException as error:
            OFFLOADS.add(1, "error")
            with self._lock:
                self._status = OffloadStatus(OffloadState.ERROR, str(error))
            raise
        OFFLOADS.add(1, "success")
        with self._lock:
            self._status = OffloadStatus(OffloadState.SUCCESS, first_unoffloaded=first)
        return first

    def _run_quietly(self, chosen: Sequence[Ledger], first: Position) -> None:
        try:
            self._run(chosen, first)
        except ForebayError as error:
            event(_log, logging.ERROR, "offload failed", topic=self._storage.name, error=error)


def _local_start(segments: Sequence[Segment], record: TopicRecord) -> int:
    held = [each.first_offset for each in segments if each.count]
    return min(held) if held else record.tail


def _closed_ms(segments: Sequence[Segment], planned: PlannedObject) -> int:
    last = planned.extents[-1].seq
    return next((each.modified_ms for each in segments if each.seq == last), 0)


_known: Final[WeakKeyDictionary[WalStorage, ManagedLedger]] = WeakKeyDictionary()
_knowing: Final = threading.Lock()


def managed_ledger(storage: WalStorage) -> ManagedLedger:
    """Returns the managed ledger of a topic, the same one each time."""
    with _knowing:
        found = _known.get(storage)
        if found is None:
            found = _known[storage] = ManagedLedger(storage)
        return found
