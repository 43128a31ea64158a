"""`TopicCursors`: what the consumers of a topic acknowledged, in memory and in the catalog.

An acknowledgement changes memory only. The catalog gets it after
`metadata.progress_flush_interval_seconds`, if the cursor has moved by
`metadata.progress_min_offset_delta` since then, and when the topic is closed. After a crash the
consumers get again what was not written yet. They never miss a message, because a cursor holds only
what was acknowledged.

There are two kinds. `acknowledge` adds to a cursor, and so does its write to what the catalog has:
such a cursor never moves back. `put` and `reset` are for the cursors of subscriptions, whose caller
knows the whole cursor: their writes replace what the catalog has, and a `reset` may move back. One
lock is held for everything that asks the catalog, so that no flush undoes a reset, and none brings
back what was removed.

Beware: everything but `acknowledge` and `put` may ask the catalog. Call it on a thread that may
wait, and that is not interrupted (`run_aside`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from forebay.catalog.catalog import Catalog, until_known
from forebay.catalog.cursors import read_cursors, remove_cursor, replace_cursor, write_cursor
from forebay.errors import ForebayError, ServiceError
from forebay.format.cursor import Cursor
from forebay.format.names import TopicName, subscription_of_cursor
from forebay.interrupts import holding

_Result = TypeVar("_Result")
CHECKPOINT_CURSOR = "checkpoint"
"""The name of the cursor of `ack_checkpoint`."""


@dataclass(slots=True)
class _State:
    cursor: Cursor = field(default_factory=Cursor)
    written: Cursor | None = None
    """As it was written last by this process, or read."""
    replaces: bool = False
    """Whether a write replaces the row; otherwise it adds to the row."""
    unsure: bool = False
    """Whether a change of the row got no response. The next flush writes the row again."""

    @property
    def moved(self) -> int:
        """By how many offsets it differs from the catalog, as far as that is known here."""
        before = self.written or Cursor()
        return abs(_count(self.cursor) - _count(before))


def _count(cursor: Cursor) -> int:
    return cursor.position + sum(end - start for start, end in cursor.ranges)


class TopicCursors:
    """The cursors of one topic. Thread-safe. Without a catalog they are in memory only."""

    def __init__(
        self,
        topic: TopicName,
        catalog: Catalog | None,
        epoch: int,
        min_offset_delta: int,
        now_ms: Callable[[], int],
    ) -> None:
        self._topic = topic
        self._catalog = catalog
        self._epoch = epoch
        self._min_offset_delta = min_offset_delta
        self._now_ms = now_ms
        self._lock = threading.RLock()
        self._flushing = threading.Lock()
        """Held for every request to the catalog. Taken before the other lock."""
        self._states: dict[str, _State] = {}
        self._loaded = catalog is None
        self._scheduled = False
        self.schedule: Callable[[], None] | None = None
        """Called when something is to be written and nobody was told so yet."""

    # -- in memory ------------------------------------------------------------------------------

    def acknowledge(self, name: str, start: int, end: int) -> None:
        """Records that the consumer is done with the offsets from `start` to before `end`."""
        self._change(lambda: self._add(name, start, end))

    def put(self, name: str, cursor: Cursor) -> None:
        """Replaces the cursor by one that has everything that was acknowledged so far.

        The catalog gets it later, as after `acknowledge`. No effect on a cursor that was removed.
        """
        self._change(lambda: self._put(name, cursor))

    def _change(self, action: Callable[[], bool]) -> None:
        """Runs `action`, and schedules a flush if it returns True."""
        try:
            if holding(self._lock, action) and self.schedule is not None:
                self.schedule()
        except BaseException:
            self._scheduled = False  # the next change schedules one; two of them do no harm
            raise

    def _add(self, name: str, start: int, end: int) -> bool:
        """Whether the caller has to schedule a flush."""
        state = self._states.setdefault(name, _State())
        state.cursor = state.cursor.with_range(start, end)
        return self._is_first(state)

    def _put(self, name: str, cursor: Cursor) -> bool:
        state = self._states.get(name)
        if state is None:
            if self._loaded:
                return False
            state = self._states.setdefault(name, _State())
        state.cursor, state.replaces = cursor, True
        return self._is_first(state)

    def _is_first(self, state: _State) -> bool:
        """Whether the state is due and no flush is scheduled; one counts as scheduled then."""
        first = not self._scheduled and self._is_due(state)
        self._scheduled = self._scheduled or first
        return first

    def _is_due(self, state: _State) -> bool:
        return state.unsure or state.moved >= self._min_offset_delta

    # -- reading --------------------------------------------------------------------------------

    def cursor(self, name: str) -> Cursor:
        """Returns the cursor, with what the catalog has of it. May ask the catalog, once."""
        return self.known(name) or Cursor()

    def known(self, name: str) -> Cursor | None:
        """Returns the cursor; None if there is no such cursor. May ask the catalog, once."""
        self._load()
        return self.in_memory(name)

    def in_memory(self, name: str) -> Cursor | None:
        """Returns the cursor as far as it is known here; never asks the catalog."""
        state = holding(self._lock, lambda: self._states.get(name))
        return None if state is None else state.cursor

    def all(self) -> dict[str, Cursor]:
        """Returns all cursors of the topic by name. May ask the catalog, once."""
        self._load()
        return holding(
            self._lock, lambda: {name: self._states[name].cursor for name in sorted(self._states)}
        )

    def _load(self) -> None:
        if not self._loaded:
            with self._flushing:
                self._load_alone()

    def _load_alone(self) -> None:
        """Reads the cursors, once. `_flushing` is held: no row may change meanwhile."""
        if self._loaded or self._catalog is None:
            return
        found = dict(read_cursors(self._catalog, self._topic))
        holding(self._lock, lambda: self._take(found))

    def _take(self, found: dict[str, Cursor]) -> None:
        for name, cursor in found.items():
            whole = subscription_of_cursor(name) is not None
            state = self._states.setdefault(name, _State(cursor, replaces=whole))
            if not state.replaces:
                state.cursor = cursor.merged(state.cursor)
            state.written = cursor
        self._loaded = True

    # -- changes that the catalog gets at once --------------------------------------------------

    def reset(self, name: str, cursor: Cursor) -> bool:
        """Replaces the cursor, in the catalog too, and forgets what was put meanwhile.

        It may move back. Returns False, and changes nothing, if there is no such cursor. After
        ServiceError the catalog has either cursor, and soon the former one again.
        """
        return self.alone(name, lambda: self._reset(name, cursor))

    def _reset(self, name: str, cursor: Cursor) -> bool:
        catalog, now_ms = self._catalog, self._now_ms()
        written: Cursor | None = cursor if self.in_memory(name) is not None else None
        if catalog is not None:
            written = until_known(
                lambda: replace_cursor(catalog, self._topic, self._epoch, name, cursor, now_ms)
            )
        self.replaced(name, written)
        return written is not None

    def remove(self, name: str) -> None:
        """Removes the cursor, in the catalog too. Idempotent."""
        self.alone(name, lambda: self._remove(name))

    def _remove(self, name: str) -> None:
        catalog = self._catalog
        if catalog is not None:
            until_known(lambda: remove_cursor(catalog, self._topic, self._epoch, name))
        self.replaced(name, None)

    def alone(self, name: str, action: Callable[[], _Result]) -> _Result:
        """Runs `action`, which may change the cursor's row, while nothing else uses any row.

        The action calls `replaced` if it has changed the row. If it raises ServiceError, the next
        flush writes the cursor that is in effect here.
        """
        try:
            with self._flushing:
                self._load_alone()
                return action()
        except ServiceError:
            self._change(lambda: self._doubt(name))
            raise

    def replaced(self, name: str, written: Cursor | None) -> None:
        """For an action of `alone`: the row has this cursor now, or is no longer there."""
        holding(self._lock, lambda: self._set(name, written))

    def _set(self, name: str, written: Cursor | None) -> None:
        if written is None:
            self._states.pop(name, None)
        else:
            self._states[name] = _State(written, written, replaces=True)

    def _doubt(self, name: str) -> bool:
        state = self._states.get(name)
        if state is None or not self._loaded:
            return False
        state.replaces = state.unsure = True
        return self._is_first(state)

    # -- flushing -------------------------------------------------------------------------------

    def flush(self, *, everything: bool = False) -> None:
        """Writes the cursors that have moved far enough, or with `everything` all that moved.

        If one cannot be written, the others are. Raises the first error then: TopicFenced if
        another process owns the topic, ServiceError, or DescriptorError for a damaged row. A flush
        that was scheduled stays so, and whoever runs it tries again.
        """
        if self._catalog is None:
            return
        errors: list[ForebayError] = []
        with self._flushing:
            for name, state in holding(self._lock, lambda: self._due(everything)):
                try:
                    self._write(self._catalog, name, state)
                except ForebayError as error:
                    errors.append(error)
        if errors:
            raise errors[0]
        if holding(self._lock, self._done) and self.schedule is not None:
            self.schedule()

    def _write(self, catalog: Catalog, name: str, state: _State) -> None:
        write = replace_cursor if state.replaces else write_cursor
        written = write(catalog, self._topic, self._epoch, name, state.cursor, self._now_ms())
        holding(self._lock, lambda: self._wrote(name, written))

    def _done(self) -> bool:
        """After a flush: whether the caller has to schedule one more, for what came meanwhile."""
        self._scheduled = any(map(self._is_due, self._states.values()))
        return self._scheduled

    def _due(self, everything: bool) -> list[tuple[str, _State]]:
        return [
            (name, replace(state))  # a copy: the state may change while it is written
            for name, state in self._states.items()
            if self._is_due(state) or (everything and state.moved > 0)
        ]

    def _wrote(self, name: str, written: Cursor | None) -> None:
        state = self._states[name]
        if written is None:  # its row was removed
            del self._states[name]
            return
        if not state.replaces:
            state.cursor = written.merged(state.cursor)
        state.written, state.unsure = written, False
