"""What a log is after a crash or a clean stop, read from its files.

The newest segment is scanned whole and repaired (`repair`); the others are complete because each
was synced before the next one was begun, and are checked where they meet. Checkpoint and
published position are memories: where they are behind the frames, the frames win; where they are
ahead, acknowledged data is missing, which raises and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from forebay.clock import Clock
from forebay.errors import MissingData
from forebay.files.disk import Disk
from forebay.format.checkpoint import SegmentEntry, WalCheckpoint
from forebay.format.frame import HEADER_BYTES
from forebay.format.names import FAILED_FILE, SegmentNames
from forebay.format.published import Published
from forebay.wal.chunks import ChunkReader, load_index, require_complete
from forebay.wal.repair import Newest, repair_newest, survey_newest
from forebay.wal.segment import Segment, SegmentSet


@dataclass(frozen=True, slots=True)
class Recovered:
    segments: SegmentSet
    start_offset: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class Recovery:
    """One recovery: the directory, and what the owner left said about it."""

    disk: Disk
    directory: Path
    names: SegmentNames
    clock: Clock
    checkpoint: WalCheckpoint | None
    published: Published | None
    known_offset: int = 0
    """What this process knows to be synced, whatever the directory says."""

    def run(self) -> Recovered:
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
        """Where a log goes on that was begun there and has no message yet; else 0."""
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
        """The segments that count, and those that an interrupted retention was removing."""
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
        """Where the oldest segment begins: as remembered, or where the log was begun."""
        first = self._remembered_first(seq)
        return first if first is not None else self._begun_at() or None

    def _known_offset(self) -> int:
        """Everything before it was synced once."""
        return max(
            self.known_offset,
            self.checkpoint.next_offset if self.checkpoint else 0,
            self.published.next_offset if self.published else 0,
        )

    def _require_no_hole(self, paths: Mapping[int, Path]) -> None:
        remembered = {entry.seq for entry in self._entries()}
        missing = sorted(remembered - paths.keys())
        for before, seq in pairwise(sorted(paths)):
            missing += range(before + 1, min(seq, before + 6))  # a few are enough to say
        if missing:
            names = ", ".join(self.names.segment(seq) for seq in missing[:5])
            raise MissingData(
                f"{self.directory}: segments are missing: {names}; "
                "put the files back, or move the directory aside to begin anew"
            )

    def _require_all_known(self, start_offset: int, next_offset: int) -> None:
        """Raises when somebody was told of more than the files hold."""
        known = self._known_offset()
        if known > next_offset:
            raise MissingData(
                f"{self.directory}: the segments end at offset {next_offset}, "
                f"but everything before offset {known} was synced"
            )
        if self.checkpoint and self.checkpoint.start_offset < start_offset:
            raise MissingData(
                f"{self.directory}: the segments start at offset {start_offset}, "
                f"the checkpoint says {self.checkpoint.start_offset}"
            )

    def _sealed(self, seq: int, path: Path) -> Segment:
        first = first_offset_of(self.disk, path)
        if first is None:
            raise MissingData(f"{path}: a sealed segment without a single frame")
        modified = self._modified_ms(path)
        return Segment(seq, path, first, first, self.disk.size(path), modified, modified)

    def _modified_ms(self, path: Path) -> int:
        return int(self.disk.modified(path) * 1000)

    def _end_of(self, segment: Segment) -> int:
        """One more than the last offset of a sealed segment, from its last index entry on."""
        index_path = segment.path.with_name(self.names.index(segment.seq))
        index = load_index(self.disk, segment.path, index_path, segment.first_offset)
        expected, position = index.offsets[-1], index.positions[-1]
        file = self.disk.open_read(segment.path)
        chunks = ChunkReader()
        try:
            while position < segment.size:
                found = chunks.read(file, position, segment.size, expected)
                require_complete(found, segment.path, position)
                position += found.safe_length
                expected += len(found)
        finally:
            file.close()
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
        """How much of the newest segment is known to have been synced."""
        published = self.published
        if published is None or published.seq < seq:
            return 0
        size = self.disk.size(path)
        if published.seq > seq or published.position > size:
            raise MissingData(
                f"{self.directory}: {self.names.segment(published.seq)} was synced up to "
                f"position {published.position}; {path.name} with {size} bytes is the newest here"
            )
        return published.position


def first_offset_of(disk: Disk, path: Path) -> int | None:
    """The offset of a segment's first frame; None if it has no whole one."""
    file = disk.open_read(path)
    try:
        found = ChunkReader(HEADER_BYTES).read(file, 0, file.size(), None)
    finally:
        file.close()
    found.raise_if_corrupt(str(path))
    return found.offsets[0] if len(found) else None


def join_segments(segments: Sequence[Segment], end: int) -> list[Segment]:
    """Gives every segment its end: the start of the next one, and `end` to the last."""
    ends = [*(segment.first_offset for segment in segments[1:]), end]
    return [
        replace(segment, end_offset=end_offset)
        for segment, end_offset in zip(segments, ends, strict=False)
    ]


def remove_segment(disk: Disk, names: SegmentNames, path: Path, seq: int) -> None:
    """The segment and its index; the caller syncs the directory."""
    disk.unlink(path)
    index = path.with_name(names.index(seq))
    if disk.exists(index):
        disk.unlink(index)
