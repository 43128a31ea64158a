/*
 * Pulsar entries as columns, without Python: the same as `entry_columns` in
 * `src/forebay/format/pulsar/columns.py`.
 *
 *   entry  [0x0e02, u32, BrokerEntryMetadata] [0x0e01, u32 crc32c] [u32, MessageMetadata] payload
 *
 * An entry is plain if its payload is the value of one message. Batches, chunks, compressed and
 * encrypted payloads, markers, and whatever is damaged are not: Python decodes these, and says what
 * is wrong with them.
 */
#ifndef FOREBAY_PULSAR_COLUMNS_H
#define FOREBAY_PULSAR_COLUMNS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum fb_entry_column {
    FB_ENTRY_FLAGS,
    FB_ENTRY_PAYLOAD_POSITION,
    FB_ENTRY_PAYLOAD_LENGTH, /* -1 for a null value */
    FB_ENTRY_KEY_POSITION,
    FB_ENTRY_KEY_LENGTH, /* -1 without one, as the next ones */
    FB_ENTRY_ORDERING_POSITION,
    FB_ENTRY_ORDERING_LENGTH,
    FB_ENTRY_PRODUCER_POSITION,
    FB_ENTRY_PRODUCER_LENGTH,
    FB_ENTRY_SCHEMA_POSITION,
    FB_ENTRY_SCHEMA_LENGTH,
    FB_ENTRY_PUBLISH_TIME,
    FB_ENTRY_EVENT_TIME, /* 0 without one */
    FB_ENTRY_SEQUENCE_ID,
    FB_ENTRY_INDEX, /* the broker's; -1 without one */
    FB_ENTRY_PROPERTIES,
    FB_ENTRY_COLUMNS
};

#define FB_ENTRY_PLAIN 1
#define FB_ENTRY_TRANSACTIONAL 2

/* Positions and lengths of names and values, four numbers for a property, in the order of rows. */
typedef struct {
    int64_t *numbers;
    size_t count;
    size_t capacity;
} fb_properties;

enum fb_entry_stop { FB_ENTRIES_ALL, FB_ENTRIES_OUTSIDE, FB_ENTRIES_MEMORY };

/*
 * Fills FB_ENTRY_COLUMNS columns of `rows` numbers, one after another, for the entries at u64
 * `positions` with u32 `lengths`, both unaligned. A row that is not plain has zeros everywhere.
 */
enum fb_entry_stop fb_entry_columns(const uint8_t *data, size_t bytes, const uint8_t *positions,
                                    const uint8_t *lengths, size_t rows, int64_t *columns,
                                    fb_properties *properties, size_t *done);

/*
 * Fills the same columns for the messages of batches: the payloads of entries, decompressed, at u64
 * `positions` with u32 `lengths`, with u32 `counts` messages each, all unaligned. `columns` has room
 * for `rows` rows, the sum of the counts. FB_ENTRY_PUBLISH_TIME is the number of the entry,
 * FB_ENTRY_INDEX that of the message in its batch, and the columns of producer and schema are zero.
 * Returns FB_ENTRIES_OUTSIDE for anything that Python has to decode; `*done` is then meaningless.
 */
#define FB_ENTRY_HAS_EVENT_TIME 4
#define FB_ENTRY_HAS_SEQUENCE_ID 8
/* The size of the metadata, and the size of the payload in it. */
#define FB_BATCH_MESSAGE_BYTES_MIN 6

enum fb_entry_stop fb_batch_columns(const uint8_t *data, size_t bytes, const uint8_t *positions,
                                    const uint8_t *lengths, const uint8_t *counts, size_t entries,
                                    size_t rows, int64_t *columns, fb_properties *properties,
                                    size_t *done);

#endif
