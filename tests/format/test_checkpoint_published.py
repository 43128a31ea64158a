"""The published position: an old record is read, a damaged one is not."""

from __future__ import annotations

from typing import Final

from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.format.checkpoint import RECORD_BYTES, Published, decode_published, encode_published

RECORD: Final = Published(seq=2, position=464, next_offset=9, start_offset=3, pid=4242)
u64 = st.integers(0, 2**64 - 1)


@settings(max_examples=100)
@given(record=st.builds(Published, u64, u64, u64, u64, st.integers(0, 2**32 - 1)))
def test_a_record_comes_back_as_it_was(record: Published) -> None:
    data = encode_published(record)
    assert len(data) == RECORD_BYTES == 48
    assert decode_published(data) == record


def test_bytes_behind_the_record_are_ignored() -> None:
    assert decode_published(encode_published(RECORD) + b"anything") == RECORD


def test_a_record_cut_at_any_byte_is_none() -> None:
    data = encode_published(RECORD)
    for cut in range(len(data)):
        assert decode_published(data[:cut]) is None


def test_every_single_bit_of_damage_makes_it_none() -> None:
    data = encode_published(RECORD)
    for at in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            assert decode_published(bytes(damaged)) is None


def test_a_record_half_overwritten_by_the_next_one_is_none() -> None:
    old = encode_published(RECORD)
    new = encode_published(Published(seq=3, position=2**40, next_offset=500, start_offset=3, pid=7))
    for cut in range(RECORD_BYTES + 1):
        mixed = decode_published(new[:cut] + old[cut:])
        if new[:cut] + old[cut:] not in {old, new}:
            assert mixed is None


def test_zeros_and_nothing_are_none() -> None:
    assert decode_published(b"") is None
    assert decode_published(bytes(RECORD_BYTES)) is None
    assert decode_published(bytes(4096)) is None
