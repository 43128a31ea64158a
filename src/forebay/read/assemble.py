"""Frames out of the chunks of one object: scanned where they lie, joined only where a cut is.

Fed the chunks in order, cut anywhere. The frames inside a chunk are scanned in the chunk's own
buffer; the one frame that straddles a cut is copied into a buffer of its own, which is never
larger than that frame. Pure: it fetches nothing.

What a caller gets wrong: a scan holds the whole chunk alive for as long as it is held.
"""

from __future__ import annotations

from typing import NamedTuple

from forebay.format.frame import HEADER_BYTES, End, Scan, frame_bytes, scan
from forebay.format.layout import Buffer


class Damage(NamedTuple):
    """Why an object cannot be read on, and where."""

    reason: str
    position: int
    offset: int


class FrameAssembler:
    """The frames of one object from (`offset`, `position`) on; nothing lies beyond `size`."""

    __slots__ = ("_carry", "_filled", "_size", "damage", "offset", "position")

    def __init__(self, offset: int, position: int, size: int) -> None:
        self.offset = offset
        """Of the next frame."""
        self.position = position
        """Of the next frame, in the object."""
        self.damage: Damage | None = None
        """Once it is set, nothing more is decoded."""
        self._size = size
        self._carry = bytearray()
        self._filled = 0

    @property
    def pending(self) -> int:
        """Bytes of a frame that is not yet whole."""
        return self._filled

    def feed(self, chunk: Buffer) -> list[Scan]:
        """The frames that the chunk completes, in order: at most two pieces, none empty."""
        found: list[Scan] = []
        at = 0
        if self._filled:
            at = self._fill(chunk)
            if self.damage is not None or self._filled < len(self._carry) or not at:
                return found
            straddling = self._carry
            self._drop()
            found += self._accept(scan(straddling, expected=self.offset, consecutive=True), 0)
        if self.damage is None and at < len(chunk):
            inside = scan(chunk, at, expected=self.offset, consecutive=True)
            found += self._accept(inside, at)
            if inside.end is End.TORN:
                self._begin(memoryview(chunk)[inside.safe_length :])
        return found

    def require_end(self, next_offset: int | None) -> None:
        """Notes damage unless the bytes ended with a frame, the one before `next_offset`."""
        if self.damage is not None:
            return
        if self._filled:
            self._damaged("the bytes end inside a frame")
        elif next_offset is not None and self.offset != next_offset:
            self._damaged(f"the next frame should have offset {next_offset}")

    def _accept(self, found: Scan, at: int) -> list[Scan]:
        """Moves on behind the scanned frames; `at` is where the scan began."""
        self.position += found.safe_length - at
        self.offset += len(found)
        if found.end.corrupt:
            self._damaged(found.end.describe())
        return [found] if len(found) else []

    def _begin(self, head: memoryview) -> None:
        """Carries the start of a frame that goes on in the next chunk."""
        self._carry = bytearray(max(len(head), HEADER_BYTES))
        self._carry[: len(head)] = head
        self._filled = len(head)
        self._expect()

    def _expect(self) -> None:
        """Once the header is there: makes room for the frame, if there can be such a frame."""
        if self._filled < HEADER_BYTES:
            return
        size = frame_bytes(self._carry, 0) or 0
        if self.position + size > self._size:
            self._damaged("the object ends inside a frame")
            return
        whole = bytearray(size)
        whole[: self._filled] = memoryview(self._carry)[: self._filled]
        self._carry = whole

    def _fill(self, chunk: Buffer) -> int:
        """Adds to the carried frame; answers how much of the chunk it took."""
        at = 0
        view = memoryview(chunk)
        if self._filled < HEADER_BYTES:
            at = self._take(view, 0, HEADER_BYTES)
            if self._filled < HEADER_BYTES:
                return at
            header = scan(self._carry, expected=self.offset, consecutive=True)
            if header.end.corrupt:
                self._damaged(header.end.describe())
                return at
            self._expect()
            if self.damage is not None:
                return at
        return self._take(view, at, len(self._carry))

    def _take(self, view: memoryview, at: int, wanted: int) -> int:
        stop = min(at + wanted - self._filled, len(view))
        self._carry[self._filled : self._filled + stop - at] = view[at:stop]
        self._filled += stop - at
        return stop

    def _damaged(self, reason: str) -> None:
        self.damage = Damage(reason, self.position, self.offset)
        self._drop()

    def _drop(self) -> None:
        self._carry = bytearray()
        self._filled = 0
