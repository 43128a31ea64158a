"""`forebay subscriptions`: what consumers have read, and how to move, create and delete them.

The commands ask the server that --url names, or the one that runs on the data directory, so that
consumers that are connected notice a change. Without a server, `list` reads the catalog, and the
others open the store themselves.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from forebay.cli.options import (
    chosen_server,
    client_of,
    json_option,
    open_view,
    plain_errors,
    store_options,
    url_option,
    viewed_topic,
)
from forebay.errors import UsageError
from forebay.format.subscription import KINDS
from forebay.limits import KIB, OFFSET_MAX
from forebay.settings import ServerAddress, StoreSettings

if TYPE_CHECKING:
    from forebay.dispatch.registry import Registry
    from forebay.topic.store import Start

Facts = dict[str, Any]
_Result = TypeVar("_Result")
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_PAGE: Final = 1000

type_option = click.option(
    "--type",
    "kind",
    type=click.Choice(KINDS),
    help="How consumers share the messages.  [default: as it is, or exclusive]",
)


@click.group()
@plain_errors
def subscriptions() -> None:
    """Lists the subscriptions of topics, and moves, creates and deletes them.

    \b
    Examples:
      forebay subscriptions list
      forebay subscriptions seek orders billing --time 2026-01-01T00:00Z
      forebay subscriptions skip orders billing --messages 1
    """


# ---- list -------------------------------------------------------------------------------------


@subscriptions.command("list")
@click.argument("topic", required=False)
@url_option
@store_options
@json_option
def list_all(topic: str | None, url: str | None, settings: StoreSettings, as_json: bool) -> None:
    """Prints the subscriptions of TOPIC, or of all topics.

    Prints the type, what was acknowledged, the lag in messages, bytes and time, and the consumers
    that are connected, if a server runs on the store. With --json, one object on each line.

    \b
    Examples:
      forebay subscriptions list
      forebay subscriptions list orders --json
    """
    server = chosen_server(settings, url)
    found = _stored(settings, topic) if server is None else _served(server, topic)
    for name, each in found:
        if as_json:
            click.echo(json.dumps({"topic": name, **each}))
            continue
        for at, line in enumerate(subscription_lines(each)):
            click.echo(f"{name}: {line}" if at == 0 else f"  {line}")


def _served(server: ServerAddress, topic: str | None) -> Iterator[tuple[str, Facts]]:
    from forebay.cli.topics import served_topics
    from forebay.client.http import topic_path
    from forebay.format.names import parse_topic

    names = served_topics(server) if topic is None else [topic]
    with client_of(server) as client:
        for name in map(parse_topic, names):
            page = client.json("GET", topic_path(name, "subscriptions"))
            for each in page["subscriptions"]:
                yield str(name), each
            for problem in page["problems"]:
                click.echo(f"forebay: {name}: {problem}", err=True)


def _stored(settings: StoreSettings, topic: str | None) -> Iterator[tuple[str, Facts]]:
    from forebay.topic.subscription_facts import stored_subscriptions

    with open_view(settings) as store:
        for name in store.topics() if topic is None else [topic]:
            view = viewed_topic(store, name)
            found, damaged = stored_subscriptions(view)
            for each in found:
                yield str(view.topic), asdict(each)
            for problem in damaged:
                click.echo(f"forebay: {view.topic}: {problem}", err=True)


def subscription_lines(each: Facts) -> Iterator[str]:
    """A subscription in words: one line, and one for each consumer and for its problem."""
    connected = each.get("connected", ())
    yield (
        f"{each['name']}: {each['type']}, {acknowledged(each)}; {_lag(each)}; "
        f"{_consumers(len(connected))}{_counted(each)}"
    )
    for consumer in connected:
        role = "" if consumer["active"] else ", waits"
        yield f"consumer {consumer['name']}: {consumer['unacked']} not acknowledged{role}"
    if each.get("problem"):
        yield f"problem: {each['problem']}"


def acknowledged(each: Facts) -> str:
    more = f", and {each['ranges']} ranges after it" if each["ranges"] else ""
    return f"acknowledged before {each['position']}{more}"


def _lag(each: Facts) -> str:
    if not each["lag"] or "lag_bytes" not in each:
        return f"lag {each['lag']} messages"
    seconds = each["lag_seconds"]
    age = "" if seconds is None else f", {seconds:.0f} s"
    return f"lag {each['lag']} messages, {_size(each['lag_bytes'])}{age}"


def _consumers(count: int) -> str:
    return {0: "no consumer", 1: "1 consumer"}.get(count, f"{count} consumers")


def _counted(each: Facts) -> str:
    words = (
        ("outstanding", "outstanding"),
        ("redelivered", "redelivered"),
        ("dead_letters", "dead letters"),
        ("dropped", "dropped"),
        ("skipped", "skipped"),
        ("lost", "lost"),
        ("removed", "removed unread"),
    )
    found = [f"{each[key]} {word}" for key, word in words if each.get(key)]
    return f"; {', '.join(found)}" if found else ""


def _size(number: float) -> str:
    for unit in _UNITS[:-1]:
        if number < KIB:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= KIB
    return f"{number:.1f} {_UNITS[-1]}"


# ---- changes ----------------------------------------------------------------------------------


def _place_options(command: Callable[..., _Result]) -> Callable[..., _Result]:
    """Adds the options that name a place in a topic."""
    for option in (
        click.option("--latest", is_flag=True, help="The end of the topic."),
        click.option("--earliest", is_flag=True, help="The oldest message."),
        click.option(
            "--time",
            "moment",
            metavar="TIME",
            help="The first message that was published then or later. ISO 8601, a duration before "
            "now such as 10m, or milliseconds since 1970.",
        ),
        click.option("--offset", type=click.IntRange(0, OFFSET_MAX), help="This offset."),
    ):
        command = option(command)
    return command


def _place(offset: int | None, moment: str | None, earliest: bool, latest: bool) -> Facts:
    """The body of a request; empty if no option was given."""
    from forebay.cli.messages import moment_of

    found: list[Facts] = []
    if offset is not None:
        found.append({"start": offset})
    if moment is not None:
        found.append({"start_time": moment_of("--time", moment)})
    found += [{"start": word} for word, on in (("earliest", earliest), ("latest", latest)) if on]
    if len(found) > 1:
        raise UsageError("give only one of --offset, --time, --earliest and --latest")
    return found[0] if found else {}


def _start(place: Facts) -> Start | None:
    from datetime import UTC, datetime

    if "start_time" in place:
        return datetime.fromtimestamp(place["start_time"] / 1000, UTC)
    start: Start | None = place.get("start")
    return start


@subscriptions.command()
@click.argument("topic")
@click.argument("name")
@_place_options
@url_option
@store_options
@json_option
def seek(
    topic: str,
    name: str,
    offset: int | None,
    moment: str | None,
    earliest: bool,
    latest: bool,
    url: str | None,
    settings: StoreSettings,
    as_json: bool,
) -> None:
    """Moves the subscription NAME of TOPIC, back or on.

    Everything before the place counts as acknowledged, and nothing after it. Consumers that are
    connected get the messages from there on.

    \b
    Examples:
      forebay subscriptions seek orders billing --offset 4711
      forebay subscriptions seek orders billing --time 2h
      forebay subscriptions seek orders billing --earliest
    """
    place = _place(offset, moment, earliest, latest)
    start = _start(place)
    if start is None:
        raise UsageError("give one of --offset, --time, --earliest and --latest")
    moved = _changed(
        chosen_server(settings, url),
        settings,
        (topic, name),
        ("POST", "seek", place),
        lambda registry: registry.seek(_topic(topic), name, start),
        lambda position: {"position": position},
    )
    _say(moved, f"moved to {moved['position']}", as_json=as_json)


@subscriptions.command()
@click.argument("topic")
@click.argument("name")
@url_option
@store_options
@json_option
def reset(topic: str, name: str, url: str | None, settings: StoreSettings, as_json: bool) -> None:
    """Moves the subscription NAME to the oldest message of TOPIC.

    Everything that the topic still has is delivered again. It is `seek --earliest`.

    \b
    Examples:
      forebay subscriptions reset orders billing
    """
    moved = _changed(
        chosen_server(settings, url),
        settings,
        (topic, name),
        ("POST", "reset", None),
        lambda registry: registry.seek(_topic(topic), name, "earliest"),
        lambda position: {"position": position},
    )
    _say(moved, f"moved to {moved['position']}", as_json=as_json)


@subscriptions.command()
@click.argument("topic")
@click.argument("name")
@click.option("--messages", type=click.IntRange(1), help="The next ones, so many.")
@click.option("--all", "everything", is_flag=True, help="All that are in the topic now.")
@click.option("--blocked", is_flag=True, help="Those that failed too often.")
@url_option
@store_options
@json_option
def skip(
    topic: str,
    name: str,
    messages: int | None,
    everything: bool,
    blocked: bool,
    url: str | None,
    settings: StoreSettings,
    as_json: bool,
) -> None:
    """Acknowledges messages of the subscription NAME that nobody has processed.

    The next messages are those with the lowest offsets that are not acknowledged, whether consumers
    have them or not.

    \b
    Examples:
      forebay subscriptions skip orders billing --messages 1
      forebay subscriptions skip orders billing --blocked
    """
    chosen = [messages, *(["all"] if everything else []), *(["blocked"] if blocked else [])]
    given: list[Any] = [each for each in chosen if each is not None]
    if len(given) != 1:
        raise UsageError("give one of --messages, --all and --blocked")
    skipped = _changed(
        chosen_server(settings, url),
        settings,
        (topic, name),
        ("POST", "skip", {"messages": given[0]}),
        lambda registry: registry.skip(_topic(topic), name, given[0]),
        lambda found: {"skipped": found[1], "position": found[0]},
    )
    words = f"skipped {skipped['skipped']} messages, is at {skipped['position']}"
    _say(skipped, words, as_json=as_json)


@subscriptions.command()
@click.argument("topic")
@click.argument("name")
@type_option
@_place_options
@url_option
@store_options
@json_option
def create(
    topic: str,
    name: str,
    kind: str | None,
    offset: int | None,
    moment: str | None,
    earliest: bool,
    latest: bool,
    url: str | None,
    settings: StoreSettings,
    as_json: bool,
) -> None:
    """Creates the subscription NAME of TOPIC, if it does not exist.

    Without a place it begins where broker.subscription_start says. One that exists stays as it is.

    \b
    Examples:
      forebay subscriptions create orders billing --type shared --earliest
    """
    from forebay.dispatch.policy import SubscriptionType

    kind = kind or KINDS[0]
    place = _place(offset, moment, earliest, latest)
    number = SubscriptionType(KINDS.index(kind))
    made = _changed(
        chosen_server(settings, url),
        settings,
        (topic, name),
        ("PUT", None, {"type": kind, **place}),
        lambda registry: registry.create(_topic(topic), name, number, _start(place)),
        lambda found: {"type": kind, "position": found[0], "created": found[1]},
    )
    words = "was created" if made["created"] else "exists, and is unchanged"
    _say(made, f"{words}; it is at {made['position']}", as_json=as_json)


@subscriptions.command()
@click.argument("topic")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@url_option
@store_options
@json_option
def delete(
    topic: str, name: str, yes: bool, url: str | None, settings: StoreSettings, as_json: bool
) -> None:
    """Deletes the subscription NAME of TOPIC, and what it has acknowledged.

    The streams of its consumers end. The messages of the topic stay.

    \b
    Examples:
      forebay subscriptions delete orders billing --yes
    """
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError(f"to delete {name} and what it has acknowledged, add --yes")
        click.confirm(f"Delete {name} and what it has acknowledged?", abort=True, err=True)
    gone = _changed(
        chosen_server(settings, url),
        settings,
        (topic, name),
        ("DELETE", None, None),
        lambda registry: registry.delete(_topic(topic), name),
        lambda _nothing: {},
    )
    _say(gone, "was deleted", as_json=as_json)


def _topic(name: str) -> Any:
    from forebay.format.names import parse_topic

    return parse_topic(name)


def _say(facts: Facts, words: str, *, as_json: bool) -> None:
    click.echo(
        json.dumps(facts) if as_json else f"{facts['topic']}: {facts['subscription']} {words}"
    )


def _changed(
    server: ServerAddress | None,
    settings: StoreSettings,
    place: tuple[str, str],
    request: tuple[str, str | None, Facts | None],
    act: Callable[[Registry], Awaitable[_Result]],
    shown: Callable[[_Result], Facts],
) -> Facts:
    """Makes a change, by a request to the server or in this process; returns what to print."""
    topic, name = _topic(place[0]), place[1]
    if server is None:
        found = _run_here(settings, act)
        return {"topic": str(topic), "subscription": name, **shown(found)}
    from forebay.client.http import topic_path

    method, verb, body = request
    path = topic_path(topic, "subscriptions", name, *([] if verb is None else [verb]))
    with client_of(server) as client:
        reply: Facts = client.json(method, path, value=body)
        return reply


def _run_here(settings: StoreSettings, act: Callable[[Registry], Awaitable[_Result]]) -> _Result:
    import asyncio

    import forebay
    from forebay.dispatch.registry import Registry

    with open_view(settings):  # a mistyped directory is not created
        pass
    with forebay.open(settings) as store:

        async def run() -> _Result:
            registry = Registry(store, settings.broker)
            try:
                return await act(registry)
            finally:
                await registry.close()

        return asyncio.run(run())
