"""`TopicCursors`: what the consumers of a topic acknowledged, in memory and in the catalog.

An acknowledgement changes memory only. The catalog gets it after
`metadata.progress_flush_interval_seconds`, if the cursor has moved by
`metadata.progress_min_offset_delta` since then, and when the topic is closed. After a crash the
consumers get again what was not written yet. They never miss a message, because a cursor holds only
what was acknowledged.

Beware: `flush` asks the catalog. Call it on a thread that may wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from forebay.catalog.catalog import Catalog
from forebay.catalog.cursors import read_cursors, write_cursor
from forebay.errors import ForebayError
from forebay.format.cursor import Cursor
from forebay.format.names import TopicName
from forebay.interrupts import holding

CHECKPOINT_CURSOR = "checkpoint"
"""The name of the cursor of `ack_checkpoint`."""


@dataclass(slots=True)
class _State:
    cursor: Cursor = field(default_factory=Cursor)
    written: Cursor | None = None
    """As it was written last by this process, or read."""

    @property
    def moved(self) -> int:
        """How many offsets more than the catalog has, as far as it is known here."""
        before = self.written or Cursor()
        return _count(self.cursor) - _count(before)


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
        self._states: dict[str, _State] = {}
        self._loaded = catalog is None
        self._scheduled = False
        self.schedule: Callable[[], None] | None = None
        """Called when something is to be written and nobody was told so yet."""

    def acknowledge(self, name: str, start: int, end: int) -> None:
        """Records that the consumer is done with the offsets from `start` to before `end`."""
        if holding(self._lock, lambda: self._add(name, start, end)) and self.schedule is not None:
            self.schedule()

    def _add(self, name: str, start: int, end: int) -> bool:
        """Whether the caller has to schedule a flush."""
        state = self._states.setdefault(name, _State())
        state.cursor = state.cursor.with_range(start, end)
        first = not self._scheduled and self._is_due(state)
        self._scheduled = self._scheduled or first
        return first

    def _is_due(self, state: _State) -> bool:
        return state.moved >= self._min_offset_delta

    def cursor(self, name: str) -> Cursor:
        """Returns the cursor, with what the catalog has of it. May ask the catalog, once."""
        self._load()
        state = holding(self._lock, lambda: self._states.get(name))
        return Cursor() if state is None else state.cursor

    def all(self) -> dict[str, Cursor]:
        """Returns all cursors of the topic by name. May ask the catalog, once."""
        self._load()
        return holding(
            self._lock, lambda: {name: self._states[name].cursor for name in sorted(self._states)}
        )

    def _load(self) -> None:
        if self._loaded or self._catalog is None:
            return
        found = dict(read_cursors(self._catalog, self._topic))
        holding(self._lock, lambda: self._take(found))

    def _take(self, found: dict[str, Cursor]) -> None:
        for name, cursor in found.items():
            state = self._states.setdefault(name, _State())
            state.cursor = cursor.merged(state.cursor)
            state.written = cursor
        self._loaded = True

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
            for name, cursor in holding(self._lock, lambda: self._due(everything)):
                try:
                    self._write(self._catalog, name, cursor)
                except ForebayError as error:
                    errors.append(error)
        if errors:
            raise errors[0]
        if holding(self._lock, self._done) and self.schedule is not None:
            self.schedule()

    def _write(self, catalog: Catalog, name: str, cursor: Cursor) -> None:
        written = write_cursor(catalog, self._topic, self._epoch, name, cursor, self._now_ms())
        holding(self._lock, lambda: self._wrote(name, written))

    def _done(self) -> bool:
        """After a flush: whether the caller has to schedule one more, for what came meanwhile."""
        self._scheduled = any(map(self._is_due, self._states.values()))
        return self._scheduled

    def _due(self, everything: bool) -> list[tuple[str, Cursor]]:
        return [
            (name, state.cursor)
            for name, state in self._states.items()
            if (state.moved > 0 if everything else self._is_due(state))
        ]

    def _wrote(self, name: str, written: Cursor) -> None:
        state = self._states[name]
        state.cursor = written.merged(state.cursor)
        state.written = written
