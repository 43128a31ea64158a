"""Every job takes its items in waves of bounded size, and gets back what became of each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forebay.errors import ServiceUnavailable
from forebay.limits import TASK_BYTES, WAVE_TASKS_PER_SLOT
from forebay.pipeline.execute import Progress
from forebay.pipeline.jobs.waves import Waves
from support.inline_executor import InlineExecutor


def double(item: int) -> int:
    if item == 13:
        raise ServiceUnavailable("thirteen")
    return 2 * item


def waves_of(
    executor: InlineExecutor, size: int, progress: Progress | None = None
) -> Waves[int, int]:
    return Waves(executor, double, lambda _item: size, label="t", progress=progress)


def test_results_come_in_the_order_of_the_items_and_errors_with_their_item() -> None:
    waves = waves_of(InlineExecutor(), 1)
    done = waves.run([5, 13, 13, 1])
    assert [(item, each.result) for item, each in done] == [(5, 10), (13, None), (13, None), (1, 2)]
    assert isinstance(done[1][1].error, ServiceUnavailable)


def test_a_wave_is_as_large_as_keeps_every_slot_busy() -> None:
    executor = InlineExecutor(slots=2)
    waves = waves_of(executor, TASK_BYTES)
    cut = list(waves.cut(range(40)))
    assert [len(wave) for wave in cut] == [2 * WAVE_TASKS_PER_SLOT] * 2 + [8]
    waves.run(cut[0])
    assert executor.runs == 1


def test_a_wave_weighs_no_more_than_it_may() -> None:
    waves = waves_of(InlineExecutor(), 1)
    assert [len(wave) for wave in waves.cut(range(10), weight_max=4)] == [4, 4, 2]
    assert list(waves.cut([1, 9, 1, 1], lambda item: item, 10)) == [[1, 9], [1, 1]]


def test_items_are_taken_when_the_wave_before_is_dealt_with() -> None:
    taken: list[int] = []

    def plan() -> Iterator[int]:
        for item in range(10):
            taken.append(item)
            yield item

    waves = waves_of(InlineExecutor(), 1)
    cut = waves.cut(plan(), weight_max=3)
    assert next(cut) == [0, 1, 2]
    assert taken == [0, 1, 2]


def test_nothing_to_do_does_not_use_the_executor() -> None:
    executor = InlineExecutor()
    executor.slots = None  # type: ignore[assignment,method-assign]  # asking would begin a session
    waves = waves_of(executor, 1)
    assert list(waves.cut([])) == []
    assert waves.run([]) == []
    assert executor.runs == 0


def test_progress_counts_the_tasks_of_all_waves() -> None:
    seen: list[tuple[int, int]] = []
    waves = waves_of(InlineExecutor(slots=2), 1, lambda *at: seen.append(at))
    for wave in waves.cut(range(6), weight_max=3):
        waves.run(wave)
    assert seen[-1] == (4, 4)
    assert seen == sorted(seen)


def test_what_progress_raises_ends_the_job() -> None:
    def refuse(_done: int, _total: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        waves_of(InlineExecutor(), 1, refuse).run([1])
