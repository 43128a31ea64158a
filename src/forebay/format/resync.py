"""The next valid frame after damage: for recovery, for readers that skip damage, and for repair.

Frames carry no marker, so a search tries every byte position whose 16 bytes could be a header of a
wanted offset, and checks the whole frame there. The bytes come through a callable, a window at a
time; a search holds one window and one frame at most.

What a caller gets wrong: a payload may contain frames, of this topic too, and a search inside a
damaged frame finds them. Use what it finds as evidence (recovery refuses to cut), or for rescue
that was asked for, never on the ordinary way of a read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from forebay.format import pure
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.frame import (
    FRAME_BYTES_MAX,
    FRAME_BYTES_MIN,
    HEADER_BYTES,
    frame_bytes,
    frame_candidates,
    scan,
)
from forebay.format.layout import FIXED, VARINT, Buffer, MalformedError, readers, span
from forebay.limits import KIB, READ_CHUNK_BYTES

ReadAt = Callable[[int, int], Buffer]
"""The bytes `start..end` of a file or an object, fewer only where it ends."""

OffsetPosition = tuple[int, int]
"""Offset and position of a frame."""

_HEAD_BYTES: Final = 4 * KIB
"""More than the header, the numbers, the topic and the broker of any message take."""


class SearchTooLong(Exception):
    """More bytes would have to be hashed than the search was allowed."""


def next_frame(
    descriptor: ObjectDescriptor, offset: int, position: int, read: ReadAt, window_bytes: int
) -> OffsetPosition | None:
    """Where a reader of an object goes on after damage; see `FrameSearch.after`."""
    search = FrameSearch(read, descriptor.size, window_bytes)
    return search.after(offset, position, descriptor.end_offset, descriptor.offset_index or ())


@dataclass(slots=True)
class FrameSearch:
    """A search for valid frames in the `size` bytes behind `read`."""

    read: ReadAt
    size: int
    window_bytes: int = READ_CHUNK_BYTES
    hash_bytes_max: int | None = None
    """If it is set, `between` takes only frames whose message repeats the frame's offset, which
    spares hashing megabytes for each plausible header in a payload full of numbers, and raises
    SearchTooLong once frames of more bytes than this were checked."""

    def after(
        self, offset: int, position: int, last: int, index: Sequence[OffsetPosition] = ()
    ) -> OffsetPosition | None:
        """The first valid frame after the damage at `position`, where `offset` should be.

        Its offset is in `offset + 1 .. last`. It is looked for where the length of the damaged
        frame leads, if that is the next offset; then at every byte up to the next entry of the
        index; at that entry; and so on to the end.
        """
        if offset < last and (size := self._claimed_bytes(position)) is not None:
            following = offset + 1, position + size
            if self.is_frame(*following):
                return following
        entries = index[bisect_right(index, offset, key=lambda entry: entry[0]) :]
        for next_offset, stop in (*entries, (last + 1, self.size)):
            if stop > position:
                for found in self.between(position, stop, offset + 1, next_offset - 1):
                    return found
                if next_offset <= last and self.is_frame(next_offset, stop):
                    return next_offset, stop
                position = stop
            offset = next_offset
        return None

    def between(self, start: int, stop: int, first: int, last: int) -> Iterator[OffsetPosition]:
        """All valid frames of offsets `first..last` whose whole header lies in `start..stop`."""
        hashed = 0
        while first <= last and stop - start >= HEADER_BYTES:
            window = memoryview(self.read(start, min(start + self._step + HEADER_BYTES - 1, stop)))
            for at in frame_candidates(window, first, last):
                offset, length, _ = pure.HEADER.unpack_from(window, at)
                if self.hash_bytes_max is not None:
                    if not self._repeats_offset(window[at:], start + at):
                        continue
                    hashed += length
                    if hashed > self.hash_bytes_max:
                        raise SearchTooLong
                frame = window[at : at + HEADER_BYTES + length]
                cut = len(frame) < HEADER_BYTES + length
                if self.is_frame(offset, start + at) if cut else len(scan(frame, expected=offset)):
                    yield offset, start + at
            start += self._step

    @property
    def _step(self) -> int:
        """Windows overlap by a header less a byte, so that no header is cut by their border."""
        return max(self.window_bytes - HEADER_BYTES + 1, 1)

    def is_frame(self, offset: int | None, position: int) -> bool:
        """Whether a whole valid frame is at `position`, of that offset if one is given."""
        size = self._claimed_bytes(position)
        if size is None or size > self.size - position:
            return False
        return len(scan(self.read(position, position + size), expected=offset)) == 1

    def _claimed_bytes(self, position: int) -> int | None:
        """The size of the frame at `position` by its header, if a frame can have that."""
        if position + FRAME_BYTES_MIN > self.size:
            return None
        size = frame_bytes(self.read(position, position + HEADER_BYTES), 0) or 0
        return size if FRAME_BYTES_MIN <= size <= FRAME_BYTES_MAX else None

    def _repeats_offset(self, window: memoryview, position: int) -> bool:
        """Whether the head of the frame looks like a message with a copy of the frame's offset."""
        offset, length, _ = pure.HEADER.unpack_from(window)
        if length > self.size - position - HEADER_BYTES:
            return False
        head = window[:_HEAD_BYTES]
        if len(head) < _HEAD_BYTES:
            head = memoryview(self.read(position, min(position + _HEAD_BYTES, self.size)))
        end = min(len(head), HEADER_BYTES + length)
        return any(_offset_in_message(head, end, flavour) == offset for flavour in (FIXED, VARINT))


def _offset_in_message(frame: memoryview, end: int, flavour: int) -> int | None:
    """The copy of the offset, which follows two numbers, the topic and the broker."""
    u64, _ = readers(flavour)
    try:
        _, at = u64(frame, HEADER_BYTES, end)
        _, at = u64(frame, at, end)
        _, at = span(frame, at, end, u64)
        _, at = span(frame, at, end, u64)
        return u64(frame, at, end)[0]
    except MalformedError:
        return None
