"""`forebay sweep`: what keeps the object store and the catalog in step."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forebay.cli.options import json_option, store_options
from forebay.errors import UsageError
from forebay.settings import StoreSettings

if TYPE_CHECKING:
    from forebay.format.names import TopicName
    from forebay.topic.tiers import Tiers
    from forebay.upload.sweep import SweepItem, SweepReport


def _missing_catalog(settings: StoreSettings) -> Path | None:
    """Where the catalog's file would be, if it is not there."""
    from forebay.topic.view import catalog_file

    if settings.data is None:
        raise UsageError("a store in memory has no objects")
    path = catalog_file(settings)
    return path if path is not None and not path.exists() else None


@click.command()
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option("--dry-run", is_flag=True, help="Change nothing; say what would be removed.")
@click.option(
    "--grace",
    metavar="DURATION",
    help="How old something must be to be removed, such as 24h or 90m; a plain number is in "
    "minutes.  [default: storage.uploader.sweep_grace_minutes]",
)
@store_options
@json_option
def sweep(
    topics: tuple[str, ...],
    dry_run: bool,
    grace: str | None,
    settings: StoreSettings,
    as_json: bool,
) -> None:
    """Removes objects that no descriptor names.

    It also finds objects that are missing. Of all topics that the catalog or the object store
    knows, or of those that are named. Exit code 1 if something could not be removed, or an object
    is missing.

    \b
    Examples:
      forebay sweep --dry-run
      forebay sweep orders --grace 2h --json
    """
    from forebay.clock import SYSTEM_CLOCK
    from forebay.format.names import parse_topic
    from forebay.topic.tiers import Tiers
    from forebay.upload.sweep import sweep as run

    minutes = settings.uploader.sweep_grace_minutes if grace is None else _minutes(grace)
    names = [parse_topic(name) for name in topics]
    missing = _missing_catalog(settings)
    if missing is not None:
        raise UsageError(f"there is no catalog at {missing}: `forebay restore` makes one")
    with closing(Tiers(settings, SYSTEM_CLOCK)) as tiers:
        for topic in names:
            _require_known(tiers, topic)
        report = run(
            tiers.catalog,
            tiers.store,
            names or None,
            grace_minutes=minutes,
            dry_run=dry_run,
            progress=None if as_json else lambda item: click.echo(_item_line(item)),
        )
    if as_json:
        click.echo(json.dumps(_sweep_facts(report)))
    else:
        click.echo(_sweep_line(report))
    if report.errors:
        sys.exit(1)


def _require_known(tiers: Tiers, topic: TopicName) -> None:
    from forebay.format.names import objects_prefix

    listed = tiers.store.list(objects_prefix(topic))
    if tiers.catalog.record(topic) is None and next(listed, None) is None:
        raise UsageError(f"neither {tiers.catalog.name} nor {tiers.store.name} knows {topic}")


def _minutes(text: str) -> float:
    from forebay.config.quantities import MINUTES, parse_quantity

    seconds = parse_quantity(text, MINUTES)
    if seconds is None or seconds < 0:
        raise UsageError(f"--grace is {text[:40]!r}; it must be a duration such as 24h or 90m")
    return float(seconds / 60)


def _item_line(item: SweepItem) -> str:
    return f"{item.action}: {item.key}, {item.bytes} bytes, {item.kind}: {item.reason}"


def _sweep_line(report: SweepReport) -> str:
    counts = ", ".join(
        f"{count} {action} ({report.bytes[action]} bytes)"
        for action, count in report.counts.items()
        if count
    )
    errors = f"; {report.errors} errors" if report.errors else ""
    return (
        f"{report.topics} topics, {report.committed} objects that count "
        f"({report.committed_bytes} bytes); {counts or 'nothing to remove'}{errors}"
    )


def _sweep_facts(report: SweepReport) -> dict[str, Any]:
    items = [{**asdict(item), "topic": str(item.topic)} for item in report.items]
    return {**asdict(report), "items": items, "items_left_out": report.items_left_out}
