"""Decodes the objects of an offloaded ledger for people: the blocks and entries, and the index.

For `forebay inspect`, on a file that was copied from a bucket, of Pulsar's or of Forebay's. An
object is known by its first bytes, whatever the name of the file. Damage is named with its
position; what comes before it is shown.

Beware: a data object alone does not tell how many entries it should have. One that was cut off
between two blocks looks whole: compare its last entry with the index.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from forebay.errors import LedgerError
from forebay.files.disk import Disk, ReadFile, read_range
from forebay.format.layout import Buffer
from forebay.format.pulsar.blocks import (
    BLOCK_HEADER_BYTES,
    ENTRY_HEADER_BYTES,
    EntryScanner,
    decode_block_header,
)
from forebay.format.pulsar.entry import Compression, ParsedEntry, decode_entry
from forebay.format.pulsar.index import decode_index
from forebay.limits import MIB

Facts = dict[str, Any]

_DATA_MAGICS: Final = (b"\xfb\xdb\xab\xcb", b"\x26\xa6\x6d\x32")
_INDEX_MAGICS: Final = (b"\xde\x47\xde\x47", b"\x3d\x1f\xb0\xbc")
"""Those of Pulsar's streaming offload are known too, and refused with a better message."""
_SHOWN_BYTES: Final = 64
_SHOWN_TEXT: Final = 256
_SHOWN_PROPERTIES: Final = 20


def is_ledger_data(head: bytes) -> bool:
    """Whether a file that begins so is the data object of a ledger."""
    return head.startswith(_DATA_MAGICS)


def is_ledger_index(head: bytes) -> bool:
    """Whether a file that begins so is the index object of a ledger."""
    return head.startswith(_INDEX_MAGICS)


def index_facts(path: Path, data: bytes, limit: int | None) -> Facts:
    """Returns what an index object says, with at most `limit` blocks; LedgerError if damaged."""
    try:
        index = decode_index(data)
    except LedgerError as error:
        raise LedgerError(f"{path}: {error}") from error
    metadata = index.metadata
    return {
        "type": "LedgerIndex",
        "data_bytes": index.data_bytes,
        "entries": index.last_entry_id + 1,
        "entry_bytes": metadata.length,
        "state": None if metadata.state is None else metadata.state.name,
        "ensemble_size": metadata.ensemble_size,
        "quorum_size": metadata.quorum_size,
        "ack_quorum_size": metadata.ack_quorum_size,
        "digest_type": None if metadata.digest_type is None else metadata.digest_type.name,
        "created_ms": metadata.created_ms,
        "ensembles": [[each.first_entry_id, *each.members] for each in metadata.ensembles[:limit]],
        "custom_metadata": {name: _text(value) for name, value in metadata.custom[:limit]},
        "block_header_bytes": index.header_bytes,
        "block_count": len(index.blocks),
        "blocks": [
            {"first_entry_id": each.first_entry_id, "part": each.part, "position": each.position}
            for each in index.blocks[:limit]
        ],
    }


def ledger_facts(disk: Disk, path: Path, limit: int | None) -> Iterator[Facts]:
    """Yields the blocks and entries of a data object, at most `limit` entries; a summary last.

    Every entry is checked, whatever the limit.
    """
    file = disk.open_read(path)
    try:
        size = file.size()
        scanner = EntryScanner(_first_entry(file), 0, size)
        walk = _Walk(limit)
        for start in range(0, size, MIB):
            chunk = read_range(file, start, min(start + MIB, size))
            for found in scanner.feed(chunk):
                end = scanner.block_end
                for entry, at in zip(found, found.positions, strict=True):
                    position = found.base + at - ENTRY_HEADER_BYTES
                    yield from walk.entry(entry.entry_id, position, entry.data, end)
        scanner.require_end()
    finally:
        file.close()
    damage = scanner.damage
    yield {
        "type": "LedgerData",
        "blocks": walk.blocks,
        "entries": walk.entries,
        "bytes": size,
        "entry_bytes": walk.entry_bytes,
        "valid_bytes": scanner.position if damage is None else damage.position,
        "bad_entries": walk.bad,
        "end": "complete" if damage is None else f"{damage.reason}, at {damage.position}",
        "damaged": damage is not None or walk.bad > 0,
        "next_entry_id": scanner.entry_id,
    }


class _Walk:
    """What was seen of a data object so far."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._block_end = 0
        self.blocks = self.entries = self.entry_bytes = self.bad = 0

    def entry(self, entry_id: int, position: int, data: Buffer, block_end: int) -> Iterator[Facts]:
        """Yields the facts of an entry that are to be shown, and its block's before the first."""
        shown = self._limit is None or self.entries < self._limit
        if block_end != self._block_end:
            self._block_end = block_end
            self.blocks += 1
            if shown:
                yield _block(entry_id, position, block_end)
        self.entries += 1
        self.entry_bytes += len(data)
        facts = {
            "type": "Entry",
            "entry_id": entry_id,
            "position": position,
            "entry_bytes": len(data),
        }
        try:
            parsed = decode_entry(data)
        except LedgerError as error:
            self.bad += 1
            shown = shown or self._limit is None or self.bad <= self._limit
            facts["error"] = str(error)
        else:
            facts |= _message(parsed) if shown else {}
        if shown:
            yield facts


def _first_entry(file: ReadFile) -> int:
    """The first entry by the header of the first block; 0 if that is damaged."""
    try:
        return decode_block_header(read_range(file, 0, BLOCK_HEADER_BYTES)).first_entry_id
    except (LedgerError, EOFError):
        return 0


def _block(first_entry_id: int, first_position: int, end: int) -> Facts:
    position = first_position - BLOCK_HEADER_BYTES
    return {
        "type": "Block",
        "first_entry_id": first_entry_id,
        "position": position,
        "bytes": end - position,
    }


def _message(parsed: ParsedEntry) -> Facts:
    """What the metadata of an entry says, without fields that are not set."""
    metadata = parsed.metadata
    found: Facts = {
        "checksum": None if parsed.checksum is None else f"{parsed.checksum:08x}",
        "producer": metadata.producer_name,
        "sequence_id": metadata.sequence_id,
        "publish_time": metadata.publish_time,
        "payload_bytes": len(parsed.payload),
    }
    more: Facts = {
        "event_time": metadata.event_time or None,
        "properties": {
            key[:_SHOWN_TEXT]: value[:_SHOWN_TEXT]
            for key, value in metadata.properties[:_SHOWN_PROPERTIES]
        },
        "partition_key": metadata.partition_key,
        "batch_messages": metadata.batch_messages,
        "marker_type": metadata.marker_type,
        "chunk_id": metadata.chunk_id,
        "chunks": metadata.chunks,
        "encryption_keys": [key.name for key in metadata.encryption_keys],
    }
    if parsed.broker is not None:
        more["broker_timestamp"] = parsed.broker.broker_timestamp
        more["index"] = parsed.broker.index
    if metadata.compression:
        more["compression"] = _compression(metadata.compression)
        more["uncompressed_bytes"] = metadata.uncompressed_size
    found |= {name: value for name, value in more.items() if value not in (None, {}, [])}
    return {**found, "payload": _text(bytes(parsed.payload[:_SHOWN_BYTES]))}


def _compression(number: int) -> str:
    known = {each.value: each.name for each in Compression}
    return known.get(number, f"unknown ({number})")


def _text(value: bytes) -> str:
    return value[:_SHOWN_TEXT].decode("utf-8", "backslashreplace")
