"""Ledgers of Pulsar on a real S3 server: offloaded on Spark, and read back equal by everybody.

The messages are of very different sizes, with and without attributes and keys. The local log is
gone before anything is read. The soak has fifty ledgers of 64 MiB.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final
from zlib import crc32

import pytest

from forebay.format.message import StreamMessage
from forebay.limits import KIB, MIB
from forebay.pipeline import offload, verify
from forebay.pulsar.managed_ledger import managed_ledger
from forebay.settings import MetadataSettings, StoreSettings, UploaderSettings, WalSettings
from forebay.topic.store import Store, Topic
from support.s3_server import S3Server
from support.storages import storage_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

NAME: Final = "/default/mixed"


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
        read = [told(message) for message in topic.read(0, end=len(sums))]
        assert [crc32(payload) for _, payload, _, _ in read] == sums
        assert [offset for offset, _, _, _ in read] == list(range(len(sums)))
        expected = messages(1, ledgers * ledger_bytes)
        for (_, payload, attributes, key), wanted in zip(read, expected, strict=True):
            assert (payload, attributes, key) == wanted
        middle = len(sums) // 2
        assert next(iter(topic.read(middle))).offset == middle
    rows = scanned(spark, settings).selectExpr("offset", "crc32(value) c").collect()
    assert sorted((row["offset"], row["c"]) for row in rows) == list(enumerate(sums))
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
