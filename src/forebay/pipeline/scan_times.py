"""The first offset that was published at a time or later, found by looking at few messages.

Times are taken to ascend with the offsets, which they do as far as producers' clocks do. First
the object or the segment is found that the time falls into, then the interval of its index, each
by the first message's time; only that interval is read through.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from forebay.format.message import message_columns
from forebay.limits import KIB
from forebay.pipeline.scan import first_frames, scan_pieces
from forebay.pipeline.scan_pieces import Piece
from forebay.pipeline.scan_plan import plan_topic
from forebay.pipeline.workbench import Workbench
from forebay.topic.view import TopicView

_FINE_BYTES: Final = 64 * KIB
"""Pieces of this size are as small as any index allows."""


def offset_at_time(bench: Workbench, view: TopicView, time_ms: int) -> int:
    """The first offset of the view with a publish time of `time_ms` or later, else its end.

    Offsets that are lost have no time: the first one behind them counts.
    """
    pieces = plan_topic(view, view.start_offset, view.end_offset, fail_on_data_loss=False)
    at = bisect_left(pieces, time_ms, key=lambda piece: _first_time(bench, piece))
    after = pieces[at].first if at < len(pieces) else view.end_offset
    if at == 0:
        return after
    before = pieces[at - 1]
    fine = plan_topic(view, before.first, before.next, split_bytes=_FINE_BYTES)
    at = bisect_left(fine, time_ms, key=lambda piece: _first_time(bench, piece))
    inside = None if at == 0 else _offset_inside(bench, fine[at - 1], time_ms)
    if inside is not None:
        return inside
    return fine[at].first if at < len(fine) else after


def _first_time(bench: Workbench, piece: Piece) -> int:
    return int(message_columns(first_frames(bench, piece)).publish_times[0])


def _offset_inside(bench: Workbench, piece: Piece, time_ms: int) -> int | None:
    for frames in scan_pieces(bench, [piece]):
        times = message_columns(frames).publish_times
        for row, time in enumerate(times):
            if time >= time_ms:
                return int(frames.offsets[row])
    return None
