"""The uploader's metrics."""

from __future__ import annotations

from typing import Final

from forebay.metrics import BYTES, MESSAGES, SECONDS, Counter, Histogram

cycles: Final = Counter("forebay_uploader_cycles_total", "Upload cycles, by outcome.", ["outcome"])
cycle_seconds: Final = Histogram(
    "forebay_uploader_cycle_duration_seconds", "Duration of upload cycles.", SECONDS
)
objects_created: Final = Counter(
    "forebay_uploader_objects_created_total", "Objects written and committed."
)
bytes_uploaded: Final = Counter(
    "forebay_uploader_bytes_uploaded_total", "Bytes of committed objects."
)
logical_bytes_uploaded: Final = Counter(
    "forebay_uploader_logical_bytes_uploaded_total",
    "Bytes of the frames in committed objects, before compression.",
)
bytes_per_object: Final = Histogram(
    "forebay_uploader_bytes_per_object", "Size of committed objects.", BYTES
)
msgs_per_object: Final = Histogram(
    "forebay_uploader_msgs_per_object", "Messages in committed objects.", MESSAGES
)
stream_chunk_bytes: Final = Histogram(
    "forebay_uploader_stream_chunk_bytes", "Size of the chunks that make up objects.", BYTES
)
failures: Final = Counter(
    "forebay_uploader_failures_total", "Cycles that ended with an error, by kind.", ["kind"]
)
corrupt_frames: Final = Counter(
    "forebay_uploader_corrupt_frames_total", "Damaged frames that stopped an upload."
)
descriptors_corrected: Final = Counter(
    "forebay_uploader_descriptors_corrected_total",
    "Descriptors that got a right index, or a hash or etag, after their object was read whole.",
    ["what"],
)
verified: Final = Counter(
    "forebay_uploader_objects_verified_total",
    "Objects that were read back, by outcome.",
    ["outcome"],
)
