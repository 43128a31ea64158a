"""Deletes a topic from the catalog and from the object store, and lets one of its name follow it.

The topic's record changes first, in one transaction that compares the record and its owner: it is
`deleting`, has a new epoch, and every offset in it is the one at which a topic of the same name
would begin. From then on nobody can take the topic, append, upload, commit or read it. What remains
is done by `finish_deletion`: a begin marker in the store, then the rows, then the objects, then the
record is `deleted`. Every step can be repeated, by any process and by several at once:

- A row is removed in a transaction that compares the record, so never a row of a later topic.
- An object is deleted only if its name ends before the offset at which a later topic begins.
- The marker has the nonce of the record, so it is created once.

The record and the marker stay for ever. With the record, a topic that is created again goes on
after every offset of the deleted one. With the marker, `forebay restore` knows the same from the
object store alone. Whoever still writes objects of the deleted topic, such as a stalled executor,
cannot commit them, and their names are never used again. A sweep removes them.

Beware: the local log is not here. `forebay.topic.deletion` removes it before it calls this.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from forebay.catalog.adopt import deleting
from forebay.catalog.catalog import Catalog, Change
from forebay.catalog.kv import ABSENT, Compare, Entry, Put, Remove
from forebay.catalog.records import Deletion, Owner, TopicRecord, decode_record, encode_record
from forebay.errors import (
    ServiceUnavailable,
    TopicFenced,
    TopicOwned,
    UnknownTopic,
)
from forebay.format.marker import BeginMarker
from forebay.format.names import (
    MarkerName,
    TopicName,
    after_prefix,
    is_finished,
    object_key,
    objects_prefix,
    parse_pending,
    sidecar,
)
from forebay.limits import CATALOG_OPERATIONS_MAX, CATALOG_PAGE, LOG_DISTANCE, OFFSET_MAX
from forebay.logs import event
from forebay.objects.backend import Backend, ObjectMeta
from forebay.objects.markers import StoredMarker, create_marker, in_order, read_marker
from forebay.upload.inventory import Stored, span_of, walk
from forebay.wal.identity import new_nonce

_log: Final = logging.getLogger("forebay.upload")
_TRIES: Final = 100
_ROWS_MAX: Final = min(100, CATALOG_OPERATIONS_MAX)
"""Rows that one transaction removes."""
_AFTER_MAX: Final = 1000
"""Objects after the tail that are looked up. There are few, unless the catalog is an older copy."""
_NEXT_KEY: Final = "\1"


@dataclass(frozen=True, slots=True)
class DeletedTopic:
    """What a deletion removed. After one that was interrupted, only what was left."""

    topic: str
    next_offset: int
    """Where a topic of the same name begins."""
    objects: int = 0
    """Objects in the store, without sidecars and markers."""
    bytes: int = 0
    rows: int = 0
    """Rows of the catalog: descriptors, cursors, settings, states of jobs."""
    files: int = 0
    """Local files."""
    unknown: int = 0
    """Files in the store below the topic's prefix that were kept: their names are not ours."""


# -- the decision ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredEvidence:
    """What the store shows of the offsets of a topic."""

    highest: int
    """The highest of all object ends and begin markers."""
    newest: MarkerName | None
    marker: BeginMarker | None
    """The content of the newest marker; None if there is none, or it is damaged."""
    after: tuple[str, ...]
    """Objects that begin at the tail or after it."""


def look_at_store(store: Backend, topic: TopicName, tail: int) -> StoredEvidence:
    """Lists the topic's objects and markers, and reads the newest marker."""
    highest = 0
    markers: list[StoredMarker] = []
    after: list[str] = []
    for found in walk(store, topic):
        if isinstance(found, StoredMarker):
            markers.append(found)
        elif isinstance(found, Stored) and (span := span_of(store, found)) is not None:
            highest = max(highest, span[1])
            if span[0] >= tail and len(after) < _AFTER_MAX:
                after.append(found.object_id)
    newest = in_order(markers)[-1] if markers else None
    marker = None if newest is None else read_marker(store, newest)
    if newest is not None:
        highest = max(highest, newest.name.offset)
    return StoredEvidence(highest, None if newest is None else newest.name, marker, tuple(after))


def _is_older(
    catalog: Catalog, topic: TopicName, record: TopicRecord, seen: StoredEvidence
) -> bool:
    """Whether the store shows that the catalog is an older copy (rule R11)."""
    marker, newest = seen.marker, seen.newest
    if newest is not None and newest > (record.begin, record.begin_attempt):
        known = marker is not None and (
            marker.nonce == record.nonce or marker.epoch <= record.marked
        )
        if not known:
            return True
    return any(catalog.life(topic, object_id) is None for object_id in seen.after)


def next_offset_after(
    catalog: Catalog, topic: TopicName, record: TopicRecord, seen: StoredEvidence, end: int | None
) -> int:
    """Returns an offset after all that the topic may have assigned (rules R4 and R9).

    `end` is where its log ends, if the caller knows that for this record's epoch.
    """
    if _is_older(catalog, topic, record, seen):
        return min(max(seen.highest, record.reserved) + LOG_DISTANCE, OFFSET_MAX)
    used = record.reserved if end is None else end
    return max(used, record.tail, seen.highest)


def deleted_record(record: TopicRecord, next_offset: int, epoch: int) -> TopicRecord:
    """Returns the record with which the deletion of a topic begins."""
    at = next_offset
    return TopicRecord(
        epoch=epoch,
        log_id=deleting(),
        start_offset=at,
        tail=at,
        verified=at,
        reserved=at,
        nonce=new_nonce(),
        assigned=at,
        begin=record.begin,
        begin_attempt=record.begin_attempt,
        marked=record.marked,
        deletion=Deletion.DELETING,
        extra=record.extra,
    )


# -- the deletion ---------------------------------------------------------------------------------


def begin_deletion(
    catalog: Catalog,
    store: Backend,
    topic: TopicName,
    *,
    ended: Callable[[Owner], bool] = lambda _owner: False,
    end: Callable[[TopicRecord], int | None] = lambda _record: None,
    before: Callable[[], None] = lambda: None,
) -> TopicRecord:
    """Marks the topic as being deleted, and returns its new record. See `finish_deletion`.

    `ended` says whether an owner that the catalog has cannot use the topic any more. `end` returns
    where the log of the record's epoch ends, or None if the caller does not know. `before` is
    called once everything has responded, before anything is changed. A topic that is marked
    already stays as it is. Raises UnknownTopic, and TopicOwned while another process owns the
    topic.
    """
    record_key, owner_key = catalog.keys.record(topic), catalog.keys.owner(topic)
    known = catalog.find(topic)
    seen = look_at_store(store, topic, known.tail if known is not None else 0)
    prepared = False
    for _ in range(_TRIES):
        entry, held = catalog.kv.get(record_key), catalog.kv.get(owner_key)
        record = None if entry is None else decode_record(entry.value, TopicRecord, record_key)
        if entry is None or record is None or record.deletion is Deletion.DELETED:
            raise UnknownTopic(f"there is no topic {topic} in {catalog.name}")
        if record.is_deleted:
            return record
        _require_free(topic, held, ended)
        if not prepared:
            prepared = True
            before()
            continue  # what was read may have changed
        next_offset = next_offset_after(catalog, topic, record, seen, end(record))
        marked = seen.marker.epoch if seen.marker is not None else 0
        wanted = deleted_record(record, next_offset, max(record.epoch, marked) + 1)
        compares = [
            Compare(record_key, entry.revision),
            Compare(owner_key, ABSENT if held is None else held.revision),
        ]
        writes: list[Put | Remove] = [
            Put(record_key, encode_record(wanted)),
            Remove(owner_key),
        ]
        if catalog.kv.commit(compares, writes) is not None:
            event(_log, logging.INFO, "topic is being deleted", topic=topic, next=next_offset)
            return wanted
    raise ServiceUnavailable(
        f"{topic}: other processes kept changing the topic in {catalog.name}; try again"
    )


def _require_free(topic: TopicName, held: Entry | None, ended: Callable[[Owner], bool]) -> None:
    holder = None if held is None else decode_record(held.value, Owner, held.key)
    if holder is not None and not ended(holder):
        raise TopicOwned(
            f"{topic} is owned by {holder.name} (epoch {holder.epoch}), whose lease is alive: "
            "delete it through that process, close it there, or wait until its lease ends"
        )


def finish_deletion(
    catalog: Catalog,
    store: Backend,
    topic: TopicName,
    check: Callable[[], None] = lambda: None,
) -> DeletedTopic | None:
    """Removes everything of a topic that is being deleted, except its local log.

    Of one that was deleted before, it removes rows that were written late. Returns None if the
    topic was not deleted, or was created again since. `check` is called for every object, and may
    raise to end it.
    """
    record = catalog.find(topic)
    if record is None or not record.is_deleted:
        return None
    try:
        if record.deletion is Deletion.DELETED:
            return DeletedTopic(str(topic), record.tail, rows=_remove_rows(catalog, topic, record))
        return _Finishing(catalog, store, topic, record, check).run()
    except TopicFenced:  # another process finished it, and the topic was created again
        return None


class _Finishing:
    def __init__(
        self,
        catalog: Catalog,
        store: Backend,
        topic: TopicName,
        record: TopicRecord,
        check: Callable[[], None],
    ) -> None:
        self._catalog = catalog
        self._store = store
        self._topic = topic
        self._record = record
        self._check = check
        self._objects = self._bytes = self._unknown = 0

    def run(self) -> DeletedTopic:
        marker = self._mark()
        # Rows first: a reader that misses an object then learns that the topic was deleted.
        rows = _remove_rows(self._catalog, self._topic, self._record)
        self._delete_objects(marker)
        self._update(lambda now: replace(now, deletion=Deletion.DELETED, log_id=None, nonce=None))
        done = DeletedTopic(
            str(self._topic),
            self._record.tail,
            objects=self._objects,
            bytes=self._bytes,
            rows=rows,
            unknown=self._unknown,
        )
        event(
            _log,
            logging.INFO,
            "topic deleted",
            topic=self._topic,
            objects=done.objects,
            bytes=done.bytes,
            rows=done.rows,
            next=done.next_offset,
        )
        return done

    def _update(self, change: Callable[[TopicRecord], TopicRecord]) -> None:
        def changed(now: TopicRecord) -> Change:
            # Another process may have ended the deletion already.
            return Change(now if now.deletion is Deletion.DELETED else change(now))

        self._catalog.update(self._topic, self._record.epoch, changed, deleted=True)

    def _mark(self) -> MarkerName:
        """Creates the begin marker that stays, before the first object is deleted."""
        record, nonce = self._record, self._record.nonce or new_nonce()
        if record.begin == record.tail and record.marked >= record.epoch:
            return MarkerName(record.begin, record.begin_attempt)  # it was created before
        marker = BeginMarker(nonce, nonce, record.epoch, record.tail, deleted=True)
        name = create_marker(self._store, self._topic, record.tail, marker)
        self._update(
            lambda now: replace(
                now, begin=name.offset, begin_attempt=name.attempt, marked=record.epoch
            )
        )
        return name

    def _delete_objects(self, kept: MarkerName) -> None:
        """Deletes all objects, and the markers before the one that stays."""
        for found in walk(self._store, self._topic):
            self._check()
            if isinstance(found, ObjectMeta):
                self._unknown += 1
            elif isinstance(found, StoredMarker):
                if found.name < kept:
                    self._store.delete_object(found.meta.key)
            elif belongs_before(self._store, found, self._record.tail):
                delete_stored(self._store, self._topic, found)
                if found.object is not None:
                    self._objects += 1
                    self._bytes += found.object.size


def belongs_before(store: Backend, found: Stored, offset: int) -> bool:
    """Whether the object holds only offsets before `offset`. The end of a pending one is unknown,
    and no object begins before a deletion and ends after it. False for a ledger without its index
    object: nothing says which offsets it was written for."""
    span = span_of(store, found)
    if span is not None:
        return span[1] <= offset
    start = parse_pending(found.object_id)
    return start is not None and start < offset


def delete_stored(store: Backend, topic: TopicName, found: Stored) -> None:
    """Deletes an object and its sidecar, the sidecar first."""
    if found.sidecar is not None or is_finished(found.object_id):
        store.delete_object(object_key(topic, sidecar(found.object_id)))
    for meta in (found.index, found.object):
        if meta is not None:
            store.delete_object(meta.key)


def _remove_rows(catalog: Catalog, topic: TopicName, record: TopicRecord) -> int:
    """Removes all rows of the topic but its record; returns how many.

    Each transaction compares the record, and that there is no topic of this name that is not
    stored: none of these rows belongs to a later topic.
    """
    count = 0
    other = catalog.keys.nonreliable(topic)
    for page in _pages(catalog, topic):
        for at in range(0, len(page), _ROWS_MAX):
            removes = tuple(Remove(key) for key in page[at : at + _ROWS_MAX])

            def change(now: TopicRecord, removes: tuple[Remove, ...] = removes) -> Change:
                if catalog.kv.get(other) is not None:
                    return Change(now)
                return Change(now, removes, (Compare(other, ABSENT),))

            if catalog.kv.get(other) is not None:
                return count
            catalog.update(topic, record.epoch, change, deleted=True)
            count += len(removes)
    return count


def _pages(catalog: Catalog, topic: TopicName) -> Iterator[list[str]]:
    """Yields the keys of the topic's rows, without its record, a page at a time."""
    keys = catalog.keys
    for prefix in (keys.topic(topic), keys.cursors(topic), keys.subscriptions(topic)):
        at, end = prefix, after_prefix(prefix)
        while page := catalog.kv.range(at, end, limit=CATALOG_PAGE):
            found = [entry.key for entry in page if entry.key != keys.record(topic)]
            if found:
                yield found
            at = page[-1].key + _NEXT_KEY


# -- a deletion that only the store knows ---------------------------------------------------------


def adopt_deletion(catalog: Catalog, topic: TopicName, name: MarkerName, epoch: int) -> TopicRecord:
    """Records that the topic was deleted, as a marker in the store shows, and returns the record.

    For a catalog that was lost, or is an older copy. Raises TopicOwned while a process owns the
    topic.
    """
    record_key, owner_key = catalog.keys.record(topic), catalog.keys.owner(topic)
    for _ in range(_TRIES):
        entry, held = catalog.kv.get(record_key), catalog.kv.get(owner_key)
        record = None if entry is None else decode_record(entry.value, TopicRecord, record_key)
        if record is not None and (record.is_deleted or record.start_offset >= name.offset):
            return record
        _require_free(topic, held, lambda _owner: False)
        base = record or TopicRecord()
        epoch = max(base.epoch, epoch)
        # Not after what an older copy has reserved: a later topic may have begun at the marker.
        wanted = replace(
            deleted_record(base, name.offset, epoch),
            begin=name.offset,
            begin_attempt=name.attempt,
            marked=epoch,
        )
        compares = [
            Compare(record_key, ABSENT if entry is None else entry.revision),
            Compare(owner_key, ABSENT if held is None else held.revision),
        ]
        if catalog.kv.commit(compares, [Put(record_key, encode_record(wanted))]) is not None:
            prefix = objects_prefix(topic)
            event(_log, logging.WARNING, "deletion found in the store", key=prefix + str(name))
            return wanted
    raise ServiceUnavailable(
        f"{topic}: other processes kept changing the topic in {catalog.name}; try again"
    )
