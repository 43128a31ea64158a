"""`spread` runs plain functions on executors, and one failure does not cost the others' results."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forebay.errors import CorruptFrame, ServiceUnavailable, UsageError
from forebay.pipeline.execute import pack, spread
from forebay.pipeline.session import attempts, slots

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def double(item: int) -> int:
    if item < 0:
        raise CorruptFrame("bad", file="f", position=item, offset=1)
    return 2 * item


def fail_at_first(mark: Path, item: int) -> int:
    """Unavailable the first time that anybody asks."""
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


def test_results_come_back_in_the_shape_of_the_tasks(spark: SparkSession) -> None:
    seen: list[tuple[int, int]] = []
    done = spread(spark, [[1, 2], [], [3]], double, label="t", progress=lambda *at: seen.append(at))
    assert [[each.result for each in task] for task in done] == [[2, 4], [], [6]]
    assert seen[0] == (0, 3)
    assert seen[-1] == (3, 3)
    assert spread(spark, [], double, label="nothing") == []


def test_an_error_is_the_result_of_its_item_alone(spark: SparkSession) -> None:
    [[good, bad]] = spread(spark, [[4, -7]], double, label="t")
    assert good.result == 8
    assert isinstance(bad.error, CorruptFrame)
    assert (bad.error.position, bad.error.offset) == (-7, 1)


def test_a_service_that_does_not_answer_is_asked_again(spark: SparkSession, tmp_path: Path) -> None:
    [[done]] = spread(spark, [[5]], partial(fail_at_first, tmp_path / "mark"), label="t")
    assert done.result == 5
    [[given_up]] = spread(spark, [[6]], never, label="t")
    assert isinstance(given_up.error, ServiceUnavailable)


def test_a_killed_worker_costs_one_attempt(spark: SparkSession, tmp_path: Path) -> None:
    done = spread(spark, [[1], [2]], partial(die_at_first, tmp_path / "mark"), label="t")
    assert [each.result for task in done for each in task] == [1, 2]


def test_the_session_tells_its_attempts_and_slots(spark: SparkSession) -> None:
    assert attempts(spark) == 4
    assert slots(spark) == 2


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
