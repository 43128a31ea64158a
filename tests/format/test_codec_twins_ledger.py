"""Both twins agree on ledgers: on checksums, entries, frames, and damage."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from forebay.format import pure as frames_pure
from forebay.format.pulsar import pure
from support.codec_twins import ANY_ORDER, damage, logs, native, numbers, outcome

_core: Any = native.module


def same(name: str, *args: object) -> object:
    """What both twins return, after checking that they agree."""
    plain = outcome(getattr(pure, name), *args)
    assert outcome(getattr(_core, name), *args) == plain
    return plain


def packed(log: bytes, room: int, offset: int, entry_id: int, row: int = 0) -> object:
    """What both twins return, and the block they wrote to."""
    _, positions, lengths, *_ = frames_pure.scan(log, 0, -1, ANY_ORDER)
    results = []
    for twin in (pure, _core):
        block = bytearray(room)
        found = outcome(
            twin.pack_frames, log, positions, lengths, row, offset, entry_id, block, min(room, 5)
        )
        written = found[1] if isinstance(found, tuple) else 0
        results.append((found, bytes(block[:written])))
    assert results[0] == results[1]
    return results[0]


@given(st.binary(max_size=300))
def test_twins_agree_on_checksums(data: bytes) -> None:
    same("crc32c", data)


def test_twins_agree_on_every_length_of_a_checksum() -> None:
    data = bytes(range(256)) * 2
    for size in range(len(data)):
        same("crc32c", memoryview(data)[:size])


def first_offset(log: bytes) -> int:
    offsets, *_ = frames_pure.scan(log, 0, -1, ANY_ORDER)
    return offsets[0] if len(offsets) else 0


@given(logs(), st.integers(0, 3000), st.booleans() | st.integers(0, 2**63))
def test_twins_agree_on_the_entries_of_frames(log: bytes, room: int, offset: int) -> None:
    packed(log, room, first_offset(log) if offset is True else offset, 3)


@given(logs(), st.data())
def test_twins_agree_on_the_frames_of_entries(log: bytes, data: st.DataObject) -> None:
    _, positions, lengths, *_ = frames_pure.scan(log, 0, -1, ANY_ORDER)
    block = bytearray(1 << 16)
    offset = first_offset(log)
    start = offset if offset <= 2**62 else 0
    _, used, _, _ = pure.pack_frames(log, positions, lengths, 0, start, 0, block, 0)
    ledger = bytes(block[:used])
    if data.draw(st.booleans()):
        ledger = data.draw(damage(ledger))
    places, sizes, *_ = pure.scan_entries(ledger, 0, len(ledger), 0)
    row = data.draw(st.integers(0, len(places) + 1))
    most = data.draw(st.sampled_from([0, 100, 1 << 20]))
    same("unpack_frames", ledger, places, sizes, row, start, most)


@given(st.data())
def test_twins_agree_on_damaged_metadata_with_the_right_checksum(data: st.DataObject) -> None:
    log = data.draw(logs())
    _, positions, lengths, *_ = frames_pure.scan(log, 0, -1, ANY_ORDER)
    block = bytearray(1 << 16)
    _, used, places, _ = pure.pack_frames(log, positions, lengths, 0, 0, 0, block, 0)
    if not len(places):
        return
    body = data.draw(damage(bytes(block[18:used])))
    entry = b"\x0e\x01" + pure.crc32c(body).to_bytes(4, "big") + body
    same(
        "unpack_frames",
        entry,
        memoryview((0).to_bytes(8, "little")).cast("Q"),
        memoryview(len(entry).to_bytes(4, "little")).cast("I"),
        0,
        0,
        1 << 20,
    )


@given(st.binary(max_size=200), numbers, numbers, numbers)
def test_twins_agree_on_arbitrary_entries(data: bytes, start: int, left: int, first: int) -> None:
    same("scan_entries", data, start % 250, left, first)


@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(0, 12), st.data())
def test_twins_agree_on_cut_and_damaged_entries(
    entries: list[bytes], padded: int, data: st.DataObject
) -> None:
    whole = b"".join(
        pure.ENTRY_HEADER.pack(len(entry), number) + entry for number, entry in enumerate(entries)
    )
    whole += (b"\xfe\xdc\xde\xad" * 3)[:padded]
    left = len(whole) + data.draw(st.integers(-5, 30))
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    same("scan_entries", cut, 0, max(left, 0), 0)
    if whole:
        same("scan_entries", data.draw(damage(whole)), 0, max(left, 0), 0)


@given(st.lists(st.binary(max_size=40), max_size=4), st.integers(0, 5), st.data())
def test_twins_agree_on_which_entry_is_damaged(
    bodies: list[bytes], row: int, data: st.DataObject
) -> None:
    entries = []
    for rest in bodies:
        size = data.draw(st.sampled_from([len(rest), 6, 5, 0, 2**32 - 1]))
        body = size.to_bytes(4, "big") + rest
        checked = b"\x0e\x01" + pure.crc32c(body).to_bytes(4, "big") + body
        broker = data.draw(st.sampled_from([b"", b"\x0e\x02\0\0\0\x02ab", b"\x0e\x02\xff"]))
        entries.append(broker + data.draw(st.sampled_from([body, checked])))
    block = b"".join(
        pure.ENTRY_HEADER.pack(len(entry), number) + entry for number, entry in enumerate(entries)
    )
    places, sizes, *_ = pure.scan_entries(block, 0, len(block), 0)
    same("check_entries", block, places, sizes, row)
    if block:
        damaged = (data.draw(damage(block)) + bytes(len(block)))[: len(block)]
        same("check_entries", damaged, places, sizes, row)


@given(
    st.lists(st.binary(max_size=40), max_size=6),
    st.integers(-1, 7),
    numbers,
    st.integers(0, 200),
    st.integers(0, 220),
)
def test_twins_agree_on_packed_entries(
    entries: list[bytes], index: int, entry_id: int, room: int, at: int
) -> None:
    blocks = bytearray(room), bytearray(room)
    found = [
        outcome(twin.pack_entries, list(entries), index, entry_id, block, at)
        for twin, block in zip((pure, _core), blocks, strict=True)
    ]
    assert found[0] == found[1]
    assert blocks[0] == blocks[1]


def test_twins_refuse_entries_that_are_no_list_or_no_bytes() -> None:
    for entries in ((b"",), ["text"], [b"", None]):
        same("pack_entries", entries, 0, 0, bytearray(100), 0)
