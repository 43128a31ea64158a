"""Finds the next valid frame after damage, for recovery, for lenient readers and for repair.

Frames have no marker. So a search tries every byte position whose 16 bytes could be the header of a
wanted offset, and checks the whole frame there. It reads through a callable, a window at a time,
and holds at most one window and one frame.

Beware: a payload may itself contain valid frames, even of the same topic, and a search inside a
damaged frame finds them. Use the result as evidence (recovery then refuses to cut) or where a user
asked to skip damage, never in an ordinary read.
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
"""(start, end) -> those bytes of a file or an object; fewer only if it ends before `end`."""

OffsetPosition = tuple[int, int]
"""Offset and position of a frame."""

_HEAD_BYTES: Final = 4 * KIB
"""More than the frame header and all fields up to the offset of any message need."""


class SearchTooLong(Exception):
    """The search would have to hash more than `hash_bytes_max`."""


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
    hash_bytes_max: int | None = None
    """If set, `between` accepts only frames whose message repeats the frame's offset, and raises
    SearchTooLong once it has hashed this many bytes. Otherwise a payload full of numbers could make
    it hash megabytes for each plausible header."""

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
                for found in self.between(position, stop, offset + 1, next_offset - 1):
                    return found
                if next_offset <= last and self.is_frame(next_offset, stop):
                    return next_offset, stop
                position = stop
            offset = next_offset
        return None

    def between(self, start: int, stop: int, first: int, last: int) -> Iterator[OffsetPosition]:
        """Yields the valid frames with offsets `first..last` whose header lies in `start..stop`."""
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
        """Windows overlap by one byte less than a header, so that every header is whole in one."""
        return max(self.window_bytes - HEADER_BYTES + 1, 1)

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

    def _repeats_offset(self, window: memoryview, position: int) -> bool:
        """Whether the frame seems to hold a message that repeats the frame's offset."""
        offset, length, _ = pure.HEADER.unpack_from(window)
        if length > self.size - position - HEADER_BYTES:
            return False
        head = window[:_HEAD_BYTES]
        if len(head) < _HEAD_BYTES:
            head = memoryview(self.read(position, min(position + _HEAD_BYTES, self.size)))
        end = min(len(head), HEADER_BYTES + length)
        return any(_offset_in_message(head, end, flavour) == offset for flavour in (FIXED, VARINT))


def _offset_in_message(frame: memoryview, end: int, flavour: int) -> int | None:
    """The offset inside the message, which follows two numbers, the topic and the broker."""
    u64, _ = readers(flavour)
    try:
        _, at = u64(frame, HEADER_BYTES, end)
        _, at = u64(frame, at, end)
        _, at = span(frame, at, end, u64)
        _, at = span(frame, at, end, u64)
        return u64(frame, at, end)[0]
    except MalformedError:
        return None
