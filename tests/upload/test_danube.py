"""What is found in Danube's files, and which frames of them an import takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import CorruptFrame, CorruptLog, ServiceRefused, UsageError
from forebay.files.local import LocalDisk
from forebay.format.frame import HEADER_BYTES, scan
from forebay.format.names import TopicName
from forebay.objects.local import LocalBackend
from forebay.settings import UploaderSettings
from forebay.upload import danube
from forebay.upload.danube import (
    BlockReader,
    DanubeSource,
    Inspected,
    Listing,
    Piece,
    Run,
    SourceFile,
    SourceReaders,
    digest,
    inspect,
    lay_out,
    list_bucket,
    list_wal,
    measure,
    plan_objects,
)
from forebay.upload.plan import Extent
from support.danube_files import GOLDEN_A, GOLDEN_C, Danube, frame, frames, message
from support.danube_messages import encoded, fixed

ORDERS = TopicName("default", "orders")


def found_in(data: bytes, *, newest: bool = False, topic: TopicName = ORDERS) -> Inspected:
    file = SourceFile(topic, "wal", "wal.log", len(data), newest=newest)
    return inspect(file, BlockReader(file.name, lambda start, end: data[start:end], len(data)))


# ---- one file ----


def test_the_golden_frames_of_both_encodings_are_found() -> None:
    t1 = TopicName("default", "t1")
    for golden in (GOLDEN_A, GOLDEN_C):
        found = found_in(golden, topic=t1)
        assert found.runs == (Run(5, 6, 0, len(golden)),)
        assert not found.damage


@pytest.mark.parametrize("later", [False, True])
def test_frames_in_order_are_one_run(later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(danube, "BLOCK_BYTES", 1000)  # frames cross the blocks
    data = frames(range(7, 500), later=later)
    found = found_in(data)
    assert (found.runs, found.damage, found.torn) == ((Run(7, 500, 0, len(data)),), (), 0)
    assert found.messages == 493


def test_an_empty_file_has_nothing_and_is_no_damage() -> None:
    found = found_in(b"")
    assert (found.runs, found.damage, found.torn, found.messages) == ((), (), 0, 0)


def test_frames_of_several_producers_may_be_out_of_order() -> None:
    order = [0, 1, 3, 2, 4, 5, 9, 8, 7, 6]
    found = found_in(frames(order))
    assert not found.damage
    assert found.messages == 10
    assert sorted(run.start for run in found.runs) == [0, 2, 3, 4, 6, 7, 8, 9]
    assert [each.first for each in lay_out([found]).pieces] == [0, 2, 3, 4, 6, 7, 8, 9]
    assert lay_out([found]).gaps == []


def test_offsets_that_begin_again_are_two_runs() -> None:
    """After a restart Danube assigned offsets from 0 on, in the same file."""
    found = found_in(frames(range(10)) + frames(range(4), text="again "))
    assert [(run.start, run.next) for run in found.runs] == [(0, 10), (0, 4)]
    layout = lay_out([found])
    assert [(each.first, each.until) for each in layout.pieces] == [(0, 10)]
    assert [(copy.dropped.first, copy.dropped.until) for copy in layout.copies] == [(0, 4)]


@pytest.mark.parametrize("cut", [1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 50])
def test_only_the_newest_wal_file_may_end_inside_a_frame(cut: int) -> None:
    whole = frames(range(5))
    data = whole + frames([5])[:cut]
    found = found_in(data, newest=True)
    assert (found.messages, found.torn, found.damage) == (5, cut, ())
    [damage] = found_in(data).damage
    assert (damage.position, damage.stop, damage.offset) == (len(whole), len(data), 5)
    assert "ends inside a frame" in damage.reason


def damaged(data: bytes, number: int, at: int) -> bytes:
    """Flips a bit of one of the frames; `at` counts from the start of the frame."""
    position = scan(data).positions[number] - HEADER_BYTES + at
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


@pytest.mark.parametrize("newest", [False, True])
@pytest.mark.parametrize("at", [0, 9, 11, 12, HEADER_BYTES, HEADER_BYTES + 40])
def test_damage_is_named_and_the_frames_after_it_are_found(at: int, newest: bool) -> None:
    """In the offset, the length, the CRC or the payload, also where a length leads too far."""
    data = frames(range(20))
    start = scan(data).positions[7] - HEADER_BYTES
    found = found_in(damaged(data, 7, at), newest=newest)
    [damage] = found.damage
    assert (damage.position, damage.offset) == (start, 7)
    assert damage.stop == scan(data).positions[8] - HEADER_BYTES
    assert [(run.start, run.next) for run in found.runs] == [(0, 7), (8, 20)]
    assert lay_out([found]).gaps == [(7, 8)]


def test_frames_after_damage_are_found_whatever_their_offsets() -> None:
    for order in ([3, 0, 1, 2], [0, 3, 1, 2], [2, 1, 0, 3]):
        for bad, lost in enumerate(order):
            found = found_in(damaged(frames(order), bad, HEADER_BYTES + 40))
            assert len(found.damage) == 1
            held = {offset for run in found.runs for offset in range(run.start, run.next)}
            assert held == {0, 1, 2, 3} - {lost}


def test_a_frame_inside_a_damaged_payload_is_not_taken_for_a_message() -> None:
    nested = encoded(replace(message(1), payload=frames([7])), fixed, 0)
    data = frames([0]) + frame(1, nested) + frames([2])
    found = found_in(damaged(data, 1, HEADER_BYTES + 1))
    assert [(run.start, run.next) for run in found.runs] == [(0, 1), (2, 3)]


def test_zeros_and_foreign_bytes_are_damage() -> None:
    for filler in (bytes(300), b"\xff" * 300, frame(3, b"not a message at all")):
        found = found_in(frames(range(3)) + filler + frames(range(4, 9)))
        assert len(found.damage) == 1
        assert [(run.start, run.next) for run in found.runs] == [(0, 3), (4, 9)]


def test_a_file_that_becomes_shorter_or_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "wal.log"
    path.write_bytes(frames(range(3)))
    size = path.stat().st_size
    with SourceReaders(lambda: LocalBackend(tmp_path), LocalDisk()) as readers:
        longer = SourceFile(ORDERS, "wal", str(path), size + 1)
        with pytest.raises(CorruptLog, match="has become shorter"):
            inspect(longer, readers.reader(longer))
        absent = SourceFile(ORDERS, "wal", str(tmp_path / "none"), size)
        with pytest.raises(ServiceRefused, match="cannot be read on"):
            readers.reader(absent)


def test_a_file_in_hopeless_disorder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(danube, "IMPORT_RUNS_MAX", 5)
    with pytest.raises(CorruptLog, match="out of order at more than 5 places"):
        found_in(frames([0, 2, 4, 6, 8, 10, 12]))


# ---- which frames are taken ----


def made(ranges: Sequence[tuple[int, int]], name: str) -> Inspected:
    """A file with frames of one byte each."""
    runs, at = [], 0
    for start, end in ranges:
        runs.append(Run(start, end, at, at + end - start))
        at += end - start
    return Inspected(SourceFile(ORDERS, "wal", name, at), tuple(runs), (), 0)


ranges = st.tuples(st.integers(0, 30), st.integers(1, 10)).map(lambda each: (each[0], sum(each)))


@given(st.lists(st.lists(ranges, max_size=4), max_size=4), st.lists(ranges, max_size=2))
def test_every_offset_is_taken_once_from_the_first_file_that_has_it(
    files: list[list[tuple[int, int]]], expected: list[tuple[int, int]]
) -> None:
    layout = lay_out([made(each, f"file-{at}") for at, each in enumerate(files)], expected)
    held: dict[int, int] = {}
    copies = 0
    for number, file in enumerate(files):
        for start, end in file:
            for offset in range(start, end):
                copies += offset in held
                held.setdefault(offset, number)
    taken = {
        offset: piece.file for piece in layout.pieces for offset in range(piece.first, piece.until)
    }
    assert taken == held
    assert sum(piece.until - piece.first for piece in layout.pieces) == len(held)
    assert [piece.first for piece in layout.pieces] == sorted(
        piece.first for piece in layout.pieces
    )
    assert sum(copy.dropped.until - copy.dropped.first for copy in layout.copies) == copies
    for copy in layout.copies:
        assert (copy.kept.first, copy.kept.until) == (copy.dropped.first, copy.dropped.until)
        assert all(held[offset] == copy.kept.file for offset in range(*copy.kept[2:]))
    wanted = {offset for start, end in expected for offset in range(start, end)} | held.keys()
    gaps = {offset for start, end in layout.gaps for offset in range(start, end)}
    if wanted:
        assert (layout.start, layout.end) == (min(wanted), max(wanted) + 1)
        assert gaps == set(range(min(wanted), max(wanted) + 1)) - held.keys()


def extents(*sizes: tuple[int, int, int]) -> list[Extent]:
    return [Extent(0, Path("f"), 0, size, first, until) for first, until, size in sizes]


def test_extents_are_grouped_up_to_the_limits_and_never_over_a_gap() -> None:
    settings = UploaderSettings(max_object_bytes=100, max_object_messages=10)
    planned = plan_objects(
        extents((0, 3, 60), (3, 4, 40), (4, 5, 1), (7, 8, 500), (8, 18, 10), (18, 19, 1)), settings
    )
    assert [(each.start_offset, each.next_offset) for each in planned] == [
        (0, 4), (4, 5), (7, 8), (8, 18), (18, 19),
    ]  # fmt: skip


def test_a_part_of_a_run_is_measured_and_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(danube, "BLOCK_BYTES", 700)
    data = frames(range(50, 90))
    (tmp_path / "wal.log").write_bytes(data)
    file = SourceFile(ORDERS, "wal", str(tmp_path / "wal.log"), len(data))
    with SourceReaders(lambda: LocalBackend(tmp_path), LocalDisk()) as readers:
        reader = readers.reader(file)
        [run] = inspect(file, reader).runs
        assert measure(file.name, reader, run, [50, 61, 62, 89]) == [
            len(frames(range(50, offset))) for offset in (50, 61, 62, 89)
        ]
        for first, until in ((50, 51), (61, 77), (89, 90)):
            start, stop = (len(frames(range(50, offset))) for offset in (first, until))
            extent = Extent(0, Path(file.name), start, stop, first, until)
            read = DanubeSource(readers, {0: file}).frames([extent])
            assert b"".join(bytes(each.raw) for each in read) == frames(range(first, until))
            piece = Piece(0, Run(first, until, start, stop), first, until)
            expected = "sha256:" + sha256(frames(range(first, until))).hexdigest()
            assert digest(readers, {0: file}, [piece]) == expected
        wrong = Extent(0, Path(file.name), run.position, run.stop, 50, 91)
        with pytest.raises(CorruptFrame, match="the file has changed"):
            list(DanubeSource(readers, {0: file}).frames([wrong]))


# ---- listings ----


def test_the_files_of_all_topics_are_listed(tmp_path: Path) -> None:
    source = Danube(tmp_path)
    source.put(0, 3)
    source.put_later(3, 3)
    source.object("/default/orders", "data-6-pending.dnb1", b"")
    source.object("/default/orders", "README", b"")
    source.put(0, 1, "/other/new")
    source.write(0, b"")
    source.write(10, b"")
    source.write(2, b"")
    (source.wal / "default/orders/notes").write_bytes(b"")
    (source.wal / "default/a.b").mkdir()
    listing = Listing()
    list_bucket(LocalBackend(source.bucket), listing)
    list_wal(LocalDisk(), source.wal, listing)
    assert sorted(listing.topics) == [ORDERS, TopicName("other", "new")]
    assert listing.pending == {ORDERS: 1}
    names = [Path(each.name).name for each in listing.topics[ORDERS] if each.kind == "wal"]
    assert names == ["wal.log", "wal.2.log", "wal.10.log"]
    assert [each.newest for each in listing.topics[ORDERS]][-3:] == [False, False, True]
    assert len(listing.unknown) == 3


def test_a_bucket_of_forebay_is_not_imported(tmp_path: Path) -> None:
    source = Danube(tmp_path)
    source.object("/default/orders", "begin-0", b"")
    with pytest.raises(UsageError, match="is a store of Forebay"):
        list_bucket(LocalBackend(source.bucket), Listing())
