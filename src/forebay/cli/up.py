"""`forebay up`, `forebay serve` and `forebay demo`: run the server.

`up` also runs Spark, `serve` does not, and `demo` is `up` with a load, in a separate directory.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import click
from click.core import ParameterSource

from forebay.cli.job_options import master_option
from forebay.cli.options import chosen_settings, json_option, plain_errors, store_options
from forebay.settings import BrokerSettings, StoreSettings

if TYPE_CHECKING:
    from forebay.service.service import BackgroundTask, Service

_R = TypeVar("_R")
_DEMO_DATA: Final = Path("demo-data")
_OFF: Final = "off"
_ANY_PORT: Final = "127.0.0.1:0"
"""If the HTTP server takes any free port, so does the broker, unless its address was chosen."""

listen_option = click.option(
    "--listen",
    metavar="HOST:PORT",
    help="The address of the HTTP server; port 0 chooses a free port.  [default: admin.listen]",
)


broker_option = click.option(
    "--broker",
    metavar="HOST:PORT",
    help="The address of the gRPC server for Danube's clients; port 0 chooses a free port, and "
    "`off` starts none.  [default: broker.listen]",
)


def server_options(command: Callable[..., _R]) -> Callable[..., _R]:
    """Adds --listen, --broker and --json."""
    return listen_option(broker_option(json_option(command)))


@click.command()
@server_options
@master_option
@store_options
def up(
    listen: str | None,
    broker: str | None,
    as_json: bool,
    master: str | None,
    settings: StoreSettings,
) -> None:
    """Runs everything on this machine: the store, its servers and page, and Spark.

    The server accepts messages at once, while Spark is still starting. Spark uploads what is due
    every storage.uploader.interval_seconds, and runs the jobs of /v1/jobs. Ctrl-C syncs everything
    and stops the server; a second Ctrl-C kills it.

    \b
    Examples:
      forebay up
      forebay up --data /var/lib/forebay --listen 127.0.0.1:9000
      forebay up --config forebay.yml --master spark://10.0.0.1:7077
    """
    _serve(_chosen(settings, listen, broker, master), as_json=as_json, spark=True)


@click.command()
@server_options
@store_options
def serve(listen: str | None, broker: str | None, as_json: bool, settings: StoreSettings) -> None:
    """Runs the store, its HTTP server and its broker, without Spark.

    Threads of this process upload what is due, unless storage.uploader.runner is `spark`. The
    server accepts no jobs: run `forebay offload` and the other commands in another process.

    \b
    Examples:
      forebay serve
      forebay serve --data /var/lib/forebay --listen 127.0.0.1:0 --json
    """
    _serve(_chosen(settings, listen, broker, None), as_json=as_json, spark=False)


def _chosen(
    settings: StoreSettings, listen: str | None, broker: str | None, master: str | None
) -> StoreSettings:
    if listen is not None:
        settings = replace(settings, admin=replace(settings.admin, listen=listen))
        if broker is None and listen.endswith(":0") and settings.broker == BrokerSettings():
            broker = _ANY_PORT
    if broker == _OFF:
        settings = replace(settings, broker=replace(settings.broker, enabled=False))
    elif broker is not None:
        settings = replace(settings, broker=replace(settings.broker, listen=broker))
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
    # At its default, gRPC prints a line about forks when Spark is started. It reads this on import.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from forebay.service.service import Service

    _configure_logging()
    service = Service(settings, spark=spark)
    try:
        background = beside(service)
    except BaseException:
        service.close()
        raise
    service.run(*background, started=lambda: _print_started(service, as_json=as_json))


def _configure_logging() -> None:
    """Adds time and level to each log line, and logs from INFO on unless --log-level is given."""
    from forebay.logs import ServerFormatter

    root = click.get_current_context().find_root()
    logger = logging.getLogger("forebay")
    if root.get_parameter_source("log_level") is ParameterSource.DEFAULT:
        logger.setLevel(logging.INFO)
        # At INFO, every rotation of every topic would be logged.
        logging.getLogger("forebay.wal").setLevel(logging.WARNING)
    if root.params.get("log_format") == "text":
        for handler in logger.handlers:
            handler.setFormatter(ServerFormatter())


def _print_started(service: Service, *, as_json: bool) -> None:
    where = service.info()
    if as_json:
        click.echo(json.dumps(asdict(where)))
    else:
        spark = "none; `forebay up` runs it" if where.spark is None else f"{where.spark}, starting"
        lines = {
            "page": where.url,
            "broker": where.broker or "none",
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
    help="A configuration file; the demo overrides rotation, uploads and retention.",
)
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    help=f"The data directory.  [default: {_DEMO_DATA}]",
)
@plain_errors
def demo(
    listen: str | None,
    broker: str | None,
    as_json: bool,
    master: str | None,
    config: Path | None,
    data: Path | None,
) -> None:
    """Runs `forebay up` with a load, to show how messages move through the tiers.

    Four topics below /demo/ are written and read all the time, and every message goes through all
    tiers within a minute. Old messages are deleted, so that less than 600 MiB are stored. The demo
    therefore uses a separate directory: it ignores FOREBAY_DATA, and refuses a directory that
    holds other topics.

    \b
    Examples:
      forebay demo
      forebay demo --data /tmp/demo --listen 127.0.0.1:9000
    """
    from forebay.service.demo import Demo, demo_settings

    settings = chosen_settings(config, data or (None if config else _DEMO_DATA), {})
    _serve(
        _chosen(demo_settings(settings), listen, broker, master),
        as_json=as_json,
        spark=True,
        beside=lambda service: [Demo(service.context.store)],
    )
