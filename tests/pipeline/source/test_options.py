"""The options of the source: what is taken, what is refused, and with which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forebay.errors import InvalidTopicName, UsageError
from forebay.format.names import TopicName, parse_topic
from forebay.limits import MIB
from forebay.pipeline.location import NO_DATA, store_settings
from forebay.pipeline.source.options import COLUMNS, ScanOptions, parse_offsets, scan_options
from forebay.pipeline.source.plan import EARLIEST, LATEST

ORDERS = TopicName("default", "orders")


def options(**given: str) -> ScanOptions:
    return scan_options({"path": "/data", "subscribe": "orders", **given})


def streaming(**given: str) -> ScanOptions:
    return scan_options({"path": "/data", "subscribe": "orders", **given}, streaming=True)


def test_a_path_and_a_topic_are_enough() -> None:
    found = options()
    assert found.settings.data == Path("/data")
    assert found.topics == (ORDERS,)
    assert (found.starting.of(ORDERS), found.ending.of(ORDERS)) == (EARLIEST, LATEST)
    assert found.columns == COLUMNS
    assert found.split_bytes == 128 * MIB
    assert found.fail_on_data_loss


def test_a_stream_starts_at_the_latest_offset() -> None:
    assert streaming().starting.of(ORDERS) == LATEST
    assert streaming(startingOffsets="earliest").starting.of(ORDERS) == EARLIEST


def test_names_are_case_insensitive() -> None:
    found = scan_options(
        {"PATH": "/data", "SUBSCRIBE": "a", "failondataloss": "FALSE", "splitbytes": "64 MiB"}
    )
    assert not found.fail_on_data_loss
    assert found.split_bytes == 64 * MIB


def test_a_list_of_topics_can_name_partitions_and_namespaces() -> None:
    found = scan_options({"path": "/d", "subscribe": "orders, /eu/returns,clicks-part-1"})
    names = ["/default/clicks-part-0", "/default/clicks-part-1", "/default/orders", "/eu/returns"]
    assert [str(topic) for topic in found.chosen([*names, "/eu/orders"])] == names[1:]
    whole = scan_options({"path": "/d", "subscribe": "clicks"}).chosen(names)
    assert [str(topic) for topic in whole] == names[:2]


def test_a_topic_that_is_not_there_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"no topic /default/orders .*nearest is /default/order$"):
        options().chosen(["/default/order", "/eu/returns"])


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("orders.*", ["/default/orders", "/default/orders-part-1"]),
        ("/eu/.*", ["/eu/orders"]),
        (".*/orders", ["/default/orders", "/default/orders-part-1", "/eu/orders"]),
        ("order", []),
        ("orders", ["/default/orders", "/default/orders-part-1"]),
    ],
)
def test_a_pattern_matches_whole_names(pattern: str, found: list[str]) -> None:
    names = ["/default/orders", "/default/orders-part-1", "/eu/orders"]
    chosen = scan_options({"path": "/d", "subscribePattern": pattern}).chosen(names)
    assert [str(topic) for topic in chosen] == found


@pytest.mark.parametrize(
    "given",
    [
        {"subscribe": "orders"},
        {"subscribe": "orders-part-0,orders"},
        {"subscribePattern": "orders.*"},
        {"subscribePattern": "orders"},
    ],
)
def test_two_topics_that_would_be_the_same_partition_are_refused(given: dict[str, str]) -> None:
    """Their rows would have the same topic, partition and offset."""
    names = ["/default/orders", "/default/orders-part-0", "/default/orders-part-1"]
    with pytest.raises(UsageError) as caught:
        scan_options({"path": "/d", **given}).chosen(names)
    assert "/default/orders and /default/orders-part-0 are both partition 0" in str(caught.value)
    assert "Read /default/orders-part-0 alone, or copy one of them" in str(caught.value)


def test_one_of_two_topics_of_the_same_partition_can_be_read() -> None:
    names = ["/default/orders", "/default/orders-part-0", "/default/orders-part-1"]
    found = scan_options({"path": "/d", "subscribe": "orders-part-0,orders-part-1"}).chosen(names)
    assert [str(topic) for topic in found] == names[1:]
    whole = scan_options({"path": "/d", "subscribe": "orders"}).chosen([names[0], names[2]])
    assert [str(topic) for topic in whole] == [names[0], names[2]]


def test_offsets_are_words_or_json() -> None:
    found = options(
        startingOffsets='{"orders": {"0": 23, "1": -2}}', endingOffsets='{"orders": {"0": -1}}'
    )
    assert found.starting.of(ORDERS) == 23
    assert found.starting.of(parse_topic("orders-part-1")) == EARLIEST
    assert found.starting.of(parse_topic("/eu/orders")) is None
    assert found.ending.of(ORDERS) == LATEST


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"subscribePattern": "a"}, "exactly one of subscribe"),
        ({"subscribe": "a,,b"}, "a comma-separated list"),
        ({"startingOffsets": "latest"}, "reads nothing: use earliest"),
        ({"startingOffsets": '{"orders": {"0": -1}}'}, "reads nothing: use earliest"),
        ({"endingOffsets": "earliest"}, "reads nothing: use latest"),
        ({"endingOffsets": "[1]"}, "not a JSON object with topics"),
        ({"endingOffsets": '{"orders": 3}'}, "orders has no partitions"),
        ({"endingOffsets": '{"orders": {"x": 3}}'}, "'x' is not a partition number"),
        ({"endingOffsets": '{"orders": {"0": -3}}'}, "-3 is not an offset"),
        ({"endingOffsets": '{"orders": {"0": true}}'}, "True is not an offset"),
        ({"endingOffsets": '{"a b": {"0": 1}}'}, "'a b' is not a topic name"),
        ({"endingOffsets": "soon"}, "must be earliest, latest, or JSON"),
        (
            {
                "startingOffsets": '{"orders": {"0": 7, "1": 3}}',
                "endingOffsets": '{"orders": {"0": 5, "1": 3}}',
            },
            "/default/orders, partition 0: startingOffsets is 7, after endingOffsets, which is 5",
        ),
        (
            {"startingTimestamp": "20", "endingTimestamp": "10"},
            "startingTimestamp is 20, after endingTimestamp, which is 10",
        ),
        ({"startingOffsets": "earliest", "startingTimestamp": "1"}, "not both"),
        ({"endingOffsets": "latest", "endingTimestamp": "1"}, "not both"),
        ({"startingTimestamp": "yesterday"}, "a whole number"),
        ({"failOnDataLoss": "maybe"}, "true or false"),
        ({"minPartitions": "0"}, "a whole number in 1"),
        ({"splitBytes": "1KiB"}, "a size such as '64MiB'"),
        ({"splitBytes": "much"}, "a size such as '64MiB'"),
        ({"columns": "value,colour"}, "no column 'colour'"),
        ({"columns": "value,VALUE"}, "name each column only once"),
        ({"columns": "value", "includeHeaders": "true"}, "does not name headers"),
        ({"kafka.bootstrap.servers": "x"}, "use path, or catalog and store"),
        ({"assign": "{}"}, "name the partitions in subscribe"),
        ({"startingOffsetsByTimestamp": "{}"}, "use startingTimestamp"),
        ({"minOffsetsPerTrigger": "1"}, "trigger interval"),
        ({"maxRecordsPerPartition": "1"}, "use splitBytes"),
        ({"groupIdPrefix": "x"}, "no consumer groups"),
        ({"topic": "x"}, "an option of the sink"),
        ({"sinkId": "x"}, "an option of the sink"),
        ({"minPartition": "1"}, "the nearest is 'minPartitions'"),
        ({"catalog": "x"}, "leave out catalog"),
        ({"store.endpoint": "x"}, "leave out store.endpoint"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        options(**given)
    assert said in str(caught.value)


def test_topics_have_names() -> None:
    with pytest.raises(InvalidTopicName):
        options(subscribe="a/b")
    with pytest.raises(UsageError, match="not a regular expression"):
        scan_options({"path": "/d", "subscribePattern": "("})


def test_a_stream_has_bounds_and_no_end() -> None:
    with pytest.raises(UsageError, match="endingOffsets is for batch queries"):
        streaming(endingOffsets="latest")
    both = streaming(maxOffsetsPerTrigger="1", maxBytesPerTrigger="2")
    assert (both.offsets_per_trigger, both.bytes_per_trigger) == (1, 2)
    assert streaming(maxOffsetsPerTrigger="7").offsets_per_trigger == 7
    assert streaming(maxBytesPerTrigger="1MiB").bytes_per_trigger == MIB


def test_bounds_of_a_trigger_are_ignored_by_a_batch_and_said_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options(maxOffsetsPerTrigger="7")
    assert "option ignored by a batch query option=maxOffsetsPerTrigger" in caplog.text


# ---- where the store is ----


def test_a_catalog_and_a_store_are_an_address(tmp_path: Path) -> None:
    (tmp_path / "catalog.db").touch()
    for catalog in (f"{tmp_path}/catalog.db", f"sqlite:{tmp_path}/catalog.db"):
        found = store_settings({"catalog": catalog, "store": f"{tmp_path}/objects"})
        assert found.metadata.path == tmp_path / "catalog.db"
        assert (found.cloud.backend, found.cloud.root) == ("fs", f"{tmp_path}/objects")
        assert found.data == NO_DATA


def test_etcd_and_remote_stores_are_addresses() -> None:
    found = store_settings(
        {
            "catalog": "etcd://one:2379,two:2380/some/prefix",
            "catalog.username": "reader",
            "store": "s3a://bucket/below",
            "store.endpoint": "http://127.0.0.1:9000",
            "store.secret_key": "hushhush",
        }
    )
    assert found.metadata.endpoints == ("one:2379", "two:2380")
    assert (found.metadata.prefix, found.metadata.username) == ("/some/prefix", "reader")
    assert (found.cloud.backend, found.cloud.root) == ("s3", "s3://bucket/below")
    assert found.cloud.options["endpoint"] == "http://127.0.0.1:9000"
    assert "hushhush" not in repr(found)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "say where the store is"),
        ({"catalog": "x"}, "catalog and store together"),
        ({"catalog": "/no/such.db", "store": "/x"}, "there is no such file"),
        ({"catalog": "redis://x", "store": "/x"}, "etcd://host:port/prefix"),
        ({"catalog": "etcd://a:1", "catalog.colour": "x", "store": "/x"}, "catalog.colour"),
        ({"catalog": "etcd://a:1", "store": "ftp://x"}, "s3://, gs:// or azure://"),
        ({"catalog": "etcd://a:1", "store": "/x", "store.endpoint": "y"}, "for a remote store"),
    ],
)
def test_an_address_that_is_none_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        store_settings(given)
    assert said in str(caught.value)


def test_the_whole_name_of_a_partition_is_that_partition() -> None:
    """As the checkpoint of a stream writes it."""
    found = parse_offsets("startingOffsets", '{"/default/clicks-part-2": {"2": 7}}')
    assert found.of(parse_topic("clicks-part-2")) == 7
    assert found.of(parse_topic("clicks-part-1")) is None
