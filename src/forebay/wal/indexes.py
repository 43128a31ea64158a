"""Indexes of sealed segments, loaded when a reader starts in the middle of one.

A bounded number of them is kept, most recently used first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from forebay.files.disk import Disk
from forebay.format.names import SegmentNames
from forebay.format.segment_index import SegmentIndex
from forebay.limits import SEGMENT_INDEXES_MAX
from forebay.wal.chunks import load_index
from forebay.wal.segment import Segment


class SegmentIndexes:
    def __init__(self, disk: Disk, names: SegmentNames) -> None:
        self._disk = disk
        self._names = names
        self._lock = threading.Lock()
        self._known: OrderedDict[int, SegmentIndex] = OrderedDict()

    def seek(self, segment: Segment, offset: int) -> tuple[int, int]:
        """An (offset, position) at or before `offset`, close to it."""
        if offset == segment.first_offset:
            return offset, 0
        return (segment.index or self._sealed(segment)).seek(offset)

    def floor(self, segment: Segment, offset: int, position: int) -> tuple[int, int]:
        """The last known (offset, position) that is at most at both."""
        index = segment.index or self._sealed(segment)
        return index.floor(offset, position)

    def _sealed(self, segment: Segment) -> SegmentIndex:
        with self._lock:
            index = self._known.get(segment.seq)
            if index is not None:
                self._known.move_to_end(segment.seq)
                return index
        path = segment.path.with_name(self._names.index(segment.seq))
        index = load_index(self._disk, segment.path, path, segment.first_offset)
        with self._lock:
            self._known[segment.seq] = index
            while len(self._known) > SEGMENT_INDEXES_MAX:
                self._known.popitem(last=False)
        return index
