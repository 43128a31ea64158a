"""Objects described before a restore asks for them: read in full, many at a time.

A restore asks for one descriptor after the other. When one of them takes reading its object, the
objects that will be asked for next are read with it: by executors if it is much, and else here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

from forebay.errors import ForebayError
from forebay.format.descriptor import ObjectDescriptor
from forebay.limits import MIB, TASK_BYTES, WAVE_TASKS_PER_SLOT
from forebay.objects.backend import Backend
from forebay.pipeline.packing import pack
from forebay.pipeline.session import slots, spark_session
from forebay.pipeline.spread import Done, spread
from forebay.pipeline.workbench import workbench
from forebay.settings import StoreSettings
from forebay.upload.inventory import Candidate, Reading, read_sidecar, read_whole

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

INLINE_BYTES: Final = 64 * MIB
"""Less is read here sooner than Spark would start."""
_AHEAD_OBJECTS_MAX: Final = 2000
"""Descriptors that are held before a restore asks for them."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What was found out of an object before it was asked for."""

    descriptor: ObjectDescriptor | None
    error: ForebayError | None = None
    reading: Reading = field(default_factory=Reading)


class DescribedAhead:
    """A `Describe`; of one thread."""

    def __init__(self, settings: StoreSettings, spark: SparkSession | None, *, whole: bool) -> None:
        self._settings = settings
        self._spark = spark
        self._whole = whole
        self._plan: list[Candidate] = []
        self._places: dict[str, int] = {}
        self._known: dict[str, _Known] = {}

    def expect(self, candidates: Iterator[Candidate]) -> None:
        """What will be asked for from now on, in this order; the rest is forgotten."""
        self._plan = list(candidates)
        self._places = {each.key: place for place, each in enumerate(self._plan)}
        self._known = {}

    def __call__(
        self, store: Backend, candidate: Candidate, reading: Reading, *, whole: bool
    ) -> ObjectDescriptor:
        found = self._known.pop(candidate.key, None)
        if found is None and not whole:
            told = read_sidecar(store, candidate, reading)
            if told is not None:
                reading.sidecars += 1
                return told
        if found is None:
            self._read(store, candidate)
            found = self._known.pop(candidate.key)
        reading.add(found.reading)
        if found.descriptor is None:
            assert found.error is not None, "an object is described, or there is a reason"
            raise found.error
        return found.descriptor

    def _read(self, store: Backend, candidate: Candidate) -> None:
        """Reads the object in full, and with it what is due next."""
        due = self._due_after(store, candidate)
        batch = [candidate]
        size = candidate.size
        while self._spark is None and size < INLINE_BYTES and (one := next(due, None)) is not None:
            batch.append(one)
            size += one.size
        if self._spark is None and size < INLINE_BYTES:
            for one in batch:
                self._learn(one, _read_here(store, one))
            return
        if self._spark is None:
            self._spark = spark_session(self._settings.spark)
        spark = self._spark
        limit = slots(spark) * WAVE_TASKS_PER_SLOT * TASK_BYTES
        while size < limit and (one := next(due, None)) is not None:
            batch.append(one)
            size += one.size
        tasks = pack(batch, lambda one: one.size, TASK_BYTES, least=slots(spark))
        answers = spread(spark, tasks, partial(_read_there, self._settings), label="restore")
        for items, results in zip(tasks, answers, strict=True):
            for one, done in zip(items, results, strict=True):
                self._learn(one, done)

    def _due_after(self, store: Backend, candidate: Candidate) -> Iterator[Candidate]:
        """The next ones that must be read in full; of others the sidecars are kept."""
        place = self._places.get(candidate.key)
        if place is None:  # another attempt at a range that is damaged: nobody expected it
            return
        for one in islice(self._plan, place + 1, place + _AHEAD_OBJECTS_MAX):
            if one.key in self._known:
                continue
            if not self._whole:
                reading = Reading()
                told = read_sidecar(store, one, reading)
                if told is not None:
                    reading.sidecars += 1
                    self._known[one.key] = _Known(told, None, reading)
                    continue
            yield one

    def _learn(self, candidate: Candidate, done: Done[tuple[ObjectDescriptor, Reading]]) -> None:
        if done.result is None:
            self._known[candidate.key] = _Known(None, done.error)
        else:
            self._known[candidate.key] = _Known(done.result[0], None, done.result[1])


def _read_there(settings: StoreSettings, candidate: Candidate) -> tuple[ObjectDescriptor, Reading]:
    reading = Reading()
    return read_whole(workbench(settings).store, candidate, reading), reading


def _read_here(store: Backend, candidate: Candidate) -> Done[tuple[ObjectDescriptor, Reading]]:
    reading = Reading()
    try:
        return Done((read_whole(store, candidate, reading), reading), None)
    except ForebayError as error:
        return Done(None, error)
