"""Staged rows: files in the object store, from the tasks to the process that appends the rows.

    staging/<write>/<partition>-<attempt>.frames   the rows of one partition: `Part`
    staging/<write>/manifest.json                  which of those files make one batch

A staged file is a sequence of frames, one message for each row, numbered from 0
(`docs/formats/staged-rows.md`). The process that commits them needs neither Spark nor Arrow. A task
never appends. It writes its rows as one object, which exists whole or not at all, so a task that is
killed or retried leaves only files. Abandoned files are deleted by age
(`upload.sweep.sweep_staging`).

Beware: check everything that could make an append fail before a row is staged (`columns.py`), so
that a commit does not stop in the middle of a batch.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Final
from zlib import crc32

from forebay.errors import FormatError, MessageError, ObjectMissing, UsageError
from forebay.format import codec
from forebay.format.frame import FRAME_BYTES_MAX, Scan, frame_bytes, scan
from forebay.format.layout import Span
from forebay.format.message import (
    decode_attributes,
    encode_head,
    encode_middle,
    message_columns,
    topic_names,
)
from forebay.format.names import is_staged_file, staging_manifest, write_of_staged
from forebay.limits import KIB, MIB
from forebay.objects.store import CloudStore, CloudWriter

_WRITE_BYTES: Final = 1 * MIB
_READ_BYTES: Final = 4 * MIB
"""Bytes of a staged file that the committing process holds at a time, unless a row is longer."""
COPIED_BYTES_MAX: Final = 4 * KIB
"""Payloads of up to this average size are copied, which is faster than making views."""
_CONCURRENT_PARTS: Final = 2
_MANIFEST_BYTES_MAX: Final = 64 * MIB
_VERSION: Final = 1
_MIDDLE: Final = encode_middle("", None)
_MODULUS: Final = 2**61 - 1
_BASE: Final = 0x1D3C_5A7B_9E2F_4681 % _MODULUS
"""The polynomial of checksums: a prime that fits 64 bits, and an arbitrary base below it."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Checked rows in order, as columns of equal length."""

    topics: Sequence[str]
    payloads: Sequence[bytes | memoryview]
    attributes: Sequence[Mapping[str, str] | None] | None = None
    keys: Sequence[str | None] | None = None
    zeros: frozenset[str] = frozenset()
    """Topics `…-part-0` that no row names: their rows name the topic, and the partition 0."""


@dataclass(frozen=True, slots=True)
class Part:
    """The staged rows of one partition."""

    partition: int
    key: str | None
    """The object; None if the partition has no rows."""
    rows: int
    bytes: int
    topics: Mapping[str, int] = field(default_factory=dict)
    """How many of the rows go to each topic."""
    digest: int = 0
    """The sum of the payloads' checksums. Only notes of earlier releases are compared with it."""
    checksum: int | None = None
    """The checksum of all rows in order (`add_rows`); None if an earlier release staged them."""
    zeros: list[str] = field(default_factory=list)
    """As in `Rows`: topics of which the commit decides whether they are partitioned."""


# ---- checksums of rows


def add_rows(checksum: int, rows: Rows, payloads: Sequence[int]) -> int:
    """The checksum of rows in order, continued; it is 0 before the first row.

    It covers everything of a row that is written: topic, key, headers and payload, whose CRC-32 are
    given as `payloads`. It is a polynomial over the rows, so that the checksum of two parts in a
    row follows from theirs (`joined_checksum`), wherever they are cut.
    """
    for each in _row_checksums(rows, payloads):
        checksum = (checksum * _BASE + each + 1) % _MODULUS
    return checksum


def joined_checksum(parts: Sequence[Part]) -> int | None:
    """The checksum of the rows of all parts, in this order; None if a part has none."""
    total = 0
    for part in parts:
        if part.checksum is None:
            return None
        total = (total * pow(_BASE, part.rows, _MODULUS) + part.checksum) % _MODULUS
    return total


def _row_checksums(rows: Rows, payloads: Sequence[int]) -> Iterator[int]:
    begin = 0
    for topic, group in groupby(rows.topics):
        end = begin + sum(1 for _ in group)
        name = topic.encode()
        found = [crc32(name, payload) for payload in payloads[begin:end]]
        if rows.attributes is not None:
            found = [
                crc32(json.dumps(list(each.items())).encode(), crc) if each else crc
                for each, crc in zip(rows.attributes[begin:end], found, strict=True)
            ]
        if rows.keys is not None:
            found = [
                crc if key is None else crc32(b"\1" + key.encode(), crc)
                for key, crc in zip(rows.keys[begin:end], found, strict=True)
            ]
        yield from found
        begin = end


# ---- one partition's rows


def stage(
    store: CloudStore, key: str, partition: int, batches: Iterable[Rows], *, chunk_bytes: int
) -> Part:
    """Writes the rows as one object; writes nothing if there are none."""
    count = digest = checksum = 0
    topics: Counter[str] = Counter()
    zeros: set[str] = set()
    named: set[str] = set()
    writer: CloudWriter | None = None
    try:
        for rows in batches:
            if writer is None:
                writer = store.open_streaming_writer(
                    key, chunk_bytes=chunk_bytes, concurrent_parts=_CONCURRENT_PARTS
                )
            for frames in _encoded(rows, count):
                writer.write(frames)
            count += len(rows.payloads)
            payloads = list(map(crc32, rows.payloads))
            digest += sum(payloads)
            checksum = add_rows(checksum, rows, payloads)
            topics.update(rows.topics)
            zeros |= rows.zeros
            named |= set(rows.topics) - rows.zeros
        if writer is None:
            return Part(partition, None, 0, 0)
        size = writer.close().size
        left = sorted(zeros - named)
        return Part(partition, key, count, size, dict(topics), digest, checksum, left)
    except BaseException:
        if writer is not None:
            writer.abort()
        raise


def _encoded(rows: Rows, first: int) -> Iterator[bytes]:
    """Yields the encoded rows in pieces of about _WRITE_BYTES; the first row has number `first`."""
    waiting: list[bytes] = []
    heads: dict[str, bytes] = {}
    size = begin = 0
    for topic, group in groupby(rows.topics):
        end = begin + sum(1 for _ in group)
        head = heads.get(topic)
        if head is None:
            head = heads[topic] = encode_head(0, 0, topic, "")
        payloads = rows.payloads[begin:end]
        attributes = None if rows.attributes is None else rows.attributes[begin:end]
        keys = None if rows.keys is None else rows.keys[begin:end]
        at = 0
        while at < len(payloads):
            number = first + begin + at
            frames, at = codec.encode_many(
                head, _MIDDLE, number, payloads, at, 0, attributes, keys, _WRITE_BYTES, None
            )
            waiting.append(frames)
            size += len(frames)
            if size >= _WRITE_BYTES:
                yield b"".join(waiting)
                waiting, size = [], 0
        begin = end
    if waiting:
        yield b"".join(waiting)


def staged_rows(store: CloudStore, part: Part) -> Iterator[Rows]:
    """Yields the rows of a part in order, some at a time.

    FormatError if the file does not hold exactly the rows of the part.
    """
    if part.key is None:
        return
    count = position = 0
    torn = b""
    for begin in range(0, part.bytes, _READ_BYTES):
        chunk = store.get_range(part.key, begin, min(begin + _READ_BYTES, part.bytes))
        torn = b"".join((torn, chunk))
        if len(torn) < (frame_bytes(torn, 0) or 0) <= FRAME_BYTES_MAX:
            continue  # the row is longer than a read; a length over the maximum is damage
        frames = scan(torn, expected=count, consecutive=True)
        position += frames.safe_length
        if frames.end.corrupt:
            why = f"{frames.end.describe()} at position {position}"
            raise _no_staged_file(store, part.key, why)
        count += len(frames)
        torn = torn[frames.safe_length :]
        if len(frames):
            try:
                rows = _decoded(frames)
            except (MessageError, UnicodeDecodeError) as error:
                raise _no_staged_file(store, part.key, str(error)) from error
            yield rows
    if torn or count != part.rows:
        raise _no_staged_file(store, part.key, f"it ends after {count} rows of {part.rows}")


def _decoded(frames: Scan) -> Rows:
    assert isinstance(frames.buffer, bytes)
    data, found = frames.buffer, message_columns(frames)
    source = memoryview(data) if len(data) > len(frames) * COPIED_BYTES_MAX else data
    payloads = [
        source[at : at + length]
        for at, length in zip(found.payload_positions, found.payload_lengths, strict=True)
    ]
    keys = [
        None if length < 0 else str(data[at : at + length], "utf-8")
        for at, length in zip(found.key_positions, found.key_lengths, strict=True)
    ]
    if not any(found.attribute_counts):
        return Rows(topic_names(frames, found), payloads, None, keys)
    pairs = zip(found.attribute_positions, found.attribute_lengths, strict=True)
    attributes = [
        decode_attributes(data, Span(*span), count, flavour)
        for span, count, flavour in zip(pairs, found.attribute_counts, found.flavours, strict=True)
    ]
    return Rows(topic_names(frames, found), payloads, attributes, keys)


def _no_staged_file(store: CloudStore, key: str, why: str) -> FormatError:
    return FormatError(f"{store.name}: {key} is not a sound staged file: {why}")


# ---- the files of one batch


def write_manifest(store: CloudStore, write: str, parts: Sequence[Part]) -> None:
    """Writes the manifest of a batch. Call it before the first row is appended."""
    body = {"version": _VERSION, "parts": [asdict(part) for part in parts]}
    store.put_object(staging_manifest(write), json.dumps(body, separators=(",", ":")).encode())


def read_manifest(store: CloudStore, write: str) -> list[Part] | None:
    """The parts of a batch, or None if the manifest or one of their files is gone.

    UsageError if another release staged the files, in another format. Rows of this run cannot
    replace them, as they may be partitioned or ordered differently.
    """
    key = staging_manifest(write)
    try:
        data = bytes(store.get_object(key, _MANIFEST_BYTES_MAX))
        parts = _decode_manifest(data, key)
        for part in parts:
            if part.key is not None:
                store.head(part.key)
    except ObjectMissing:
        return None
    foreign = [part.key for part in parts if part.key is not None and not is_staged_file(part.key)]
    if foreign:
        raise UsageError(
            f"another release has begun this batch, with staged files such as {foreign[0]} in "
            f"{store.name}: let that release finish it, or write with another sinkId"
        )
    return parts


def has_manifest(store: CloudStore, write: str) -> bool:
    try:
        store.head(staging_manifest(write))
    except ObjectMissing:
        return False
    return True


def _decode_manifest(data: bytes, key: str) -> list[Part]:
    try:
        body = json.loads(data)
        if body["version"] != _VERSION:
            raise FormatError(
                f"{key} has version {body['version']}; this release reads version {_VERSION}"
            )
        return [Part(**part) for part in body["parts"]]
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{key} is not a manifest of staged files: {error}") from error


def discard(store: CloudStore, parts: Sequence[Part], *, manifests: bool = True) -> None:
    """Deletes the files of the parts, and with `manifests` their manifests. Idempotent."""
    if manifests:
        # Manifests first: the files that a manifest names must exist.
        for write in {write_of_staged(part.key) for part in parts if part.key is not None}:
            store.delete_object(staging_manifest(write))
    for part in parts:
        if part.key is not None:
            store.delete_object(part.key)


def forget_parts(store: CloudStore, parts: Sequence[Part]) -> None:
    """Deletes staged files after a failure, except those of a batch that was begun."""
    written = [(write_of_staged(part.key), part) for part in parts if part.key is not None]
    begun = {write for write in {write for write, _ in written} if has_manifest(store, write)}
    discard(store, [part for write, part in written if write not in begun], manifests=False)
