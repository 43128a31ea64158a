"""`spark.read.format("forebay")`, in a session that was told nothing of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from forebay.settings import MetadataSettings
from forebay.topic.store import Store
from support.scan_stores import Row, append, fill_both_tiers, rows_there, settings_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from support.etcd_server import EtcdServer
    from support.s3_server import S3Server

TOPICS = ["/default/orders", "/eu/returns", "/default/clicks-part-0", "/default/clicks-part-1"]
ALL = "orders,/eu/returns,clicks"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Four topics in both tiers, whose owner is alive; the objects of one are compressed."""
    path = tmp_path_factory.mktemp("store")
    with Store(settings_of(path)) as store:
        store.topic(TOPICS[0]).configure(compression="zstd")
        for number, topic in enumerate(TOPICS):
            fill_both_tiers(store.topic(topic), 1000 + number)
        yield path


def load(spark: SparkSession, path: Path, **options: Any) -> DataFrame:
    return spark.read.format("forebay").options(**options).load(str(path))


def rows_of(frame: DataFrame) -> list[Row]:
    """As plain values, in the order of topics and offsets."""
    found = []
    for row in frame.collect():
        values = row.asDict(recursive=True)
        for name, value in values.items():
            if isinstance(value, bytearray):
                values[name] = bytes(value)
        if "timestamp" in values:
            values["timestamp"] = values["timestamp"].astimezone(UTC)
        for header in values.get("headers") or ():
            header["value"] = bytes(header["value"])
        found.append(values)
    return sorted(found, key=lambda row: (row["topic"], row["partition"], row["offset"]))


def test_every_row_is_there_and_exact(spark: SparkSession, data: Path) -> None:
    frame = load(spark, data, subscribe=ALL, includeHeaders="true", splitBytes="300KiB")
    assert frame.rdd.getNumPartitions() > 4
    wanted = rows_there(settings_of(data), *TOPICS)
    order = ("topic", "partition", "offset")
    assert rows_of(frame) == sorted(wanted, key=lambda row: [row[name] for name in order])


def test_the_schema_is_that_of_the_kafka_source(spark: SparkSession, data: Path) -> None:
    frame = load(spark, data, subscribe="orders")
    assert frame.schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,"
        "timestamp:timestamp,timestampType:int>"
    )
    assert all(field.nullable for field in frame.schema.fields)
    headers = load(spark, data, subscribe="orders", includeHeaders="true").schema["headers"]
    assert headers.dataType.simpleString() == "array<struct<key:string,value:binary>>"


def test_columns_are_chosen_by_an_option(spark: SparkSession, data: Path) -> None:
    frame = load(spark, data, subscribe="orders", columns="offset, VALUE")
    assert frame.columns == ["offset", "value"]
    row = frame.where("offset = 1717").collect()
    assert [(each.offset, bytes(each.value)[:21]) for each in row] == [
        (1717, b"/default/orders 1717 ")
    ]


def test_the_format_works_in_sql_and_by_registration(spark: SparkSession, data: Path) -> None:
    from forebay.pipeline.source.data_source import register

    register(spark)
    spark.sql(
        f"create or replace temporary view orders using forebay "
        f"options (path '{data}', subscribe 'orders', columns 'offset')"
    )
    counted = spark.sql("select count(*) n, sum(offset) s from orders").collect()[0]
    assert (counted.n, counted.s) == (4000, sum(range(4000)))


def test_ranges_are_read_by_offsets_and_by_times(spark: SparkSession, data: Path) -> None:
    some = load(
        spark,
        data,
        subscribe="orders",
        startingOffsets='{"orders": {"0": 990}}',
        endingOffsets='{"orders": {"0": 2010}}',
    )
    assert [row["offset"] for row in rows_of(some)] == list(range(990, 2010))
    times = [row["timestamp"] for row in rows_there(settings_of(data), "orders")]
    first, last = (int(times[at].timestamp() * 1000) for at in (1500, 3500))
    found = rows_of(
        load(spark, data, subscribe="orders", startingTimestamp=first, endingTimestamp=last)
    )
    assert [row["timestamp"] for row in found] == [
        time for time in times if first <= round(time.timestamp() * 1000) < last
    ]


def test_a_dataframe_is_a_snapshot(spark: SparkSession, tmp_path: Path) -> None:
    with Store(settings_of(tmp_path)) as store:
        topic = store.topic("orders")
        append(topic, 10)
        frame = load(spark, tmp_path, subscribe="orders")
        assert frame.count() == 10
        append(topic, 5)
        assert frame.count() == 10
        assert load(spark, tmp_path, subscribe="orders").count() == 15
        topic.rotate()
        topic.upload()
        append(topic, 1)
        topic.trim_local()
        assert frame.count() == 10


def test_a_temporary_view_is_a_snapshot_until_it_is_created_again(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Spark keeps the partitions of a Python source. If this fails, change docs/guide/spark.md."""
    create = (
        "create or replace temporary view growing using forebay "
        f"options (path '{tmp_path}', subscribe 'orders')"
    )
    count = "select count(*) from growing"
    with Store(settings_of(tmp_path)) as store:
        append(store.topic("orders"), 10)
        spark.sql(create)
        assert spark.sql(count).first()[0] == 10  # type: ignore[index]
        append(store.topic("orders"), 5)
        assert spark.sql(count).first()[0] == 10  # type: ignore[index]
        spark.sql(create)
        assert spark.sql(count).first()[0] == 15  # type: ignore[index]


def test_remote_objects_and_a_remote_catalog_are_read(
    spark: SparkSession, tmp_path: Path, s3: S3Server, etcd: EtcdServer
) -> None:
    cloud = s3.settings(s3.bucket())
    metadata = MetadataSettings(backend="etcd", endpoints=(etcd.endpoint,), prefix="/scanned")
    with Store(settings_of(tmp_path, cloud=cloud, metadata=metadata)) as store:
        fill_both_tiers(store.topic("orders"), 1000)
    options = {f"store.{name}": value for name, value in cloud.options.items()}
    frame = (
        spark.read.format("forebay")
        .options(catalog=f"etcd://{etcd.endpoint}/scanned", store=cloud.root, **options)
        .options(subscribe="orders", columns="offset", splitBytes="64KiB")
        .load()
    )
    counted = frame.selectExpr("count(*) n", "sum(offset) s").collect()[0]
    assert (counted.n, counted.s) == (2000, sum(range(2000)))


def test_no_topic_at_all_is_an_empty_dataframe(spark: SparkSession, data: Path) -> None:
    assert load(spark, data, subscribePattern="nothing.*").count() == 0


def failure(frame: DataFrame) -> str:
    with pytest.raises(Exception, match="forebay") as caught:
        frame.count()
    return str(caught.value)


def test_damage_is_an_error_that_says_where(spark: SparkSession, tmp_path: Path) -> None:
    with Store(settings_of(tmp_path)) as store:
        fill_both_tiers(store.topic("orders"))
    frame = load(spark, tmp_path, subscribe="orders")
    (path,) = tmp_path.rglob("data-30-59.dnb1")
    whole = path.read_bytes()
    path.write_bytes(whole[:500] + b"?" + whole[501:])
    said = failure(frame)
    assert "CorruptFrame: storage/topics/default/orders/objects/data-30-59.dnb1" in said
    assert "at position" in said
    path.unlink()
    assert "MissingData: storage/topics/default/orders/objects/data-30-59.dnb1" in failure(frame)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "give exactly one of subscribe"),
        ({"subscribe": "nowhere"}, "there is no topic /default/nowhere"),
        ({"subscribe": "orders", "assign": "{}"}, "assign is an option of Spark's Kafka source"),
        ({"subscribe": "orders", "startingOffset": "1"}, "the nearest is 'startingOffsets'"),
    ],
)
def test_wrong_options_say_what_to_write(
    spark: SparkSession, data: Path, options: dict[str, str], said: str
) -> None:
    assert said in failure(load(spark, data, **options))


def test_another_schema_is_refused(spark: SparkSession, data: Path) -> None:
    reader = spark.read.format("forebay").options(subscribe="orders").schema("value string")
    assert "is not that of the source" in failure(reader.load(str(data)))


@pytest.mark.parametrize("module", ["pyspark_forebay", "pyspark_forebay_pulsar"])
def test_the_module_that_spark_looks_up_imports_little(module: str) -> None:
    program = f"import {module}, sys; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300
    )
    loaded = set(done.stdout.split())
    heavy = ("grpc", "obstore", "forebay.topic", "forebay.catalog", "forebay.pipeline.source.scan")
    assert [name for name in heavy if name in loaded] == []
