"""Offload on Spark beside a pool of two processes that runs the same transfer function.

The topics are written once. Each round begins with the catalog as it was before the first, and
with no objects. The pool is given objects that are planned and announced already; Spark's time is
that of the whole run: planning, intents, transfer, reading back, commits.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import forebay
from forebay.bench.measure import rate_of
from forebay.bench.spark_processes import ProcessExecutor
from forebay.limits import MIB, TASK_BYTES
from forebay.pipeline.execute import SparkExecutor, pack
from forebay.pipeline.jobs.offload import Offload, run_task
from forebay.pipeline.location import job_settings
from forebay.settings import StoreSettings, UploaderSettings
from forebay.upload import engine

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CATALOG: Final = ("catalog.db", "catalog.db-wal", "catalog.db-shm")
_MESSAGE: Final = b"m" * 1024


@dataclass(frozen=True, slots=True)
class Backlog:
    """Topics with messages that are synced and not uploaded."""

    settings: StoreSettings
    size: int

    @property
    def _data(self) -> Path:
        return Path(self.settings.data or "")

    def reset(self) -> None:
        """Nothing is uploaded."""
        shutil.rmtree(self._data / "objects", ignore_errors=True)
        for name in _CATALOG:
            (self._data / name).unlink(missing_ok=True)
            saved = self._data / "saved" / name
            if saved.exists():
                shutil.copy(saved, self._data / name)


def write_backlog(path: Path, topics: int, topic_bytes: int) -> Backlog:
    settings = job_settings(StoreSettings(data=path, uploader=UploaderSettings(enabled=False)))
    with forebay.open(settings) as store:
        for number in range(topics):
            topic = store.topic(f"t{number}")
            left = topic_bytes // (len(_MESSAGE) + 100)
            while left:
                count = min(left, 5000)
                topic.append_many([_MESSAGE] * count)
                left -= count
            topic.flush()
        size = sum(
            segment.size
            for number in range(topics)
            for segment in store.topic(f"t{number}").segments()
        )
    (path / "saved").mkdir()
    for name in _CATALOG:
        if (path / name).exists():
            shutil.copy(path / name, path / "saved" / name)
    return Backlog(settings, size)


def spark_rate(backlog: Backlog, spark: SparkSession, _path: Path) -> float:
    """MiB a second of a whole run."""
    backlog.reset()
    with Offload(backlog.settings, SparkExecutor(spark)) as run:

        def work() -> None:
            report = run.once(force=True)
            assert report.ok, report.rows
            assert report.bytes == backlog.size

        return rate_of(backlog.size / MIB, work)


def pool_rate(backlog: Backlog, pool: ProcessExecutor, _path: Path) -> float:
    """MiB a second of the transfers alone."""
    backlog.reset()
    with Offload(backlog.settings, pool) as run:
        uploads: list[engine.UploadTask] = []
        for name in run.store.topics():
            plan = run.planner(run.store.topic(name).topic).plan(None, force=True)
            assert plan is not None
            uploads += [
                engine.intend(run.catalog(), plan.topic, plan.epoch, planned)
                for planned in plan.objects
            ]
        tasks = pack(uploads, lambda each: each.size, TASK_BYTES, least=pool.slots())
        work = partial(run_task, backlog.settings)

        def transfer() -> None:
            done = pool.run(tasks, work, "bench")
            assert all(each.error is None for task in done for each in task)

        return rate_of(backlog.size / MIB, transfer)
