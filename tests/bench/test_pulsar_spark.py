"""What `forebay bench pulsar` gives Spark to read: the same messages as a ledger and as a topic."""

from __future__ import annotations

from pathlib import Path

import pytest

import forebay
from forebay.pipeline.pulsar.options import pulsar_options

pytest.importorskip("pyarrow", reason="Spark reads with Arrow")


def test_a_ledger_and_a_topic_have_the_same_messages(tmp_path: Path) -> None:
    from forebay.bench.pulsar_spark import TOPIC, write_ledger, write_topic
    from forebay.pipeline.pulsar.scan import plan_scan, read_split

    write_ledger(tmp_path / "bucket", 7000, 100)
    write_topic(tmp_path / "data", 7000, 100)
    options = pulsar_options({"path": str(tmp_path / "bucket"), "columns": "value,__entryId"})
    rows = [
        (row["__entryId"], row["value"])
        for split in plan_scan(options)
        for batch in read_split(options, split)
        for row in batch.to_pylist()
    ]
    with forebay.open(tmp_path / "data") as store:
        topic = store.topic(TOPIC)
        assert topic.watermarks().uploaded == 7000
        assert rows == [(message.offset, bytes(message.payload)) for message in topic.read()]
