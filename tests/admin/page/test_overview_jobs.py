"""Cycles in a row are one row; what somebody asked for stays in sight."""

from __future__ import annotations

from msgspec.structs import replace

from forebay.admin.jobs import JobRecord
from forebay.admin.page.overview import ROWS_MAX, job_rows


def job(number: int, trigger: str = "interval", state: str = "done", **summary: int) -> JobRecord:
    record = JobRecord(str(number), "offload", (), {}, trigger, state, float(number))
    return replace(record, summary=summary)


def newest_first(*jobs: JobRecord) -> list[JobRecord]:
    return list(jobs)[::-1]


def test_cycles_in_a_row_are_told_with_what_they_did_together() -> None:
    (row,) = job_rows(newest_first(*(job(each, topics=4, objects=2) for each in range(5))))
    assert (row.id, row.runs, row.since) == ("4", 5, 0.0)
    assert row.summary == {"topics": 4, "objects": 10}


def test_a_cycle_that_runs_is_shown_with_those_before_it() -> None:
    going = replace(job(9, state="running"), done=1, total=2)
    waiting = job(8, "request", "queued")
    first, second = job_rows(newest_first(job(1, objects=1), job(2, objects=1), waiting, going))
    assert (first.id, first.state, first.runs) == ("8", "queued", 0)
    assert (second.id, second.state, second.runs) == ("9", "running", 2)
    assert second.progress.done == 1


def test_what_failed_and_what_was_asked_for_have_rows_of_their_own() -> None:
    jobs = newest_first(
        job(1), job(2), job(3, "request"), job(4), job(5, state="failed"), job(6), job(7)
    )
    assert [(row.id, row.runs) for row in job_rows(jobs)] == [
        ("7", 2),
        ("5", 1),
        ("4", 1),
        ("3", 1),
        ("2", 2),
    ]


def test_however_many_rows_cycles_make_there_is_room_for_requests() -> None:
    asked = [job(number, "request") for number in range(5)]
    states = ("done", "failed")
    cycles = [job(10 + number, state=states[number % 2]) for number in range(100)]
    rows = job_rows(newest_first(*asked, *cycles))
    assert len(rows) <= ROWS_MAX
    assert [row.id for row in rows if row.trigger == "request"] == ["4", "3", "2", "1", "0"]
