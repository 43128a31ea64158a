"""The queue of jobs over a driver that is a small program: what becomes of jobs, and of it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from forebay.admin.jobs import JobRecord, JobsFull
from forebay.format.names import JOBS_FILE
from forebay.service.driver import LOG_BYTES_MAX, LOG_FILE, bound_log
from forebay.service.jobs import (
    JOBS_KEPT,
    WAITING_MAX,
    JobQueue,
    RestartBackoff,
    read_jobs,
    write_jobs,
)
from forebay.settings import StoreSettings, UploaderSettings
from support.paths import SUPPORT

FAKE = SUPPORT / "fake_driver.py"
QUICK = RestartBackoff(first_seconds=0.01, most_seconds=0.05)


@dataclass(slots=True)
class Setup:
    queue: JobQueue
    cycles: Path

    async def until(self, ready: Callable[[], bool], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < deadline, (self.queue.driver(), self.queue.list())
            await asyncio.sleep(0.01)

    async def over(self, job: JobRecord) -> JobRecord:
        await self.until(lambda: self.now(job).over)
        return self.now(job)

    def now(self, job: JobRecord) -> JobRecord:
        found = self.queue.get(job.id)
        assert found is not None
        return found


@asynccontextmanager
async def running(
    data: Path,
    *,
    start: str = "ready",
    cycles: str = "",
    interval: float | None = None,
    silence: float = 60,
    seal: Callable[[Sequence[str]], None] = lambda _topics: None,
) -> AsyncIterator[Setup]:
    """A queue that is at work; without an interval there are no cycles."""
    uploader = UploaderSettings(
        enabled=interval is not None, interval_seconds=interval or 300, runner="spark"
    )
    settings = StoreSettings(data=data, uploader=uploader)
    file = data / "cycles"
    file.write_text(cycles)
    program = [sys.executable, str(FAKE), start, str(file)]
    queue = JobQueue(settings, command=program, backoff=QUICK, silence_seconds=silence, seal=seal)
    task = asyncio.create_task(queue.run())
    try:
        yield Setup(queue, file)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_job_is_run_and_remembered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="forebay")
    async with running(tmp_path) as setup:
        job = setup.queue.submit("verify", ["/jobs/a"], {"incremental": True})
        assert job.state == "queued"
        done = await setup.over(job)
        assert (done.state, done.summary["objects"], done.error) == ("done", 2, None)
        assert done.started is not None
        assert done.ended is not None
        assert setup.queue.driver().state == "ready"
    assert "hello a=b" in caplog.text, "what a driver logs is logged here"
    assert "the Spark driver sent an unknown line" in caplog.text
    assert [each.id for each in read_jobs(tmp_path / JOBS_FILE)] == [job.id]
    for name in (JOBS_FILE, LOG_FILE):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600, name


async def test_logs_are_sealed_before_they_are_uploaded_to_their_ends(tmp_path: Path) -> None:
    sealed: list[Sequence[str]] = []
    async with running(tmp_path, seal=sealed.append) as setup:
        for kind, topics, due in (
            ("offload", ["/jobs/a"], False),
            ("offload", ["/jobs/b"], True),
            ("verify", ["/jobs/c"], False),
            ("offload", [], False),
        ):
            await setup.over(setup.queue.submit(kind, topics, {"due": due}))
    assert [list(each) for each in sealed] == [["/jobs/a"], []]


async def test_jobs_run_one_after_the_other_in_their_order(tmp_path: Path) -> None:
    async with running(tmp_path) as setup:
        jobs = [setup.queue.submit("offload", [f"/jobs/{n}"], {}) for n in range(5)]
        done = [await setup.over(job) for job in jobs]
        starts = [each.started or 0 for each in done]
        assert starts == sorted(starts)
        assert [each.id for each in setup.queue.list()] == [each.id for each in jobs[::-1]]


async def test_a_job_that_fails_says_why(tmp_path: Path) -> None:
    async with running(tmp_path) as setup:
        failed = await setup.over(setup.queue.submit("compact", ["/jobs/fail"], {}))
        assert (failed.state, failed.error) == ("failed", "it cannot be done")
        assert failed.details == ("it cannot be done",)


async def test_a_driver_that_is_killed_loses_its_job_and_is_started_again(tmp_path: Path) -> None:
    async with running(tmp_path) as setup:
        dying = setup.queue.submit("offload", ["/jobs/die"], {})
        behind = setup.queue.submit("offload", ["/jobs/a"], {})
        lost = await setup.over(dying)
        assert lost.state == "lost"
        assert "SIGKILL" in (lost.error or "")
        assert (lost.done, lost.total) == (1, 4)
        assert (await setup.over(behind)).state == "done"
        assert setup.queue.driver().restarts == 1


async def test_a_driver_that_hangs_is_killed_and_started_again(tmp_path: Path) -> None:
    async with running(tmp_path, silence=5) as setup:
        hanging = setup.queue.submit("offload", ["/jobs/stop"], {})
        behind = setup.queue.submit("offload", ["/jobs/a"], {})
        await setup.until(lambda: setup.now(hanging).state == "running")
        pid = setup.queue.driver().pid
        lost = await setup.over(hanging)
        assert lost.state == "lost"
        assert "the Spark driver hung" in (lost.error or "")
        assert (await setup.over(behind)).state == "done"
        assert setup.queue.driver().restarts >= 1
    with pytest.raises(ProcessLookupError):
        os.kill(pid or 0, 0)


async def test_an_idle_driver_that_is_killed_is_started_again(tmp_path: Path) -> None:
    async with running(tmp_path) as setup:
        await setup.until(lambda: setup.queue.driver().state == "ready")
        pid = setup.queue.driver().pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await setup.until(lambda: setup.queue.driver().restarts == 1)
        await setup.until(lambda: setup.queue.driver().state == "ready")
        assert setup.queue.driver().pid != pid
        assert setup.queue.driver().error is None


async def test_a_driver_that_does_not_start_is_told_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path, start="refused") as setup:
        await setup.until(lambda: setup.queue.driver().restarts >= 2)
        assert setup.queue.driver().error == "no such master"
        job = setup.queue.submit("verify", [], {})
        assert setup.now(job).state == "queued"
    assert "Spark did not start" in caplog.text


def test_pauses_grow_and_have_a_bound() -> None:
    backoff = RestartBackoff(first_seconds=1, most_seconds=10)
    assert [backoff.delay_seconds(ends) for ends in (1, 2, 3, 4, 5, 1000)] == [1, 2, 4, 8, 10, 10]


async def test_the_queue_is_bounded(tmp_path: Path) -> None:
    async with running(tmp_path) as setup:
        first = setup.queue.submit("offload", ["/jobs/hang"], {})
        await setup.until(lambda: setup.now(first).state == "running")
        for _ in range(WAITING_MAX):
            setup.queue.submit("offload", ["/jobs/a"], {})
        with pytest.raises(JobsFull):
            setup.queue.submit("offload", ["/jobs/a"], {})


async def test_a_job_that_waits_is_cancelled_at_once_and_one_that_runs_by_the_driver(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as setup:
        first = setup.queue.submit("offload", ["/jobs/hang"], {})
        second = setup.queue.submit("offload", ["/jobs/a"], {})
        await setup.until(lambda: setup.now(first).total == 4)
        cancelled = setup.queue.cancel(second.id)
        assert cancelled is not None
        assert cancelled.state == "cancelled"
        setup.queue.cancel(first.id)
        assert (await setup.over(first)).state == "cancelled"
        again = setup.queue.cancel(first.id)
        assert again == setup.now(first), "what is over stays as it is"
        assert setup.queue.cancel("nobody") is None


async def test_cycles_that_moved_something_or_failed_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cycles = "idle\nmoved\nidle\nfailed\nfailed\nfailed\nmoved\nidle"
    async with running(tmp_path, cycles=cycles, interval=0.01) as setup:
        await setup.until(lambda: setup.cycles.read_text() == "")
        await setup.until(lambda: len(setup.queue.list()) == 3)
        runs = setup.queue.list()[::-1]
        assert [run.trigger for run in runs] == ["interval"] * 3
        assert [run.state for run in runs] == ["done", "failed", "done"]
        assert [run.attempts for run in runs] == [1, 3, 1], "failures in a row are told as one"
        assert runs[1].error == "the store is away"
    assert "a cycle of the pipeline failed" in caplog.text


async def test_cycles_and_jobs_take_turns(tmp_path: Path) -> None:
    async with running(tmp_path, cycles="moved\n" * 50, interval=0.01) as setup:
        for _ in range(5):
            assert (await setup.over(setup.queue.submit("verify", ["/jobs/a"], {}))).state == "done"
        assert any(run.trigger == "interval" for run in setup.queue.list())


async def test_what_is_not_over_when_the_server_stops_is_cancelled(tmp_path: Path) -> None:
    async with running(tmp_path) as setup:
        first = setup.queue.submit("offload", ["/jobs/hang"], {})
        setup.queue.submit("offload", ["/jobs/a"], {})
        await setup.until(lambda: setup.now(first).total == 4)
        pid = setup.queue.driver().pid
    assert {job.state for job in read_jobs(tmp_path / JOBS_FILE)} == {"cancelled"}
    with pytest.raises(ProcessLookupError):
        os.kill(pid or 0, 0)


# ---- the file ----


def record(number: int, state: str = "done") -> JobRecord:
    return JobRecord(f"{number}", "offload", ("/a/b",), {}, "request", state, float(number))


def test_jobs_survive_in_a_file_with_a_bound(tmp_path: Path) -> None:
    path = tmp_path / JOBS_FILE
    write_jobs(path, [record(number) for number in range(JOBS_KEPT + 50)])
    assert read_jobs(path) == [record(number) for number in range(50, JOBS_KEPT + 50)]


def test_a_job_that_was_not_over_when_its_server_was_killed_is_lost(tmp_path: Path) -> None:
    path = tmp_path / JOBS_FILE
    write_jobs(path, [record(1, "running"), record(2, "queued"), record(3)])
    assert [job.state for job in read_jobs(path)] == ["lost", "lost", "done"]


def test_a_file_name_that_is_not_utf_8_does_not_keep_jobs_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / JOBS_FILE
    write_jobs(path, [replace(record(1, "failed"), error="\udcff: no such file"), record(2)])
    assert [job.error for job in read_jobs(path)] == ["?: no such file", None]


def test_damaged_lines_are_left_out_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / JOBS_FILE
    write_jobs(path, [record(1), record(2)])
    with path.open("ab") as file:
        file.write(b'{"id": 7}\nnonsense\n[1]\n{"x": ' + b"[" * 100_000 + b'\n{"id": "x", "kind"')
    assert [job.id for job in read_jobs(path)] == ["1", "2"]
    assert "lines=5" in caplog.text


def test_a_log_of_spark_that_grew_too_large_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / LOG_FILE
    with path.open("wb") as file:
        file.truncate(LOG_BYTES_MAX + 1)
    bound_log(path)
    assert path.stat().st_size == 0
