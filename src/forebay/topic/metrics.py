"""The gauges of open topics, computed when the metrics are requested.

Appends and reads cost nothing here: the watermarks are numbers that a topic keeps anyway. The age
of the oldest message that is in no object takes one read of a segment, and only after the uploaded
watermark has moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from forebay import metrics
from forebay.clock import Clock
from forebay.errors import ForebayError
from forebay.metrics import Collected
from forebay.topic.storage import WalStorage
from forebay.upload.uploader import Uploader
from forebay.wal.segment import Segment

TOPICS_MAX: Final = 1000
"""The topics of one store that are reported, the first by name. Each takes seven lines."""

OFFSET: Final = Collected(
    "forebay_topic_offset",
    "Next offset of each stage of an open topic; for the stage `start`, its oldest offset.",
    ["topic", "stage"],
)
LAG: Final = Collected(
    "forebay_topic_upload_lag_messages",
    "Synced messages of an open topic that are in no object yet.",
    ["topic"],
)
LAG_SECONDS: Final = Collected(
    "forebay_topic_upload_lag_seconds",
    "Age of the oldest synced message of an open topic that is in no object yet.",
    ["topic"],
)
OPEN: Final = Collected("forebay_topics_open", "Open topics of this process.")
NOT_SHOWN: Final = Collected(
    "forebay_topics_not_shown", f"Open topics that are not reported: those after {TOPICS_MAX}."
)
CACHE: Final = Collected("forebay_wal_cache_size", "Messages that open topics hold in memory.")


class TopicGauges:
    """Sets the gauges of one store's open topics, whenever the metrics are collected."""

    def __init__(self, storages: Callable[[], Sequence[WalStorage]], clock: Clock) -> None:
        self._storages = storages
        self._clock = clock
        self._since: dict[str, tuple[int, float]] = {}
        """For each topic: an offset, and since when its message has waited, in monotonic time."""
        metrics.collect_from(self)

    def collect(self) -> None:
        storages = sorted(self._storages(), key=lambda each: each.name)
        OPEN.add(len(storages))
        NOT_SHOWN.add(max(len(storages) - TOPICS_MAX, 0))
        CACHE.add(sum(len(each.wal.in_memory()) for each in storages))
        shown = storages[:TOPICS_MAX]
        for storage in shown:
            self._show(storage)
        for name in self._since.keys() - {each.name for each in shown}:
            del self._since[name]

    def _show(self, storage: WalStorage) -> None:
        name, marks = storage.name, storage.watermarks()
        for stage, offset in (
            ("start", storage.start_offset),
            ("appended", marks.appended),
            ("synced", marks.synced),
        ):
            OFFSET.set(offset, name, stage)
        uploader = storage.uploader
        if uploader is None:
            return
        OFFSET.set(marks.uploaded, name, "uploaded")
        OFFSET.set(marks.verified, name, "verified")
        lag = max(marks.synced - marks.uploaded, 0)
        LAG.set(lag, name)
        LAG_SECONDS.set(self._waited(uploader, storage, marks.uploaded) if lag else 0, name)

    def _waited(self, uploader: Uploader, storage: WalStorage, offset: int) -> float:
        """Returns about how many seconds the message at `offset` has been in the log."""
        now, now_ms = self._clock.monotonic(), self._clock.now_ms()
        known = self._since.get(storage.name)
        if known is None or known[0] != offset:
            holding = [
                each
                for each in storage.wal.segments()
                if each.first_offset <= offset < each.end_offset
            ]
            if not holding:  # it was just uploaded or deleted
                return 0
            arrived = self._arrived(uploader, holding[0], offset, now_ms)
            known = (offset, now - (now_ms - arrived) / 1000)
            self._since[storage.name] = known
        return now - known[1]

    def _arrived(self, uploader: Uploader, segment: Segment, offset: int, now: int) -> int:
        """Returns when the message was published, or when its segment was created, if later.

        A message that was published elsewhere may have any time. If the message cannot be read, the
        segment's time is used. Times in the future are ignored.
        """
        try:
            position = uploader.locate(segment, offset)
            published = uploader.source.publish_time(segment, position)
        except (ForebayError, OSError):
            published = None
        times = (segment.created_ms, published or 0)
        return max((each for each in times if each <= now), default=now)
