"""The load of `forebay demo`: a few topics with different workloads, written and read all the time.

    /demo/orders     steady: small messages, some each tenth of a second
    /demo/clicks     in bursts: thousands at once, then nothing for seconds
    /demo/photos     slow and large: a message of some hundred kilobytes now and then
    /demo/heartbeat  hardly anything

Each has a reader at its end, and one that reads everything from the beginning, over and over, so
that all tiers are read. All rates are limited, and retention limits what is stored: `demo_settings`
says how much.
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
    UploaderSettings,
    WalSettings,
)
from forebay.topic.store import Store, Topic
from forebay.upload.sweep import sweep

_log: Final = logging.getLogger("forebay.demo")
NAMESPACE: Final = "/demo/"
OBJECTS_MIB: Final = 96
"""Of each topic; what is older than half an hour is deleted."""
LOCAL_MIB: Final = 48
"""Of each topic; its producer waits for uploads when there is more."""
_READ_PER_SECOND: Final = 4000
"""Messages, of a reader that reads everything."""
_LARGE_READ_PER_SECOND: Final = 4
_PAUSE_SECONDS: Final = 2.0
_GRACE_MINUTES: Final = 2.0
"""How long objects that a compaction replaced are kept; the demo itself sweeps them."""
_SWEEP_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class Workload:
    """How one topic is written and read."""

    name: str
    seconds: float
    """Between two batches."""
    messages: int
    size: int
    """Of a payload, about."""
    read_per_second: int = _READ_PER_SECOND


WORKLOADS: Final = (
    Workload("orders", 0.1, 20, 300),
    Workload("clicks", 8, 5000, 120),
    Workload("photos", 2, 1, 300 * KIB, _LARGE_READ_PER_SECOND),
    Workload("heartbeat", 1, 1, 40),
)


def demo_settings(settings: StoreSettings) -> StoreSettings:
    """The settings of a demo: everything moves within seconds, and less than 600 MiB are kept.

    Objects that a compaction replaced come on top, for a few minutes.
    """
    small = UploaderSettings(
        interval_seconds=3,
        max_open_seconds=4,
        max_object_bytes=4 * MIB,
        runner=settings.uploader.runner,
        sweep_grace_minutes=_GRACE_MINUTES,
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
    )


class Demo:
    """A background task of a service (`forebay.service.service.BackgroundTask`)."""

    def __init__(self, store: Store) -> None:
        """UsageError for a store with other topics: the demo's retention would delete from them."""
        others = [name for name in store.topics() if not name.startswith(NAMESPACE)]
        if others:
            raise UsageError(
                f"{store.settings.data} holds topics that are not the demo's, such as {others[0]}, "
                "and the demo deletes old messages: choose an empty directory with --data"
            )
        self._store = store
        self._stopped = threading.Event()

    async def run(self) -> None:
        """Until it is cancelled; its threads have ended when it returns."""
        threads = [
            threading.Thread(target=self._repeat, args=[work, each], daemon=True, name="demo")
            for each in WORKLOADS
            for work in (self._produce, self._follow, self._read_all)
        ]
        threads.append(threading.Thread(target=self._sweep, daemon=True, name="demo"))
        for thread in threads:
            thread.start()
        try:
            await asyncio.Event().wait()
        finally:
            self._stopped.set()
            for thread in threads:
                await asyncio.to_thread(thread.join)

    def _repeat(self, work: Callable[[Topic, Workload], None], workload: Workload) -> None:
        """Again and again: a full disk, or an object that retention deleted, ends nothing."""
        while not self._stopped.is_set():
            try:
                work(self._store.topic(NAMESPACE + workload.name), workload)
            except LogClosed:
                return
            except ForebayError as error:
                event(_log, logging.WARNING, "the demo waits", topic=workload.name, error=error)
            self._stopped.wait(_PAUSE_SECONDS)

    def _sweep(self) -> None:
        """Removes what compactions replaced soon: a user may start compactions all day."""
        while not self._stopped.wait(_SWEEP_SECONDS):
            try:
                with self._store.view() as view:
                    resources = view.resources()
                    assert resources is not None, "a store that is open has a catalog"
                    sweep(
                        resources.catalog,
                        resources.store,
                        grace_minutes=_GRACE_MINUTES,
                        dry_run=False,
                    )
            except LogClosed:
                return
            except ForebayError as error:
                event(_log, logging.WARNING, "the demo's sweep failed", error=error)

    def _produce(self, topic: Topic, workload: Workload) -> None:
        number = topic.watermarks().appended
        while not self._stopped.wait(workload.seconds):
            if sum(segment.size for segment in topic.segments()) > LOCAL_MIB * MIB:
                raise ServiceUnavailable("uploads are behind: nothing is written meanwhile")
            batch = [_payload(workload, number + each) for each in range(workload.messages)]
            number = topic.append_many(batch, durability="synced").stop

    def _follow(self, topic: Topic, _workload: Workload) -> None:
        """Reads what is new, as a consumer that is up to date."""
        at = topic.watermarks().synced
        while not self._stopped.wait(0.25):
            with topic.read(at) as reader:
                for message in reader:
                    at = message.offset + 1

    def _read_all(self, topic: Topic, workload: Workload) -> None:
        """Reads from the oldest message to the present end."""
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
