"""`commit_batch`: appends the staged rows of one batch through the owner, once.

The order of things, and what a crash after each of them leaves:

1. The topics are taken, and their notes read. Nothing has changed.
2. The manifest names the staged files, which are all there; a note in each topic says that the
   batch has begun.
3. Rows are appended in the order of partition and row. A crash leaves a prefix of the batch in
   the topics, which readers see; the next run of the same batch goes on behind it, from the files
   that the manifest names, whatever rows that run has staged itself.
4. Everything is synced, and the notes say that the batch is complete.
5. The staged files go.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from forebay.catalog.catalog import Catalog
from forebay.catalog.job_state import JobState, find_job_state, origin, write_job_state
from forebay.errors import FormatError, UsageError
from forebay.format.names import TopicName, parse_topic, write_of_staged
from forebay.limits import OFFSET_MAX
from forebay.logs import event
from forebay.metrics import Counter
from forebay.objects.store import CloudStore
from forebay.pipeline.sink.marks import (
    MARK,
    Action,
    Decision,
    Position,
    Run,
    SinkNote,
    below,
    decide,
    decode_note,
    encode_note,
    mark_prefix,
    shape_of,
)
from forebay.pipeline.sink.staging import (
    Part,
    discard,
    has_manifest,
    read_manifest,
    staged_rows,
    sweep_staging,
    write_manifest,
)
from forebay.pipeline.sink.topic_writer import Door

# ---- sink_commit


_log: Final = logging.getLogger("forebay.pipeline")
_SWEEP_BATCHES: Final = 100
"""A streaming query looks for forgotten files once in so many batches."""
ROWS: Final = Counter(
    "forebay_sink_rows_total",
    "Rows of batches that the sink committed: appended, or known, as they were there already.",
    ["outcome"],
)


@dataclass(frozen=True, slots=True)
class Committed:
    """What became of a batch's rows."""

    appended: int
    known: int


@dataclass(slots=True)
class _Target:
    """One topic of a batch."""

    name: TopicName
    rows: int
    note: JobState | None
    before: SinkNote | None
    origin: str | None
    decision: Decision
    last: Position | None = None
    """The last row of the batch that is there."""


def commit_batch(
    door: Door, catalog: Catalog, store: CloudStore, run: Run, parts: Sequence[Part]
) -> Committed:
    """Appends what is not there yet; answers how many rows that were, and how many were there.

    UsageError if rows would be dropped that were never appended. After any other error the same
    batch can be committed again.
    """
    return _Commit(door, catalog, store, run)(parts)


def forget_parts(store: CloudStore, parts: Sequence[Part]) -> None:
    """After a failure: the staged files go, unless a batch that was begun needs them."""
    written = [(write_of_staged(part.key), part) for part in parts if part.key is not None]
    begun = {write for write in {write for write, _ in written} if has_manifest(store, write)}
    discard(store, [part for write, part in written if write not in begun], manifests=False)


def sweep_if_due(store: CloudStore, run: Run) -> None:
    """Removes forgotten staged files, now and then: a listing is a request."""
    if run.streaming and run.batch % _SWEEP_BATCHES:
        return
    swept = sweep_staging(store)
    if swept:
        event(_log, logging.WARNING, "forgotten staged files removed", files=swept)


def note_name(sink_id: str) -> str:
    return f"sink/{sink_id}"


def read_sink_note(catalog: Catalog, topic: TopicName, sink_id: str) -> SinkNote | None:
    """What the catalog remembers of the sink in the topic."""
    note = find_job_state(catalog, topic, note_name(sink_id))
    return None if note is None else decode_note(note.value, f"{topic}: {note.name}")


class _Commit:
    def __init__(self, door: Door, catalog: Catalog, store: CloudStore, run: Run) -> None:
        self._door = door
        self._catalog = catalog
        self._store = store
        self._run = run

    def __call__(self, parts: Sequence[Part]) -> Committed:
        parts = _in_order(parts)
        if not parts:
            return Committed(0, 0)
        targets = self._targets(parts)
        first = self._first_attempt(targets, parts)
        chosen = parts if first is None else first
        if first is not None:
            targets = self._targets(first)
        for target in targets.values():
            self._look(target, chosen)
        total = sum(target.rows for target in targets.values())
        wanted = {
            name: target
            for name, target in targets.items()
            if target.decision.action is not Action.KNOWN
        }
        appended = 0
        if wanted:
            _require_staged(self._store, chosen)
            appended = self._append_all(wanted, chosen)
        discard(self._store, chosen)
        if first is not None:
            discard(self._store, parts)
        self._tell(targets, appended, total - appended)
        return Committed(appended, total - appended)

    # -- what is there --------------------------------------------------------------------------

    def _targets(self, parts: Sequence[Part]) -> dict[str, _Target]:
        """The topics of the batch, each of them owned from here on."""
        rows: dict[str, int] = {}
        for part in parts:
            for name, count in part.topics.items():
                rows[name] = rows.get(name, 0) + count
        return {name: self._target(parse_topic(name), count, parts) for name, count in rows.items()}

    def _target(self, topic: TopicName, rows: int, parts: Sequence[Part]) -> _Target:
        self._door.end(topic)  # from here on nobody else changes the topic or its notes
        note, before, came_from = None, None, None
        if self._run.named:
            name = note_name(self._run.sink_id)
            note = find_job_state(self._catalog, topic, name)
            before = None if note is None else decode_note(note.value, f"{topic}: {name}")
            came_from = origin(self._catalog, topic)
        digest = digest_of(parts)
        decision = decide(topic, self._run, before, came_from, rows, digest)
        return _Target(topic, rows, note, before, came_from, decision)

    def _first_attempt(
        self, targets: dict[str, _Target], parts: Sequence[Part]
    ) -> list[Part] | None:
        """The files from which an earlier run began to append this batch, if they are there.

        A query that runs again may cut its rows into other partitions, or find other rows. What
        was begun must go on with what it began with.
        """
        own = {write_of_staged(part.key) for part in parts if part.key is not None}
        for target in targets.values():
            before = target.before
            if target.decision.action is Action.RESUME and before and before.write not in own:
                found = read_manifest(self._store, before.write)
                if found is not None:
                    return _in_order(found)
        return None

    def _look(self, target: _Target, parts: Sequence[Part]) -> None:
        """Looks into the log where the note does not say enough."""
        decision, before, run = target.decision, target.before, self._run
        if decision.action is Action.RESUME and before is not None:
            self._require_same_shape(target, before, parts)
        if before is not None and before.batch < run.batch and not before.done:
            self._say_left_behind(target.name, before)
        if decision.look_from is None:
            return
        found = self._door.last(target.name, run.sink_id, decision.look_from)
        if found is None and decision.action is Action.RESUME:
            self._require_kept(target.name, decision.look_from)
        if found is not None and found.batch > run.batch:
            raise below(target.name, run, found.batch)
        if found is not None and found.batch == run.batch:
            target.last = found

    def _say_left_behind(self, topic: TopicName, before: SinkNote) -> None:
        event(
            _log,
            logging.WARNING,
            "an earlier batch of the sink was never completed: a part of it is in the topic",
            topic=topic,
            sink=self._run.sink_id,
            batch=before.batch,
            rows=before.rows,
            offset=before.offset,
        )

    def _require_kept(self, topic: TopicName, begun: int) -> None:
        """Nothing of a batch that was begun is found, so nothing was there: if all is there yet."""
        start = self._door.start(topic)
        if begun < start:
            raise UsageError(
                f"{topic}: retention has removed the offsets {begun} to {start - 1}, where the "
                f"sink {self._run.sink_id!r} began to append batch {self._run.batch}: nobody knows "
                "what of it was there. Give another sinkId to append all of it"
            )

    def _require_same_shape(self, target: _Target, before: SinkNote, parts: Sequence[Part]) -> None:
        if before.shape != shape_of(parts, target.name):
            raise UsageError(
                f"{target.name}: batch {before.batch} of the sink {self._run.sink_id!r} is half "
                f"appended, from {before.rows} rows whose staged files are gone, and this run has "
                f"other partitions: nobody can tell which of its {target.rows} rows are there. "
                f"They are at offset {before.offset} and behind; give another sinkId"
            )

    # -- appending ------------------------------------------------------------------------------

    def _append_all(self, targets: dict[str, _Target], parts: Sequence[Part]) -> int:
        if self._run.named:
            self._begin(targets.values(), parts)
        appended = 0
        for part in parts:
            index = 0
            for rows in staged_rows(self._store, part):
                appended += self._append(targets, part.partition, index, rows)
                index += rows.num_rows
        self._door.flush()
        if self._run.named:
            self._end(targets.values())
        return appended

    def _begin(self, targets: Iterable[_Target], parts: Sequence[Part]) -> None:
        write = next(write_of_staged(part.key) for part in parts if part.key is not None)
        write_manifest(self._store, write, parts)
        for target in targets:
            resumed = target.before if target.decision.action is Action.RESUME else None
            if resumed is not None:
                offset = resumed.offset
            elif target.last is not None:  # known from the log alone
                offset = target.decision.look_from or 0
            else:
                offset = self._door.end(target.name)
            self._note(
                target,
                SinkNote(
                    batch=self._run.batch,
                    done=False,
                    offset=offset,
                    rows=target.rows,
                    shape=shape_of(parts, target.name),
                    write=write,
                    origin=target.origin,
                    previous=_previous(target.before, self._run.batch),
                    digest=digest_of(parts),
                ),
            )

    def _end(self, targets: Iterable[_Target]) -> None:
        for target in targets:
            assert target.before is not None
            done = replace(target.before, done=True, offset=self._door.end(target.name))
            self._note(target, done)

    def _note(self, target: _Target, note: SinkNote) -> None:
        name = note_name(self._run.sink_id)
        target.note = write_job_state(
            self._catalog, target.name, name, encode_note(note), expected=target.note
        )
        target.before = note

    def _append(self, targets: dict[str, _Target], partition: int, first: int, rows: Any) -> int:
        """Appends the rows that are not there yet, topic by topic, each in its order."""
        run = self._run
        names, keys = rows.column("topic").to_pylist(), rows.column("key").to_pylist()
        values, headers = rows.column("value").to_pylist(), rows.column("headers").to_pylist()
        begin = {name: _first_row(target.last, partition) for name, target in targets.items()}
        chosen: dict[str, list[int]] = {}
        for at, name in enumerate(names):
            if name in begin and first + at >= begin[name]:
                chosen.setdefault(name, []).append(at)
        prefix = mark_prefix(run.sink_id, run.batch, partition)
        for name, places in chosen.items():
            self._door.append(
                targets[name].name,
                [values[at] for at in places],
                [_attributes(headers[at], f"{prefix}{first + at}") for at in places],
                [keys[at] for at in places],
            )
        return sum(map(len, chosen.values()))

    def _tell(self, targets: dict[str, _Target], appended: int, known: int) -> None:
        ROWS.add(appended, "appended")
        ROWS.add(known, "known")
        event(
            _log,
            logging.WARNING if known else logging.INFO,
            "some rows of the batch were there already" if known else "batch appended",
            sink=self._run.sink_id,
            batch=self._run.batch,
            topics=len(targets),
            appended=appended,
            known=known,
        )


def _require_staged(store: CloudStore, parts: Sequence[Part]) -> None:
    """Before a batch is begun: what is begun without its files could never go on."""
    for part in parts:
        if part.key is None:
            continue
        size = store.head(part.key).size
        if size != part.bytes:
            raise FormatError(f"{store.name}: {part.key} has {size} bytes, not {part.bytes}")


def _first_row(last: Position | None, partition: int) -> int:
    """The first row of the partition that is not there, if `last` is the last that is."""
    if last is None or partition > last.partition:
        return 0
    return OFFSET_MAX if partition < last.partition else last.row + 1


def _attributes(headers: Sequence[dict[str, str]] | None, text: str) -> dict[str, str]:
    """The sink's own mark counts before one that the rows bring from another topic."""
    if not headers:
        return {MARK: text}
    return {**{header["key"]: header["value"] for header in headers}, MARK: text}


def digest_of(parts: Sequence[Part]) -> int:
    """Of all rows of a write, however they are cut into partitions."""
    return sum(part.digest for part in parts)


def _previous(before: SinkNote | None, batch: int) -> int | None:
    if before is None:
        return None
    return before.batch if before.done and before.batch < batch else before.previous


def _in_order(parts: Sequence[Part]) -> list[Part]:
    return sorted((part for part in parts if part.rows), key=lambda part: part.partition)
