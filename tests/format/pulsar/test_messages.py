"""Messages out of entries of every kind: what is decoded, what is only marked, what is refused."""

from __future__ import annotations

import random
import sys
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import LedgerError, UsageError
from forebay.format.pulsar.entry import Compression, encode_entry
from forebay.format.pulsar.messages import (
    Chunk,
    ChunkAssembler,
    ChunkPlace,
    Kind,
    Message,
    decode_messages,
    incomplete,
)
from forebay.limits import PULSAR_MESSAGE_BYTES_MAX
from support import pulsar_entries as pulsar
from support.paths import SUPPORT

COMPRESSIONS: Final = ("NONE", "LZ4", "ZLIB", "ZSTD", "SNAPPY")


def decoded(data: bytes) -> list[Message]:
    found = decode_messages(5, data)
    assert isinstance(found, list)
    return found


def values(data: bytes) -> list[bytes | None]:
    return [None if each.value is None else bytes(each.value) for each in decoded(data)]


def chunk(data: bytes) -> Chunk:
    found = decode_messages(5, data)
    assert isinstance(found, Chunk)
    return found


# ---- single messages and batches ----


def test_a_single_message_has_all_its_fields() -> None:
    data = pulsar.entry(
        b"value",
        key="orders",
        properties=(("a", "1"), ("a", "2")),
        event_time=77,
        ordering_key=b"o",
        schema_version=b"\0" * 8,
        sequence_id=2**64 - 1,
        index=12,
    )
    assert decoded(data) == [
        Message(
            5,
            -1,
            0,
            Kind.MESSAGE,
            b"value",
            b"orders",
            b"o",
            pulsar.TIME,
            77,
            (("a", "1"), ("a", "2")),
            -1,
            pulsar.PRODUCER,
            b"\0" * 8,
            12,
        )
    ]


@pytest.mark.parametrize("compression", COMPRESSIONS)
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=5))
def test_batches_of_every_compression_are_read(compression: str, payloads: list[bytes]) -> None:
    data = pulsar.batch([pulsar.single(each) for each in payloads], compression, index=100)
    found = decoded(data)
    assert [bytes(each.value or b"") for each in found] == payloads
    assert [each.batch_index for each in found] == list(range(len(payloads)))
    assert {each.batch_size for each in found} == {len(payloads)}
    assert [each.index for each in found] == list(range(101 - len(payloads), 101))


@pytest.mark.parametrize("compression", COMPRESSIONS)
@given(st.binary(max_size=3000))
def test_single_messages_of_every_compression_are_read(compression: str, value: bytes) -> None:
    assert values(pulsar.entry(value, compression=compression)) == [value]


def test_a_message_of_a_batch_has_its_own_fields_and_the_rest_of_the_batch() -> None:
    one = pulsar.single(
        b"a", key="aGk=", key_b64=True, properties=[("p", "q")], event_time=5, sequence_id=9
    )
    data = pulsar.batch(
        [one, pulsar.single(b"b", ordering_key=b"o"), pulsar.single(b"", null_value=True)],
        properties=(("of the", "batch"),),
        partition_key="of the batch",
        event_time=6,
        sequence_id=9,
        schema_version=b"s",
    )
    first, second, third = decoded(data)
    assert (first.key, first.event_time, first.properties) == (b"hi", 5, (("p", "q"),))
    assert (second.key, second.event_time, second.properties) == (None, 6, ())
    assert (second.ordering_key, second.sequence_id, second.schema_version) == (b"o", 9, b"s")
    assert third.value is None


def test_null_values_and_null_keys_are_null() -> None:
    [found] = decoded(pulsar.entry(b"", null_value=True, key="k", null_partition_key=True))
    assert (found.value, found.key) == (None, None)
    [found] = decoded(pulsar.batch([pulsar.single(b"x", key="k", null_key=True)]))
    assert (found.value, found.key) == (b"x", None)


def test_what_a_compaction_took_out_counts_for_the_batch_index() -> None:
    singles = [
        pulsar.single(b"a"),
        pulsar.single(b"", compacted_out=True),
        pulsar.single(b"c"),
    ]
    found = decoded(pulsar.batch(singles))
    assert [(each.batch_index, each.value) for each in found] == [(0, b"a"), (2, b"c")]
    left = pulsar.batch(
        [pulsar.single(b"b"), pulsar.single(b"d")],
        batch_messages=5,
        compacted_batch_indexes=(1, 3),
    )
    found = decoded(left)
    assert [(each.batch_index, each.value) for each in found] == [(1, b"b"), (3, b"d")]


# ---- what is only marked ----


def test_transactional_messages_are_decoded_and_marked() -> None:
    [found] = decoded(pulsar.entry(b"v", txn_least_bits=1, txn_most_bits=0))
    assert (found.kind, found.value) == (Kind.TRANSACTIONAL, b"v")
    found = decoded(pulsar.batch([pulsar.single(b"v")], "LZ4", txn_least_bits=0))[0]
    assert found.kind == Kind.TRANSACTIONAL


def test_encrypted_payloads_are_given_as_they_are_stored() -> None:
    data = pulsar.encrypted(b"cipher", batch_messages=10, compression="LZ4", key="k")
    [found] = decoded(data)
    stored = pulsar.compress("LZ4", b"cipher")
    assert (found.kind, found.value, found.key) == (Kind.ENCRYPTED, stored, b"k")
    assert found.batch_index == -1


def test_markers_are_given_as_they_are() -> None:
    [found] = decoded(pulsar.marker())
    assert found.kind == Kind.MARKER


# ---- chunks ----


def place(number: int) -> ChunkPlace:
    return ChunkPlace(1, number)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_chunks_are_put_together_and_then_decompressed(compression: str) -> None:
    value = random.Random(1).randbytes(500) * 3
    assembler = ChunkAssembler()
    data = pulsar.chunks(value, 200, "p-1", compression, key="k")
    for number, each in enumerate(data[:-1]):
        assert assembler.add(place(number), chunk(each)) is None
    whole = assembler.add(place(90), chunk(data[-1]))
    assert whole is not None
    assert (whole.message.value, whole.message.key) == (value, b"k")
    assert whole.message.entry_id == 90
    assert whole.places == (*(place(at) for at in range(len(data) - 1)), place(90))
    assert assembler.finish() == []


@given(st.randoms(use_true_random=False), st.integers(1, 4))
def test_messages_in_chunks_that_are_interleaved_are_all_found(
    source: random.Random, count: int
) -> None:
    waiting = {f"p-{at}": pulsar.chunks(bytes([at]) * 50, 20, f"p-{at}") for at in range(count)}
    assembler, found, number = ChunkAssembler(), [], 0
    while waiting:
        uuid = source.choice(sorted(waiting))
        number += 1
        whole = assembler.add(place(number), chunk(waiting[uuid].pop(0)))
        if whole is not None:
            found.append(bytes(whole.message.value or b""))
        waiting = {key: rest for key, rest in waiting.items() if rest}
    assert sorted(found) == [bytes([at]) * 50 for at in range(count)]
    assert assembler.finish() == []


def test_a_producer_that_begins_again_is_read_once() -> None:
    first, second, third = (chunk(each) for each in pulsar.chunks(b"abcdef", 2, "p-1"))
    assembler = ChunkAssembler()
    given_chunks = [first, second, second, first, second, first, second, third, third]
    found = [assembler.add(place(at), each) for at, each in enumerate(given_chunks)]
    [whole] = [each for each in found if each is not None]
    assert whole.message.value == b"abcdef"
    assert whole.places == (place(5), place(6), place(7))
    left = [at for at, _ in assembler.finish()]
    assert left == [place(0), place(1), place(3), place(4), place(8)]


def test_chunks_without_the_others_are_given_back() -> None:
    first, second, third = (chunk(each) for each in pulsar.chunks(b"abcdef", 2, "p-1"))
    assembler = ChunkAssembler()
    assert assembler.add(place(0), second) is None
    assert assembler.add(place(1), first) is None
    assert assembler.add(place(2), third) is None
    left = assembler.finish()
    assert [at for at, _ in left] == [place(0), place(1), place(2)]
    stands = incomplete(2, left[2][1])
    assert (stands.kind, stands.value) == (Kind.INCOMPLETE, b"ef")


def test_an_assembler_holds_a_limited_number_of_bytes() -> None:
    assembler = ChunkAssembler(bytes_max=100)
    for number in range(5):
        data = pulsar.chunks(b"x" * 80, 40, f"p-{number}")
        assert assembler.add(place(number), chunk(data[0])) is None
    assert [at for at, _ in assembler.dropped] == [place(0), place(1), place(2)]
    whole = assembler.add(place(9), chunk(pulsar.chunks(b"x" * 80, 40, "p-4")[1]))
    assert whole is not None


def test_chunks_that_contradict_each_other_are_not_put_together() -> None:
    assembler = ChunkAssembler()
    assembler.add(place(0), chunk(pulsar.chunks(b"abcdef", 2, "p-1")[0]))
    assert assembler.add(place(1), chunk(pulsar.chunks(b"abcd", 2, "p-1")[1])) is None
    assert [at for at, _ in assembler.finish()] == [place(0), place(1)]


# ---- what is refused ----


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (pulsar.entry(b"x")[:-1] + b"y", "checksum"),
        (pulsar.entry(b"x", checksum=False)[:8], "cut off"),
        (encode_entry(pulsar.metadata(compression=9), b"x"), "compression 9 is not known"),
        (pulsar.entry(b"x", key="?", partition_key_b64=True), "not Base64"),
    ],
)
def test_damaged_entries_are_refused(data: bytes, said: str) -> None:
    with pytest.raises(LedgerError, match=said):
        decode_messages(0, data)


@pytest.mark.parametrize("compression", COMPRESSIONS[1:])
def test_a_payload_of_another_size_than_its_metadata_say_is_refused(compression: str) -> None:
    stored = pulsar.compress(compression, b"x" * 1000)
    for size in (999, 1001, 0, PULSAR_MESSAGE_BYTES_MAX + 1, 2**32 - 1):
        metadata = pulsar.metadata(compression=Compression[compression], uncompressed_size=size)
        with pytest.raises(LedgerError, match=f"{compression} payload"):
            decode_messages(0, encode_entry(metadata, stored))
    metadata = pulsar.metadata(compression=Compression[compression], uncompressed_size=1000)
    for wrong in (b"", b"\xff" * 20, stored[: len(stored) // 2]):
        with pytest.raises(LedgerError, match=f"{compression} payload"):
            decode_messages(0, encode_entry(metadata, wrong))


def test_a_bomb_allocates_no_more_than_its_metadata_say() -> None:
    bomb = pulsar.compress("ZSTD", bytes(64 * 2**20))
    metadata = pulsar.metadata(compression=Compression.ZSTD, uncompressed_size=10)
    with pytest.raises(LedgerError, match="another size"):
        decode_messages(0, encode_entry(metadata, bomb))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pulsar.entry(b"x", compression="LZ4")
    monkeypatch.setitem(sys.modules, "cramjam", None)
    with pytest.raises(UsageError, match=r"install forebay\[pulsar\], on every executor"):
        decode_messages(0, data)


def test_batches_that_end_elsewhere_are_refused() -> None:
    whole = b"".join(pulsar.single(each).encoded() for each in (b"a", b"b"))
    for payload, count, said in (
        (whole[:-1], 2, "ends after the batch"),
        (whole + b"?", 2, "1 bytes are left"),
        (whole, 3, "lacks the size|ends after"),
        (whole, -1, "a batch of -1"),
        (whole, 2**31 - 1, "a batch of 2147483647"),
    ):
        with pytest.raises(LedgerError, match=said):
            decode_messages(0, pulsar.entry(payload, batch_messages=count))


def kinds_of_entries() -> list[bytes]:
    singles = [pulsar.single(b"a", key="k", properties=[("a", "b")]), pulsar.single(b"bb")]
    return [
        pulsar.entry(b"value", key="k", index=3, checksum=False),
        *(pulsar.batch(singles, each, checksum=False) for each in COMPRESSIONS),
        pulsar.chunks(b"value", 2, "p-1")[1],
        pulsar.encrypted(b"x", checksum=False),
        pulsar.marker(),
    ]


@pytest.mark.parametrize("data", kinds_of_entries())
def test_every_cut_and_every_changed_byte_is_an_error_or_a_message(data: bytes) -> None:
    source = random.Random(3)
    for cut in range(len(data)):
        _try(data[:cut])
    for at in range(len(data)):
        for _ in range(4):
            _try(data[:at] + bytes([source.randrange(256)]) + data[at + 1 :])


def _try(data: bytes) -> None:
    try:
        found = decode_messages(0, data)
    except LedgerError:
        return
    assert isinstance(found, Chunk) or all(isinstance(each, Message) for each in found)


def test_a_ledger_of_a_real_broker_is_read() -> None:
    raw = (SUPPORT / "pulsar" / "ledger-1").read_bytes()
    [found] = decoded(raw[140:])
    assert (found.value, found.batch_index, found.batch_size) == (b"hello-reader-1", 0, 1)
    assert (found.producer_name, found.publish_time) == ("standalone-9-0", 1632298359277)
