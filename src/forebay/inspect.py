"""Decodes any file of a store, without opening the log. Changes nothing.

It recognizes, by name and content: segments and objects (frames), descriptors, checkpoints (ours
and Danube's), published positions, segment indexes, ids of logs and stores, a server's address
file, its list of jobs, the catalog, and both objects of a ledger that Pulsar or Forebay offloaded.
Any other file is refused.

Beware: a segment that ends with a torn frame is not damaged. Its owner is writing it, or has
crashed and will cut the frame when it opens the log again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from forebay.catalog.catalog import Catalog
from forebay.catalog.connect import FILE_NAME
from forebay.catalog.kv import Kv
from forebay.catalog.sqlite import SqliteKv
from forebay.client.address import is_id, read_server_info
from forebay.errors import CheckpointError, DescriptorError, MessageError, UsageError
from forebay.files.disk import Disk, ReadFile, read_file, read_range
from forebay.files.local import LocalDisk
from forebay.format.blocks import (
    BLOCK_HEADER_BYTES,
    BlockAssembler,
    BlockError,
    decode_header,
)
from forebay.format.checkpoint import (
    decode_any_checkpoint,
    decode_danube_uploader_checkpoint,
    decode_danube_wal_checkpoint,
    decode_published,
    is_checkpoint,
)
from forebay.format.descriptor import ZSTD, decode_descriptor
from forebay.format.frame import End, Scan
from forebay.format.index import SegmentIndex, decode_index, index_segment_bytes
from forebay.format.message import decode_message
from forebay.format.names import (
    FAILED_FILE,
    JOBS_FILE,
    LOG_ID_FILE,
    SERVER_FILE,
    SIDECAR_ENDING,
    STORE_ID_FILE,
    TOPICS_PREFIX,
    UPLOADER_CHECKPOINT_FILE,
    after_prefix,
    is_compressed,
)
from forebay.limits import (
    CHECKPOINT_BYTES_MAX,
    DESCRIPTOR_BYTES_MAX,
    KIB,
    LEDGER_INDEX_BYTES_MAX,
    MIB,
)
from forebay.pulsar.inspect import index_facts, is_ledger_data, is_ledger_index, ledger_facts
from forebay.wal.identity import read_log_id
from forebay.wal.segment import ChunkReader, scan_segment

Facts = dict[str, Any]

_SQLITE: Final = b"SQLite format 3\0"
_FRAMES: Final = re.compile(r"(aside-.*-)?wal(\.[0-9]+)?\.log|data-.*\.dnb1|wal\..*\.(torn|tmp)")
"""Names of files that hold frames, so that damaged ones are recognized too."""
_CATALOG_MARK: Final = b"FBC1"
"""SQLite's application id in a catalog, at byte 68."""


def inspect(path: Path, *, limit: int | None = None, disk: Disk | None = None) -> Iterator[Facts]:
    """Yields what the file holds as dicts with a `type`.

    Files of frames, the catalog and the list of jobs give at most `limit` records and a summary
    last; other files give one dict, with lists cut to `limit`. Damaged frames are reported in the
    summary; other damaged files raise CorruptLog or FormatError. Raises UsageError if the file is
    missing or not one of a store's.
    """
    disk = disk or LocalDisk()
    if not disk.exists(path):
        raise UsageError(f"{path}: no such file")
    if path.is_dir():
        raise UsageError(f"{path} is a directory; name one of its files")
    if ".ckpt" in path.name:
        yield _checkpoint(path, _small(disk, path, CHECKPOINT_BYTES_MAX), limit)
    elif path.suffix == ".synced":
        yield _published(path, _small(disk, path, 4 * KIB))
    elif path.suffix == ".idx":
        yield _index(path, _small(disk, path, CHECKPOINT_BYTES_MAX), limit)
    elif path.name == FAILED_FILE:
        error = _small(disk, path, MIB).decode("utf-8", "backslashreplace")
        yield {"type": "FailedSync", "error": error}
    elif path.name == LOG_ID_FILE:
        yield {"type": "LogId", "log_id": read_log_id(disk, path.parent)}
    elif path.name == SERVER_FILE:
        yield _server(path)
    elif path.name == STORE_ID_FILE:
        yield _store_id(path, _small(disk, path, KIB))
    elif path.name == JOBS_FILE:
        yield from _jobs(path, _small(disk, path, CHECKPOINT_BYTES_MAX), limit)
    elif path.suffix == SIDECAR_ENDING:
        yield _descriptor(path, _small(disk, path, DESCRIPTOR_BYTES_MAX), limit)
    elif (head := _head(disk, path)).startswith(_SQLITE):
        yield from _catalog(path, head, limit)
    elif is_ledger_data(head):
        yield from ledger_facts(disk, path, limit)
    elif is_ledger_index(head):
        yield index_facts(path, _small(disk, path, LEDGER_INDEX_BYTES_MAX), limit)
    elif is_compressed(path.name):
        yield from _blocks(disk, path, limit)
    elif _FRAMES.fullmatch(path.name) or _begins_with_a_frame(disk, path):
        yield from _frames(disk, path, limit)
    else:
        raise UsageError(
            f"{path} is not a file of a store: its name is none of theirs, and it does not begin "
            "with a frame"
        )


def _small(disk: Disk, path: Path, bytes_max: int) -> bytes:
    try:
        return read_file(disk, path, bytes_max=bytes_max)
    except ValueError as error:
        raise UsageError(f"{error}: too large for a file of that name") from error


def _server(path: Path) -> Facts:
    note = read_server_info(path.parent)
    if note is None:
        raise UsageError(f"{path} does not hold the address of a server")
    return {"type": "ServerInfo", **asdict(note)}


def _store_id(path: Path, data: bytes) -> Facts:
    found = data.decode("ascii", "replace").strip()
    if not is_id(found):
        raise UsageError(f"{path} does not hold the id of a store, 32 hexadecimal digits")
    return {"type": "StoreId", "store": found}


def _jobs(path: Path, data: bytes, limit: int | None) -> Iterator[Facts]:
    """Yields a record for each line (at most `limit`), and a summary last."""
    lines = data.splitlines()
    for number, line in enumerate(lines[:limit], 1):
        try:
            found = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{path}: line {number} is not JSON: {error}") from error
        yield {"type": "Job", **(found if isinstance(found, dict) else {"value": found})}
    yield {"type": "Jobs", "lines": len(lines)}


def _begins_with_a_frame(disk: Disk, path: Path) -> bool:
    file = disk.open_read(path)
    try:
        size = file.size()
        return size > 0 and len(ChunkReader(1).read(file, 0, size, None)) > 0
    finally:
        file.close()


def _checkpoint(path: Path, data: bytes, limit: int | None) -> Facts:
    if is_checkpoint(data):
        found = decode_any_checkpoint(data)
        facts = {"type": type(found).__name__, **asdict(found)}
        return _cut(facts, "index_entries_in_progress", limit)
    uploader = path.name.startswith(UPLOADER_CHECKPOINT_FILE)
    decode = decode_danube_uploader_checkpoint if uploader else decode_danube_wal_checkpoint
    try:
        foreign = decode(data)
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} is not a checkpoint, neither of Forebay nor of Danube"
        ) from error
    return {"type": type(foreign).__name__, **asdict(foreign)}


def _published(path: Path, data: bytes) -> Facts:
    found = decode_published(data)
    if found is None:
        raise CheckpointError(f"{path} holds no published position, or a damaged one")
    return {"type": "Published", **found._asdict()}


def _index(path: Path, data: bytes, limit: int | None) -> Facts:
    size = index_segment_bytes(data)
    index = None if size is None else decode_index(data, size)
    if index is None:
        raise CheckpointError(f"{path} is not a segment index, or is damaged")
    entries = list(zip(index.offsets, index.positions, strict=True))
    return {
        "type": "SegmentIndex",
        "segment_bytes": size,
        "highest_publish_time": index.highest_publish_time,
        "count": len(entries),
        "entries": entries[:limit],
    }


def _cut(facts: Facts, name: str, limit: int | None) -> Facts:
    """Cuts the list `name` to `limit` items, and adds how many there were."""
    if facts.get(name):
        facts[f"{name}_count"] = len(facts[name])
        facts[name] = facts[name][:limit]
    return facts


def _descriptor(path: Path, data: bytes, limit: int | None) -> Facts:
    try:
        found = decode_descriptor(data)
    except DescriptorError as error:
        raise DescriptorError(f"{path} is not the descriptor of an object: {error}") from error
    return _cut({"type": "ObjectDescriptor", **asdict(found)}, "offset_index", limit)


def _head(disk: Disk, path: Path) -> bytes:
    file = disk.open_read(path)
    try:
        head = bytearray(100)
        return bytes(head[: file.read_into(memoryview(head), 0)])
    finally:
        file.close()


def _catalog(path: Path, head: bytes, limit: int | None) -> Iterator[Facts]:
    """Yields a record for each topic (at most `limit`), and a summary last."""
    mark = head[68:72]
    # The mark is not in the file while the first pages are only in SQLite's write-ahead log.
    if mark != _CATALOG_MARK and not (path.name == FILE_NAME and mark == bytes(4)):
        raise UsageError(f"{path} is a SQLite database of another program")
    kv = SqliteKv(path)
    count = 0
    try:
        for catalog in _catalogs(kv):
            for topic in catalog.topics():
                count += 1
                record = catalog.record(topic)
                if record is not None and (limit is None or count <= limit):
                    yield {"type": "Topic", "topic": str(topic), **asdict(record)}
        yield {"type": "Catalog", "topics": count, "revision": kv.revision()}
    finally:
        kv.close()


def _catalogs(kv: Kv) -> Iterator[Catalog]:
    """Yields a catalog for each root that keys begin with; usually there is one."""
    at, last = "", chr(0x10FFFF)
    while found := kv.range(at, last, limit=1):
        root, there, _ = found[0].key.partition(f"/{TOPICS_PREFIX}")
        if there:
            yield Catalog(kv, root)
        at = after_prefix(found[0].key if not there else root + there)


def _frames(disk: Disk, path: Path, limit: int | None) -> Iterator[Facts]:
    file = disk.open_read(path)
    shown = count = safe = 0
    last: Scan | None = None
    try:
        for base, found in scan_segment(file, ChunkReader(), file.size(), None, SegmentIndex()):
            for row in range(len(found)):
                if limit is not None and shown >= limit:
                    break
                yield _frame(found, row, base)
                shown += 1
            count += len(found)
            safe = base + found.safe_length
            last = found
        size = file.size()
    finally:
        file.close()
    end = End.COMPLETE if last is None else last.end
    yield {
        "type": "Frames",
        "frames": count,
        "bytes": size,
        "valid_bytes": safe,
        "end": end.describe(),
        "damaged": end.corrupt,
        "next_offset": None if last is None else last.offset,
    }


def _blocks(disk: Disk, path: Path, limit: int | None) -> Iterator[Facts]:
    """Yields a record for each frame of a compressed object, and for its block before them."""
    file = disk.open_read(path)
    try:
        size = file.size()
        blocks = BlockAssembler(_first_offset(file), 0, size)
        shown = frames = count = raw = 0
        for start in range(0, size, MIB):
            for found in blocks.feed(read_range(file, start, min(start + MIB, size))):
                count, frames, raw = count + 1, frames + len(found), raw + len(found.raw)
                if limit is None or shown < limit:
                    yield _block(found, blocks)
                for row in range(len(found)):
                    if limit is not None and shown >= limit:
                        break
                    yield _frame(found, row, 0, "position_in_block")
                    shown += 1
        blocks.require_end(None)
    finally:
        file.close()
    damage = blocks.corruption
    yield {
        "type": "Blocks",
        "codec": ZSTD,
        "blocks": count,
        "frames": frames,
        "bytes": size,
        "raw_bytes": raw,
        "valid_bytes": blocks.position,
        "end": "complete" if damage is None else damage.reason,
        "damaged": damage is not None,
        "next_offset": blocks.offset,
    }


def _first_offset(file: ReadFile) -> int:
    """The first offset of a compressed object, by its header; 0 if that is damaged."""
    try:
        return decode_header(read_range(file, 0, BLOCK_HEADER_BYTES)).first_offset
    except BlockError:
        return 0


def _block(found: Scan, blocks: BlockAssembler) -> Facts:
    return {
        "type": "Block",
        "first_offset": found.offsets[0],
        "position": blocks.block_position,
        "frames": len(found),
        "bytes": blocks.position - blocks.block_position,
        "raw_bytes": len(found.raw),
    }


def _frame(found: Scan, row: int, base: int, place: str = "position") -> Facts:
    offset, at, length = found.offsets[row], found.positions[row], found.lengths[row]
    facts: Facts = {
        "type": "Frame",
        "offset": offset,
        place: base + at - 16,
        "message_bytes": length,
    }
    try:
        message = decode_message(found.buffer, at, length, offset=offset)
    except MessageError as error:
        return {**facts, "error": str(error)}
    return {
        **facts,
        "topic": message.msg_id.topic_name,
        "publish_time": message.publish_time,
        "payload_bytes": len(message.payload),
        "payload": message.payload[:64].decode("utf-8", "backslashreplace"),
        "attributes": message.attributes,
        "routing_key": message.routing_key,
    }
