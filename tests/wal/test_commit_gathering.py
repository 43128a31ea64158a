"""A group commit waits for producers that come back, and not for those that do not."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from forebay.limits import BATCH_MERGED_BYTES, GATHER_PASSED_MAX
from forebay.wal.commit import _Gather
from forebay.wal.memory import FrameBatch, merged


def commit(gather: _Gather, producers: int, *, back: bool) -> bool:
    """One commit for so many producers, who come `back` while it waits; returns if it waited."""
    for _ in range(producers):
        gather.arrived()
    gather.committed(producers, 0.0)
    gate = gather.begin()
    if gate is not None:
        if back:
            for _ in range(producers):
                gather.arrived()
        gather.hold(gate)
        gather.end()
        gather.left(gather.waiting)
    return gate is not None


def test_a_lone_producer_is_never_delayed() -> None:
    gather = _Gather()
    assert not any(commit(gather, 1, back=True) for _ in range(20))


def test_producers_that_come_back_are_waited_for() -> None:
    gather = _Gather()
    assert all(commit(gather, 4, back=True) for _ in range(20))


def test_producers_that_do_not_come_back_are_soon_not_waited_for() -> None:
    gather = _Gather()
    waited = [commit(gather, 4, back=False) for _ in range(10 * GATHER_PASSED_MAX)]
    assert 1 <= sum(waited) <= 12
    assert not gather.committed(4, 0.0), "the writer need not stay for them"


def test_producers_that_come_back_again_are_waited_for_again() -> None:
    gather = _Gather()
    for _ in range(20):
        commit(gather, 4, back=False)
    for _ in range(4 * GATHER_PASSED_MAX):
        commit(gather, 4, back=True)
    assert all(commit(gather, 4, back=True) for _ in range(20))


@given(
    sizes=st.lists(st.integers(1, BATCH_MERGED_BYTES // 3), max_size=30),
    bytes_max=st.integers(1, 2 * BATCH_MERGED_BYTES),
)
def test_joined_batches_are_the_same_frames(sizes: list[int], bytes_max: int) -> None:
    batches, offset = [], 7
    for number, size in enumerate(sizes):
        batches.append(FrameBatch(offset, number + 1, bytes([number]) * size))
        offset += number + 1
    joined = merged(batches, bytes_max)
    assert b"".join(each.data for each in joined) == b"".join(each.data for each in batches)
    ends = [7, *(each.end_offset for each in joined)]
    assert [each.first_offset for each in joined] == ends[:-1]
    assert ends[-1] == offset
    most = min(bytes_max, BATCH_MERGED_BYTES)
    assert all(len(each.data) <= most or each in batches for each in joined)
    pairs = pairwise(joined)
    firsts = {each.first_offset: len(each.data) for each in batches}
    assert all(len(one.data) + firsts[two.first_offset] > most for one, two in pairs)
