"""Jobs that a running server does on its own Spark: asked for, followed to their end, told.

The server goes on with a job whatever becomes of the command; an interrupt asks it to end it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import click

from forebay.cli.servers import chosen_server, connected, refused_token
from forebay.cli.spark_options import progress_bar
from forebay.errors import ForebayError, ServiceRefused, ServiceUnavailable, UsageError
from forebay.settings import StoreSettings

if TYPE_CHECKING:
    from forebay.remote import ServerClient

Facts = dict[str, Any]
_POLL_SECONDS: Final = 0.25
_OVER: Final = frozenset({"done", "failed", "cancelled", "lost"})

job_url_option = click.option(
    "--url",
    metavar="URL",
    help="Have the server that runs there do it, on its own Spark.  [default: Spark of this "
    "command]",
)


def run_on_server(
    settings: StoreSettings,
    url: str,
    kind: str,
    topics: Sequence[str],
    options: Mapping[str, int | bool],
    *,
    refused: Mapping[str, object],
    as_json: bool,
) -> None:
    """Asks for the job, shows its progress, and ends the command as the job ended.

    `refused` are options of the command that a server does not take: none may be given.
    """
    for name, value in refused.items():
        if value:
            raise UsageError(f"{name} does not go with --url: the server decides that")
    server = chosen_server(settings, url)
    assert server is not None, "it was named"
    asked = {"kind": kind, "topics": list(topics), **options}
    with connected(server) as client:
        try:
            job = client.json("POST", "/v1/jobs", value=asked)
        except ServiceRefused as error:
            raise refused_token(error, server) from error
        job = _followed(client, job)
    click.echo(json.dumps(job) if as_json else "\n".join(_lines(job)))
    if job["state"] != "done":
        sys.exit(1)


def _followed(client: ServerClient, job: Facts) -> Facts:
    path = f"/v1/jobs/{job['id']}"
    try:
        with progress_bar(job["kind"]) as progress:
            while job["state"] not in _OVER:
                time.sleep(_POLL_SECONDS)
                job = client.json("GET", path)
                seen = job["progress"]
                if progress is not None and seen["total"]:
                    progress(seen["done"], seen["total"])
    except ServiceUnavailable as error:
        raise ServiceUnavailable(
            f"{error}; the job {job['id']} may go on there: ask {path} of the server"
        ) from error
    except KeyboardInterrupt:
        with suppress(ForebayError):
            client.close()
            client.json("DELETE", path)
        sys.exit(130)
    return job


def _lines(job: Facts) -> Iterator[str]:
    yield from job["details"]
    if job["error"]:
        yield f"error: {job['error']}"
    came = ", ".join(f"{name} {count}" for name, count in job["summary"].items())
    yield f"job {job['id']}: {job['kind']} {job['state']}{': ' if came else ''}{came}"
