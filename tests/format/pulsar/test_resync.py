"""After damage, a ledger is read on at the first entry that is not damaged."""

from __future__ import annotations

import random
from functools import cache
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.format.frame import encode_frame, scan
from forebay.format.message import StreamMessage, encode_message
from forebay.format.pulsar.frames import EntryAssembler, FramePacker
from forebay.format.pulsar.resync import next_place_in_ledger

START: Final = 1000
COUNT: Final = 60


@cache
def ledger(block_bytes: int) -> tuple[bytes, list[int]]:
    """A ledger with messages of 0 to 99 bytes, and the positions of its entries."""
    rng = random.Random(1)
    frames = b"".join(
        encode_frame(
            offset,
            encode_message(
                StreamMessage(payload=rng.randbytes(rng.randrange(100)), producer_name="p"), offset
            ),
        )
        for offset in range(START, START + COUNT)
    )
    packer = FramePacker(block_bytes)
    data = b"".join(bytes(block) for block in packer.add(scan(frames)))
    positions = list(packer.positions)
    return data + bytes(packer.finish()), positions


def read_on(
    data: bytes, block_bytes: int, index: list[tuple[int, int]], window: int = 64
) -> list[int]:
    """The offsets that are found if reading goes on after each damage."""
    found: list[int] = []
    place: tuple[int, int] | None = (START, 0)
    for _ in range(10 * COUNT):
        if place is None:
            return found
        entries = EntryAssembler(place[0], place[1], len(data), START, block_bytes)
        for frames in entries.feed(data[place[1] :]):
            found += frames.offsets
        entries.require_end(START + COUNT)
        damage = entries.corruption
        if damage is None:
            return found
        place = next_place_in_ledger(
            (START, START + COUNT),
            len(data),
            block_bytes,
            index,
            (damage.offset, damage.position),
            lambda start, end: data[start:end],
            window,
        )
        assert place is None or place[0] > damage.offset
    raise AssertionError("the search does not end")


@pytest.mark.parametrize("block_bytes", [2048, 1 << 20])
@given(first=st.integers(0, COUNT - 1), count=st.integers(1, 20), indexed=st.booleans())
def test_nothing_is_lost_but_the_entries_that_are_overwritten(
    block_bytes: int, first: int, count: int, indexed: bool
) -> None:
    data, positions = ledger(block_bytes)
    places = [*positions, len(data)]
    end = min(first + count, COUNT)
    damaged = bytearray(data)
    damaged[places[first] : places[end]] = b"\xee" * (places[end] - places[first])
    index = [(START + at, positions[at]) for at in range(0, COUNT, 10)] if indexed else []
    found = read_on(bytes(damaged), block_bytes, index)
    whole = [START + at for at in range(COUNT) if not first <= at < end]
    assert found == whole


@given(at=st.integers(0, 5000), bit=st.integers(0, 7))
def test_a_flipped_bit_costs_one_message_at_most_and_never_a_loop(at: int, bit: int) -> None:
    data, _ = ledger(1 << 20)
    at %= len(data)
    damaged = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
    found = read_on(damaged, 1 << 20, [])
    assert found == sorted(set(found))
    lost = COUNT - len(found)
    assert lost <= 1 or at < 140
