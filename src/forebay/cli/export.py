"""`forebay export`: a topic to a table of Parquet, Delta or Iceberg, on Spark."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Literal

import click

from forebay.cli.options import json_option, open_view, store_options
from forebay.cli.spark_options import job_options, progress_bar
from forebay.errors import UsageError
from forebay.settings import StoreSettings

if TYPE_CHECKING:
    from forebay.pipeline.jobs.export_report import ExportReport, ExportRow


@click.command()
@click.argument("topic")
@click.argument("table")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["parquet", "delta", "iceberg"]),
    default="parquet",
    show_default=True,
    help="What the table is.",
)
@click.option(
    "--catalog",
    metavar="URI",
    help="Of Iceberg's tables, such as sqlite:////lake/catalog.db or http://host:8181.  "
    "[default: iceberg.db beside the table]",
)
@click.option("--json-values", is_flag=True, help="The fields of JSON objects become columns.")
@click.option("--start", type=int, metavar="OFFSET", help="Where a new table begins.")
@click.option("--end", type=int, metavar="OFFSET", help="Export what is before this offset.")
@click.option("--max-batch-rows", type=int, metavar="N", help="In one commit.  [default: 10000000]")
@click.option("--max-batch-bytes", metavar="SIZE", help="In one commit.  [default: 1GiB]")
@click.option("--allow-gaps", is_flag=True, help="Go on behind offsets that are gone.")
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
    """Brings TABLE, a directory, up to the end of TOPIC, each message exactly once.

    The table says itself how far it has got, so a run that was killed is simply started again.
    With --json-values, records that are no JSON objects, or that do not fit the columns, go to
    the table TABLE_rejected. Exit code 1 if offsets are gone that the table does not have yet.

    \b
    Examples:
      forebay export orders lake/orders
      forebay export orders lake/orders --format delta --json-values
      forebay export orders lake/orders --format iceberg --dry-run --json
    """
    from forebay.pipeline.jobs.export import export as run

    open_view(settings).close()
    if master is not None:
        settings = replace(settings, spark=replace(settings.spark, master=master))
    if max_batch_rows is not None:
        choices["max_batch_rows"] = max_batch_rows
    if max_batch_bytes is not None:
        choices["max_batch_bytes"] = _bytes(max_batch_bytes)
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
    if as_json:
        click.echo(json.dumps(_facts(report)))
    else:
        click.echo("\n".join(_lines(report)))
    if not report.ok:
        sys.exit(1)


def _bytes(text: str) -> int:
    from forebay.config.quantities import BYTES, parse_quantity

    size = parse_quantity(text, BYTES)
    if size is None or size < 1:
        raise UsageError(f"--max-batch-bytes is {text[:40]!r}; it must be a size such as 256MiB")
    return int(size)


def _facts(report: ExportReport) -> dict[str, Any]:
    totals = {
        "ok": report.ok,
        "commits": report.commits,
        "records": report.records,
        "rejected": report.rejected,
        "skipped": report.skipped,
    }
    return {**asdict(report), **totals}


def _lines(report: ExportReport) -> Iterator[str]:
    for row in report.rows:
        yield f"  {_row_line(row)}"
    did = "would be exported" if report.dry_run else "exported"
    side = f", {report.rejected} to {report.rejected_table}" if report.rejected else ""
    where = f"the next offset is {report.next_offset}"
    if report.next_offset is None:
        where = "nothing was committed"
    yield (
        f"{report.topic}: {report.records} messages {did} to {report.table}{side}, in "
        f"{report.commits} commits; {where}"
    )


def _row_line(row: ExportRow) -> str:
    if row.error is not None or row.start_offset is None or row.end_offset is None:
        return f"stopped: {row.error}"
    skipped = f", after {row.skipped} that are gone" if row.skipped else ""
    rejected = f", {row.rejected} rejected" if row.rejected else ""
    return (
        f"offsets {row.start_offset} to {row.end_offset - 1}{skipped}: {row.records} messages"
        f"{rejected}, {row.files} files, {row.bytes} bytes"
    )
