"""Batches of Pulsar as columns: most of what producers send is in batches.

`BatchGroup` collects entries that are batches, decompressed, until they are about as large as a
record batch. Their messages become rows without a Python object for each. A group with a batch that
is not like most are (compacted, with a key in Base64, or damaged) has to be decoded one by one.

Beware: without the compiled module every group has to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from forebay.format.pulsar.columns import (
    HAS_EVENT_TIME,
    HAS_SEQUENCE_ID,
    PLAIN,
    TRANSACTIONAL,
    EntryColumns,
    batch_columns,
)
from forebay.format.pulsar.compression import decompress
from forebay.format.pulsar.entry import MessageMetadata, ParsedEntry
from forebay.format.pulsar.protobuf import signed_64
from forebay.limits import OFFSET_MAX
from forebay.pipeline.pulsar.columns import Batched, Numbers

_ABSENT: Final = -1


def is_batch(metadata: MessageMetadata) -> bool:
    """Whether the entry is a batch whose messages can be rows."""
    return metadata.batch_messages is not None and not (
        metadata.marker_type is not None
        or metadata.encryption_keys
        or (metadata.chunks or 0) > 1
        or metadata.compacted_batch_indexes
        or metadata.null_value
        or metadata.null_partition_key
    )


class Batch(NamedTuple):
    """An entry that is a batch."""

    entry_id: int
    position: int
    """Of the entry in the data object."""
    entry: ParsedEntry
    """Without its payload."""
    payload: bytes
    """Decompressed."""

    @property
    def size(self) -> int:
        """How many messages it has, as it says."""
        return self.entry.metadata.batch_messages or 0


class BatchGroup:
    """Entries of one ledger that are batches."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.size = 0
        """The bytes of the payloads."""

    @property
    def count(self) -> int:
        """How many messages there are, as the batches say."""
        return sum(batch.size for batch in self.batches)

    def add(self, entry_id: int, position: int, entry: ParsedEntry) -> None:
        """Adds a batch. Its bytes are copied. Raises LedgerError if it cannot be decompressed."""
        metadata = entry.metadata
        payload = decompress(metadata.compression, entry.payload, metadata.uncompressed_size)
        slim = entry._replace(payload=memoryview(b""))
        self.batches.append(Batch(entry_id, position, slim, bytes(payload)))
        self.size += len(payload)

    def rows(self) -> Batched | None:
        """The messages as columns; None if they have to be decoded one by one."""
        entries = [batch.entry for batch in self.batches]
        counts = [batch.size for batch in self.batches]
        if min(counts) < 0:
            return None
        texts = _Texts(self.size)
        places = [texts.of_entry(entry.metadata) for entry in entries]
        payloads = [batch.payload for batch in self.batches]
        buffer = b"".join([*payloads, *texts.parts])
        lengths = np.array([len(each) for each in payloads], np.uint32)
        positions = np.cumsum(lengths, dtype=np.uint64) - lengths
        sizes = np.array(counts, np.uint32)
        found = batch_columns(buffer, positions.data, lengths.data, sizes.data)
        if found is None:
            return None
        entry = np.frombuffer(found.entries, np.int64)
        number = np.frombuffer(found.batch_indexes, np.int64)
        size = sizes.astype(np.int64)[entry]
        columns = _merged(entries, places, found.columns, entry, size - 1 - number)
        ids = np.array([batch.entry_id for batch in self.batches], np.int64)[entry]
        return Batched(buffer, columns, ids, number, size)


class _Texts:
    """Texts after the payloads, each of them once."""

    def __init__(self, position: int) -> None:
        self.parts: list[bytes] = []
        self._position = position
        self._places: dict[bytes, tuple[int, int]] = {}

    def of_entry(self, metadata: MessageMetadata) -> tuple[int, int, int, int]:
        """Position and length of the producer's name and of the schema version."""
        name, version = metadata.producer_name.encode(), metadata.schema_version
        return (*self._placed(name), *self._placed(version))

    def _placed(self, text: bytes | None) -> tuple[int, int]:
        """A length of -1 stands for None."""
        if text is None:
            return 0, _ABSENT
        if text not in self._places:
            self._places[text] = self._position, len(text)
            self._position += len(text)
            self.parts.append(text)
        return self._places[text]


def _merged(
    entries: Sequence[ParsedEntry],
    places: Sequence[tuple[int, ...]],
    own: EntryColumns,
    entry: Numbers,
    before_last: Numbers,
) -> EntryColumns:
    """The columns of messages, with what they have from their entries.

    `places` are those of the producer and of the schema of each entry, `entry` its number for each
    message, and `before_last` how many messages come after it in its batch.
    """
    texts = np.array(places, np.int64)
    flags = np.frombuffer(own.flags, np.int64)
    events, sequences = (
        np.frombuffer(each, np.int64) for each in (own.event_times, own.sequence_ids)
    )
    metadata = [each.metadata for each in entries]
    sent = np.array(
        [each.txn_least_bits is not None or each.txn_most_bits is not None for each in metadata]
    )
    event = _numbers([each.event_time for each in metadata])[entry]
    sequence = _numbers([signed_64(each.sequence_id) for each in metadata])[entry]
    last = _numbers(
        [
            _ABSENT if each.broker is None or each.broker.index is None else each.broker.index
            for each in entries
        ]
    )[entry]
    columns = [_column(texts[entry, at]) for at in range(4)]
    return own._replace(
        flags=_column(np.where(sent[entry], PLAIN | TRANSACTIONAL, PLAIN)),
        producer_positions=columns[0],
        producer_lengths=columns[1],
        schema_positions=columns[2],
        schema_lengths=columns[3],
        publish_times=_column(_numbers([each.publish_time for each in metadata])[entry]),
        event_times=_column(np.where(flags & HAS_EVENT_TIME, events, event)),
        sequence_ids=_column(np.where(flags & HAS_SEQUENCE_ID, sequences, sequence)),
        indexes=_column(np.where(last < 0, _ABSENT, last - before_last)),
    )


def _numbers(values: list[int]) -> Numbers:
    return np.array([min(value, OFFSET_MAX) for value in values], np.int64)


def _column(numbers: Numbers) -> memoryview:
    return np.ascontiguousarray(numbers, np.int64).data
