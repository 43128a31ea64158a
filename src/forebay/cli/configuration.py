"""`forebay config` and `forebay completion`: the configuration, and scripts for shells."""

from __future__ import annotations

import json

import click

from forebay.cli.options import json_option, plain_errors, store_options
from forebay.settings import StoreSettings


@click.group()
def config() -> None:
    """Shows the configuration, and all keys that it can have."""


@config.command()
@store_options
@json_option
def show(settings: StoreSettings, as_json: bool) -> None:
    """Prints the settings in effect, with defaults filled in and secrets hidden.

    Without --json, the output is a valid configuration file.

    \b
    Examples:
      forebay config show --config forebay.yml
      forebay config show --json
    """
    from forebay.config import describe

    found = describe(settings)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    import yaml

    click.echo(yaml.safe_dump(found, sort_keys=False, allow_unicode=True), nl=False)


@config.command()
def reference() -> None:
    """Prints a Markdown page that lists every key with its meaning and default.

    \b
    Examples:
      forebay config reference > configuration.md
    """
    from forebay.config.reference import render

    click.echo(render(), nl=False)


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
@plain_errors
def completion(context: click.Context, shell: str) -> None:
    """Prints a script that makes a shell complete commands and options.

    \b
    Examples:
      eval "$(forebay completion bash)"
      forebay completion zsh > ~/.zfunc/_forebay
      forebay completion fish > ~/.config/fish/completions/forebay.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None, "click knows these shells"
    root = context.find_root().command
    click.echo(kind(root, {}, "forebay", "_FOREBAY_COMPLETE").source(), nl=False)
