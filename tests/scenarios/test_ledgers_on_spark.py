"""Ledgers of Pulsar on a real S3 server: offloaded on Spark, and read back equal by everybody.

The messages are of very different sizes, with and without attributes and keys. The local log is
gone before anything is read. The soak has fifty ledgers of 64 MiB.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final
from zlib import crc32

import pytest

from forebay.format.message import StreamMessage
from forebay.format.names import objects_prefix, parse_topic
from forebay.format.pulsar.entry import decode_entry
from forebay.limits import KIB, MIB
from forebay.objects.store import connect
from forebay.pipeline import offload, verify
from forebay.pulsar.managed_ledger import Ledger, managed_ledger
from forebay.pulsar.offloader import LedgerOffloader
from forebay.settings import MetadataSettings, StoreSettings, UploaderSettings, WalSettings
from forebay.topic.store import Store, Topic
from support.s3_server import S3Server
from support.storages import storage_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

NAME: Final = "/default/mixed"
PULSAR_NAME: Final = "persistent://public/default/mixed"


def settings_of(folder: Path, s3: S3Server, ledger_bytes: int) -> StoreSettings:
    return StoreSettings(
        data=folder / "data",
        wal=WalSettings(rotate_max_bytes=ledger_bytes // 2),
        uploader=UploaderSettings(
            enabled=False,
            format="pulsar",
            ledger_block_bytes=1 * MIB,
            max_object_bytes=ledger_bytes + 300 * KIB,
            stream_chunk_size=5 * MIB,
        ),
        cloud=s3.settings(s3.bucket()),
        metadata=MetadataSettings(path=folder / "catalog.db"),
    )


def messages(seed: int, total_bytes: int) -> Iterator[tuple[bytes, dict[str, str], str | None]]:
    """Empty ones, small ones, some of 200 KiB; with attributes, with keys, with neither."""
    rng = random.Random(seed)
    sizes = [0, 1, 30, 1000, 1024, 4000, 20_000, 200_000]
    left = total_bytes
    while left > 0:
        size = rng.choice(sizes)
        attributes = {f"k{number}": "é" * rng.randrange(20) for number in range(rng.randrange(4))}
        key = rng.choice([None, "", "key", "ключ"])
        yield rng.randbytes(size), attributes, key
        left -= size + 100


def fill(topic: Topic, total_bytes: int) -> list[int]:
    """Appends so many bytes; returns the checksums of the payloads."""
    found = []
    for payload, attributes, key in messages(1, total_bytes):
        topic.append(payload, attributes=attributes, routing_key=key)
        found.append(crc32(payload))
    topic.flush()
    return found


def told(message: StreamMessage) -> tuple[int, bytes, dict[str, str], str | None]:
    return message.offset, message.payload, dict(message.attributes), message.routing_key


def scanned(spark: SparkSession, settings: StoreSettings) -> DataFrame:
    options = {f"store.{name}": value for name, value in settings.cloud.options.items()}
    return (
        spark.read.format("forebay")
        .options(catalog=f"sqlite:{settings.metadata.path}", store=settings.cloud.root, **options)
        .options(subscribe=NAME, splitBytes="4MiB")
        .load()
    )


def sums_of_handles(settings: StoreSettings, ledgers: list[Ledger]) -> list[int]:
    """The checksums of all payloads, as readers of the single ledgers get them."""
    found = []
    store = connect(settings.cloud)
    try:
        offloader = LedgerOffloader(store, prefix=objects_prefix(parse_topic(NAME)))
        for each in ledgers:
            assert each.context is not None
            with closing(offloader.read_offloaded(each.ledger_id, each.context.uid)) as handle:
                entries = handle.read(0, handle.last_add_confirmed)
                found += [crc32(decode_entry(entry.data).payload) for entry in entries]
    finally:
        store.close()
    return found


def messages_of_spark(spark: SparkSession, settings: StoreSettings) -> list[tuple[object, ...]]:
    """What Spark finds in the bucket alone, without the catalog."""
    options = {f"store.{name}": value for name, value in settings.cloud.options.items()}
    table = spark.read.format("pulsar-offload").options(**options).load(settings.cloud.root)
    columns = ("crc32(value) c", "size(__messageProperties) p", "cast(__key as string) k")
    rows = table.selectExpr("__ledgerId", "__entryId", "__kind", "__topic", *columns).collect()
    assert {(row["__kind"], row["__topic"]) for row in rows} == {("message", PULSAR_NAME)}
    rows.sort(key=lambda row: (row["__ledgerId"], row["__entryId"]))
    return [(row["c"], row["p"], row["k"]) for row in rows]


def told_again(total_bytes: int) -> list[tuple[object, ...]]:
    return [
        (crc32(payload), len(attributes), key)
        for payload, attributes, key in messages(1, total_bytes)
    ]


def offload_and_read_back(
    spark: SparkSession, settings: StoreSettings, ledgers: int, ledger_bytes: int
) -> None:
    with Store(settings) as store:
        topic = store.topic(NAME)
        sums = fill(topic, ledgers * ledger_bytes)
        topic.rotate()
    report = offload(settings, spark=spark)
    assert report.ok, report.rows
    assert report.messages == len(sums)
    assert isinstance(settings.data, Path)
    shutil.rmtree(settings.data / "wal")
    with Store(settings) as store:
        topic = store.topic(NAME)
        closed = [each for each in managed_ledger(storage_of(topic)).ledgers() if each.offloaded]
        assert len(closed) >= ledgers
        expected = messages(1, ledgers * ledger_bytes)
        for offset, message in enumerate(topic.read(0, end=len(sums))):
            payload, attributes, key = next(expected)
            assert told(message) == (offset, payload, attributes, key)
        assert offset == len(sums) - 1
        middle = len(sums) // 2
        assert next(iter(topic.read(middle))).offset == middle
        assert sums_of_handles(settings, closed) == sums
    rows = scanned(spark, settings).selectExpr("offset", "crc32(value) c").collect()
    assert sorted((row["offset"], row["c"]) for row in rows) == list(enumerate(sums))
    assert messages_of_spark(spark, settings) == told_again(ledgers * ledger_bytes)
    checked = verify(settings, spark=spark)
    assert checked.ok


def test_ten_ledgers_are_offloaded_on_spark_and_read_back_equal(
    spark: SparkSession, s3: S3Server, tmp_path: Path
) -> None:
    settings = settings_of(tmp_path, s3, 8 * MIB)
    offload_and_read_back(spark, settings, 10, 8 * MIB)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_fifty_large_ledgers_are_offloaded_on_spark_and_read_back_equal(
    spark: SparkSession, s3: S3Server, tmp_path: Path
) -> None:
    settings = settings_of(tmp_path, s3, 64 * MIB)
    large = replace(settings.uploader, ledger_block_bytes=16 * MIB)
    offload_and_read_back(spark, replace(settings, uploader=large), 50, 64 * MIB)
