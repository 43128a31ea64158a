"""Every hard limit of the system, in one place; settings choose values within them.

A limit protects memory or a parser. Data over a limit is refused with an error, never truncated.
The asserts at the end check relations between limits that the code relies on.
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

OFFSET_MAX: Final = 2**63 - 1
"""Offsets are u64 on disk, but must fit the signed longs of SQL and Spark."""

FRAME_PAYLOAD_BYTES_MIN: Final = 10
"""The smallest possible message (bincode 2, all fields empty). So zeroed bytes are not a frame."""

FRAME_PAYLOAD_BYTES_MAX: Final = 64 * MIB
"""A header with a larger length is damaged. Danube refuses messages over 10 MiB by default."""

MESSAGE_BYTES_MAX: Final = 32 * MIB
"""The maximum size of one encoded message with all its fields."""

ATTRIBUTES_MAX: Final = 1024
TOPIC_NAME_BYTES_MAX: Final = 255
"""The limit for each part of a topic's name. Each part is a directory name."""

FILE_NAME_BYTES_MAX: Final = 128
"""The limit for `file_name`. A number and an extension are added; file systems allow 255 bytes."""

FRAME_BATCH_BYTES_MAX: Final = 256 * KIB
"""The largest batch of single appends; the cache drops whole batches."""

QUEUE_BATCHES_MAX: Final = 256
"""This many queued batches start a commit, because each new batch copies the whole list."""

BATCH_MERGED_BYTES: Final = 64 * KIB
"""Smaller batches of frames are joined up to this size before they are written."""

ENCODE_BYTES_MAX: Final = 1 * MIB
"""The most that one call of the batch encoder returns, unless a single frame is larger."""

READ_CHUNK_BYTES: Final = 1 * MIB
"""The bytes that one read of a segment fetches."""


SEGMENT_INDEX_BYTES: Final = 64 * KIB
"""A segment index has at most one entry for this many bytes."""

SEGMENT_INDEX_ENTRIES_MAX: Final = 1_000_000

SEGMENT_INDEXES_MAX: Final = 64
"""Indexes of sealed segments that one log keeps in memory."""

CHECKPOINT_BYTES_MAX: Final = 64 * MIB
READER_PIN_SECONDS_MAX: Final = 600.0
"""A reader that has not moved for this long no longer protects its segment from retention."""

INTERVAL_SECONDS_MAX: Final = 10 * 366 * 24 * 3600
"""The longest interval of a setting: ten years. Python's locks cannot wait for over 292 years."""

WRITER_THREADS: Final = 4
WRITER_THREADS_MAX: Final = 256

GATHER_SECONDS_MAX: Final = 0.002
"""The longest that a group commit is delayed for producers that are about to join it."""
GATHER_PASSED_MAX: Final = 64
"""If delays were in vain, only one in so many commits is delayed."""

OBJECT_INDEX_MESSAGES: Final = 1000
OBJECT_INDEX_BYTES: Final = 1 * MIB
"""An object's index has an entry after this many messages or bytes, whichever comes first."""

OBJECT_INDEX_ENTRIES_MAX: Final = 4096
"""With more entries, every second one is removed and the interval doubles."""

BLOCK_BYTES: Final = 1 * MIB
"""The most bytes of the frames in one block of a compressed object, unless it is a single frame."""

DESCRIPTOR_INDEX_ENTRIES: Final = 64
"""The most index entries of a descriptor in the catalog; the sidecar has the whole index."""

DESCRIPTOR_BYTES_MAX: Final = 512 * KIB
"""The maximum size of the JSON. etcd refuses requests over 1.5 MiB."""

LEDGER_FIELDS_MAX: Final = 16
LEDGER_TEXT_BYTES_MAX: Final = 512
"""What a descriptor may say about a Pulsar ledger."""

LEDGER_ENTRY_BYTES_MAX: Final = 160 * MIB
"""The largest entry of a Pulsar ledger: the largest frame with its attributes written twice, and
room. Pulsar's own limit is 5 MiB unless a broker is configured otherwise."""

LEDGER_BLOCK_BYTES_MIN: Final = 1 * KIB
LEDGER_BLOCK_BYTES_MAX: Final = 2**31 - 1
"""The size of a block is a signed 32-bit number in Pulsar. Stores in the cloud want parts of
`PART_BYTES_MIN` at least."""

LEDGER_BLOCKS_MAX: Final = 100_000
"""The most blocks in the index of a ledger. No store allows more than 50,000 parts."""

LEDGER_METADATA_BYTES_MAX: Final = 1 * MIB
"""The maximum size of what BookKeeper knows about a ledger."""

LEDGER_INDEX_BYTES_MAX: Final = 4 * MIB
"""The maximum size of an index object: the metadata, and 20 bytes for each block."""

PROTOBUF_FIELDS_MAX: Final = 100_000
"""The most fields of one protobuf message that is decoded into objects."""

PULSAR_MESSAGE_BYTES_MAX: Final = 256 * MIB
"""The largest message of Pulsar, decompressed or put together from chunks."""

PULSAR_BATCH_MESSAGES_MAX: Final = 1_000_000
"""The most messages of one batch. Producers send 1,000 by default."""

PULSAR_CHUNKS_MAX: Final = 100_000
"""The most chunks of one message."""

PULSAR_CHUNKS_BYTES_MAX: Final = 512 * MIB
PULSAR_CHUNKED_MESSAGES_MAX: Final = 1_000
"""What a reader keeps of messages whose chunks are not all there yet. Over that, it gives up the
oldest one."""

STREAM_LEDGERS_MAX: Final = 1_000_000
"""The most ledgers that a stream over a bucket of Pulsar remembers to have read."""

CATALOG_VALUE_BYTES_MAX: Final = 1 * MIB
CATALOG_PAGE: Final = 256
"""The most entries that one range query of the catalog returns: about 1 MiB of descriptors."""

CATALOG_OPERATIONS_MAX: Final = 120
"""Operations in one transaction; etcd allows 128."""

CURSOR_BYTES_MAX: Final = 32 * KIB
"""The maximum size of a cursor in the catalog. Beyond it, the highest ranges are left out."""

CURSOR_NAME_BYTES_MAX: Final = 260
"""`sub/` and the name of a subscription."""

SUBSCRIPTION_NAME_BYTES_MAX: Final = 256
SUBSCRIPTIONS_MAX: Final = 10_000
"""The most subscriptions of one topic."""

SUBSCRIPTION_BYTES_MAX: Final = 256 * KIB
SUBSCRIPTION_CONSUMERS_MAX: Final = 1000
"""What the row of a subscription has at most. Beyond both, the consumers that were seen longest ago
are left out."""

SUBSCRIPTIONS_PAGE: Final = 16
"""The most subscriptions that one range query of the catalog returns: at most 4 MiB."""

CONSUMER_NAME_BYTES_MAX: Final = 256
CONSUMER_FILTERS_MAX: Final = 64
CONSUMER_FILTER_BYTES_MAX: Final = 256

SCHEMA_SUBJECT_BYTES_MAX: Final = 256
SCHEMA_BYTES_MAX: Final = 256 * KIB
"""The largest definition of a schema."""
SCHEMA_DEPTH_MAX: Final = 64
"""How deep the definition of a schema, and a payload that is checked, may be nested."""
SCHEMA_NODES_MAX: Final = 20_000
"""The most parts of a schema: types, fields, subschemas."""
SCHEMA_STEPS_MAX: Final = 200_000
"""Steps of a comparison of two schemas: one or two seconds."""
PAYLOAD_STEPS: Final = 10_000
PAYLOAD_STEPS_PER_BYTE: Final = 4
"""Steps of a check of a payload in Avro. An array of nothings has items without bytes."""
SCHEMA_VERSIONS_MAX: Final = 1000
"""The most versions of a subject at a time; delete old ones."""
SCHEMA_VERSION_MAX: Final = 2**32 - 1
SCHEMA_TEXT_BYTES_MAX: Final = 4 * KIB
"""The description of a version; its creator and each tag have at most 256 bytes."""
SCHEMA_NAME_BYTES_MAX: Final = 256
SCHEMA_TAGS_MAX: Final = 32
SCHEMA_ROW_BYTES_MAX: Final = 512 * KIB
"""A row of a schema in the catalog."""
SCHEMAS_PAGE: Final = 16
"""The most rows of schemas that one range query of the catalog returns."""
SCHEMAS_CACHED_MAX: Final = 256
"""Compiled schemas that a process keeps."""
PAYLOAD_CHECK_BYTES_MAX: Final = 1 * MIB
"""The largest payload that is checked against a schema."""
PAYLOAD_CHECK_COST_MAX: Final = 64 * MIB
"""Bytes of a JSON payload times how often its schema looks at one place at most."""
SCHEMA_COMPILE_SECONDS: Final = 10.0
"""How long the compiler of Protobuf may take."""

JOB_STATE_BYTES_MAX: Final = 64 * KIB
"""The maximum size of a state that a job stores for a topic in the catalog."""

IDEMPOTENT_PRODUCERS_MAX: Final = 1000
"""The most idempotent producers of a topic whose numbers are known; those unused longest are
forgotten."""

PRODUCER_NAME_BYTES_MAX: Final = 256
PRODUCER_RUNS_MAX: Final = 64
"""For how many of the last batches of an idempotent producer the offsets are known."""

PRODUCERS_ROW_MESSAGES: Final = 100_000
PRODUCERS_ROW_BYTES: Final = 64 * MIB
"""After as many messages of the topic, or bytes of idempotent producers, the catalog gets their
numbers: what has to be read of the log after a crash."""

STREAM_BATCH_MESSAGES_MAX: Final = 100_000
STREAM_BATCH_BYTES_MAX: Final = 4 * MIB
"""The largest request of a stream, encoded: gRPC's own limit by default."""

STREAM_IN_FLIGHT_BYTES: Final = 16 * MIB
"""Bytes of a producer's stream that are not acknowledged; the next request is read after that."""

STREAMS_MAX: Final = 1000
"""Streams of Forebay's own clients at the same time; more are refused."""

STREAM_FETCH_BYTES: Final = 1 * MIB
STREAM_FETCH_BYTES_MAX: Final = 16 * MIB
"""The bytes of frames in a response of a stream, by default and at most."""

TOPIC_SETTINGS_BYTES_MAX: Final = 64 * KIB
"""The maximum size of the settings that a topic has of its own, in the catalog."""

OFFLOAD_POLICIES_BYTES_MAX: Final = 32 * KIB
"""The maximum size of the offload policies of a namespace in the catalog, or of a topic in its
settings."""

OFFLOAD_POLICY_TEXT_BYTES_MAX: Final = 1024
OFFLOAD_POLICY_FIELDS_MAX: Final = 64
"""The most fields that are not Pulsar's own in offload policies."""

JOB_STATE_NAME_BYTES_MAX: Final = 256
"""Percent-encoded, a name may be three times as long, within the 2 KiB of a catalog key."""

PARTITIONS_MAX: Final = 1000
"""The most partitions that a topic is created with. Each is a topic with a log of its own."""

LOST_RANGES_MAX: Final = 10_000
"""The maximum per topic. A failover to a machine without the local log adds one range."""

OFFSETS_RESERVED: Final = 1_000_000
"""Offsets that the owner of a topic reserves at a time."""

LOG_DISTANCE: Final = 2**40
"""How far a log may run past the last object or begin marker in the store. A restore without log
and catalog continues this far after them, so it assigns no offset a second time (rule R9)."""

SUBSCRIPTION_KEPT_MAX: Final = 1_000
"""The most messages of a key-shared subscription that are read before anybody may take them."""
SUBSCRIPTION_WAITING_MAX: Final = 10_000
"""A subscription with this many messages that wait for redelivery gets no new ones."""
NACK_DELAY_MS_MAX: Final = 7 * 24 * 3600 * 1000
"""The longest delay of a negative acknowledgement: a week."""

KEY_FILTERS_MAX: Final = 64
"""The most key filters of one consumer."""
KEY_FILTER_CHARACTERS_MAX: Final = 256
KEY_CHARACTERS_MAX: Final = 1_024
"""Of a longer key, a subscription keeps a hash; no key filter but `*` matches it."""
KEY_SLOTS: Final = 16_384
"""Keys are assigned to consumers by slots: so many keys can be assigned with little memory."""
KEYS_ASSIGNED_MAX: Final = 10_000
"""The most keys whose consumer a subscription remembers; others are computed again."""

IMPORT_RUNS_MAX: Final = 100_000
"""The most places in one file of Danube at which its frames are out of order."""

READ_AHEAD_CHUNKS: Final = 6
"""The most chunks that one reader of objects fetches ahead of the current one."""

CLOCK_JUMP_SECONDS: Final = 3600.0
CLOCK_HOLD_SECONDS: Final = 24 * 3600.0
"""After a jump of the time of day by more than the first, remote retention deletes nothing by age
for the second: time to notice that the clock is wrong."""

CLOSE_SECONDS_MAX: Final = 5.0
"""How long closing a store waits for running requests to the object store."""

CLOSE_THREADS: Final = 16
"""The most threads that close the topics of a store side by side."""

FETCH_THREADS: Final = 8
UPLOAD_THREADS: Final = 2
BACKGROUND_THREADS_MAX: Final = 64
OBJECT_KEY_BYTES_MAX: Final = 1024
PART_BYTES_MIN: Final = 5 * MIB
"""S3's minimum for the parts of a multipart upload, except the last."""
OBJECT_PARTS_MAX: Final = 9_900
"""The most parts of an object. S3 and GCS allow 10,000; the rest is for bytes that a compression
adds to what it cannot make smaller."""
OBJECT_BYTES_MAX: Final = 5 * 1024 * GIB
"""The largest object of S3 and GCS."""

CLIENT_NAME_BYTES_MAX: Final = 256
"""The limit for the names of producers, consumers and subscriptions."""
TOPIC_NAMES_KNOWN_MAX: Final = 4096
"""Topic names that the broker remembers to be valid."""
PRODUCERS_MAX: Final = 100_000
"""Producers that the broker remembers; those used longest ago are forgotten, and known again by
their next message."""
OUTBOX_BYTES_MAX: Final = 256 * KIB
"""What waits to be written to one consumer, besides one message of any size."""
OUTBOXES_BYTES_MAX: Final = 256 * MIB
"""What waits to be written to all consumers. gRPC copies what it sends, so they take up to
three times that."""
REDELIVERIES_AT_ONCE: Final = 64
"""Messages that a subscription reads again before it looks at other work."""
ACKS_AHEAD_MAX: Final = 100_000
"""How far after the last message that a subscription read it takes acknowledgements: of messages
that were delivered before the server was started again."""
ACKS_HELD_MAX: Final = 10_000
"""Acknowledgements that wait while a subscription is being moved; of others, the messages are
delivered again if it is not moved."""

FEED_BYTES_MAX: Final = 32 * MIB
"""What the subscriptions of all topics keep of what they read, for each other and redeliveries."""
FEED_CHUNKS_MAX: Final = 32
"""How many chunks of one topic these are at most."""
FEED_READERS_MAX: Final = 4
"""Readers of a topic that stay open, for subscriptions at different places."""

LAG_OBJECTS_MAX: Final = 4 * CATALOG_PAGE
"""Objects whose sizes are added up for the lag of a subscription; more are estimated from these."""

FOLLOW_SECONDS: Final = 5.0
"""How often an owner checks how far the pipeline has uploaded its topics."""
TASK_BYTES: Final = 128 * MIB
"""The target size of a Spark task: small ones are mostly overhead, large ones costly to retry."""
WAVE_TASKS_PER_SLOT: Final = 8
"""Tasks for each executor slot in one wave of a job; results are committed after each wave."""

assert FRAME_PAYLOAD_BYTES_MIN < MESSAGE_BYTES_MAX < FRAME_PAYLOAD_BYTES_MAX < 2**32
assert FRAME_BATCH_BYTES_MAX <= ENCODE_BYTES_MAX <= READ_CHUNK_BYTES
assert SEGMENT_INDEX_BYTES <= ENCODE_BYTES_MAX
assert (
    48 * OBJECT_INDEX_ENTRIES_MAX + 6 * LEDGER_FIELDS_MAX * 2 * LEDGER_TEXT_BYTES_MAX + 4 * KIB
    <= DESCRIPTOR_BYTES_MAX
    <= CATALOG_VALUE_BYTES_MAX
)
assert OFFLOAD_POLICIES_BYTES_MAX < TOPIC_SETTINGS_BYTES_MAX <= CATALOG_VALUE_BYTES_MAX
assert 2 * FRAME_PAYLOAD_BYTES_MAX < LEDGER_ENTRY_BYTES_MAX < LEDGER_BLOCK_BYTES_MAX
assert PULSAR_MESSAGE_BYTES_MAX < PULSAR_CHUNKS_BYTES_MAX
assert LEDGER_METADATA_BYTES_MAX + 20 * LEDGER_BLOCKS_MAX + 32 <= LEDGER_INDEX_BYTES_MAX
assert IDEMPOTENT_PRODUCERS_MAX * 61 + 256 <= JOB_STATE_BYTES_MAX
assert STREAM_BATCH_BYTES_MAX < MESSAGE_BYTES_MAX
assert STREAM_BATCH_BYTES_MAX <= STREAM_IN_FLIGHT_BYTES
assert DESCRIPTOR_INDEX_ENTRIES <= OBJECT_INDEX_ENTRIES_MAX
assert CATALOG_PAGE * (48 * DESCRIPTOR_INDEX_ENTRIES + KIB) <= 2 * CATALOG_VALUE_BYTES_MAX
assert SUBSCRIPTION_NAME_BYTES_MAX + len("sub/") <= CURSOR_NAME_BYTES_MAX
assert (
    6 * (CONSUMER_NAME_BYTES_MAX + CONSUMER_FILTERS_MAX * (CONSUMER_FILTER_BYTES_MAX + 1))
    + 6 * SUBSCRIPTION_NAME_BYTES_MAX
    + KIB
    <= SUBSCRIPTION_BYTES_MAX
    <= CATALOG_VALUE_BYTES_MAX
)  # one consumer always fits; JSON makes at most 6 bytes of one
assert (
    SCHEMA_BYTES_MAX * 4 // 3
    + 6 * (SCHEMA_TEXT_BYTES_MAX + (SCHEMA_TAGS_MAX + 2) * SCHEMA_NAME_BYTES_MAX)
    + KIB
    <= SCHEMA_ROW_BYTES_MAX
    <= CATALOG_VALUE_BYTES_MAX
)  # in base64, and JSON makes at most 6 bytes of one
assert SCHEMA_VERSIONS_MAX * 128 + 6 * SCHEMA_SUBJECT_BYTES_MAX + KIB <= SCHEMA_ROW_BYTES_MAX
