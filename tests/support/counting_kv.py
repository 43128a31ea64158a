"""A catalog that counts what is read from it, and chains of any length in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from forebay.catalog.catalog import Catalog
from forebay.catalog.chain import Chain
from forebay.catalog.kv import Entry, Kv, Put
from forebay.catalog.records import TopicRecord, encode_record
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import TopicName
from forebay.testing.kv import FaultKv


class Reads(NamedTuple):
    requests: int = 0
    entries: int = 0
    bytes: int = 0
    walked: int = 0
    """Keys in the ranges that were asked for. etcd visits all of them, whatever the limit is."""


class CountingKv(FaultKv):
    """Counts the requests that read, the entries they return, and the bytes of these."""

    def __init__(self, inner: Kv) -> None:
        super().__init__(inner)
        self.reads = Reads()

    def get(self, key: str) -> Entry | None:
        found = super().get(key)
        self._add([] if found is None else [found], 1)
        return found

    def range(self, start: str, end: str, *, limit: int) -> list[Entry]:
        found = super().range(start, end, limit=limit)
        self._add(found, len(self.inner.range(start, end, limit=1_000_000)))
        return found

    def _add(self, found: Sequence[Entry], walked: int) -> None:
        reads = self.reads
        self.reads = Reads(
            reads.requests + 1,
            reads.entries + len(found),
            reads.bytes + sum(len(entry.value) for entry in found),
            reads.walked + walked,
        )

    def since(self, before: Reads) -> Reads:
        return Reads(*(now - then for now, then in zip(self.reads, before, strict=True)))


def write_chain(
    kv: Kv, prefix: str, topic: TopicName, made: Sequence[ObjectDescriptor], record: TopicRecord
) -> None:
    """Writes the rows of the chain and the topic's record directly."""
    keys = Catalog(kv, prefix).keys
    chain = Chain(kv, keys, topic)
    for first in range(0, len(made), 30):
        assert kv.commit([], chain.changed(made[first : first + 30])) is not None
    assert kv.commit([], [Put(keys.record(topic), encode_record(record))]) is not None
