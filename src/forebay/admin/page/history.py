"""`History`: how the store did in the last minutes, so that a page opened later has the past.

A sampler adds a row every two seconds to a ring of fifteen minutes. Appends, reads and requests
are counted by this process's metrics. Uploads are not, because another process may do them: they
are measured by the topics' watermarks and by the objects that were added to the catalog.

For each topic, the sampler records when which offset was synced. That gives how long the oldest
message that is not uploaded has waited, and how long it took once it is uploaded.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Final

from forebay import metrics
from forebay.admin.page.topic_states import TopicStates
from forebay.errors import ForebayError
from forebay.format.descriptor import decode_outline
from forebay.format.names import parse_topic
from forebay.limits import OFFSET_MAX
from forebay.topic.lag import bytes_in, parts_of
from forebay.topic.store import Store, Topic
from forebay.wal.segment import Segment

INTERVAL_SECONDS: Final = 2.0
SAMPLES_MAX: Final = 450
_MARKS_MAX: Final = 256
"""The maximum number of marks per topic. Above it, every second mark is dropped."""
_RATE_SECONDS: Final = 30.0
"""Uploads come in bursts. Over a shorter time the rate would be zero or very high."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One row of the history. Rates cover the time since the previous row."""

    at: float
    """Seconds since 1970-01-01 UTC."""
    appended: float
    """Messages a second, written and synced."""
    appended_bytes: float
    uploaded: float
    """Messages a second. All values about uploads cover only topics that are open here."""
    uploaded_bytes: float
    read: float
    """Messages a second that readers fetched, from any tier."""
    read_bytes: float
    lag: int
    """Messages that are synced and not uploaded."""
    lag_bytes: int
    lag_seconds: float
    """How long the oldest of them has waited."""
    time_to_cloud: float | None
    """The longest upload delay of a message since the previous row; None without uploads."""
    requests: float
    """Requests a second from this process to the object store."""
    failed_requests: float
    store_up: float
    """Bytes a second."""
    store_down: float


FIELDS: Final = tuple(each.name for each in fields(Sample))


class TopicTrace:
    """When the offsets of one topic were synced and uploaded."""

    def __init__(self) -> None:
        self._synced: deque[tuple[float, int]] = deque()
        """(time, offset): when the messages before it were synced, until they are uploaded."""
        self._recent: deque[tuple[float, int, int]] = deque()
        self.uploaded = 0

    def record(self, now: float, synced: int, uploaded: int) -> None:
        """`now` never goes back."""
        self.uploaded = uploaded
        while self._synced and self._synced[0][1] <= uploaded:
            self._synced.popleft()
        last = self._synced[-1][1] if self._synced else uploaded
        if synced > last:
            self._synced.append((now, synced))
        if len(self._synced) > _MARKS_MAX:
            self._synced = deque(list(self._synced)[::2])
        self._recent.append((now, synced, uploaded))
        while now - self._recent[0][0] > _RATE_SECONDS:
            self._recent.popleft()

    def waiting_since(self) -> float | None:
        """When the oldest message that is not uploaded was synced; None if all are uploaded."""
        return self._synced[0][0] if self._synced else None

    def rates(self) -> tuple[float, float]:
        """Messages a second that were synced and that were uploaded, over the last seconds."""
        if len(self._recent) < 2:
            return 0.0, 0.0
        (begin, synced, uploaded), (end, synced_now, uploaded_now) = (
            self._recent[0],
            self._recent[-1],
        )
        seconds = max(end - begin, 0.001)
        return (synced_now - synced) / seconds, (uploaded_now - uploaded) / seconds


def bytes_after(segments: Sequence[Segment], offset: int) -> int:
    """About how many bytes of local files are at or after `offset`."""
    return bytes_in(parts_of(segments), [(offset, OFFSET_MAX)])


class History:
    """`sample` is for one thread, the rest for any."""

    def __init__(
        self,
        store: Store,
        states: TopicStates,
        *,
        clock: Callable[[], float] = time.time,
        samples_max: int = SAMPLES_MAX,
    ) -> None:
        self._store = store
        self._states = states
        self._clock = clock
        self._samples: deque[Sample] = deque(maxlen=samples_max)
        self._traces: dict[str, TopicTrace] = {}
        self._counts: _Counts | None = None
        self._before = 0.0

    def since(self, at: float = 0.0) -> list[Sample]:
        """The rows after a time, oldest first."""
        return [each for each in list(self._samples) if each.at > at]

    def rows(self, at: float = 0.0) -> list[tuple[float | None, ...]]:
        return [astuple(each) for each in self.since(at)]

    def trace(self, name: str) -> TopicTrace | None:
        return self._traces.get(name)

    def sample(self) -> None:
        """Adds a row; the first call only takes the counts to compare with."""
        now = self._clock()
        uploads = self._record_topics(now)
        counts, before = _Counts.now(), self._counts
        seconds = now - self._before
        self._counts, self._before = counts, now
        if before is None or seconds <= 0:
            return

        def rate(name: str) -> float:
            grown: float = getattr(counts, name) - getattr(before, name)
            return max(grown / seconds, 0.0)

        self._samples.append(
            Sample(
                at=round(now, 3),
                appended=rate("appended"),
                appended_bytes=rate("appended_bytes"),
                uploaded=uploads.messages / seconds,
                uploaded_bytes=uploads.bytes / seconds,
                read=rate("read"),
                read_bytes=rate("read_bytes"),
                lag=uploads.lag,
                lag_bytes=uploads.lag_bytes,
                lag_seconds=uploads.lag_seconds,
                time_to_cloud=uploads.time_to_cloud,
                requests=rate("requests"),
                failed_requests=rate("failed_requests"),
                store_up=rate("store_up"),
                store_down=rate("store_down"),
            )
        )

    def _record_topics(self, now: float) -> _Uploads:
        """Records the watermarks of every open topic."""
        found = _Uploads()
        names = self._states.names()
        for name in names:
            topic = self._store.opened(name)
            if topic is not None:
                self._record_topic(name, topic, now, found)
        for gone in self._traces.keys() - set(names):
            del self._traces[gone]
        return found

    def _record_topic(self, name: str, topic: Topic, now: float, found: _Uploads) -> None:
        marks = topic.watermarks()
        trace = self._traces.get(name)
        if trace is None:
            trace = self._traces[name] = TopicTrace()
            before = marks.uploaded
            waited = None
        else:
            before, waited = trace.uploaded, trace.waiting_since()
        trace.record(now, marks.synced, marks.uploaded)
        if marks.uploaded > before:
            found.messages += marks.uploaded - before
            found.bytes += self._uploaded_bytes(name, before, marks.uploaded)
            if waited is not None:
                found.time_to_cloud = max(found.time_to_cloud or 0.0, now - waited)
        if marks.synced > marks.uploaded:
            found.lag += marks.synced - marks.uploaded
            found.lag_bytes += bytes_after(topic.segments(), marks.uploaded)
            found.lag_seconds = max(found.lag_seconds, now - (trace.waiting_since() or now))

    def _uploaded_bytes(self, name: str, start: int, end: int) -> int:
        """The total size of the objects that begin in an offset range."""
        try:
            with self._store.view() as view:
                resources = view.resources()
                if resources is None:
                    return 0
                topic = parse_topic(name)
                found = resources.catalog.get_object_descriptors_range(
                    topic, start, end, decoder=decode_outline
                )
        except ForebayError:
            # An alert says that the catalog is away; the messages are counted all the same.
            return 0
        return sum(each.size for each in found if each.start_offset >= start)


@dataclass(slots=True)
class _Uploads:
    messages: int = 0
    bytes: int = 0
    lag: int = 0
    lag_bytes: int = 0
    lag_seconds: float = 0.0
    time_to_cloud: float | None = None


@dataclass(frozen=True, slots=True)
class _Counts:
    """This process's counters at one moment."""

    appended: float
    appended_bytes: float
    read: float
    read_bytes: float
    requests: float
    failed_requests: float
    store_up: float
    store_down: float

    @classmethod
    def now(cls) -> _Counts:
        known = {each.name: each for each in metrics.catalogue()}

        def total(name: str, *, having: str = "", lacking: str = "\0") -> float:
            metric = known.get(name)
            samples = () if metric is None else list(metric.samples())
            return sum(
                number
                for _, labels, number in samples
                if having in labels and lacking not in labels
            )

        requests = "forebay_store_requests_total"
        answered = total(requests, having='outcome="ok"') + total(
            requests, having='outcome="missing"'
        )
        everything = total(requests)
        return cls(
            appended=total("forebay_wal_append_total"),
            appended_bytes=total("forebay_wal_append_bytes_total"),
            read=total("forebay_wal_reader_messages_total"),
            read_bytes=total("forebay_wal_reader_bytes_total"),
            requests=everything,
            failed_requests=everything - answered,
            store_up=total("forebay_store_bytes_total", having='"up"'),
            store_down=total("forebay_store_bytes_total", having='"down"'),
        )
