"""The metrics of readers of objects, for the whole process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from forebay.errors import (
    CorruptFrame,
    CorruptLog,
    ForebayError,
    OffsetOutOfRange,
    ServiceRefused,
    ServiceUnavailable,
)
from forebay.metrics import SECONDS, Counter, Histogram

BYTES_FETCHED: Final = Counter(
    "forebay_cloud_reader_bytes_fetched_total", "Bytes of objects that readers fetched."
)
BYTES_USED: Final = Counter(
    "forebay_cloud_reader_bytes_used_total", "Bytes of frames that readers of objects handed out."
)
RANGE_REQUESTS: Final = Counter(
    "forebay_cloud_reader_range_requests_total", "Ranged requests of readers of objects."
)
QUERY_SECONDS: Final = Histogram(
    "forebay_cloud_reader_query_duration_seconds",
    "Duration of ranged requests of readers of objects, failed ones too.",
    SECONDS,
)
OBJECTS_READ: Final = Counter(
    "forebay_cloud_reader_objects_read_total", "Objects that a reader began to read."
)
ERRORS: Final = Counter(
    "forebay_cloud_reader_errors_total", "Errors that readers of objects raised.", ["kind"]
)
SKIPPED: Final = Counter(
    "forebay_reader_skipped_messages_total", "Messages that lenient readers stepped over."
)
HANDOFFS: Final = Counter(
    "forebay_handoff_cloud_to_wal_total", "Readers that went from objects over to the log."
)
_KINDS: Final = (
    (CorruptFrame, "corrupt"),
    (CorruptLog, "missing"),
    (OffsetOutOfRange, "out_of_range"),
    (ServiceUnavailable, "unavailable"),
    (ServiceRefused, "refused"),
)


def count_error(error: ForebayError) -> None:
    """By its kind: the first one that fits."""
    ERRORS.add(1, next((kind for cause, kind in _KINDS if isinstance(error, cause)), "other"))


@contextmanager
def counted_request() -> Iterator[None]:
    """Around a ranged request."""
    RANGE_REQUESTS.add()
    started = time.perf_counter()
    try:
        yield
    finally:
        QUERY_SECONDS.observe(time.perf_counter() - started)
