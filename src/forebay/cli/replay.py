"""`forebay replay`: a range of one topic into another, on Spark."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import click

from forebay.cli.options import json_option, open_view, store_options
from forebay.cli.spark_options import job_options, lazy_session, progress_bar
from forebay.errors import UsageError
from forebay.settings import StoreSettings

if TYPE_CHECKING:
    from forebay.pipeline.jobs.replay_report import ReplayReport


@click.command()
@click.argument("topic")
@click.argument("into")
@click.option("--start", type=click.IntRange(0), help="The first offset.  [default: the oldest]")
@click.option("--end", type=click.IntRange(0), help="The offset to stop before.  [default: latest]")
@click.option("--since", metavar="TIME", help="Begin with the first message of this time or later.")
@click.option("--until", metavar="TIME", help="Stop before the first message of this time.")
@click.option("--sink-id", metavar="ID", help="Which replay this is.  [default: replay]")
@click.option("--again", is_flag=True, help="Append everything again, as a new replay.")
@click.option("--skip-lost", is_flag=True, help="Step over offsets that are recorded as lost.")
@job_options
@store_options
@json_option
def replay(
    topic: str,
    into: str,
    start: int | None,
    end: int | None,
    since: str | None,
    until: str | None,
    sink_id: str | None,
    again: bool,
    skip_lost: bool,
    master: str | None,
    dry_run: bool,
    settings: StoreSettings,
    as_json: bool,
) -> None:
    """Appends a range of TOPIC to the topic INTO, in the same order.

    Keys, values and attributes are kept. A second run from the same start adds only what lies
    behind the end of the first one. Times are ISO 8601, in UTC unless they say otherwise, or
    milliseconds since 1970. Exit code 1 if it did not come to its end: run it again.

    \b
    Examples:
      forebay replay orders orders-test --start 1000 --end 2000
      forebay replay orders repaired --since 2026-01-31T12:00 --until 2026-02-01 --dry-run
    """
    from forebay.pipeline.jobs.replay import replay as run

    start_time, end_time = _time("--since", since), _time("--until", until)
    open_view(settings).close()
    with lazy_session(settings, master) as chosen, progress_bar("replay") as progress:
        report = run(
            chosen,
            topic,
            into,
            start=start,
            end=end,
            start_time=start_time,
            end_time=end_time,
            sink_id=sink_id,
            again=again,
            skip_lost=skip_lost,
            dry_run=dry_run,
            progress=progress,
        )
    if as_json:
        totals = {"appended": report.appended, "known": report.known, "ok": report.ok}
        click.echo(json.dumps({**asdict(report), **totals}))
    else:
        click.echo("\n".join(_lines(report)))
    if not report.ok:
        sys.exit(1)


def _lines(report: ReplayReport) -> list[str]:
    failed = [
        f"offsets {row.start_offset} to {row.end_offset - 1}: failed: {row.error}"
        for row in report.rows
        if row.error is not None
    ]
    did = "would append" if report.dry_run else "appended"
    there = f", {report.known} were there already" if report.known else ""
    summary = (
        f"{report.topic} {report.start_offset}..{report.end_offset} into {report.into}: {did} "
        f"{report.appended} messages{there} (--sink-id {report.sink_id})"
    )
    return [*failed, summary]


_DIGITS_MAX: Final = 15


def _time(option: str, text: str | None) -> int | None:
    """Milliseconds since 1970."""
    if text is None:
        return None
    if text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX:
        return int(text)
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise UsageError(
            f"{option} is {text!r}; it must be like 2026-01-31T12:00:00Z, or milliseconds"
        ) from error
    return int((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1000)
