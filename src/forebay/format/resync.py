"""Finds the next valid frame after damage, for recovery, for lenient readers and for repair.

Frames have no marker. So a search tries every byte position whose 16 bytes could be the header of a
wanted offset, and checks the whole frame there. It reads through a callable, a window at a time. A
window grows up to four times the size of the largest frame that a header in it claims, and to
128 MiB at most. No byte is read more than a few times, whatever the headers claim, and the work is
linear in the bytes searched.

Beware: a payload may itself contain valid frames, even of the same topic, and a search inside a
damaged frame finds them. Use the result as evidence (recovery then refuses to cut) or where a user
asked to skip damage, never in an ordinary read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from forebay.format import pure
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.frame import (
    FRAME_BYTES_MAX,
    FRAME_BYTES_MIN,
    HEADER_BYTES,
    find_frames,
    frame_bytes,
    scan,
)
from forebay.format.layout import FIXED, VARINT, Buffer, message_head
from forebay.limits import KIB, READ_CHUNK_BYTES

ReadAt = Callable[[int, int], Buffer]
"""(start, end) -> those bytes of a file or an object; fewer only if it ends before `end`."""

OffsetPosition = tuple[int, int]
"""Offset and position of a frame."""


class FrameExtent(NamedTuple):
    """Positions of one frame."""

    payload: int
    payload_end: int
    end: int


_HEAD_BYTES: Final = 4 * KIB
"""More than the frame header and all fields up to the offset of any message need."""


def next_frame(
    descriptor: ObjectDescriptor, offset: int, position: int, read: ReadAt, window_bytes: int
) -> OffsetPosition | None:
    """The frame at which a reader of an object continues after damage: see `FrameSearch.after`."""
    search = FrameSearch(read, descriptor.size, window_bytes)
    return search.after(offset, position, descriptor.end_offset, descriptor.offset_index or ())


@dataclass(slots=True)
class FrameSearch:
    """A search for valid frames in a file or an object of `size` bytes."""

    read: ReadAt
    size: int
    window_bytes: int = READ_CHUNK_BYTES
    messages_only: bool = False
    """If set, `between` yields only frames whose message repeats the frame's offset. Among millions
    of plausible headers one may have the right CRC by chance."""

    def after(
        self, offset: int, position: int, last: int, index: Sequence[OffsetPosition] = ()
    ) -> OffsetPosition | None:
        """The first valid frame after the damage at `position`, where `offset` was expected.

        Its offset is in `offset + 1 .. last`; None if there is no such frame. It tries, in this
        order: the position after the damaged frame, by that frame's length; every byte up to the
        next index entry; that entry; and so on to the end.
        """
        if offset < last and (size := self._claimed_bytes(position)) is not None:
            following = offset + 1, position + size
            if self.is_frame(*following):
                return following
        entries = index[bisect_right(index, offset, key=lambda entry: entry[0]) :]
        for next_offset, stop in (*entries, (last + 1, self.size)):
            if stop > position:
                for found in self.between(position, stop, offset + 1, next_offset - 1, limit=1):
                    return found
                if next_offset <= last and self.is_frame(next_offset, stop):
                    return next_offset, stop
                position = stop
            offset = next_offset
        return None

    def between(
        self, start: int, stop: int, first: int, last: int, *, limit: int = 0
    ) -> Iterator[OffsetPosition]:
        """Yields the valid frames with offsets `first..last` whose header lies in `start..stop`.

        Ends after `limit` frames, 0 for no limit.
        """
        window_bytes, reach = max(self.window_bytes, HEADER_BYTES), stop
        while first <= last and stop - start >= HEADER_BYTES:
            window = memoryview(self.read(start, min(start + window_bytes, reach)))
            headers_end = min(stop - start, len(window)) - HEADER_BYTES + 1
            found, resume = find_frames(
                window,
                headers_end,
                total=self.size - start,
                first=first,
                last=last,
                messages_only=self.messages_only,
                limit=limit,
            )
            for offset, at in found:
                yield offset, start + at
            if found and limit:
                return
            if resume < headers_end:
                # The window cuts a frame. The next one begins with it. If the frame fills more
                # than half of it, windows double: so each either doubles or moves on by a half.
                reach, claimed = self.size, frame_bytes(window, resume) or 0
                if 2 * claimed > window_bytes:
                    window_bytes = min(2 * max(window_bytes, claimed), 2 * FRAME_BYTES_MAX)
            start += resume

    def is_frame(self, offset: int | None, position: int) -> bool:
        """Whether there is a whole valid frame at `position`, with `offset` if that is given."""
        size = self._claimed_bytes(position)
        if size is None or size > self.size - position:
            return False
        return len(scan(self.read(position, position + size), expected=offset)) == 1

    def _claimed_bytes(self, position: int) -> int | None:
        """The size of the frame at `position` according to its header; None if impossible."""
        if position + FRAME_BYTES_MIN > self.size:
            return None
        size = frame_bytes(self.read(position, position + HEADER_BYTES), 0) or 0
        return size if FRAME_BYTES_MIN <= size <= FRAME_BYTES_MAX else None

    def extent(self, offset: int, position: int) -> FrameExtent | None:
        """Where the frame at `position` and its payload end, if its header and message agree.

        The header must have `offset`, the message must repeat it, and the payload must be inside
        the frame. The lengths of frame and payload are stored apart, so that damage to one of them
        does not extend the payload into the next frame. The CRC is not checked, and the bytes may
        end before the payload does.
        """
        size = self._claimed_bytes(position)
        if size is None:
            return None
        head = memoryview(self.read(position, min(position + _HEAD_BYTES, self.size)))
        if pure.HEADER.unpack_from(head)[0] != offset:
            return None
        for flavour in (FIXED, VARINT):
            end = min(len(head), size)
            repeated, payload = message_head(head, HEADER_BYTES, end, flavour)
            if repeated != offset or payload is None:
                continue
            if payload.position + payload.length <= size:
                start = position + payload.position
                return FrameExtent(start, start + payload.length, position + size)
        return None
