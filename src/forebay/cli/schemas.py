"""`forebay schemas`: subjects of schemas, their versions and modes, and the schemas of topics.

The commands ask the server that --url names, or the one that runs on the data directory, so that a
change counts at once. Without a server they use the catalog.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from forebay.cli.options import (
    chosen_server,
    client_of,
    json_option,
    open_view,
    plain_errors,
    print_report,
    store_options,
    url_option,
)
from forebay.errors import UsageError
from forebay.format.schema import KINDS, MODES, POLICIES
from forebay.limits import SCHEMA_BYTES_MAX, SCHEMA_VERSION_MAX
from forebay.settings import ServerAddress, StoreSettings

if TYPE_CHECKING:
    from forebay.client.http import ServerClient
    from forebay.schemas.registry import SchemaRegistry

Facts = dict[str, Any]
_Result = TypeVar("_Result")
_PAGE: Final = 1000
_KIND_OF_SUFFIX: Final = {".avsc": "avro", ".json": "json_schema", ".proto": "protobuf"}


@click.group()
@plain_errors
def schemas() -> None:
    """Lists, registers, checks and deletes schemas, and gives topics theirs.

    \b
    Examples:
      forebay schemas register orders-value order.avsc
      forebay schemas check orders-value order-v2.avsc
      forebay schemas topic orders --subject orders-value --policy enforce --payload
    """


def _asked(
    settings: StoreSettings,
    url: str | None,
    ask: Callable[[ServerClient], _Result],
    read: Callable[[SchemaRegistry], _Result],
) -> _Result:
    """Asks the server, or reads and changes the catalog."""
    server: ServerAddress | None = chosen_server(settings, url)
    if server is not None:
        with client_of(server) as client:
            return ask(client)
    from forebay.schemas.registry import SchemaRegistry

    with open_view(settings) as store:
        resources = store.resources()
        return read(SchemaRegistry(None if resources is None else resources.catalog))


def _path(subject: str, **query: object) -> str:
    from urllib.parse import quote, urlencode

    given = {name: value for name, value in query.items() if value is not None}
    return f"/v1/schemas/subjects/{quote(subject, safe='')}" + (
        f"?{urlencode(given)}" if given else ""
    )


# ---- reading ----------------------------------------------------------------------------------


@schemas.command("list")
@url_option
@store_options
@json_option
def list_all(url: str | None, settings: StoreSettings, as_json: bool) -> None:
    """Prints all subjects: id, type, versions and mode. With --json, one object on each line.

    \b
    Examples:
      forebay schemas list
      forebay schemas list --json
    """
    found = _asked(settings, url, lambda client: list(_served(client)), _stored)
    for each in found:
        if as_json:
            click.echo(json.dumps(each))
            continue
        click.echo(
            f"{each['subject']}: id {each['id']}, {each['type']}, version {each['latest']} of "
            f"{each['versions']}, {each['mode']}"
        )


def _served(client: ServerClient) -> Iterator[Facts]:
    from urllib.parse import urlencode

    after: str | None = ""
    while after is not None:
        page = client.json("GET", f"/v1/schemas?{urlencode({'limit': _PAGE, 'after': after})}")
        yield from page["subjects"]
        for problem in page["problems"]:
            click.echo(f"forebay: {problem}", err=True)
        after = page["next"]


def _stored(registry: SchemaRegistry) -> list[Facts]:
    found = []
    for row in registry.subjects(lambda error: click.echo(f"forebay: {error}", err=True)):
        latest = registry.version(row)
        found.append(
            {
                "subject": row.name,
                "id": row.id,
                "type": latest.kind,
                "mode": row.mode,
                "latest": row.latest,
                "versions": len(row.versions),
                "tags": list(latest.tags),
            }
        )
    return found


@schemas.command()
@click.argument("subject")
@click.option("--version", type=click.IntRange(1, SCHEMA_VERSION_MAX), help="[default: the latest]")
@url_option
@store_options
@json_option
def show(
    subject: str, version: int | None, url: str | None, settings: StoreSettings, as_json: bool
) -> None:
    """Prints the definition of SUBJECT; with --json, everything about the version.

    \b
    Examples:
      forebay schemas show orders-value
      forebay schemas show orders-value --version 1 --json
    """
    found = _asked(
        settings,
        url,
        lambda client: client.json("GET", _path(subject, version=version)),
        lambda registry: _shown(registry, subject, version),
    )
    click.echo(json.dumps(found) if as_json else found["definition"])


def _shown(registry: SchemaRegistry, name: str, version: int | None) -> Facts:
    subject = registry.subject(name)
    row = registry.version(subject, version)
    return {
        "subject": row.subject,
        "id": subject.id,
        "version": row.version,
        "type": row.kind,
        "definition": row.definition.decode(errors="replace"),
        "fingerprint": row.fingerprint,
        "description": row.description,
        "created_ms": row.created_ms,
        "created_by": row.created_by,
        "tags": list(row.tags),
        "mode": subject.mode,
        "versions": [each for each, _ in subject.versions],
    }


# ---- changes ----------------------------------------------------------------------------------

file_argument = click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
type_option = click.option(
    "--type",
    "kind",
    type=click.Choice(KINDS),
    help="The kind of schema.  [default: by the ending of FILE: .avsc, .json or .proto]",
)


def _definition(file: Path, kind: str | None) -> tuple[str, str]:
    """The kind and the text of a file."""
    found = kind or _KIND_OF_SUFFIX.get(file.suffix)
    if found is None:
        raise UsageError(f"{file} does not say what it is: give --type")
    try:
        if str(file) == "-":
            data = sys.stdin.buffer.read(SCHEMA_BYTES_MAX + 1)
        else:
            with file.open("rb") as opened:
                data = opened.read(SCHEMA_BYTES_MAX + 1)
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {file}: {error}") from error
    if not 0 < len(data) <= SCHEMA_BYTES_MAX:
        raise UsageError(f"{file} is empty, or larger than {SCHEMA_BYTES_MAX} bytes")
    return found, text


@schemas.command()
@click.argument("subject")
@file_argument
@type_option
@click.option("--description", default="", help="What the schema is for.")
@click.option("--created-by", default="", help="Who made it.")
@click.option("--tag", "tags", multiple=True, help="May be given several times.")
@url_option
@store_options
@json_option
def register(
    subject: str,
    file: Path,
    kind: str | None,
    description: str,
    created_by: str,
    tags: tuple[str, ...],
    url: str | None,
    settings: StoreSettings,
    as_json: bool,
) -> None:
    """Registers FILE (- is the standard input) as a new version of SUBJECT.

    A schema that SUBJECT has already makes no new version. One that breaks the mode of SUBJECT is
    refused.

    \b
    Examples:
      forebay schemas register orders-value order.avsc
      forebay schemas register names - --type string --tag eu
    """
    found, text = _definition(file, kind)
    body = {
        "type": found,
        "definition": text,
        "description": description,
        "created_by": created_by,
        "tags": list(tags),
    }

    def here(registry: SchemaRegistry) -> Facts:
        from forebay.schemas.registry import NewSchema

        new = NewSchema(subject, found, text.encode(), description, created_by, tags)
        done = registry.register(new)
        return {
            "subject": done.subject.name,
            "id": done.subject.id,
            "version": done.version.version,
            "created": done.is_new,
            "fingerprint": done.version.fingerprint,
        }

    made = _asked(
        settings, url, lambda client: client.json("POST", _path(subject), value=body), here
    )
    words = "was registered" if made["created"] else "was registered before"
    line = f"{subject}: version {made['version']} {words}, id {made['id']}"
    print_report(made, [line], as_json=as_json)


@schemas.command()
@click.argument("subject")
@file_argument
@type_option
@click.option("--mode", type=click.Choice(MODES), help="[default: that of SUBJECT]")
@url_option
@store_options
@json_option
def check(
    subject: str,
    file: Path,
    kind: str | None,
    mode: str | None,
    url: str | None,
    settings: StoreSettings,
    as_json: bool,
) -> None:
    """Compares FILE (- is the standard input) with the latest version of SUBJECT.

    The exit code is 1 if it is not compatible.

    \b
    Examples:
      forebay schemas check orders-value order-v2.avsc
      forebay schemas check orders-value order-v2.avsc --mode full
    """
    found, text = _definition(file, kind)
    body = {"subject": subject, "type": found, "definition": text}

    def here(registry: SchemaRegistry) -> Facts:
        errors = registry.check(subject, found, text.encode(), mode)
        return {"compatible": not errors, "errors": errors}

    result = _asked(
        settings,
        url,
        lambda client: client.json(
            "POST", "/v1/schemas/check", value=body if mode is None else {**body, "mode": mode}
        ),
        here,
    )
    words = "is compatible" if result["compatible"] else "is not compatible"
    print_report(result, [f"{subject}: {words}", *result["errors"]], as_json=as_json)
    if not result["compatible"]:
        sys.exit(1)


@schemas.command()
@click.argument("subject")
@click.argument("mode", type=click.Choice(MODES))
@url_option
@store_options
@json_option
def mode(subject: str, mode: str, url: str | None, settings: StoreSettings, as_json: bool) -> None:
    """Sets the compatibility mode of SUBJECT, for the versions that are registered next.

    \b
    Examples:
      forebay schemas mode orders-value full
    """
    found = _asked(
        settings,
        url,
        lambda client: client.json("PATCH", _path(subject), value={"mode": mode}),
        lambda registry: _state(registry.set_mode(subject, mode)),
    )
    print_report(found, [f"{subject}: the mode is {found['mode']}"], as_json=as_json)


def _state(row: Any) -> Facts:
    return {
        "subject": row.name,
        "id": row.id,
        "mode": row.mode,
        "versions": [each for each, _ in row.versions],
    }


@schemas.command()
@click.argument("subject")
@click.option(
    "--version", required=True, type=click.IntRange(1, SCHEMA_VERSION_MAX), help="Which one."
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@url_option
@store_options
@json_option
def delete(
    subject: str, version: int, yes: bool, url: str | None, settings: StoreSettings, as_json: bool
) -> None:
    """Deletes a version of SUBJECT. Messages that carry it cannot be decoded with it any more.

    Its number is not given again.

    \b
    Examples:
      forebay schemas delete orders-value --version 1 --yes
    """
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError(f"to delete version {version} of {subject}, add --yes")
        click.confirm(f"Delete version {version} of {subject}?", abort=True, err=True)
    found = _asked(
        settings,
        url,
        lambda client: client.json("DELETE", _path(subject, version=version)),
        lambda registry: _state(registry.delete(subject, version)),
    )
    left = ", ".join(map(str, found["versions"])) or "none"
    line = f"{subject}: version {version} was deleted; versions left: {left}"
    print_report(found, [line], as_json=as_json)


@schemas.command()
@click.argument("topic")
@click.option("--subject", help="The subject of its messages.  [default: as it is]")
@click.option("--policy", type=click.Choice(POLICIES), help="What happens to other messages.")
@click.option("--payload/--no-payload", default=None, help="Whether payloads are checked too.")
@click.option("--clear", is_flag=True, help="The topic takes every message again.")
@url_option
@store_options
@json_option
def topic(
    topic: str,
    subject: str | None,
    policy: str | None,
    payload: bool | None,
    clear: bool,
    url: str | None,
    settings: StoreSettings,
    as_json: bool,
) -> None:
    """Prints which schema the messages of TOPIC have, and changes it if options are given.

    \b
    Examples:
      forebay schemas topic orders
      forebay schemas topic orders --subject orders-value --policy enforce --payload
      forebay schemas topic orders --clear
    """
    from forebay.format.names import parse_topic

    name = parse_topic(topic)
    change = {"subject": subject, "policy": policy, "payload": payload}
    given = {key: value for key, value in change.items() if value is not None}
    if clear and given:
        raise UsageError("--clear takes everything away: give no other option")

    def ask(client: ServerClient) -> Facts:
        from forebay.client.http import topic_path

        path = topic_path(name, "schema")
        if clear:
            return dict(client.json("DELETE", path))
        found = {} if subject else client.json("GET", path)
        return dict(client.json("PUT", path, value=_row(found, given)) if given else found)

    def here(registry: SchemaRegistry) -> Facts:
        if clear:
            return {"topic": str(name), "cleared": registry.clear_topic(name)}
        return _topic_here(registry, name, given)

    found = _asked(settings, url, ask, here)
    if clear:
        words = "takes every message" if found["cleared"] else "had no schema"
    else:
        checked = ", payloads are checked" if found["payload"] else ""
        words = f"{found['subject']}, policy {found['policy']}{checked}"
    print_report(found, [f"{name}: {words}"], as_json=as_json)


def _row(found: Facts, given: Facts) -> Facts:
    kept: Facts = {key: found[key] for key in ("subject", "policy", "payload") if key in found}
    return kept | given


def _topic_here(registry: SchemaRegistry, name: Any, given: Facts) -> Facts:
    from forebay.errors import UnknownSchema

    before = registry.topic_schema(name)
    if before is None and "subject" not in given:
        raise UnknownSchema(f"{name} has no schema")
    found: Facts = (
        {}
        if before is None or "subject" in given
        else {"subject": before.subject, "policy": before.policy, "payload": before.payload}
    )
    row = _row(found, given)
    if given:
        made = registry.configure_topic(
            name, row["subject"], row.get("policy", "none"), payload=row.get("payload", False)
        )
        row = {"subject": made.subject, "policy": made.policy, "payload": made.payload}
    return {"topic": str(name), **row}
