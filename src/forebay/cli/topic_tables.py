"""What `forebay describe` shows of a topic: tables on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import click

Facts = dict[str, Any]


def show_topic(facts: Facts, limit: int) -> None:
    if sys.stdout.isatty():
        _show_tables(facts, limit)
    else:
        click.echo("\n".join(plain_lines(facts, limit)))


def plain_lines(facts: Facts, limit: int) -> Iterator[str]:
    yield from _head(facts)
    yield _headed(facts, "segments", limit)
    for segment in _newest(facts["segments"], limit):
        yield (
            f"  {_offsets(segment)}, {segment['bytes']} bytes, {_stage(segment)}, "
            f"{_fate(segment)}: {segment['file']}"
        )
    yield _headed(facts, "objects", limit)
    for each in _newest(facts["objects"], limit):
        yield (
            f"  {_offsets(each)}, {each['bytes']} bytes, {_read_back(each)}, {_made(each)}: "
            f"{each['object_id']}"
        )
    for problem in facts["problems"]:
        yield f"problem: {problem}"


def _head(facts: Facts) -> Iterator[str]:
    yield facts["topic"]
    yield f"  start      {facts['start_offset']}"
    if facts.get("appended") is not None:
        yield f"  appended   {facts['appended']}"
    synced = facts["synced"]
    yield f"  synced     {'unknown: its log is not here' if synced is None else synced}"
    for stage in ("uploaded", "verified"):
        yield f"  {stage}   {facts[stage]}{_but_for(facts, facts[stage])}"
    if facts["epoch"] is not None:
        yield f"  reserved   {facts['reserved']}"
        yield f"  owner      {facts['owner'] or 'none'}, epoch {facts['epoch']}"
    memory = facts.get("memory")
    if memory is not None:
        first, end = memory
        yield f"  in memory  {f'{first} to {end - 1}' if first < end else 'nothing'}"
    for start, end in facts["lost"]:
        yield f"  lost       {start} to {end - 1}"


def _but_for(facts: Facts, stage: int) -> str:
    """A stage counts over what is lost: nobody is to take that for stored."""
    lost = sum(min(end, stage) - start for start, end in facts["lost"] if start < stage)
    return f", but for {lost} offsets that are lost" if lost else ""


def _headed(facts: Facts, what: str, limit: int) -> str:
    total = facts[f"{what}_total"]
    more = f", the newest {limit}" if total > limit else ""
    return f"{total} {what}, {facts[f'{what}_bytes']} bytes{more}"


def _newest(rows: Sequence[Facts], limit: int) -> Sequence[Facts]:
    return rows[-limit:] if limit else ()


def _offsets(row: Facts) -> str:
    return f"{row['start_offset']} to {row['next_offset'] - 1}"


def _stage(segment: Facts) -> str:
    return "verified" if segment["verified"] else "uploaded" if segment["uploaded"] else "local"


def _fate(segment: Facts) -> str:
    return "deletable" if segment["deletable"] else f"kept: {segment['kept_because']}"


def _read_back(each: Facts) -> str:
    return "verified" if each["verified"] else "not verified"


def _made(each: Facts) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(each["created_at"]))


def _show_tables(facts: Facts, limit: int) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    for line in _head(facts):
        console.print(escape(line), highlight=False)

    def table(what: str, columns: Sequence[str], rows: list[Sequence[str]]) -> None:
        shown = Table(title=_headed(facts, what, limit), title_justify="left", box=None)
        for column in columns:
            shown.add_column(column, justify="right" if column == "bytes" else "left")
        for row in rows:
            shown.add_row(*map(escape, row))
        console.print(shown)

    table(
        "segments",
        ("offsets", "bytes", "stage", "may be deleted", "file"),
        [
            (_offsets(each), str(each["bytes"]), _stage(each), _fate(each), each["file"])
            for each in _newest(facts["segments"], limit)
        ],
    )
    table(
        "objects",
        ("offsets", "bytes", "stage", "made", "object"),
        [
            (_offsets(each), str(each["bytes"]), _read_back(each), _made(each), each["object_id"])
            for each in _newest(facts["objects"], limit)
        ],
    )
    for problem in facts["problems"]:
        console.print(f"[red]problem:[/red] {escape(problem)}", highlight=False)
