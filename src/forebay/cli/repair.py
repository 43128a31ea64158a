"""`forebay repair`: what is damaged, and what can be done about it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from forebay.cli.options import json_option, open_view, store_options
from forebay.errors import UsageError
from forebay.settings import StoreSettings

if TYPE_CHECKING:
    from forebay.topic.repairs import RepairReport
    from forebay.topic.repairs_plan import Finding


@click.command()
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option("--apply", is_flag=True, help="Do it. Without this nothing is changed.")
@click.option(
    "--accept-loss",
    is_flag=True,
    help="With --apply: messages that are damaged and nowhere else become a lost range.",
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
    """Says what is damaged, and with --apply puts right what can be.

    Damaged segments are written again from objects, damaged objects from segments; checkpoints,
    positions, indexes and sidecars from what they are made of; the id of a log from its copy, and
    never from the catalog. Of all topics, or of those that are named; nobody else may have them
    open. Copies of all that is changed are kept in the directory `repair` of the store. What no
    descriptor names is left to `forebay sweep`, a lost catalog to `forebay restore`; objects that
    no local segment could mend are not read: that is `forebay verify`. Exit code 1 if something is
    wrong, or left.

    \b
    Examples:
      forebay repair
      forebay repair orders --apply
      forebay repair orders --apply --accept-loss --json
    """
    from forebay.topic.repairs import repair as run

    if accept_loss and not apply:
        raise UsageError("--accept-loss goes with --apply")
    open_view(settings).close()
    report = run(settings, topics, apply=apply, accept_loss=accept_loss)
    click.echo(json.dumps(_facts(report)) if as_json else "\n".join(_lines(report)))
    if report.left:
        sys.exit(1)


def _facts(report: RepairReport) -> dict[str, object]:
    return {**asdict(report), "left": len(report.left)}


def _lines(report: RepairReport) -> Iterator[str]:
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
