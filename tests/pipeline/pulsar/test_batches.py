"""Batches as columns: the same rows as if their messages were decoded one by one."""

from __future__ import annotations

import random
from typing import Any, Final

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import LedgerError
from forebay.format.codec import COMPILED
from forebay.format.pulsar.entry import decode_entry
from forebay.format.pulsar.messages import in_batch
from forebay.format.pulsar.topic import PulsarTopic
from forebay.pipeline.pulsar.batches import BatchGroup, is_batch
from forebay.pipeline.pulsar.bucket import Ledger
from forebay.pipeline.pulsar.columns import BatchMaker
from forebay.pipeline.pulsar.options import COLUMNS, MORE_COLUMNS
from support import pulsar_entries as pulsar

pytestmark = pytest.mark.skipif(not COMPILED, reason="the compiled twin was not built")

LEDGER: Final = Ledger(
    PulsarTopic("public/default", "orders-partition-3"), 7, "k", 1, 1, 1, None, 0
)
MAKER: Final = BatchMaker((*COLUMNS, *MORE_COLUMNS))
TEXT: Final = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
TIME: Final = st.integers(0, 253_402_300_799_999)

singles = st.builds(
    pulsar.Single,
    st.binary(max_size=20),
    properties=st.lists(st.tuples(TEXT, TEXT), max_size=2),
    key=st.none() | TEXT,
    ordering_key=st.none() | st.binary(max_size=4),
    event_time=st.none() | TIME,
    sequence_id=st.none() | st.integers(0, 2**64 - 1),
    null_value=st.none() | st.booleans(),
    null_key=st.none() | st.booleans(),
)


@st.composite
def batches(draw: st.DrawFn) -> bytes:
    fields: dict[str, Any] = {
        "producer_name": draw(TEXT),
        "publish_time": draw(TIME),
        "event_time": draw(st.sampled_from([0, 5])),
        "sequence_id": draw(st.integers(0, 2**64 - 1)),
        "schema_version": draw(st.none() | st.binary(max_size=8)),
        "index": draw(st.none() | st.integers(1000, 2**62)),
    }
    if draw(st.booleans()):
        fields["txn_least_bits"] = 1
    compression = draw(st.sampled_from(["NONE", "LZ4", "ZLIB", "ZSTD", "SNAPPY"]))
    return pulsar.batch(draw(st.lists(singles, max_size=4)), compression, **fields)


def grouped(data: list[bytes]) -> BatchGroup:
    group = BatchGroup()
    for entry_id, each in enumerate(data, 126):
        entry = decode_entry(each)
        assert is_batch(entry.metadata)
        group.add(entry_id, 0, entry)
    return group


@given(st.lists(batches(), min_size=1, max_size=5))
def test_the_rows_are_those_of_messages_that_are_decoded_one_by_one(data: list[bytes]) -> None:
    group = grouped(data)
    messages = [
        message
        for entry_id, _, entry, payload in group.batches
        for message in in_batch(entry_id, entry, payload)
    ]
    rows = group.rows()
    assert rows is not None
    found = MAKER.batched(LEDGER, rows)
    found.validate(full=True)
    assert found.num_rows == group.count
    assert pa.Table.from_batches([found]).equals(
        pa.Table.from_batches([MAKER.decoded(LEDGER, messages)])
    )


@pytest.mark.parametrize(
    "data",
    [
        pulsar.batch([pulsar.single(b"a", key="aGk=", key_b64=True)]),
        pulsar.batch([pulsar.single(b"a", compacted_out=True)]),
        pulsar.entry(b"", batch_messages=-1),
        pulsar.entry(b"", batch_messages=2**31 - 1),
        pulsar.entry(b"?????????", batch_messages=1),
        pulsar.entry(pulsar.single(b"a").encoded() + b"?", batch_messages=1),
    ],
)
def test_a_group_with_an_unusual_batch_is_decoded_one_by_one(data: bytes) -> None:
    assert grouped([data]).rows() is None
    assert grouped([pulsar.batch([pulsar.single(b"b")]), data]).rows() is None


def test_damaged_batches_are_no_rows_or_those_that_python_reads() -> None:
    source = random.Random(4)
    whole = pulsar.batch(
        [pulsar.single(b"v%d" % at, key="k", properties=[("a", "b")]) for at in range(5)]
    )
    entry = decode_entry(whole)
    for _ in range(3000):
        payload = bytearray(entry.payload)
        for _ in range(source.randrange(1, 3)):
            payload[source.randrange(len(payload))] = source.randrange(256)
        damaged = pulsar.entry(bytes(payload), batch_messages=5)
        group = grouped([damaged])
        rows = group.rows()
        if rows is not None:
            [(entry_id, _, parsed, stored)] = group.batches
            messages = list(in_batch(entry_id, parsed, stored))
            assert MAKER.batched(LEDGER, rows).equals(MAKER.decoded(LEDGER, messages))
            continue
        try:
            list(in_batch(0, *group.batches[0][2:]))
        except LedgerError:
            continue
