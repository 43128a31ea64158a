"""`next_place_in_ledger`: where a topic's ledger can be read on after damage.

An entry says its id, and entries follow each other. So one is found again by three things: its id
is after the damaged one, its data begin as those of every entry with a checksum, and the entry
after it has the next id. The search ends at the next place that the index of the object names, and
then that place is used; the ids in between bound those that count. After that come the blocks.

Beware: only a header is looked at. The data of the entry may be damaged too, and then the reader
asks again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from forebay.format.pulsar import pure
from forebay.format.pulsar.blocks import ENTRY_HEADER_BYTES
from forebay.format.pulsar.frames import next_entry
from forebay.format.resync import OffsetPosition, ReadAt

_CHECKED: Final = bytes.fromhex("0e01")
"""What the data of an entry begin with, if it has a checksum."""


def next_place_in_ledger(
    span: tuple[int, int],
    size: int,
    block_bytes: int,
    index: Sequence[OffsetPosition],
    damage: OffsetPosition,
    read: ReadAt,
    window_bytes: int,
) -> OffsetPosition | None:
    """Returns offset and position of an entry or a block at which to continue, or None.

    `span` has the offsets of the ledger, the end not included, and `damage` the offset that was
    expected at a position. `index` are known places.
    """
    start, end = span
    offset, position = damage
    block_end = min((position // block_bytes + 1) * block_bytes, size)
    following = next_entry(offset, position, size, start, block_bytes, end - 1, read)
    if following is not None and following[1] < block_end:
        return following
    known = next((each for each in index if each[0] > offset and each[1] > position), None)
    bounds = [each for each in (known, following) if each is not None]
    last, stop = min(bounds, default=(end, size))
    ids = range(offset - start + 1, last - start)
    at = position + 1
    while at < stop:  # of the blocks before `following`, only the headers are damaged
        found = _search(at, min(stop, block_end), block_end, ids, read, window_bytes)
        if found is not None:
            return start + found[0], found[1]
        at, block_end = block_end, min(block_end + block_bytes, size)
    return min(bounds, default=None)


def _search(
    position: int, stop: int, block_end: int, ids: range, read: ReadAt, window_bytes: int
) -> tuple[int, int] | None:
    """Returns id and position of the first entry header in `position..stop` that fits."""
    at = position
    least = ENTRY_HEADER_BYTES + len(_CHECKED)
    while at + least <= stop and ids:
        window = bytes(read(at, min(at + max(window_bytes, 2 * least), stop)))
        hit = window.find(_CHECKED, ENTRY_HEADER_BYTES)
        while hit >= 0:
            begin = hit - ENTRY_HEADER_BYTES
            length, entry_id = pure.ENTRY_HEADER.unpack_from(window, begin)
            if entry_id in ids and _is_followed(at + hit + length, entry_id, block_end, read):
                return entry_id, at + begin
            hit = window.find(_CHECKED, hit + 1)
        if at + len(window) >= stop:
            return None
        at += len(window) - least + 1
    return None


def _is_followed(at: int, entry_id: int, block_end: int, read: ReadAt) -> bool:
    """Whether the next entry begins there, or padding, or whether the block ends there."""
    if at >= block_end:
        return at == block_end
    if at + ENTRY_HEADER_BYTES > block_end:
        return True
    length, following = pure.ENTRY_HEADER.unpack(read(at, at + ENTRY_HEADER_BYTES))
    return length < 0 or bool(following == entry_id + 1)
