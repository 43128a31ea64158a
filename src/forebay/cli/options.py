"""What all commands share: their options, the choice of store and server, and how they print.

A command opens a data directory itself, or sends its request to a server: the one that --url
names, or the one that runs on the data directory (`chosen_server`). Errors are one line on stderr
and exit code 2 (`plain_errors`, which `store_options` includes). A report with a problem in it is
exit code 1 (`print_report`). Functions import what they need when they run, so that `--help` is
fast.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar
from urllib.parse import urlsplit

import click

from forebay.errors import ForebayError, ServiceRefused, UsageError
from forebay.format.names import SERVER_FILE
from forebay.settings import ServerAddress, StoreSettings

if TYPE_CHECKING:
    from forebay.client.http import ServerClient
    from forebay.topic.view import StoreView, TopicView


_P = ParamSpec("_P")
_R = TypeVar("_R")
_STDOUT: Final = 1
_DATA: Final = "data"
CONFIG_VARIABLE: Final = "FOREBAY_CONFIG"
DATA_VARIABLE: Final = "FOREBAY_DATA"

json_option = click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")


def plain_errors(command: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorates a command: ForebayError and OSError become one line on stderr and exit code 2."""

    @wraps(command)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return command(*args, **kwargs)
        except BrokenPipeError:
            # The program that reads our output has stopped, as `head` does. That is not an error.
            # Redirect stdout, so that flushing the rest at exit does not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)
            sys.exit(0)
        except PermissionError as error:
            say_error(_not_allowed(error), as_json=_logs_json())
            sys.exit(2)
        except (ForebayError, OSError) as error:
            say_error(str(error), as_json=_logs_json())
            sys.exit(2)

    return wrapped


def say_error(words: str, *, as_json: bool) -> None:
    """Prints the error that ends a command: one line, of JSON if the log lines are."""
    if as_json:
        from forebay.cli.json_stderr import json_line

        click.echo(json_line(logging.ERROR, words), err=True)
    else:
        click.echo(f"forebay: {words}", err=True)


def _logs_json() -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and context.find_root().params.get("log_format") == "json"


def _not_allowed(error: PermissionError) -> str:
    if isinstance(error, ForebayError) or error.filename is None:
        return str(error)
    return (
        f"{error.filename}: {error.strerror}; a store is private to the user that created it: run "
        "the command as that user, or through its server with --url"
    )


def path_options(command: Callable[..., _R]) -> Callable[..., _R]:
    """Adds --config and --data, and passes them on as they are."""
    config = click.option(
        "--config",
        type=click.Path(dir_okay=False, path_type=Path),
        help=f"A configuration file.  [env var: {CONFIG_VARIABLE}]",
    )
    data = click.option(
        "--data",
        type=click.Path(file_okay=False, path_type=Path),
        help=f"The data directory.  [env var: {DATA_VARIABLE}; default: {_DATA}]",
    )
    return config(data(command))


def store_options(command: Callable[..., _R]) -> Callable[..., _R]:
    """Adds --config and --data, and passes the settings that they choose as `settings`.

    Includes `plain_errors`.
    """

    @path_options
    @wraps(command)
    @plain_errors
    def wrapped(*args: Any, config: Path | None, data: Path | None, **kwargs: Any) -> _R:
        return command(*args, settings=chosen_settings(config, data, os.environ), **kwargs)

    return wrapped


def chosen_settings(
    config: Path | None, data: Path | None, env: Mapping[str, str]
) -> StoreSettings:
    """The settings from the options, else from the environment, else the defaults for `./data`.

    UsageError if both options are given, or if `data` is a file.
    """
    if config is not None and data is not None:
        raise UsageError("both --config and --data are given: choose one of them")
    if config is None and data is None:
        if env.get(CONFIG_VARIABLE):
            config = Path(env[CONFIG_VARIABLE])
        else:
            data = Path(env.get(DATA_VARIABLE) or _DATA)
    if config is not None:
        from forebay.config import load_config

        return load_config(config)
    assert data is not None
    if data.exists() and not data.is_dir():
        raise UsageError(f"{data} is not a directory; use --config for a configuration file")
    return StoreSettings(data=data)


def open_view(settings: StoreSettings) -> StoreView:
    """A view of the store; UsageError if there is no store. The caller closes it."""
    from forebay.topic.resources import catalog_file
    from forebay.topic.view import StoreView

    view = StoreView(settings)
    catalog = catalog_file(view.settings)
    if catalog is not None and not catalog.exists() and not Path(view.name).is_dir():
        raise UsageError(
            f"{settings.data} is not a data directory; name one with --data or {DATA_VARIABLE}, "
            f"or a configuration with --config or {CONFIG_VARIABLE}"
        )
    return view


def viewed_topic(store: StoreView, name: str) -> TopicView:
    """The topic; UnknownTopic if it does not exist.

    If the catalog does not know the topic but its objects exist, the error says how to restore it.
    """
    from forebay.errors import UnknownTopic

    try:
        return store.topic(name)
    except UnknownTopic as error:
        from forebay.format.names import objects_prefix, parse_topic
        from forebay.objects.store import connect

        topic, resources = parse_topic(name), store.resources()
        if resources is not None and resources.catalog.find(topic) is not None:
            raise  # it was deleted
        with closing(connect(store.settings.cloud, Path(store.name))) as objects:
            there = next(iter(objects.list(objects_prefix(topic))), None) is not None
        if not there:
            raise
        raise UnknownTopic(
            f"{topic} is not in the catalog, but {objects.name} holds objects of it: "
            f"`forebay restore {topic}` rebuilds the catalog from them"
        ) from error


def print_report(facts: Any, lines: Iterable[str], *, as_json: bool, ok: bool = True) -> None:
    """Prints `facts` as JSON, or `lines`; ends the command with exit code 1 if not `ok`."""
    click.echo(json.dumps(facts) if as_json else "\n".join(lines))
    if not ok:
        sys.exit(1)


def size_of(option: str, text: str, example: str = "256MiB") -> int:
    """The bytes that an option such as `--budget 10GiB` means; UsageError if it is not a size."""
    from forebay.config.quantities import BYTES, parse_quantity

    size = parse_quantity(text, BYTES)
    if size is None or size < 1:
        raise UsageError(f"{option} is {text[:40]!r}; it must be a size such as {example}")
    return int(size)


def log_to_stderr(level: str, log_format: str) -> None:
    """Writes the library's log lines to stderr until the command ends.

    In JSON, the lines of other libraries and Python's warnings too.
    """
    handler = logging.StreamHandler()
    logger = logging.getLogger("forebay")
    listening = logger
    if log_format == "json":
        from forebay.cli.json_stderr import write_json_lines
        from forebay.logs import JsonFormatter

        write_json_lines()
        handler.setFormatter(JsonFormatter())
        listening = logging.getLogger()
        logging.captureWarnings(capture=True)
    else:
        handler.setFormatter(logging.Formatter("forebay: %(message)s"))
    before = logger.level
    listening.addHandler(handler)
    logger.setLevel(level.upper())

    def end() -> None:
        listening.removeHandler(handler)
        logger.setLevel(before)
        if log_format == "json":
            logging.captureWarnings(capture=False)

    click.get_current_context().call_on_close(end)


# ---- the server that a command goes through ----


url_option = click.option(
    "--url",
    metavar="URL",
    help="A running server, such as http://127.0.0.1:8650.  [default: the server that runs on the "
    "data directory, if there is one]",
)


def chosen_server(settings: StoreSettings, url: str | None) -> ServerAddress | None:
    """The server to use, or None if the command opens the data directory itself.

    UsageError if `url` is not an http or https URL.
    """
    if url is None:
        if settings.data is None or not (Path(settings.data) / SERVER_FILE).exists():
            return None  # without importing the client, which is slow
        from forebay.client.address import find_server

        return find_server(settings)
    from forebay.client.address import known_token

    try:
        parts = urlsplit(url)
        right = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:
        right = False
    if not right:
        raise UsageError(f"--url is {url[:80]!r}; it must be like http://127.0.0.1:8650")
    return ServerAddress(url, None, known_token(settings), settings.admin.ca_file)


def connected(address: ServerAddress, *, timeout_seconds: float = 60) -> ServerClient:
    """A client that accepts only the store that the server at the address serves now."""
    from forebay.client.http import ServerClient

    client = ServerClient(address, timeout_seconds=timeout_seconds)
    client.pin()
    return client


@contextmanager
def client_of(server: ServerAddress, *, timeout_seconds: float = 60) -> Iterator[ServerClient]:
    """A client of the server; a refused token raises an error that says how to set one."""
    with connected(server, timeout_seconds=timeout_seconds) as client:
        try:
            yield client
        except ServiceRefused as error:
            raise refused_token(error, server) from error


def refused_token(error: ServiceRefused, address: ServerAddress) -> ServiceRefused:
    """The error to raise: for a 401, one that says how to set the token; else `error` itself."""
    if vars(error).get("status") != 401:
        return error
    brought = "requires a token" if address.token is None else "does not accept the token"
    return ServiceRefused(
        f"the server at {address.url} {brought}: set admin.token in the configuration, or "
        "FOREBAY_TOKEN"
    )
