"""The jobs as the page lists them. Pure.

The pipeline's own cycles come every few seconds and are much alike; a job that somebody asked for
would soon be out of sight. Cycles in a row that ended well are therefore one row, with what they
did together, and `runs` and `since` say how many they were and from when. A cycle that runs is
shown by the row of those before it.

What a caller gets wrong: `summary` of such a row is of all its runs, its times and `progress` are
of the newest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from forebay.admin.jobs import DONE, RUNNING, JobRecord

ROWS_MAX: Final = 20
_CYCLES_MAX: Final = 8
"""Rows of cycles, so that there is room for jobs that were asked for."""
_CYCLE: Final = "interval"
_STANDING: Final = "topics"
"""The one number of a summary that does not add up: every cycle looks at the same topics."""


def job_rows(jobs: Sequence[JobRecord]) -> list[dict[str, Any]]:
    """Of all jobs, the newest first: those that are under way, then the newest of the others."""
    # Asked for first: a cycle that runs is to stand next to those before it.
    going = sorted((job for job in jobs if not job.over), key=lambda job: job.trigger == _CYCLE)
    over = [job for job in jobs if job.over]
    rows: list[list[JobRecord]] = []
    for job in [*going, *over]:
        if rows and _joins(rows[-1][-1], job):
            rows[-1].append(job)
        else:
            rows.append([job])
    found: list[dict[str, Any]] = []
    cycles = 0
    for row in rows:
        cycles += row[0].trigger == _CYCLE
        if row[0].trigger != _CYCLE or cycles <= _CYCLES_MAX:
            found.append(_facts(row))
    return found[:ROWS_MAX]


def _joins(newer: JobRecord, older: JobRecord) -> bool:
    return (
        newer.trigger == older.trigger == _CYCLE
        and (newer.kind, newer.topics) == (older.kind, older.topics)
        and newer.state in (DONE, RUNNING)
        and older.state == DONE
    )


def _facts(row: Sequence[JobRecord]) -> dict[str, Any]:
    over = [job for job in row if job.over]
    return {
        **row[0].facts(),
        "summary": _sum(job.summary for job in row),
        "runs": len(over),
        "since": row[-1].created,
    }


def _sum(summaries: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for summary in summaries:
        for name, value in summary.items():
            known = total.get(name, 0)
            total[name] = max(known, value) if name == _STANDING else known + value
    return total
