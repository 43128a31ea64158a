"""Batches from an event loop: whole and in order, and the loop never waits for a disk."""

from __future__ import annotations

import asyncio

import pytest

from forebay.errors import LogClosed, MessageTooLarge, UsageError
from forebay.limits import MESSAGE_BYTES_MAX
from support.disks import (
    gated_directory,
    in_memory,
    payloads,
    texts,
    until,
    waiting,
    waiting_for_room,
)


async def test_a_batch_gets_consecutive_offsets_and_is_synced_when_asked() -> None:
    directory = in_memory()
    wal = directory.open()
    assert await wal.append_many_async(texts(0, 3)) == range(3)
    assert wal.watermarks().synced == 0
    offsets = await wal.append_many_async(
        texts(3, 5), [{"a": "1"}, None], [None, "key"], durability="synced"
    )
    assert offsets == range(3, 5)
    assert wal.watermarks().synced == 5
    assert await wal.append_many_async([], durability="synced") == range(5, 5)
    assert payloads(wal) == texts(0, 5)
    directory.close()


async def test_a_batch_names_its_producer_and_numbers_its_messages() -> None:
    directory = in_memory()
    wal = directory.open(queue_max_bytes=1024)
    producer = wal.producer(2**63 + 7, "meter")
    await wal.append_many_async(texts(0, 40, size=100), producer=producer, first_request_id=5)
    await wal.append_many_async(texts(40, 42), producer=producer)
    wal.flush()
    found = list(wal.tail_reader(0, end=42))
    assert {(each.msg_id.producer_id, each.producer_name) for each in found} == {
        (2**63 + 7, "meter")
    }
    assert [each.request_id for each in found] == [*range(5, 45), 0, 0]
    directory.close()


async def test_a_full_queue_holds_a_batch_back_and_not_the_loop() -> None:
    directory = gated_directory()
    wal = directory.open(queue_max_bytes=4096)
    directory.gate.shut()
    first = asyncio.create_task(wal.append_many_async(texts(0, 40, size=100), durability="synced"))
    rest = [asyncio.create_task(wal.append_many_async(texts(0, 2))) for _ in range(3)]
    await until(lambda: waiting_for_room(wal) > 0)  # the loop runs while the disk is stuck
    assert not first.done()
    directory.gate.open()
    offsets = [await first, *[await each for each in rest]]
    assert sorted(number for each in offsets for number in each) == list(range(46))
    wal.flush()
    assert len(payloads(wal)) == 46
    directory.close()


async def test_a_batch_larger_than_the_queue_is_taken_in_pieces() -> None:
    directory = in_memory()
    wal = directory.open(queue_max_bytes=1024)
    assert await wal.append_many_async(texts(0, 200, size=100), durability="synced") == range(200)
    assert payloads(wal) == texts(0, 200, size=100)
    directory.close()


async def test_a_batch_that_cannot_be_leaves_nothing() -> None:
    directory = in_memory()
    wal = directory.open()
    with pytest.raises(MessageTooLarge):
        await wal.append_many_async([b"small", bytes(MESSAGE_BYTES_MAX)])
    with pytest.raises(UsageError, match="2 payloads, but 1 attributes"):
        await wal.append_many_async([b"a", b"b"], [None])
    with pytest.raises(UsageError, match="durability is 'uploaded'"):
        await wal.append_many_async([b"a"], durability="uploaded")  # type: ignore[arg-type]
    assert wal.current_offset() == 0
    wal.shutdown()
    with pytest.raises(LogClosed):
        await wal.append_many_async([b"a"])
    directory.close()


async def test_pieces_of_frames_are_read_to_the_live_end() -> None:
    directory = in_memory()
    wal = directory.open()
    wal.append_many(texts(0, 10), durability="synced")
    reader = wal.async_reader(2)
    frames = await reader.next_frames()
    assert frames is not None
    assert list(frames.offsets) == list(range(2, 10))
    assert reader.position == 10
    next_piece = asyncio.create_task(reader.next_frames())
    await until(lambda: waiting(wal) == 1)
    assert not next_piece.done()
    wal.append(b"new")
    found = await next_piece
    assert found is not None
    assert list(found.offsets) == [10]
    ended = asyncio.create_task(reader.next_frames())
    await until(lambda: waiting(wal) == 1)
    reader.close()
    assert await ended is None
    assert await reader.next_frames() is None
    directory.close()
