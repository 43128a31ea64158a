"""`forebay compact`: small objects into large ones, on Spark; and back."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import click

from forebay.cli.options import json_option, store_options
from forebay.cli.remote_jobs import job_url_option, run_on_server
from forebay.cli.spark_options import job_options, lazy_session, progress_bar
from forebay.errors import UsageError
from forebay.settings import StoreSettings

if TYPE_CHECKING:
    from forebay.pipeline.jobs.compact_report import CompactReport, CompactRow

_LINES_MAX: Final = 100
"""Rows that people are shown; --json has all."""


@click.command()
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option(
    "--target",
    metavar="SIZE",
    help="How large an object may become, such as 256MiB; those of half of it are left alone.  "
    "[default: storage.uploader.max_object_bytes]",
)
@click.option(
    "--budget", metavar="SIZE", help="Rewrite at most so much in this run, such as 10GiB."
)
@click.option(
    "--undo",
    is_flag=True,
    help="Put the small objects back into their place, while no sweep has deleted one of them.",
)
@click.option(
    "--object", "object_id", metavar="ID", help="With --undo: only the one that made this object."
)
@job_url_option
@job_options
@store_options
@json_option
def compact(
    topics: tuple[str, ...],
    target: str | None,
    budget: str | None,
    undo: bool,
    object_id: str | None,
    url: str | None,
    master: str | None,
    dry_run: bool,
    settings: StoreSettings,
    as_json: bool,
) -> None:
    """Makes large objects of many small ones.

    Of all topics, or of those that are named. The topics may be in use meanwhile: readers, owners
    and retention go on. Each new object is read back and compared before it counts. What it
    replaced stays for storage.uploader.sweep_grace_minutes, and is then removed by `forebay
    sweep`. Exit code 1 if something could not be compacted; nothing of it was changed.

    \b
    Examples:
      forebay compact --dry-run
      forebay compact orders --target 256MiB --budget 10GiB
      forebay compact orders --undo
    """
    if url is not None:
        refused = {
            "--master": master,
            "--dry-run": dry_run,
            "--undo": undo,
            "--object": object_id,
        }
        options = {
            name: _bytes(option, text)
            for name, option, text in (
                ("target_bytes", "--target", target),
                ("budget_bytes", "--budget", budget),
            )
            if text is not None
        }
        run_on_server(settings, url, "compact", topics, options, refused=refused, as_json=as_json)
        return
    if undo:
        if target is not None or budget is not None:
            raise UsageError("--target and --budget are of no use with --undo")
        report = _undone(topics, object_id, settings, dry_run=dry_run)
    elif object_id is not None:
        raise UsageError("--object goes with --undo")
    else:
        report = _compacted(topics, target, budget, settings, master, dry_run=dry_run)
    click.echo(json.dumps(report.facts()) if as_json else "\n".join(_lines(report, undo)))
    if not report.ok:
        sys.exit(1)


def _undone(
    topics: Sequence[str], object_id: str | None, settings: StoreSettings, *, dry_run: bool
) -> CompactReport:
    from forebay.pipeline.jobs.compact_undo import undo_compaction

    if len(topics) != 1:
        raise UsageError("name the one topic whose compaction is to be undone")
    return undo_compaction(settings, topics[0], object_id, dry_run=dry_run)


def _compacted(
    topics: Sequence[str],
    target: str | None,
    budget: str | None,
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
            target_bytes=None if target is None else _bytes("--target", target),
            max_bytes=None if budget is None else _bytes("--budget", budget),
            dry_run=dry_run,
            progress=progress,
        )


def _bytes(option: str, text: str) -> int:
    from forebay.config.quantities import BYTES, parse_quantity

    size = parse_quantity(text, BYTES)
    if size is None or size < 1:
        raise UsageError(f"{option} is {text[:40]!r}; it must be a size such as 256MiB")
    return int(size)


def _lines(report: CompactReport, undo: bool) -> Iterator[str]:
    for row in report.rows[:_LINES_MAX]:
        yield _line(row, undo)
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
    if report.left_groups:
        yield (
            f"over the budget: {report.left_groups} more objects to make, of "
            f"{report.left_bytes} bytes"
        )


def _line(row: CompactRow, undo: bool) -> str:
    if row.error is not None:
        return f"error: {row.error}"
    offsets = f"offsets {row.start_offset} to {row.end_offset}, {row.bytes} bytes"
    if undo:
        return f"{row.topic}: {row.object_id} back into {row.replaced} objects ({offsets})"
    return f"{row.topic}: {row.replaced} objects into {row.object_id} ({offsets})"
