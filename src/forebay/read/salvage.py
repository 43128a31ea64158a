"""Where an object can be read on after damage: for readers that were told to step over it.

Looked for in this order: right behind the damaged frame, if the length in its header leads to the
next offset; at every byte up to the next entry of the index, for a whole valid frame of a later
offset; at that entry, and so on to the end of the object.

What a caller gets wrong: everything between is lost to the reader, and a payload that holds
copies of this topic's frames can be taken for frames. It is for rescue, not for every day.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Final

from forebay.format.descriptor import ObjectDescriptor
from forebay.format.frame import HEADER_BYTES, End, frame_bytes, frame_candidates, scan
from forebay.format.layout import Buffer
from forebay.limits import FRAME_PAYLOAD_BYTES_MAX, FRAME_PAYLOAD_BYTES_MIN

FRAME_BYTES_MIN: Final = HEADER_BYTES + FRAME_PAYLOAD_BYTES_MIN

Read = Callable[[int, int], Buffer]
"""The bytes `start..end` of the object."""


def next_frame(
    descriptor: ObjectDescriptor, offset: int, position: int, read: Read, window_bytes: int
) -> tuple[int, int] | None:
    """(offset, position) of the first valid frame behind the damage; None if there is none.

    The damage is at `position`, where the frame of `offset` should be.
    """
    index = descriptor.offset_index or ()
    behind = _behind(descriptor, offset, position, read)
    if behind is not None:
        return behind
    while position < descriptor.size:
        at = bisect_right(index, offset, key=lambda entry: entry[0])
        limit = index[at] if at < len(index) else (descriptor.next_offset, descriptor.size)
        if limit[1] > position:
            for found in _candidates(offset, position, limit, read, window_bytes):
                if _valid(descriptor, *found, read):
                    return found
            if at < len(index) and _valid(descriptor, *limit, read):
                return limit
            position = limit[1]
        offset = limit[0]
        if at >= len(index):
            break
    return None


def _behind(
    descriptor: ObjectDescriptor, offset: int, position: int, read: Read
) -> tuple[int, int] | None:
    """The frame that the damaged one's length leads to, if it is the next one."""
    if position + HEADER_BYTES > descriptor.size or offset >= descriptor.end_offset:
        return None
    size = frame_bytes(read(position, position + HEADER_BYTES), 0) or 0
    if not FRAME_BYTES_MIN <= size <= HEADER_BYTES + FRAME_PAYLOAD_BYTES_MAX:
        return None
    found = offset + 1, position + size
    return found if _valid(descriptor, *found, read) else None


def _candidates(
    offset: int, position: int, limit: tuple[int, int], read: Read, window_bytes: int
) -> Iterator[tuple[int, int]]:
    """Where a header of an offset after `offset` and before the limit may be, window by window."""
    last_offset, end = limit[0] - 1, limit[1]
    if last_offset <= offset:
        return
    step = max(window_bytes - HEADER_BYTES + 1, 1)
    for start in range(position, end - FRAME_BYTES_MIN + 1, step):
        window = read(start, min(start + step + HEADER_BYTES - 1, end))
        for at in frame_candidates(window, offset + 1, last_offset):
            found = scan(memoryview(window)[at : at + HEADER_BYTES]).offset
            if found is not None:
                yield found, start + at


def _valid(descriptor: ObjectDescriptor, offset: int, position: int, read: Read) -> bool:
    """Whether a whole frame of that offset is there."""
    if position + FRAME_BYTES_MIN > descriptor.size or offset > descriptor.end_offset:
        return False
    size = frame_bytes(read(position, position + HEADER_BYTES), 0) or 0
    if (
        not FRAME_BYTES_MIN
        <= size
        <= min(descriptor.size - position, HEADER_BYTES + FRAME_PAYLOAD_BYTES_MAX)
    ):
        return False
    return scan(read(position, position + size), expected=offset).end is End.COMPLETE
