"""Takes ownership of a topic: which log is the newest, which offset comes next, what is lost.

`settle` makes the decision without I/O (rule R4). The catalog holds the id and the nonce of the log
with the topic's newest messages, and up to where offsets are reserved. The local log continues if
it has that nonce, and ends where the catalog says or later. An older copy of it is refused. Without
that log, a new one begins after the reserved offsets. What was not uploaded is then lost, and the
rest of the reserved offsets may never have been used.

An older copy of the catalog is told by the object store (rule R11). Before a topic is taken,
`_look` searches for a newer begin marker, for an object that begins at the tail, and for the last
committed object. If the store is away, a log that the catalog proves to be the newest opens
nevertheless, and `finish_looking` repeats the search before the first upload.

Beware: a topic that is not in the catalog but has objects is refused, because its offsets would be
assigned twice. Run `forebay restore` first.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import islice
from pathlib import Path
from typing import Final

from forebay.catalog.adopt import is_restoring, unfinished
from forebay.catalog.catalog import Catalog, Change
from forebay.catalog.ledgers import LedgerAttempt
from forebay.catalog.ownership import Ownership, Session, acquire
from forebay.catalog.records import State, TopicRecord, skip_holes
from forebay.clock import Clock
from forebay.errors import (
    CommitRefused,
    ForebayError,
    LogClosed,
    MissingData,
    ObjectMissing,
    ServiceError,
    TopicFenced,
    TopicOwned,
)
from forebay.files.disk import Disk
from forebay.files.local import LocalDisk
from forebay.format.marker import BeginMarker
from forebay.format.names import (
    LedgerName,
    MarkerName,
    TopicName,
    object_key,
    object_of_file,
    objects_prefix,
    parse_ledger,
    parse_object,
)
from forebay.logs import event
from forebay.objects.markers import create_marker, list_markers, read_marker
from forebay.objects.store import CloudStore
from forebay.upload.inventory import Stored, span_of
from forebay.wal.identity import LocalLog, LogIdentity, new_log_id, new_nonce, write_nonces

_log: Final = logging.getLogger("forebay.topic")
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_LOOK_SECONDS: Final = 0.1
_LOOK_SECONDS_MAX: Final = 5.0
"""How long an opening waits for the object store, if the catalog proves that the log is newest."""
_OBJECTS_MAX: Final = 100
_NONCES_KEPT: Final = 6
_LEDGER_KEYS_MAX: Final = 30_000
"""Keys that are listed to find ledgers of which the catalog knows nothing."""


class Standing(Enum):
    """What a local log is to the topic."""

    CURRENT = auto()
    OLDER = auto()
    """An older copy of the log with the newest messages."""
    OTHER = auto()
    """Another log, or one without messages."""


def stand(record: TopicRecord, local: LocalLog) -> Standing:
    """Compares the local log with the record. A record of the first release has no nonce.

    A log that ends where the reserved offsets do has every message that the catalog knows of, even
    if its nonce is damaged or another copy was opened since.
    """
    if record.nonce is None:
        same = record.log_id in (local.log_id, None)
        return Standing.CURRENT if same and local.next_offset >= record.tail else Standing.OTHER
    if record.log_id != local.log_id:
        return Standing.OTHER
    complete = local.next_offset >= max(record.tail, record.assigned)
    if complete and (record.nonce in local.nonces or local.next_offset >= record.reserved):
        return Standing.CURRENT
    return Standing.OTHER if local.empty else Standing.OLDER


def settle(
    record: TopicRecord | None, local: LocalLog, fresh_id: str, nonce: str | None = None
) -> TopicRecord:
    """Returns the record with which this process takes the topic. The caller sets the epoch.

    If its `log_id` is `fresh_id`, a new log begins at its `tail`, and the local log is set aside.
    That is so if the topic was deleted: nothing of the deleted one is continued. Another record
    without a log id was rebuilt from the objects, and the local log continues it. Raises
    MissingData if a restore is not finished, if the local log is an older copy, or if messages are
    in neither objects nor the log.
    """
    if record is None:
        start = local.start_offset
        return TopicRecord(
            log_id=local.log_id,
            start_offset=start,
            tail=start,
            verified=start,
            reserved=local.next_offset,
            nonce=nonce,
            assigned=local.next_offset,
        )
    if is_restoring(record.log_id):
        begun, command = unfinished(record.log_id)
        raise MissingData(f"{begun} of the topic is not finished: run `{command}` again")
    if record.is_deleted:
        return replace(_fresh(record, local, fresh_id, nonce), deletion=None)
    record = replace(record, deletion=None)  # an earlier release created the topic again
    standing = stand(record, local)
    if standing is Standing.OLDER:
        raise MissingData(_older(record, local))
    if standing is Standing.CURRENT:
        if local.start_offset > record.tail:
            raise MissingData(
                f"the objects end at offset {record.tail}, but the local log begins at "
                f"{local.start_offset}: the messages in between are missing; find their objects "
                "and run `forebay restore`, or record them as lost with "
                "`forebay restore --allow-gaps`"
            )
        return replace(
            record,
            log_id=local.log_id,
            accept=False,
            nonce=nonce,
            assigned=max(record.assigned, local.next_offset),
            reserved=max(record.reserved, local.next_offset),
        )
    return _fresh(record, local, fresh_id, nonce)


def _fresh(record: TopicRecord, local: LocalLog, fresh_id: str, nonce: str | None) -> TopicRecord:
    """Returns the record for a new log, which begins after every offset that may be in use."""
    begin = max(record.tail, record.reserved, local.next_offset)
    certain = min(max(record.tail, record.assigned), begin)
    holes = record.with_lost(record.tail, certain).with_unknown(certain, begin)
    if record.accept:
        holes = holes.with_accepted(record.tail, begin)
    return replace(
        holes,
        accept=False,
        log_id=fresh_id,
        nonce=nonce,
        tail=begin,
        verified=skip_holes(holes, record.verified),
        assigned=begin,
        reserved=begin,
    )


def _older(record: TopicRecord, local: LocalLog) -> str:
    known = max(record.tail, record.assigned)
    what = (
        f"it ends at offset {local.next_offset}, but the catalog has seen offset {known - 1}"
        if local.next_offset < known
        else "it was opened since, and the catalog has the nonce of that opening"
    )
    return (
        f"the local log is an older copy of the topic's log: {what}; put the newest copy back, or "
        "run `forebay repair --apply --accept-loss`, which keeps the messages of this copy and "
        "records the later ones as lost. If it refuses because an object is missing, run "
        "`forebay restore --allow-gaps` before"
    )


def uncommitted_object(
    store: CloudStore, catalog: Catalog, topic: TopicName, tail: int
) -> str | None:
    """Returns the key of a finished object at the tail that the chain lacks, or None."""
    prefix = objects_prefix(topic)
    for meta in islice(store.list(f"{prefix}data-{tail}-"), _OBJECTS_MAX):
        object_id = meta.key.removeprefix(prefix)
        life = catalog.life(topic, object_id)
        if parse_object(object_id) and (life is None or life.state is State.INTENDED):
            return meta.key
    for attempt in islice(catalog.ledgers(topic).attempts(tail), _OBJECTS_MAX):
        if attempt.start == tail and (key := complete_ledger(store, topic, attempt)) is not None:
            return key
    return None


def complete_ledger(store: CloudStore, topic: TopicName, attempt: LedgerAttempt) -> str | None:
    """Returns the key of the index object of an attempt, if it is there: the ledger is complete."""
    key = object_key(topic, attempt.name.index_name)
    try:
        store.head(key)
    except ObjectMissing:
        return None
    return key


def _ledger_of(key: str, prefix: str) -> LedgerName | None:
    return parse_ledger(object_of_file(key.removeprefix(prefix)))


def _unmarked(record: TopicRecord, local: LocalLog) -> bool:
    """Whether a log may be without its first marker: it needs one before its first message."""
    return record.marked == 0 and local.empty


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
        self._unfinished: _Unfinished | None = None
        self._finishing = threading.Lock()
        self.record: TopicRecord | None = None

    @property
    def ownership(self) -> Ownership:
        if self._ownership is None:
            raise TopicFenced(f"{self._topic}: this process has not taken the topic")
        return self._ownership

    # -- taking the topic -----------------------------------------------------------------------

    def acquire(self, local: LocalLog) -> LogIdentity:
        """Takes the topic. Returns the id of the log to write and its next offset.

        Waits for another owner's lease to end, at most `wait_seconds`, then raises TopicOwned.
        Raises MissingData if objects or messages are not where they should be.
        """
        fresh_id, nonce = new_log_id(), new_nonce()
        lock = lock_name(self._disk, self._directory)
        seen: TopicRecord | None = None
        newest: MarkerName | None = None

        def decide(record: TopicRecord | None) -> TopicRecord:
            nonlocal seen, newest
            try:
                settled = settle(record, local, fresh_id, nonce)
            except MissingData as error:
                raise MissingData(f"{self._topic}: {self._advised(error, record, local)}") from None
            seen, newest = record, None
            try:
                newest = self._look_before(record, local, fresh=settled.log_id == fresh_id)
            except MissingData as error:
                raise self._still(record, error) from None
            if settled.log_id != fresh_id:
                # Beside another log, the record's nonce would make it look like the newest.
                self._intend(record, nonce)
            if newest is not None and newest > (settled.begin, settled.begin_attempt):
                settled = replace(settled, begin=newest.offset, begin_attempt=newest.attempt)
            return settled

        self._ownership, record = self._acquire(lock, decide)
        self.record = record
        fresh = record.log_id == fresh_id
        begin = record.tail if fresh else local.start_offset
        next_offset = record.tail if fresh else local.next_offset
        marker = BeginMarker(str(record.log_id), nonce, record.epoch, begin)
        if self._unfinished is None:
            required = seen is None or fresh or _unmarked(seen, local)
            self._mark(next_offset, marker, required=required)
        else:
            self._unfinished.marker = (next_offset, marker)
        # Until the marker exists, the newest one in the store has an earlier nonce of this log.
        before = () if fresh or self._unfinished is None else sorted(local.nonces)[:_NONCES_KEPT]
        write_nonces(self._disk, self._directory, nonce, *before)
        if fresh:
            self._log_holes(record)
        return LogIdentity(str(record.log_id), next_offset)

    def _look_before(
        self, record: TopicRecord | None, local: LocalLog, *, fresh: bool
    ) -> MarkerName | None:
        """Looks at the store before the topic is taken; returns the newest marker, if it is known.

        Only a log that the catalog proves, and that has its marker, can do without the store.
        """
        if record is None:
            self._require_nothing_stored()
            return None
        if fresh or _unmarked(record, local):
            return self._look(record, local, fresh=fresh)
        return self._look_if_possible(record, local)

    def _still(self, record: TopicRecord | None, error: MissingData) -> ForebayError:
        """Returns the error, or TopicOwned if another process took the topic during the look."""
        if self._session.catalog.find(self._topic) != record:
            return TopicOwned(f"{self._topic}: another process has just taken the topic; try again")
        return error

    def _intend(self, record: TopicRecord | None, nonce: str) -> None:
        """Writes the new nonce beside the log, before the catalog has it."""
        current = record.nonce if record is not None else None
        nonces = [nonce] if current is None else [current, nonce]
        write_nonces(self._disk, self._directory, *nonces)

    def _log_holes(self, record: TopicRecord) -> None:
        """Logs the range that this opening has recorded. It ends where the log begins."""
        for kind, ranges in (("are lost", record.lost), ("may be lost", record.unknown)):
            if ranges and ranges[-1][1] == record.tail:
                event(
                    _log,
                    logging.WARNING,
                    f"offsets {kind}: their log is not here, and the topic continues after them",
                    topic=self._topic,
                    first=ranges[-1][0],
                    last=ranges[-1][1] - 1,
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

    def _advised(self, error: MissingData, record: TopicRecord | None, local: LocalLog) -> str:
        """Returns the text of the error. Asks the store whether the log or the catalog is older."""
        if record is None or is_restoring(record.log_id) or record.is_deleted:
            return str(error)
        if stand(record, local) is not Standing.OLDER:
            return str(error)
        with suppress(ServiceError):
            catalog = self._session.catalog
            found = uncommitted_object(self._store, catalog, self._topic, record.tail)
            if found is not None:
                return (
                    f"the local log is an older copy, and {found} was uploaded and not committed: "
                    f"add it with `forebay restore {self._topic}` first"
                )
        if record.nonce not in local.nonces:
            with suppress(ServiceError):
                newest = next(reversed(list_markers(self._store, self._topic)), None)
                marker = None if newest is None else read_marker(self._store, newest)
                if marker is not None and marker.nonce in local.nonces:
                    return (
                        f"{self._session.catalog.name} is an older copy: the local log was opened "
                        "since, as a marker in the object store proves; bring the catalog up to "
                        f"date with `forebay restore {self._topic}`"
                    )
        return str(error)

    # -- what the object store knows ------------------------------------------------------------

    def _require_nothing_stored(self) -> None:
        """Raises MissingData if a topic that is not in the catalog has objects or markers."""
        found = next(iter(self._store.list(objects_prefix(self._topic))), None)
        if found is not None:
            raise MissingData(
                f"{self._topic}: {self._store.name} holds objects of the topic, such as "
                f"{found.key}, but the topic is not in {self._session.catalog.name}: "
                "rebuild it with `forebay restore` before appending"
            )

    def _look_if_possible(self, record: TopicRecord, local: LocalLog) -> MarkerName | None:
        """`_look`, unless the store does not respond soon: then it is repeated before an upload."""
        result: Future[MarkerName | None] = Future()

        def run() -> None:
            try:
                result.set_result(self._look(record, local))
            except BaseException as error:  # noqa: BLE001  # raised by `result`
                result.set_exception(error)

        thread = threading.Thread(target=run, name="forebay-look", daemon=True)
        thread.start()
        self._unfinished = None
        try:
            return result.result(_LOOK_SECONDS_MAX)
        except ServiceError as error:
            reason: object = error
        except TimeoutError:
            reason = f"no response in {_LOOK_SECONDS_MAX:g} seconds"
        self._unfinished = _Unfinished(record)
        event(
            _log,
            logging.WARNING,
            "the object store does not respond: the topic opens, and uploads wait",
            topic=self._topic,
            reason=reason,
        )
        return None

    def _look(
        self, record: TopicRecord, local: LocalLog | None = None, *, fresh: bool = False
    ) -> MarkerName | None:
        """Returns the newest begin marker, if there is one.

        Raises MissingData if the store shows that the catalog is an older copy: offsets would be
        assigned again. Makes a bounded number of requests, unless the log is fresh.
        """
        newest = next(reversed(list_markers(self._store, self._topic)), None)
        if newest is not None and newest.name > (record.begin, record.begin_attempt):
            marker = read_marker(self._store, newest)
            known = marker is not None and (
                marker.nonce == record.nonce or marker.epoch <= record.marked
            )
            if not known:
                raise self._outdated(f"the log was opened since, as {newest.meta.key} shows")
        held = 0 if fresh else local.next_offset if local is not None else None
        self._require_none_after(record.tail, held, fresh=fresh)
        self._require_last_object(record)
        return None if newest is None else newest.name

    def _require_none_after(self, tail: int, held: int | None, *, fresh: bool) -> None:
        """Raises MissingData if the store has an object after the tail that the catalog never knew.

        The next object begins at the tail, so one prefix is enough. Only for a fresh log all
        objects are listed: an earlier release left no markers, and the next object of another log
        begins after a hole. An object that was not committed counts if it ends at or after `held`,
        where the log ends: its messages are nowhere else.
        """
        prefix = objects_prefix(self._topic)
        found = self._store.list(prefix + "data-" if fresh else f"{prefix}data-{tail}-")
        for meta in found if fresh else islice(found, _OBJECTS_MAX):
            object_id = meta.key.removeprefix(prefix)
            name = parse_object(object_id)
            if name is None or name.start < tail:
                continue
            life = self._session.catalog.life(self._topic, object_id)
            if life is None:
                raise self._outdated(f"its objects end at offset {tail}, but {meta.key} exists")
            if held is not None and name.end >= held and life.state is State.INTENDED:
                raise self._uncommitted(meta.key)
        self._require_no_ledger_after(tail, held)

    def _uncommitted(self, key: str) -> MissingData:
        return MissingData(
            f"{self._topic}: {key} in {self._store.name} was uploaded and not committed, and the "
            f"log with its messages is not here: add it with `forebay restore {self._topic}` "
            "before appending"
        )

    def _require_no_ledger_after(self, tail: int, held: int | None) -> None:
        """The same for ledgers, whose names do not say where they begin.

        Their ids ascend: one that the catalog has not given shows that it is an older copy. Lists
        keys only if there are ledgers. The names of most begin with a digit, and come first.
        """
        ledgers = self._session.catalog.ledgers(self._topic)
        ids = ledgers.ids()
        prefix = objects_prefix(self._topic)
        first = next(iter(self._store.list(prefix)), None)
        if ids is None and (first is None or not _ledger_of(first.key, prefix)):
            return
        for meta in islice(self._store.list(prefix), _LEDGER_KEYS_MAX):
            found = _ledger_of(meta.key, prefix)
            if found is None or meta.key != prefix + found.index_name:
                continue
            if ids is None or found.ledger_id >= ids.next:
                # A topic of this name that was deleted may have left one.
                span = span_of(self._store, Stored(found.data_name, index=meta))
                if span is not None and span[0] >= tail:
                    raise self._outdated(f"it has never known the ledger {meta.key}")
        for attempt in islice(ledgers.attempts(tail), _OBJECTS_MAX):
            key = complete_ledger(self._store, self._topic, attempt)
            if held is not None and attempt.end > held and key is not None:
                raise self._uncommitted(key)

    def _require_last_object(self, record: TopicRecord) -> None:
        """Raises MissingData if the last committed object is not in the store."""
        catalog = self._session.catalog
        start = catalog.get_current_pointer(self._topic)
        if start is None:
            return
        found = catalog.get_object_descriptors_range(self._topic, start, start + 1, 1)
        if not found or found[0].start_offset != start or found[0].end_offset >= record.tail:
            return
        key = object_key(self._topic, found[0].object_id)
        try:
            size = self._store.head(key).size
        except ObjectMissing:
            what = "does not exist"
        else:
            if size == found[0].size:
                return
            what = f"has {size} bytes, not {found[0].size}"
        raise MissingData(
            f"{self._topic}: {self._store.name}: the last object in {catalog.name}, {key}, {what}. "
            f"If the catalog is an older copy, run `forebay restore {self._topic}`. If the object "
            f"was lost, put it back, or run `forebay repair {self._topic}`, which writes it again "
            "from the local log; `forebay restore --allow-gaps` records its offsets as lost"
        )

    def _outdated(self, why: str) -> MissingData:
        catalog = self._session.catalog.name
        return MissingData(
            f"{self._topic}: {catalog} is older than the objects in {self._store.name}: {why}. "
            f"Bring it up to date with `forebay restore {self._topic}` before appending"
        )

    def _mark(self, offset: int, marker: BeginMarker, *, required: bool) -> None:
        """Creates the begin marker of this opening. Later is early enough if it is not required."""
        try:
            self._create_marker(offset, marker)
        except BaseException as error:
            if required or not isinstance(error, ServiceError):
                self.release(offset)
                raise
            assert self.record is not None
            self._unfinished = _Unfinished(None, (offset, marker))
            event(
                _log,
                logging.WARNING,
                "no begin marker was created: it is tried again before the next upload",
                topic=self._topic,
                error=error,
            )

    def _create_marker(self, offset: int, marker: BeginMarker) -> None:
        name = create_marker(self._store, self._topic, offset, marker)

        def change(record: TopicRecord) -> Change:
            newest = max(name, (record.begin, record.begin_attempt))
            return Change(
                replace(
                    record,
                    begin=newest[0],
                    begin_attempt=newest[1],
                    marked=max(record.marked, marker.epoch),
                )
            )

        with suppress(ServiceError):  # the next opening knows the marker by its nonce
            self._session.catalog.update(self._topic, self.ownership.epoch, change)

    def finish_looking(self) -> None:
        """Does what the opening left out because the store was away. Call it before an upload.

        Raises ServiceError if the store is still away. If the store shows that the catalog and the
        log are older copies, raises MissingData, and nothing more can be appended.
        """
        with self._finishing:
            left = self._unfinished
            if left is None:
                return
            if left.record is not None:
                try:
                    self._look(left.record)
                except MissingData as error:
                    self.ownership.refuse(TopicFenced(str(error)))
                    raise
                left.record = None  # from here on the store may have our own marker
            if left.marker is not None:
                self._create_marker(*left.marker)
                with suppress(OSError):  # the earlier nonces in the file do no harm
                    write_nonces(self._disk, self._directory, left.marker[1].nonce)
            self._unfinished = None

    # -- giving the topic up --------------------------------------------------------------------

    def release(self, next_offset: int) -> None:
        """Gives the topic up. If that fails, the topic becomes free when the lease ends."""
        if self._ownership is not None:
            with suppress(ServiceError, TopicFenced, CommitRefused, LogClosed):
                self._ownership.release(next_offset)


@dataclass(slots=True)
class _Unfinished:
    """What an opening left out because the object store did not respond."""

    record: TopicRecord | None
    marker: tuple[int, BeginMarker] | None = None
