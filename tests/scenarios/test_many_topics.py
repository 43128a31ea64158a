"""Hundreds of topics in one process share a few threads."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest

from forebay.limits import WRITER_THREADS
from forebay.settings import CloudReaderSettings, UploaderSettings
from support.disks import wait_until
from support.tiers import PATIENCE, PROMPT, make_tiers, payload, read_all

TOPICS = 200
MESSAGES = 50
UPLOADER = UploaderSettings(interval_seconds=1, max_open_seconds=0.2, concurrent_topics=3)
READER = CloudReaderSettings(fetch_threads=5)


def forebay_threads(before: set[threading.Thread]) -> Counter[str]:
    """How many new threads there are of each kind, which is the second word of the name."""
    names = (thread.name for thread in threading.enumerate() if thread not in before)
    return Counter(name.split("-")[1] for name in names if name.startswith("forebay-"))


@pytest.mark.timeout(300)
def test_hundreds_of_topics_are_uploaded_on_few_threads(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    tiers = make_tiers(("fs", "etcd"), tmp_path, request)
    before = set(threading.enumerate())
    most: Counter[str] = Counter()
    with tiers.open(uploader=UPLOADER, deleter=PROMPT, cloud_reader=READER) as store:
        topics = [store.topic(f"topic-{number}") for number in range(TOPICS)]
        for topic in topics:
            topic.append_many(map(payload, range(MESSAGES)))
        for topic in topics:
            topic.flush()

        def all_uploaded() -> bool:
            nonlocal most
            most |= forebay_threads(before)
            return all(topic.watermarks().verified >= MESSAGES for topic in topics)

        wait_until(all_uploaded, PATIENCE)
        for topic in topics[::10]:
            topic.rotate()
            topic.append(payload(MESSAGES), durability="synced")
            assert topic.trim_local()
            assert read_all(topic, MESSAGES) == 1
        for topic in topics:
            assert read_all(topic, 0, MESSAGES) == MESSAGES
        most |= forebay_threads(before)
    wait_until(lambda: not forebay_threads(before))
    bounds = {"writer": WRITER_THREADS, "background": 3, "fetch": 5, "lease": 1}
    assert most.keys() <= bounds.keys()
    assert all(most[kind] <= bound for kind, bound in bounds.items()), most
    assert most["lease"] == 1
    assert most["background"] >= 1
