"""Two processes that do what Spark's executors do: what offload is held against."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import TypeVar

from forebay.pipeline.execute import Done, Progress

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def _run_task(work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[Done[_Result]]:
    return [Done(work(item), None) for item in items]


class ProcessExecutor:
    """A pool of processes, each begun anew: clients of stores do not survive a fork."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(processes, mp_context=context)

    def slots(self) -> int:
        return self._processes

    def run(
        self,
        tasks: Sequence[Sequence[_Item]],
        work: Callable[[_Item], _Result],
        label: str,  # noqa: ARG002
        progress: Progress | None = None,  # noqa: ARG002
    ) -> list[list[Done[_Result]]]:
        return list(self._pool.map(partial(_run_task, work), tasks))

    def alive(self) -> bool:
        return True

    def close(self) -> None:
        self._pool.shutdown()
