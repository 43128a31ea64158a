"""`df.write.format("forebay")` and `writeStream`: each row once, or nothing at all."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import forebay
from forebay.errors import TopicOwned, UsageError
from forebay.format.message import StreamMessage
from forebay.format.names import parse_topic
from forebay.pipeline.sink.commit import MARK
from forebay.pipeline.sink.owner import LocalTopicWriter
from forebay.pipeline.sink.writer import sink_options
from forebay.settings import StoreSettings

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

TOPIC = "/default/orders"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


def messages(data: Path, topic: str = TOPIC) -> list[StreamMessage]:
    with forebay.open(data) as store:
        return list(store.topic(topic).read())


def values(data: Path, topic: str = TOPIC) -> list[str]:
    return [message.payload.decode() for message in messages(data, topic)]


def staged(data: Path) -> list[Path]:
    return [path for path in (data / "objects").rglob("*") if path.suffix in (".frames", ".json")]


def numbers(spark: SparkSession, count: int, partitions: int = 3) -> DataFrame:
    return spark.range(0, count, 1, partitions).selectExpr("cast(id as string) as value")


def write(frame: DataFrame, data: Path, **options: str) -> None:
    frame.write.format("forebay").mode("append").options(path=str(data), **options).save()


def fails(action: Any) -> str:
    """The text of the error that Spark makes of ours."""
    from pyspark.errors import PySparkException

    with pytest.raises(PySparkException) as caught:
        action()
    return str(caught.value)


# ---- batch ----


def test_keys_headers_and_topics_arrive_as_they_are(spark: SparkSession, data: Path) -> None:
    frame = spark.sql(
        """select * from values
        ('one', binary('k1'), array(named_struct('key', 'a', 'value', binary('1'))), 'orders'),
        ('two', null, null, '/ns/other'),
        ('three', binary(''), array(), 'orders')
        as t(value, key, headers, topic)"""
    ).coalesce(1)
    write(frame, data)
    found = messages(data)
    assert [message.payload for message in found] == [b"one", b"three"]
    assert [message.routing_key for message in found] == ["k1", ""]
    marks = [message.attributes.pop(MARK).split("/") for message in found]
    assert [message.attributes for message in found] == [{"a": "1"}, {}]
    assert [mark[1:] for mark in marks] == [["0", "0", "0"], ["0", "0", "2"]]
    [other] = messages(data, "/ns/other")
    assert (other.payload, other.routing_key) == (b"two", None)
    assert staged(data) == []


def test_what_is_written_is_read_again(spark: SparkSession, data: Path) -> None:
    write(numbers(spark, 1000), data, topic=TOPIC)
    source = spark.read.format("forebay").options(path=str(data), subscribe=TOPIC)
    frame = source.option("includeHeaders", "true").load()
    write(frame.select("key", "value", "headers"), data, topic="copy")
    assert values(data, "copy") == values(data) == [str(at) for at in range(1000)]


def test_a_copy_keeps_its_partitions(spark: SparkSession, data: Path) -> None:
    names = ("orders", "clicks-part-0", "clicks-part-1")
    with forebay.open(data) as store:
        for name in names:
            store.topic(name).append_many([f"{name} {at}".encode() for at in range(20)])
    source = spark.read.format("forebay").options(path=str(data), subscribe="orders,clicks")
    frame = source.option("minPartitions", "3").load()
    copy = frame.selectExpr("value", "replace(topic, '/default/', '/copy/') as topic", "partition")
    write(copy, data)
    with forebay.open(data) as store:
        assert store.topics() == sorted(
            f"/{ns}/{name}" for ns in ("copy", "default") for name in names
        )
    for name in names:
        assert values(data, f"/copy/{name}") == values(data, name)


def test_a_double_run_with_the_same_id_adds_nothing(spark: SparkSession, data: Path) -> None:
    for _ in range(2):
        write(numbers(spark, 100), data, topic=TOPIC, sinkId="daily")
    assert len(values(data)) == 100
    text = fails(lambda: write(numbers(spark, 99), data, topic=TOPIC, sinkId="daily"))
    assert "complete with 100 rows, but this one has 99" in text
    write(numbers(spark, 99), data, topic=TOPIC, sinkId="daily", batchId="1")
    assert len(values(data)) == 199
    assert staged(data) == []


def die_at_first(mark: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Kills the worker after it passed some rows on, the first time."""
    for number, batch in enumerate(batches):
        if number == 1 and not Path(mark).exists():
            Path(mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch


def test_a_killed_task_that_is_tried_again_adds_nothing_twice(
    spark: SparkSession, data: Path, tmp_path: Path
) -> None:
    frame = numbers(spark, 30_000)
    deadly = frame.mapInArrow(partial(die_at_first, str(tmp_path / "mark")), frame.schema)
    write(deadly, data, topic=TOPIC)
    assert (tmp_path / "mark").exists()
    assert values(data) == [str(at) for at in range(30_000)]
    assert staged(data) == []


def test_a_job_that_fails_leaves_nothing_to_be_seen(spark: SparkSession, data: Path) -> None:
    frame = spark.range(0, 100, 1, 4).selectExpr("if(id = 99, null, cast(id as string)) as value")
    text = fails(lambda: write(frame, data, topic=TOPIC))
    assert "row 24 of partition 3 has a null value" in text
    with forebay.open(data) as store:
        assert store.topics() == []
    assert staged(data) == []


def test_a_topic_of_another_process_is_said_with_its_owner(data: Path) -> None:
    with forebay.open(data) as store:
        store.topic(TOPIC).append(b"mine")
        door = LocalTopicWriter(StoreSettings(data=data), wait_seconds=0.2)
        with door, pytest.raises(TopicOwned) as told:
            door.end(parse_topic(TOPIC))
        assert f"cannot append to {TOPIC}, which" in str(told.value)
        assert "close the topic there, and write again" in str(told.value)
    assert values(data) == ["mine"]


def test_what_cannot_be_written_is_said_when_the_write_is_planned(
    spark: SparkSession, data: Path
) -> None:
    frame = numbers(spark, 10)
    assert "the option 'topic' or a column 'topic'" in fails(lambda: write(frame, data))
    assert "no option 'topics'" in fails(lambda: write(frame, data, topics="a"))
    wide = frame.selectExpr("value", "1 as offset")
    assert "does not know the columns 'offset'" in fails(lambda: write(wide, data, topic="a"))
    plain = frame.write.format("forebay").options(path=str(data), topic="a")
    assert "ErrorIfExists" in fails(plain.save)  # Spark's own words: mode("append") is missing
    over = frame.write.format("forebay").mode("overwrite").options(path=str(data), topic="a")
    assert "append-only" in fails(over.save)


@pytest.mark.parametrize(
    ("options", "streaming", "why"),
    [
        ({"topic": "a"}, True, "needs the option 'sinkId'"),
        ({"sinkId": "a", "batchId": "1"}, True, "no option 'batchId'"),
        ({"batchId": "1"}, False, "'batchId' needs the option 'sinkId'"),
        ({"sinkId": "a", "batchId": "-1"}, False, "'batchId' is '-1'"),
        ({"sinkId": "a/b"}, False, "the sinkId 'a/b'"),
        ({"topic": "a.b"}, False, "not a topic name"),
        ({"subscribe": "a"}, False, "no option 'subscribe'"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    data: Path, options: dict[str, str], streaming: bool, why: str
) -> None:
    with pytest.raises(UsageError) as caught:
        sink_options({"path": str(data), **options}, streaming=streaming)
    assert why in str(caught.value)


def test_a_store_without_a_log_cannot_be_written(data: Path) -> None:
    with forebay.open(data) as store:
        store.topic(TOPIC).append(b"x")
    place = {"catalog": str(data / "catalog.db"), "store": str(data / "objects")}
    with pytest.raises(UsageError, match="give the option 'path'"):
        sink_options({**place, "topic": "a"}, streaming=False)


# ---- streams ----


class Query:
    """A query over files of numbers that can be stopped and started again."""

    def __init__(self, spark: SparkSession, place: Path, data: Path) -> None:
        self.spark, self.input, self.checkpoint = spark, place / "input", place / "checkpoint"
        self.data = data
        self.input.mkdir(parents=True)

    def add(self, name: str, first: int, count: int) -> None:
        """A file that is there all at once."""
        text = "".join(f"{at}\n" for at in range(first, first + count))
        (self.input / f".{name}").write_text(text)
        (self.input / f".{name}").rename(self.input / name)

    def run(self, **options: str) -> None:
        """Takes everything that is there, a file at a time."""
        stream = self.spark.readStream.format("text").option("maxFilesPerTrigger", 1)
        writer = stream.load(str(self.input)).writeStream.format("forebay")
        given = {"path": str(self.data), "topic": TOPIC, **options}
        query = (
            writer.options(**given)
            .option("checkpointLocation", str(self.checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    def forget_commit(self, batch: int) -> None:
        """As if Spark had died between the sink's commit and its own note of it."""
        for file in (self.checkpoint / "commits").glob(f"*{batch}*"):
            file.unlink()


@pytest.fixture
def query(spark: SparkSession, tmp_path: Path, data: Path) -> Query:
    return Query(spark, tmp_path / "query", data)


def test_a_restarted_query_goes_on_and_repeats_nothing(query: Query, data: Path) -> None:
    query.add("a", 0, 50)
    query.add("b", 50, 50)
    query.run(sinkId="q")
    assert sorted(map(int, values(data))) == list(range(100))
    query.forget_commit(1)
    query.run(sinkId="q")
    assert sorted(map(int, values(data))) == list(range(100))
    query.add("c", 100, 50)
    query.run(sinkId="q")
    assert sorted(map(int, values(data))) == list(range(150))
    marks = [message.attributes[MARK].split("/") for message in messages(data)]
    assert {mark[1] for mark in marks} == {"0", "1", "2"}
    [query_of_all_batches] = {mark[4].partition(".")[0] for mark in marks}
    assert query_of_all_batches != "-", "the tasks did not get the id of the query from Spark"
    assert staged(data) == []


def test_a_query_without_a_sink_id_does_not_start(query: Query, data: Path) -> None:
    query.add("a", 0, 5)
    assert "needs the option 'sinkId'" in fails(query.run)
    assert not (data / "wal").exists()


def test_a_query_with_a_new_checkpoint_is_refused_the_old_id(query: Query, data: Path) -> None:
    query.add("a", 0, 50)
    query.add("b", 50, 50)
    query.run(sinkId="q")
    query.checkpoint = query.checkpoint.with_name("new")
    assert "it has a new checkpoint" in fails(lambda: query.run(sinkId="q"))
    assert len(values(data)) == 100


def test_another_checkpoint_is_known_by_its_rows_and_never_by_a_number(
    spark: SparkSession, tmp_path: Path, data: Path
) -> None:
    """Batch 0 of each query is empty, so all of them write batch 1 first."""
    with forebay.open(data) as store:
        store.topic("source").append_many([b"%d" % at for at in range(30)])

    def run(checkpoint: str, prefix: str, topic: str = TOPIC) -> None:
        source = spark.readStream.format("forebay").options(
            path=str(data), subscribe="source", startingOffsets="earliest", maxOffsetsPerTrigger=10
        )
        rows = source.load().where("offset between 10 and 19")
        query = (
            rows.selectExpr(f"concat('{prefix}', cast(value as string)) as value")
            .writeStream.format("forebay")
            .options(path=str(data), topic=topic, sinkId="q")
            .option("checkpointLocation", str(tmp_path / checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    run("first", "")
    text = fails(lambda: run("second", "other-"))
    assert "the sinkId 'q' belongs to another query" in text
    assert "Give this query another sinkId" in text
    run("third", "")
    assert values(data) == [str(at) for at in range(10, 20)]


def test_a_write_with_the_same_id_and_other_keys_is_refused(
    spark: SparkSession, data: Path
) -> None:
    frame = spark.range(0, 20, 1, 2).selectExpr("cast(id as string) as value", "'a' as key")
    write(frame, data, topic=TOPIC, sinkId="daily")
    other = frame.selectExpr("value", "'b' as key")
    text = fails(lambda: write(other, data, topic=TOPIC, sinkId="daily"))
    assert "20 other rows" in text
    write(frame, data, topic=TOPIC, sinkId="daily")
    assert [message.routing_key for message in messages(data)] == ["a"] * 20
