"""`spark.read.format("pulsar-offload")`, in a session that was told nothing of it."""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from forebay.objects.store import connect
from forebay.pipeline.pulsar.options import COLUMNS, MORE_COLUMNS
from support import pulsar_entries as pulsar
from support.ledgers import REAL_DATA, REAL_INDEX
from support.pulsar_buckets import TOPIC, at, put_ledger

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from support.s3_server import S3Server

MESSAGES = 300


def load(spark: SparkSession, path: Path | str, **options: Any) -> DataFrame:
    return spark.read.format("pulsar-offload").options(**options).load(str(path))


def every_kind() -> list[bytes]:
    """Entries of every kind: MESSAGES and 8 more rows."""
    plain = [
        pulsar.entry(
            b"%d" % number,
            key=f"k{number}",
            properties=(("n", str(number)), ("m", "x")),
            event_time=1000 + number,
            sequence_id=number,
            index=500 + number,
            schema_version=(3).to_bytes(8, "big"),
        )
        for number in range(MESSAGES)
    ]
    batch = [pulsar.single(b"b0", key="b"), pulsar.single(b"b1", properties=[("p", "q")])]
    return [
        *plain,
        pulsar.batch(batch, "LZ4"),
        *pulsar.chunks(b"chunked" * 300, 700, "p-1", "ZSTD"),
        pulsar.encrypted(b"secret"),
        pulsar.marker(),
        pulsar.entry(b"sent", txn_least_bits=1),
        pulsar.entry(b"", null_value=True),
        pulsar.entry(b"snappy", compression="SNAPPY"),
    ]


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bucket")
    with closing(at(path)) as store:
        put_ledger(store, 4, every_kind(), folder="cluster/", block_bytes=8192)
        uid = "0d5b7ca9-0000-4000-8000-000000000001"
        store.put_object(f"{uid}-ledger-1", REAL_DATA)
        store.put_object(f"{uid}-ledger-1-index", REAL_INDEX)
    return path


def test_the_format_is_found_by_name_and_reads_every_kind(
    spark: SparkSession, bucket: Path
) -> None:
    names = ",".join((*COLUMNS, *MORE_COLUMNS))
    frame = load(spark, bucket, subscribe="orders", columns=names, splitBytes="64KiB")
    rows = sorted(frame.collect(), key=lambda row: (row["__entryId"], row["__batchIndex"]))
    assert len(rows) == MESSAGES + 8
    row = rows[7].asDict()
    assert row == {
        "value": b"7",
        "__key": b"k7",
        "__topic": TOPIC,
        "__messageId": bytes([8, 4, 16, 7]),
        "__publishTime": row["__publishTime"],
        "__eventTime": row["__eventTime"],
        "__messageProperties": {"n": "7", "m": "x"},
        "__ledgerId": 4,
        "__entryId": 7,
        "__batchIndex": -1,
        "__partition": -1,
        "__kind": "message",
        "__sequenceId": 7,
        "__producerName": pulsar.PRODUCER,
        "__schemaVersion": 3,
        "__orderingKey": None,
        "__index": 507,
    }
    published = datetime.fromtimestamp(pulsar.TIME / 1000, UTC)
    assert row["__publishTime"].astimezone(UTC) == published
    last = [(each["__kind"], each["value"], each["__batchIndex"]) for each in rows[MESSAGES:]]
    assert last == [
        ("message", b"b0", 0),
        ("message", b"b1", 1),
        ("message", b"chunked" * 300, -1),
        ("encrypted", b"secret", -1),
        ("marker", b"", -1),
        ("transactional", b"sent", -1),
        ("message", None, -1),
        ("message", b"snappy", -1),
    ]
    assert rows[MESSAGES + 1]["__messageProperties"] == {"p": "q"}
    assert rows[MESSAGES + 1]["__messageId"] == bytes([8, 4, 16, 0xAC, 2, 32, 1, 48, 2])


def test_the_schema_begins_as_that_of_the_pulsar_connector(
    spark: SparkSession, bucket: Path
) -> None:
    frame = load(spark, bucket)
    assert frame.schema.simpleString() == (
        "struct<value:binary,__key:binary,__topic:string,__messageId:binary,"
        "__publishTime:timestamp,__eventTime:timestamp,__messageProperties:map<string,string>,"
        "__ledgerId:bigint,__entryId:bigint,__batchIndex:int,__partition:int,__kind:string>"
    )
    counted = {row["__kind"]: row["count"] for row in frame.groupBy("__kind").count().collect()}
    assert counted == {
        "message": MESSAGES + 6,
        "encrypted": 1,
        "marker": 1,
        "transactional": 1,
    }


def test_the_format_works_in_sql_and_by_registration(spark: SparkSession, bucket: Path) -> None:
    from forebay.pipeline import register

    register(spark)
    spark.sql(
        f"create or replace temporary view ledgers using `pulsar-offload` "
        f"options (path '{bucket}', columns 'value', subscribe 'read-test')"
    )
    [row] = spark.sql("select cast(value as string) v from ledgers").collect()
    assert row["v"] == "hello-reader-1"


def test_errors_and_unknown_options_reach_the_user(spark: SparkSession, bucket: Path) -> None:
    with pytest.raises(Exception, match="there is no option 'subscribed'; the nearest"):
        load(spark, bucket, subscribed="orders").count()
    with pytest.raises(Exception, match="no ledger of the topic order; the nearest is orders"):
        load(spark, bucket, subscribe="order").count()
    assert load(spark, bucket, subscribePattern="nothing").count() == 0


def test_a_bucket_of_a_real_s3_server_is_read(spark: SparkSession, s3: S3Server) -> None:
    cloud = s3.settings(s3.bucket())
    with closing(connect(cloud)) as store:
        for number in range(20):
            put_ledger(store, number, every_kind(), folder=f"{number % 3}/", block_bytes=65536)
        large = [pulsar.entry(bytes([number]) * 300_000) for number in range(60)]
        put_ledger(store, 99, large, block_bytes=5 * 2**20)
    options = {f"store.{name}": value for name, value in cloud.options.items()}
    frame = load(spark, str(cloud.root), **options, columns="value,__ledgerId,__kind")
    found = frame.selectExpr("count(*) n", "sum(length(value)) b").collect()[0]
    assert found.n == 20 * (MESSAGES + 8) + 60
    assert frame.where("__ledgerId = 99").selectExpr("sum(length(value)) b").collect()[0].b == (
        60 * 300_000
    )
