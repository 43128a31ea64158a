"""What the commands that run on Spark share: where it runs, and a bar that moves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import click

from forebay.settings import StoreSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from forebay.pipeline.spread import Progress

_R = TypeVar("_R")

master_option = click.option(
    "--master",
    metavar="URL",
    help="Where Spark runs, such as local[4,4] or spark://host:7077.  [default: spark.master]",
)
dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Change nothing; say what would be done."
)


def job_options(command: Callable[..., _R]) -> Callable[..., _R]:
    """Adds --master and --dry-run."""
    return master_option(dry_run_option(command))


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
