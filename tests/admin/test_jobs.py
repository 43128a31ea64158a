"""`/v1/jobs` over HTTP: what is taken, what is refused, and what a server without Spark says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from forebay.admin.jobs import DriverStatus, JobRecord, JobsFull, parse_request
from forebay.errors import (
    ForebayError,
    ServiceRefused,
    ServiceUnavailable,
    UnknownTopic,
    UsageError,
)
from support.served import Served, served

PLACES = 3


class Shelf:
    """Keeps jobs and runs none: enough to be asked over HTTP."""

    def __init__(self) -> None:
        self._jobs: list[JobRecord] = []

    def submit(
        self, kind: str, topics: Sequence[str], options: Mapping[str, int | bool | str]
    ) -> JobRecord:
        if len(self._jobs) >= PLACES:
            raise JobsFull("all places are taken")
        number = len(self._jobs)
        job = JobRecord(f"j{number}", kind, tuple(topics), options, "request", "queued", number)
        self._jobs.append(job)
        return job

    def list(self) -> Sequence[JobRecord]:
        return self._jobs[::-1]

    def get(self, job_id: str) -> JobRecord | None:
        return next((job for job in self._jobs if job.id == job_id), None)

    def cancel(self, job_id: str) -> JobRecord | None:
        job = self.get(job_id)
        if job is None:
            return None
        over = replace(job, state="cancelled", ended=1.0)
        self._jobs[self._jobs.index(job)] = over
        return over

    def driver(self) -> DriverStatus:
        return DriverStatus("ready", "local[2,4]", 1.5, pid=7)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server without Spark."""
    with served(tmp_path_factory.mktemp("bare")) as server:
        yield server


@pytest.fixture
def server(bare: Served) -> Iterator[Served]:
    bare.context.jobs = Shelf()
    yield bare
    bare.context.jobs = None


def post(server: Served, value: object) -> Any:
    return server.client.json("POST", "/v1/jobs", value=value)


def test_a_job_for_a_topic_that_is_not_there_is_refused_at_once(server: Served) -> None:
    with pytest.raises(UnknownTopic, match="there is no topic /default/absent"):
        post(server, {"kind": "verify", "topics": ["absent"]})


def test_a_job_is_taken_told_and_ended(server: Served) -> None:
    for name in ("orders", "/a/b"):
        server.store.topic(name)
    body = b'{"kind": "offload", "topics": ["orders", "/a/b", "orders"], "due": true}'
    answer = server.client.request("POST", "/v1/jobs", body=body)
    assert answer.status == 202
    assert answer.headers["Location"] == "/v1/jobs/j0"
    answer.read()
    found = server.client.json("GET", "/v1/jobs/j0")
    assert found["topics"] == ["/default/orders", "/a/b"]
    assert found["options"] == {"due": True}
    assert found["progress"] == {"done": 0, "total": 0, "label": ""}
    assert found["state"] == "queued"
    assert server.client.json("DELETE", "/v1/jobs/j0")["state"] == "cancelled"


def test_jobs_are_listed_the_newest_first_and_by_what_they_are(server: Served) -> None:
    for kind in ("offload", "verify", "verify"):
        post(server, {"kind": kind})
    listed = server.client.json("GET", "/v1/jobs")
    assert [job["id"] for job in listed["jobs"]] == ["j2", "j1", "j0"]
    assert listed["spark"]["master"] == "local[2,4]"
    some = server.client.json("GET", "/v1/jobs", query={"kind": "verify", "limit": 1})
    assert [job["id"] for job in some["jobs"]] == ["j2"]
    none = server.client.json("GET", "/v1/jobs", query={"state": "lost"})
    assert none["jobs"] == []


def test_a_full_queue_says_to_come_back(server: Served) -> None:
    for _ in range(PLACES):
        post(server, {"kind": "verify"})
    with pytest.raises(ServiceUnavailable, match="all places are taken"):
        post(server, {"kind": "verify"})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not JSON"),
        (b"[]", "must be an object"),
        (b"{}", "the key 'kind' is missing"),
        (b'{"kind": ["offload"]}', "must be one of compact, offload, verify"),
        (b'{"kind": "offload", "topics": "orders"}', "topics is text; it must be a list"),
        (b'{"kind": "offload", "topics": [1]}', r"topics\[0\] is a number; it must be text"),
        (b'{"kind": "offload", "topics": ["/a"]}', "is not a topic name"),
        (
            b'{"kind": "offload", "force": true}',
            "unknown key 'force'; known ones: kind, topics, due",
        ),
        (b'{"kind": "offload", "due": 1}', "true or false"),
        (b'{"kind": "compact", "target_bytes": 0}', "a whole number from 1 on"),
        (b'{"kind": "verify", "budget_bytes": true}', "a whole number"),
        (b'{"kind": "offload", "x": ' + b"[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_job_is_refused_with_the_reason(server: Served, body: bytes, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        server.client.request("POST", "/v1/jobs", body=body)
    assert server.client.json("GET", "/v1/jobs")["jobs"] == []


def test_a_body_that_is_too_large_is_refused(server: Served) -> None:
    with pytest.raises(UsageError, match="larger"):
        server.client.request("POST", "/v1/jobs", body=b" " * (1024 * 1024 + 1))


@pytest.mark.parametrize("limit", ["0", "-1", "x", "99999999999999"])
def test_a_limit_that_is_none_is_refused(server: Served, limit: str) -> None:
    with pytest.raises(UsageError, match="limit"):
        server.client.json("GET", "/v1/jobs", query={"limit": limit})


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_a_job_that_nobody_knows(server: Served, bare: Served, method: str) -> None:
    for each in (server, bare):
        with pytest.raises(UsageError, match="no job 'j9'"):
            each.client.json(method, "/v1/jobs/j9")


def test_a_server_without_spark_says_what_to_start(bare: Served) -> None:
    with pytest.raises(ServiceRefused, match="forebay up"):
        post(bare, {"kind": "offload"})
    assert bare.client.json("GET", "/v1/jobs") == {"jobs": [], "spark": None}


def test_options_of_every_kind_are_taken() -> None:
    asked = b'{"kind": "verify", "incremental": true, "budget_bytes": 7, "orphans": false}'
    assert parse_request(asked) == (
        "verify",
        (),
        {"incremental": True, "budget_bytes": 7, "orphans": False},
    )
    asked = b'{"kind": "compact", "topics": null, "target_bytes": 8, "budget_bytes": 9}'
    assert parse_request(asked) == ("compact", (), {"target_bytes": 8, "budget_bytes": 9})
    asked = b'{"kind": "compact", "compression": "zstd"}'
    assert parse_request(asked) == ("compact", (), {"compression": "zstd"})


def test_methods_that_jobs_do_not_have_are_refused(server: Served) -> None:
    with pytest.raises(ForebayError):
        server.client.json("PUT", "/v1/jobs", value={"kind": "verify"})
