"""Every hard limit of the system, in one place; settings choose within them.

The asserts at the end are the relations that the code relies on. A limit guards memory or
parsing: data over it is refused with an error, never truncated.
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

OFFSET_MAX: Final = 2**63 - 1
"""Offsets are u64 on disk; the sign bit stays free so that they fit SQL's and Spark's longs."""

FRAME_PAYLOAD_BYTES_MIN: Final = 10
"""The smallest message there is (bincode 2, all fields empty). Zeroed bytes are no frame."""

FRAME_PAYLOAD_BYTES_MAX: Final = 64 * MIB
"""A header that claims more is damage. Danube refuses messages over 10 MiB by default."""

MESSAGE_BYTES_MAX: Final = 32 * MIB
"""One encoded message, all its fields together."""

ATTRIBUTES_MAX: Final = 1024
TOPIC_NAME_BYTES_MAX: Final = 255
"""Each of the two parts of a topic's name is a directory name."""

FILE_NAME_BYTES_MAX: Final = 128
"""Of `file_name`. A number and an ending are added to it, and file systems stop at 255 bytes."""

FRAME_BATCH_BYTES_MAX: Final = 256 * KIB
"""The largest batch in which frames are cached: what one eviction frees."""

QUEUE_BATCHES_MAX: Final = 256
"""So many batches in the queue are committed, however small: each new one costs a look at all."""

ENCODE_BYTES_MAX: Final = 1 * MIB
"""The largest piece that one call of the batch encoder makes; frames are never split."""

READ_CHUNK_BYTES: Final = 1 * MIB
"""How much of a segment one read fetches."""


SEGMENT_INDEX_BYTES: Final = 64 * KIB
"""At most one index entry in so many bytes of a segment."""

SEGMENT_INDEX_ENTRIES_MAX: Final = 1_000_000

SEGMENT_INDEXES_MAX: Final = 64
"""Indexes of sealed segments that one log keeps in memory."""

CHECKPOINT_BYTES_MAX: Final = 64 * MIB
READER_PIN_SECONDS_MAX: Final = 600.0
"""A reader that has not moved for so long no longer keeps its segment from retention."""

INTERVAL_SECONDS_MAX: Final = 10 * 366 * 24 * 3600
"""The longest time that a setting asks to wait for; threads refuse to wait for 293 years."""

WRITER_THREADS: Final = 4
WRITER_THREADS_MAX: Final = 256

GATHER_SECONDS_MAX: Final = 0.002
"""The longest a group commit is held back for producers that are about to join it."""

OBJECT_INDEX_MESSAGES: Final = 1000
OBJECT_INDEX_BYTES: Final = 1 * MIB
"""A sparse index has an entry after so many messages or bytes, whichever comes first."""

OBJECT_INDEX_ENTRIES_MAX: Final = 4096
"""More are thinned: every second one goes, and the interval doubles."""

DESCRIPTOR_BYTES_MAX: Final = 512 * KIB
"""Of JSON. etcd refuses requests over 1.5 MiB."""

CATALOG_VALUE_BYTES_MAX: Final = 1 * MIB
CATALOG_PAGE: Final = 256
"""Entries that one range query of the catalog returns at most: 256 descriptors of 4 KiB."""

CATALOG_OPERATIONS_MAX: Final = 100
"""In one transaction; etcd allows 128."""

JOB_STATE_BYTES_MAX: Final = 64 * KIB
"""Of what a job remembers of a topic in the catalog."""

JOB_STATE_NAME_BYTES_MAX: Final = 256
"""Percent-encoded it may be three times as long, within the 2 KiB of a catalog's key."""

LOST_RANGES_MAX: Final = 10_000
"""That one topic can have; each is one failover to a machine without the local log."""

OFFSETS_RESERVED: Final = 1_000_000
"""Offsets that the owner of a topic reserves at a time."""

READ_AHEAD_CHUNKS: Final = 6
"""Fetched chunks that one reader of objects holds at most, the current one aside."""

CLOSE_SECONDS_MAX: Final = 5.0
"""How long closing a topic waits for a request that is under way."""

FETCH_THREADS: Final = 8
UPLOAD_THREADS: Final = 2
BACKGROUND_THREADS_MAX: Final = 64
OBJECT_KEY_BYTES_MAX: Final = 1024
PART_BYTES_MIN: Final = 5 * MIB
"""S3 takes no smaller part of a multipart upload, but for the last."""

FOLLOW_SECONDS: Final = 5.0
"""How often an owner looks how far the pipeline has uploaded its topics."""
TASK_BYTES: Final = 128 * MIB
"""Of one Spark task, about: less is mostly Spark's own work, more is much to do again."""
WAVE_TASKS_PER_SLOT: Final = 8
"""Spark tasks of one wave of a job: what is done is committed after each wave."""

assert FRAME_PAYLOAD_BYTES_MIN < MESSAGE_BYTES_MAX < FRAME_PAYLOAD_BYTES_MAX < 2**32
assert FRAME_BATCH_BYTES_MAX <= ENCODE_BYTES_MAX <= READ_CHUNK_BYTES
assert SEGMENT_INDEX_BYTES <= ENCODE_BYTES_MAX
assert 48 * OBJECT_INDEX_ENTRIES_MAX + 4 * KIB <= DESCRIPTOR_BYTES_MAX <= CATALOG_VALUE_BYTES_MAX
