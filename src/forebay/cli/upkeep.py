"""`forebay sweep` and `forebay restore`: what keeps the object store and the catalog in step."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forebay.cli.options import json_option, store_options
from forebay.cli.spark_options import progress_bar
from forebay.errors import (
    CommitRefused,
    CorruptLog,
    FormatError,
    ServiceError,
    TopicFenced,
    TopicOwned,
    UsageError,
)
from forebay.settings import StoreSettings

if TYPE_CHECKING:
    from forebay.catalog.catalog import Catalog
    from forebay.format.names import TopicName
    from forebay.topic.tiers import Tiers
    from forebay.upload.restore import RestoreReport
    from forebay.upload.sweep import SweepItem, SweepReport


@contextmanager
def _open_tiers(settings: StoreSettings, *, dry_run: bool) -> Iterator[Tiers]:
    """The catalog and the objects. For a dry run a catalog that is not there is an empty one."""
    from forebay.clock import SYSTEM_CLOCK
    from forebay.topic.tiers import Tiers

    catalog = _no_catalog() if dry_run and _missing_catalog(settings) is not None else None
    tiers = Tiers(settings, SYSTEM_CLOCK, catalog=catalog)
    try:
        yield tiers
    finally:
        tiers.close()
        if catalog is not None:
            catalog.close()


def _no_catalog() -> Catalog:
    from forebay.catalog.catalog import Catalog
    from forebay.catalog.sqlite import SqliteKv

    return Catalog(SqliteKv(None))


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
    from forebay.format.names import parse_topic
    from forebay.upload.sweep import sweep as run

    minutes = settings.uploader.sweep_grace_minutes if grace is None else _minutes(grace)
    names = [parse_topic(name) for name in topics]
    missing = _missing_catalog(settings)
    if missing is not None:
        raise UsageError(f"there is no catalog at {missing}: `forebay restore` makes one")
    with _open_tiers(settings, dry_run=dry_run) as tiers:
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


# ---- restore ----------------------------------------------------------------------------------


@click.command()
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option("--all", "everything", is_flag=True, help="Every topic that has objects.")
@click.option("--dry-run", is_flag=True, help="Change nothing; say what would be done.")
@click.option("--verify", is_flag=True, help="Read every object in full.")
@click.option(
    "--assume-nothing-lost",
    is_flag=True,
    help="No message was appended after the last upload: go on right behind the last object.",
)
@click.option("--allow-gaps", is_flag=True, help="Record as lost what no object holds.")
@store_options
@json_option
def restore(
    topics: tuple[str, ...],
    everything: bool,
    settings: StoreSettings,
    as_json: bool,
    **choices: bool,
) -> None:
    """Rebuilds the catalog from the objects alone.

    Offsets that the lost owner may have handed out after its last upload are not used again: they
    are recorded as lost, unless --assume-nothing-lost says otherwise. A restore that was
    interrupted goes on where it stopped. Exit code 1 if a topic could not be restored, or an
    object is damaged.

    \b
    Examples:
      forebay restore --all --dry-run
      forebay restore orders --verify
    """
    from forebay.format.names import parse_topic
    from forebay.upload.listing import topics_in_store

    if bool(topics) == everything:
        raise UsageError("name the topics to restore, or give --all, and not both")
    _require_objects(settings)
    names = [parse_topic(name) for name in topics]
    bad = False
    with _open_tiers(settings, dry_run=choices["dry_run"]) as tiers:
        for topic in topics_in_store(tiers.store) if everything else names:
            bad = _restore_one(tiers, topic, choices, as_json=as_json) or bad
    if bad:
        sys.exit(1)


def _require_objects(settings: StoreSettings) -> None:
    """So that a wrong directory is told, and none is made."""
    if settings.cloud.backend == "fs" and settings.data is not None:
        root = Path(settings.cloud.root or Path(settings.data) / "objects")
        if not root.is_dir():
            raise UsageError(f"there are no objects: {root} is not a directory")


def _restore_one(
    tiers: Tiers, topic: TopicName, choices: dict[str, bool], *, as_json: bool
) -> bool:
    """Whether something is wrong with the topic."""
    from forebay.upload.restore import restore_topic

    try:
        with progress_bar(str(topic)) as progress:
            report = restore_topic(
                tiers.catalog, tiers.store, tiers.session, topic, progress=progress, **choices
            )
    except (CorruptLog, CommitRefused, FormatError, ServiceError, TopicFenced, TopicOwned) as error:
        if as_json:
            click.echo(json.dumps({"topic": str(topic), "error": str(error)}))
        click.echo(f"forebay: {error}", err=True)
        return True
    if as_json:
        facts = {**asdict(report), "topic": str(topic), "lost": report.lost, "error": None}
        click.echo(json.dumps(facts))
    else:
        click.echo("\n".join(_restore_lines(report)))
    return bool(report.damaged)


def _restore_lines(report: RestoreReport) -> Iterator[str]:
    did = "would adopt" if report.dry_run else "adopted"
    yield (
        f"{report.topic}: {did} {report.adopted} objects with {report.messages} messages, "
        f"{report.known} were known; offsets {report.start_offset} to {report.tail - 1}, "
        f"the next one is {report.next_offset}"
    )
    if report.read_whole:
        yield f"  {report.read_whole} objects read in full, {report.bytes_read} bytes"
    for start, end in report.gaps:
        yield f"  lost: offsets {start} to {end - 1}, which no object holds"
    if report.lost is not None:
        start, end = report.lost
        yield (
            f"  offsets {start} to {end - 1} may have been handed out: unless their log comes "
            "back, they will be recorded as lost"
        )
    for object_id in report.damaged:
        yield f"  damaged: {object_id}"
    for object_id in report.superseded:
        yield f"  not used: {object_id}"
