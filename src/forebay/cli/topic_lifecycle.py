"""`forebay topics create` and `forebay topics delete`.

Both go through the server that --url names, or the one that runs on the data directory. Without a
server the command opens the store itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

import click

from forebay.cli.options import (
    chosen_server,
    client_of,
    json_option,
    open_view,
    print_report,
    store_options,
    url_option,
)
from forebay.errors import UsageError
from forebay.settings import ServerAddress, StoreSettings

_DELETE_SECONDS: Final = 24 * 3600.0
"""How long a deletion through a server may take: a request for each object."""


@click.command()
@click.argument("topic")
@click.option(
    "--partitions",
    type=click.IntRange(1),
    metavar="NUMBER",
    help="Create so many partitions, TOPIC-part-0 and so on.",
)
@url_option
@store_options
@json_option
def create(
    topic: str, partitions: int | None, url: str | None, settings: StoreSettings, as_json: bool
) -> None:
    """Creates TOPIC, or its partitions.

    What exists is left as it is, so that partitions can be added later. A topic has partitions or
    has none: one of each kind cannot have the same name. A topic that was deleted begins after its
    last offset. The data directory is created if it does not exist.

    \b
    Examples:
      forebay topics create orders
      forebay topics create /shop/orders --partitions 8 --json
    """
    found = _created(chosen_server(settings, url), settings, topic, partitions)
    did = "created" if found["created"] else "exists already"
    lines = [f"{each}: {did}" for each in (found["partitions"] or [found["topic"]])]
    print_report(found, lines, as_json=as_json)


def _created(
    server: ServerAddress | None, settings: StoreSettings, topic: str, partitions: int | None
) -> dict[str, Any]:
    if server is not None:
        from forebay.client.http import topic_path
        from forebay.format.names import parse_topic

        query: dict[str, str | int] = {} if partitions is None else {"partitions": partitions}
        with client_of(server) as client:
            path = topic_path(parse_topic(topic))
            found: dict[str, Any] = client.json("PUT", path, query=query)
            return found
    from forebay.topic.store import Store

    with Store(settings) as store:
        return asdict(store.create(topic, partitions=partitions))


@click.command()
@click.argument("topic")
@click.option("--partitions", is_flag=True, help="Delete all partitions of TOPIC.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@url_option
@store_options
@json_option
def delete(
    topic: str,
    partitions: bool,
    yes: bool,
    url: str | None,
    settings: StoreSettings,
    as_json: bool,
) -> None:
    """Deletes TOPIC with its messages, objects, cursors and settings.

    This cannot be undone. A topic of the same name that is created later begins after the last
    offset of this one. If the deletion is interrupted, run it again: a part of the topic is never
    shown. A topic that another process owns is not deleted; through a server, its own topics are.

    \b
    Examples:
      forebay topics delete orders
      forebay topics delete orders --partitions --yes
      forebay topics delete /shop/orders --yes --json
    """
    from forebay.format.names import parse_topic

    name = parse_topic(topic)  # a wrong name is refused before anything is asked
    what = f"all partitions of {name}" if partitions else str(name)
    if not (yes or _confirmed(f"Delete {what}? This cannot be undone")):
        click.echo("forebay: nothing was deleted", err=True)
        sys.exit(1)
    found = _deleted(chosen_server(settings, url), settings, str(name), partitions=partitions)
    print_report(found, _deleted_lines(found), as_json=as_json)


def _confirmed(question: str) -> bool:
    """Asks on stderr; UsageError if there is nobody to answer."""
    try:
        return click.confirm(question, err=True)
    except click.Abort:
        if sys.stdin.isatty():  # Ctrl-C
            raise
        raise UsageError("nobody answered: confirm the deletion with --yes") from None


def _deleted(
    server: ServerAddress | None, settings: StoreSettings, topic: str, *, partitions: bool
) -> dict[str, Any]:
    if server is not None:
        from forebay.client.http import topic_path
        from forebay.format.names import parse_topic

        query: dict[str, str | int] = {"partitions": "true"} if partitions else {}
        with client_of(server, timeout_seconds=_DELETE_SECONDS) as client:
            path = topic_path(parse_topic(topic))
            found: dict[str, Any] = client.json("DELETE", path, query=query)
            return found
    from forebay.topic.store import Store

    open_view(settings).close()  # UsageError if there is no store: none is created
    with Store(settings) as store:
        done = store.delete_partitions(topic) if partitions else [store.delete(topic)]
    return {"topic": topic, "deleted": [asdict(each) for each in done]}


def _deleted_lines(found: dict[str, Any]) -> Iterator[str]:
    for each in found["deleted"]:
        yield (
            f"{each['topic']}: deleted, with {each['objects']} objects ({each['bytes']} bytes) and "
            f"{each['files']} local files; a topic of this name begins at offset "
            f"{each['next_offset']}"
        )
        if each["unknown"]:
            yield f"  {each['unknown']} files in the object store are not ours, and were kept"
