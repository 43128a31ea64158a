"""`undo_compaction`: the small objects take the place of the large one again.

Possible as long as no sweep has begun to delete one of them, which is `sweep_grace_minutes` after
the compaction. No data is moved, so no Spark is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from forebay.catalog.catalog import Catalog
from forebay.catalog.swap import replaced_descriptors, swap_back
from forebay.errors import CommitRefused, ForebayError, UsageError
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import TopicName
from forebay.limits import OFFSET_MAX
from forebay.logs import event
from forebay.pipeline.jobs.compact import known_topics, open_site
from forebay.pipeline.jobs.compact_report import OBJECTS, CompactReport, CompactRow
from forebay.pipeline.location import site_settings
from forebay.read.verify import looks_same
from forebay.settings import StoreSettings
from forebay.topic.resources import StoreResources

_log: Final = logging.getLogger("forebay.pipeline")


def undo_compaction(
    source: str | Path | StoreSettings,
    topic: str,
    object_id: str | None = None,
    *,
    dry_run: bool = False,
) -> CompactReport:
    """Takes back the compaction that made `object_id`, or all of the topic's, newest first.

    One that cannot be taken back any more is an error in the report: nothing of it is changed.
    """
    settings = site_settings(source)
    bench = open_site(settings)
    try:
        [name] = known_topics(bench.catalog, [topic])
        rows: list[CompactRow] = []
        tried: set[str] = set()
        if object_id is not None:
            rows.append(_undo(bench, name, _named(bench.catalog, name, object_id), dry_run))
        else:
            while wanted := [
                each for each in _compacted(bench.catalog, name) if each.object_id not in tried
            ]:
                tried.update(each.object_id for each in wanted)
                rows += [_undo(bench, name, each, dry_run) for each in wanted]
        return CompactReport(tuple(rows), dry_run)
    finally:
        bench.close()


def _named(catalog: Catalog, topic: TopicName, object_id: str) -> ObjectDescriptor:
    for each in catalog.all_descriptors(topic):
        if each.object_id == object_id:
            return each
    raise UsageError(f"{topic}: {object_id!r} is not among its objects")


def _compacted(catalog: Catalog, topic: TopicName) -> Iterator[ObjectDescriptor]:
    """The objects of the chain that replaced others of which something is left."""
    by = {kept.by for kept in replaced_descriptors(catalog, topic, 0, OFFSET_MAX)}
    if by:
        yield from (each for each in catalog.all_descriptors(topic) if each.object_id in by)


def _undo(
    bench: StoreResources, topic: TopicName, compacted: ObjectDescriptor, dry_run: bool
) -> CompactRow:
    start, end = compacted.start_offset, compacted.next_offset
    kept = [
        each.descriptor
        for each in replaced_descriptors(bench.catalog, topic, start, end)
        if each.by == compacted.object_id
    ]
    error: str | None = None
    try:
        for each in kept:
            looks_same(bench.store, topic, each)
        if sum(each.count for each in kept) != compacted.count:
            left = "the objects that it replaced are deleted" if kept else "it replaced no others"
            raise CommitRefused(f"{topic}: {compacted.object_id} cannot be taken apart: {left}")
        if not dry_run:
            swap_back(bench.catalog, topic, compacted.object_id, clock=bench.clock)
            OBJECTS.add(1, "undone")
            event(
                _log,
                logging.INFO,
                "compaction undone",
                topic=topic,
                object=compacted.object_id,
                objects=len(kept),
            )
    except ForebayError as refused:
        error = str(refused)
    return CompactRow(
        str(topic),
        compacted.object_id,
        len(kept),
        compacted.start_offset,
        compacted.end_offset,
        compacted.count,
        compacted.size,
        None,
        None,
        error,
    )
