"""Record batches out of frames: every column, every kind of message, no row of Python's."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import count
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import CorruptLog
from forebay.format.frame import Scan, encode_frame, scan
from forebay.format.message import MessageId, StreamMessage, encode_message
from forebay.format.names import TopicName, parse_topic
from forebay.pipeline.source.columns import TYPES, BatchMaker

TOPIC = TopicName("default", "orders-part-3")


def frames_of(messages: list[StreamMessage], first: int = 0) -> Scan:
    numbered = zip(count(first), messages, strict=False)
    found = scan(b"".join(encode_frame(at, encode_message(each, at)) for at, each in numbered))
    assert len(found) == len(messages)
    return found


def message(payload: bytes, time: int = 5, **parts: Any) -> StreamMessage:
    return StreamMessage(payload, msg_id=MessageId(1, str(TOPIC)), publish_time=time, **parts)


def test_the_types_are_those_that_spark_makes_of_the_schema() -> None:
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructField, StructType

    from forebay.pipeline.source.data_source import SPARK_TYPES

    spark = StructType([StructField(name, kind) for name, kind in SPARK_TYPES.items()])
    assert BatchMaker(list(TYPES)).schema.equals(to_arrow_schema(spark, timezone="UTC"))


def test_every_column_of_a_message() -> None:
    texts = {"a": "b", "ключ": "значение", "empty": ""}
    frames = frames_of(
        [
            message(b"one", 1_700_000_000_123),
            message(b"", routing_key="", attributes=texts),
            message(b"three", routing_key="schlüssel"),
        ],
        first=7,
    )
    batch = BatchMaker(list(TYPES)).batch(TOPIC, frames)
    batch.validate(full=True)
    rows = batch.to_pylist()
    assert [row["value"] for row in rows] == [b"one", b"", b"three"]
    assert [row["key"] for row in rows] == [None, b"", "schlüssel".encode()]
    assert [row["offset"] for row in rows] == [7, 8, 9]
    assert {(row["topic"], row["partition"], row["timestampType"]) for row in rows} == {
        ("/default/orders", 3, 0)
    }
    assert rows[0]["timestamp"] == datetime(2023, 11, 14, 22, 13, 20, 123000, tzinfo=UTC)
    assert [row["headers"] for row in rows] == [
        None,
        [{"key": key, "value": text.encode()} for key, text in texts.items()],
        None,
    ]


def test_a_time_that_no_calendar_has_is_null() -> None:
    times = [0, 253_402_300_799_999, 253_402_300_800_000, 2**63, 2**64 - 1]
    batch = BatchMaker(["timestamp"]).batch(TOPIC, frames_of([message(b"", t) for t in times]))
    found = batch["timestamp"].cast(pa.int64()).to_pylist()
    assert found == [0, 253_402_300_799_999_000, None, None, None]


def test_columns_are_made_in_the_order_asked_for() -> None:
    maker = BatchMaker(["offset", "partition"])
    assert maker.batch(TOPIC, frames_of([message(b"x")])).schema.names == ["offset", "partition"]


def test_what_repeats_is_right_for_every_topic_and_size() -> None:
    maker = BatchMaker(["topic", "partition", "key"])
    for number in range(40):
        topic = parse_topic(f"t{number % 23}-part-{number}")
        frames = frames_of([message(b"x")] * (1 + 700 * (number % 4)))
        batch = maker.batch(topic, frames)
        assert batch.num_rows == len(frames)
        assert set(batch["topic"].to_pylist()) == {f"/default/t{number % 23}"}
        assert set(batch["partition"].to_pylist()) == {number}
        assert batch["key"].null_count == len(frames)


def test_the_batch_outlives_the_buffer() -> None:
    source = frames_of([message(b"one", routing_key="k"), message(b"two")])
    buffer = bytearray(source.buffer)
    batch = BatchMaker(list(TYPES)).batch(TOPIC, scan(buffer))
    before = batch.to_pylist()
    buffer[:] = bytes(len(buffer))
    assert batch.to_pylist() == before


def test_a_frame_without_a_message_is_corrupt_and_says_where() -> None:
    good = encode_frame(4, encode_message(message(b"x"), 4))
    frames = scan(good + encode_frame(5, b"no message at all"))
    with pytest.raises(CorruptLog, match=r"/default/orders-part-3.*offset 5"):
        BatchMaker(["value"]).batch(TOPIC, frames)
    assert BatchMaker(["offset"]).batch(TOPIC, frames).num_rows == 2


@given(
    st.lists(
        st.builds(
            message,
            st.binary(max_size=50),
            st.integers(0, 2**42),
            attributes=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
            routing_key=st.none() | st.text(max_size=9),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_any_messages_come_back(messages: list[StreamMessage]) -> None:
    batch = BatchMaker(["value", "key", "headers", "offset"]).batch(TOPIC, frames_of(messages))
    batch.validate(full=True)
    for row, each in zip(batch.to_pylist(), messages, strict=True):
        assert row["value"] == each.payload
        assert row["key"] == (None if each.routing_key is None else each.routing_key.encode())
        headers = {one["key"]: one["value"].decode() for one in row["headers"] or ()}
        assert headers == each.attributes
