"""`forebay import-danube`: Danube's topics become topics of a store, with the same offsets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
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
from forebay.settings import CloudSettings, MetadataSettings, StoreSettings

if TYPE_CHECKING:
    from forebay.pipeline.execute import Runner
    from forebay.pipeline.jobs.import_danube import DanubeOrigin, ImportReport, ImportRow

_LINES_MAX: Final = 20
"""Places of each kind to print as text for each topic; --json has all."""
_CONFIG_ENDINGS: Final = {".yml", ".yaml"}


@click.command("import-danube")
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option(
    "--from",
    "bucket",
    metavar="SOURCE",
    help="Danube's bucket: a directory, s3://, gs:// or azure:// with bucket and prefix, or a "
    "configuration file whose storage.cloud names it.",
)
@click.option(
    "--wal",
    type=click.Path(file_okay=False, path_type=Path),
    help="Danube's WAL directory, with a directory for each namespace.",
)
@click.option(
    "--etcd",
    metavar="HOST:PORT,...",
    help="Danube's etcd, with the descriptors of its objects. It is only read.",
)
@click.option(
    "--etcd-prefix",
    metavar="PREFIX",
    help="The root of Danube's keys in etcd.  [default: /danube]",
)
@click.option("--apply", is_flag=True, help="Import. Without this option nothing is changed.")
@click.option("--skip-damage", is_flag=True, help="Leave damaged frames out.")
@click.option(
    "--allow-gaps", is_flag=True, help="Record offsets that no file holds as lost in the target."
)
@click.option(
    "--allow-conflicts",
    is_flag=True,
    help="Where two files hold different messages of an offset, keep that of the object, or of "
    "the older file.",
)
@store_options
@json_option
@runner_option
@master_option
def import_danube(
    topics: tuple[str, ...],
    bucket: str | None,
    wal: Path | None,
    etcd: str | None,
    etcd_prefix: str | None,
    apply: bool,
    skip_damage: bool,
    allow_gaps: bool,
    allow_conflicts: bool,
    settings: StoreSettings,
    as_json: bool,
    runner: Runner,
    master: str | None,
) -> None:
    """Imports topics of Danube, with their offsets.

    Imports the named topics, or all. Reads Danube's bucket, its WAL directory, or both, of v0.5.0
    and later, and changes nothing there. Without --apply it reads everything and prints what an
    import would do. An import that was interrupted continues when it is run again. A topic that
    the target has from elsewhere is refused. Exit code 1 if a topic cannot be imported.

    \b
    Examples:
      forebay import-danube --from s3://danube/data --wal /var/lib/danube/wal
      forebay import-danube --from s3://danube/data --wal /var/lib/danube/wal --apply
      forebay import-danube orders --from danube.yml --etcd 10.0.0.1:2379 --data data
    """
    from forebay.pipeline.jobs.import_danube import import_danube as run

    check_runner(runner, master)
    origin = _origin(bucket, wal, etcd, etcd_prefix)
    with lazy_session(settings, master) as chosen, progress_bar("import-danube") as progress:
        report = run(
            chosen,
            origin,
            topics or None,
            apply=apply,
            skip_damage=skip_damage,
            allow_gaps=allow_gaps,
            allow_conflicts=allow_conflicts,
            runner=runner,
            progress=progress,
        )
    print_report(_facts(report), _lines(report), as_json=as_json, ok=report.ok)


def _origin(
    bucket: str | None, wal: Path | None, etcd: str | None, prefix: str | None
) -> DanubeOrigin:
    from forebay.pipeline.jobs.import_danube import DanubeOrigin
    from forebay.pipeline.location import cloud_settings

    if bucket is None and wal is None:
        raise UsageError("name Danube's bucket with --from, its WAL directory with --wal, or both")
    cloud: CloudSettings | None = None
    metadata: MetadataSettings | None = None
    if bucket is not None and Path(bucket).suffix.lower() in _CONFIG_ENDINGS:
        from forebay.config import load_config

        found = load_config(bucket)
        cloud = found.cloud
        if cloud.backend == "memory" or (cloud.backend == "fs" and cloud.root is None):
            raise UsageError(f"{bucket}: storage.cloud does not say where Danube's bucket is")
        metadata = found.metadata if found.metadata.backend == "etcd" else None
    elif bucket is not None:
        cloud = cloud_settings(bucket, {})
    if cloud is not None and cloud.backend == "fs" and cloud.root is not None:
        cloud = replace(cloud, root=str(Path(cloud.root).absolute()))
    if etcd is not None:
        endpoints = tuple(
            each.strip().partition("://")[2] or each.strip() for each in etcd.split(",")
        )
        metadata = replace(
            metadata or MetadataSettings(), backend="etcd", endpoints=endpoints, prefix=prefix
        )
    elif metadata is not None:
        metadata = replace(metadata, prefix=prefix or metadata.prefix)
    elif prefix is not None:
        raise UsageError("--etcd-prefix needs --etcd")
    return DanubeOrigin(cloud, wal, metadata)


def _facts(report: ImportReport) -> dict[str, Any]:
    totals = {"messages": report.messages, "bytes": report.bytes, "ok": report.ok}
    return {**asdict(report), **totals}


def _lines(report: ImportReport) -> Iterator[str]:
    for row in report.rows:
        yield from _row_lines(row, applied=report.applied)
    for name in report.unknown[:_LINES_MAX]:
        yield f"not read, because it is not a file of Danube: {name}"
    if len(report.unknown) > _LINES_MAX:
        yield f"and {len(report.unknown) - _LINES_MAX} more files that were not read"
    failed = sum(row.error is not None for row in report.rows)
    done = "imported" if report.applied else "to import"
    new = sum(row.new_messages for row in report.rows if row.error is None)
    yield f"{len(report.rows)} topics: {new} messages {done}, {failed} topics with errors"
    if not report.applied:
        yield "nothing was changed; --apply imports"


def _row_lines(row: ImportRow, *, applied: bool) -> Iterator[str]:
    yield (
        f"{row.topic}: {row.messages} messages, {row.bytes} bytes, offsets {row.start_offset} to "
        f"{row.next_offset - 1}, from {row.objects} objects and {row.wal_files} WAL files"
    )
    if row.error is not None:
        yield f"  error: {row.error}"
    else:
        did = "imported into" if applied else "would be imported into"
        yield f"  {row.new_messages} {did} {row.new_objects} objects, {row.present} are there"
    if row.copies:
        yield f"  {row.copies} copies of messages in other files left out"
    if row.torn_bytes:
        yield f"  {row.torn_bytes} bytes of an incomplete last frame left out"
    if row.pending:
        yield f"  {row.pending} unfinished uploads of Danube left out"
    if row.undescribed:
        yield f"  {row.undescribed} objects without a descriptor in etcd"
    found = [f"missing: {name} has a descriptor, and is not in the bucket" for name in row.missing]
    yield from _some(found)
    yield from _some([f"gap: no file holds offsets {one} to {end - 1}" for one, end in row.gaps])
    yield from _some(
        [
            f"damaged: {one.file} at position {one.position}, {one.stop - one.position} bytes: "
            f"{one.reason}"
            for one in row.damage
        ]
    )
    yield from _some(
        [
            f"conflict: offsets {one.start} to {one.end - 1} differ in {one.kept} (kept) and "
            f"{one.dropped}"
            for one in row.conflicts
        ]
    )


def _some(lines: list[str]) -> Iterator[str]:
    for line in lines[:_LINES_MAX]:
        yield f"  {line}"
    if len(lines) > _LINES_MAX:
        yield f"  and {len(lines) - _LINES_MAX} more"
