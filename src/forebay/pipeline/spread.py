"""`spread`: runs one plain function over many items on Spark's executors.

Items travel to the executors and results back; the bytes that the work moves do not pass through
Spark. An error that says what to do (ForebayError) is a result of its item, so that one damaged
object does not throw away what a thousand others did. A service that does not answer is left to
Spark's own retries first. What kills a worker (a crash, kill -9, a lost machine) is Spark's to
repeat: the work must give the same result when it is done twice, and at the same time twice.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeAlias, TypeVar

from forebay.errors import ForebayError, ServiceUnavailable, UsageError
from forebay.pipeline import counting
from forebay.pipeline.counting import Growth
from forebay.pipeline.session import attempts

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the tasks that are done, and all of them."""

_LOOK_SECONDS: Final = 0.2
_RAISED: Final = re.compile(r"(?!File )[\w.]+(Error|Exception|Interrupt|[a-z])(: .*)?$")
"""How a traceback ends: the exception's name, and what it says."""


@dataclass(frozen=True, slots=True)
class Done(Generic[_Result]):
    """What became of one item: a result, or why there is none."""

    result: _Result | None
    error: ForebayError | None


def spread(
    spark: SparkSession,
    tasks: Sequence[Sequence[_Item]],
    work: Callable[[_Item], _Result],
    *,
    label: str,
    progress: Progress | None = None,
) -> list[list[Done[_Result]]]:
    """Runs `work` on every item, each of `tasks` as one Spark task; answers in the same shape.

    `work` must be importable on the executors. Interrupted, it cancels what is running.
    """
    if not tasks:
        return []
    context = _context(spark)
    last_attempt = attempts(spark) - 1

    def run(
        _number: int, numbered: Iterator[tuple[int, Sequence[_Item]]]
    ) -> Iterator[tuple[int, list[Done[_Result]], Growth]]:
        for number, items in numbered:
            before = counting.counts()
            results = [_run_one(work, item, last_attempt) for item in items]
            yield number, results, counting.growth(before)

    group = f"forebay-{uuid.uuid4()}"
    context.setJobGroup(group, label, interruptOnCancel=True)
    numbered = context.parallelize(list(enumerate(tasks)), len(tasks))
    watch = _Watch(spark, group, len(tasks), progress)
    try:
        with watch:
            told = numbered.mapPartitionsWithIndex(run).collect()
    except Exception as error:
        if is_from_spark(error):
            raise ServiceUnavailable(f"Spark gave up {label}: {reason_of(error)}") from error
        raise
    except BaseException:  # an interrupt: what is running would go on without us
        context.cancelJobGroup(group)
        raise
    finally:
        with suppress(Exception):  # the JVM may be gone, and what is under way is told already
            context.setLocalProperty("spark.jobGroup.id", None)
    for _number, _results, grown in told:
        counting.add(grown)
    found = {number: results for number, results, _grown in told}
    return [found[number] for number in range(len(tasks))]


def is_from_spark(error: Exception) -> bool:
    """Whether Spark, its JVM or the way to it raised the error."""
    from pyspark.errors import PySparkException

    return isinstance(error, PySparkException | ConnectionError) or type(
        error
    ).__module__.startswith("py4j")


def reason_of(error: Exception) -> str:
    """The one line that matters of what Spark says: the last one of a Python traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for at, line in enumerate(lines):
        if line.startswith("Traceback (most recent call last)"):
            below = [each for each in lines[at + 1 :] if _RAISED.match(each)]
            if below:
                return below[0]
    return lines[0] if lines else type(error).__name__


def _run_one(work: Callable[[_Item], _Result], item: _Item, last_attempt: int) -> Done[_Result]:
    from pyspark import TaskContext

    try:
        return Done(work(item), None)
    except ServiceUnavailable as error:
        task = TaskContext.get()
        if task is not None and task.attemptNumber() < last_attempt:
            raise
        return Done(None, error)
    except ForebayError as error:
        return Done(None, error)


def _context(spark: SparkSession):  # type: ignore[no-untyped-def]
    try:
        return spark.sparkContext
    except Exception as error:
        raise UsageError(
            "jobs run on a classic Spark session, and this one is a Spark Connect client's; "
            "reading and writing the format `forebay` works there"
        ) from error


class _Watch:
    """Tells how many tasks of a job group are done, until it ends."""

    def __init__(
        self, spark: SparkSession, group: str, total: int, progress: Progress | None
    ) -> None:
        self._tracker = spark.sparkContext.statusTracker()
        self._group = group
        self._total = total
        self._progress = progress
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> _Watch:
        if self._progress is not None:
            self._progress(0, self._total)
            self._thread = threading.Thread(target=self._look, name="progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._over.set()
        if self._thread is not None and self._progress is not None:
            self._thread.join()
            if error is None:
                self._progress(self._total, self._total)

    def _look(self) -> None:
        assert self._progress is not None
        with suppress(Exception):  # the JVM may be gone: who waits for the job is told
            self._watch(self._progress)

    def _watch(self, progress: Progress) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            done = 0
            for job in self._tracker.getJobIdsForGroup(self._group):
                info = self._tracker.getJobInfo(job)
                for stage in info.stageIds if info is not None else ():
                    state = self._tracker.getStageInfo(stage)
                    done += state.numCompletedTasks if state is not None else 0
            progress(min(done, self._total), self._total)
