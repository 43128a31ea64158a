"""Danube's objects and WAL files as a source: what they hold, and which frames an import takes.

    list_bucket, list_wal   the files of every topic
    inspect                 reads one file whole: its runs of consecutive frames, and its damage
    lay_out                 decides, without I/O, which run gives which offsets
    DanubeSource            reads the chosen frames for the upload engine

Names and checkpoints are not trusted. Danube wrote offsets again after a restart, wrote frames of
several producers out of order, and put frames into other files than its checkpoint says. Only the
frames count: each has its offset and a checksum, and its message repeats the offset. A *run* is a
stretch of frames in a file whose offsets follow each other.

Nothing is ever written to the source. Memory is bounded by a few blocks and the largest frame,
besides the runs of all files of a topic.
"""

from __future__ import annotations

import socket
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

from forebay.errors import (
    CorruptFrame,
    CorruptLog,
    ServiceRefused,
    UsageError,
)
from forebay.files.disk import Disk, ReadFile, read_range
from forebay.format import codec
from forebay.format.content import ContentHash
from forebay.format.danube import OTHER_WAL_FILES, parse_bucket_key
from forebay.format.frame import (
    FRAME_BYTES_MIN,
    HEADER_BYTES,
    FrameDecoder,
    Scan,
    frame_bytes,
)
from forebay.format.layout import Buffer, locate
from forebay.format.names import TOPICS_PREFIX, SegmentNames, TopicName, is_topic, parse_topic
from forebay.format.resync import FrameSearch, ReadAt
from forebay.limits import IMPORT_RUNS_MAX, MIB, OFFSET_MAX
from forebay.objects.backend import Backend
from forebay.settings import UploaderSettings
from forebay.upload.plan import Extent, PlannedObject

BLOCK_BYTES: Final = 4 * MIB
_BLOCKS_KEPT: Final = 3
"""Frames of several producers may be out of order, but only by a little."""
_READERS_KEPT: Final = 4

Range: TypeAlias = tuple[int, int]
"""Offsets from the first to before the second."""
FileKind: TypeAlias = Literal["object", "wal"]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """An object or a WAL file of one topic."""

    topic: TopicName
    kind: FileKind
    name: str
    """The key of the object, or the path of the WAL file."""
    size: int
    etag: str | None = None
    order: tuple[int, int] = (0, 0)
    """Files of one kind are taken in this order."""
    newest: bool = False
    """Whether it is the WAL file that was written last. It may end inside a frame."""
    folder: str = "objects"

    @property
    def short_name(self) -> str:
        return self.name.rpartition("/")[2]


@dataclass(slots=True)
class Listing:
    """The files of all topics, and what else was found beside them."""

    topics: dict[TopicName, list[SourceFile]] = field(default_factory=dict)
    pending: dict[TopicName, int] = field(default_factory=dict)
    """Uploads that Danube did not finish. Their messages are in the WAL, or in another object."""
    unknown: list[str] = field(default_factory=list)
    """Files that are not Danube's. They are not read."""

    def add(self, file: SourceFile) -> None:
        self.topics.setdefault(file.topic, []).append(file)

    @property
    def size(self) -> int:
        return sum(file.size for files in self.topics.values() for file in files)


def list_bucket(store: Backend, listing: Listing) -> None:
    """Adds the objects of all topics. Raises UsageError if Forebay has written to the bucket."""
    for meta in store.list(TOPICS_PREFIX):
        found = parse_bucket_key(meta.key)
        if found is not None and found.of_forebay:
            raise UsageError(
                f"{store.name} is a store of Forebay, not of Danube, as {meta.key} shows: "
                "`forebay restore` rebuilds its catalog"
            )
        named = None if found is None else found.object
        if found is not None and found.pending:
            listing.pending[found.topic] = listing.pending.get(found.topic, 0) + 1
        elif found is None or named is None or named.start > OFFSET_MAX:
            listing.unknown.append(meta.key)
        else:
            listing.add(
                SourceFile(
                    found.topic,
                    "object",
                    meta.key,
                    meta.size,
                    meta.etag,
                    named,
                    folder=found.folder,
                )
            )


def list_wal(disk: Disk, root: Path, listing: Listing) -> None:
    """Adds the WAL files of all topics. Raises UsageError if `root` is no directory."""
    names = SegmentNames()
    for namespace in _directories(disk, root):
        for topic in _directories(disk, root / namespace):
            if not is_topic(f"/{namespace}/{topic}"):
                listing.unknown.append(str(root / namespace / topic))
                continue
            directory = root / namespace / topic
            found: dict[int, Path] = {}
            for name in disk.list_dir(directory):
                seq = names.parse(name)
                if seq is not None:
                    found[seq] = directory / name
                elif name not in OTHER_WAL_FILES:
                    listing.unknown.append(str(directory / name))
            for seq, path in sorted(found.items()):
                listing.add(
                    SourceFile(
                        parse_topic(f"/{namespace}/{topic}"),
                        "wal",
                        str(path),
                        disk.size(path),
                        order=(seq, 0),
                        newest=seq == max(found),
                    )
                )


def _directories(disk: Disk, path: Path) -> Iterator[str]:
    try:
        names = disk.list_dir(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(f"{path} is not a directory of Danube's WAL: {error.strerror}") from error
    for name in names:
        if (path / name).is_dir():
            yield name


# -- reading ------------------------------------------------------------------------------------


class BlockReader:
    """Reads a file or an object in blocks, and keeps the last few. Not thread-safe."""

    def __init__(self, name: str, read: ReadAt, size: int) -> None:
        self._name = name
        self._read = read
        self._blocks: OrderedDict[int, memoryview] = OrderedDict()
        self.size = size

    def from_(self, position: int) -> memoryview:
        """Returns the bytes from `position` to the end of its block."""
        number = position // BLOCK_BYTES
        block = self._blocks.pop(number, None)
        if block is None:
            start = number * BLOCK_BYTES
            stop = min(start + BLOCK_BYTES, self.size)
            block = memoryview(self._read(start, stop)).cast("B")
            if len(block) < stop - start:
                raise CorruptLog(f"{self._name} has become shorter while it was read")
            while len(self._blocks) >= _BLOCKS_KEPT:
                self._blocks.popitem(last=False)
        self._blocks[number] = block
        return block[position - number * BLOCK_BYTES :]

    def __call__(self, start: int, end: int) -> Buffer:
        """Returns the bytes `start..end`, or fewer at the end of the file."""
        end = min(end, self.size)
        parts = bytearray()
        while start < end:
            part = self.from_(start)[: end - start]
            parts += part
            start += len(part)
        return parts


class SourceReaders:
    """Opens the files of a source, and keeps the last few open. Not thread-safe."""

    def __init__(self, store: Callable[[], Backend], disk: Disk) -> None:
        """`store` is called when the first object is read."""
        self._store = store
        self._disk = disk
        self._open: OrderedDict[SourceFile, tuple[BlockReader, ReadFile | None]] = OrderedDict()

    def reader(self, file: SourceFile) -> BlockReader:
        found = self._open.pop(file, None)
        if found is None:
            while len(self._open) >= _READERS_KEPT:
                self._close(self._open.popitem(last=False)[1][1])
            found = self._opened(file)
        self._open[file] = found
        return found[0]

    def _opened(self, file: SourceFile) -> tuple[BlockReader, ReadFile | None]:
        if file.kind == "object":
            store = self._store()

            def fetch(start: int, end: int) -> Buffer:
                return store.get_range(file.name, start, end, etag=file.etag)

            return BlockReader(file.name, fetch, file.size), None
        try:
            opened = self._disk.open_read(Path(file.name))
        except OSError as error:
            raise _unreadable(file, error) from error

        def read(start: int, end: int) -> Buffer:
            try:
                return read_range(opened, start, end)
            except OSError as error:
                raise _unreadable(file, error) from error

        return BlockReader(file.name, read, file.size), opened

    def close(self) -> None:
        while self._open:
            self._close(self._open.popitem()[1][1])

    def _close(self, file: ReadFile | None) -> None:
        if file is not None:
            file.close()

    def __enter__(self) -> SourceReaders:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()


def _unreadable(file: SourceFile, error: OSError) -> ServiceRefused:
    return ServiceRefused(
        f"{file.name} cannot be read on {socket.gethostname()}: {error.strerror}; the WAL must be "
        "there on every machine that runs the import, or use --runner threads"
    )


# -- what a file holds --------------------------------------------------------------------------


class Run(NamedTuple):
    """Consecutive frames: offsets `start..next`, bytes `position..stop`, both ends excluded."""

    start: int
    next: int
    position: int
    stop: int


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of a file that are no frames, or frames that are no messages."""

    file: str
    position: int
    stop: int
    offset: int
    """The offset that was expected there."""
    reason: str


@dataclass(frozen=True, slots=True)
class Inspected:
    """What a file holds, found by reading all of it."""

    file: SourceFile
    runs: tuple[Run, ...]
    damage: tuple[Damage, ...]
    torn: int
    """Bytes of the last frame of the newest WAL file, if it was not written completely."""

    @property
    def messages(self) -> int:
        return sum(run.next - run.start for run in self.runs)


def inspect(file: SourceFile, reader: BlockReader) -> Inspected:
    """Reads the whole file. Raises CorruptLog only if it has too many runs; damage is a result."""
    return _Inspection(file, reader)()


class _Inspection:
    def __init__(self, file: SourceFile, reader: BlockReader) -> None:
        self._file = file
        self._read = reader
        self._runs: list[Run] = []
        self._damage: list[Damage] = []
        self._torn = 0
        self._topic = str(file.topic).encode()

    def __call__(self) -> Inspected:
        position = 0
        while position < self._file.size:
            position = self._decode(position)
        return Inspected(self._file, tuple(self._runs), tuple(self._damage), self._torn)

    @property
    def _expected(self) -> int:
        return self._runs[-1].next if self._runs else 0

    def _decode(self, start: int) -> int:
        """Decodes frames from `start` on, to the end or to damage; returns where to continue."""
        decoder, at = FrameDecoder(), start
        while at < self._file.size:
            chunk = self._read.from_(at)
            base = start + decoder.position
            frames = decoder.feed(chunk)
            at += len(chunk)
            if (stop := self._take(frames, base)) is not None:
                return stop
            if frames.end.corrupt:
                return self._skip(base + frames.safe_length, frames.end.describe())
        if decoder.pending:
            return self._skip(start + decoder.position, "the file ends inside a frame", torn=True)
        return at

    def _take(self, frames: Scan, base: int) -> int | None:
        """Adds the frames to the runs. Returns where to continue after a bad message, or None."""
        count = len(frames)
        if not count:
            return None
        _, bad, _ = codec.survey(frames.buffer, frames.positions, frames.lengths, self._topic)
        good = count if bad < 0 else bad
        for first, after in _stretches(frames.offsets[:good]):
            begin = first
            if not self._continues(frames.offsets[first], base + _start(frames, first)):
                begin += self._unless_repeated(frames, first, base)
            if begin < after:
                offset, stop = frames.offsets[begin], base + _stop(frames, after - 1)
                start = base + _start(frames, begin)
                self._add(Run(offset, offset + after - begin, start, stop))
        if bad < 0:
            return None
        start, stop = base + _start(frames, bad), base + _stop(frames, bad)
        self._damaged(start, stop, "the frame holds no message in a known encoding")
        return stop

    def _unless_repeated(self, frames: Scan, number: int, base: int) -> int:
        """Returns 1 if the message has another offset than its frame, which is damage; else 0."""
        found = locate(frames.buffer, frames.positions[number], frames.lengths[number])
        offset = frames.offsets[number]
        if found.topic_offset == offset:
            return 0
        self._damaged(
            base + _start(frames, number),
            base + _stop(frames, number),
            f"the header has offset {offset}, but the message has {found.topic_offset}",
        )
        return 1

    def _continues(self, offset: int, position: int) -> bool:
        last = self._runs[-1] if self._runs else None
        return last is not None and (last.next, last.stop) == (offset, position)

    def _add(self, run: Run) -> None:
        if self._continues(run.start, run.position):
            run = Run(self._runs[-1].start, run.next, self._runs.pop().position, run.stop)
        self._runs.append(run)
        if len(self._runs) > IMPORT_RUNS_MAX:
            raise CorruptLog(
                f"{self._file.name}: its frames are out of order at more than {IMPORT_RUNS_MAX} "
                "places, which is more than an import can sort"
            )

    def _damaged(self, position: int, stop: int, reason: str) -> None:
        damage = Damage(self._file.name, position, stop, self._expected, reason)
        self._damage.append(damage)

    def _skip(self, position: int, reason: str, *, torn: bool = False) -> int:
        """Returns the position of the next frame after the damage, or the end of the file."""
        size = self._file.size
        found = self._next_frame(position)
        if found is None and torn and self._file.newest:
            self._torn = size - position
            return size
        stop = size if found is None else found
        self._damaged(position, stop, reason)
        return stop

    def _next_frame(self, position: int) -> int | None:
        """Finds the next valid frame after a damaged one, whatever its offset is.

        The one that follows by the damaged one's length is tried first: payloads may hold frames.
        """
        size = self._file.size
        search = FrameSearch(self._read, size, messages_only=True)
        claimed = frame_bytes(self._read(position, position + HEADER_BYTES), 0)
        if claimed is not None and search.is_frame(None, position + claimed):
            return position + claimed
        last = self._expected + size // FRAME_BYTES_MIN if self._runs else OFFSET_MAX - 1
        found = search.between(position + 1, size, 0, min(last, OFFSET_MAX - 1), limit=1)
        return next((at for _, at in found), None)


def _stretches(offsets: memoryview) -> Iterator[tuple[int, int]]:
    """Yields where consecutive offsets begin and end."""
    values = offsets.tolist()
    if not values:
        return
    if values == list(range(values[0], values[0] + len(values))):
        yield 0, len(values)
        return
    first = 0
    for at in range(1, len(values) + 1):
        if at == len(values) or values[at] != values[at - 1] + 1:
            yield first, at
            first = at


def _start(frames: Scan, number: int) -> int:
    """Where the frame begins in its buffer."""
    return frames.positions[number] - HEADER_BYTES


def _stop(frames: Scan, number: int) -> int:
    return frames.positions[number] + frames.lengths[number]


# -- which frames an import takes ---------------------------------------------------------------


class Piece(NamedTuple):
    """Offsets `first..until` of a run of the file with this number."""

    file: int
    run: Run
    first: int
    until: int

    @property
    def whole(self) -> bool:
        return (self.first, self.until) == (self.run.start, self.run.next)

    def part(self, first: int, until: int) -> Piece:
        return self._replace(first=max(self.first, first), until=min(self.until, until))


class Copy(NamedTuple):
    """The same offsets twice: `kept` is imported, `dropped` is not."""

    kept: Piece
    dropped: Piece


@dataclass(slots=True)
class Layout:
    """Which pieces of which files make the topic."""

    pieces: list[Piece] = field(default_factory=list)
    """Ascending and without overlap."""
    copies: list[Copy] = field(default_factory=list)
    gaps: list[Range] = field(default_factory=list)
    start: int = 0
    end: int = 0

    def between(self, first: int, until: int) -> list[Piece]:
        """Returns the pieces with offsets in `first..until`, cut to it."""
        start = bisect_right(self.pieces, first, key=lambda piece: piece.until)
        stop = bisect_left(self.pieces, until, key=lambda piece: piece.first)
        return [each.part(first, until) for each in self.pieces[start:stop]]


def lay_out(files: Sequence[Inspected], expected: Iterable[Range] = ()) -> Layout:
    """Decides which file gives which offsets: for offsets that several have, the first of them.

    `expected` are ranges that descriptors name. Offsets in them that no file has are gaps too.
    """
    layout = Layout()
    starts: list[int] = []
    for number, inspected in enumerate(files):
        for run in inspected.runs:
            _cover(layout, starts, number, run)
    wanted = [*expected]
    first = [layout.pieces[0].first] if layout.pieces else []
    last = [layout.pieces[-1].until] if layout.pieces else []
    layout.start = min([*first, *(each[0] for each in wanted)], default=0)
    layout.end = max([*last, *(each[1] for each in wanted)], default=0)
    at = layout.start
    for piece in layout.pieces:
        if piece.first > at:
            layout.gaps.append((at, piece.first))
        at = piece.until
    if at < layout.end:
        layout.gaps.append((at, layout.end))
    return layout


def _cover(layout: Layout, starts: list[int], file: int, run: Run) -> None:
    """Adds the offsets of the run that no piece has. The others are copies."""
    pieces, at = layout.pieces, run.start
    number = max(bisect_right(starts, at) - 1, 0)
    if number < len(pieces) and pieces[number].until <= at:
        number += 1
    while at < run.next:
        held = pieces[number] if number < len(pieces) else None
        if held is not None and held.first <= at:
            stop = min(held.until, run.next)
            layout.copies.append(Copy(held.part(at, stop), Piece(file, run, at, stop)))
        else:
            stop = run.next if held is None else min(held.first, run.next)
            pieces.insert(number, Piece(file, run, at, stop))
            starts.insert(number, at)
        at = stop
        number += 1


def plan_objects(extents: Iterable[Extent], settings: UploaderSettings) -> Iterator[PlannedObject]:
    """Groups extents that follow each other into objects within the limits of the settings.

    An extent is not cut: an object of Danube that is larger than the limit stays one object.
    """
    bytes_max, messages_max = settings.object_bytes_max, settings.max_object_messages
    taken: list[Extent] = []
    size = 0
    for extent in extents:
        count = extent.next_offset - taken[0].first_offset if taken else 0
        if taken and (
            taken[-1].next_offset != extent.first_offset
            or size + extent.size > bytes_max
            or (messages_max is not None and count > messages_max)
        ):
            yield PlannedObject(tuple(taken))
            taken, size = [], 0
        taken.append(extent)
        size += extent.size
    if taken:
        yield PlannedObject(tuple(taken))


# -- frames of pieces ---------------------------------------------------------------------------


def _scans(name: str, reader: BlockReader, run: Run) -> Iterator[tuple[Scan, int]]:
    """Yields the frames of the run, and where each buffer begins in the file.

    Raises CorruptFrame if they are not those that were inspected.
    """
    decoder = FrameDecoder(expected=run.start, consecutive=True)
    at, offset = run.position, run.start
    while at < run.stop:
        chunk = reader.from_(at)[: run.stop - at]
        base = run.position + decoder.position
        frames = decoder.feed(chunk)
        at += len(chunk)
        if len(frames):
            offset += len(frames)
            yield frames, base
        frames.raise_if_corrupt(name, base)
    if decoder.pending or offset != run.next:
        raise CorruptFrame(
            f"the frames end at offset {offset}, not at {run.next}: the file has changed",
            file=name,
            position=run.position + decoder.position,
            offset=offset,
        )


def measure(name: str, reader: BlockReader, run: Run, offsets: Sequence[int]) -> list[int]:
    """Returns where the frames of these offsets begin, which are in the run and ascend.

    Reads the run up to the last of them, once.
    """
    found: list[int] = []
    for frames, base in _scans(name, reader, run):
        first = frames.offsets[0]
        while len(found) < len(offsets) and offsets[len(found)] < first + len(frames):
            found.append(base + _start(frames, offsets[len(found)] - first))
        if len(found) == len(offsets):
            break
    return found


def digest(readers: SourceReaders, files: Mapping[int, SourceFile], pieces: list[Piece]) -> str:
    """Returns the content hash of the frames of whole pieces, one after the other."""
    content = ContentHash()
    for piece in pieces:
        assert piece.whole, "its bytes are known"
        file = files[piece.file]
        for frames, _ in _scans(file.name, readers.reader(file), piece.run):
            content.add(frames.raw)
    return content.value


class DanubeSource:
    """Reads the frames of planned objects, for `engine.upload`. Not thread-safe.

    The `seq` of an extent is the number of its file.
    """

    def __init__(self, readers: SourceReaders, files: Mapping[int, SourceFile]) -> None:
        self._readers = readers
        self._files = files

    def frames(self, extents: Iterable[Extent]) -> Iterator[Scan]:
        for extent in extents:
            file = self._files[extent.seq]
            run = Run(extent.first_offset, extent.next_offset, extent.start, extent.end)
            for frames, _ in _scans(file.name, self._readers.reader(file), run):
                yield frames
