"""A topic with a very wide range of offsets without messages, as a lost disk leaves it."""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Final

from forebay.catalog.catalog import Change
from forebay.catalog.records import TopicRecord
from forebay.clock import SYSTEM_CLOCK
from forebay.format.names import parse_topic
from forebay.limits import LOG_DISTANCE
from forebay.topic.resources import StoreResources
from forebay.topic.store import Store
from support.scan_stores import append, settings_of

ORDERS: Final = "/default/orders"
HELD: Final = 10
"""Messages before the hole, and as many after it."""
END: Final = HELD + LOG_DISTANCE
"""Where the hole ends."""


def leave_a_wide_hole(data: Path, topic: str = ORDERS) -> None:
    """10 messages in an object, then 2**40 offsets without messages, then 10 in a new log."""
    with Store(settings_of(data)) as store:
        append(store.topic(topic), HELD)
        store.topic(topic).upload()
        append(store.topic(topic), 5)
    shutil.rmtree(data / "wal")

    def reserve(record: TopicRecord) -> Change:
        return Change(replace(record, reserved=END))

    with closing(StoreResources(settings_of(data), SYSTEM_CLOCK)) as resources:
        resources.catalog.update(parse_topic(topic), None, reserve)
    with Store(settings_of(data)) as store:
        append(store.topic(topic), HELD)
        assert store.topic(topic).watermarks().synced == END + HELD


def record_of(data: Path, topic: str = ORDERS) -> TopicRecord:
    with closing(StoreResources(settings_of(data), SYSTEM_CLOCK)) as resources:
        found = resources.catalog.record(parse_topic(topic))
        assert found is not None
        return found


def accept(data: Path, topic: str = ORDERS) -> None:
    """As another process does it, without owning the topic."""
    with closing(StoreResources(settings_of(data), SYSTEM_CLOCK)) as resources:
        resources.catalog.update(
            parse_topic(topic), None, lambda record: Change(record.with_accepted())
        )
