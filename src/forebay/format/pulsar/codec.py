"""The codec of ledgers: the compiled module `_native` if it was built, otherwise `pulsar.pure`.

Both return the same results and raise the same errors; only the speed differs. The contracts of
the functions are in `pure`. `forebay.format.codec` says which of the two is used.
"""

from __future__ import annotations

from forebay.format.codec import compiled
from forebay.format.layout import Buffer
from forebay.format.pulsar import pure
from forebay.format.pulsar.pure import RawEntries, RawFrames, RawPacked

crc32c = pure.crc32c if compiled is None else compiled.crc32c
pack_entries = pure.pack_entries if compiled is None else compiled.pack_entries
check_entries = pure.check_entries if compiled is None else compiled.check_entries


def scan_entries(buffer: Buffer, start: int, left: int, entry_id: int) -> RawEntries:
    if compiled is None:
        return pure.scan_entries(buffer, start, left, entry_id)
    positions, lengths, at, end = compiled.scan_entries(buffer, start, left, entry_id)
    return memoryview(positions).cast("Q"), memoryview(lengths).cast("I"), at, end


def pack_frames(
    buffer: Buffer,
    positions: Buffer,
    lengths: Buffer,
    row: int,
    offset: int,
    entry_id: int,
    block: bytearray,
    at: int,
) -> RawPacked:
    if compiled is None:
        return pure.pack_frames(buffer, positions, lengths, row, offset, entry_id, block, at)
    row, at, places, needed = compiled.pack_frames(
        buffer, positions, lengths, row, offset, entry_id, block, at
    )
    return row, at, memoryview(places).cast("Q"), needed


def unpack_frames(
    buffer: Buffer, positions: Buffer, lengths: Buffer, row: int, offset: int, bytes_max: int
) -> RawFrames:
    if compiled is None:
        return pure.unpack_frames(buffer, positions, lengths, row, offset, bytes_max)
    frames, places, sizes, row, fault = compiled.unpack_frames(
        buffer, positions, lengths, row, offset, bytes_max
    )
    return frames, memoryview(places).cast("Q"), memoryview(sizes).cast("I"), row, fault
