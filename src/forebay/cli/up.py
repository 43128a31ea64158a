"""`forebay up`, `forebay serve` and `forebay demo`: the server."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import click
from click.core import ParameterSource

from forebay.cli.job_options import master_option
from forebay.cli.options import chosen_settings, json_option, plain_errors, store_options
from forebay.settings import StoreSettings

if TYPE_CHECKING:
    from forebay.service.service import BackgroundTask, Service

_R = TypeVar("_R")
_DEMO_DATA: Final = Path("demo-data")

listen_option = click.option(
    "--listen",
    metavar="HOST:PORT",
    help="Where the HTTP server listens; port 0 takes a free one.  [default: admin.listen]",
)


def server_options(command: Callable[..., _R]) -> Callable[..., _R]:
    """Adds --listen and --json."""
    return listen_option(json_option(command))


@click.command()
@server_options
@master_option
@store_options
def up(listen: str | None, as_json: bool, master: str | None, settings: StoreSettings) -> None:
    """Runs everything on this machine: the store, its HTTP server and page, and Spark.

    Messages are taken as soon as it listens; Spark starts behind it, uploads what is due each
    storage.uploader.interval_seconds, and runs the jobs of /v1/jobs. Ctrl-C stops it, with
    everything synced; a second one ends it at once.

    \b
    Examples:
      forebay up
      forebay up --data /var/lib/forebay --listen 127.0.0.1:9000
      forebay up --config forebay.yml --master spark://10.0.0.1:7077
    """
    _serve(_chosen(settings, listen, master), as_json=as_json, spark=True)


@click.command()
@server_options
@store_options
def serve(listen: str | None, as_json: bool, settings: StoreSettings) -> None:
    """Runs the store and its HTTP server, without Spark.

    Uploads are made as storage.uploader.runner says: by threads of this process, unless it is
    `spark`. It takes no jobs; run `forebay offload` and the others beside it.

    \b
    Examples:
      forebay serve
      forebay serve --data /var/lib/forebay --listen 127.0.0.1:0 --json
    """
    _serve(_chosen(settings, listen, None), as_json=as_json, spark=False)


def _chosen(settings: StoreSettings, listen: str | None, master: str | None) -> StoreSettings:
    if listen is not None:
        settings = replace(settings, admin=replace(settings.admin, listen=listen))
    if master is not None:
        settings = replace(settings, spark=replace(settings.spark, master=master))
    return settings


def _serve(
    settings: StoreSettings,
    *,
    as_json: bool,
    spark: bool,
    beside: Callable[[Service], list[BackgroundTask]] = lambda _service: [],
) -> None:
    from forebay.service.service import Service

    _log_as_a_server()
    service = Service(settings, spark=spark)
    try:
        background = beside(service)
    except BaseException:
        service.close()
        raise
    service.run(*background, started=lambda: _say_where(service, as_json=as_json))


def _log_as_a_server() -> None:
    """Time and level in each line, and what happens at all, unless a level was asked for."""
    from forebay.logs import ServerFormatter

    root = click.get_current_context().find_root()
    logger = logging.getLogger("forebay")
    if root.get_parameter_source("log_level") is ParameterSource.DEFAULT:
        logger.setLevel(logging.INFO)
        # Each rotation of each topic is no news.
        logging.getLogger("forebay.wal").setLevel(logging.WARNING)
    if root.params.get("log_format") == "text":
        for handler in logger.handlers:
            handler.setFormatter(ServerFormatter())


def _say_where(service: Service, *, as_json: bool) -> None:
    where = service.info()
    if as_json:
        click.echo(json.dumps(asdict(where)))
    else:
        spark = "none; `forebay up` has it" if where.spark is None else f"{where.spark}, starting"
        lines = {
            "page": where.url,
            "data": where.data,
            "objects": where.objects,
            "catalog": where.catalog,
            "Spark": spark,
            "stop": f"Ctrl-C, or kill {where.pid}",
        }
        click.echo("Forebay is up.")
        for name, value in lines.items():
            click.echo(f"  {name + ':':<9}{value}")
    sys.stdout.flush()


@click.command()
@server_options
@master_option
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A configuration file; rotation, uploads and retention are the demo's own.",
)
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    help=f"The data directory.  [default: {_DEMO_DATA}]",
)
@plain_errors
def demo(
    listen: str | None, as_json: bool, master: str | None, config: Path | None, data: Path | None
) -> None:
    """Runs everything, with a load to look at.

    Four topics below /demo/ are written and read all the time, and everything goes through all
    tiers within a minute. What is old is deleted: less than 600 MiB are kept. For that reason
    it takes an own directory, which no variable of the environment names, and refuses one that
    holds other topics.

    \b
    Examples:
      forebay demo
      forebay demo --data /tmp/demo --listen 127.0.0.1:9000
    """
    from forebay.service.demo import Demo, demo_settings

    settings = chosen_settings(config, data or (None if config else _DEMO_DATA), {})
    _serve(
        _chosen(demo_settings(settings), listen, master),
        as_json=as_json,
        spark=True,
        beside=lambda service: [Demo(service.context.store)],
    )
