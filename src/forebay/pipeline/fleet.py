"""Who does the work of a job: Spark's executors, behind a port that any pool can take.

What a caller gets wrong: a `SparkFleet` made without a session begins one when it is first asked
for something, which takes seconds. Ask when there is work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from forebay.pipeline.session import slots, spark_session
from forebay.pipeline.spread import Done, Progress, spread
from forebay.settings import SparkSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


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
