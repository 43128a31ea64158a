"""`offload`, `compact` and `verify` with --url: the server's Spark does it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from forebay.admin.jobs import DONE, FAILED, QUEUED, RUNNING, DriverStatus, JobRecord
from support.cli_runs import refused, run
from support.served import Served, served


class FakeJobs:
    """Takes a job through its states, one for each look."""

    def __init__(self, end: str) -> None:
        self.asked: list[tuple[str, tuple[str, ...], dict[str, int | bool | str]]] = []
        self._end = end
        self._job: JobRecord | None = None

    def submit(
        self, kind: str, topics: Sequence[str], options: Mapping[str, int | bool | str]
    ) -> JobRecord:
        self.asked.append((kind, tuple(topics), dict(options)))
        self._job = JobRecord("1a", kind, tuple(topics), options, "request", QUEUED, 1.0)
        return self._job

    def list(self) -> Sequence[JobRecord]:
        return [] if self._job is None else [self._job]

    def get(self, job_id: str) -> JobRecord | None:
        job = self._job
        if job is None or job.id != job_id:
            return None
        if job.state == QUEUED:
            self._job = replace(job, state=RUNNING, done=1, total=4)
        else:
            error = "one topic failed" if self._end == FAILED else None
            self._job = replace(job, state=self._end, summary={"objects": 3}, error=error)
        return self._job

    def cancel(self, job_id: str) -> JobRecord | None:
        return self.get(job_id)

    def driver(self) -> DriverStatus:
        return DriverStatus("ready", "local[2]", 1.0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> object:
    with served(tmp_path_factory.mktemp("jobs") / "data") as found:
        yield found


def jobs_of(server: Served, end: str = DONE) -> FakeJobs:
    jobs = FakeJobs(end)
    server.context.jobs = jobs
    return jobs


@pytest.mark.parametrize(
    ("command", "asked"),
    [
        (["offload", "orders"], ("offload", ("/default/orders",), {})),
        (["offload", "--due"], ("offload", (), {"due": True})),
        (
            ["compact", "--target", "1MiB", "--budget", "1GiB"],
            ("compact", (), {"target_bytes": 1 << 20, "budget_bytes": 1 << 30}),
        ),
        (
            ["verify", "a", "b", "--no-orphans", "--budget", "5KiB"],
            (
                "verify",
                ("/default/a", "/default/b"),
                {"incremental": False, "orphans": False, "budget_bytes": 5120},
            ),
        ),
    ],
)
def test_the_server_is_asked_and_followed(
    server: Served, command: list[str], asked: tuple[object, ...]
) -> None:
    jobs = jobs_of(server)
    for name in ("orders", "a", "b"):
        server.store.topic(name)
    done = run(*command, "--url", server.url)
    assert done.exit_code == 0, done.output
    assert done.stdout == f"job 1a: {command[0]} done: objects 3\n"
    assert jobs.asked == [asked]


def test_a_job_that_fails_ends_with_1(server: Served) -> None:
    jobs_of(server, FAILED)
    done = run("offload", "--url", server.url, "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["error"] == "one topic failed"


def test_what_the_server_decides_is_refused(server: Served, tmp_path: Path) -> None:
    jobs = jobs_of(server)
    for command in (
        ["offload", "--master", "local[2]"],
        ["offload", "--dry-run"],
        ["compact", "orders", "--undo"],
        ["verify", "--report", str(tmp_path / "report.json")],
    ):
        assert "cannot be used with --url" in refused(*command, "--url", server.url)
    assert "a topic is /namespace/topic" in refused("offload", "a/b", "--url", server.url)
    assert "there is no topic /default/absent" in refused("verify", "absent", "--url", server.url)
    server.context.jobs = None
    assert "runs no Spark" in refused("verify", "--url", server.url)
    assert jobs.asked == []
