"""A process whose memory is measured. Its argument is JSON, and so is what it prints.

It opens a store and its topics, notes what it needs while it does nothing, does one thing, and
prints the peak: `{"idle": KiB, "peak": KiB}`. The store's client was used before that.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import forebay
from forebay.limits import MIB
from forebay.settings import (
    CloudReaderSettings,
    CloudSettings,
    DeleterSettings,
    StoreSettings,
    UploaderSettings,
)
from forebay.topic.store import Store, Topic
from support.storages import checkpoints_of

PAYLOAD = bytes(range(256)) * 256
PATIENCE = 600.0


def status(field: str) -> int:
    """A field of this process's status, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def settings(given: dict[str, Any]) -> StoreSettings:
    rolling = given["action"] == "rolling"
    return StoreSettings(
        given["data"],
        uploader=UploaderSettings(
            enabled=given["action"] in ("background", "rolling"),
            interval_seconds=1,
            max_open_seconds=600 if rolling else 0,
            rolling=rolling,
            **given["uploader"],
        ),
        cloud_reader=CloudReaderSettings(**given["reader"]),
        cloud=CloudSettings(**given["cloud"]),
        deleter=DeleterSettings(retention_size_mb=0, deletion_lag_minutes=0),
    )


def build(store: Store, names: list[str], mib: int) -> None:
    """So many MiB in each topic, and a last segment, which retention leaves alone."""

    def fill(name: str) -> None:
        topic = store.topic(name)
        for _ in range(mib):
            topic.append_many([PAYLOAD] * (MIB // len(PAYLOAD)))
        topic.rotate()
        topic.append(b"last", durability="synced")

    with ThreadPoolExecutor(8) as pool:  # most of the time is spent on syncs
        list(pool.map(fill, names))


def read(topics: list[Topic]) -> None:
    """Everything that is in objects."""
    for topic in topics:
        topic.trim_local()
        [last] = topic.segments()
        assert last.count == 1
        for frames in topic.read(0, end=last.first_offset).frames():
            del frames  # else its chunk stays while the next one is fetched


def is_uploaded(topic: Topic) -> bool:
    marks = topic.watermarks()
    return marks.verified == marks.appended


def is_in_open_object(topic: Topic) -> bool:
    """Whether all of it is in an object that is still open."""
    found = checkpoints_of(topic).get_uploader()
    if found is None or found.active_start_offset is None or found.active_msgs_written is None:
        return False
    return found.active_start_offset + found.active_msgs_written == topic.watermarks().appended


def await_all(topics: list[Topic], done: Callable[[Topic], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not all(map(done, topics)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def main(given: dict[str, Any]) -> dict[str, int]:
    action = given["action"]
    names = [f"topic-{number}" for number in range(given["topics"])]
    with forebay.open(settings(given)) as store:
        if action == "build":
            build(store, names, given["mib"])
            return {}
        store.topic("warm").append(b"warm", durability="uploaded")
        topics = [store.topic(name) for name in names]
        idle = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        if action == "upload":
            for topic in topics:
                topic.upload()
        elif action == "read":
            read(topics)
        elif action == "background":
            await_all(topics, is_uploaded)
        elif action == "rolling":
            await_all(topics, is_in_open_object)
        return {"idle": idle, "peak": status("VmHWM")}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
