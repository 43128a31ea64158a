"""A stand-in for the codec of frames and entries: every entry holds its frame verbatim.

Beware: it is slow.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from zlib import crc32

from forebay.errors import LedgerError
from forebay.format.frame import Corruption, Scan, scan
from forebay.format.layout import Buffer
from forebay.format.message import decode_message
from forebay.format.pulsar.blocks import ENTRY_HEADER_BYTES, EntryPacker, EntryScanner
from forebay.format.pulsar.entry import MessageMetadata, decode_entry, encode_entry


class FramePacker:
    """Encodes frames as entries, and packs them into blocks."""

    def __init__(self, block_bytes: int) -> None:
        self.packer = EntryPacker(block_bytes)
        self.positions = array("Q")

    def add(self, frames: Scan) -> Iterator[Buffer]:
        self.positions = array("Q")
        for frame in frames:
            message = decode_message(frame.payload, offset=frame.offset)
            metadata = MessageMetadata(
                message.producer_name,
                message.request_id,
                message.publish_time,
                properties=tuple(message.attributes.items()),
                extension=bytes(frame.payload),
            )
            data = encode_entry(metadata, message.payload)
            if not self.packer.fits(len(data)):
                yield self.packer.cut()
            self.positions.append(self.packer.position + self.packer.used)
            self.packer.add(data)

    def finish(self) -> Buffer:
        return self.packer.finish()


class EntryAssembler:
    """Decodes the entries of a data object to the frames that they were made of."""

    def __init__(self, offset: int, position: int, size: int, start: int, block_bytes: int) -> None:
        self.offset = offset
        self.corruption: Corruption | None = None
        self._start = start
        end = None
        if position % block_bytes:
            end = min((position // block_bytes + 1) * block_bytes, size)
        self._scanner = EntryScanner(offset - start, position, size, end)
        self.positions = array("Q")

    @property
    def position(self) -> int:
        return self._scanner.position

    @property
    def needed(self) -> int:
        return self._scanner.needed

    def feed(self, chunk: Buffer) -> Iterator[Scan]:
        if self.corruption is not None:
            return
        for found in self._scanner.feed(chunk):
            out = bytearray()
            self.positions = array("Q")
            for number, entry in enumerate(found):
                at = found.base + found.positions[number] - ENTRY_HEADER_BYTES
                try:
                    raw = decode_entry(entry.data).metadata.extension or b""
                except LedgerError as error:
                    if out:
                        yield self._scan(out)
                    self.corruption = Corruption(str(error), at, self.offset)
                    return
                offset = self._start + entry.entry_id
                out += struct.pack("<QII", offset, len(raw), crc32(raw)) + raw
                self.positions.append(at)
            if out:
                yield self._scan(out)
        if self._scanner.damage is not None:
            self.fail(self._scanner.damage.reason)

    def _scan(self, out: bytearray) -> Scan:
        made = scan(out, expected=self.offset, consecutive=True)
        self.offset += len(made)
        return made

    def require_end(self, next_offset: int | None) -> None:
        if self.corruption is not None:
            return
        if self._scanner.pending:
            self.fail("the bytes end inside an entry")
        elif next_offset is not None and self.offset != next_offset:
            self.fail(f"the next entry should have offset {next_offset}")

    def fail(self, reason: str) -> None:
        self.corruption = Corruption(reason, self._scanner.position, self.offset)
