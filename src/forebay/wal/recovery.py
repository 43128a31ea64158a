"""Recovery: rebuilds the state of a log from its files, after a crash or a clean stop.

The newest segment is scanned whole. The older ones are complete, because each was synced before the
next was begun; only the first frame of each and the end of the last one are read. If the checkpoint
or the published position is behind the frames, the frames win. If it is ahead, synced data is
missing: that raises MissingData and changes nothing.

Torn is not corrupt (R2 in docs/formats/frame.md). A damaged end of the newest segment is a torn
tail only if it starts at or after the last known synced position and no valid frame follows it,
other than inside its payload. Then it is copied aside and cut. Any other damage raises
CorruptFrame, and the file stays as it is.

The valid part is made durable before the log accepts appends. Bytes after the synced position are
written again, because after a failed sync the kernel may treat unwritten pages as clean. If the
last owner marked a failed sync, the whole segment is copied to a new file.
"""

from __future__ import annotations

import errno
import logging
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final

from forebay.clock import Clock
from forebay.errors import CorruptFrame, MissingData
from forebay.files.disk import Disk, ReadFile, append_all, read_range, write_all_at
from forebay.format.checkpoint import Published, SegmentEntry, WalCheckpoint
from forebay.format.frame import FRAME_BYTES_MIN, HEADER_BYTES, End, Scan
from forebay.format.index import SegmentIndex
from forebay.format.names import FAILED_FILE, SegmentNames, aside
from forebay.format.resync import FrameExtent, FrameSearch
from forebay.limits import OFFSET_MAX, READ_CHUNK_BYTES
from forebay.logs import event
from forebay.wal.segment import (
    ChunkReader,
    Segment,
    SegmentSet,
    load_index,
    require_complete,
    scan_segment,
)

_log: Final = logging.getLogger("forebay.wal")
_PAYLOADS_MAX: Final = 1024
"""How many damaged frames in a row may leave out their payloads from a search."""


@dataclass(frozen=True, slots=True)
class Newest:
    """The valid part of the newest segment; `repair_newest` cuts off the rest."""

    first_offset: int | None
    """None if the segment has no frame."""
    count: int
    size: int
    torn_bytes: int
    """Bytes after the valid part."""
    index: SegmentIndex


@dataclass(frozen=True, slots=True)
class _Evidence:
    """What is known about a segment apart from its frames."""

    size: int
    synced: int
    """Everything before this position was synced."""
    known: int
    """Everything before this offset was synced."""
    expected: int | None
    """The offset after the valid part; None if no frame and no checkpoint tells."""


def survey_newest(
    disk: Disk, path: Path, *, expected: int | None, synced: int, known: int
) -> Newest:
    """Scans the segment and changes nothing. Raises CorruptFrame for damage other than a torn tail.

    Everything before byte position `synced` and before offset `known` is known to have been synced.
    """
    index = SegmentIndex(0)
    valid = count = 0
    last: Scan | None = None
    with closing(disk.open_read(path)) as file:
        size = file.size()
        for position, found in scan_segment(file, ChunkReader(), size, expected, index):
            valid = position + found.safe_length
            count += len(found)
            last = found
        first = index.offsets[0] if len(index) else None
        newest = Newest(first, count, valid, size - valid, index)
        if last is not None and last.end is not End.COMPLETE:
            certain = last.offset if count or expected is not None else None
            evidence = _Evidence(size, synced, known, certain)
            _require_torn(file, path, newest, last, evidence)
    return newest


def repair_newest(
    disk: Disk, path: Path, newest: Newest, *, synced: int, sync_failed: bool
) -> None:
    """Cuts off the torn tail, after copying it aside, and makes the valid part durable."""
    with closing(disk.open_read(path)) as file:
        if newest.torn_bytes:
            _keep_aside(disk, file, path, newest.size, newest.size + newest.torn_bytes)
        if sync_failed:
            _rewrite(disk, file, path, newest.size)
    if not sync_failed and (newest.torn_bytes or newest.size != synced):
        _resync(disk, path, newest.size, min(synced, newest.size))


def _require_torn(
    file: ReadFile, path: Path, newest: Newest, last: Scan, evidence: _Evidence
) -> None:
    what = last.end.describe()
    search = FrameSearch(partial(read_range, file), evidence.size, messages_only=True)
    if newest.size < evidence.synced:
        reason = f"{what} below the synced position {evidence.synced}"
    elif last.offset is not None and last.offset < evidence.known:
        reason = f"{what} below the synced offset {evidence.known}"
    elif last.end is End.BAD_OFFSET and search.is_frame(None, newest.size):
        # A torn write does not leave a whole frame.
        reason = what
    elif _valid_frame_follows(search, newest.size, last.offset, evidence.expected):
        reason = f"{what}, and valid frames follow"
    else:
        return
    raise CorruptFrame(reason, file=str(path), position=newest.size, offset=last.offset)


def _valid_frame_follows(
    search: FrameSearch, position: int, offset: int | None, expected: int | None
) -> bool:
    """Whether a valid frame with a later offset begins after the damaged frame at `position`.

    `offset` is the damaged frame's, and `expected` the same if it is known for certain. A payload
    may hold frames, even of this log. They are no evidence, so the search leaves out payloads of
    damaged frames whose header and message agree about where the payload is.
    """
    first, last = 0, OFFSET_MAX
    if expected is not None:
        first = expected
        last = min(expected + (search.size - position) // FRAME_BYTES_MIN + 1, OFFSET_MAX)
    start = position + 1
    payloads: list[FrameExtent] = []
    while offset is not None and len(payloads) < _PAYLOADS_MAX:
        extent = search.extent(offset, position)
        if extent is None:
            break
        payloads.append(extent)
        position, offset = extent.end, offset + 1
        if search.is_frame(offset, position):
            return True
    if payloads:
        start = payloads[0].payload_end
    return any(
        not _inside_payload(at, payloads)
        for _, at in search.between(start, search.size, first, last)
    )


def _inside_payload(position: int, payloads: Sequence[FrameExtent]) -> bool:
    at = bisect_right(payloads, position, key=lambda extent: extent.payload) - 1
    return at >= 0 and position < payloads[at].payload_end


def _some(taken: int) -> int:
    if not taken:
        raise OSError(errno.EIO, "the file shrank while it was read")
    return taken


def _copy_to_new(disk: Disk, source: ReadFile, start: int, end: int, path: Path) -> None:
    """Copies the bytes `start..end` to a new file and syncs it; the caller syncs the directory."""
    buffer = memoryview(bytearray(min(READ_CHUNK_BYTES, max(end - start, 1))))
    with closing(disk.create(path)) as target:
        while start < end:
            taken = _some(source.read_into(buffer[: end - start], start))
            append_all(target, buffer[:taken])
            start += taken
        target.sync()


def _keep_aside(disk: Disk, file: ReadFile, path: Path, start: int, end: int) -> None:
    kept = path.with_name(aside(path.name, "torn", start))
    attempt = 0
    while disk.exists(kept):
        attempt += 1
        kept = path.with_name(aside(path.name, f"{attempt}.torn", start))
    try:
        _copy_to_new(disk, file, start, end, kept)
    except OSError:
        # Otherwise, on a full disk, every attempt to open the log would leave one more file.
        if disk.exists(kept):
            disk.unlink(kept)
        raise
    disk.sync_dir(path.parent)
    event(
        _log,
        logging.WARNING,
        "a torn tail was cut",
        file=path,
        bytes=end - start,
        position=start,
        kept=kept.name,
    )


def _rewrite(disk: Disk, file: ReadFile, path: Path, size: int) -> None:
    """Replaces the segment with a synced copy of its first `size` bytes."""
    temporary = path.with_name(path.name + ".tmp")
    if disk.exists(temporary):
        disk.unlink(temporary)
    _copy_to_new(disk, file, 0, size, temporary)
    disk.replace(temporary, path)
    disk.sync_dir(path.parent)
    text = "a segment was rewritten after a failed sync"
    event(_log, logging.WARNING, text, file=path, bytes=size)


def _resync(disk: Disk, path: Path, size: int, synced: int) -> None:
    """Cuts the segment to `size`, rewrites the bytes from `synced` on in place, and syncs it."""
    with closing(disk.open_read(path)) as source, closing(disk.open_append(path)) as target:
        if target.size() > size:
            target.truncate(size)
        buffer = memoryview(bytearray(READ_CHUNK_BYTES))
        position = synced
        while position < size:
            taken = _some(source.read_into(buffer[: size - position], position))
            write_all_at(target, buffer[:taken], position)
            position += taken
        target.sync()


@dataclass(frozen=True, slots=True)
class Recovered:
    """The state of a log on disk: its segments and its offsets."""

    segments: SegmentSet
    start_offset: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class Recovery:
    """One recovery: the directory, and what its last owner recorded about it."""

    disk: Disk
    directory: Path
    names: SegmentNames
    clock: Clock
    checkpoint: WalCheckpoint | None
    published: Published | None
    known_offset: int = 0
    """Everything before this offset was synced, as the caller knows from elsewhere."""

    def run(self) -> Recovered:
        """Recovers the log; the caller holds the lock on the directory.

        Raises CorruptFrame, or MissingData if synced messages are in no segment.
        """
        paths, leftover = self._split_leftover(self._list())
        sync_failed = self.disk.exists(self.directory / FAILED_FILE)
        recovered = self._recover(paths, sync_failed=sync_failed)
        self._finish_removals(leftover)
        if sync_failed:
            self.disk.unlink(self.directory / FAILED_FILE)
            self.disk.sync_dir(self.directory)
        return recovered

    def _recover(self, paths: Mapping[int, Path], *, sync_failed: bool) -> Recovered:
        if not paths:
            begun = self._begun_at()
            self._require_all_known(begun, begun)
            return Recovered(SegmentSet(), begun, begun)
        self._require_no_hole(paths)
        *older, last = sorted(paths)
        path = paths[last]
        sealed = [self._sealed(seq, paths[seq]) for seq in older]
        expected = self._end_of(sealed[-1]) if sealed else self._expected_first(last)
        modified = self._modified_ms(path)
        synced = self._synced_position(last, path)
        newest = survey_newest(
            self.disk, path, expected=expected, synced=synced, known=self._known_offset()
        )
        active = self._active(last, path, newest, expected or 0, modified)
        segments = SegmentSet(tuple(join_segments(sealed, active.first_offset)), active)
        start_offset = segments.start_offset or 0
        self._require_all_known(start_offset, active.end_offset)
        repair_newest(self.disk, path, newest, synced=synced, sync_failed=sync_failed)
        return Recovered(segments, start_offset, active.end_offset)

    def _begun_at(self) -> int:
        """The first offset of a log that has no segment yet; 0 if none is recorded."""
        checkpoint, published = self.checkpoint, self.published
        if checkpoint and not checkpoint.segments:
            return checkpoint.next_offset
        if published and published.start_offset == published.next_offset and not checkpoint:
            return published.next_offset
        return 0

    def _list(self) -> dict[int, Path]:
        found = {}
        for name in self.disk.list_dir(self.directory):
            seq = self.names.parse(name)
            if seq is not None:
                found[seq] = self.directory / name
        return found

    def _split_leftover(self, paths: Mapping[int, Path]) -> tuple[dict[int, Path], dict[int, Path]]:
        """Separates the segments of the log from those that an interrupted retention left."""
        entries = self._entries()
        oldest = entries[0].seq if entries else 0
        kept = {seq: path for seq, path in paths.items() if seq >= oldest}
        return kept, {seq: path for seq, path in paths.items() if seq < oldest}

    def _finish_removals(self, leftover: Mapping[int, Path]) -> None:
        for seq, path in leftover.items():
            remove_segment(self.disk, self.names, path, seq)
        if leftover:
            self.disk.sync_dir(self.directory)

    def _entries(self) -> tuple[SegmentEntry, ...]:
        return self.checkpoint.segments if self.checkpoint else ()

    def _remembered_first(self, seq: int) -> int | None:
        return next((entry.first_offset for entry in self._entries() if entry.seq == seq), None)

    def _expected_first(self, seq: int) -> int | None:
        """First offset of the oldest segment, if the checkpoint or the start of the log tells."""
        first = self._remembered_first(seq)
        return first if first is not None else self._begun_at() or None

    def _known_offset(self) -> int:
        """The highest offset before which everything is known to have been synced."""
        return max(
            self.known_offset,
            self.checkpoint.next_offset if self.checkpoint else 0,
            self.published.next_offset if self.published else 0,
        )

    def _require_no_hole(self, paths: Mapping[int, Path]) -> None:
        remembered = {entry.seq for entry in self._entries()}
        missing = sorted(remembered - paths.keys())
        for before, seq in pairwise(sorted(paths)):
            missing += range(before + 1, min(seq, before + 6))  # the error names five at most
        if missing:
            names = ", ".join(self.names.segment(seq) for seq in missing[:5])
            raise MissingData(
                f"{self.directory}: segments are missing: {names}; put the files back, "
                "or run `forebay repair`"
            )

    def _require_all_known(self, start_offset: int, next_offset: int) -> None:
        """Raises MissingData if more was synced than the segments hold."""
        known = self._known_offset()
        if known > next_offset:
            raise MissingData(
                f"{self.directory}: the segments end at offset {next_offset}, "
                f"but everything before offset {known} was synced; put the missing files back, "
                "or run `forebay repair`"
            )
        if self.checkpoint and self.checkpoint.start_offset < start_offset:
            raise MissingData(
                f"{self.directory}: the segments start at offset {start_offset}, but the log "
                f"starts at {self.checkpoint.start_offset} according to its checkpoint; put the "
                "missing files back, or run `forebay repair`"
            )

    def _sealed(self, seq: int, path: Path) -> Segment:
        first = first_offset_of(self.disk, path)
        if first is None:
            raise MissingData(
                f"{path}: a sealed segment without a frame; put the file back, or run "
                "`forebay repair`"
            )
        modified = self._modified_ms(path)
        return Segment(seq, path, first, first, self.disk.size(path), modified, modified)

    def _modified_ms(self, path: Path) -> int:
        return int(self.disk.modified(path) * 1000)

    def _end_of(self, segment: Segment) -> int:
        """The end offset of a sealed segment, found by scanning from its last index entry."""
        index_path = segment.path.with_name(self.names.index(segment.seq))
        index = load_index(self.disk, segment.path, index_path, segment.first_offset)
        expected, position = index.offsets[-1], index.positions[-1]
        chunks = ChunkReader()
        with closing(self.disk.open_read(segment.path)) as file:
            while position < segment.size:
                found = chunks.read(file, position, segment.size, expected)
                require_complete(found, segment.path, position)
                position += found.safe_length
                expected += len(found)
        return expected

    def _active(
        self, seq: int, path: Path, newest: Newest, expected: int, modified_ms: int
    ) -> Segment:
        first = expected if newest.first_offset is None else newest.first_offset
        created = None
        if self.checkpoint and self._remembered_first(seq) is not None:
            created = min(self.checkpoint.rotated_at_ms or 0, self.clock.now_ms())
        return Segment(
            seq,
            path,
            first,
            first + newest.count,
            newest.size,
            created or self.clock.now_ms(),
            modified_ms,
            newest.index,
        )

    def _synced_position(self, seq: int, path: Path) -> int:
        """The byte position up to which the newest segment is known to have been synced."""
        published = self.published
        if published is None or published.seq < seq:
            return 0
        size = self.disk.size(path)
        if published.seq > seq or published.position > size:
            raise MissingData(
                f"{self.directory}: {self.names.segment(published.seq)} was synced up to "
                f"position {published.position}, but the newest segment here is {path.name} with "
                f"{size} bytes; put the missing files back, or run `forebay repair`"
            )
        return published.position


def first_offset_of(disk: Disk, path: Path) -> int | None:
    """The offset of a segment's first frame; None if no frame is complete. Raises CorruptFrame."""
    with closing(disk.open_read(path)) as file:
        found = ChunkReader(HEADER_BYTES).read(file, 0, file.size(), None)
    found.raise_if_corrupt(str(path))
    return found.offsets[0] if len(found) else None


def join_segments(segments: Sequence[Segment], end: int) -> list[Segment]:
    """Sets each segment's end offset to the start of the next one, and the last one's to `end`."""
    ends = [*(segment.first_offset for segment in segments[1:]), end]
    return [
        replace(segment, end_offset=end_offset)
        for segment, end_offset in zip(segments, ends, strict=False)
    ]


def remove_segment(disk: Disk, names: SegmentNames, path: Path, seq: int) -> None:
    """Deletes the segment and its index; the caller syncs the directory."""
    disk.unlink(path)
    index = path.with_name(names.index(seq))
    if disk.exists(index):
        disk.unlink(index)
