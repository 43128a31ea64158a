"""What a bucket holds of one topic, and how an object is described from itself.

A sidecar is trusted if it says of its object what the object's name and the listing say. Else the
object is read in full, in chunks: every checksum, and consecutive offsets from the first to the
last that its name gives. Which message encoding is in the frames does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

from forebay.errors import CorruptLog, DescriptorError, ObjectMissing
from forebay.format.descriptor import ObjectDescriptor, decode_descriptor
from forebay.format.frame import FrameDecoder
from forebay.format.names import ObjectName, TopicName, parse_object
from forebay.format.object_index import ObjectIndex
from forebay.limits import DESCRIPTOR_BYTES_MAX, MIB
from forebay.objects.backend import Backend, ObjectMeta
from forebay.upload.chain import Range
from forebay.upload.listing import Stored, walk

CHUNK_BYTES: Final = 4 * MIB


@dataclass(frozen=True, slots=True)
class Candidate:
    """An object that may be part of the chain."""

    name: ObjectName
    key: str
    size: int
    etag: str | None
    modified_ms: int
    sidecar: str | None
    """The key of its sidecar, if there is one that could be read at all."""
    sidecar_bytes: int = 0

    @property
    def object_id(self) -> str:
        return str(self.name)


@dataclass(slots=True)
class Inventory:
    """The finished objects of a topic by the range that their names give, likely ones first."""

    ranges: dict[Range, list[Candidate]] = field(default_factory=dict)
    end: int = 0
    """One more than the highest offset that any name gives."""
    pending: int = 0
    unknown: int = 0
    _all: list[Candidate] = field(default_factory=list)

    def add(self, candidate: Candidate) -> None:
        name = candidate.name
        same = self.ranges.setdefault((name.start, name.end), [])
        same.append(candidate)
        same.sort(key=lambda each: (each.sidecar is None, -each.name.attempt))
        self.end = max(self.end, name.end + 1)
        self._all.append(candidate)

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._all)


@dataclass(slots=True)
class Reading:
    """What describing objects has cost."""

    sidecars: int = 0
    whole: int = 0
    bytes: int = 0

    def add(self, other: Reading) -> None:
        self.sidecars += other.sidecars
        self.whole += other.whole
        self.bytes += other.bytes


class Describe(Protocol):
    """How a restore gets an object's descriptor; `describe` is the plain way."""

    def __call__(
        self, store: Backend, candidate: Candidate, reading: Reading, *, whole: bool
    ) -> ObjectDescriptor:
        """CorruptLog if the object is read and is not what its name says."""


def take_stock(store: Backend, topic: TopicName) -> Inventory:
    """From the listing alone."""
    stock = Inventory()
    for found in walk(store, topic):
        if isinstance(found, ObjectMeta):
            stock.unknown += 1
        elif found.object is not None:
            name = parse_object(found.object_id)
            if name is None:
                stock.pending += 1
            else:
                stock.add(_candidate(name, found, found.object))
    return stock


def _candidate(name: ObjectName, found: Stored, meta: ObjectMeta) -> Candidate:
    beside = found.sidecar
    if beside is not None and not 0 < beside.size <= DESCRIPTOR_BYTES_MAX:
        beside = None
    return Candidate(
        name,
        meta.key,
        meta.size,
        meta.etag,
        meta.modified_ms,
        beside.key if beside is not None else None,
        beside.size if beside is not None else 0,
    )


def describe(
    store: Backend, candidate: Candidate, reading: Reading, *, whole: bool
) -> ObjectDescriptor:
    """The object's descriptor: its sidecar's if that will do, unless the `whole` is to be read.

    CorruptLog if the object is read and is not what its name says.
    """
    if not whole:
        found = read_sidecar(store, candidate, reading)
        if found is not None:
            reading.sidecars += 1
            return found
    return read_whole(store, candidate, reading)


def read_sidecar(store: Backend, candidate: Candidate, reading: Reading) -> ObjectDescriptor | None:
    """The sidecar's descriptor, or None if there is none that agrees with the name and listing."""
    if candidate.sidecar is None:
        return None
    try:
        data = bytes(store.get_range(candidate.sidecar, 0, candidate.sidecar_bytes))
        reading.bytes += len(data)
        found = decode_descriptor(data)
    except (DescriptorError, ObjectMissing):
        return None
    name = candidate.name
    said = (found.object_id, found.start_offset, found.end_offset, found.size, found.completed)
    if said != (str(name), name.start, name.end, candidate.size, True):
        return None
    if None not in (found.etag, candidate.etag) and found.etag != candidate.etag:
        return None
    return found if found.offset_index else None


def read_whole(store: Backend, candidate: Candidate, reading: Reading) -> ObjectDescriptor:
    """Reads every frame, at most a chunk and a frame of it in memory at a time."""
    name, key = candidate.name, candidate.key
    decoder = FrameDecoder(expected=name.start, consecutive=True)
    index = ObjectIndex()
    following = name.start
    for start in range(0, candidate.size, CHUNK_BYTES):
        end = min(start + CHUNK_BYTES, candidate.size)
        try:
            data = store.get_range(key, start, end)
        except ObjectMissing as error:
            raise CorruptLog(f"{store.name}: {key} went away while it was read") from error
        reading.bytes += end - start
        position = decoder.position
        frames = decoder.feed(data)
        index.add(frames, position)
        following += len(frames)
        frames.raise_if_corrupt(key, position)
    if decoder.pending:
        raise CorruptLog(
            f"{store.name}: {key} ends inside the frame of offset {following}, at position "
            f"{decoder.position}"
        )
    if following != name.end + 1:
        raise CorruptLog(
            f"{store.name}: {key} holds the offsets up to {following - 1}, its name says {name.end}"
        )
    reading.whole += 1
    return ObjectDescriptor(
        str(name),
        name.start,
        name.end,
        candidate.size,
        candidate.etag,
        candidate.modified_ms // 1000,
        offset_index=index.frozen(),
    )
