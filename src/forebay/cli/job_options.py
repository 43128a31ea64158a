"""What the commands that run jobs share: their options, a progress bar, and jobs on a server.

A job runs in the command's own process (`lazy_session`), or on the Spark of a running server
(`run_on_server`). `lazy_session` starts no Spark: the job does, when it needs it. If the command
dies, the server continues with the job. Ctrl-C asks the server to cancel it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from forebay.cli.options import chosen_server, connected, print_report, refused_token
from forebay.errors import ForebayError, ServiceRefused, ServiceUnavailable, UsageError
from forebay.settings import StoreSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from forebay.client.http import ServerClient
    from forebay.pipeline.execute import Progress, Runner


_R = TypeVar("_R")

master_option = click.option(
    "--master",
    metavar="URL",
    help="Where Spark runs, such as local[4,4] or spark://host:7077.  [default: spark.master]",
)
runner_option = click.option(
    "--runner",
    type=click.Choice(["spark", "threads"]),
    default="spark",
    show_default=True,
    help="Where the work is done. threads: in this process, without Java, and with no start-up "
    "time; good for a store that one machine reads quickly. spark: on Spark, local or a cluster.",
)
dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Change nothing; print what would be done."
)


def job_options(command: Callable[..., _R]) -> Callable[..., _R]:
    """Adds --master and --dry-run."""
    return master_option(dry_run_option(command))


def check_runner(runner: Runner, master: str | None) -> None:
    """Raises UsageError for --master together with --runner threads."""
    if runner == "threads" and master is not None:
        raise UsageError(
            "--master says where Spark runs, and --runner threads does not use Spark: choose one "
            "of them"
        )


@contextmanager
def job_session(settings: StoreSettings, master: str | None) -> Iterator[SparkSession]:
    """A Spark session for one command; stopped at the end unless it was running before."""
    from forebay.pipeline.session import spark_session

    with lazy_session(settings, master) as chosen:
        yield spark_session(chosen.spark)


@contextmanager
def lazy_session(settings: StoreSettings, master: str | None) -> Iterator[StoreSettings]:
    """The settings with `master` in them; at the end, stops a session that the job started.

    A session that was running before stays.
    """
    from forebay.pipeline.session import active_session

    before = active_session()
    spark = settings.spark if master is None else replace(settings.spark, master=master)
    try:
        yield replace(settings, spark=spark)
    finally:
        made = active_session()
        if made is not None and before is None:
            made.stop()


@contextmanager
def progress_bar(title: str) -> Iterator[Progress | None]:
    """A progress bar on standard error; None if that is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bars

    with Bars(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(title, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


# ---- jobs of a running server ----


Facts = dict[str, Any]
_POLL_SECONDS: Final = 0.25
_OVER: Final = frozenset({"done", "failed", "cancelled", "lost"})

job_url_option = click.option(
    "--url",
    metavar="URL",
    help="Run the job on the Spark of the server at this URL.  [default: run it in this command]",
)


def run_on_server(
    settings: StoreSettings,
    url: str,
    kind: str,
    topics: Sequence[str],
    options: Mapping[str, int | bool | str],
    *,
    refused: Mapping[str, object],
    as_json: bool,
) -> None:
    """Starts the job on the server, shows its progress, and prints its result.

    Exits with code 1 if the job did not succeed. `refused` maps options that a server does not
    accept to their values: UsageError if one of them is given.
    """
    for name, value in refused.items():
        if value:
            raise UsageError(f"{name} cannot be used with --url: the server decides that")
    server = chosen_server(settings, url)
    assert server is not None, "it was named"
    request = {"kind": kind, "topics": list(topics), **options}
    with connected(server) as client:
        try:
            job = client.json("POST", "/v1/jobs", value=request)
        except ServiceRefused as error:
            raise refused_token(error, server) from error
        job = _followed(client, job)
    print_report(job, _lines(job), as_json=as_json, ok=job["state"] == "done")


def _followed(client: ServerClient, job: Facts) -> Facts:
    """Waits until the job has ended, and returns it."""
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
            f"{error}; the job {job['id']} may still run there: GET {path} shows its state"
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
