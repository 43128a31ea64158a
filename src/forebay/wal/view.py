"""A log as another process reads it: read-only, without the lock, up to the published position.

After each group commit the owner publishes how far it has synced. A view never reads past that
position, because bytes after it may still be lost in a crash.

Beware: a view is a snapshot. `refresh` moves it forward. Reading a segment that retention removed
since raises OffsetOutOfRange.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from forebay.errors import ForebayError, MissingData, OffsetOutOfRange
from forebay.files.disk import Disk
from forebay.files.local import LocalDisk
from forebay.format.checkpoint import Published
from forebay.format.index import SegmentIndex
from forebay.format.names import SEGMENT_FILE, SegmentNames
from forebay.wal.checkpoints import read_published
from forebay.wal.reader import LogReader, Plan
from forebay.wal.recovery import first_offset_of, join_segments
from forebay.wal.segment import Segment, SegmentIndexes, SegmentSet
from forebay.wal.watermarks import Visibility, Waiter

_PUBLISHED_READS_MAX: Final = 100


class LogView:
    """The synced part of the log in a directory, which another process may own.

    Raises MissingData if no position was published there.
    """

    def __init__(
        self, directory: Path, *, file_name: str = SEGMENT_FILE, disk: Disk | None = None
    ) -> None:
        self._directory = directory
        self._disk = disk or LocalDisk()
        self._names = SegmentNames(file_name)
        self._indexes = SegmentIndexes(self._disk, self._names)
        self._published = self._read_published()
        self._segments = self._snapshot()

    @property
    def start_offset(self) -> int:
        return self._published.start_offset

    @property
    def end_offset(self) -> int:
        """One more than the last synced offset, when the view was taken."""
        return self._published.next_offset

    def refresh(self) -> None:
        """Moves the view to the currently published position."""
        self._published = self._read_published()
        self._segments = self._snapshot()

    def segments(self) -> list[Segment]:
        return list(self._segments)

    def reader(self, start: int, end: int | None = None) -> LogReader:
        """Returns a reader from `start` to `end`, or to the end of the view; it never waits."""
        if not self.start_offset <= start <= self.end_offset:
            raise self._absent(start, self._published)
        stop = self.end_offset if end is None else min(end, self.end_offset)
        return LogReader(self, self._disk, self._indexes, start, end=stop, visibility="synced")

    def plan(self, reader: LogReader) -> Plan:
        offset = reader.wanted
        segment = self._segments.find(offset)
        if segment is None:
            raise self._absent(offset, self._published)
        return segment

    def gone(self, reader: LogReader, segment: Segment) -> ForebayError:
        return self._absent(reader.wanted, self._read_published())

    def _absent(self, offset: int, now: Published) -> ForebayError:
        if now.start_offset <= offset < now.next_offset:
            return MissingData(
                f"{self._directory}: offset {offset} was synced, but no segment here holds it; "
                "put the missing files back, or run `forebay repair`"
            )
        return OffsetOutOfRange(
            f"{self._directory}: offset {offset} is not in the log: its oldest offset is "
            f"{now.start_offset}, its next {now.next_offset}",
            start=now.start_offset,
            end=now.next_offset,
        )

    def enlist(self, target: int, waiter: Waiter, visibility: Visibility) -> bool:
        raise NotImplementedError("a reader of a view has an end and never waits")

    def delist(self, waiter: Waiter, visibility: Visibility) -> bool:
        return False

    def _read_published(self) -> Published:
        # The owner may be overwriting the record just now. Then its checksum is wrong, and the next
        # read gets the new record.
        for _ in range(_PUBLISHED_READS_MAX):
            published = read_published(self._disk, self._directory)
            if published is not None:
                return published
        raise MissingData(
            f"{self._directory}: no published position: either no log was ever opened here, or "
            "'wal.synced' is lost or damaged; opening the log writes it again"
        )

    def _snapshot(self) -> SegmentSet:
        published = self._published
        listed = self._disk.list_dir(self._directory)
        paths = {self._names.parse(name): self._directory / name for name in listed}
        found: list[Segment] = []
        # From the newest back. Retention removes the oldest first, so if a segment was removed
        # since the listing, everything older is removed too, or will be.
        for seq in range(published.seq, -1, -1):
            segment = self._segment(seq, paths[seq]) if seq in paths else None
            if segment is not None:
                found.append(segment)
            elif seq < published.seq:
                break
        found.reverse()
        return SegmentSet(tuple(join_segments(found, published.next_offset)))

    def _segment(self, seq: int, path: Path) -> Segment | None:
        newest = seq == self._published.seq
        try:
            size = self._published.position if newest else self._disk.size(path)
            first = first_offset_of(self._disk, path) if size else None
            modified = int(self._disk.modified(path) * 1000)
        except FileNotFoundError:
            # Retention removed it since the listing.
            return None
        if first is None:
            return None
        index = SegmentIndex() if newest else None
        if index is not None:
            index.add(first, 0)
        return Segment(seq, path, first, first, size, modified, modified, index)
