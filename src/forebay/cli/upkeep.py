"""`forebay sweep`, `verify`, `restore` and `repair`: log, objects and catalog kept consistent.

    sweep    removes objects that no descriptor names
    verify   reads every object and compares it with its descriptor
    restore  rebuilds the catalog from the objects
    repair   rewrites damaged files from sound copies

Each ends with exit code 1 if it found something wrong that it did not put right.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from forebay.cli.job_options import (
    check_runner,
    job_options,
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
    from forebay.format.names import TopicName
    from forebay.pipeline.execute import Runner
    from forebay.pipeline.jobs.restore import RestoredTopic
    from forebay.pipeline.jobs.verify import VerifyReport, VerifyRow
    from forebay.repair.plan import Finding
    from forebay.repair.repair import RepairReport
    from forebay.topic.resources import StoreResources
    from forebay.upload.restore import RestoreReport
    from forebay.upload.sweep import SweepItem, SweepReport


_FINDINGS_MAX: Final = 100
"""Findings of `verify` to print as text; --json and --report have more."""


@click.command()
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option("--dry-run", is_flag=True, help="Change nothing; print what would be removed.")
@click.option(
    "--grace",
    metavar="DURATION",
    help="Keep what is younger than this, such as 24h or 90m; a plain number means minutes.  "
    "[default: storage.sweeper.grace_minutes]",
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

    Sweeps the named topics, or all topics that the catalog or the object store knows. Also reports
    objects that a descriptor names but that are missing. Exit code 1 if an object is missing or
    something could not be removed.

    \b
    Examples:
      forebay sweep --dry-run
      forebay sweep orders --grace 2h --json
    """
    from forebay.clock import SYSTEM_CLOCK
    from forebay.format.names import parse_topic
    from forebay.topic.resources import StoreResources, catalog_file
    from forebay.upload.sweep import sweep as run

    minutes = settings.sweeper.grace_minutes if grace is None else _minutes(grace)
    names = [parse_topic(name) for name in topics]
    if settings.data is None:
        raise UsageError("a store in memory has no objects")
    path = catalog_file(settings)
    if path is not None and not path.exists():
        raise UsageError(f"there is no catalog at {path}: `forebay restore` creates one")
    with closing(StoreResources(settings, SYSTEM_CLOCK)) as resources:
        for topic in names:
            _require_known(resources, topic)
        report = run(
            resources.catalog,
            resources.store,
            names or None,
            grace_minutes=minutes,
            dry_run=dry_run,
            progress=None if as_json else lambda item: click.echo(_item_line(item)),
        )
    items = [{**asdict(item), "topic": str(item.topic)} for item in report.items]
    facts = {**asdict(report), "items": items, "items_left_out": report.items_left_out}
    print_report(facts, [_sweep_line(report)], as_json=as_json, ok=not report.errors)


def _require_known(resources: StoreResources, topic: TopicName) -> None:
    from forebay.format.names import objects_prefix

    listed = resources.store.list(objects_prefix(topic))
    if resources.catalog.find(topic) is None and next(listed, None) is None:
        raise UsageError(
            f"neither {resources.catalog.name} nor {resources.store.name} knows {topic}"
        )


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
        f"{report.topics} topics, {report.committed} committed objects "
        f"({report.committed_bytes} bytes); {counts or 'nothing to remove'}{errors}"
    )


@click.command()
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option(
    "--incremental",
    is_flag=True,
    help="Read only what was committed or compacted since the last run.",
)
@click.option(
    "--budget",
    metavar="SIZE",
    help="Read at most this much, such as 50GiB: new objects first, then on from where the last "
    "run stopped.",
)
@click.option(
    "--no-orphans",
    is_flag=True,
    help="Do not list the object store to find objects that no descriptor names.",
)
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the report to this file, as JSON.",
)
@job_url_option
@store_options
@json_option
@runner_option
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
    runner: Runner,
    master: str | None,
    dry_run: bool,
) -> None:
    """Reads every byte of every object, and checks it.

    Verifies the named topics, or all topics that the catalog knows. Checks checksums, consecutive
    offsets, index entries, sizes, sidecars and the chain of the objects, and looks for objects that
    no descriptor names. Exit code 1 if anything is wrong.

    \b
    Examples:
      forebay verify --dry-run
      forebay verify orders --report verified.json
      forebay verify --budget 50GiB
      forebay verify --runner threads
    """
    if url is not None:
        refused = {
            "--master": master,
            "--dry-run": dry_run,
            "--report": report,
            "--runner": runner == "threads",
        }
        options: dict[str, int | bool | str] = {
            "incremental": incremental,
            "orphans": not no_orphans,
        }
        if budget is not None:
            options["budget_bytes"] = size_of("--budget", budget, "50GiB")
        run_on_server(settings, url, "verify", topics, options, refused=refused, as_json=as_json)
        return
    from forebay.pipeline.jobs.verify import verify as run

    check_runner(runner, master)
    with lazy_session(settings, master) as chosen, progress_bar("verify") as progress:
        done = run(
            chosen,
            topics or None,
            incremental=incremental,
            budget_bytes=None if budget is None else size_of("--budget", budget, "50GiB"),
            orphans=not no_orphans,
            runner=runner,
            dry_run=dry_run,
            progress=progress,
        )
    facts = done.facts()
    if report is not None:
        from forebay.files.disk import replace_file
        from forebay.files.local import LocalDisk

        replace_file(LocalDisk(), report.absolute(), json.dumps(facts).encode() + b"\n")
    print_report(facts, _verify_lines(done), as_json=as_json, ok=done.ok)


def _verify_lines(done: VerifyReport) -> Iterator[str]:
    findings = done.findings
    for row in findings[:_FINDINGS_MAX]:
        yield _verify_line(row)
    more = len(findings) - _FINDINGS_MAX + done.rows_left_out
    if more > 0:
        yield f"and {more} more findings"
    read = "would be read" if done.dry_run else "read and found correct"
    yield (
        f"{done.topics} topics: {done.objects} objects {read} ({done.bytes} bytes, "
        f"{done.messages} messages); {done.errors} errors, {done.warnings} warnings, "
        f"{done.notes} notes"
    )


def _verify_line(row: VerifyRow) -> str:
    what = row.topic if row.object_id is None else f"{row.topic}, {row.object_id}"
    place = "" if row.position is None else f" at position {row.position}"
    many = f" ({row.objects} objects, {row.bytes} bytes)" if row.objects > 1 else ""
    return f"{row.severity}: {row.kind}: {what}{place}: {row.detail}{many}"


@click.command()
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option("--all", "everything", is_flag=True, help="Restore every topic that has objects.")
@click.option("--dry-run", is_flag=True, help="Change nothing; print what would be done.")
@click.option("--verify", is_flag=True, help="Read every object in full, and check it.")
@click.option(
    "--assume-nothing-lost",
    is_flag=True,
    help="Assume that no message was appended after the last upload: the next offset follows the "
    "last object.",
)
@click.option(
    "--next-offset",
    type=click.IntRange(min=0),
    metavar="N",
    help="The next offset of the one topic, if you know that none from N on was ever used.",
)
@click.option(
    "--allow-gaps",
    is_flag=True,
    help="Record offsets that neither an object nor the local log holds as lost.",
)
@click.option(
    "--accept-loss",
    is_flag=True,
    help="Accept all that is lost: readers jump over it, and do not fail.",
)
@store_options
@json_option
@runner_option
@master_option
def restore(
    topics: tuple[str, ...],
    everything: bool,
    settings: StoreSettings,
    as_json: bool,
    runner: Runner,
    master: str | None,
    next_offset: int | None,
    **choices: bool,
) -> None:
    """Rebuilds the catalog from the objects, or brings an older copy of it up to date.

    Restores the named topics, or with --all every topic that has objects. Offsets that the previous
    owner may have assigned after its last upload are not used again, unless --assume-nothing-lost
    or --next-offset is given: if the topic's newest log is gone, the next one begins far after
    them. Objects without a usable sidecar are read in full, on Spark if there are many. A restore
    that was interrupted continues when it is run again. Exit code 1 if a topic could not be
    restored or an object is damaged.

    \b
    Examples:
      forebay restore --all --dry-run
      forebay restore orders --verify
      forebay restore --all --runner threads
    """
    from forebay.pipeline.jobs.restore import open_restore
    from forebay.upload.restore import RestoreChoices

    check_runner(runner, master)
    if bool(topics) == everything:
        raise UsageError("name the topics to restore, or give --all; not both")
    bad = False
    with (
        lazy_session(settings, master) as chosen,
        open_restore(
            chosen,
            topics,
            RestoreChoices(next_offset=next_offset, **choices),
            everything=everything,
            runner=runner,
        ) as run,
    ):
        for done in run.topics(lambda topic: progress_bar(str(topic))):
            _print_restored(done, as_json=as_json)
            bad = bad or not done.ok
    if bad:
        sys.exit(1)


def _print_restored(done: RestoredTopic, *, as_json: bool) -> None:
    if done.report is None:
        if as_json:
            click.echo(json.dumps({"topic": str(done.topic), "error": str(done.error)}))
        click.echo(f"forebay: {done.error}", err=True)
    elif as_json:
        report = done.report
        more = {"topic": str(done.topic), "lost": report.lost, "unknown": report.unknown}
        click.echo(json.dumps({**asdict(report), **more, "error": None}))
    else:
        click.echo("\n".join(_restore_lines(done.report)))


def _restore_lines(report: RestoreReport) -> Iterator[str]:
    if report.deleted:
        yield f"{report.topic}: was deleted, and stays so; the next offset is {report.next_offset}"
        return
    did = "would adopt" if report.dry_run else "adopted"
    start, end = report.start_offset, report.tail
    held = f"offsets {start} to {end - 1}" if start < end else "no offsets"
    yield (
        f"{report.topic}: {did} {report.adopted} objects with {report.messages} messages, "
        f"{report.known} were known; {held}, the next one is {report.next_offset}"
    )
    if report.older is not None:
        yield f"  the catalog was an older copy: {report.older}"
    if report.removed:
        yield f"  {report.removed} descriptors removed, whose objects are gone or replaced"
    if report.read_whole:
        yield f"  {report.read_whole} objects read in full, {report.bytes_read} bytes"
    for start, end in report.gaps:
        yield f"  lost: no object holds offsets {start} to {end - 1}"
    if report.lost is not None:
        start, end = report.lost
        yield f"  offsets {start} to {end - 1} are lost if the topic's log does not come back"
    if report.unknown is not None:
        start, end = report.unknown
        yield (
            f"  offsets {start} to {end - 1} may never have been used: if the topic's log does not "
            "come back, it continues after them"
        )
    if report.assumed_in_vain:
        yield (
            "  --assume-nothing-lost had no effect: an earlier restore or an owner reserved these "
            "offsets before; --next-offset says which one is next"
        )
    if report.accepted:
        yield "  what is lost is accepted: readers jump over it"
    for object_id in report.damaged:
        yield f"  damaged: {object_id}"
    for object_id in report.superseded:
        yield f"  not used: {object_id}"


@click.command()
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option("--apply", is_flag=True, help="Repair. Without this option nothing is changed.")
@click.option(
    "--accept-loss",
    is_flag=True,
    help="With --apply: record damaged messages that have no sound copy as lost.",
)
@store_options
@json_option
def repair(
    topics: tuple[str, ...],
    apply: bool,
    accept_loss: bool,
    settings: StoreSettings,
    as_json: bool,
) -> None:
    """Prints all damage, and with --apply repairs it where possible.

    Checks the named topics, or all topics. No other process may have them open.

    Damaged segments are rewritten from objects, and damaged objects from segments. Checkpoints,
    positions, indexes and sidecars are rewritten from the data that they describe. The id of a log
    is rewritten from its copy, never from the catalog. Copies of all changed files are kept in the
    directory `repair` of the store.

    Other commands do the rest: `forebay sweep` removes objects that no descriptor names, `forebay
    restore` rebuilds a lost catalog, and `forebay verify` reads the objects of which no local
    segment has a copy. Exit code 1 if anything is damaged and was not repaired.

    \b
    Examples:
      forebay repair
      forebay repair orders --apply
      forebay repair orders --apply --accept-loss --json
    """
    from forebay.repair.repair import repair as run

    if accept_loss and not apply:
        raise UsageError("--accept-loss needs --apply")
    open_view(settings).close()
    report = run(settings, topics, apply=apply, accept_loss=accept_loss)
    facts = {**asdict(report), "left": len(report.left)}
    print_report(facts, _repair_lines(report), as_json=as_json, ok=not report.left)


def _repair_lines(report: RepairReport) -> Iterator[str]:
    for each in report.findings:
        yield f"{each.topic}: {each.kind}: {each.where}"
        yield f"  {each.what}"
        yield f"  {_remedy(each)}"
    if not report.findings:
        yield f"{report.topics} topics: nothing is wrong"
        return
    left = len(report.left)
    if not report.applied:
        can = sum(each.fixable for each in report.findings)
        yield f"{left} findings, of which --apply would repair {can}; nothing was changed"
        return
    yield f"{len(report.findings) - left} repaired, {left} left"
    if report.copies is not None:
        yield f"copies of what was changed: {report.copies}"


def _remedy(each: Finding) -> str:
    if each.repaired:
        return f"repaired: {each.remedy}"
    return each.remedy if each.fixable else f"left: {each.remedy}"
