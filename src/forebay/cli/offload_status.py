"""`forebay offload-status`: what of a topic is offloaded, and how the last offload went.

How a run that was asked for went is known only to the server that ran it, as in Pulsar. Without a
server the command says what the catalog knows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
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
    viewed_topic,
)
from forebay.settings import ServerAddress, StoreSettings

Facts = dict[str, Any]
_ASK_SECONDS: Final = 1.0
_RUN: Final = {
    "NOT_RUN": "no offload was asked for since the server opened the topic",
    "RUNNING": "an offload is running",
    "SUCCESS": "the last offload was a success",
    "ERROR": "the last offload failed: {last_error}",
    None: "no server runs on the store: how the last offload went is not known",
}


@click.command("offload-status")
@click.argument("topic")
@click.option("--wait", is_flag=True, help="Wait until no offload runs that was asked for.")
@url_option
@store_options
@json_option
def offload_status(
    topic: str, wait: bool, url: str | None, settings: StoreSettings, as_json: bool
) -> None:
    """Prints how the offload of TOPIC goes that was asked for over HTTP, and what is offloaded.

    Offloads are asked for with `pulsar-admin topics offload`, or with a PUT. What the topic's
    thresholds offload by themselves is counted too, but is not a run. Exit code 1 if the last run
    failed.

    \b
    Examples:
      forebay offload-status orders
      forebay offload-status orders --wait --json
      forebay offload-status orders --url http://127.0.0.1:8650
    """
    server = chosen_server(settings, url)
    if server is None:
        facts = _from_catalog(settings, topic)
    else:
        facts = _from_server(server, topic, wait=wait)
    print_report(facts, _lines(facts), as_json=as_json, ok=facts["status"] != "ERROR")


def _from_server(server: ServerAddress, name: str, *, wait: bool) -> Facts:
    from forebay.client.http import pulsar_path, topic_path
    from forebay.format.names import parse_topic

    topic = parse_topic(name)
    with client_of(server) as client:
        while True:
            run = client.json("GET", pulsar_path(topic, "offload"))
            if not wait or run["status"] != "RUNNING":
                break
            time.sleep(_ASK_SECONDS)
        ledgers = client.json("GET", pulsar_path(topic, "internalStats"))["ledgers"]
        known = client.json("GET", topic_path(topic), query={"limit": 0})
    first = run["firstUnoffloadedMessage"]
    before = None if first["ledgerId"] < 0 else [first["ledgerId"], first["entryId"]]
    return {
        "topic": str(topic),
        "status": run["status"],
        "last_error": run["lastError"] or None,
        "first_unoffloaded": before,
        "ledgers": len(ledgers),
        "offloaded": sum(each["offloaded"] for each in ledgers),
        "uploaded": known["uploaded"],
    }


def _from_catalog(settings: StoreSettings, name: str) -> Facts:
    from forebay.format.names import parse_ledger

    with open_view(settings) as store:
        view = viewed_topic(store, name)
        objects = view.objects()
        tail = view.record.tail if view.record else 0
    return {
        "topic": str(view.topic),
        "status": None,
        "last_error": None,
        "first_unoffloaded": None,
        "ledgers": None,
        "offloaded": sum(parse_ledger(each.object_id) is not None for each in objects),
        "uploaded": tail,
    }


def _lines(facts: Facts) -> Iterator[str]:
    yield f"{facts['topic']}: {_RUN[facts['status']].format(**facts)}"
    if facts["first_unoffloaded"] is not None:
        ledger, entry = facts["first_unoffloaded"]
        yield f"  it offloaded everything before {ledger}:{entry}"
    of = "" if facts["ledgers"] is None else f" of {facts['ledgers']}, the open one included"
    yield f"  ledgers that are offloaded: {facts['offloaded']}{of}"
    yield f"  next offset to upload: {facts['uploaded']}"
