"""Both executors keep one contract: results in the shape of the tasks, errors by item, counts,
progress, retries, and an end when they are asked to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from forebay.errors import CorruptFrame, ServiceUnavailable, UsageError
from forebay.metrics import Counter
from forebay.pipeline.execute import (
    Executor,
    SparkExecutor,
    ThreadExecutor,
    executor_for,
    pack,
)
from forebay.pipeline.session import attempts, slots

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COUNTED: Final = Counter("test_executor_items_total", "Items of this suite.", ["kind"])
TASKS: Final = 8


SPARK = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


@pytest.fixture(params=["threads", pytest.param("spark", marks=SPARK)])
def executor(request: pytest.FixtureRequest) -> Executor:
    if request.param == "threads":
        return ThreadExecutor(2)
    return SparkExecutor(request.getfixturevalue("spark"))


def double(item: int) -> int:
    if item < 0:
        raise CorruptFrame("bad", file="f", position=item, offset=1)
    return 2 * item


def fail_at_first(mark: Path, item: int) -> int:
    """Unavailable at the first attempt of anybody."""
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return item
    raise ServiceUnavailable("not yet")


def never(item: int) -> int:
    raise ServiceUnavailable(f"item {item}")


def die_at_first(mark: Path, item: int) -> int:
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def count(item: int) -> int:
    COUNTED.add(item, "one")
    return item


def leave_mark(folder: Path, item: int) -> int:
    """The first item is quick, every other one takes a while."""
    (folder / str(item)).touch()
    if item:
        time.sleep(1.0)
    return item


def test_results_come_back_in_the_shape_of_the_tasks(executor: Executor) -> None:
    seen: list[tuple[int, int]] = []
    done = executor.run([[1, 2], [], [3]], double, "t", lambda *at: seen.append(at))
    assert [[each.result for each in task] for task in done] == [[2, 4], [], [6]]
    assert seen[0] == (0, 3)
    assert seen[-1] == (3, 3)
    assert seen == sorted(seen)
    assert executor.run([], double, "nothing") == []
    assert executor.slots() == 2
    assert executor.alive()


def test_an_error_is_the_result_of_its_item_alone(executor: Executor) -> None:
    [[good, bad]] = executor.run([[4, -7]], double, "t")
    assert good.result == 8
    assert isinstance(bad.error, CorruptFrame)
    assert (bad.error.position, bad.error.offset) == (-7, 1)


def test_a_service_that_is_unavailable_is_tried_again(executor: Executor, tmp_path: Path) -> None:
    [[done]] = executor.run([[5]], partial(fail_at_first, tmp_path / "mark"), "t")
    assert done.result == 5
    [[given_up]] = executor.run([[6]], never, "t")
    assert isinstance(given_up.error, ServiceUnavailable)


def test_what_the_work_counts_is_counted_here_once(executor: Executor) -> None:
    before = COUNTED.value("one")
    executor.run([[1, 2], [3]], count, "t")
    assert COUNTED.value("one") == before + 6


class Enough(Exception):
    """Raised by a progress to cancel."""


def test_a_progress_that_raises_at_once_lets_nothing_begin(
    executor: Executor, tmp_path: Path
) -> None:
    def refuse(_done: int, _total: int) -> None:
        raise Enough

    with pytest.raises(Enough):
        executor.run([[0], [1]], partial(leave_mark, tmp_path), "t", refuse)
    assert list(tmp_path.iterdir()) == []


def test_a_progress_that_raises_later_cancels_what_has_not_begun(
    executor: Executor, tmp_path: Path
) -> None:
    def end(done: int, _total: int) -> None:
        if done:
            raise Enough

    tasks = [[at] for at in range(TASKS)]
    with pytest.raises(Enough):
        executor.run(tasks, partial(leave_mark, tmp_path), "t", end)
    # Another run is none the worse for it. A task that had begun may leave its mark until then.
    assert executor.run([[4]], double, "t")[0][0].result == 8
    begun = len(list(tmp_path.iterdir()))
    assert 1 <= begun < TASKS
    # Nothing of the cancelled run goes on.
    assert executor.run([[5]], double, "t")[0][0].result == 10
    assert len(list(tmp_path.iterdir())) == begun


def test_a_bug_in_the_work_ends_a_run_of_threads() -> None:
    with pytest.raises(ZeroDivisionError):
        ThreadExecutor(2).run([[1], [0]], lambda item: 1 // item, "t")


def test_an_interrupt_ends_a_run_of_threads(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib, functools\n"
        "from forebay.pipeline.execute import ThreadExecutor\n"
        "from test_execute import leave_mark\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "work = functools.partial(leave_mark, folder)\n"
        "ThreadExecutor(2).run([[at] for at in range(1, 60)], work, 't')\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=Path(__file__).parent,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not list(tmp_path.iterdir()):
        assert child.poll() is None
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    _out, errors = child.communicate(timeout=120)
    assert "KeyboardInterrupt" in errors
    assert len(list(tmp_path.iterdir())) < 59


def test_a_killed_worker_costs_one_attempt(spark: SparkSession, tmp_path: Path) -> None:
    executor = SparkExecutor(spark)
    done = executor.run([[1], [2]], partial(die_at_first, tmp_path / "mark"), "t")
    assert [each.result for task in done for each in task] == [1, 2]


def test_the_session_tells_its_attempts_and_slots(spark: SparkSession) -> None:
    assert attempts(spark) == 4
    assert slots(spark) == 2


def test_a_session_does_not_go_with_threads(spark: SparkSession) -> None:
    assert isinstance(executor_for("threads"), ThreadExecutor)
    with pytest.raises(UsageError, match="choose one"):
        executor_for("threads", spark)
    with pytest.raises(UsageError, match="must be 'spark' or 'threads'"):
        executor_for("processes")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "target", "least", "count"),
    [
        ([], 10, 2, 0),
        ([3], 10, 2, 1),
        ([1] * 10, 100, 1, 1),
        ([1] * 10, 100, 4, 4),
        ([10] * 6, 20, 1, 3),
        ([0] * 6, 20, 3, 3),
    ],
)
def test_items_are_packed_into_tasks(sizes: list[int], target: int, least: int, count: int) -> None:
    items = list(enumerate(sizes))
    groups = pack(items, lambda item: item[1], target, least=least)
    assert len(groups) == count
    assert sorted(item for group in groups for item in group) == items
    assert all(group == sorted(group) for group in groups)
    assert all(groups)


def test_java_that_is_not_there_is_said_with_the_remedy(tmp_path: Path) -> None:
    from forebay.pipeline import session

    with pytest.raises(UsageError, match=r"forebay\[java\]"):
        session.find_java({"JAVA_HOME": str(tmp_path), "PATH": str(tmp_path)})
