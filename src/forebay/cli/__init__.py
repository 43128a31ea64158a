"""The command line. Errors that a user can act on are one line on stderr and exit code 2.

Commands that look for trouble (`describe`, `explain`, `inspect`, `sweep`, `verify`, `restore`) end
with exit code 1 when they find some. What a command needs is imported when it runs: `--help` is
quick.
"""

from __future__ import annotations

import click

from forebay.bench.commands import bench
from forebay.cli.compact import compact
from forebay.cli.configuration import config
from forebay.cli.export import export
from forebay.cli.files import inspect
from forebay.cli.messages import consume, produce
from forebay.cli.offload import offload, pipeline
from forebay.cli.options import log_to_stderr, plain_errors
from forebay.cli.replay import replay
from forebay.cli.restore import restore
from forebay.cli.topics import describe, explain, topics
from forebay.cli.upkeep import sweep
from forebay.cli.verify import verify

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="forebay", prog_name="forebay")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    default="warning",
    show_default=True,
    help="Log lines from this level on go to standard error.",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="How they look.",
)
def main(log_level: str, log_format: str) -> None:
    """Forebay, a tiered log store.

    Exit code 2 for what cannot be done as asked, 1 where something was found to be wrong.

    \b
    Examples:
      echo hello | forebay produce greetings
      forebay consume greetings --follow
      forebay --log-level info --log-format json sweep --dry-run
    """
    log_to_stderr(log_level, log_format)


_COMMANDS = (
    produce,
    consume,
    topics,
    describe,
    explain,
    offload,
    pipeline,
    compact,
    sweep,
    verify,
    restore,
    export,
    replay,
    inspect,
    config,
)
for _command in _COMMANDS:
    main.add_command(_command)

for _benchmark in bench.commands.values():
    assert _benchmark.callback is not None
    _benchmark.callback = plain_errors(_benchmark.callback)
main.add_command(bench)
