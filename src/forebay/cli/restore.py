"""`forebay restore`: the catalog from the objects alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from forebay.cli.options import json_option, store_options
from forebay.cli.spark_options import lazy_session, master_option, progress_bar
from forebay.errors import UsageError
from forebay.settings import StoreSettings

if TYPE_CHECKING:
    from forebay.pipeline.jobs.restore import RestoredTopic
    from forebay.upload.restore import RestoreReport


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
@master_option
def restore(
    topics: tuple[str, ...],
    everything: bool,
    settings: StoreSettings,
    as_json: bool,
    master: str | None,
    **choices: bool,
) -> None:
    """Rebuilds the catalog from the objects alone.

    Offsets that the lost owner may have handed out after its last upload are not used again: they
    are recorded as lost, unless --assume-nothing-lost says otherwise. Objects without a usable
    sidecar are read in full, by Spark if it is much. A restore that was interrupted goes on where
    it stopped. Exit code 1 if a topic could not be restored, or an object is damaged.

    \b
    Examples:
      forebay restore --all --dry-run
      forebay restore orders --verify
    """
    from forebay.pipeline.jobs.restore import RestoreChoices, restoring

    if bool(topics) == everything:
        raise UsageError("name the topics to restore, or give --all, and not both")
    bad = False
    with (
        lazy_session(settings, master) as chosen,
        restoring(chosen, topics, RestoreChoices(**choices), everything=everything) as run,
    ):
        for done in run.topics(lambda topic: progress_bar(str(topic))):
            _tell(done, as_json=as_json)
            bad = bad or not done.ok
    if bad:
        sys.exit(1)


def _tell(done: RestoredTopic, *, as_json: bool) -> None:
    if done.report is None:
        if as_json:
            click.echo(json.dumps({"topic": str(done.topic), "error": str(done.error)}))
        click.echo(f"forebay: {done.error}", err=True)
    elif as_json:
        more = {"topic": str(done.topic), "lost": done.report.lost, "error": None}
        click.echo(json.dumps({**asdict(done.report), **more}))
    else:
        click.echo("\n".join(_restore_lines(done.report)))


def _restore_lines(report: RestoreReport) -> Iterator[str]:
    did = "would adopt" if report.dry_run else "adopted"
    start, end = report.start_offset, report.tail
    held = f"offsets {start} to {end - 1}" if start < end else "no offsets"
    yield (
        f"{report.topic}: {did} {report.adopted} objects with {report.messages} messages, "
        f"{report.known} were known; {held}, the next one is {report.next_offset}"
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
    if report.assumed_in_vain:
        yield (
            "  --assume-nothing-lost had no effect: these offsets were reserved before, by an "
            "earlier restore or by an owner, and nobody can tell that they were not handed out"
        )
    for object_id in report.damaged:
        yield f"  damaged: {object_id}"
    for object_id in report.superseded:
        yield f"  not used: {object_id}"
