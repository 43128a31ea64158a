"""The command line. Errors that a user can act on are one line and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

import click

from forebay.errors import ForebayError

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _plain_errors(command: Callable[_P, _R]) -> Callable[_P, _R]:
    """Turns errors that say what to do into one line on stderr and exit code 2."""

    @wraps(command)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return command(*args, **kwargs)
        except (ForebayError, OSError) as error:
            click.echo(f"forebay: {error}", err=True)
            sys.exit(2)

    return wrapped


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="forebay", prog_name="forebay")
def main() -> None:
    """Forebay, a tiered log store."""


@main.group()
def bench() -> None:
    """The benchmarks whose numbers the documents quote."""


@bench.command("wal")
@click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where to write; it must be on a real disk. Default: a temporary directory here.",
)
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1, 1000))
@click.option(
    "--mib",
    default=64,
    show_default=True,
    type=click.IntRange(1, 65536),
    help="How much each bulk measurement moves in a round.",
)
@click.option(
    "--memory/--no-memory",
    default=False,
    show_default=True,
    help="Also measure memory at 1 and 10 million messages (about a minute).",
)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
@_plain_errors
def bench_wal(directory: Path | None, rounds: int, mib: int, memory: bool, as_json: bool) -> None:
    """The write-ahead log, beside what this machine can do with the same bytes.

    \b
    Examples:
      forebay bench wal
      forebay bench wal --dir /mnt/disk/tmp --rounds 9 --json > wal.json
    """
    from forebay.bench import report
    from forebay.bench.wal import run

    results = run(directory, rounds=rounds, mib=mib, memory=memory, progress=not as_json)
    report.show(results, as_json=as_json)
