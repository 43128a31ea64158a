"""`forebay topics`, `describe` and `explain`: which topics exist, and where their messages are.
`forebay accept-loss` accepts that some offsets have none.

They ask the server that --url names, or the one that runs on the data directory. Only a server
knows what is in its memory. Without a server they read the catalog and the files.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click

from forebay.cli.options import (
    chosen_server,
    chosen_settings,
    client_of,
    json_option,
    open_view,
    path_options,
    plain_errors,
    print_report,
    store_options,
    url_option,
    viewed_topic,
)
from forebay.cli.subscriptions import acknowledged, subscription_lines
from forebay.cli.topic_lifecycle import create, delete
from forebay.cli.topic_settings import configure, setting_lines
from forebay.errors import UsageError
from forebay.limits import OFFSET_MAX
from forebay.settings import ServerAddress, StoreSettings

Facts = dict[str, Any]
_HOLE_WORDS: Final = {
    "lost": "its message is lost; readers stop here: `forebay accept-loss {topic}` lets them jump "
    "over it",
    "unknown": "it may never have been used, and its message is lost if it was; readers stop here: "
    "`forebay accept-loss {topic}` lets them jump over it",
    "accepted": "it has no message, and that was accepted: readers jump over it",
}
_UPLOADED_BY: Final = {
    "owner": "by the topic's owner",
    "spark": "on Spark",
    None: "off: `forebay offload` uploads",
}
_PAGE: Final = 1000
_PIECES_MAX: Final = 1000
"""The most segments, and the most objects, to request from a server."""


@click.group(invoke_without_command=True)
@url_option
@path_options
@json_option
@click.pass_context
@plain_errors
def topics(
    context: click.Context, url: str | None, config: Path | None, data: Path | None, as_json: bool
) -> None:
    """Lists the topics of a store, or creates, deletes or configures one.

    These are the topics in the catalog and those that have a local directory. No topic is opened.

    \b
    Examples:
      forebay topics
      forebay topics --config forebay.yml --json
      forebay topics create orders --partitions 4
      forebay topics configure orders max_open_seconds=60s
      forebay topics delete orders
    """
    if context.invoked_subcommand is not None:
        if as_json or any(each is not None for each in (url, config, data)):
            raise click.UsageError(f"write the options after `{context.invoked_subcommand}`")
        return
    settings = chosen_settings(config, data, os.environ)
    server = chosen_server(settings, url)
    if server is not None:
        names = served_topics(server)
    else:
        with open_view(settings) as store:
            names = store.topics()
    for topic in names:
        click.echo(json.dumps({"topic": topic}) if as_json else topic)


topics.add_command(configure)
topics.add_command(create)
topics.add_command(delete)


def served_topics(server: ServerAddress) -> list[str]:
    names: list[str] = []
    with client_of(server) as client:
        query: dict[str, str | int] = {"limit": _PAGE}
        while True:
            page = client.json("GET", "/v1/topics", query=query)
            names += [each["topic"] for each in page["topics"]]
            if page.get("next") is None:
                return names
            query["after"] = page["next"]


@click.command()
@click.argument("topic")
@click.option(
    "--limit",
    type=click.IntRange(0, _PIECES_MAX),
    help="How many segments and objects to print, the newest ones: 20, or 100 with --json.",
)
@click.option(
    "--before",
    type=click.IntRange(0, OFFSET_MAX),
    metavar="OFFSET",
    help="Print objects that begin before this offset, to go back page by page.",
)
@url_option
@store_options
@json_option
def describe(
    topic: str,
    limit: int | None,
    before: int | None,
    url: str | None,
    settings: StoreSettings,
    as_json: bool,
) -> None:
    """Prints where the messages of TOPIC are.

    Prints the watermarks (the next offset of each stage), the offsets in memory, the local files
    and whether they may be deleted, the objects, and the ranges without messages: lost, unknown
    (they may never have been used) or accepted. Then the settings that a topic can have of its own,
    with their values and where these come from. The offsets in memory are known only if a server
    runs on the store. Exit code 1 if the stored data contradicts itself.

    \b
    Examples:
      forebay describe orders
      forebay describe orders --limit 100 --before 2500000
      forebay describe /default/orders --json
      forebay describe orders --url http://127.0.0.1:8650
    """
    server = chosen_server(settings, url)
    limit = (100 if as_json else 20) if limit is None else limit
    facts = _facts(server, settings, topic, None, limit, before)
    if not as_json and sys.stdout.isatty():
        _print_tables(facts)
        if facts["problems"]:
            sys.exit(1)
        return
    lines = _plain_lines(facts)
    print_report(facts, lines, as_json=as_json, ok=not facts["problems"])


@click.command()
@click.argument("topic")
@click.argument("offset")
@url_option
@store_options
@json_option
def explain(
    topic: str, offset: str, url: str | None, settings: StoreSettings, as_json: bool
) -> None:
    """Prints where the message at OFFSET of TOPIC is.

    Prints which file or object holds it, at which position, and whether its segment may be deleted.
    A message that is only in the owner's memory is found only if a server runs on the store. Exit
    code 1 if the message is missing.

    \b
    Examples:
      forebay explain orders 4711
      forebay explain orders 0 --json
    """
    if not offset.isdecimal() or int(offset[:20]) > OFFSET_MAX:
        raise UsageError(f"OFFSET is {offset[:40]!r}; it must be a whole number")
    facts = _facts(chosen_server(settings, url), settings, topic, int(offset))
    print_report(facts, _offset_lines(facts), as_json=as_json, ok=not facts["problems"])


@click.command("accept-loss")
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC...")
@click.option(
    "--from", "start", type=click.IntRange(0), metavar="OFFSET", help="Accept from this offset on."
)
@click.option(
    "--to", "end", type=click.IntRange(0), metavar="OFFSET", help="Stop before this offset."
)
@click.option("--dry-run", is_flag=True, help="Change nothing; print what would be accepted.")
@url_option
@store_options
@json_option
def accept_loss(
    topics: tuple[str, ...],
    start: int | None,
    end: int | None,
    dry_run: bool,
    url: str | None,
    settings: StoreSettings,
    as_json: bool,
) -> None:
    """Accepts that offsets of TOPIC have no messages.

    A reader that reaches offsets that are lost, or that may never have been used, stops with an
    error. After this command all readers jump over them, also those of a running server. Without
    --from and --to, all such offsets of the topic are accepted; if there are none, nothing happens.
    This cannot be undone: look at the ranges first, with --dry-run.

    \b
    Examples:
      forebay accept-loss orders --dry-run
      forebay accept-loss orders clicks
      forebay accept-loss orders --from 100 --to 1000100 --json
    """
    server = chosen_server(settings, url)

    def accept(topic: str, *, dry_run: bool) -> Facts:
        return _accepted(server, settings, topic, start, end, dry_run=dry_run)

    found = [accept(topic, dry_run=True) for topic in topics]  # a wrong name changes nothing
    for topic, planned in zip(topics, found, strict=True):
        facts = planned if dry_run else accept(topic, dry_run=False)
        click.echo(json.dumps(facts) if as_json else "\n".join(_accepted_lines(facts)))


def _accepted(
    server: ServerAddress | None,
    settings: StoreSettings,
    topic: str,
    start: int | None,
    end: int | None,
    *,
    dry_run: bool,
) -> Facts:
    if server is not None:
        from forebay.client.http import topic_path
        from forebay.format.names import parse_topic

        query: dict[str, str | int] = {"dry_run": "true" if dry_run else "false"}
        query |= {k: v for k, v in (("start", start), ("end", end)) if v is not None}
        with client_of(server) as client:
            path = topic_path(parse_topic(topic), "accept-loss")
            found: Facts = client.json("POST", path, query=query)
            return found
    from forebay.topic.accept import accept_loss as accept

    with open_view(settings) as store:
        view, resources = viewed_topic(store, topic), store.resources()
        if resources is None:
            raise UsageError(f"{store.name} has no catalog: `forebay restore` creates one")
        return asdict(accept(resources.catalog, view.topic, start, end, dry_run=dry_run))


def _accepted_lines(facts: Facts) -> Iterator[str]:
    did = "would accept" if facts["dry_run"] else "accepted"
    if not facts["lost"] and not facts["unknown"]:
        yield f"{facts['topic']}: nothing to accept"
    for kind, what in (
        ("lost", "which are lost"),
        ("unknown", "which may never have been used"),
    ):
        for first, end in facts[kind]:
            yield f"{facts['topic']}: {did} offsets {first} to {end - 1}, {what}"


def _facts(
    server: ServerAddress | None,
    settings: StoreSettings,
    topic: str,
    offset: int | None,
    limit: int = 0,
    before: int | None = None,
) -> Facts:
    """The facts about a topic, or about one offset in it, from the server or from the store."""
    if server is not None:
        from forebay.client.http import topic_path
        from forebay.format.names import parse_topic

        rest = () if offset is None else ("explain", str(offset))
        query: dict[str, str | int] = {} if offset is not None else {"limit": limit}
        if before is not None:
            query["before"] = before
        with client_of(server) as client:
            path = topic_path(parse_topic(topic), *rest)
            found: Facts = client.json("GET", path, query=query)
            return found
    from forebay.topic.describe import describe as describe_topic
    from forebay.topic.describe import explain as explain_offset

    with open_view(settings) as store:
        view = viewed_topic(store, topic)
        if offset is not None:
            return asdict(explain_offset(view, offset))
        return asdict(describe_topic(view, limit, before))


def _offset_lines(facts: Facts) -> Iterator[str]:
    yield f"{facts['topic']}, offset {facts['offset']}: {facts['state']}"
    if (words := _HOLE_WORDS.get(facts["state"])) is not None:
        yield f"  {words.format(topic=facts['topic'])}"
    if facts["go_on_at"] is not None:
        yield f"  the next offset that can be read is {facts['go_on_at']}"
    if facts.get("in_memory"):
        yield "  in the server's memory"
    for place in facts["places"]:
        yield (
            f"  {place['tier']} {place['name']}, position {place['position']}, "
            f"{place['frame_bytes']} bytes with the header{_in_block(place)}"
        )
    if facts["synced"]:
        for stage in ("uploaded", "verified"):
            yield f"  {stage}: {'yes' if facts[stage] else 'no'}"
    if facts["deletable"] is not None:
        why = "yes" if facts["deletable"] else f"no: {facts['kept_because']}"
        yield f"  its segment may be deleted: {why}"
    for problem in facts["problems"]:
        yield f"  problem: {problem}"


def _in_block(place: Facts) -> str:
    if place.get("codec") is None:
        return ""
    return f", at {place['position_in_block']} in the {place['codec']} block that begins there"


# ---- what `describe` prints: tables on a terminal, plain lines elsewhere ----


def _plain_lines(facts: Facts) -> Iterator[str]:
    yield from _head(facts)
    yield _headed(facts, "segments")
    for segment in facts["segments"]:
        yield (
            f"  {_offsets(segment)}, {segment['bytes']} bytes, {_stage(segment)}, "
            f"{_deletable(segment)}: {segment['file']}"
        )
    yield _headed(facts, "objects")
    for each in facts["objects"]:
        yield (
            f"  {_offsets(each)}, {_stored(each)}, {_read_back(each)}, {_made(each)}: "
            f"{each['object_id']}"
        )
    yield from _older(facts)
    yield from _settings(facts)
    for problem in facts["problems"]:
        yield f"problem: {problem}"


def _stored(each: Facts) -> str:
    if each.get("ledger_id") is not None:
        entries = each["next_offset"] - each["start_offset"]
        return f"{each['bytes']} bytes (ledger {each['ledger_id']}, {entries} entries)"
    if each.get("codec") is None:
        return f"{each['bytes']} bytes"
    return f"{each['bytes']} bytes ({each['codec']}, {each['raw_bytes']} before)"


def _head(facts: Facts) -> Iterator[str]:
    yield facts["topic"]
    yield f"  start      {facts['start_offset']}"
    if facts.get("appended") is not None:
        yield f"  appended   {facts['appended']}"
    synced = facts["synced"]
    yield f"  synced     {'unknown: its log is not on this machine' if synced is None else synced}"
    for stage in ("uploaded", "verified"):
        yield f"  {stage}   {facts[stage]}{_except_lost(facts, facts[stage])}"
    if facts["epoch"] is not None:
        yield f"  reserved   {facts['reserved']}"
        yield f"  owner      {facts['owner'] or 'none'}, epoch {facts['epoch']}"
    if "uploaded_by" in facts:
        yield f"  uploads    {_UPLOADED_BY[facts['uploaded_by']]}"
    memory = facts.get("memory")
    if memory is not None:
        first, end = memory
        yield f"  in memory  {f'{first} to {end - 1}' if first < end else 'nothing'}"
    for kind, remark in (("lost", ""), ("unknown", ", may never have been used"), ("accepted", "")):
        for start, end in _holes(facts, kind):
            yield f"  {kind:<10} {start} to {end - 1}{remark}"
    if _holes(facts, "lost") or _holes(facts, "unknown"):
        yield f"  readers stop there; `forebay accept-loss {facts['topic']}` lets them jump over it"
    yield from _cursors(facts)


def _cursors(facts: Facts) -> Iterator[str]:
    """What consumers acknowledged. A server of an earlier release has none of it."""
    for each in facts.get("cursors", ()):
        yield f"  cursor     {each['name']}: {acknowledged(each)}"
    for each in facts.get("subscriptions", ()):
        for at, line in enumerate(subscription_lines(each)):
            yield f"  subscription {line}" if at == 0 else f"    {line}"


def _holes(facts: Facts, kind: str) -> Sequence[Sequence[int]]:
    """The ranges of that kind; none if the server is of a release that does not know the kind."""
    found: Sequence[Sequence[int]] = facts.get(kind, ())
    return found


def _except_lost(facts: Facts, stage: int) -> str:
    """A remark about the offsets below `stage` without messages, which a watermark counts, too."""
    holes = [each for kind in ("lost", "unknown", "accepted") for each in _holes(facts, kind)]
    count = sum(min(end, stage) - start for start, end in holes if start < stage)
    return f", except {count} offsets without messages" if count else ""


def _headed(facts: Facts, what: str) -> str:
    total, listed = facts[f"{what}_total"], len(facts[what])
    counted = what == "segments" or facts.get("objects_counted", True)
    some = f", {listed} of them listed" if total > listed or not counted else ""
    least = "" if counted else "at least "
    return f"{least}{total} {what}, {least}{facts[f'{what}_bytes']} bytes{some}"


def _older(facts: Facts) -> Iterator[str]:
    if facts.get("objects_before") is not None:
        yield f"  older objects: --before {facts['objects_before']}"


def _settings(facts: Facts) -> Iterator[str]:
    if facts.get("settings"):  # a server of an earlier release sends none
        yield "settings"
        yield from setting_lines(facts["settings"])


def _offsets(row: Facts) -> str:
    return f"{row['start_offset']} to {row['next_offset'] - 1}"


def _stage(segment: Facts) -> str:
    return "verified" if segment["verified"] else "uploaded" if segment["uploaded"] else "local"


def _deletable(segment: Facts) -> str:
    return "deletable" if segment["deletable"] else f"kept: {segment['kept_because']}"


def _read_back(each: Facts) -> str:
    return "verified" if each["verified"] else "not verified"


def _made(each: Facts) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(each["created_at"]))


def _print_tables(facts: Facts) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    for line in _head(facts):
        console.print(escape(line), highlight=False)

    def table(what: str, columns: Sequence[str], rows: list[Sequence[str]]) -> None:
        shown = Table(title=_headed(facts, what), title_justify="left", box=None)
        for column in columns:
            shown.add_column(column, justify="right" if column == "bytes" else "left")
        for row in rows:
            shown.add_row(*map(escape, row))
        console.print(shown)

    table(
        "segments",
        ("offsets", "bytes", "stage", "may be deleted", "file"),
        [
            (_offsets(each), str(each["bytes"]), _stage(each), _deletable(each), each["file"])
            for each in facts["segments"]
        ],
    )
    table(
        "objects",
        ("offsets", "stored", "stage", "made", "object"),
        [
            (_offsets(each), _stored(each), _read_back(each), _made(each), each["object_id"])
            for each in facts["objects"]
        ],
    )
    for line in (*_older(facts), *_settings(facts)):
        console.print(escape(line), highlight=False)
    for problem in facts["problems"]:
        console.print(f"[red]problem:[/red] {escape(problem)}", highlight=False)
