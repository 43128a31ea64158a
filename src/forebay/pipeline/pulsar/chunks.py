"""Messages in chunks that a task sees only in part: the others are before or after its blocks.

Every task decides alone, and all come to the same result. A message is whole if its chunks are at
most AROUND ledgers and SEARCH_BYTES of stored data from each other. A task that misses chunks reads
the blocks before and after its own as far as that. The task with the last chunk yields the message;
in a stream, the one with the last chunk of those that are new. A chunk that is in no whole message
is yielded as it is, by the task that has it, as INCOMPLETE.

Beware: in a stream a message may continue in a ledger that is not there yet. Its chunks are yielded
as INCOMPLETE then, and the message itself when the rest has come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from forebay.errors import CorruptLog, LedgerError
from forebay.format.pulsar.blocks import Entries
from forebay.format.pulsar.index import decode_index
from forebay.format.pulsar.messages import (
    Chunk,
    ChunkAssembler,
    ChunkPlace,
    Message,
    decode_messages,
    incomplete,
)
from forebay.limits import LEDGER_INDEX_BYTES_MAX, MIB
from forebay.pipeline.pulsar.bucket import Ledger
from forebay.pipeline.pulsar.plan import AROUND, Neighbour, blocks_of
from forebay.pipeline.pulsar.read import Part, read_part
from forebay.topic.resources import StoreResources

SEARCH_BYTES: Final = 512 * MIB


@dataclass(frozen=True, slots=True)
class Found:
    """A chunk, and the position of its entry in the data object."""

    place: ChunkPlace
    position: int
    chunk: Chunk


def resolve(
    resources: StoreResources, part: Part, left: Sequence[Found], around: Sequence[Neighbour]
) -> Iterator[tuple[Ledger, Message]]:
    """The messages and the incomplete chunks that the task with `part` yields.

    `left` are the chunks of the part, in order, that are in no message which is all in the part.
    """
    context = _Context(resources, part, left, around)
    both = [*context.before(), *left, *context.after()]
    known = {found.place: found for found in both}
    own = {found.place for found in left}
    used: set[ChunkPlace] = set()
    assembler = ChunkAssembler()
    for found in both:
        try:
            whole = assembler.add(found.place, found.chunk)
        except LedgerError:  # what its chunks are together is no message
            continue
        if whole is None or not context.near([known[place] for place in whole.places]):
            continue
        used |= own.intersection(whole.places)
        if context.owner(whole.places) in own:
            yield context.ledger(whole.places[-1]), whole.message
    for found in left:
        if found.place not in used:
            yield part.ledger, incomplete(found.place.entry_id, found.chunk)


class _Context:
    """The blocks around a part."""

    def __init__(
        self,
        resources: StoreResources,
        part: Part,
        left: Sequence[Found],
        around: Sequence[Neighbour],
    ) -> None:
        self._resources = resources
        self._part = part
        self._left = left
        same = [each for each in around if each.ledger.topic == part.ledger.topic]
        self._neighbours = {each.ledger.ledger_id: each for each in same}
        self._order = {each.ledger.ledger_id: at for at, each in enumerate(same)}
        self._starts: dict[int, int] = {}
        start = 0
        for each in same:
            self._starts[each.ledger.ledger_id] = start
            start += each.ledger.size
        numbers: dict[str, set[int]] = {}
        for found in left:
            numbers.setdefault(found.chunk.uuid, set()).add(found.chunk.number)
        counts = {found.chunk.uuid: found.chunk.count for found in left}
        self._headless = {uuid for uuid, seen in numbers.items() if 0 not in seen}
        self._endless = {uuid for uuid, seen in numbers.items() if counts[uuid] - 1 not in seen}

    def ledger(self, place: ChunkPlace) -> Ledger:
        return self._neighbours[place.ledger_id].ledger

    def owner(self, places: Sequence[ChunkPlace]) -> ChunkPlace | None:
        """The chunk whose task yields the message: the last one that this query reads."""
        read = [place for place in places if self._neighbours[place.ledger_id].read]
        return max(read, default=None)

    def near(self, chunks: Sequence[Found]) -> bool:
        """Whether every task with one of these chunks finds all of them."""
        places = [self._coordinate(each.place.ledger_id, each.position) for each in chunks]
        ledgers = [self._order[each.place.ledger_id] for each in chunks]
        apart = max(ledgers) - min(ledgers)
        return max(places) - min(places) <= SEARCH_BYTES and apart <= AROUND

    def _coordinate(self, ledger_id: int, position: int) -> int:
        return self._starts[ledger_id] + position

    def before(self) -> list[Found]:
        """The chunks before the part that belong to its messages, in order."""
        missing = set(self._headless)
        lowest = self._of(self._left[0]) - SEARCH_BYTES
        found: list[Found] = []
        blocks = self._blocks() if missing else []
        for block in reversed(blocks):
            id_, end = block.ledger.ledger_id, block.end
            if not missing or self._coordinate(id_, end) <= lowest:
                break
            if self._coordinate(id_, end) > self._coordinate(*self._begin):
                continue  # the part itself, and what is after it
            new = self._chunks(block, self._headless)
            missing -= {each.chunk.uuid for each in new if each.chunk.number == 0}
            found = [*new, *found]
        return found

    def after(self) -> list[Found]:
        """The chunks after the part that belong to its messages, in order."""
        missing = set(self._endless)
        highest = self._of(self._left[-1]) + SEARCH_BYTES
        found: list[Found] = []
        for block in self._blocks() if missing else ():
            at = self._coordinate(block.ledger.ledger_id, block.begin)
            if not missing or at > highest:
                break
            if at < self._coordinate(self._part.ledger.ledger_id, self._part.end):
                continue
            new = self._chunks(block, self._endless)
            found += new
            ended = {each.chunk.uuid for each in new if each.chunk.number + 1 == each.chunk.count}
            missing -= ended
        return found

    @property
    def _begin(self) -> tuple[int, int]:
        return self._part.ledger.ledger_id, self._part.begin

    def _of(self, found: Found) -> int:
        return self._coordinate(found.place.ledger_id, found.position)

    def _blocks(self) -> list[Part]:
        """The blocks of all ledgers around that can be near enough, in order."""
        found: list[Part] = []
        own = self._order[self._part.ledger.ledger_id]
        first, last = self._of(self._left[0]), self._of(self._left[-1])
        for neighbour in self._neighbours.values():
            ledger = neighbour.ledger
            start = self._starts[ledger.ledger_id]
            far = start > last + SEARCH_BYTES or start + ledger.size < first - SEARCH_BYTES
            if far or abs(self._order[ledger.ledger_id] - own) > AROUND:
                continue
            raw = self._resources.store.get_object(f"{ledger.key}-index", LEDGER_INDEX_BYTES_MAX)
            found += blocks_of(ledger, decode_index(raw))
        return found

    def _chunks(self, block: Part, uuids: set[str]) -> list[Found]:
        found = []
        try:
            for entries in read_part(self._resources, block):
                found += [each for each in chunks_of(block, entries) if each.chunk.uuid in uuids]
        except CorruptLog:  # whose task reports it
            return found
        return found


def chunks_of(part: Part, entries: Entries) -> Iterator[Found]:
    """The chunks among the entries. Entries that cannot be decoded are none."""
    for number, (entry_id, data) in enumerate(entries):
        try:
            decoded = decode_messages(entry_id, data)
        except LedgerError:
            continue
        if isinstance(decoded, Chunk):
            place = ChunkPlace(part.ledger.ledger_id, entry_id)
            yield Found(place, entries.base + entries.positions[number], decoded)
