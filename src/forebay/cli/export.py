"""`forebay export` and `forebay replay`: a topic into a table, or into another topic, on Spark.

Both continue where an earlier run stopped: the table, or the target topic, records how far it got.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import click

from forebay.cli.job_options import job_options, lazy_session, progress_bar
from forebay.cli.options import json_option, open_view, print_report, size_of, store_options
from forebay.errors import UsageError
from forebay.settings import StoreSettings

if TYPE_CHECKING:
    from forebay.pipeline.jobs.export.job import ExportReport, ExportRow
    from forebay.pipeline.jobs.replay import ReplayReport

_DIGITS_MAX: Final = 15
"""The most digits of a time in milliseconds since 1970: enough for 30,000 years."""


@click.command()
@click.argument("topic")
@click.argument("table")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["parquet", "delta", "iceberg"]),
    default="parquet",
    show_default=True,
    help="The format of the table.",
)
@click.option(
    "--catalog",
    metavar="URI",
    help="The Iceberg catalog, such as sqlite:////lake/catalog.db or http://host:8181.  "
    "[default: iceberg.db beside the table]",
)
@click.option("--json-values", is_flag=True, help="Make columns of the fields of JSON objects.")
@click.option(
    "--keep-value/--no-keep-value",
    default=True,
    show_default=True,
    help="With --json-values, keep the text of each message in the column value.",
)
@click.option("--start", type=int, metavar="OFFSET", help="The first offset of a new table.")
@click.option("--end", type=int, metavar="OFFSET", help="Stop before this offset.")
@click.option(
    "--max-batch-rows",
    type=int,
    metavar="N",
    help="The most rows of a commit.  [default: 10000000]",
)
@click.option(
    "--max-batch-bytes", metavar="SIZE", help="The most bytes of a commit.  [default: 1GiB]"
)
@click.option("--allow-gaps", is_flag=True, help="Skip offsets that were deleted or lost.")
@job_options
@store_options
@json_option
def export(
    topic: str,
    table: str,
    kind: Literal["parquet", "delta", "iceberg"],
    catalog: str | None,
    json_values: bool,
    master: str | None,
    settings: StoreSettings,
    as_json: bool,
    max_batch_rows: int | None,
    max_batch_bytes: str | None,
    **choices: Any,
) -> None:
    """Appends the new messages of TOPIC to TABLE, each exactly once.

    TABLE is a directory; it is created if needed. A topic with partitions is one table with all of
    them, told apart by the column partition. The table records how far it got: run the command
    again to add newer messages, or to continue after a run that was killed. With --json-values, a
    message that is not a JSON object, or does not fit the columns exactly, goes to the table
    TABLE_rejected. Exit code 1 if the export stopped before the end, for example because the next
    offsets were deleted or lost before they were exported.

    \b
    Examples:
      forebay export orders lake/orders
      forebay export orders lake/orders --format delta --json-values
      forebay export orders lake/orders --format iceberg --dry-run --json
    """
    from forebay.pipeline.jobs.export.job import export as run

    open_view(settings).close()
    if master is not None:
        settings = replace(settings, spark=replace(settings.spark, master=master))
    if max_batch_rows is not None:
        choices["max_batch_rows"] = max_batch_rows
    if max_batch_bytes is not None:
        choices["max_batch_bytes"] = size_of("--max-batch-bytes", max_batch_bytes)
    with progress_bar(f"export {topic}") as progress:
        report = run(
            settings,
            topic,
            table,
            format=kind,
            catalog=catalog,
            value="json" if json_values else "raw",
            progress=progress,
            **choices,
        )
    totals = {
        "ok": report.ok,
        "commits": report.commits,
        "records": report.records,
        "rejected": report.rejected,
        "skipped": report.skipped,
    }
    lines = _export_lines(report)
    print_report({**asdict(report), **totals}, lines, as_json=as_json, ok=report.ok)


def _export_lines(report: ExportReport) -> Iterator[str]:
    for row in report.rows:
        yield f"  {_commit_line(row, report.topic)}"
    did = "would be exported" if report.dry_run else "exported"
    side = f", {report.rejected} to {report.rejected_table}" if report.rejected else ""
    where = f"the next offset is {report.next_offset}"
    if len(report.next_offsets) > 1:
        reached = (f"{name} {offset or 0}" for name, offset in report.next_offsets.items())
        where = f"the next offsets are {', '.join(reached)}"
    elif report.next_offset is None:
        where = "nothing was committed"
    yield (
        f"{report.topic}: {report.records} messages {did} to {report.table}{side}, in "
        f"{report.commits} commits; {where}"
    )


def _commit_line(row: ExportRow, topic: str) -> str:
    of = "" if row.topic == topic else f"{row.topic}: "
    if row.error is not None or row.start_offset is None or row.end_offset is None:
        return f"{of}stopped: {row.error}"
    skipped = f", after {row.skipped} that were deleted or lost" if row.skipped else ""
    rejected = f", {row.rejected} rejected" if row.rejected else ""
    return (
        f"{of}offsets {row.start_offset} to {row.end_offset - 1}{skipped}: {row.records} messages"
        f"{rejected}, {row.files} files, {row.bytes} bytes"
    )


@click.command()
@click.argument("topic")
@click.argument("into")
@click.option("--start", type=click.IntRange(0), help="The first offset.  [default: the oldest]")
@click.option("--end", type=click.IntRange(0), help="Stop before this offset.  [default: latest]")
@click.option("--since", metavar="TIME", help="Start at the first message of this time or later.")
@click.option(
    "--until", metavar="TIME", help="Stop before the first message of this time or later."
)
@click.option(
    "--sink-id",
    metavar="ID",
    help="The id of this replay: a run with the same id and start continues it.  [default: replay]",
)
@click.option("--again", is_flag=True, help="Append everything again, as a new replay.")
@click.option("--skip-lost", is_flag=True, help="Skip offsets that are lost or unknown.")
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

    Keys, values and attributes are kept. A second run from the same start appends only the messages
    after the end of the first one. A TIME is ISO 8601, in UTC unless it has a time zone, or
    milliseconds since 1970. Exit code 1 if the replay is incomplete: run it again.

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
    totals = {"appended": report.appended, "known": report.known, "ok": report.ok}
    lines = _replay_lines(report)
    print_report({**asdict(report), **totals}, lines, as_json=as_json, ok=report.ok)


def _replay_lines(report: ReplayReport) -> list[str]:
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


def _time(option: str, text: str | None) -> int | None:
    """Milliseconds since 1970. No durations: a second run must have the same start."""
    from forebay.config.quantities import parse_moment

    found = None if text is None else parse_moment(text)
    if text is not None and found is None:
        raise UsageError(
            f"{option} is {text!r}; it must be like 2026-01-31T12:00:00Z, or milliseconds"
        )
    return found
