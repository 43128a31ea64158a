"""Reads the directory of a topic's log, damaged or not, and finds every valid frame in it.

Recovery refuses a damaged log. A survey reads on after the damage, and changes nothing. The caller
must hold the lock on the directory, so that nobody writes meanwhile.

Beware: bytes after the last frame of the newest segment are not damage, unless they are known to
have been synced. They are a torn tail, which opening the log cuts off.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from forebay.errors import CheckpointError, CorruptFrame, CorruptLog
from forebay.files.disk import Disk, read_file
from forebay.format.checkpoint import Published, WalCheckpoint, decode_checkpoint
from forebay.format.index import decode_index
from forebay.format.names import (
    CHECKPOINT_FILE,
    LOG_ID_COPY_FILE,
    SegmentNames,
    is_staged_segment,
)
from forebay.limits import CHECKPOINT_BYTES_MAX, OFFSET_MAX, SEGMENT_INDEX_ENTRIES_MAX
from forebay.repair.frames import FileBytes, FrameRun, find_runs, is_of, offsets_max
from forebay.wal.checkpoints import read_published
from forebay.wal.identity import read_id_copy, read_log_id
from forebay.wal.recovery import survey_newest
from forebay.wal.segment import ChunkReader


@dataclass(frozen=True, slots=True)
class SegmentFound:
    seq: int
    path: Path
    size: int
    runs: tuple[FrameRun, ...]
    index_whole: bool
    """Whether its index is readable and fits the segment."""
    torn: bool = False
    """Whether opening the log cuts all of it off, because none of it is known to be synced."""


@dataclass(frozen=True, slots=True)
class Target:
    """A segment as it should be."""

    seq: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class LogIds:
    """The contents of the two files that hold the id of the log."""

    own: str | None
    whole: bool
    """False if the file exists but holds no valid id."""
    copy: str | None
    copy_whole: bool
    """The same for the copy."""


@dataclass(frozen=True, slots=True)
class Survey:
    """The state of a log according to its files, with its damage."""

    directory: Path
    names: SegmentNames
    ids: LogIds
    checkpoint: WalCheckpoint | None
    checkpoint_whole: bool
    """False if the checkpoint is damaged or missing."""
    published: Published | None
    segments: dict[int, SegmentFound]
    """By number, without segments that an interrupted retention pass was deleting."""
    seqs: range
    """The numbers of the segments that should exist."""
    start: int
    end: int
    """`start..end` are the offsets that the log should hold: all that are known to be synced."""
    strays: tuple[FrameRun, ...] = ()
    """Frames in the wrong files, and in files that an interrupted repair left."""
    staged: tuple[Path, ...] = ()
    """The files that an interrupted repair left."""
    older: bool = False
    """Whether this is an older copy of the topic's log, according to the catalog."""

    @property
    def runs(self) -> list[FrameRun]:
        """All runs of valid frames, in whatever file."""
        found = [run for segment in self.segments.values() for run in segment.runs]
        return [*found, *self.strays]

    @property
    def begun(self) -> bool:
        """Whether there is a log in the directory."""
        return bool(self.segments) or self.checkpoint is not None or self.published is not None

    @property
    def end_unknown(self) -> bool:
        """Whether it is unknown how many messages the log had after those that were found.

        Either it is an older copy, or its newest segment holds no valid frame and it is unknown
        how far that was synced. Such a log cannot be opened.
        """
        if self.older:
            return True
        newest = self.segments.get(self.seqs[-1]) if self.seqs else None
        if newest is None or newest.runs or newest.torn or not newest.size:
            return False
        published = self.published
        return published is None or published.seq < newest.seq

    def path(self, seq: int) -> Path:
        return self.directory / self.names.segment(seq)

    def begun_at(self, start: int) -> Survey:
        """Returns the survey of the same log with a later start."""
        return replace(self, start=max(start, self.start), end=max(start, self.end))

    def targets(self) -> list[Target]:
        """Returns the segments that should make up the log, from its start to its end.

        If it is unknown which missing files held which offsets, the offsets are spread evenly.
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
        empty = last if last in self.segments else None  # the active segment may have no frames
        return [each for each in found if each.first < each.end or each.seq == empty]


def _firsts(survey: Survey) -> list[int]:
    """Returns where each segment begins: by the checkpoint, else by its first frame."""
    remembered = _remembered(survey.checkpoint)
    known: list[int | None] = []
    for seq in survey.seqs:
        segment = survey.segments.get(seq)
        first = remembered.get(seq)
        if first is None and segment is not None and segment.runs and not segment.runs[0].start:
            first = segment.runs[0].first
        if first is None and segment is not None and segment.torn:
            first = survey.end
        known.append(first)
    if known[0] is None:
        known[0] = survey.start
    return _spread(known, survey.end)


def _spread(known: list[int | None], end: int) -> list[int]:
    """Fills unknown values evenly between the known ones around them. The first is known."""
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
    """Reads every byte of the topic's log. The caller must hold the lock on the directory."""
    checkpoint, whole = _checkpoint(disk, directory)
    published = read_published(disk, directory)
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
    if segments:
        newest = segments[max(segments)]
        segments[newest.seq] = replace(newest, torn=_torn(disk, newest, published, end))
    listed = disk.list_dir(directory)
    staged = tuple(directory / name for name in listed if is_staged_segment(name, names))
    return Survey(
        directory,
        names,
        _ids(disk, directory),
        checkpoint,
        whole,
        published,
        segments,
        seqs,
        start,
        end,
        _strays(disk, segments, staged, end, topic),
        staged,
    )


def _torn(disk: Disk, newest: SegmentFound, published: Published | None, known: int) -> bool:
    """Whether the newest segment has no frame because a crash tore it, and not by damage."""
    if newest.runs:
        return False
    mine = published is not None and published.seq == newest.seq
    synced = published.position if published is not None and mine else 0
    if newest.size < synced:
        return False
    try:
        survey_newest(disk, newest.path, expected=known, synced=synced, known=known)
    except CorruptFrame:
        return False
    return True


def _strays(
    disk: Disk,
    segments: Mapping[int, SegmentFound],
    staged: tuple[Path, ...],
    end: int,
    topic: str,
) -> tuple[FrameRun, ...]:
    """Finds frames of any offset in staged files, and in segments that are not one whole run."""
    sources = [FileBytes(disk, path) for path in staged]
    odd = (each for each in segments.values() if not _is_one_run(each.runs, each.size))
    sources += [FileBytes(disk, each.path) for each in odd]
    found = {(run.source.name, run.start) for each in segments.values() for run in each.runs}
    return tuple(
        run
        for source in sources
        for run in find_runs(source, None, end, topic)
        if (source.name, run.start) not in found and is_of(source, run.start, topic)
    )


def _is_one_run(runs: tuple[FrameRun, ...], size: int) -> bool:
    return len(runs) == 1 and runs[0].start == 0 and runs[0].stop == size


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


def _ids(disk: Disk, directory: Path) -> LogIds:
    copy = read_id_copy(disk, directory)
    copy_whole = copy is not None or not disk.exists(directory / LOG_ID_COPY_FILE)
    try:
        own = read_log_id(disk, directory)
        return LogIds(own, whole=True, copy=copy, copy_whole=copy_whole)
    except CorruptLog:
        return LogIds(None, whole=False, copy=copy, copy_whole=copy_whole)


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
        expected = runs[0].end if _is_one_run(runs, source.size()) else None
    return found


def _bound(
    disk: Disk,
    paths: Mapping[int, Path],
    remembered: Mapping[int, int],
    seq: int,
    first: int | None,
    size: int,
) -> int:
    """Returns an offset that is after every frame of the segment."""
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
