"""The load of `forebay demo`: topics with different workloads, written and read all the time.

    /demo/orders     steady: 20 small messages every tenth of a second
    /demo/clicks     in bursts: 5,000 messages at once, then none for 8 seconds
    /demo/photos     slow and large: a message of 300 KiB every two seconds
    /demo/heartbeat  one small message a second

Each topic has a reader that follows its end, and one that reads everything from the beginning again
and again, so that all tiers are read. All rates are limited. Retention limits what is stored
(`demo_settings`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from forebay.errors import ForebayError, LogClosed, ServiceUnavailable, UsageError
from forebay.limits import KIB, MIB
from forebay.logs import event
from forebay.settings import (
    DeleterSettings,
    RemoteRetentionSettings,
    StoreSettings,
    SweeperSettings,
    UploaderSettings,
    WalSettings,
)
from forebay.topic.store import Store, Topic

_log: Final = logging.getLogger("forebay.demo")
NAMESPACE: Final = "/demo/"
OBJECTS_MIB: Final = 96
"""Objects of each topic to keep; those older than half an hour are deleted too."""
LOCAL_MIB: Final = 48
"""Segments of each topic; with more, its producer waits for uploads."""
_READ_PER_SECOND: Final = 4000
"""Messages that a reader from the beginning reads."""
_LARGE_READ_PER_SECOND: Final = 4
_PAUSE_SECONDS: Final = 2.0
_SWEEPER: Final = SweeperSettings(interval_minutes=0.5, grace_minutes=2)
"""Often, because users of a demo may start compactions again and again."""


@dataclass(frozen=True, slots=True)
class Workload:
    """How one topic is written and read."""

    name: str
    seconds: float
    """Time between two batches."""
    messages: int
    """Messages of a batch."""
    size: int
    """Approximate bytes of a payload."""
    read_per_second: int = _READ_PER_SECOND


WORKLOADS: Final = (
    Workload("orders", 0.1, 20, 300),
    Workload("clicks", 8, 5000, 120),
    Workload("photos", 2, 1, 300 * KIB, _LARGE_READ_PER_SECOND),
    Workload("heartbeat", 1, 1, 40),
)


def demo_settings(settings: StoreSettings) -> StoreSettings:
    """The settings of a demo: data moves on within seconds, and less than 600 MiB are kept.

    Objects that a compaction replaced take more space for a few minutes.
    """
    small = UploaderSettings(
        interval_seconds=3,
        max_open_seconds=4,
        max_object_bytes=4 * MIB,
        runner=settings.uploader.runner,
    )
    return replace(
        settings,
        wal=WalSettings(rotate_max_bytes=MIB, rotate_max_seconds=10, fsync_interval_ms=200),
        uploader=small,
        deleter=DeleterSettings(
            check_interval_minutes=0.1,
            retention_time_minutes=0.5,
            retention_size_mb=LOCAL_MIB,
            deletion_lag_minutes=0.25,
        ),
        remote_retention=RemoteRetentionSettings(time_minutes=30, size_mb=OBJECTS_MIB),
        sweeper=_SWEEPER,
    )


class Demo:
    """A background task of a service (`forebay.service.service.BackgroundTask`)."""

    def __init__(self, store: Store) -> None:
        """Raises UsageError if the store has other topics: the demo would delete their messages."""
        others = [name for name in store.topics() if not name.startswith(NAMESPACE)]
        if others:
            raise UsageError(
                f"{store.settings.data} holds topics that are not the demo's, such as {others[0]}. "
                "The demo deletes old messages: choose an empty directory with --data"
            )
        self._store = store
        self._stopped = threading.Event()

    async def run(self) -> None:
        """Runs until it is cancelled. Its threads have ended when it returns."""
        threads = [
            threading.Thread(target=self._repeat, args=[work, each], daemon=True, name="demo")
            for each in WORKLOADS
            for work in (self._produce, self._follow, self._read_all)
        ]
        for thread in threads:
            thread.start()
        try:
            await asyncio.Event().wait()
        finally:
            self._stopped.set()
            for thread in threads:
                await asyncio.to_thread(thread.join)

    def _repeat(self, work: Callable[[Topic, Workload], None], workload: Workload) -> None:
        """Repeats the work until the demo stops.

        An error, such as a full disk or an object that retention deleted, is logged.
        """
        while not self._stopped.is_set():
            try:
                work(self._store.topic(NAMESPACE + workload.name), workload)
            except LogClosed:
                return
            except ForebayError as error:
                event(_log, logging.WARNING, "the demo waits", topic=workload.name, error=error)
            self._stopped.wait(_PAUSE_SECONDS)

    def _produce(self, topic: Topic, workload: Workload) -> None:
        number = topic.watermarks().appended
        while not self._stopped.wait(workload.seconds):
            if sum(segment.size for segment in topic.segments()) > LOCAL_MIB * MIB:
                raise ServiceUnavailable("uploads are behind: the producer waits")
            batch = [_payload(workload, number + each) for each in range(workload.messages)]
            number = topic.append_many(batch, durability="synced").stop

    def _follow(self, topic: Topic, _workload: Workload) -> None:
        """Reads new messages as they arrive."""
        at = topic.watermarks().synced
        while not self._stopped.wait(0.25):
            with topic.read(at) as reader:
                for message in reader:
                    at = message.offset + 1

    def _read_all(self, topic: Topic, workload: Workload) -> None:
        """Reads from the oldest message to the current end, at a limited rate."""
        began, taken = time.monotonic(), 0
        with topic.read("earliest") as reader:
            for _message in reader:
                taken += 1
                ahead = taken / workload.read_per_second - (time.monotonic() - began)
                if (ahead > 0.05 and self._stopped.wait(ahead)) or self._stopped.is_set():
                    return


def _payload(workload: Workload, number: int) -> bytes:
    if workload.size > 10 * KIB:
        return random.randbytes(workload.size)  # noqa: S311  # no secret
    facts = {"topic": workload.name, "number": number, "at": round(time.time(), 3)}
    return json.dumps(facts).encode().ljust(workload.size, b" ")
