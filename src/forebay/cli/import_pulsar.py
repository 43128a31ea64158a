"""`forebay import-pulsar`: the ledgers that Pulsar offloaded become topics of a store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from forebay.cli.job_options import (
    check_runner,
    lazy_session,
    master_option,
    progress_bar,
    runner_option,
)
from forebay.cli.options import json_option, print_report, store_options
from forebay.errors import UsageError
from forebay.settings import CloudSettings, StoreSettings

if TYPE_CHECKING:
    from forebay.pipeline.execute import Runner
    from forebay.pipeline.jobs.import_pulsar import PulsarImportReport, PulsarImportRow

_CONFIG_ENDINGS: Final = {".yml", ".yaml"}
_LATE_MAX: Final = 20
_COUNTS: Final = ("transactional", "encrypted", "large", "damaged", "marker", "incomplete")


@click.command("import-pulsar")
@click.argument("source", metavar="SOURCE")
@click.option(
    "--topic",
    "topics",
    multiple=True,
    metavar="TOPIC",
    help="Import this topic of Pulsar, such as orders or public/default/orders. May be repeated.  "
    "[default: all]",
)
@click.option("--pattern", metavar="REGEX", help="Import the topics that match.")
@click.option("--into", metavar="TOPIC", help="The topic of the store that one topic becomes.")
@click.option(
    "--store",
    "store_pairs",
    multiple=True,
    metavar="NAME=VALUE",
    help="An option of the bucket, such as endpoint=http://10.0.0.1:9000. May be repeated.",
)
@click.option("--apply", is_flag=True, help="Import. Without this option nothing is changed.")
@click.option(
    "--keep",
    multiple=True,
    type=click.Choice(["transactional", "encrypted"]),
    help="Import messages of transactions, which may have been aborted, or encrypted payloads, as "
    "they are. May be repeated.",
)
@click.option(
    "--leave-out",
    multiple=True,
    type=click.Choice(["transactional", "encrypted", "large", "damaged"]),
    help="Leave these out. Without a decision they stop the topic. May be repeated.",
)
@store_options
@json_option
@runner_option
@master_option
def import_pulsar(
    source: str,
    topics: tuple[str, ...],
    pattern: str | None,
    into: str | None,
    store_pairs: tuple[str, ...],
    apply: bool,
    keep: tuple[str, ...],
    leave_out: tuple[str, ...],
    settings: StoreSettings,
    as_json: bool,
    runner: Runner,
    master: str | None,
) -> None:
    """Imports the ledgers that Pulsar offloaded to the bucket SOURCE.

    SOURCE is a directory, s3://, gs:// or azure:// with bucket and prefix, or a configuration file
    whose storage.cloud names it. Nothing there is changed. Without --apply it reads everything and
    prints what an import would do. An import that was interrupted continues when it is run again,
    and a later one appends what was offloaded since. Exit code 1 if a topic is not imported whole.

    \b
    Examples:
      forebay import-pulsar s3://pulsar/offload
      forebay import-pulsar s3://pulsar/offload --topic orders --apply
      forebay import-pulsar /mnt/bucket --pattern 'public/.*' --leave-out encrypted --apply
    """
    from forebay.pipeline.session import require_packages

    check_runner(runner, master)
    if topics and pattern is not None:
        raise UsageError("give --topic or --pattern, not both")
    bucket = _bucket(source, store_pairs)
    require_packages()  # threads need Arrow too
    from forebay.pipeline.jobs.import_pulsar import import_pulsar as run

    with lazy_session(settings, master) as chosen, progress_bar("import-pulsar") as progress:
        report = run(
            chosen,
            bucket,
            topics,
            pattern=pattern,
            into=into,
            apply=apply,
            keep=keep,
            leave_out=leave_out,
            runner=runner,
            progress=progress,
        )
    print_report(_facts(report), _lines(report), as_json=as_json, ok=report.ok)


def _bucket(source: str, pairs: tuple[str, ...]) -> CloudSettings:
    from forebay.pipeline.pulsar.options import bucket_at

    options: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise UsageError(f"--store is {pair!r}; it must be NAME=VALUE")
        options[name] = value
    if Path(source).suffix.lower() not in _CONFIG_ENDINGS:
        return bucket_at(source, options)
    from forebay.config import load_config

    if options:
        raise UsageError(f"{source} already says where the bucket is: put --store into it")
    cloud = load_config(source).cloud
    if cloud.backend == "memory" or cloud.root is None:
        raise UsageError(f"{source}: storage.cloud does not say where Pulsar's bucket is")
    return bucket_at(cloud.root, {}) if cloud.backend == "fs" else cloud


def _facts(report: PulsarImportReport) -> dict[str, Any]:
    return {**asdict(report), "messages": report.messages, "ok": report.ok}


def _lines(report: PulsarImportReport) -> Iterator[str]:
    for row in report.rows:
        yield from _row_lines(row, applied=report.applied)
    failed = sum(row.error is not None for row in report.rows)
    done = "imported" if report.applied else "to import"
    yield f"{len(report.rows)} topics: {report.messages} messages {done}, {failed} with errors"
    if not report.applied:
        yield "nothing was changed; --apply imports"


def _row_lines(row: PulsarImportRow, *, applied: bool) -> Iterator[str]:
    into = "" if row.into is None else f" into {row.into}"
    yield (
        f"{row.topic}{into}: {row.messages} messages {'imported' if applied else 'to import'}; "
        f"{row.ledgers} ledgers, {row.known} of them imported before"
    )
    if row.repeated:
        yield f"  {row.repeated} messages were there from a run that was interrupted"
    counts = [(name, getattr(row, name)) for name in _COUNTS]
    found = ", ".join(f"{count} {name}" for name, count in counts if count)
    if found:
        yield f"  among them, or left out: {found}"
    if row.late:
        shown = ", ".join(map(str, row.late[:_LATE_MAX]))
        more = f" and {len(row.late) - _LATE_MAX} more" if len(row.late) > _LATE_MAX else ""
        yield (
            f"  not imported: the ledgers {shown}{more} appeared after later ones were imported; "
            "import the topic again --into another one, to have all messages in their order"
        )
    if row.error is not None:
        yield f"  error: {row.error}"
