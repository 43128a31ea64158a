"""Executors for the suites of jobs: this process does the work, and can be told to fail at it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from forebay.errors import ForebayError
from forebay.pipeline.execute import Done, Progress

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class InlineExecutor:
    """Does what Spark's executors do, one item after the other."""

    def __init__(self, slots: int = 2) -> None:
        self._slots = slots
        self.runs = 0
        self.items: list[Any] = []
        self.before: Callable[[Any], None] = lambda _item: None
        """Called with each item; what it raises is the item's error."""
        self.twice = False
        """Whether everything is done twice, as by a speculative copy."""

    def slots(self) -> int:
        return self._slots

    def run(
        self,
        tasks: Sequence[Sequence[_Item]],
        work: Callable[[_Item], _Result],
        label: str,
        progress: Progress | None = None,
    ) -> list[list[Done[_Result]]]:
        self.runs += 1
        if progress is not None:
            progress(0, len(tasks))
        # In the reverse order: nothing may depend on the order in which tasks end.
        found = [[self._one(work, item) for item in task] for task in reversed(tasks)]
        if progress is not None:
            progress(len(tasks), len(tasks))
        return list(reversed(found))

    def _one(self, work: Callable[[_Item], _Result], item: _Item) -> Done[_Result]:
        self.items.append(item)
        try:
            self.before(item)
            done = Done(work(item), None)
            if self.twice:
                work(item)
        except ForebayError as error:
            return Done(None, error)
        return done

    def alive(self) -> bool:
        return True
