"""Idempotent producers: nothing twice and nothing left out, over restarts, crashes and restores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from forebay.catalog.catalog import Catalog, Change
from forebay.catalog.job_state import (
    ANYTHING,
    read_job_state,
    remove_job_state,
    write_job_state,
)
from forebay.catalog.records import TopicRecord
from forebay.errors import OutOfSequence, TooManyProducers, TopicFenced, UsageError
from forebay.format.names import parse_topic
from forebay.format.producers import ProducersRow, decode_producers_row, idempotent_id
from forebay.limits import IDEMPOTENT_PRODUCERS_MAX, PRODUCERS_ROW_MESSAGES
from forebay.settings import StoreSettings, UploaderSettings
from forebay.topic.factory import WalStorageFactory
from forebay.topic.producers import ROW_NAME, IdempotentProducer
from forebay.topic.storage import StartPosition, WalStorage
from support.disks import wait_until

TOPIC = parse_topic("orders")


def settings_of(tmp_path: Path) -> StoreSettings:
    return StoreSettings(data=tmp_path / "data", uploader=UploaderSettings(enabled=False))


def opened(tmp_path: Path) -> tuple[WalStorageFactory, WalStorage]:
    factory = WalStorageFactory(settings_of(tmp_path))
    return factory, factory.for_topic("orders")


def catalog_of(factory: WalStorageFactory) -> Catalog:
    assert factory.resources is not None
    return factory.resources.catalog


def row_of(factory: WalStorageFactory) -> ProducersRow | None:
    value = read_job_state(catalog_of(factory), TOPIC, ROW_NAME)
    return None if value is None else decode_producers_row(value, "row")


def numbers(storage: WalStorage) -> list[int]:
    end = storage.wal.current_offset()
    reader = storage.create_reader(StartPosition.offset(storage.start_known), end=end)
    return [each.request_id for each in reader]


def crash(factory: WalStorageFactory, storage: WalStorage) -> None:
    """Everything is synced, and nothing more is written: neither the row nor a release."""
    storage.wal.flush()
    storage.wal.fence(TopicFenced("crashed"))
    factory.close()


async def send(producer: IdempotentProducer, first: int, count: int) -> range:
    sent = await producer.append(first, [b"%d" % (first + index) for index in range(count)])
    return sent.offsets


async def test_a_repeated_batch_is_appended_once_and_has_its_first_offsets(tmp_path: Path) -> None:
    factory, storage = opened(tmp_path)
    producer = storage.producers.connect("meter")
    assert producer.last_sequence == 0
    assert await send(producer, 1, 3) == range(3)
    storage.wal.append(b"another producer's")
    assert await send(producer, 4, 2) == range(4, 6)
    assert await send(producer, 1, 3) == range(3)
    assert await send(producer, 4, 2) == range(4, 6)
    assert producer.last_sequence == 5
    assert await send(producer, 5, 3) == range(5, 8), "one known, two new, next to each other"
    storage.wal.flush()
    assert numbers(storage) == [1, 2, 3, 0, 4, 5, 6, 7]
    factory.close()


async def test_a_batch_whose_parts_are_apart_has_the_offsets_of_its_new_part(
    tmp_path: Path,
) -> None:
    factory, storage = opened(tmp_path)
    producer = storage.producers.connect("meter")
    await send(producer, 1, 2)
    storage.wal.append(b"another producer's")
    sent = await producer.append(2, [b"2", b"3"])
    assert sent.offsets == range(3, 4)
    assert sent.end == 4
    factory.close()


async def test_a_gap_is_refused_with_the_number_that_is_expected(tmp_path: Path) -> None:
    factory, storage = opened(tmp_path)
    producer = storage.producers.connect("meter")
    with pytest.raises(OutOfSequence, match="must have the number 1, not 2") as caught:
        await send(producer, 2, 1)
    assert caught.value.expected == 1
    await send(producer, 1, 5)
    with pytest.raises(OutOfSequence) as caught:
        await send(producer, 7, 1)
    assert caught.value.expected == 6
    for wrong in (0, 2**63 - 2):
        with pytest.raises(UsageError, match=r"is not in 1\.\."):
            await send(producer, wrong, 3)
    assert storage.wal.current_offset() == 5
    factory.close()


async def test_numbers_survive_a_restart_without_reading_the_log(tmp_path: Path) -> None:
    factory, storage = opened(tmp_path)
    producer = storage.producers.connect("meter")
    await send(producer, 1, 3)
    producer.disconnect()
    factory.close()
    factory, storage = opened(tmp_path)
    row = row_of(factory)
    assert row is not None
    assert row.complete
    assert row.producers == ((idempotent_id("/default/orders", "meter"), 3, 2),)
    producer = storage.producers.connect("meter")
    assert producer.last_sequence == 3
    assert await send(producer, 2, 3) == range(3, 4)
    factory.close()


async def test_numbers_are_read_from_the_log_after_a_crash(tmp_path: Path) -> None:
    factory, storage = opened(tmp_path)
    meter, scale = storage.producers.connect("meter"), storage.producers.connect("scale")
    await send(meter, 1, 3)
    await send(scale, 1, 2)
    await send(meter, 4, 2)
    crash(factory, storage)
    factory, storage = opened(tmp_path)
    row = row_of(factory)
    assert row is not None
    assert (row.complete, row.offset, row.producers) == (False, 0, ())
    storage.wal.append(b"another producer's")
    meter = storage.producers.connect("meter")
    assert meter.last_sequence == 5
    assert storage.producers.connect("scale").last_sequence == 2
    assert await send(meter, 4, 2) == range(5, 7), "the last run is known from the log"
    assert await send(meter, 5, 2) == range(8, 9)
    factory.close()


async def test_a_crash_after_a_complete_row_reads_only_what_came_after(tmp_path: Path) -> None:
    factory, storage = opened(tmp_path)
    producer = storage.producers.connect("meter")
    await send(producer, 1, 3)
    producer.disconnect()
    storage.producers.flush()
    row = row_of(factory)
    assert row is not None
    assert row.complete
    storage.wal.append_many([b"another producer's"] * 10)
    producer = storage.producers.connect("meter")
    await send(producer, 4, 1)
    row = row_of(factory)
    assert row is not None
    assert (row.complete, row.offset) == (False, 13)
    crash(factory, storage)
    factory, storage = opened(tmp_path)
    assert storage.producers.connect("meter").last_sequence == 4
    factory.close()


async def test_the_row_is_written_in_the_background(tmp_path: Path) -> None:
    factory, storage = opened(tmp_path)
    producer = storage.producers.connect("meter")
    await producer.append(1, [b"m"] * PRODUCERS_ROW_MESSAGES)
    await producer.append(PRODUCERS_ROW_MESSAGES + 1, [b"m"])
    wait_until(lambda: (row_of(factory) or ProducersRow(0)).offset > PRODUCERS_ROW_MESSAGES)
    producer.disconnect()
    wait_until(lambda: (row_of(factory) or ProducersRow(0)).complete)
    factory.close()


async def test_messages_in_objects_count_too(tmp_path: Path) -> None:
    factory, storage = opened(tmp_path)
    producer = storage.producers.connect("meter")
    await send(producer, 1, 5)
    storage.upload()
    remove_job_state(catalog_of(factory), TOPIC, ROW_NAME)
    remove_job_state(catalog_of(factory), TOPIC, "began")  # as after a restore without a catalog
    crash(factory, storage)
    factory, storage = opened(tmp_path)
    assert storage.producers.connect("meter").last_sequence == 5
    factory.close()


async def test_a_row_that_is_older_than_a_restore_is_only_a_start(tmp_path: Path) -> None:
    factory, storage = opened(tmp_path)
    producer = storage.producers.connect("meter")
    await send(producer, 1, 2)
    producer.disconnect()
    storage.producers.flush()
    older = read_job_state(catalog_of(factory), TOPIC, ROW_NAME)
    assert older is not None
    producer = storage.producers.connect("meter")
    await send(producer, 3, 2)
    crash(factory, storage)
    factory, storage = opened(tmp_path)
    catalog = catalog_of(factory)
    write_job_state(catalog, TOPIC, ROW_NAME, older, expected=ANYTHING)
    write_job_state(catalog, TOPIC, "began", b"restore 0123456789abcdef", expected=ANYTHING)
    assert storage.producers.connect("meter").last_sequence == 4
    factory.close()


async def test_a_name_is_connected_once(tmp_path: Path) -> None:
    factory, storage = opened(tmp_path)
    producer = storage.producers.connect("meter")
    with pytest.raises(UsageError, match="connected already"):
        storage.producers.connect("meter")
    producer.disconnect()
    storage.producers.connect("meter")
    for name in ("", "x" * 257):
        with pytest.raises(UsageError, match="1 to 256 bytes"):
            storage.producers.connect(name)
    factory.close()


async def test_those_unused_longest_are_forgotten_and_connected_ones_are_not(
    tmp_path: Path,
) -> None:
    factory, storage = opened(tmp_path)
    first = storage.producers.connect("first")
    await send(first, 1, 1)
    for number in range(IDEMPOTENT_PRODUCERS_MAX):
        producer = storage.producers.connect(f"p{number}")
        await send(producer, 1, 1)
        producer.disconnect()
    assert first.last_sequence == 1
    assert storage.producers.connect("p0").last_sequence == 0
    assert storage.producers.connect("p1").last_sequence == 1
    for number in range(2, IDEMPOTENT_PRODUCERS_MAX - 1):
        storage.producers.connect(f"p{number}")
    with pytest.raises(TooManyProducers, match="close some"):
        storage.producers.connect("one too many")
    factory.close()


async def test_the_row_of_as_many_producers_as_there_can_be_is_stored(tmp_path: Path) -> None:
    factory, storage = opened(tmp_path)
    for number in range(IDEMPOTENT_PRODUCERS_MAX + 5):
        producer = storage.producers.connect(f"p{number}")
        await send(producer, 1, 1)
        producer.disconnect()
    storage.producers.flush()
    row = row_of(factory)
    assert row is not None
    assert len(row.producers) == IDEMPOTENT_PRODUCERS_MAX
    factory.close()


async def test_a_fenced_owner_writes_no_row(tmp_path: Path) -> None:
    factory, storage = opened(tmp_path)
    producer = storage.producers.connect("meter")
    await send(producer, 1, 1)
    storage.wal.flush()

    def take_over(record: TopicRecord) -> Change:
        return Change(replace(record, epoch=record.epoch + 1))

    catalog_of(factory).update(TOPIC, None, take_over)
    producer.disconnect()
    with pytest.raises(TopicFenced):
        storage.producers.flush()
    row = row_of(factory)
    assert row is not None
    assert not row.complete
    factory.close()


async def test_a_failed_append_makes_the_next_connection_read_the_log(tmp_path: Path) -> None:
    factory, storage = opened(tmp_path)
    producer = storage.producers.connect("meter")
    await send(producer, 1, 2)
    with pytest.raises(TypeError):
        await producer.append(3, [b"a", None])  # type: ignore[list-item]
    with pytest.raises(TopicFenced, match="connect again"):
        await send(producer, 3, 1)
    producer.disconnect()
    producer = storage.producers.connect("meter")
    assert producer.last_sequence == 2
    await send(producer, 3, 1)
    factory.close()


async def test_a_store_in_memory_knows_its_producers(tmp_path: Path) -> None:
    factory = WalStorageFactory(StoreSettings(None))
    storage = factory.for_topic("orders")
    storage.wal.append(b"before")
    producer = storage.producers.connect("meter")
    await send(producer, 1, 2)
    producer.disconnect()
    producer = storage.producers.connect("meter")
    assert await send(producer, 1, 3) == range(1, 4)
    factory.close()
