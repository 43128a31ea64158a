"""`forebay completion`: the script that makes a shell complete commands and options."""

from __future__ import annotations

import click

from forebay.cli.options import plain_errors


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
@plain_errors
def completion(context: click.Context, shell: str) -> None:
    """Prints the script that completes commands and options in SHELL.

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
