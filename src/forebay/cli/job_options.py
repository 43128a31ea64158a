"""What the commands of jobs share: where Spark runs, a progress bar, and jobs of a server.

A job runs in the command itself (`lazy_session`: no session is started for a job that turns out to
need none), or on the Spark of a running server (`run_on_server`). The server goes on with a job
if the command dies; an interrupt asks it to cancel the job.
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
    help="Where the work is done. threads: in this process, without Java, and at once; for a store "
    "that one machine reads in good time. spark: on the processes or the cluster of Spark.",
)
dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Change nothing; say what would be done."
)


def job_options(command: Callable[..., _R]) -> Callable[..., _R]:
    """Adds --master and --dry-run."""
    return master_option(dry_run_option(command))


def check_runner(runner: Runner, master: str | None) -> None:
    """UsageError for --master together with --runner threads."""
    if runner == "threads" and master is not None:
        raise UsageError(
            "--master says where Spark runs, and --runner threads goes without Spark: choose one "
            "of them"
        )


@contextmanager
def job_session(settings: StoreSettings, master: str | None) -> Iterator[SparkSession]:
    """A Spark session for one command; one that was running before goes on."""
    from forebay.pipeline.session import spark_session

    with lazy_session(settings, master) as chosen:
        yield spark_session(chosen.spark)


@contextmanager
def lazy_session(settings: StoreSettings, master: str | None) -> Iterator[StoreSettings]:
    """Settings for a job that may need no Spark; ends the session that it made, if it made one."""
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
    """A bar on standard error, if that is a terminal."""
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
    """Starts the job, shows its progress, and ends the command as the job ended.

    `refused` are options of the command that a server does not take: none may be given.
    """
    for name, value in refused.items():
        if value:
            raise UsageError(f"{name} does not go with --url: the server decides that")
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
    """The job when it has ended."""
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
