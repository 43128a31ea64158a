"""`Waves`: runs the items of a job in waves of bounded size, between its plan and its commits.

The items of a job are objects to read, to rewrite or to upload, each with a size. The items of a
wave are packed into tasks, and the tasks run on an `Executor`. Each item has its own result or
error. The job commits the results of a wave before it takes the next one, so that a kill loses one
wave at most.

Beware: `bytes_max`, `cut` and `run` use the executor, which may start Spark. With an empty plan,
`cut` and `run` do not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from forebay.limits import TASK_BYTES, WAVE_TASKS_PER_SLOT
from forebay.pipeline.execute import Done, Executor, Progress, pack

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Waves(Generic[_Item, _Result]):
    """The waves of one job. `progress` counts the tasks of all waves."""

    def __init__(
        self,
        executor: Executor,
        work: Callable[[_Item], _Result],
        size: Callable[[_Item], int],
        *,
        label: str,
        progress: Progress | None = None,
    ) -> None:
        self._executor = executor
        self._work = work
        self._size = size
        self._label = label
        self._progress = progress
        self._tasks_done = 0

    def bytes_max(self) -> int:
        """The size of a wave: enough to keep every slot of the executor busy for a while."""
        return self._executor.slots() * WAVE_TASKS_PER_SLOT * TASK_BYTES

    def cut(
        self,
        items: Iterable[_Item],
        weight: Callable[[_Item], int] = lambda _item: 1,
        weight_max: int = sys.maxsize,
    ) -> Iterator[list[_Item]]:
        """Yields the items in waves, and takes items only as they are needed.

        A wave ends when its size reaches `bytes_max()`, or its weight `weight_max`. `weight` is
        what an item costs the driver while its wave runs.
        """
        wave: list[_Item] = []
        size = weighed = 0
        bytes_max: int | None = None
        for item in items:
            if bytes_max is None:
                bytes_max = self.bytes_max()
            wave.append(item)
            size += self._size(item)
            weighed += weight(item)
            if weighed >= weight_max or size >= bytes_max:
                yield wave
                wave, size, weighed = [], 0, 0
        if wave:
            yield wave

    def run(self, wave: Sequence[_Item]) -> list[tuple[_Item, Done[_Result]]]:
        """Runs the items, and returns each with its result, in the order of `wave`."""
        if not wave:
            return []
        tasks = pack(
            range(len(wave)),
            lambda at: self._size(wave[at]),
            TASK_BYTES,
            least=self._executor.slots(),
        )
        items = [[wave[at] for at in task] for task in tasks]
        results = self._executor.run(items, self._work, self._label, self._shown())
        self._tasks_done += len(tasks)
        done = {
            at: result
            for task, found in zip(tasks, results, strict=True)
            for at, result in zip(task, found, strict=True)
        }
        return [(item, done[at]) for at, item in enumerate(wave)]

    def _shown(self) -> Progress | None:
        progress, before = self._progress, self._tasks_done
        if progress is None:
            return None
        return lambda done, total: progress(before + done, before + total)
