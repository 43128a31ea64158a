"""What is in the directory of a topic's log, damaged or not: every frame that is still there.

Unlike recovery, which refuses a log that is damaged, a survey reads on behind the damage and
changes nothing. It needs the lock on the directory, as nobody may write meanwhile.

What a caller gets wrong: bytes behind the last frame of the newest segment are no damage if
nothing says that they were ever synced. That is a torn tail, and opening the log cuts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from forebay.errors import CheckpointError, CorruptLog
from forebay.files.disk import Disk, read_file
from forebay.format.checkpoint import WalCheckpoint, decode_checkpoint
from forebay.format.names import CHECKPOINT_FILE, SegmentNames
from forebay.format.published import Published
from forebay.format.segment_index import decode_index
from forebay.limits import CHECKPOINT_BYTES_MAX, OFFSET_MAX, SEGMENT_INDEX_ENTRIES_MAX
from forebay.topic.repairs_frames import FileBytes, Run, find_runs, offsets_max
from forebay.wal.chunks import ChunkReader
from forebay.wal.identity import read_log_id
from forebay.wal.publisher import read_published


@dataclass(frozen=True, slots=True)
class SegmentFound:
    seq: int
    path: Path
    size: int
    runs: tuple[Run, ...]
    index_whole: bool
    """Whether its index can be used."""


@dataclass(frozen=True, slots=True)
class Target:
    """A segment as it should be."""

    seq: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Survey:
    """A log as its files tell it, what is damaged included."""

    directory: Path
    names: SegmentNames
    log_id: str | None
    id_whole: bool
    checkpoint: WalCheckpoint | None
    checkpoint_whole: bool
    """False also where there is none."""
    published: Published | None
    segments: dict[int, SegmentFound]
    """By number; without those that an interrupted retention was removing."""
    seqs: range
    """The numbers that should be there."""
    start: int
    end: int
    """The offsets that should be in it: everything that was ever known to be synced."""

    @property
    def runs(self) -> list[Run]:
        return [run for segment in self.segments.values() for run in segment.runs]

    @property
    def begun(self) -> bool:
        """Whether there is a log at all."""
        return bool(self.segments) or self.checkpoint is not None or self.published is not None

    def path(self, seq: int) -> Path:
        return self.directory / self.names.segment(seq)

    def begun_at(self, start: int) -> Survey:
        """The same log, once it begins later."""
        return replace(self, start=max(start, self.start), end=max(start, self.end))

    def targets(self) -> list[Target]:
        """The segments that make the log from its start to its end, none of them without need.

        Where nothing tells how offsets were spread over missing files, they are spread evenly.
        """
        if not self.seqs:
            return [Target(0, self.start, self.end)] if self.start < self.end else []
        firsts = _firsts(self)
        ends = [*firsts[1:], self.end]
        found = [
            Target(seq, max(first, self.start), end)
            for seq, first, end in zip(self.seqs, firsts, ends, strict=True)
        ]
        last = self.seqs[-1]
        empty = last if last in self.segments else None  # the active one, before its first frame
        return [each for each in found if each.first < each.end or each.seq == empty]


def _firsts(survey: Survey) -> list[int]:
    """Where each segment begins: as remembered, else by its own first frame."""
    remembered = _remembered(survey.checkpoint)
    known: list[int | None] = []
    for seq in survey.seqs:
        segment = survey.segments.get(seq)
        first = remembered.get(seq)
        if first is None and segment is not None and segment.runs and not segment.runs[0].start:
            first = segment.runs[0].first
        known.append(first)
    if known[0] is None:
        known[0] = survey.start
    return _spread(known, survey.end)


def _spread(known: list[int | None], end: int) -> list[int]:
    """Fills what is unknown evenly between what is known around it; the first one is known."""
    filled: list[int] = []
    for at, first in enumerate(known):
        if first is not None:
            filled.append(first)
            continue
        after = next((i for i in range(at, len(known)) if known[i] is not None), len(known))
        behind = known[after] if after < len(known) else end
        assert behind is not None
        before = filled[-1]
        filled.append(before + max((behind - before) // (after - at + 1), 0))
    return filled


def _remembered(checkpoint: WalCheckpoint | None) -> dict[int, int]:
    return {each.seq: each.first_offset for each in checkpoint.segments} if checkpoint else {}


def survey_log(disk: Disk, directory: Path, names: SegmentNames, topic: str) -> Survey:
    """Reads every byte of the topic's log. The caller holds the lock on the directory."""
    checkpoint, whole = _checkpoint(disk, directory)
    published = read_published(disk, directory)
    log_id, id_whole = _log_id(disk, directory)
    remembered = _remembered(checkpoint)
    paths = _paths(disk, directory, names, min(remembered, default=0))
    numbers = {*paths, *remembered}
    if published is not None and published.position:
        numbers.add(published.seq)
    seqs = range(min(numbers), max(numbers) + 1) if numbers else range(0)
    segments = _segments(disk, names, paths, remembered, topic)
    runs = [run for segment in segments.values() for run in segment.runs]
    known = max(
        checkpoint.next_offset if checkpoint else 0, published.next_offset if published else 0
    )
    starts = [each.start_offset for each in (checkpoint, published) if each is not None]
    start = max(starts, default=min((run.first for run in runs), default=0))
    end = max([known, start, *(run.end for run in runs)])
    return Survey(
        directory, names, log_id, id_whole, checkpoint, whole, published, segments, seqs, start, end
    )


def _paths(disk: Disk, directory: Path, names: SegmentNames, oldest: int) -> dict[int, Path]:
    found = {names.parse(name): directory / name for name in disk.list_dir(directory)}
    return {seq: found[seq] for seq in found if seq is not None and seq >= oldest}


def _checkpoint(disk: Disk, directory: Path) -> tuple[WalCheckpoint | None, bool]:
    path = directory / CHECKPOINT_FILE
    try:
        data = read_file(disk, path, bytes_max=CHECKPOINT_BYTES_MAX)
        return decode_checkpoint(data, WalCheckpoint), True
    except (FileNotFoundError, CheckpointError, ValueError):
        return None, False


def _log_id(disk: Disk, directory: Path) -> tuple[str | None, bool]:
    try:
        return read_log_id(disk, directory), True
    except CorruptLog:
        return None, False


def _segments(
    disk: Disk,
    names: SegmentNames,
    paths: Mapping[int, Path],
    remembered: Mapping[int, int],
    topic: str,
) -> dict[int, SegmentFound]:
    found: dict[int, SegmentFound] = {}
    expected: int | None = None
    for seq in sorted(paths):
        path = paths[seq]
        source = FileBytes(disk, path)
        first = remembered.get(seq, expected if seq - 1 in found else None)
        bound = _bound(disk, paths, remembered, seq, first, source.size())
        runs = find_runs(source, first, bound, topic)
        index_path = path.with_name(names.index(seq))
        found[seq] = SegmentFound(
            seq, path, source.size(), runs, _index_whole(disk, index_path, source.size())
        )
        one = len(runs) == 1 and runs[0].start == 0 and runs[0].stop == source.size()
        expected = runs[0].end if one else None
    return found


def _bound(
    disk: Disk,
    paths: Mapping[int, Path],
    remembered: Mapping[int, int],
    seq: int,
    first: int | None,
    size: int,
) -> int:
    """No frame of the segment has this offset or a later one."""
    known = [each for number, each in remembered.items() if number > seq]
    if not known and seq + 1 in paths:
        behind = _first_offset(disk, paths[seq + 1])
        known = [behind] if behind is not None and behind > (first or 0) else []
    if first is not None:
        known.append(first + offsets_max(size))
    return min(known, default=OFFSET_MAX)


def _first_offset(disk: Disk, path: Path) -> int | None:
    with closing(disk.open_read(path)) as file:
        found = ChunkReader(1).read(file, 0, file.size(), None) if file.size() else None
    return found.offsets[0] if found is not None and len(found) else None


def _index_whole(disk: Disk, path: Path, segment_bytes: int) -> bool:
    try:
        raw = read_file(disk, path, bytes_max=64 + 16 * SEGMENT_INDEX_ENTRIES_MAX)
    except (OSError, ValueError):
        return False
    return decode_index(raw, segment_bytes) is not None
