"""`forebay bench`: the benchmarks as commands. Each imports what it needs when it is run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from forebay.limits import MIB

_directory = click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where to write; it must be on a real disk. Default: a temporary directory here.",
)


def _number(
    option: str, default: int, least: int, most: int, about: str | None = None
) -> Callable[[Any], Any]:
    kind = click.IntRange(least, most)
    return click.option(option, default=default, show_default=True, type=kind, help=about)


def _rounds(default: int) -> Callable[[Any], Any]:
    return _number("--rounds", default, 1, 1000)


def _output(command: Any) -> Any:
    """Adds --json and --plot."""
    as_json = click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
    plot = click.option(
        "--plot",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        help="Also draw the figures, as SVG files in this directory.",
    )
    return as_json(plot(command))


def _report(
    run: Callable[..., dict[str, Any]], *, as_json: bool, plot: Path | None, **options: Any
) -> None:
    """Runs a benchmark with the options of its command, and shows the result."""
    from forebay.bench.measure import show
    from forebay.bench.plot import require_matplotlib

    if plot is not None:
        require_matplotlib()  # before minutes of measuring, not after
    show(run(**options, progress=not as_json), as_json=as_json, plot=plot)


@click.group()
def bench() -> None:
    """The benchmarks whose numbers the documents quote."""


@bench.command("wal")
@_directory
@_rounds(5)
@_number("--mib", 64, 1, 65536, "How much each bulk measurement moves in a round.")
@click.option(
    "--memory/--no-memory",
    default=False,
    show_default=True,
    help="Also measure memory at 1 and 10 million messages (about a minute).",
)
@_output
def bench_wal(**options: Any) -> None:
    """Compares appends and reads of a topic with plain system calls on the same bytes.

    \b
    Examples:
      forebay bench wal
      forebay bench wal --dir /mnt/disk/tmp --rounds 9 --json > wal.json
      forebay bench wal --plot plots/
    """
    from forebay.bench.wal import run

    _report(run, **options)


@bench.command("tier")
@_directory
@_rounds(3)
@_number("--mib", 256, 1, 65536, "The size of the object that is uploaded and read.")
@_number("--message-bytes", 1024, 1, MIB, "The payload of each message in it.")
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A configuration whose object store is measured too, below a new prefix that is deleted "
    "afterwards.",
)
@_output
def bench_tier(**options: Any) -> None:
    """Uploads and cold reads, beside the same client doing the same with the same bytes.

    On local disk, and on the object store of a configuration: as it is, and with 30 ms before each
    request. And how much of its speed a producer keeps while a history is read.

    \b
    Examples:
      forebay bench tier
      forebay bench tier --config forebay.yml
      forebay bench tier --mib 64 --rounds 5 --json > tier.json
    """
    from forebay.bench.tier import run

    _report(run, **options)


@bench.command("pulsar")
@_directory
@_rounds(3)
@_number("--mib", 256, 1, 65536, "The size of the ledger that is offloaded and read.")
@_number("--message-bytes", 1024, 1, MIB, "The payload of each message in it.")
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A configuration whose object store is measured too, below a new prefix that is deleted "
    "afterwards.",
)
@click.option(
    "--spark/--no-spark",
    default=True,
    show_default=True,
    help="Also read a ledger with Spark, beside the format forebay over the same messages.",
)
@_output
def bench_pulsar(**options: Any) -> None:
    """Offloads ledgers of Pulsar and reads them, beside the same client with the same bytes.

    On local disk, and on the object store of a configuration. And how much faster eight readers of
    one ledger are than one of them, with 30 ms before each request.

    \b
    Examples:
      forebay bench pulsar
      forebay bench pulsar --config forebay.yml
      forebay bench pulsar --mib 64 --rounds 5 --json > pulsar.json
    """
    from forebay.pipeline.session import require_packages

    if options["spark"]:
        require_packages()
    from forebay.bench.pulsar import run

    _report(run, **options)


@bench.command("spark")
@_directory
@_rounds(5)
@_number("--mib", 1024, 16, 65536, "How much is read in a round, for each message size.")
@_number("--topics", 100, 1, 10_000, "How many topics of 20 MB are offloaded in a round.")
@_output
def bench_spark(**options: Any) -> None:
    """Compares the pipeline with what the same Spark does without it.

    `spark.read` is compared with batches made in advance and with Parquet, offload with two
    processes, and verify with a bare read. Planning is measured over 100,000 objects.

    \b
    Examples:
      forebay bench spark
      forebay bench spark --mib 256 --topics 20 --rounds 3 --json > spark.json
    """
    from forebay.pipeline.session import require_packages

    require_packages()
    from forebay.bench.spark import run

    _report(run, **options)


@bench.command("http")
@_directory
@_rounds(5)
@_number(
    "--requests",
    800,
    4,
    1_000_000,
    "How many each of the two servers gets in a round, with 256 messages of 1 KiB each.",
)
@click.option(
    "--follow-seconds",
    default=5.0,
    show_default=True,
    type=click.FloatRange(0.1, 3600),
    help="How long a stream is followed in a round, at 1,000 messages a second.",
)
@_output
def bench_http(**options: Any) -> None:
    """Compares `forebay serve` with a bare HTTP service that only reads the same bodies.

    Also measures how long a message takes from its producer to a reader that follows the topic.

    \b
    Examples:
      forebay bench http
      forebay bench http --dir /mnt/disk/tmp --rounds 9 --json > http.json
    """
    from forebay.bench.http import run

    _report(run, **options)


@bench.command("broker")
@_directory
@_rounds(5)
@_number("--messages", 4000, 8, 1_000_000, "How many are sent with 8 in flight in a round.")
@click.option(
    "--seconds",
    default=3.0,
    show_default=True,
    type=click.FloatRange(0.01, 60),
    help="How long delays are measured in a round, at 1,000 messages a second.",
)
@_output
def bench_broker(**options: Any) -> None:
    """Compares the broker with a bare gRPC service, both with Danube's client.

    Sends with 1, 8 and 64 in flight, consumes with acknowledgements, and measures how long a
    message takes to its consumer; with messages acknowledged synced, and buffered.

    \b
    Examples:
      forebay bench broker
      forebay bench broker --dir /mnt/disk/tmp --rounds 9 --json > broker.json
    """
    from forebay.bench.broker import run

    _report(run, **options)


@bench.command("tuning")
@_directory
@_rounds(3)
@_number("--mib", 64, 1, 65536, "How much a point of a sweep moves at most.")
@_output
def bench_tuning(**options: Any) -> None:
    """Measures the effect of settings: producers, batches, sizes, syncs, objects, read-ahead.

    One setting at a time is varied, with all others at their defaults. It takes about a minute.

    \b
    Examples:
      forebay bench tuning --plot plots/
      forebay bench tuning --rounds 5 --json > tuning.json
    """
    from forebay.bench.tuning import run

    _report(run, **options)


@bench.command("catalog")
@_directory
@_rounds(5)
@_number("--objects", 200_000, 1000, 10_000_000, "How many descriptors the long topic has.")
@_number("--few", 1000, 200, 100_000, "How many descriptors the short topic has.")
@click.option(
    "--etcd",
    metavar="HOST:PORT",
    help="Measure on this etcd too; it keeps the topics, below new prefixes.",
)
@_output
def bench_catalog(**options: Any) -> None:
    """Compares operations in a topic with few and in one with very many objects.

    Opens the topic, uploads and reads one message, describes the topic, and plans a scan in the
    middle. Writing 200,000 descriptors takes a few minutes.

    \b
    Examples:
      forebay bench catalog
      forebay bench catalog --etcd 127.0.0.1:2379 --json > catalog.json
    """
    from forebay.bench.catalog import run

    _report(run, **options)


@bench.command("plot")
@click.argument("results", nargs=-1, required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("plots"),
    show_default=True,
    metavar="DIR",
    help="Where the SVG files go.",
)
def bench_plot(results: tuple[Path, ...], out: Path) -> None:
    """Draws what `--json` printed in an earlier run.

    \b
    Examples:
      forebay bench wal --json > wal.json
      forebay bench plot wal.json --out plots/
    """
    from forebay.bench.plot import read_result, write_plots

    for path in results:
        for written in write_plots(read_result(path), out):
            click.echo(written)
