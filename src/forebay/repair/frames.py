"""Finds runs of valid frames in damaged files and objects, and combines them.

A run is a sequence of adjacent frames with consecutive offsets, each checked. `find_runs` finds all
runs of one file or object; it searches after damage with `forebay.format.resync`. `cover`, which
does no I/O, chooses the runs for a range of offsets, and returns the offsets that no run has.

A run is *sure* if it begins at the start of its file, with the offset that belongs there. A run
that was found after damage, or in the wrong file, may be part of a payload. It is used only where
there is no sure run, and only if no other run has different frames for its offsets (`contested`).

Beware: a run is a position in a file, not a copy. After the file was rewritten, search again.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from forebay.errors import CorruptLog, LedgerError, MessageError
from forebay.files.disk import Disk, read_range
from forebay.format.blocks import (
    BLOCK_HEADER_BYTES,
    BlockError,
    BlockHeader,
    blocks_of,
    decompress,
)
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.frame import FRAME_BYTES_MIN, HEADER_BYTES
from forebay.format.layout import Buffer
from forebay.format.message import decode_message
from forebay.format.pulsar.blocks import decode_block_header
from forebay.format.pulsar.frames import EntryAssembler
from forebay.format.pulsar.resync import next_place_in_ledger
from forebay.format.resync import FrameSearch, OffsetPosition
from forebay.limits import MIB
from forebay.objects.store import CloudStore
from forebay.wal.segment import ChunkReader

_SEARCH_BYTES: Final = 1 * MIB
"""Bytes to read at a time when a block is searched for."""


class FrameBytes(Protocol):
    """The bytes of a file or an object, with the methods of a `ReadFile`."""

    @property
    def name(self) -> str: ...

    def read_into(self, buffer: memoryview, position: int) -> int: ...

    def size(self) -> int: ...

    def close(self) -> None: ...


class FileBytes:
    """A local file. It is opened for each read, so a survey of many files keeps none open."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self.path = path
        self._size = disk.size(path)

    @property
    def name(self) -> str:
        return str(self.path)

    def read_into(self, buffer: memoryview, position: int) -> int:
        with closing(self._disk.open_read(self.path)) as file:
            return file.read_into(buffer, position)

    def size(self) -> int:
        return self._size

    def close(self) -> None: ...


class ObjectBytes:
    """An object in the store, read by range requests."""

    def __init__(self, store: CloudStore, key: str) -> None:
        self._store = store
        self._key = key
        self._size = store.head(key).size

    @property
    def name(self) -> str:
        return self._key

    def read_into(self, buffer: memoryview, position: int) -> int:
        end = min(position + len(buffer), self._size)
        if end <= position:
            return 0
        data = self._store.get_range(self._key, position, end)
        buffer[: end - position] = memoryview(data).cast("B")
        return end - position

    def size(self) -> int:
        return self._size

    def close(self) -> None: ...


class BlockBytes:
    """The frames of a compressed object, as if they were a file.

    A block that is damaged leaves zeros, which are no frames. Blocks whose headers are damaged are
    left out. One decompressed block is in memory.
    """

    def __init__(self, store: CloudStore, key: str, descriptor: ObjectDescriptor) -> None:
        self._stored = ObjectBytes(store, key)
        self._blocks: list[tuple[int, int, BlockHeader]] = []
        """Position among the frames, position in the object, and header."""
        self._last: tuple[int, bytes] | None = None
        self._size = 0
        read = partial(read_range, self._stored)
        whole = replace(descriptor, size=self._stored.size())
        for at, header in blocks_of(whole, read, _SEARCH_BYTES):
            self._blocks.append((self._size, at, header))
            self._size += header.raw_bytes

    @property
    def name(self) -> str:
        return self._stored.name

    def read_into(self, buffer: memoryview, position: int) -> int:
        filled = 0
        number = bisect_right(self._blocks, position, key=lambda block: block[0]) - 1
        while filled < len(buffer) and 0 <= number < len(self._blocks):
            frames = self._frames(number)
            begin = position + filled - self._blocks[number][0]
            piece = memoryview(frames)[begin : begin + len(buffer) - filled]
            buffer[filled : filled + len(piece)] = piece
            filled += len(piece)
            number += 1
        return filled

    def size(self) -> int:
        return self._size

    def close(self) -> None: ...

    def _frames(self, number: int) -> bytes:
        if self._last is None or self._last[0] != number:
            _, at, header = self._blocks[number]
            start = at + BLOCK_HEADER_BYTES
            try:
                stored = read_range(self._stored, start, start + header.stored_bytes)
                frames = decompress(header, stored)
            except BlockError:
                frames = bytes(header.raw_bytes)
            self._last = number, frames
        return self._last[1]


class LedgerBytes:
    """The frames of a ledger, as if they were a file.

    Entries that are damaged are left out, and so are blocks whose headers are. The frames of one
    block are in memory.
    """

    def __init__(self, store: CloudStore, key: str, descriptor: ObjectDescriptor) -> None:
        self._stored = ObjectBytes(store, key)
        self._descriptor = descriptor
        self._last: tuple[int, bytes] | None = None
        self._blocks: list[tuple[int, int]] = []
        """Position among the frames, and position in the object."""
        self._size = 0
        self._stored_size = self._stored.size()
        for at in range(0, self._stored_size, descriptor.block_bytes):
            self._blocks.append((self._size, at))
            self._size += len(self._frames(len(self._blocks) - 1))

    @property
    def name(self) -> str:
        return self._stored.name

    def read_into(self, buffer: memoryview, position: int) -> int:
        filled = 0
        number = bisect_right(self._blocks, position, key=lambda block: block[0]) - 1
        while filled < len(buffer) and 0 <= number < len(self._blocks):
            frames = self._frames(number)
            begin = position + filled - self._blocks[number][0]
            piece = memoryview(frames)[begin : begin + len(buffer) - filled]
            buffer[filled : filled + len(piece)] = piece
            filled += len(piece)
            number += 1
        return filled

    def size(self) -> int:
        return self._size

    def close(self) -> None: ...

    def _frames(self, number: int) -> bytes:
        if self._last is None or self._last[0] != number:
            at = self._blocks[number][1]
            end = min(at + self._descriptor.block_bytes, self._stored_size)
            self._last = number, self._decoded(read_range(self._stored, at, end), at)
        return self._last[1]

    def _decoded(self, block: Buffer, begin: int) -> bytes:
        said, found = self._descriptor, bytearray()
        start = said.start_offset
        try:
            first = decode_block_header(block).first_entry_id
        except LedgerError:
            return b""
        place: OffsetPosition | None = (start + first, begin)
        end = begin + len(block)
        while place is not None and place[1] < end:
            offset, at = place
            entries = EntryAssembler(offset, at, self._stored_size, start, said.block_bytes)
            for frames in entries.feed(memoryview(block)[at - begin :]):
                found += frames.raw
            damage = entries.corruption
            if damage is None:
                break
            place = next_place_in_ledger(
                (start, said.next_offset),
                self._stored_size,
                said.block_bytes,
                said.offset_index or (),
                (damage.offset, damage.position),
                partial(read_range, self._stored),
                _SEARCH_BYTES,
            )
        return bytes(found)


def frames_in_object(store: CloudStore, key: str, descriptor: ObjectDescriptor) -> FrameBytes:
    """The frames of an object, encoded or not. Raises ObjectMissing if it does not exist."""
    if descriptor.is_ledger:
        return LedgerBytes(store, key, descriptor)
    if descriptor.codec is None:
        return ObjectBytes(store, key)
    return BlockBytes(store, key, descriptor)


@dataclass(frozen=True, slots=True)
class FrameRun:
    """Frames with the offsets `first..end`, at the positions `start..stop` of their source."""

    source: FrameBytes
    first: int
    end: int
    start: int
    stop: int
    sure: bool = False


class FrameSlice(NamedTuple):
    """The offsets `first..end` of a run."""

    run: FrameRun
    first: int
    end: int


Hole = tuple[int, int]
"""A range of offsets, end not included."""


def offsets_max(size: int) -> int:
    """Returns an upper bound of the number of frames in `size` bytes."""
    return size // FRAME_BYTES_MIN + 1


def find_runs(
    source: FrameBytes, expected: int | None, bound: int, topic: str | None = None
) -> tuple[FrameRun, ...]:
    """Returns all runs, in order of position.

    The first frame should have the offset `expected`, if that is known. No frame has the offset
    `bound` or a later one. After damage only frames of `topic` are accepted, because a payload may
    contain frames of another topic. It may even contain frames of this topic, so a run does not
    restrict which offsets are searched for after it.
    """
    runs: list[FrameRun] = []
    position, damaged = 0, -1 if expected is None else expected
    run = _walk(source, 0, expected)
    if run is not None and run.first < bound:
        runs.append(replace(run, sure=expected is not None))
        position, damaged = run.stop, run.end
    search = FrameSearch(partial(read_range, source), source.size())
    while position < search.size:
        found = search.after(damaged, position, bound - 1)
        if found is None:
            break
        offset, position = found
        if not is_of(source, position, topic):
            position += 1
            continue
        run = _walk(source, position, offset)
        assert run is not None, "the search has just read its first frame"
        runs.append(run)
        position = run.stop
    return tuple(runs)


def is_of(source: FrameBytes, position: int, topic: str | None) -> bool:
    """Whether the message in the valid frame at `position` names the topic. True for None."""
    if topic is None:
        return True
    found = ChunkReader(1).read(source, position, source.size(), None)
    try:
        message = decode_message(
            found.buffer, found.positions[0], found.lengths[0], offset=found.offsets[0]
        )
    except MessageError:
        return False
    return message.msg_id.topic_name == topic


def _walk(source: FrameBytes, start: int, expected: int | None) -> FrameRun | None:
    """Returns the run that begins at `start`, or None."""
    chunks = ChunkReader()
    size, position = source.size(), start
    first: int | None = None
    while position < size:
        found = chunks.read(source, position, size, expected)
        if not len(found):
            break
        first = found.offsets[0] if first is None else first
        expected = found.offsets[-1] + 1
        position += found.safe_length
        if found.end.corrupt:
            break
    if first is None or expected is None:
        return None
    return FrameRun(source, first, expected, start, position)


def cover(first: int, end: int, runs: Iterable[FrameRun]) -> tuple[list[FrameSlice], list[Hole]]:
    """Returns the slices of runs that hold `first..end`, in order, and the offsets in no run."""
    pieces: list[FrameSlice] = []
    holes: list[Hole] = []
    known = sorted(runs, key=lambda run: run.first)
    at = first
    while at < end:
        here = [run for run in known if run.first <= at < run.end]
        best = max(here, key=lambda run: (run.sure, run.end), default=None)
        stop = end if best is None else min(best.end, end)
        if best is None or not best.sure:
            better = (run.first for run in known if run.first > at and (run.sure or best is None))
            stop = min(stop, min(better, default=stop))
        if best is None:
            holes.append((at, stop))
        else:
            pieces.append(FrameSlice(best, at, stop))
        at = stop
    return pieces, holes


def contested(pieces: Sequence[FrameSlice], runs: Sequence[FrameRun]) -> Hole | None:
    """Returns offsets for which an unsure piece and another run have different frames, or None."""
    for piece in pieces:
        if piece.run.sure:
            continue
        for run in runs:
            first, end = max(piece.first, run.first), min(piece.end, run.end)
            if run is piece.run or first >= end:
                continue
            if _digest(FrameSlice(run, first, end)) != _digest(FrameSlice(piece.run, first, end)):
                return first, end
    return None


def _digest(piece: FrameSlice) -> bytes:
    found = hashlib.blake2b()
    for frames in frames_of([piece]):
        found.update(frames)
    return found.digest()


def frames_of(pieces: Sequence[FrameSlice]) -> Iterator[memoryview]:
    """Yields the raw frames of the pieces, checked again. A chunk is valid until the next one.

    Raises CorruptLog if a frame can no longer be read.
    """
    chunks = ChunkReader()
    for piece in pieces:
        position, expected = piece.run.start, piece.run.first
        while expected < piece.end:
            found = chunks.read(piece.run.source, position, piece.run.stop, expected)
            if not len(found):
                raise CorruptLog(
                    f"{piece.run.source.name}: offset {expected} was readable before, and is no "
                    "longer: check the disk or the object store"
                )
            low = max(piece.first - expected, 0)
            high = min(piece.end - expected, len(found))
            if low < high:
                begin = found.positions[low] - HEADER_BYTES
                stop = found.positions[high - 1] + found.lengths[high - 1]
                yield memoryview(found.buffer)[begin:stop]
            position += found.safe_length
            expected += len(found)
