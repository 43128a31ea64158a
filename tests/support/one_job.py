"""A runner of jobs that a test moves on by hand."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from forebay.admin.jobs import DriverStatus, JobRecord


class OneJob:
    """Takes one job after the other and does nothing with them."""

    def __init__(self) -> None:
        self._jobs: list[JobRecord] = []

    def submit(
        self, kind: str, topics: Sequence[str], options: Mapping[str, int | bool | str]
    ) -> JobRecord:
        job = JobRecord(
            f"job-{len(self._jobs)}", kind, tuple(topics), options, "request", "queued", time.time()
        )
        self._jobs.insert(0, job)
        return job

    def advance(self, **changes: Any) -> None:
        """Changes the newest one."""
        self._jobs[0] = replace(self._jobs[0], **changes)

    def cycle(self, **summary: int) -> None:
        """Adds one of the pipeline's own that is done."""
        now = time.time()
        job = JobRecord(f"job-{len(self._jobs)}", "offload", (), {}, "interval", "done", now)
        self._jobs.insert(0, replace(job, started=now, ended=now, summary=summary))

    def list(self) -> Sequence[JobRecord]:
        return tuple(self._jobs)

    def get(self, job_id: str) -> JobRecord | None:
        return next((job for job in self._jobs if job.id == job_id), None)

    def cancel(self, job_id: str) -> JobRecord | None:
        return self.get(job_id)

    def driver(self) -> DriverStatus:
        return DriverStatus("ready", "local[2]", 0.0)
