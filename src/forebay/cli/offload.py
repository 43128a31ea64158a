"""`forebay offload` and `forebay pipeline`: from segments to objects, on Spark."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from forebay.cli.options import json_option, open_view, store_options
from forebay.cli.remote_jobs import job_url_option, run_on_server
from forebay.cli.spark_options import (
    job_options,
    job_session,
    lazy_session,
    master_option,
    progress_bar,
)
from forebay.settings import StoreSettings

if TYPE_CHECKING:
    from forebay.pipeline.jobs.offload_report import OffloadReport


@click.command()
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option("--due", is_flag=True, help="Only what is due by the thresholds.")
@job_url_option
@job_options
@store_options
@json_option
def offload(
    topics: tuple[str, ...],
    due: bool,
    url: str | None,
    master: str | None,
    dry_run: bool,
    settings: StoreSettings,
    as_json: bool,
) -> None:
    """Uploads everything that is synced, whatever the thresholds.

    Of all topics, or of those that are named. The topics may be in use meanwhile. Exit code 1 if
    a topic could not be uploaded to its end; what was uploaded counts all the same.

    \b
    Examples:
      forebay offload --dry-run
      forebay offload orders payments --master spark://10.0.0.1:7077
      forebay offload --url http://127.0.0.1:8650
    """
    if url is not None:
        refused = {"--master": master, "--dry-run": dry_run}
        options = {"due": True} if due else {}
        run_on_server(settings, url, "offload", topics, options, refused=refused, as_json=as_json)
        return
    from forebay.pipeline.jobs.offload import offload as run

    open_view(settings).close()
    with lazy_session(settings, master) as chosen, progress_bar("offload") as progress:
        report = run(chosen, topics or None, force=not due, dry_run=dry_run, progress=progress)
    if as_json:
        click.echo(json.dumps(_facts(report)))
    else:
        for line in _lines(report):
            click.echo(line)
    if not report.ok:
        sys.exit(1)


@click.command()
@master_option
@store_options
@json_option
def pipeline(master: str | None, settings: StoreSettings, as_json: bool) -> None:
    """Uploads what is due, again and again, until it is stopped.

    The continuous driver: one cycle each `storage.uploader.interval_seconds`, by the thresholds
    of the configuration. SIGINT and SIGTERM end it after the cycle that is under way.

    \b
    Examples:
      forebay pipeline
      forebay pipeline --config forebay.yml --master spark://10.0.0.1:7077
    """
    from forebay.pipeline.continuous import Pipeline
    from forebay.pipeline.fleet import SparkFleet
    from forebay.pipeline.site import site_settings

    open_view(settings).close()
    with job_session(settings, master) as session:
        driver = Pipeline(site_settings(settings), SparkFleet(session))

        def stop(_signal: int, _frame: object) -> None:
            driver.stop()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        if not as_json:
            click.echo(f"pipeline on {session.sparkContext.master}; stop it with Ctrl-C", err=True)

        def told(report: OffloadReport) -> None:
            if as_json:
                click.echo(json.dumps(_facts(report)))
            elif report.rows:
                for line in _lines(report):
                    click.echo(line)
            sys.stdout.flush()

        driver.run(told)


def _facts(report: OffloadReport) -> dict[str, Any]:
    totals = {"objects": report.objects, "messages": report.messages, "bytes": report.bytes}
    return {**asdict(report), **totals, "ok": report.ok}


def _lines(report: OffloadReport) -> list[str]:
    did = "would upload" if report.dry_run else "uploaded"
    lines = []
    for row in report.rows:
        if row.error is not None:
            lines.append(f"{row.topic}: failed: {row.error}")
        else:
            lines.append(
                f"{row.topic}: {did} {row.object_id}, offsets {row.start_offset} to "
                f"{row.end_offset}, {row.bytes} bytes"
            )
    lines.append(
        f"{report.topics} topics: {did} {report.objects} objects with {report.messages} messages, "
        f"{report.bytes} bytes"
    )
    return lines
