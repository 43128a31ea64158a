"""The writer of compressed objects: blocks in order, in bounded memory, on several threads."""

from __future__ import annotations

import threading
from random import Random

import pytest

from forebay import processors
from forebay.format.blocks import BlockAssembler
from forebay.format.frame import encode_frame, scan
from forebay.format.index import ObjectIndex
from forebay.format.layout import Buffer
from forebay.limits import BLOCK_BYTES
from forebay.processors import Ahead
from forebay.upload.compression import IN_FLIGHT_BYTES, BlockWriter

PATIENCE = 60.0


class Written:
    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: Buffer) -> None:
        self.data += data


def frames(count: int, size: int, first: int = 0) -> bytes:
    source = Random(count)
    return b"".join(
        encode_frame(first + at, source.randbytes(size // 2) + bytes(size - size // 2))
        for at in range(count)
    )


def decoded(data: bytes) -> bytes:
    blocks = BlockAssembler(0, 0, len(data))
    found = b"".join(bytes(each.raw) for each in blocks.feed(data))
    assert blocks.corruption is None
    return found


def test_blocks_are_written_in_order_with_their_positions() -> None:
    data = frames(300, 50_000)
    target, index = Written(), ObjectIndex()
    writer = BlockWriter(target, index, 1)
    whole = scan(data)
    for start in range(0, 300, 7):
        writer.add(whole.part(start, min(start + 7, 300)))
    writer.flush()
    assert decoded(bytes(target.data)) == data
    assert writer.stored == len(target.data)
    blocks = BlockAssembler(0, 0, len(target.data))
    starts = [(each.offsets[0], blocks.block_position) for each in blocks.feed(target.data)]
    assert len(starts) == -(-300 // (BLOCK_BYTES // 50_016))
    assert index.entries == starts


def test_the_blocks_in_flight_are_bounded_while_all_threads_are_busy() -> None:
    gate = threading.Event()
    busy = [Ahead(lambda: gate.wait(PATIENCE)) for _ in range(8)]
    target = Written()
    writer = BlockWriter(target, ObjectIndex(), 1)
    try:
        data = frames(20, BLOCK_BYTES // 2)
        writer.add(scan(data))  # does what does not fit on this thread
        assert len(target.data) > 0
        assert writer.in_flight <= IN_FLIGHT_BYTES
        writer.flush()
        assert decoded(bytes(target.data)) == data
    finally:
        gate.set()
        assert all(each.result() for each in busy)


def test_after_a_drain_only_an_incomplete_block_is_in_memory() -> None:
    target = Written()
    writer = BlockWriter(target, ObjectIndex(), 1)
    writer.add(scan(frames(5, BLOCK_BYTES // 2)))
    writer.drain()
    assert writer.in_flight == 0
    assert len(decoded(bytes(target.data))) > 3 * (BLOCK_BYTES // 2)


def test_work_that_no_thread_takes_is_done_by_who_needs_it() -> None:
    gate = threading.Event()
    busy = [Ahead(lambda: gate.wait(PATIENCE)) for _ in range(processors.THREADS_MAX)]
    here: list[str] = []
    work = Ahead(lambda: here.append(threading.current_thread().name))
    work.result()
    assert here == [threading.current_thread().name]
    gate.set()
    assert all(each.result() for each in busy)


def test_the_error_of_work_is_raised_where_its_result_is_wanted() -> None:
    def fail() -> None:
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        Ahead(fail).result()


def test_an_index_entry_is_not_finer_than_a_block_and_not_coarser_than_its_interval() -> None:
    index = ObjectIndex()
    for number in range(10):
        index.add_block(number * 100, 100, 200_000, number * 60_000)
    # Five blocks of 200,000 bytes fit into 1 MiB.
    assert index.entries == [(0, 0), (500, 300_000)]
    fine = ObjectIndex()
    for number in range(4):
        fine.add_block(number * 2000, 2000, 10_000, number * 900)
    assert [offset for offset, _ in fine.entries] == [0, 2000, 4000, 6000]
