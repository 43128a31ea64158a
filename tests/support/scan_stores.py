"""Stores in both tiers for the suites of scans, and the rows that a scan must give of them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forebay.format.message import StreamMessage
from forebay.format.names import parse_topic
from forebay.pipeline.source.options import scan_options
from forebay.pipeline.source.plan import Split
from forebay.pipeline.source.scan import plan_scan, read_split
from forebay.settings import (
    DeleterSettings,
    MetadataSettings,
    StoreSettings,
    UploaderSettings,
    WalSettings,
)
from forebay.topic.store import Topic
from forebay.topic.view import StoreView

Row = dict[str, Any]


def settings_of(data: Path, **changes: Any) -> StoreSettings:
    """Nobody works in the background, and retention takes all that it may."""
    given: dict[str, Any] = {
        "wal": WalSettings(rotate_max_bytes=None),
        "uploader": UploaderSettings(enabled=False),
        "deleter": DeleterSettings(retention_size_mb=0, deletion_lag_minutes=0),
        "metadata": MetadataSettings(offsets_reserved=100),
    }
    return StoreSettings(data=data, **{**given, **changes})


def append(topic: Topic, count: int, size: int = 100) -> None:
    """Messages that tell their offsets; some with a key, some with attributes."""
    first = topic.watermarks().appended
    offsets = range(first, first + count)
    topic.append_many(
        [(b"%s %d " % (topic.name.encode(), offset)).ljust(size, b".") for offset in offsets],
        [{"n": str(offset), "ключ": ""} if offset % 3 == 0 else None for offset in offsets],
        [f"key {offset}" if offset % 2 else None for offset in offsets],
        durability="synced",
    )


def fill_both_tiers(topic: Topic, count: int = 30, size: int = 100) -> None:
    """An object whose segment is gone, one whose segment is there, a sealed one, an active one."""
    append(topic, count, size)
    topic.rotate()
    topic.upload()
    topic.trim_local()
    append(topic, count, size)
    topic.rotate()
    topic.upload()
    append(topic, count, size)
    topic.rotate()
    append(topic, count, size)


def row_of(topic: str, message: StreamMessage) -> Row:
    """The row that a scan with headers has for a message."""
    name = parse_topic(topic)
    headers = [{"key": key, "value": text.encode()} for key, text in message.attributes.items()]
    return {
        "key": None if message.routing_key is None else message.routing_key.encode(),
        "value": message.payload,
        "topic": name.base,
        "partition": name.partition,
        "offset": message.offset,
        "timestamp": datetime.fromtimestamp(message.publish_time / 1000, UTC),
        "timestampType": 0,
        "headers": headers or None,
    }


def rows_there(settings: StoreSettings, *topics: str) -> list[Row]:
    """What a reader of the topics finds, in the order of topics and offsets."""
    rows = []
    with StoreView(settings) as store:
        for topic in topics:
            view = store.topic(topic)
            with view.reader(view.start_offset) as reader:
                rows += [row_of(topic, message) for message in reader]
    return rows


def planned(path: Path, **options: Any) -> list[Split]:
    """The splits of a scan; options as users write them."""
    return plan_scan(scan_options({"path": str(path), **_texts(options)}))


def read(path: Path, splits: Iterable[Split], **options: Any) -> list[Row]:
    """The rows of splits that were planned with the same options, by topic and offset."""
    parsed = scan_options({"path": str(path), **_texts(options)})
    rows: list[Row] = []
    for split in splits:
        for batch in read_split(parsed.settings, split, parsed.columns):
            batch.validate(full=True)
            rows += batch.to_pylist()
    if not {"topic", "partition", "offset"} <= {*parsed.columns}:
        return rows
    return sorted(rows, key=lambda row: (row["topic"], row["partition"], row["offset"]))


def scanned(path: Path, **options: Any) -> list[Row]:
    """Planned and read at once."""
    return read(path, planned(path, **options), **options)


def offsets(rows: Iterable[Row]) -> list[int]:
    return [row["offset"] for row in rows]


def _texts(options: dict[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in options.items()}
