"""The metrics of all object readers in the process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from forebay.errors import (
    CorruptFrame,
    CorruptLog,
    ForebayError,
    ForeignObject,
    OffsetOutOfRange,
    ServiceRefused,
    ServiceUnavailable,
)
from forebay.metrics import SECONDS, Counter, Histogram

BYTES_FETCHED: Final = Counter(
    "forebay_cloud_reader_bytes_fetched_total", "Bytes that object readers fetched."
)
BYTES_USED: Final = Counter(
    "forebay_cloud_reader_bytes_used_total", "Bytes of frames that object readers returned."
)
RANGE_REQUESTS: Final = Counter(
    "forebay_cloud_reader_range_requests_total", "Range requests of object readers."
)
QUERY_SECONDS: Final = Histogram(
    "forebay_cloud_reader_query_duration_seconds",
    "Duration of range requests of object readers, failed ones included.",
    SECONDS,
)
OBJECTS_READ: Final = Counter(
    "forebay_cloud_reader_objects_read_total", "Objects that readers began to read."
)
ERRORS: Final = Counter(
    "forebay_cloud_reader_errors_total", "Errors that object readers raised.", ["kind"]
)
SKIPPED: Final = Counter(
    "forebay_reader_skipped_messages_total", "Messages that lenient readers skipped."
)
JUMPS: Final = Counter(
    "forebay_reader_accepted_jumps_total",
    "Accepted ranges without messages that readers jumped over.",
)
FOREIGN_NAMES: Final = Counter(
    "forebay_reader_foreign_names_total",
    "Objects read whole in which a message names another topic.",
)
OTHER_ETAGS: Final = Counter(
    "forebay_reader_other_etags_total",
    "Objects with another etag than their descriptor says, by what their hash showed.",
    ["outcome"],
)
WRONG_INDEXES: Final = Counter(
    "forebay_reader_wrong_indexes_total",
    "Objects that were read from their start because their index was wrong.",
)
HANDOFFS: Final = Counter(
    "forebay_handoff_cloud_to_wal_total", "Readers that passed from objects to the local log."
)
_KINDS: Final = (
    (CorruptFrame, "corrupt"),
    (ForeignObject, "foreign"),
    (CorruptLog, "missing"),
    (OffsetOutOfRange, "out_of_range"),
    (ServiceUnavailable, "unavailable"),
    (ServiceRefused, "refused"),
)


def count_error(error: ForebayError) -> None:
    """Counts the error under the first kind in `_KINDS` that it is an instance of."""
    ERRORS.add(1, next((kind for cause, kind in _KINDS if isinstance(error, cause)), "other"))


@contextmanager
def counted_request() -> Iterator[None]:
    """Counts and times the range request in its `with` block."""
    RANGE_REQUESTS.add()
    started = time.perf_counter()
    try:
        yield
    finally:
        QUERY_SECONDS.observe(time.perf_counter() - started)
