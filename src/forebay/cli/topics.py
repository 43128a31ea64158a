"""`forebay topics`, `describe` and `explain`: what there is, and where it is."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from forebay.cli.options import json_option, open_view, store_options
from forebay.errors import UsageError
from forebay.limits import OFFSET_MAX
from forebay.settings import StoreSettings

if TYPE_CHECKING:
    from forebay.topic.describe import OffsetFacts, TopicFacts


@click.command()
@store_options
@json_option
def topics(settings: StoreSettings, as_json: bool) -> None:
    """Lists the topics of a store.

    Those of the catalog and those in local directories; none is opened.

    \b
    Examples:
      forebay topics
      forebay topics --config forebay.yml --json
    """
    with open_view(settings) as store:
        for topic in store.topics():
            click.echo(json.dumps({"topic": topic}) if as_json else topic)


@click.command()
@click.argument("topic")
@click.option(
    "--limit",
    default=20,
    show_default=True,
    type=click.IntRange(0),
    help="The newest segments and objects to show; --json shows all.",
)
@store_options
@json_option
def describe(topic: str, limit: int, settings: StoreSettings, as_json: bool) -> None:
    """Says where everything of TOPIC is.

    Watermarks (the next offset of each stage), local files, objects, what is lost. Exit code 1 if
    what is stored contradicts itself.

    \b
    Examples:
      forebay describe orders
      forebay describe /default/orders --json
    """
    from forebay.topic.describe import describe as facts_of

    with open_view(settings) as store:
        facts = facts_of(store.topic(topic))
    if as_json:
        click.echo(json.dumps(asdict(facts)))
    else:
        click.echo("\n".join(_topic_lines(facts, limit)))
    if facts.problems:
        sys.exit(1)


def _topic_lines(facts: TopicFacts, limit: int) -> Iterator[str]:
    yield facts.topic
    yield f"  start      {facts.start_offset}"
    yield f"  synced     {'unknown: its log is not here' if facts.synced is None else facts.synced}"
    yield f"  uploaded   {facts.uploaded}"
    yield f"  verified   {facts.verified}"
    if facts.epoch is not None:
        yield f"  reserved   {facts.reserved}"
        yield f"  owner      {facts.owner or 'none'}, epoch {facts.epoch}"
    for start, end in facts.lost:
        yield f"  lost       {start} to {end - 1}"
    yield from _headed("segments", [each.bytes for each in facts.segments], limit)
    for segment in facts.segments[-limit:] if limit else ():
        state = "verified" if segment.verified else "uploaded" if segment.uploaded else "local"
        why = "deletable" if segment.deletable else f"kept: {segment.kept_because}"
        yield (
            f"  {segment.start_offset} to {segment.next_offset - 1}, "
            f"{segment.bytes} bytes, {state}, {why}: {segment.file}"
        )
    yield from _headed("objects", [each.bytes for each in facts.objects], limit)
    for each in facts.objects[-limit:] if limit else ():
        state = "verified" if each.verified else "not verified"
        made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(each.created_at))
        yield (
            f"  {each.start_offset} to {each.next_offset - 1}, {each.bytes} bytes, "
            f"{state}, {made}: {each.object_id}"
        )
    for problem in facts.problems:
        yield f"problem: {problem}"


def _headed(what: str, sizes: Sequence[int], limit: int) -> Iterator[str]:
    hidden = len(sizes) - min(len(sizes), limit)
    more = f", the newest {limit}" if hidden else ""
    yield f"{len(sizes)} {what}, {sum(sizes)} bytes{more}"


@click.command()
@click.argument("topic")
@click.argument("offset")
@store_options
@json_option
def explain(topic: str, offset: str, settings: StoreSettings, as_json: bool) -> None:
    """Says where the message at OFFSET of TOPIC is.

    Which file or object holds it, at which position, and what may become of it. What is in the
    owner's memory alone is unknown to other processes: it is not synced yet. Exit code 1 if the
    message should be somewhere and is not.

    \b
    Examples:
      forebay explain orders 4711
      forebay explain orders 0 --json
    """
    from forebay.topic.describe import explain as facts_of

    if not offset.isdecimal() or int(offset[:20]) > OFFSET_MAX:
        raise UsageError(f"OFFSET is {offset[:40]!r}; it must be a whole number")
    with open_view(settings) as store:
        facts = facts_of(store.topic(topic), int(offset))
    if as_json:
        click.echo(json.dumps(asdict(facts)))
    else:
        click.echo("\n".join(_offset_lines(facts)))
    if facts.problems:
        sys.exit(1)


def _offset_lines(facts: OffsetFacts) -> Iterator[str]:
    yield f"{facts.topic}, offset {facts.offset}: {facts.state}"
    if facts.go_on_at is not None:
        yield f"  the next offset that can be read is {facts.go_on_at}"
    for place in facts.places:
        yield (
            f"  {place.tier} {place.name}, position {place.position}, "
            f"{place.frame_bytes} bytes with the header"
        )
    if facts.synced:
        for stage, done in (("uploaded", facts.uploaded), ("verified", facts.verified)):
            yield f"  {stage}: {'yes' if done else 'no'}"
    if facts.deletable is not None:
        why = "yes" if facts.deletable else f"no: {facts.kept_because}"
        yield f"  its segment may be deleted: {why}"
    for problem in facts.problems:
        yield f"  problem: {problem}"
