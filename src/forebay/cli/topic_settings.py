"""`forebay topics configure`: the settings that a topic has of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import click

from forebay.cli.options import (
    chosen_server,
    client_of,
    json_option,
    open_view,
    print_report,
    store_options,
    url_option,
    viewed_topic,
)
from forebay.errors import UnknownTopic, UsageError
from forebay.settings import ServerAddress, StoreSettings

_SOURCES = {
    "default": "default",
    "configuration": "configuration file",
    "namespace": "namespace",
    "topic": "this topic",
}


@click.command()
@click.argument("topic")
@click.argument("changes", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--unset", multiple=True, metavar="KEY", help="Use the store's setting again. Repeatable."
)
@url_option
@store_options
@json_option
def configure(
    topic: str,
    changes: tuple[str, ...],
    unset: tuple[str, ...],
    url: str | None,
    settings: StoreSettings,
    as_json: bool,
) -> None:
    """Changes settings of TOPIC, and prints all that it can have.

    Values are written as in the configuration file: sizes, durations, true and false, null. They
    are kept in the catalog. A running server uses them at once, and another owner of the topic
    after its next upload cycle. Without KEY=VALUE and --unset, nothing is changed.

    \b
    Examples:
      forebay topics configure orders
      forebay topics configure orders rolling=true max_idle_seconds=30s
      forebay topics configure orders retention_time_minutes=7d --unset retention_size_mb
      forebay topics configure orders remote_retention_time_minutes=null --json
    """
    values = _values(changes)
    try:
        found = _configured(chosen_server(settings, url), settings, topic, values, unset)
    except UnknownTopic as error:
        hint = f"`forebay topics create {topic}` creates it"
        raise UnknownTopic(f"{error}; {hint}") from None
    lines = [found["topic"], *setting_lines(found["settings"])]
    print_report(found, lines, as_json=as_json)


def _values(changes: Sequence[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for change in changes:
        key, equals, value = change.partition("=")
        if not (key and equals):
            raise UsageError(f"{change[:80]!r} is no setting; it must be like max_open_seconds=60s")
        if key in values:
            raise UsageError(f"{key} is given twice")
        values[key] = value
    return values


def _configured(
    server: ServerAddress | None,
    settings: StoreSettings,
    topic: str,
    values: dict[str, str],
    unset: Sequence[str],
) -> dict[str, Any]:
    if server is not None:
        from forebay.client.http import topic_path
        from forebay.format.names import parse_topic

        with client_of(server) as client:
            path = topic_path(parse_topic(topic), "settings")
            change = {"values": values, "unset": list(unset)}
            found: dict[str, Any] = client.json("PATCH", path, value=change)
            return found
    from forebay.topic.configure import configure_topic

    with open_view(settings) as store:
        view, resources = viewed_topic(store, topic), store.resources()
        if resources is None:
            raise UsageError(f"{store.name} has no catalog: `forebay restore` creates one")
        made = configure_topic(resources.catalog, view.topic, store.settings, values, unset)
    return {"topic": str(view.topic), "settings": [asdict(each) for each in made]}


def setting_lines(settings: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each setting: its key, its value, and where the value comes from."""
    from forebay.config.topics import TopicSetting

    for each in settings:
        setting = TopicSetting(each["key"], each["value"], each["source"], each["known"])
        source = _SOURCES.get(setting.source, setting.source)
        remark = "" if setting.known else ", ignored: this release does not know the key"
        yield f"  {setting.key:<30} {setting.shown:<8} {source}{remark}"
