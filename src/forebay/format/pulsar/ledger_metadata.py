"""What BookKeeper knows about a ledger: `LedgerMetadata`, part of every index object.

It is the protobuf message `LedgerMetadataFormat` of BookKeeper, without the password. Pulsar stores
the name of the topic in its custom metadata, so the index object alone tells whose ledger it is.

Beware: brokers refuse metadata in which a field is missing that they read, whatever the schema says
about it. `encode_ledger_metadata` therefore writes all of them, always.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from forebay.errors import LedgerError
from forebay.format.layout import Buffer
from forebay.format.pulsar.protobuf import (
    Field,
    bytes_of,
    fields,
    message_of,
    number_of,
    put_bytes,
    put_number,
    put_text,
    signed_32,
    signed_64,
    text_of,
)
from forebay.limits import LEDGER_METADATA_BYTES_MAX

APPLICATION: Final = "application"
COMPONENT: Final = "component"
MANAGED_LEDGER: Final = "pulsar/managed-ledger"
"""The key in the custom metadata under which Pulsar stores the name of the topic's ledgers."""

_WHAT: Final = "the metadata of the ledger"


class LedgerState(IntEnum):
    OPEN = 1
    IN_RECOVERY = 2
    CLOSED = 3


class DigestType(IntEnum):
    CRC32 = 1
    HMAC = 2
    CRC32C = 3
    DUMMY = 4


@dataclass(frozen=True, slots=True)
class Ensemble:
    """The bookies that stored the entries from `first_entry_id` on."""

    members: tuple[str, ...]
    first_entry_id: int = 0


@dataclass(frozen=True, slots=True)
class LedgerMetadata:
    """What is known about one ledger. Fields that a writer left out are None."""

    length: int
    """The bytes of all entries, without their headers."""
    last_entry_id: int | None
    state: LedgerState | None = LedgerState.CLOSED
    quorum_size: int = 1
    ensemble_size: int = 1
    ack_quorum_size: int | None = 1
    digest_type: DigestType | None = DigestType.CRC32C
    created_ms: int | None = 0
    ensembles: tuple[Ensemble, ...] = (Ensemble(("127.0.0.1:3181",)),)
    custom: tuple[tuple[str, bytes], ...] = ()
    """Names and values in the order in which they are stored."""

    @property
    def closed(self) -> bool:
        return self.state is LedgerState.CLOSED

    @property
    def managed_ledger(self) -> str | None:
        """Pulsar's name of the topic, such as `public/default/persistent/orders`."""
        return self.text(MANAGED_LEDGER)

    def text(self, name: str) -> str | None:
        """A value of the custom metadata as text; raises LedgerError if it is not UTF-8."""
        value = dict(self.custom).get(name)
        try:
            return None if value is None else value.decode()
        except UnicodeDecodeError as error:
            raise LedgerError(f"{name} in {_WHAT} is not UTF-8: {error}") from error


def encode_ledger_metadata(metadata: LedgerMetadata) -> bytes:
    """Encodes it as Pulsar does, fields in the order of their numbers."""
    parts = [
        put_number(1, metadata.quorum_size),
        put_number(2, metadata.ensemble_size),
        put_number(3, metadata.length),
        _optional(4, metadata.last_entry_id),
        _optional(5, metadata.state),
    ]
    for ensemble in metadata.ensembles:
        members = b"".join(put_text(1, member) for member in ensemble.members)
        parts.append(put_bytes(6, members + put_number(2, ensemble.first_entry_id)))
    parts += [
        _optional(7, metadata.digest_type),
        _optional(9, metadata.ack_quorum_size),
        _optional(10, metadata.created_ms),
    ]
    for name, value in metadata.custom:
        parts.append(put_bytes(11, put_text(1, name) + put_bytes(2, value)))
    return b"".join(parts)


def _optional(number: int, value: int | None) -> bytes:
    return b"" if value is None else put_number(number, value)


def decode_ledger_metadata(data: Buffer) -> LedgerMetadata:
    """Decodes it; raises LedgerError. Unknown fields are skipped."""
    if len(data) > LEDGER_METADATA_BYTES_MAX:
        raise LedgerError(
            f"{_WHAT} has {len(data)} bytes; at most {LEDGER_METADATA_BYTES_MAX} are allowed"
        )
    numbers: dict[int, int] = {}
    ensembles: list[Ensemble] = []
    custom: list[tuple[str, bytes]] = []
    for field in fields(data, 0, len(data), _WHAT):
        if field.number == 6:
            ensembles.append(_ensemble(data, field))
        elif field.number == 11:
            custom.append(_pair(data, field))
        elif field.number in _NUMBERS:
            numbers[field.number] = number_of(field, _WHAT)
    for number in (1, 2, 3):
        if number not in numbers:
            raise LedgerError(f"{_WHAT} lacks its field {number}, {_NUMBERS[number]}")
    return LedgerMetadata(
        _length(numbers[3]),
        _entry_id(numbers.get(4)),
        _state(numbers.get(5)),
        signed_32(numbers[1]),
        signed_32(numbers[2]),
        signed_32(numbers[9]) if 9 in numbers else None,
        _digest_type(numbers.get(7)),
        signed_64(numbers[10]) if 10 in numbers else None,
        tuple(ensembles),
        tuple(custom),
    )


_NUMBERS: Final = {
    1: "quorumSize",
    2: "ensembleSize",
    3: "length",
    4: "lastEntryId",
    5: "state",
    7: "digestType",
    9: "ackQuorumSize",
    10: "ctime",
}


def _length(value: int) -> int:
    length = signed_64(value)
    if length < 0:
        raise LedgerError(f"{_WHAT} says that its entries have {length} bytes")
    return length


def _entry_id(value: int | None) -> int | None:
    """The last entry's id; -1 stands for an empty ledger."""
    if value is None:
        return None
    found = signed_64(value)
    if found < -1:
        raise LedgerError(f"{_WHAT} says that its last entry is {found}")
    return found


def _state(value: int | None) -> LedgerState | None:
    try:
        return None if value is None else LedgerState(value)
    except ValueError as error:
        raise LedgerError(f"{_WHAT} has the unknown state {value}") from error


def _digest_type(value: int | None) -> DigestType | None:
    try:
        return None if value is None else DigestType(value)
    except ValueError as error:
        raise LedgerError(f"{_WHAT} has the unknown digest type {value}") from error


def _ensemble(data: Buffer, field: Field) -> Ensemble:
    start, end = message_of(field, _WHAT)
    members: list[str] = []
    first: int | None = None
    for part in fields(data, start, end, _WHAT):
        if part.number == 1:
            members.append(text_of(data, part, _WHAT))
        elif part.number == 2:
            first = signed_64(number_of(part, _WHAT))
    if first is None:
        raise LedgerError(f"an ensemble in {_WHAT} lacks its first entry id")
    return Ensemble(tuple(members), first)


def _pair(data: Buffer, field: Field) -> tuple[str, bytes]:
    start, end = message_of(field, _WHAT)
    name, value = "", b""
    for part in fields(data, start, end, _WHAT):
        if part.number == 1:
            name = text_of(data, part, _WHAT)
        elif part.number == 2:
            value = bytes_of(data, part, _WHAT)
    return name, value
