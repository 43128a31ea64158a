"""Sparse indexes: where in a segment or an object to start looking for an offset.

Both are lists of (offset, position). `SegmentIndex` has at most one entry for every
`SEGMENT_INDEX_BYTES`. It is in memory while its segment grows, and is written beside the segment
when that is sealed, with the highest publish time of its messages
(`docs/formats/segment-index.md`). `ObjectIndex` has an entry after a number of messages or bytes,
whichever comes first (1,000 and 1 MiB by default), and is stored in the object's descriptor. If it
gets too many entries, every second one is removed and both intervals double. The entries of a
compressed object are blocks.

Beware: an index is a hint. Always validate the frames from the entry on. If the index of a segment
is missing, damaged or for another size, build it again.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Final
from zlib import crc32

from forebay.format.content import MessageSurvey
from forebay.format.descriptor import Index
from forebay.format.frame import HEADER_BYTES, Scan
from forebay.limits import (
    OBJECT_INDEX_BYTES,
    OBJECT_INDEX_ENTRIES_MAX,
    OBJECT_INDEX_MESSAGES,
    SEGMENT_INDEX_BYTES,
    SEGMENT_INDEX_ENTRIES_MAX,
)

_HEADER: Final = struct.Struct("<8sQII")
_MAGIC: Final = b"FBINDX02"
_MAGIC_WITHOUT_TIME: Final = b"FBINDX01"
_TIME: Final = struct.Struct("<Q")
_TIME_UNKNOWN: Final = 2**64 - 1


class SegmentIndex:
    """The index of one segment. One thread may add while others read."""

    __slots__ = ("highest_publish_time", "offsets", "positions")

    def __init__(self, highest_publish_time: int | None = None) -> None:
        """Pass 0 if `survey` will see every message of the segment."""
        self.offsets = array("Q")
        self.positions = array("Q")
        self.highest_publish_time = highest_publish_time
        """Of all messages, in milliseconds; None if it is not known."""

    def survey(self, frames: Scan) -> None:
        """Counts the publish times of the next messages of the segment."""
        known = self.highest_publish_time
        if known is not None:
            survey = MessageSurvey()
            survey.add(frames)
            highest = survey.highest_publish_time
            self.highest_publish_time = None if highest is None else max(known, highest)

    def add(self, offset: int, position: int) -> None:
        """Adds the frame at `position` if it is far enough from the last entry. Call in order."""
        if not self.positions or position - self.positions[-1] >= SEGMENT_INDEX_BYTES:
            # In this order, a reader that sees an offset also finds its position.
            self.positions.append(position)
            self.offsets.append(offset)

    def seek(self, offset: int) -> tuple[int, int]:
        """The last (offset, position) at or before `offset`; ValueError if there is none."""
        at = bisect_right(self.offsets, offset) - 1
        if at < 0:
            raise ValueError(f"offset {offset} is before the segment")
        return self.offsets[at], self.positions[at]

    def floor(self, offset: int, position: int) -> tuple[int, int]:
        """The last (offset, position) with neither beyond the given one, or the first entry."""
        at = min(bisect_right(self.offsets, offset), bisect_right(self.positions, position)) - 1
        return self.offsets[max(at, 0)], self.positions[max(at, 0)]

    def __len__(self) -> int:
        return len(self.offsets)


def encode_index(index: SegmentIndex, segment_bytes: int) -> bytes:
    highest = index.highest_publish_time
    time = _TIME.pack(_TIME_UNKNOWN if highest is None else highest)
    body = time + _little(index.offsets) + _little(index.positions)
    check = crc32(body, crc32(struct.pack("<QI", segment_bytes, len(index))))
    return _HEADER.pack(_MAGIC, segment_bytes, len(index), check) + body


def index_segment_bytes(data: bytes) -> int | None:
    """The size of the segment that the index is for; None if `data` is not an index."""
    if len(data) < _HEADER.size or data[: len(_MAGIC)] not in {_MAGIC, _MAGIC_WITHOUT_TIME}:
        return None
    return int(_HEADER.unpack_from(data)[1])


def decode_index(data: bytes, segment_bytes: int) -> SegmentIndex | None:
    """Decodes the index of a segment of `segment_bytes`; None if `data` is anything else."""
    if len(data) < _HEADER.size:
        return None
    magic, size, count, check = _HEADER.unpack_from(data)
    if magic not in {_MAGIC, _MAGIC_WITHOUT_TIME} or size != segment_bytes:
        return None
    body = data[_HEADER.size :]
    begin = _TIME.size if magic == _MAGIC else 0
    if not 0 < count <= SEGMENT_INDEX_ENTRIES_MAX or len(body) != begin + 16 * count:
        return None
    if crc32(body, crc32(struct.pack("<QI", size, count))) != check:
        return None
    highest = _TIME.unpack_from(body)[0] if begin else _TIME_UNKNOWN
    index = SegmentIndex(None if highest == _TIME_UNKNOWN else highest)
    index.offsets.frombytes(body[begin : begin + 8 * count])
    index.positions.frombytes(body[begin + 8 * count :])
    if sys.byteorder == "big":
        index.offsets.byteswap()
        index.positions.byteswap()
    return index


def _little(values: array[int]) -> bytes:
    if sys.byteorder == "big":
        values = array("Q", values)
        values.byteswap()
    return values.tobytes()


class ObjectIndex:
    """The index of an object that is being written.

    `entries` are those so far, if an earlier cycle began the object.
    """

    __slots__ = (
        "_bytes",
        "_indexed_raw",
        "_messages",
        "_next_offset",
        "_next_position",
        "_raw",
        "entries",
    )

    def __init__(
        self,
        entries: Iterable[tuple[int, int]] = (),
        *,
        every_messages: int = OBJECT_INDEX_MESSAGES,
        every_bytes: int = OBJECT_INDEX_BYTES,
    ) -> None:
        self.entries: list[tuple[int, int]] = list(entries)
        self._messages = every_messages
        self._bytes = every_bytes
        self._raw = self._indexed_raw = 0
        self._expect()

    def add(self, frames: Scan, position: int) -> None:
        """Adds entries for scanned frames; the first of them is at `position` in the object."""
        if not len(frames):
            return
        first = frames.offsets[0]
        start = frames.positions[0] - HEADER_BYTES
        at = 0
        while True:
            # The next entry is the first frame after either interval.
            by_bytes = self._next_position - position + start + HEADER_BYTES
            at = max(
                at,
                min(
                    max(self._next_offset - first, 0),
                    bisect_left(frames.positions, max(by_bytes, 0)),
                ),
            )
            if at >= len(frames):
                return
            self._append(first + at, position + frames.positions[at] - HEADER_BYTES - start)
            at += 1

    def add_block(self, offset: int, messages: int, raw_bytes: int, position: int) -> None:
        """Adds an entry for the block at `position` of a compressed object. Call in order.

        There is none if the interval of the entry before reaches to the end of this block. The
        interval counts bytes before compression.
        """
        within_messages = self.entries and offset + messages <= self._next_offset
        if not (within_messages and self._raw + raw_bytes - self._indexed_raw <= self._bytes):
            self._append(offset, position)
            self._indexed_raw = self._raw
        self._raw += raw_bytes

    def frozen(self) -> Index:
        return tuple(self.entries)

    def _append(self, offset: int, position: int) -> None:
        self.entries.append((offset, position))
        if len(self.entries) > OBJECT_INDEX_ENTRIES_MAX:
            del self.entries[1::2]
            self._messages *= 2
            self._bytes *= 2
        self._expect()

    def _expect(self) -> None:
        offset, position = self.entries[-1] if self.entries else (0, 0)
        self._next_offset = offset + self._messages if self.entries else 0
        self._next_position = position + self._bytes if self.entries else 0
