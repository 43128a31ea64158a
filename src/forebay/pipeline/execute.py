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
from heapq import heapify, heapreplace
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeAlias, TypeVar

from forebay import metrics
from forebay.errors import ForebayError, ServiceUnavailable, UsageError
from forebay.metrics import Growth
from forebay.pipeline.session import attempts, slots, spark_session
from forebay.settings import SparkSettings

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
            before = metrics.counter_values()
            results = [_run_one(work, item, last_attempt) for item in items]
            yield number, results, metrics.counter_growth(before)

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
        metrics.add_growth(grown)
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


# ---- Who does the work of a job: Spark's executors, behind a port that any pool can take.
#
# What a caller gets wrong: a `SparkFleet` made without a session begins one when it is first
# asked for something, which takes seconds. Ask when there is work.


class Fleet(Protocol):
    def slots(self) -> int:
        """How many tasks run side by side."""

    def run(
        self, tasks: Sequence[Sequence[_Item]], work: Callable[[_Item], _Result], label: str
    ) -> list[list[Done[_Result]]]:
        """Runs `work` on every item, and answers in the shape of the tasks; see `spread`."""

    def alive(self) -> bool:
        """Whether another run could succeed."""


class SparkFleet:
    """Spark's executors."""

    def __init__(
        self,
        spark: SparkSession | None = None,
        settings: SparkSettings | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._spark = spark
        self._settings = settings
        self._progress = progress

    @property
    def session(self) -> SparkSession:
        if self._spark is None:
            self._spark = spark_session(self._settings)
        return self._spark

    def slots(self) -> int:
        return slots(self.session)

    def run(
        self, tasks: Sequence[Sequence[_Item]], work: Callable[[_Item], _Result], label: str
    ) -> list[list[Done[_Result]]]:
        return spread(self.session, tasks, work, label=label, progress=self._progress)

    def alive(self) -> bool:
        if self._spark is None:
            return True
        try:
            self._spark.sparkContext.statusTracker().getActiveJobsIds()
        except Exception:  # noqa: BLE001  # whatever it is: the JVM does not answer
            return False
        return True


# ---- Items into tasks of about the same size: a pure decision.
#
# A Python task costs Spark 10 to 35 ms whatever it does, so small items share one, and large
# ones get their own. The largest come first, so that no long one is left for the end.


def pack(
    items: Sequence[_Item], size: Callable[[_Item], int], target: int, *, least: int = 1
) -> list[list[_Item]]:
    """Groups of at most about `target` together; `least` groups if there are items for so many.

    Within a group items stay in the order in which they came.
    """
    if not items:
        return []
    sizes = [size(item) for item in items]
    wanted = max(-(-sum(sizes) // max(target, 1)), least)
    count = min(wanted, len(items))
    heap = [(0, number) for number in range(count)]
    heapify(heap)
    groups: list[list[int]] = [[] for _ in range(count)]
    for at in sorted(range(len(items)), key=lambda at: -sizes[at]):
        filled, number = heap[0]
        groups[number].append(at)
        # An item without bytes is work all the same.
        heapreplace(heap, (filled + max(sizes[at], 1), number))
    return [[items[at] for at in sorted(group)] for group in groups]
