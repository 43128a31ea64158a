"""Lists the objects of a topic in the store, chooses a chain of them, and describes them.

The listing is streamed in the order of names, so an object and its sidecar come together (`walk`).
`take_stock` groups a topic's objects by the ranges in their names. `choose_chain`, which does no
I/O, decides which of them a restore adopts. `describe` makes the descriptor of one.

Beware: a sidecar is used only if it agrees with the object's name and the listing. Otherwise the
whole object is read, in chunks: every checksum is checked, and the offsets must be consecutive from
the first to the last one in the name. Payloads are not decoded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Protocol, TypeAlias

from forebay.catalog.records import Life
from forebay.errors import (
    CorruptFrame,
    CorruptLog,
    DescriptorError,
    ForeignObject,
    LedgerError,
    ObjectMissing,
)
from forebay.format.blocks import BlockAssembler
from forebay.format.content import ContentHash, MessageSurvey
from forebay.format.danube import is_named_by_time, segments_prefix
from forebay.format.descriptor import PULSAR, ZSTD, Ledger, ObjectDescriptor, decode_descriptor
from forebay.format.frame import FrameDecoder, Scan
from forebay.format.index import ObjectIndex
from forebay.format.layout import Buffer
from forebay.format.names import (
    TOPICS_PREFIX,
    MarkerName,
    ObjectName,
    TopicName,
    after_prefix,
    is_ledger,
    object_of_file,
    objects_prefix,
    parse_ledger,
    parse_marker,
    parse_object,
    parse_pending,
    sidecar,
    topic_of_key,
)
from forebay.format.pulsar.frames import EntryAssembler
from forebay.format.pulsar.index import LedgerIndex, decode_index
from forebay.format.pulsar.topic_ledger import (
    block_bytes_of,
    content_hash_of,
    ledger_facts,
    offsets_of_ledger,
)
from forebay.limits import DESCRIPTOR_BYTES_MAX, LEDGER_INDEX_BYTES_MAX, MIB, OFFSET_MAX
from forebay.objects.backend import Backend, ObjectMeta
from forebay.objects.markers import StoredMarker, in_order, read_marker

# -- which objects make the chain ---------------------------------------------------------------

Range: TypeAlias = tuple[int, int]


class Chain(NamedTuple):
    ranges: tuple[Range, ...]
    """The ranges of the chosen objects, ends included, ascending and without overlap."""
    gaps: tuple[Range, ...]
    """The ranges of offsets, ends not included, that no chosen object holds."""


def choose_chain(
    ranges: Iterable[Range], start: int | None = None, until: int | None = None
) -> Chain:
    """Returns the chain with the fewest missing offsets, and among those with the fewest objects.

    The store may hold more objects than the chain needs: objects that a compaction replaced or is
    about to replace, orphans of uploads that were planned again, and the same range under two
    names. The bytes of an offset are the same in all of them, so every chain without a gap is
    correct. The one with the fewest objects is the compacted one.

    The chain begins at `start`, or at the lowest offset found. It ends at the highest offset found,
    or at `until` if that is higher. Ranges that begin before `start` are ignored.
    """
    wanted = sorted({each for each in ranges if start is None or each[0] >= start})
    first = start if start is not None else (wanted[0][0] if wanted else 0)
    stop = max([first, until or 0, *(end + 1 for _, end in wanted)])
    starts = sorted({first, *(begin for begin, _ in wanted)})
    places = [*starts, stop]
    best: list[tuple[int, int]] = [(0, 0)] * len(places)
    """For each place, the offsets missing and the objects used from there to the end."""
    picks: list[int | None] = [None] * len(starts)
    ends: dict[int, list[int]] = {}
    for begin, end in wanted:
        ends.setdefault(begin, []).append(end)
    for at in range(len(starts) - 1, -1, -1):
        best[at] = (best[at + 1][0] + places[at + 1] - places[at], best[at + 1][1])
        for end in ends.get(places[at], ()):
            then = bisect_left(places, end + 1)
            cost = (best[then][0] + places[then] - end - 1, best[then][1] + 1)
            if cost <= best[at]:
                best[at], picks[at] = cost, end
    return _followed(places, picks)


def _followed(places: list[int], picks: list[int | None]) -> Chain:
    ranges: list[Range] = []
    gaps: list[Range] = []
    position = places[0]
    at = 0
    while at < len(picks):
        end = picks[at]
        if end is None:
            at += 1
            continue
        if places[at] > position:
            gaps.append((position, places[at]))
        ranges.append((places[at], end))
        position = end + 1
        at = bisect_left(places, position)
    if places[-1] > position:
        gaps.append((position, places[-1]))
    return Chain(tuple(ranges), tuple(gaps))


# -- the listing --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stored:
    """One object in the listing: the object, its sidecar, or both, and the index of a ledger."""

    object_id: str
    object: ObjectMeta | None = None
    sidecar: ObjectMeta | None = None
    index: ObjectMeta | None = None

    @property
    def files(self) -> list[ObjectMeta]:
        """What there is of it, in the order to delete it in: a ledger's index before its data."""
        found = (self.sidecar, self.index, self.object)
        return [each for each in found if each is not None]


def is_object_name(name: str) -> bool:
    """Whether `name` is the name of a finished or a pending object."""
    if is_ledger(name):
        return True
    finished = parse_object(name)
    if finished is not None:
        return finished.end < OFFSET_MAX
    start = parse_pending(name)
    return start is not None and start < OFFSET_MAX


def walk(store: Backend, topic: TopicName) -> Iterator[Stored | StoredMarker | ObjectMeta]:
    """Yields everything below the topic's prefix, ordered by name.

    An ObjectMeta is a file that is neither an object nor a sidecar nor a begin marker.
    """
    prefix = objects_prefix(topic)
    waiting: Stored | None = None
    for meta in store.list(prefix):
        name = meta.key.removeprefix(prefix)
        owner = object_of_file(name)
        if (marker := parse_marker(name)) is not None:
            yield StoredMarker(marker, meta)
            continue
        if not is_object_name(owner):
            yield meta
            continue
        if waiting is not None and waiting.object_id != owner:
            yield waiting
            waiting = None
        before = Stored(owner) if waiting is None else waiting
        if name == owner:
            waiting = replace(before, object=meta)
        elif name == sidecar(owner):  # the last of its files
            yield replace(before, sidecar=meta)
            waiting = None
        else:
            waiting = replace(before, index=meta)
    if waiting is not None:
        yield waiting


def read_ledger_index(store: Backend, found: Stored) -> LedgerIndex | None:
    """Reads the index object of a ledger; None if it is missing, damaged, or not Forebay's."""
    if found.index is None or not 0 < found.index.size <= LEDGER_INDEX_BYTES_MAX:
        return None
    try:
        data = store.get_range(found.index.key, 0, found.index.size)
        index = decode_index(data)
        return None if offsets_of_ledger(index) is None else index
    except (LedgerError, ObjectMissing):
        return None


def span_of(store: Backend, found: Stored, life: Life | None = None) -> Range | None:
    """Returns the offsets of a finished object, the end not included; None if they are unknown.

    The name has them, or, for a ledger, the row of its key or its index object.
    """
    name = parse_object(found.object_id)
    if name is not None:
        return name.start, name.end + 1
    if not is_ledger(found.object_id):
        return None
    if life is not None and life.span is not None:
        return life.span
    index = read_ledger_index(store, found)
    return None if index is None else offsets_of_ledger(index)


def topics_in_store(store: Backend, *, with_danube: bool = False) -> Iterator[TopicName]:
    """Yields every topic that has objects or begin markers, with about two requests for each.

    With `with_danube`, also topics whose objects are where later versions of Danube have them.
    """
    prefixes = (objects_prefix, segments_prefix) if with_danube else (objects_prefix,)
    after: str | None = None
    while (meta := next(store.list(TOPICS_PREFIX, after=after), None)) is not None:
        parts = meta.key.removeprefix(TOPICS_PREFIX).split("/")
        if len(parts) < 3:
            after = meta.key
            continue
        own = TOPICS_PREFIX + "/".join(parts[:2]) + "/"
        found = topic_of_key(f"{own}objects/any")
        if found is not None and any(
            next(store.list(prefix(found[0])), None) is not None for prefix in prefixes
        ):
            yield found[0]
        after = after_prefix(own)


# -- the objects of one topic -------------------------------------------------------------------

CHUNK_BYTES: Final = 4 * MIB


@dataclass(frozen=True, slots=True)
class Candidate:
    """An object that may be part of the chain."""

    name: ObjectName
    """Its offsets. The name of a ledger does not say them: see `ledger`."""
    key: str
    size: int
    etag: str | None
    modified_ms: int
    sidecar: str | None
    """The key of its sidecar; None if there is none, or if it is empty or too large."""
    sidecar_bytes: int = 0
    ledger: str | None = None
    """The object's id, if it is a ledger."""
    index: LedgerIndex | None = None
    """Its index object, if it is a ledger."""
    index_bytes: int = 0

    @property
    def object_id(self) -> str:
        return str(self.name) if self.ledger is None else self.ledger


@dataclass(slots=True)
class Inventory:
    """The finished objects of a topic, grouped by the range in their names.

    Within a range, objects with a sidecar come first, then those of the latest attempt, then
    compressed ones.
    """

    ranges: dict[Range, list[Candidate]] = field(default_factory=dict)
    end: int = 0
    """One more than the highest offset in any name."""
    pending: int = 0
    unknown: int = 0
    named_by_time: str | None = None
    """The key of an object of Danube whose name does not say which offsets it holds."""
    markers: list[StoredMarker] = field(default_factory=list)
    """The topic's begin markers, the newest last."""
    deletion: MarkerName | None = None
    """The marker of the last deletion of a topic of this name. Objects before it do not count."""
    deletion_epoch: int = 0
    dead: int = 0
    """Objects that were left, or written late, by a topic that was deleted."""
    continued: bool = False
    """Whether the store shows that the topic was created again after the last deletion."""
    discarded: list[Candidate] = field(default_factory=list)
    """Objects that are damaged for certain. They are in no range any more."""
    _all: list[Candidate] = field(default_factory=list)

    def bury(self, marker: MarkerName, epoch: int, newest_epoch: int) -> None:
        """Leaves out the objects of a topic that was deleted. Call it before the ranges are used.

        `newest_epoch` is the highest one of all markers.
        """
        self.deletion, self.deletion_epoch = marker, epoch
        dead = [each for each in self._all if each.name.end < marker.offset]
        self.dead = len(dead)
        self._all = [each for each in self._all if each.name.end >= marker.offset]
        for each in dead:
            self.ranges.pop((each.name.start, each.name.end), None)
        self.end = max((each.name.end + 1 for each in self._all), default=0)
        self.continued = bool(self._all) or newest_epoch > epoch

    def discard(self, candidate: Candidate) -> None:
        range_ = (candidate.name.start, candidate.name.end)
        self.ranges[range_].remove(candidate)
        if not self.ranges[range_]:
            del self.ranges[range_]
        self.discarded.append(candidate)

    @property
    def highest(self) -> int:
        """The highest of all object ends and begin markers (rule R9)."""
        return max(self.end, self.markers[-1].name.offset if self.markers else 0)

    def add(self, candidate: Candidate) -> None:
        name = candidate.name
        same = self.ranges.setdefault((name.start, name.end), [])
        same.append(candidate)
        same.sort(
            key=lambda each: (each.sidecar is None, -each.name.attempt, not each.name.compressed)
        )
        self.end = max(self.end, name.end + 1)
        self._all.append(candidate)

    def add_ledger(self, store: Backend, found: Stored, meta: ObjectMeta) -> None:
        """Adds a ledger, which is complete if it has an index object, or a pending object."""
        index = read_ledger_index(store, found)
        offsets = None if index is None else offsets_of_ledger(index)
        if index is None or offsets is None or found.index is None:
            self.pending += 1
            return
        name = ObjectName(offsets[0], offsets[1] - 1)
        made = _candidate(name, found, meta)
        size = found.index.size
        self.add(replace(made, ledger=found.object_id, index=index, index_bytes=size))

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._all)


@dataclass(slots=True)
class Reading:
    """How much was read to describe objects."""

    sidecars: int = 0
    whole: int = 0
    bytes: int = 0

    def add(self, other: Reading) -> None:
        self.sidecars += other.sidecars
        self.whole += other.whole
        self.bytes += other.bytes


class Describe(Protocol):
    """The type of `describe`. A restore may be given another function with the same contract."""

    def __call__(
        self, store: Backend, candidate: Candidate, reading: Reading, *, whole: bool
    ) -> ObjectDescriptor:
        """Raises CorruptLog if the object was read and is not what its name says."""


def take_stock(store: Backend, topic: TopicName) -> Inventory:
    """Lists the topic's objects and begin markers, and reads the markers."""
    stock = Inventory()
    for found in walk(store, topic):
        if isinstance(found, ObjectMeta):
            stock.unknown += 1
            if is_named_by_time(found.key.rpartition("/")[2], found.size):
                stock.named_by_time = found.key
        elif isinstance(found, StoredMarker):
            stock.markers.append(found)
        elif found.object is not None:
            name = parse_object(found.object_id)
            if name is None:
                stock.add_ledger(store, found, found.object)
            else:
                if found.sidecar is None and is_named_by_time(found.object_id, found.object.size):
                    stock.named_by_time = found.object.key
                stock.add(_candidate(name, found, found.object))
    stock.markers = in_order(stock.markers)
    contents = [(each, read_marker(store, each)) for each in stock.markers]
    found_markers = [(each, content) for each, content in contents if content is not None]
    deletions = [(content.epoch, each) for each, content in found_markers if content.deleted]
    if deletions:
        # By the epoch: an owner that was fenced may have created a marker late.
        epoch, last = max(deletions, key=lambda each: each[0])
        newest_epoch = max(content.epoch for _, content in found_markers)
        stock.bury(last.name, epoch, newest_epoch)
        stock.markers = [each for each in stock.markers if each.name >= last.name]
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
    """Returns the descriptor in the object's sidecar, or makes one by reading the whole object.

    The object is read if `whole` is set, or if the sidecar is missing or does not agree. Raises
    CorruptLog if the object was read and is not what its name says, and ForeignObject if it is not
    what its sidecar says.
    """
    if not whole:
        found = read_sidecar(store, candidate, reading)
        if found is not None:
            reading.sidecars += 1
            return found
    return read_whole(store, candidate, reading)


def read_sidecar(store: Backend, candidate: Candidate, reading: Reading) -> ObjectDescriptor | None:
    """Returns the sidecar's descriptor; None if it is missing or disagrees with name or listing."""
    found = _beside(store, candidate, reading)
    if found is None or not found.offset_index:
        return None
    other_etag = None not in (found.etag, candidate.etag) and found.etag != candidate.etag
    return None if other_etag else found


def _beside(store: Backend, candidate: Candidate, reading: Reading) -> ObjectDescriptor | None:
    """Returns the sidecar's descriptor, whatever its etag; None if it is not for this object."""
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
    if said != (candidate.object_id, name.start, name.end, candidate.size, True):
        return None
    codec = ZSTD if name.compressed else None
    is_alike = found.codec == codec and found.is_ledger == (candidate.ledger is not None)
    return found if is_alike else None


def read_whole(store: Backend, candidate: Candidate, reading: Reading) -> ObjectDescriptor:
    """Makes a descriptor by reading every frame.

    Holds at most a chunk and a frame in memory, or a chunk and a block. Raises CorruptLog if the
    frames are damaged or not those in the name, and ForeignObject if the hash is not the one in the
    sidecar.
    """
    name, key = candidate.name, candidate.key
    read = _read_blocks if name.compressed else _read_frames
    if candidate.ledger is not None:
        read = _read_entries
    index, content, survey = ObjectIndex(), ContentHash(), MessageSurvey()
    following, raw_size = name.start, 0
    for frames in read(store, candidate, reading, index):
        raw = frames.raw
        content.add(raw)
        survey.add(frames)
        following += len(frames)
        raw_size += len(raw)
        del frames, raw
    if following != name.end + 1:
        raise CorruptLog(
            f"{store.name}: {key} ends with offset {following - 1}, but its name says {name.end}"
        )
    beside = _beside(store, candidate, reading)
    if beside is not None and beside.content_hash not in (None, content.value):
        raise ForeignObject(
            f"{store.name}: {key} is not the object of its sidecar: its content has the hash "
            f"{content.value}, but the sidecar says {beside.content_hash}. Put the right object "
            "back from a copy of the store, or delete the sidecar to use the object as it is"
        )
    if candidate.index is not None:
        _require_own_index(store, candidate, candidate.index, content.value)
    reading.whole += 1
    plain = not name.compressed and candidate.ledger is None
    return ObjectDescriptor(
        candidate.object_id,
        name.start,
        name.end,
        candidate.size,
        candidate.etag,
        candidate.modified_ms // 1000,
        offset_index=index.frozen(),
        content_hash=content.value,
        highest_publish_time=survey.highest_publish_time,
        raw_size=None if plain else raw_size,
        codec=ZSTD if name.compressed else None,
        format=None if candidate.index is None else PULSAR,
        ledger=None if candidate.index is None else _ledger_facts(candidate, candidate.index),
    )


def _require_own_index(
    store: Backend, candidate: Candidate, index: LedgerIndex, content_hash: str
) -> None:
    """Raises ForeignObject if the index object of a ledger is that of another one.

    It says at which offset the ledger begins, and the hash is over frames with their offsets.
    """
    said = content_hash_of(index)
    if said not in (None, content_hash):
        raise ForeignObject(
            f"{store.name}: {candidate.key} is not the ledger of its index object: its content has "
            f"the hash {content_hash}, but the index says {said}. Put the right index back from a "
            "copy of the store"
        )


def _ledger_facts(candidate: Candidate, index: LedgerIndex) -> Ledger:
    name = parse_ledger(candidate.object_id)
    assert name is not None, "only ledgers have an index object"
    return ledger_facts(name, block_bytes_of(index), candidate.index_bytes)


def _read_frames(
    store: Backend, candidate: Candidate, reading: Reading, index: ObjectIndex
) -> Iterator[Scan]:
    name, key = candidate.name, candidate.key
    decoder = FrameDecoder(expected=name.start, consecutive=True)
    following = name.start
    for data in _chunks(store, candidate, reading):
        position = decoder.position
        frames = decoder.feed(data)
        index.add(frames, position)
        following += len(frames)
        if len(frames):
            yield frames
        frames.raise_if_corrupt(key, position)
    if decoder.pending:
        raise CorruptLog(
            f"{store.name}: {key} ends inside the frame of offset {following}, at position "
            f"{decoder.position}"
        )


def _read_blocks(
    store: Backend, candidate: Candidate, reading: Reading, index: ObjectIndex
) -> Iterator[Scan]:
    blocks = BlockAssembler(candidate.name.start, 0, candidate.size)
    for data in _chunks(store, candidate, reading):
        for frames in blocks.feed(data):
            size = len(frames.raw)
            index.add_block(frames.offsets[0], len(frames), size, blocks.block_position)
            yield frames
            del frames
    blocks.require_end(None)
    damage = blocks.corruption
    if damage is not None:
        raise CorruptFrame(
            damage.reason, file=candidate.key, position=damage.position, offset=damage.offset
        )


def _read_entries(
    store: Backend, candidate: Candidate, reading: Reading, index: ObjectIndex
) -> Iterator[Scan]:
    """The same for a ledger. The index gets an entry for the first message of each scan."""
    assert candidate.index is not None, "a ledger without its index object is no candidate"
    start, block_bytes = candidate.name.start, block_bytes_of(candidate.index)
    entries = EntryAssembler(start, 0, candidate.size, start, block_bytes)
    for data in _chunks(store, candidate, reading):
        for frames in entries.feed(data):
            position = entries.positions[0] if index.entries else 0
            index.add_block(frames.offsets[0], len(frames), len(frames.raw), position)
            yield frames
            del frames
    entries.require_end(candidate.name.end + 1)
    damage = entries.corruption
    if damage is not None:
        raise CorruptFrame(
            damage.reason, file=candidate.key, position=damage.position, offset=damage.offset
        )


def _chunks(store: Backend, candidate: Candidate, reading: Reading) -> Iterator[Buffer]:
    key = candidate.key
    for start in range(0, candidate.size, CHUNK_BYTES):
        end = min(start + CHUNK_BYTES, candidate.size)
        try:
            data = store.get_range(key, start, end)
        except ObjectMissing as error:
            raise CorruptLog(f"{store.name}: {key} was deleted while it was read") from error
        reading.bytes += end - start
        yield data
