"""Idempotent producers: their ids, how the log tells their messages, and their row in the catalog.

    {"complete":true,"epoch":7,"offset":1200,"origin":"here","producers":[["a1b2…",42,1199]]}

A message of an idempotent producer has the producer's number of it as its `request_id`. The ids of
these producers have their highest bit set, and are made of the topic and the name, so no other
message is taken for one of them. The row has the last number of each producer, and the offset of
that message, for all messages before `offset`. The layout: `docs/formats/catalog.md`.

Beware: the row is only a start. Unless it is `complete`, the log from `offset` on decides.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any, Final, NamedTuple

from forebay.errors import DescriptorError, MessageError
from forebay.format.frame import Scan
from forebay.format.layout import FIXED, locate
from forebay.limits import IDEMPOTENT_PRODUCERS_MAX, JOB_STATE_BYTES_MAX, OFFSET_MAX

_IDEMPOTENT: Final = 1 << 63
_IDS: Final = struct.Struct("<QQ")
"""The first bytes of a message as it is written here: request and producer."""
_ID_MARK_AT: Final = 15
_ID_MARK: Final = 0x80


@lru_cache(4096)
def idempotent_id(topic: str, name: str) -> int:
    """Returns the id of the idempotent producer of this name, the same in every process."""
    digest = sha256(f"{topic}\0{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") | _IDEMPOTENT


class Run(NamedTuple):
    """Messages of one producer with consecutive numbers and consecutive offsets."""

    sequence: int
    """The number of the first message."""
    offset: int
    length: int

    @property
    def last_sequence(self) -> int:
        return self.sequence + self.length - 1

    @property
    def last_offset(self) -> int:
        return self.offset + self.length - 1

    def followed_by(self, other: Run) -> bool:
        """Whether both together are one run."""
        return (self.last_sequence + 1, self.last_offset + 1) == (other.sequence, other.offset)

    def with_more(self, count: int) -> Run:
        return self._replace(length=self.length + count)


def last_runs(frames: Scan, topic: str) -> dict[int, Run]:
    """Returns the last run of each idempotent producer in these frames, by its id.

    They are in the order of their last messages.
    """
    buffer, offsets, positions, lengths = (
        frames.buffer,
        frames.offsets,
        frames.positions,
        frames.lengths,
    )
    found: dict[int, Run] = {}
    for row in range(len(frames) - 1, -1, -1):
        position = positions[row]
        if lengths[row] < _IDS.size or not buffer[position + _ID_MARK_AT] & _ID_MARK:
            continue
        sequence, number = _IDS.unpack_from(buffer, position)
        run = found.get(number)
        if run is None:
            if _is_idempotent(frames, row, topic):
                found[number] = Run(sequence, offsets[row], 1)
        elif (sequence + 1, offsets[row] + 1) == (run.sequence, run.offset):
            found[number] = Run(sequence, offsets[row], run.length + 1)
    return dict(reversed(found.items()))


def _is_idempotent(frames: Scan, row: int, topic: str) -> bool:
    try:
        layout = locate(frames.buffer, frames.positions[row], frames.lengths[row])
        at, size = layout.producer_name
        name = str(frames.buffer[at : at + size], "utf-8")
    except (MessageError, UnicodeDecodeError):
        return False
    wanted = idempotent_id(topic, name)
    return layout.flavour == FIXED and layout.producer_id == wanted


class KnownProducer(NamedTuple):
    """The last message of an idempotent producer."""

    producer_id: int
    sequence: int
    offset: int


@dataclass(frozen=True, slots=True)
class ProducersRow:
    """What the catalog knows about the idempotent producers of a topic."""

    offset: int
    """Every message before this offset is accounted for."""
    producers: tuple[KnownProducer, ...] = ()
    """Those used longest ago come first."""
    complete: bool = False
    """Whether no idempotent producer was connected after this was written."""
    origin: str | None = None
    """The origin of the topic when this was written; it changes with a restore."""
    epoch: int = 0


def encode_producers_row(row: ProducersRow) -> bytes:
    body = {
        "complete": row.complete,
        "epoch": row.epoch,
        "offset": row.offset,
        "origin": row.origin,
        "producers": [[f"{each[0]:016x}", each[1], each[2]] for each in row.producers],
    }
    return json.dumps(body, separators=(",", ":"), sort_keys=True).encode()


def decode_producers_row(data: bytes, what: str) -> ProducersRow:
    """Decodes a row. `what` names it in the DescriptorError. Ignores fields it does not know."""
    try:
        body = json.loads(data)
        if not isinstance(body, dict) or len(data) > JOB_STATE_BYTES_MAX:
            raise DescriptorError(f"{what} is not a JSON object of at most {JOB_STATE_BYTES_MAX} B")
        origin = body.get("origin")
        if origin is not None and not isinstance(origin, str):
            raise DescriptorError(f"{what}: origin is not a text")
        return ProducersRow(
            _number(body["offset"]),
            tuple(_producers(body["producers"])),
            body["complete"] is True,
            origin,
            _number(body.get("epoch", 0)),
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DescriptorError(f"{what}: {error!r}") from error


def _producers(items: list[Any]) -> Iterator[KnownProducer]:
    if len(items) > IDEMPOTENT_PRODUCERS_MAX:
        raise ValueError(f"{len(items)} producers; at most {IDEMPOTENT_PRODUCERS_MAX}")
    for number, sequence, offset in items:
        yield KnownProducer(int(number, 16), _number(sequence), _number(offset))


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value <= OFFSET_MAX:
        raise ValueError(f"{value!r} is not an integer in 0..{OFFSET_MAX}")
    return value
