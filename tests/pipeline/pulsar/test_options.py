"""The options of the format `pulsar-offload`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forebay.errors import UsageError
from forebay.format.pulsar.topic import PulsarTopic, topic_of_managed_ledger
from forebay.pipeline.pulsar.options import COLUMNS, pulsar_options


def test_a_path_alone_reads_everything(tmp_path: Path) -> None:
    options = pulsar_options({"PATH": str(tmp_path)})
    assert options.cloud.root == str(tmp_path)
    assert (options.topics, options.pattern, options.columns) == ((), None, COLUMNS)
    assert options.fail_on_data_loss


def test_a_bucket_has_the_options_of_its_store() -> None:
    given_options = {
        "path": "s3a://bucket/prefix",
        "store.endpoint": "http://127.0.0.1:1",
        "store.region": "eu",
    }
    cloud = pulsar_options(given_options).cloud
    assert (cloud.backend, cloud.root) == ("s3", "s3://bucket/prefix")
    assert dict(cloud.options) == {"endpoint": "http://127.0.0.1:1", "region": "eu"}
    assert pulsar_options({"path": "gs://bucket"}).cloud.backend == "gcs"
    assert pulsar_options({"path": "az://container/x"}).cloud.root == "azure://container/x"


@pytest.mark.parametrize(
    ("given_options", "said"),
    [
        ({}, "give path"),
        ({"path": "/nowhere/at/all"}, "is not a directory"),
        ({"path": "ftp://x"}, "scheme 'ftp'"),
        ({"path": "/tmp", "subscribe": "a", "subscribePattern": "b"}, "not both"),
        ({"path": "/tmp", "subscribePattern": "("}, "not a regular expression"),
        ({"path": "/tmp", "subscribes": "a"}, "the nearest is 'subscribe'"),
        ({"path": "/tmp", "service.url": "pulsar://x"}, "no broker is asked"),
        ({"path": "/tmp", "topic": "a"}, "use subscribe"),
        ({"path": "/tmp", "columns": "value,offset"}, "there is no column 'offset'"),
        ({"path": "/tmp", "columns": "value,VALUE"}, "only once"),
        ({"path": "/tmp", "startingTimestamp": "9", "endingTimestamp": "8"}, "not before"),
        ({"path": "/tmp", "maxLedgersPerTrigger": "0"}, "maxLedgersPerTrigger is '0'"),
        ({"path": "/tmp", "splitBytes": "1"}, "splitBytes is '1'"),
    ],
)
def test_what_is_wrong_is_refused_by_name(given_options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        pulsar_options(given_options)


def test_a_stream_has_no_end() -> None:
    with pytest.raises(UsageError, match="for batch queries only"):
        pulsar_options({"path": "/tmp", "endingTimestamp": "8"}, streaming=True)


def test_managed_ledgers_are_named_as_their_topics() -> None:
    found = topic_of_managed_ledger("acme/eu/persistent/a%2Fb-partition-12")
    assert found == PulsarTopic("acme/eu", "a/b-partition-12")
    assert (str(found.base), found.partition) == ("persistent://acme/eu/a/b", 12)
    old = topic_of_managed_ledger("acme/cluster/eu/persistent/x")
    assert (str(old), old.partition) == ("persistent://acme/cluster/eu/x", -1)
    assert "x" not in old.spellings
    assert topic_of_managed_ledger("public/default/persistent/x").spellings >= {"x"}
    assert str(topic_of_managed_ledger("strange")) == "persistent:///strange"
