"""The command line: `main` is the group of all commands.

Exit codes:

    0    the command succeeded
    1    the command found a problem, or a part of its work failed; its output says which
    2    the command could not run; one line on stderr says what to do
    130  interrupted

Each command imports what it needs when it runs, so that `--help` is fast.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import click

from forebay import __version__
from forebay.bench.commands import bench
from forebay.cli.configuration import completion, config
from forebay.cli.export import export, replay
from forebay.cli.import_danube import import_danube
from forebay.cli.import_pulsar import import_pulsar
from forebay.cli.inspect import inspect
from forebay.cli.messages import consume, produce
from forebay.cli.offload import compact, offload, pipeline
from forebay.cli.offload_status import offload_status
from forebay.cli.options import log_to_stderr, plain_errors, say_error
from forebay.cli.schemas import schemas
from forebay.cli.subscriptions import subscriptions
from forebay.cli.topics import accept_loss, describe, explain, topics
from forebay.cli.up import demo, serve, up
from forebay.cli.upkeep import repair, restore, sweep, verify

__all__ = ["main"]


class _Commands(click.Group):
    """A group that prints a usage error as one line, like the errors of its commands."""

    def main(self, *args: Any, **extra: Any) -> Any:
        standalone = extra.pop("standalone_mode", True)
        run: Callable[[], Any] = partial(super().main, *args, **extra, standalone_mode=False)
        if not standalone:
            return run()
        try:
            code = run()
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(error.exit_code)
        except click.ClickException as error:
            words = " ".join(error.format_message().split())
            say_error(f"{words}{_help_hint(error)}", as_json=_wants_json(args, extra))
            sys.exit(error.exit_code)
        except click.Abort:
            sys.exit(130)
        sys.exit(code if isinstance(code, int) else 0)


def _wants_json(args: tuple[Any, ...], extra: dict[str, Any]) -> bool:
    """Whether the arguments ask for log lines in JSON, though they may not be valid otherwise."""
    given = args[0] if args else extra.get("args")
    words = list(sys.argv[1:] if given is None else given)
    return "--log-format=json" in words or ("--log-format", "json") in pairwise(words)


def _help_hint(error: click.ClickException) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    return "" if context is None else f" (see {context.command_path} --help)"


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="forebay")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    default="warning",
    show_default=True,
    help="Write log lines of this level and above to standard error.",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="The format of log lines.",
)
def main(log_level: str, log_format: str) -> None:
    """Forebay, a tiered log store.

    Exit code 1 means that a command found a problem, or that a part of its work failed. Exit code
    2 means that it could not run.

    \b
    Examples:
      echo hello | forebay produce greetings
      forebay consume greetings --follow
      forebay --log-level info --log-format json sweep --dry-run
    """
    log_to_stderr(log_level, log_format)


_COMMANDS = (
    up,
    serve,
    demo,
    produce,
    consume,
    topics,
    subscriptions,
    schemas,
    describe,
    explain,
    offload,
    offload_status,
    pipeline,
    compact,
    sweep,
    verify,
    restore,
    import_danube,
    import_pulsar,
    export,
    replay,
    inspect,
    repair,
    accept_loss,
    config,
    completion,
)
for _command in _COMMANDS:
    main.add_command(_command)

for _benchmark in bench.commands.values():
    assert _benchmark.callback is not None
    _benchmark.callback = plain_errors(_benchmark.callback)
main.add_command(bench)
