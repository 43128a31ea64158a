"""`forebay offload`, `pipeline` and `compact`: segments into objects, small objects into large.

All three run on Spark, while other processes own and read the topics. `offload` runs once,
`pipeline` until it is stopped. `offload --runner threads` and `compact --undo` need no Spark.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, Literal

import click

from forebay.cli.job_options import (
    check_runner,
    job_options,
    job_session,
    job_url_option,
    lazy_session,
    master_option,
    progress_bar,
    run_on_server,
    runner_option,
)
from forebay.cli.options import json_option, open_view, print_report, size_of, store_options
from forebay.errors import UsageError
from forebay.settings import StoreSettings

if TYPE_CHECKING:
    from forebay.pipeline.execute import Runner
    from forebay.pipeline.jobs.compact import CompactReport, CompactRow
    from forebay.pipeline.jobs.offload import OffloadReport


@click.command()
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option(
    "--due",
    is_flag=True,
    help="Upload only what the thresholds make due, and leave topics that roll to their owners.",
)
@job_url_option
@runner_option
@job_options
@store_options
@json_option
def offload(
    topics: tuple[str, ...],
    due: bool,
    url: str | None,
    runner: Runner,
    master: str | None,
    dry_run: bool,
    settings: StoreSettings,
    as_json: bool,
) -> None:
    """Uploads everything that is synced, whatever the thresholds.

    Uploads the named topics, or all topics. They may be in use at the same time. Exit code 1 if a
    topic could not be uploaded completely; the objects that were uploaded stay committed.

    \b
    Examples:
      forebay offload --dry-run
      forebay offload orders payments --master spark://10.0.0.1:7077
      forebay offload --runner threads
      forebay offload --url http://127.0.0.1:8650
    """
    if url is not None:
        refused = {"--master": master, "--dry-run": dry_run, "--runner": runner == "threads"}
        options = {"due": True} if due else {}
        run_on_server(settings, url, "offload", topics, options, refused=refused, as_json=as_json)
        return
    from forebay.pipeline.jobs.offload import offload as run

    check_runner(runner, master)
    open_view(settings).close()
    with lazy_session(settings, master) as chosen, progress_bar("offload") as progress:
        report = run(
            chosen,
            topics or None,
            runner=runner,
            force=not due,
            dry_run=dry_run,
            progress=progress,
        )
    print_report(_facts(report), _lines(report), as_json=as_json, ok=report.ok)


@click.command()
@master_option
@store_options
@json_option
def pipeline(master: str | None, settings: StoreSettings, as_json: bool) -> None:
    """Uploads objects that are due, in cycles, until it is stopped.

    Starts a cycle every `storage.uploader.interval_seconds`. The thresholds of each topic decide
    what is due. Topics that roll are left to their owners. SIGINT or SIGTERM stops it after the
    current cycle.

    \b
    Examples:
      forebay pipeline
      forebay pipeline --config forebay.yml --master spark://10.0.0.1:7077
    """
    from forebay.pipeline.execute import SparkExecutor
    from forebay.pipeline.jobs.continuous import Pipeline
    from forebay.pipeline.location import job_settings

    open_view(settings).close()
    with job_session(settings, master) as session:
        driver = Pipeline(job_settings(settings), SparkExecutor(session))

        def stop(_signal: int, _frame: object) -> None:
            driver.stop()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        if not as_json:
            click.echo(f"pipeline on {session.sparkContext.master}; stop it with Ctrl-C", err=True)

        def show(report: OffloadReport) -> None:
            if as_json or report.rows:
                print_report(_facts(report), _lines(report), as_json=as_json)
            sys.stdout.flush()

        driver.run(show)


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
    if report.left_to_owners:
        lines.append(f"{report.left_to_owners} topics that roll are left to their owners")
    return lines


_LINES_MAX: Final = 100
"""Rows to print as text; --json has all."""


@click.command()
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option(
    "--target",
    metavar="SIZE",
    help="The largest size of a new object, such as 256MiB. Objects of half of it or more are left "
    "alone.  [default: max_object_bytes of the topic]",
)
@click.option(
    "--budget", metavar="SIZE", help="Rewrite at most this much in this run, such as 10GiB."
)
@click.option(
    "--compression",
    type=click.Choice(["none", "zstd"]),
    help="Rewrite every object that is not compressed so, small or not.  [default: new objects as "
    "storage.uploader.compression, others stay as they are]",
)
@click.option(
    "--undo",
    is_flag=True,
    help="Put the small objects back; possible until a sweep has deleted one of them.",
)
@click.option(
    "--object",
    "object_id",
    metavar="ID",
    help="With --undo: undo only the compaction that made this object.",
)
@job_url_option
@job_options
@store_options
@json_option
def compact(
    topics: tuple[str, ...],
    target: str | None,
    budget: str | None,
    compression: Literal["none", "zstd"] | None,
    undo: bool,
    object_id: str | None,
    url: str | None,
    master: str | None,
    dry_run: bool,
    settings: StoreSettings,
    as_json: bool,
) -> None:
    """Merges small objects into large ones, and compresses objects.

    Compacts the named topics, or all topics. They may be in use at the same time. Each new object
    is read back and compared before it replaces the small ones. The small objects are kept for
    storage.sweeper.grace_minutes; after that, a sweep removes them. Exit code 1 if
    some objects could not be compacted; these are unchanged.

    \b
    Examples:
      forebay compact --dry-run
      forebay compact orders --target 256MiB --budget 10GiB
      forebay compact orders --compression zstd
      forebay compact orders --undo
    """
    if url is not None:
        refused = {
            "--master": master,
            "--dry-run": dry_run,
            "--undo": undo,
            "--object": object_id,
        }
        options: dict[str, Any] = {
            name: size_of(option, text)
            for name, option, text in (
                ("target_bytes", "--target", target),
                ("budget_bytes", "--budget", budget),
            )
            if text is not None
        }
        if compression is not None:
            options["compression"] = compression
        run_on_server(settings, url, "compact", topics, options, refused=refused, as_json=as_json)
        return
    if undo:
        if (target, budget, compression) != (None, None, None):
            raise UsageError("--target, --budget and --compression cannot be used with --undo")
        report = _undone(topics, object_id, settings, dry_run=dry_run)
    elif object_id is not None:
        raise UsageError("--object needs --undo")
    else:
        report = _compacted(topics, target, budget, compression, settings, master, dry_run=dry_run)
    lines = _compact_lines(report, undo)
    print_report(report.facts(), lines, as_json=as_json, ok=report.ok)


def _undone(
    topics: Sequence[str], object_id: str | None, settings: StoreSettings, *, dry_run: bool
) -> CompactReport:
    from forebay.pipeline.jobs.compact import undo_compaction

    if len(topics) != 1:
        raise UsageError("--undo needs exactly one topic")
    return undo_compaction(settings, topics[0], object_id, dry_run=dry_run)


def _compacted(
    topics: Sequence[str],
    target: str | None,
    budget: str | None,
    compression: Literal["none", "zstd"] | None,
    settings: StoreSettings,
    master: str | None,
    *,
    dry_run: bool,
) -> CompactReport:
    from forebay.pipeline.jobs.compact import compact as run

    with lazy_session(settings, master) as chosen, progress_bar("compact") as progress:
        return run(
            chosen,
            topics or None,
            target_bytes=None if target is None else size_of("--target", target),
            max_bytes=None if budget is None else size_of("--budget", budget),
            compression=compression,
            dry_run=dry_run,
            progress=progress,
        )


def _compact_lines(report: CompactReport, undo: bool) -> Iterator[str]:
    for row in report.rows[:_LINES_MAX]:
        yield _compact_line(row, undo)
    if len(report.rows) > _LINES_MAX:
        yield f"and {len(report.rows) - _LINES_MAX} more"
    would = "would be " if report.dry_run else ""
    if undo:
        yield f"{report.objects} compactions {would}undone, {report.errors} errors"
        return
    yield (
        f"{report.replaced} objects {would}compacted into {report.objects} ({report.bytes} bytes "
        f"rewritten), {report.errors} errors"
    )
    if report.stored_before != report.stored_after and not report.dry_run:
        yield f"stored: {report.stored_before} bytes before, {report.stored_after} after"
    if report.left_ledgers:
        yield f"left alone: {report.left_ledgers} ledgers of Pulsar, which are never merged"
    if report.left_groups:
        yield (
            f"over the budget: {report.left_groups} more objects to make "
            f"({report.left_bytes} bytes)"
        )


def _compact_line(row: CompactRow, undo: bool) -> str:
    if row.error is not None:
        return f"error: {row.error}"
    offsets = f"offsets {row.start_offset} to {row.end_offset}, {row.bytes} bytes"
    if undo:
        return f"{row.topic}: {row.object_id} back into {row.replaced} objects ({offsets})"
    return f"{row.topic}: {row.replaced} objects into {row.object_id} ({offsets})"
