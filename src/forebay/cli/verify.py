"""`forebay verify`: reads the objects again, on Spark."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from forebay.cli.options import json_option, store_options
from forebay.cli.remote_jobs import job_url_option, run_on_server
from forebay.cli.spark_options import job_options, lazy_session, progress_bar
from forebay.errors import UsageError
from forebay.settings import StoreSettings

if TYPE_CHECKING:
    from forebay.pipeline.jobs.verify_report import VerifyReport, VerifyRow

_LINES_MAX: Final = 100
"""Findings that people are shown; --json and --report have more."""


@click.command()
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option(
    "--incremental", is_flag=True, help="Only what was committed or compacted since the last run."
)
@click.option(
    "--budget",
    metavar="SIZE",
    help="Read at most so much, such as 50GiB: the new first, then on from where the last run "
    "stopped.",
)
@click.option("--no-orphans", is_flag=True, help="Do not list the object store.")
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the report, as JSON, to this file.",
)
@job_url_option
@store_options
@json_option
@job_options
def verify(
    topics: tuple[str, ...],
    incremental: bool,
    budget: str | None,
    no_orphans: bool,
    report: Path | None,
    url: str | None,
    settings: StoreSettings,
    as_json: bool,
    master: str | None,
    dry_run: bool,
) -> None:
    """Reads every byte of every object again.

    Checksums, consecutive offsets, index entries, sizes, sidecars, the chain of the objects, and
    what no descriptor names. Of all topics that the catalog knows, or of those that are named.
    Exit code 1 if anything is wrong.

    \b
    Examples:
      forebay verify --dry-run
      forebay verify orders --report verified.json
      forebay verify --budget 50GiB
    """
    if url is not None:
        refused = {"--master": master, "--dry-run": dry_run, "--report": report}
        options: dict[str, int | bool] = {"incremental": incremental, "orphans": not no_orphans}
        if budget is not None:
            options["budget_bytes"] = _bytes(budget)
        run_on_server(settings, url, "verify", topics, options, refused=refused, as_json=as_json)
        return
    from forebay.pipeline.jobs.verify import verify as run

    with lazy_session(settings, master) as chosen, progress_bar("verify") as progress:
        done = run(
            chosen,
            topics or None,
            incremental=incremental,
            budget_bytes=None if budget is None else _bytes(budget),
            orphans=not no_orphans,
            dry_run=dry_run,
            progress=progress,
        )
    document = json.dumps(done.facts())
    if report is not None:
        _write(report, document)
    click.echo(document if as_json else "\n".join(_lines(done)))
    if not done.ok:
        sys.exit(1)


def _bytes(text: str) -> int:
    from forebay.config.quantities import BYTES, parse_quantity

    size = parse_quantity(text, BYTES)
    if size is None or size < 1:
        raise UsageError(f"--budget is {text[:40]!r}; it must be a size such as 50GiB")
    return int(size)


def _write(path: Path, document: str) -> None:
    """The whole report, or what was there before."""
    from forebay.files.disk import replace_file
    from forebay.files.local import LocalDisk

    replace_file(LocalDisk(), path.absolute(), document.encode() + b"\n")


def _lines(done: VerifyReport) -> Iterator[str]:
    findings = done.findings
    for row in findings[:_LINES_MAX]:
        yield _line(row)
    more = len(findings) - _LINES_MAX + done.rows_left_out
    if more > 0:
        yield f"and {more} more findings"
    read = "would be read" if done.dry_run else "read and found right"
    yield (
        f"{done.topics} topics: {done.objects} objects {read} ({done.bytes} bytes, "
        f"{done.messages} messages); {done.errors} errors, {done.warnings} warnings, "
        f"{done.notes} notes"
    )


def _line(row: VerifyRow) -> str:
    what = row.topic if row.object_id is None else f"{row.topic}, {row.object_id}"
    place = "" if row.position is None else f" at position {row.position}"
    many = f" ({row.objects} objects, {row.bytes} bytes)" if row.objects > 1 else ""
    return f"{row.severity}: {row.kind}: {what}{place}: {row.detail}{many}"
