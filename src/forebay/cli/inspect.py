"""`forebay inspect`: prints the contents of one file of a store."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from forebay.cli.options import json_option, plain_errors


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--limit",
    default=20,
    show_default=True,
    type=click.IntRange(0),
    help="How many frames, entries of a ledger, index entries or topics to print.",
)
@json_option
@plain_errors
def inspect(path: Path, limit: int, as_json: bool) -> None:
    """Prints the contents of one file of a store.

    PATH is a segment or an object (its frames are printed), a descriptor, a checkpoint, a published
    position, a segment index, the id of a log, the address file or the job file of a server, the
    catalog, or the data object or the index object of a ledger that Pulsar offloaded (its blocks
    and entries are printed). Any other file is an error. Exit code 1 if a frame or an entry is
    damaged.

    \b
    Examples:
      forebay inspect data/wal/default/orders/wal.log
      forebay inspect data/wal/default/orders/wal.ckpt --json
      forebay inspect data/catalog.db
    """
    from forebay.inspect import inspect as look

    damaged = False
    for facts in look(path, limit=limit):
        damaged = damaged or facts.get("damaged", False)
        if as_json:
            click.echo(json.dumps(facts))
        else:
            kind = facts.pop("type")
            click.echo(
                f"{kind}: " + ", ".join(f"{name}={value!r}" for name, value in facts.items())
            )
    if damaged:
        sys.exit(1)
