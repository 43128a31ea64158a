"""A scan from its options to its record batches: the snapshot is planned once, then read in parts.

Nothing here knows Spark. `plan_scan` is for whoever hands out the work, `read_split` for whoever
does it; between the two a split travels as it is.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forebay.errors import MissingData, UsageError
from forebay.limits import MIB
from forebay.logs import event
from forebay.pipeline.address import NO_DATA
from forebay.pipeline.options import ScanOptions
from forebay.pipeline.scan import in_parts, scan_split
from forebay.pipeline.scan_pieces import Piece, Split, splits
from forebay.pipeline.scan_plan import OffsetRange, plan_topic, recut, resolve_range
from forebay.pipeline.scan_times import offset_at_time
from forebay.pipeline.workbench import Workbench, workbench
from forebay.settings import StoreSettings
from forebay.topic.view import StoreView, TopicView

if TYPE_CHECKING:
    import pyarrow as pa

_log: Final = logging.getLogger("forebay.pipeline")
BATCH_BYTES: Final = 1 * MIB
"""Of one Arrow batch, about. Larger ones are not faster in Spark, and their memory is given back to
the system each time, whose fresh pages cost more than the copying."""
_TRIES: Final = 3
"""Of a plan; retention removes a segment hours after its upload, not again and again."""


def plan_scan(options: ScanOptions) -> list[Split]:
    """What there is of the options' topics now, as far as it is synced, in tasks."""
    for _ in range(_TRIES):
        try:
            with without_collections():
                return _plan_once(options)
        except FileNotFoundError as error:  # of a segment that was uploaded and removed meanwhile
            gone = error
    raise MissingData(f"segments vanish faster than they are planned: {gone}") from gone


@contextmanager
def without_collections() -> Iterator[None]:
    """A plan is up to some hundred thousand small values and no cycle: looking for cycles among
    them again and again took a quarter of the time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _plan_once(options: ScanOptions) -> list[Split]:
    with open_view(options.settings) as store:
        topics = options.chosen(store.topics())
        for name, offsets in (
            ("startingOffsets", options.starting),
            ("endingOffsets", options.ending),
        ):
            offsets.require_named(name, topics)
        views = {topic: store.topic(str(topic)) for topic in topics}
        pieces: list[Piece] = []
        for view in views.values():
            pieces += _plan_view(view, options)
        planned = splits(
            pieces,
            options.split_bytes,
            options.partitions_min,
            lambda piece, size: recut(views[piece.topic], piece, size),
        )
    event(
        _log,
        logging.INFO,
        "scan planned",
        topics=len(topics),
        pieces=len(pieces),
        splits=len(planned),
        messages=sum(split.count for split in planned),
        bytes=sum(split.size for split in planned),
    )
    return planned


def open_view(settings: StoreSettings) -> StoreView:
    """UsageError where no store is."""
    data = settings.data
    if data is not None and Path(data) != NO_DATA and not Path(data).is_dir():
        raise UsageError(f"there is no store at {data}: it is no directory")
    return StoreView(settings)


def range_of(bench: Workbench, view: TopicView, options: ScanOptions) -> OffsetRange:
    """The offsets of the topic that the options ask for."""
    start, end = options.starting.of(view.topic), options.ending.of(view.topic)
    assert start is not None, "named partitions were checked"
    assert end is not None
    if options.starting_time is not None:
        start = offset_at_time(bench, view, options.starting_time)
    if options.ending_time is not None:
        end = offset_at_time(bench, view, options.ending_time)
    return resolve_range(view, start, end, fail_on_data_loss=options.fail_on_data_loss)


def _plan_view(view: TopicView, options: ScanOptions) -> list[Piece]:
    wanted = range_of(workbench(options.settings), view, options)
    return plan_topic(
        view,
        wanted.start,
        wanted.end,
        split_bytes=options.split_bytes,
        fail_on_data_loss=options.fail_on_data_loss,
    )


def read_split(
    settings: StoreSettings, split: Split, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """The rows of the split, a part of a chunk at a time."""
    from forebay.pipeline.scan_columns import BatchMaker

    make = BatchMaker(columns).batch
    for topic, frames in scan_split(workbench(settings), split):
        for part in in_parts(frames, BATCH_BYTES):
            yield make(topic, part)
            del part
        del frames
