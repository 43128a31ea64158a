"""`Executor`: runs one function over many items, on Spark or on threads of this process.

Spark carries the items and the results. The data that the work reads and writes does not pass
through Spark. A ForebayError becomes the result of its item, so that one damaged object does not
discard the results of a thousand others. ServiceUnavailable is retried first. Spark repeats the
tasks of a killed worker, so the work must be idempotent, even when it runs twice at the same time.

Beware: a `SparkExecutor` without a session starts one at its first use, which takes seconds. Use it
only when there is work.
"""

from __future__ import annotations

import os
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import TYPE_CHECKING, Final, Generic, Literal, Protocol, TypeAlias, TypeVar

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
"""Called with the number of tasks that are done, and of all tasks. Raise in it to cancel a run."""

Runner: TypeAlias = Literal["spark", "threads"]
"""Where the tasks of a job run: on Spark, or on threads of this process, which needs no JVM."""

_LOOK_SECONDS: Final = 0.2
_THREAD_ATTEMPTS: Final = 4
"""Attempts at an item whose service is unavailable: as many as Spark makes by default."""
_RETRY_SECONDS: Final = 0.1
_RAISED: Final = re.compile(r"(?!File )[\w.]+(Error|Exception|Interrupt|[a-z])(: .*)?$")
"""The last line of a traceback: the name of the exception, and its message."""


@dataclass(frozen=True, slots=True)
class Done(Generic[_Result]):
    """The result of one item, or the error why there is none."""

    result: _Result | None
    error: ForebayError | None


class Executor(Protocol):
    def slots(self) -> int:
        """How many tasks run at the same time. May start Spark."""

    def run(
        self,
        tasks: Sequence[Sequence[_Item]],
        work: Callable[[_Item], _Result],
        label: str,
        progress: Progress | None = None,
    ) -> list[list[Done[_Result]]]:
        """Runs `work` on every item, and returns the results in the shape of `tasks`.

        Counters that the work increases are increased in this process when the run ends. An
        interrupt, or an exception that `progress` raises, cancels the run and is raised again; no
        further item is begun.
        """

    def alive(self) -> bool:
        """Whether another run could succeed."""


def executor_for(
    runner: Runner, spark: SparkSession | None = None, settings: SparkSettings | None = None
) -> Executor:
    """The executor of a job. UsageError for an unknown runner, or for a session with threads."""
    if runner == "spark":
        return SparkExecutor(spark, settings)
    if runner != "threads":
        raise UsageError(f"the runner is {runner!r}; it must be 'spark' or 'threads'")
    if spark is not None:
        raise UsageError("a Spark session is given and the runner is 'threads': choose one of them")
    return ThreadExecutor()


class ThreadExecutor:
    """Runs tasks on threads of this process. A cancelled run waits for items that have begun."""

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads or os.cpu_count() or 1

    def slots(self) -> int:
        return self._threads

    def run(
        self,
        tasks: Sequence[Sequence[_Item]],
        work: Callable[[_Item], _Result],
        label: str,
        progress: Progress | None = None,
    ) -> list[list[Done[_Result]]]:
        if not tasks:
            return []
        from forebay.topic.resources import using_executor_resources

        total = len(tasks)
        show = progress or (lambda _done, _total: None)
        cancelled = threading.Event()

        def run_task(items: Sequence[_Item]) -> list[Done[_Result]]:
            # The results of a cancelled run are not used, so items may be missing in them.
            with using_executor_resources():
                return [_try(work, item, cancelled) for item in items if not cancelled.is_set()]

        show(0, total)
        width = min(self._threads, total)
        with ThreadPoolExecutor(width, thread_name_prefix=label.split(maxsplit=1)[0]) as pool:
            try:
                futures = [pool.submit(run_task, items) for items in tasks]
                pending = set(futures)
                while pending:
                    ended, pending = wait(pending, return_when=FIRST_COMPLETED)
                    for each in ended:
                        each.result()  # a bug in the work ends the run
                    show(total - len(pending), total)
            except BaseException:
                cancelled.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [each.result() for each in futures]

    def alive(self) -> bool:
        return True


def _try(
    work: Callable[[_Item], _Result], item: _Item, cancelled: threading.Event
) -> Done[_Result]:
    """Runs the work on one item; retries while its service is unavailable."""
    attempt = 1
    while True:
        try:
            return Done(work(item), None)
        except ServiceUnavailable as error:
            if attempt == _THREAD_ATTEMPTS or cancelled.wait(_RETRY_SECONDS * attempt):
                return Done(None, error)
            attempt += 1
        except ForebayError as error:
            return Done(None, error)


class SparkExecutor:
    """Runs tasks on Spark's executors, which must be able to import the work.

    Without a session, the running one is used, or one is started at the first use.
    """

    def __init__(
        self, spark: SparkSession | None = None, settings: SparkSettings | None = None
    ) -> None:
        self._spark = spark
        self._settings = settings

    @property
    def session(self) -> SparkSession:
        if self._spark is None:
            self._spark = spark_session(self._settings)
        return self._spark

    def slots(self) -> int:
        return slots(self.session)

    def run(
        self,
        tasks: Sequence[Sequence[_Item]],
        work: Callable[[_Item], _Result],
        label: str,
        progress: Progress | None = None,
    ) -> list[list[Done[_Result]]]:
        if not tasks:
            return []
        spark = self.session
        context = _context(spark)
        last_attempt = attempts(spark) - 1

        def run_partition(
            _number: int, numbered: Iterator[tuple[int, Sequence[_Item]]]
        ) -> Iterator[tuple[int, list[Done[_Result]], Growth]]:
            for number, items in numbered:
                before = metrics.counter_values()
                results = [_try_in_task(work, item, last_attempt) for item in items]
                yield number, results, metrics.counter_growth(before)

        group = f"forebay-{uuid.uuid4()}"
        context.setJobGroup(group, label, interruptOnCancel=True)
        numbered = context.parallelize(list(enumerate(tasks)), len(tasks))
        try:
            with _JobWatch(spark, group, len(tasks), progress):
                collected = numbered.mapPartitionsWithIndex(run_partition).collect()
        except Exception as error:
            if is_from_spark(error):
                raise ServiceUnavailable(f"Spark gave up {label}: {reason_of(error)}") from error
            raise
        except BaseException:  # an interrupt: the job would otherwise go on
            context.cancelJobGroup(group)
            raise
        finally:
            with suppress(Exception):  # the JVM may be gone, and then an error is raised already
                context.setLocalProperty("spark.jobGroup.id", None)
        for _number, _results, growth in collected:
            metrics.add_growth(growth)
        found = {number: results for number, results, _growth in collected}
        return [found[number] for number in range(len(tasks))]

    def alive(self) -> bool:
        if self._spark is None:
            return True
        try:
            self._spark.sparkContext.statusTracker().getActiveJobsIds()
        except Exception:  # noqa: BLE001  # any error means that the JVM does not respond
            return False
        return True


def _try_in_task(work: Callable[[_Item], _Result], item: _Item, last_attempt: int) -> Done[_Result]:
    """Runs the work on one item in a Spark task.

    Raises ServiceUnavailable except in the last attempt, so that Spark retries the task.
    """
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
            "jobs need a classic Spark session, and this one is a Spark Connect session, which "
            "can only read and write the format `forebay`"
        ) from error


class _JobWatch:
    """Reports the progress of a job group until it ends; cancels the group if `progress` raises.

    Leaving the block raises what `progress` raised.
    """

    def __init__(
        self, spark: SparkSession, group: str, total: int, progress: Progress | None
    ) -> None:
        self._context = spark.sparkContext
        self._group = group
        self._total = total
        self._progress = progress
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._raised: BaseException | None = None

    def __enter__(self) -> None:
        if self._progress is not None:
            self._progress(0, self._total)
            self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)
            self._thread.start()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._over.set()
        if self._thread is None or self._progress is None:
            return
        self._thread.join()
        if self._raised is not None:
            raise self._raised
        if error is None:
            self._progress(self._total, self._total)

    def _watch(self) -> None:
        assert self._progress is not None
        tracker = self._context.statusTracker()
        while not self._over.wait(_LOOK_SECONDS):
            try:
                done = 0
                for job in tracker.getJobIdsForGroup(self._group):
                    info = tracker.getJobInfo(job)
                    for stage in info.stageIds if info is not None else ():
                        state = tracker.getStageInfo(stage)
                        done += state.numCompletedTasks if state is not None else 0
            except Exception:  # noqa: BLE001  # the JVM may be gone: the job itself raises then
                return
            try:
                self._progress(min(done, self._total), self._total)
            except BaseException as error:  # noqa: BLE001  # raised by __exit__, in the caller's thread
                self._raised = error
                with suppress(Exception):
                    self._context.cancelJobGroup(self._group)
                return


def is_from_spark(error: Exception) -> bool:
    """Whether Spark, its JVM or the connection to it raised the error."""
    from pyspark.errors import PySparkException

    return isinstance(error, PySparkException | ConnectionError) or type(
        error
    ).__module__.startswith("py4j")


def reason_of(error: Exception) -> str:
    """The most useful line of an error of Spark: the end of the Python traceback in it, if any."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for at, line in enumerate(lines):
        if line.startswith("Traceback (most recent call last)"):
            below = [each for each in lines[at + 1 :] if _RAISED.match(each) and each != "raise"]
            if below:
                return below[0]
    return lines[0] if lines else type(error).__name__


def pack(
    items: Sequence[_Item], size: Callable[[_Item], int], target: int, *, least: int = 1
) -> list[list[_Item]]:
    """Groups items into tasks of about `target` at most, but at least `least` tasks.

    There are never more tasks than items. A Python task costs Spark 10 to 35 ms whatever it does,
    so small items share a task. Large items are placed first, so that the tasks have about the same
    size. Within a task, items keep their order.
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
        # Count an item without bytes as one byte: it is work too.
        heapreplace(heap, (filled + max(sizes[at], 1), number))
    return [[items[at] for at in sorted(group)] for group in groups]
