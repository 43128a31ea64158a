/*
 * The frame codec in C11, without Python: the same as `src/forebay/format/pure.py` and `layout.py`.
 *
 *   frame    [u64 offset][u32 length][u32 crc][message], little-endian, crc over the message
 *   message  docs/formats/message.md, two flavours of integers
 *
 * Every byte that is parsed is untrusted: a length is compared with the bytes that remain before it
 * is added to anything. The only state are the CRC tables, which `fb_init` builds.
 *
 * What a caller gets wrong: call `fb_init` before anything else. It is thread-safe and idempotent.
 */
#ifndef FOREBAY_CODEC_H
#define FOREBAY_CODEC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The numbers of src/forebay/limits.py; tests/test_codec_twins.py checks that they are equal. */
#define FB_OFFSET_MAX ((uint64_t)INT64_MAX)
#define FB_FRAME_PAYLOAD_BYTES_MIN 10u
#define FB_FRAME_PAYLOAD_BYTES_MAX (64u * 1024 * 1024)
#define FB_MESSAGE_BYTES_MAX (32u * 1024 * 1024)
#define FB_ATTRIBUTES_MAX 1024

#define FB_HEADER_BYTES 16u

/* Little-endian numbers; on little-endian machines compilers turn each into one move. */

static inline uint32_t fb_load_u32(const uint8_t *at) {
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static inline uint64_t fb_load_u64(const uint8_t *at) {
    return (uint64_t)fb_load_u32(at) | (uint64_t)fb_load_u32(at + 4) << 32;
}

static inline void fb_store_u32(uint8_t *at, uint32_t value) {
    at[0] = (uint8_t)value;
    at[1] = (uint8_t)(value >> 8);
    at[2] = (uint8_t)(value >> 16);
    at[3] = (uint8_t)(value >> 24);
}

static inline void fb_store_u64(uint8_t *at, uint64_t value) {
    fb_store_u32(at, (uint32_t)value);
    fb_store_u32(at + 4, (uint32_t)(value >> 32));
}

void fb_init(void);

/* CRC-32/ISO-HDLC, the same as zlib's. */
uint32_t fb_crc32(const uint8_t *data, size_t bytes);

/* The same with tables only, for processors without carry-less multiplication. */
uint32_t fb_crc32_tables(const uint8_t *data, size_t bytes);

/* ---- scan ---- */

enum fb_end { FB_COMPLETE, FB_TORN, FB_BAD_LENGTH, FB_BAD_OFFSET, FB_BAD_CRC };

/* An offset that may be unknown; `value` is meaningful only if `known`. */
typedef struct {
    bool known;
    uint64_t value;
} fb_offset;

/* One row for each frame; grows as needed. Zero it before use; free it with `fb_frames_free`. */
typedef struct {
    uint64_t *offsets;
    uint64_t *positions;
    uint32_t *lengths;
    size_t rows;
    size_t capacity;
} fb_frames;

typedef struct {
    size_t safe_length;
    enum fb_end end;
    fb_offset offset;
} fb_scan_end;

/*
 * Scans the frames of data[start:bytes], start <= bytes, and appends a row for each whole one.
 * Returns false only if memory ran out.
 */
bool fb_scan(const uint8_t *data, size_t bytes, size_t start, fb_offset expected, bool consecutive,
             fb_frames *frames, fb_scan_end *result);

/* Adds a row; returns false only if memory ran out. */
bool fb_frames_append(fb_frames *frames, uint64_t offset, size_t position, uint32_t length);

void fb_frames_free(fb_frames *frames);

/* ---- columns ---- */

enum fb_flavour { FB_FIXED = 1, FB_VARINT = 2 };

typedef struct {
    size_t position;
    size_t length;
} fb_span;

/* Which of the later fields a message has. */
enum fb_later { FB_NO_LATER, FB_SCHEMA, FB_SCHEMA_AND_KEY };

/* The parts of a message. What it does not have is not set. */
typedef struct {
    enum fb_flavour flavour;
    uint64_t request_id;
    uint64_t producer_id;
    fb_span topic_name;
    fb_span broker_addr;
    uint64_t topic_offset;
    fb_span payload;
    uint64_t publish_time;
    fb_span producer_name;
    bool has_subscription;
    fb_span subscription_name;
    enum fb_later later;
    bool has_schema_id;
    uint64_t schema_id;
    bool has_schema_version;
    uint64_t schema_version;
    fb_span attributes; /* the pairs, without their count */
    uint64_t attribute_count;
    bool has_routing_key;
    fb_span routing_key;
} fb_layout;

/* Locates the parts of the message data[position:position + length], which must be inside the
   buffer; returns false if it is not a message. */
bool fb_locate(const uint8_t *data, size_t position, size_t length, fb_layout *layout);

/* Output buffers with one item for each row, stored unaligned and in native byte order. */
typedef struct {
    uint8_t *publish_times;     /* u64 */
    uint8_t *payload_positions; /* i64, as are the next six */
    uint8_t *payload_lengths;
    uint8_t *key_positions;
    uint8_t *key_lengths; /* -1 without a routing key */
    uint8_t *attribute_positions;
    uint8_t *attribute_lengths;
    uint8_t *attribute_counts;
    uint8_t *flavours; /* u8 */
} fb_columns;

enum fb_stop { FB_ALL_ROWS, FB_NO_MESSAGE, FB_OUT_OF_RANGE, FB_TOO_LARGE };

/*
 * Fills the columns for the messages at u64 `positions` with u32 `lengths`, both unaligned.
 * Returns why it stopped. `*done` is the number of filled rows, and so the index of the message
 * that stopped it.
 */
enum fb_stop fb_locate_rows(const uint8_t *data, size_t bytes, const uint8_t *positions,
                            const uint8_t *lengths, size_t rows, const fb_columns *columns,
                            size_t *done);

/* ---- survey ---- */

/* What is known about messages without copying anything of them. */
typedef struct {
    uint64_t publish_time; /* the highest; 0 if there is no message */
    size_t rows;           /* those that are messages, up to the first that is none */
    size_t foreign;        /* the first of them with another topic name; `rows` if there is none */
} fb_survey;

/*
 * Looks at the messages at u64 `positions` with u32 `lengths`, both unaligned, up to the first that
 * is not a message. An empty topic name counts as `topic`. Returns why it stopped.
 */
enum fb_stop fb_survey_rows(const uint8_t *data, size_t bytes, const uint8_t *positions,
                            const uint8_t *lengths, size_t rows, const uint8_t *topic,
                            size_t topic_bytes, fb_survey *survey);

/* ---- find ---- */

typedef struct {
    uint64_t first; /* only offsets first..last count */
    uint64_t last;
    uint64_t total; /* where the file ends, counted from data[0]; at least `bytes` */
    size_t stop;    /* headers that begin in data[:stop] are tried, stop <= bytes */
    size_t limit;   /* stop after so many frames; 0 for no limit */
    bool messages_only; /* only frames whose message repeats the frame's offset count */
} fb_wanted;

/*
 * Tries every position before `stop` at which a header could begin, and appends a row for each
 * whole valid frame. They may overlap. `*resume` is where it stopped: at `stop`, after the frame
 * that reached the limit, or at a plausible header whose frame ends after `bytes` and not after
 * `total`. Returns false only if memory ran out.
 *
 * The work is linear in `bytes`, whatever lengths the headers claim: the CRC of a frame is
 * computed from two CRCs of prefixes of the data, not from its bytes.
 */
bool fb_find(const uint8_t *data, size_t bytes, const fb_wanted *wanted, fb_frames *found,
             size_t *resume);

/* ---- gather ---- */

/*
 * Computes the sum of the i64 `lengths` that are not negative, and the number of negative ones.
 * Both columns are unaligned and in native byte order. Stops at a span that is not inside the
 * buffer of `bytes`, or once the sum is over FB_GATHER_BYTES_MAX; `*done` is the index of that row.
 */
#define FB_GATHER_BYTES_MAX ((uint64_t)INT32_MAX)

enum fb_stop fb_gather_size(size_t bytes, const uint8_t *positions, const uint8_t *lengths,
                            size_t rows, uint64_t *total, size_t *nulls, size_t *done);

typedef struct {
    uint8_t *data;
    size_t bytes;
    uint8_t *offsets;  /* rows + 1 little-endian i32 */
    uint8_t *validity; /* a bit for each row, lowest first; may be NULL */
} fb_gathered;

/*
 * Copies the spans one after another, never past the end of either buffer. Returns false if the
 * columns are not those that `fb_gather_size` saw: another thread may have written to them.
 */
bool fb_gather(const uint8_t *data, size_t bytes, const uint8_t *positions, const uint8_t *lengths,
               size_t rows, const fb_gathered *out);

/* ---- encode ---- */

#define FB_REQUEST_BYTES 8u

typedef struct {
    const void *data; /* may be NULL if `bytes` is 0 */
    size_t bytes;
} fb_bytes;

typedef struct {
    fb_bytes head;   /* everything before the offset */
    bool numbered;   /* request_id replaces the first FB_REQUEST_BYTES of the head */
    uint64_t request_id;
    fb_bytes middle; /* everything between publish time and attributes */
    fb_bytes payload;
    uint64_t offset;
    uint64_t publish_time;
    const fb_bytes *texts; /* key, value, key, value ... */
    size_t attribute_count;
    bool has_routing_key;
    fb_bytes routing_key;
} fb_message;

/* The size of the encoded message without its frame header; UINT64_MAX if it overflows. The head of
   a numbered message must have FB_REQUEST_BYTES or more. */
uint64_t fb_message_bytes(const fb_message *message);

/* Writes FB_HEADER_BYTES + message_bytes bytes; pass what fb_message_bytes returned. */
void fb_encode(const fb_message *message, uint32_t message_bytes, uint8_t *out);

#endif
