"""Spark over ledgers of Pulsar, beside the format `forebay` over the same messages.

The messages are single ones without compression, of one size. They are in one ledger, in blocks of
64 MiB, and in the objects of a topic. Both are files in the kernel's cache. The aggregate reads the
payload and the position of every message, and is checked.

One session with unix sockets between Python and Java, `local[2]`; everything is warm.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import forebay
from forebay.bench.history import payloads
from forebay.bench.measure import Measurement, rate_of
from forebay.format.names import ledger_name
from forebay.format.pulsar.blocks import EntryPacker
from forebay.format.pulsar.entry import MessageMetadata, encode_entry
from forebay.format.pulsar.index import LedgerIndex, encode_index
from forebay.format.pulsar.ledger_metadata import LedgerMetadata
from forebay.limits import MIB
from forebay.objects.store import connect
from forebay.pipeline.session import spark_session
from forebay.settings import CloudSettings, SparkSettings, StoreSettings, UploaderSettings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MASTER: Final = "local[2,4]"
GOAL: Final = 0.5
TOPIC: Final = "bench"
_BLOCK_BYTES: Final = 64 * MIB
_UID: Final = "00000000-0000-4000-8000-000000000001"
_APPENDED: Final = 5000


@contextmanager
def decoding(home: Path, mib: int, message_bytes: int) -> Iterator[list[Measurement]]:
    """The measurements, which need what the block has opened."""
    count = max(mib * MIB // message_bytes, 1)
    bucket, data = home / "bucket", home / "data"
    write_ledger(bucket, count, message_bytes)
    write_topic(data, count, message_bytes)
    options = {"spark.local.dir": str(home / "spark"), "spark.driver.memory": "2g"}
    spark = spark_session(SparkSettings(MASTER, options), app_name="forebay bench")
    try:
        ours = partial(_rate, _ledger(spark, bucket), "__entryId", count, message_bytes)
        limit = partial(_rate, _topic(spark, data), "offset", count, message_bytes)
        for warm_up in (ours, limit):
            warm_up(home)
        name = "spark.read of a ledger"
        yield [
            Measurement(
                name, message_bytes, "MiB/s", ours, "the format forebay in the same session",
                limit, GOAL,
            )
        ]  # fmt: skip
    finally:
        spark.stop()


def write_ledger(bucket: Path, count: int, message_bytes: int) -> None:
    """Writes a ledger of `count` messages, as an offload does."""
    bucket.mkdir(parents=True)
    entries = [
        encode_entry(MessageMetadata("bench", number, 1_700_000_000_000), payload)
        for number, payload in enumerate(payloads(message_bytes))
    ]
    packer = EntryPacker(_BLOCK_BYTES)
    name = ledger_name(_UID, 1)
    with closing(connect(CloudSettings(backend="fs", root=str(bucket)))) as store:
        with store.open_streaming_writer(
            name.data_name, chunk_bytes=_BLOCK_BYTES, concurrent_parts=1
        ) as writer:
            for number in range(count):
                entry = entries[number % len(entries)]
                if not packer.fits(len(entry)):
                    writer.write(packer.cut())
                packer.add(entry)
            writer.write(packer.finish())
        metadata = LedgerMetadata(packer.entry_bytes, count - 1)
        index = LedgerIndex(packer.position, metadata, tuple(packer.blocks))
        store.put_object(name.index_name, encode_index(index))


def write_topic(data: Path, count: int, message_bytes: int) -> None:
    """Writes a topic of `count` messages, all of them in objects."""
    values = payloads(message_bytes)
    settings = StoreSettings(data=data, uploader=UploaderSettings(enabled=False))
    with forebay.open(settings) as store:
        topic = store.topic(TOPIC)
        for first in range(0, count, _APPENDED):
            some = range(first, min(first + _APPENDED, count))
            topic.append_many([values[at % len(values)] for at in some])
        topic.flush()
        while topic.watermarks().uploaded < count:
            topic.upload()


def _ledger(spark: SparkSession, bucket: Path) -> DataFrame:
    reader = spark.read.format("pulsar-offload").option("columns", "value,__entryId")
    return reader.load(str(bucket))


def _topic(spark: SparkSession, data: Path) -> DataFrame:
    reader = spark.read.format("forebay").option("columns", "value,offset")
    return reader.option("subscribe", TOPIC).load(str(data))


def _rate(frame: DataFrame, position: str, count: int, message_bytes: int, _path: Path) -> float:
    """MiB of payloads a second through the aggregate."""

    def work() -> None:
        query = frame.selectExpr("count(*) n", "sum(length(value)) b", f"sum({position}) o")
        found = query.first()
        assert found is not None
        assert (found["n"], found["b"]) == (count, count * message_bytes)
        assert found["o"] == count * (count - 1) // 2

    return rate_of(count * message_bytes / MIB, work)
