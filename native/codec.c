#include "codec.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define FB_HAS_FOLDING 1
#include <immintrin.h>
#else
#define FB_HAS_FOLDING 0
#endif

#define FB_INLINE static inline __attribute__((always_inline))

FB_INLINE uint16_t load_u16(const uint8_t *at) { return (uint16_t)(at[0] | at[1] << 8); }

/* ---- CRC-32 by tables: tables[k][b] is the register after byte b and k zero bytes ---- */

static uint32_t tables[16][256];
static bool folding;

/* powers[k][d] is x^(8 * d * 512^k) mod P: what d * 512^k further bytes multiply a register by.
   Three digits reach past the largest payload. */
#define POWER_BITS 9
#define POWER_DIGITS 3
_Static_assert(FB_FRAME_PAYLOAD_BYTES_MAX >> POWER_BITS * POWER_DIGITS == 0, "too few digits");
static uint32_t powers[POWER_DIGITS][1 << POWER_BITS];

/* The product of two polynomials mod P; bits are reflected, so that x^0 is the highest. */
static uint32_t multiply(uint32_t left, uint32_t right) {
    uint32_t product = 0;
    for (; left != 0; left <<= 1) {
        product ^= right & (0u - (left >> 31));
        right = right >> 1 ^ (0xEDB88320u & (0u - (right & 1)));
    }
    return product;
}

static void build_powers(void) {
    uint32_t step = 1u << 23; /* x^8 */
    for (int digit = 0; digit < POWER_DIGITS; digit++) {
        powers[digit][0] = 1u << 31;
        for (int count = 1; count < 1 << POWER_BITS; count++)
            powers[digit][count] = multiply(powers[digit][count - 1], step);
        step = multiply(powers[digit][(1 << POWER_BITS) - 1], step);
    }
}

enum { UNBUILT, BUILDING, BUILT };
static atomic_int tables_state = UNBUILT;

static void build_tables(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (0xEDB88320u & (0u - (crc & 1)));
        tables[0][byte] = crc;
    }
    for (int zeros = 1; zeros < 16; zeros++)
        for (int byte = 0; byte < 256; byte++) {
            uint32_t crc = tables[zeros - 1][byte];
            tables[zeros][byte] = crc >> 8 ^ tables[0][crc & 0xFF];
        }
    build_powers();
#if FB_HAS_FOLDING
    __builtin_cpu_init();
    folding = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
#endif
}

void fb_init(void) {
    int state = UNBUILT;
    if (atomic_compare_exchange_strong(&tables_state, &state, BUILDING)) {
        build_tables();
        atomic_store(&tables_state, BUILT);
    }
    while (atomic_load(&tables_state) != BUILT) {
        /* another thread finishes within microseconds */
    }
}

FB_INLINE uint32_t four_bytes(uint32_t word, int zeros) {
    return tables[zeros + 3][word & 0xFF] ^ tables[zeros + 2][word >> 8 & 0xFF] ^
           tables[zeros + 1][word >> 16 & 0xFF] ^ tables[zeros][word >> 24];
}

/* The register after these bytes. */
static uint32_t advance(uint32_t crc, const uint8_t *data, size_t bytes) {
    for (; bytes >= 16; bytes -= 16, data += 16)
        crc = four_bytes(crc ^ fb_load_u32(data), 12) ^ four_bytes(fb_load_u32(data + 4), 8) ^
              four_bytes(fb_load_u32(data + 8), 4) ^ four_bytes(fb_load_u32(data + 12), 0);
    for (; bytes >= 4; bytes -= 4, data += 4)
        crc = four_bytes(crc ^ fb_load_u32(data), 0);
    for (; bytes > 0; bytes--, data++)
        crc = crc >> 8 ^ tables[0][(crc ^ *data) & 0xFF];
    return crc;
}

uint32_t fb_crc32_tables(const uint8_t *data, size_t bytes) {
    return ~advance(0xFFFFFFFFu, data, bytes);
}

/*
 * ---- CRC-32 by folding ----
 *
 * The CRC is the remainder of the message, as a polynomial, divided by P. A 128-bit lane D bits
 * before another one is multiplied by x^D mod P and added to it: two carry-less multiplications.
 * Bits are reflected, so the constant for x^n is reflect32(x^n mod P) << 1. The lane's low half
 * (the earlier bytes, higher powers) is multiplied by x^(D+32), the high half by x^(D-32).
 *
 * Zeros before a message do not change its remainder. So a message whose length is not a multiple
 * of 16 is padded in front, in a register, and no tail is left to process byte by byte. That makes
 * short messages fast.
 */
#if FB_HAS_FOLDING

#define FB_FOLDING static inline __attribute__((target("pclmul,sse4.1")))
#define FB_FOLDING_BYTES_MIN 32 /* measured: at 24 bytes the tables win, at 48 folding does */

/* x^(D+32), x^(D-32) for one, two, three and four lanes of 128 bits. */
static const uint64_t by_lanes[4][2] = {
    {0x1751997d0, 0x0ccaa009e},
    {0x0f1da05aa, 0x15a546366},
    {0x03db1ecdc, 0x174359406},
    {0x154442bd4, 0x1c6e41596},
};
static const uint64_t by_64_bits = 0x163cd6124;
static const uint64_t reciprocal[2] = {0x1db710641, 0x1f7011641}; /* P, x^64 / P */

/* Shuffle masks: the 16 bytes from 16 + k on move a register's bytes k places down, those from
   16 - k on move them k places up. */
static const uint8_t moves[48] = {
    0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80,
    0,    1,    2,    3,    4,    5,    6,    7,    8,    9,    10,   11,   12,   13,   14,   15,
    0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80,
};

FB_FOLDING __m128i lane_at(const void *at) { return _mm_loadu_si128((const __m128i *)at); }

FB_FOLDING __m128i fold(__m128i lane, __m128i powers) {
    return _mm_xor_si128(_mm_clmulepi64_si128(lane, powers, 0x00),
                         _mm_clmulepi64_si128(lane, powers, 0x11));
}

FB_FOLDING __m128i fold_into(__m128i lane, __m128i powers, const uint8_t *at) {
    return _mm_xor_si128(fold(lane, powers), lane_at(at));
}

/* Reduces 128 bits to 96, to 64, and with Barrett's method to the 32 bits of the remainder. */
FB_FOLDING uint32_t remainder_of(__m128i lane) {
    const __m128i low_32 = _mm_set_epi32(0, 0, 0, -1);
    __m128i x = _mm_xor_si128(_mm_clmulepi64_si128(lane, lane_at(by_lanes[0]), 0x10),
                              _mm_srli_si128(lane, 8));
    x = _mm_xor_si128(_mm_clmulepi64_si128(_mm_and_si128(x, low_32),
                                           _mm_cvtsi64_si128((long long)by_64_bits), 0x00),
                      _mm_srli_si128(x, 4));
    __m128i quotient =
        _mm_clmulepi64_si128(_mm_and_si128(x, low_32), lane_at(reciprocal), 0x10);
    __m128i multiple =
        _mm_clmulepi64_si128(_mm_and_si128(quotient, low_32), lane_at(reciprocal), 0x00);
    return (uint32_t)_mm_extract_epi32(_mm_xor_si128(x, multiple), 1);
}

/* `bytes` must be at least 16. */
__attribute__((target("pclmul,sse4.1"))) static uint32_t crc32_folding(const uint8_t *data,
                                                                       size_t bytes) {
    const __m128i one = lane_at(by_lanes[0]), two = lane_at(by_lanes[1]);
    const __m128i three = lane_at(by_lanes[2]), four = lane_at(by_lanes[3]);
    const uint8_t *end = data + bytes;
    size_t odd = bytes & 15;

    /* The register starts as ones, which is the same as inverting the first four bytes of the
       message. They reach into the first whole lane if fewer than four bytes precede it. */
    const __m128i ones = _mm_set_epi32(0, 0, 0, -1);
    __m128i front = _mm_shuffle_epi8(_mm_xor_si128(lane_at(data), ones), lane_at(moves + odd));
    __m128i rest_of_ones = _mm_shuffle_epi8(ones, lane_at(moves + 16 + odd));
    data += odd;
    __m128i first = _mm_xor_si128(fold_into(front, one, data), rest_of_ones);

    /* Whole lanes from here on: first as many as leave a multiple of four, then four at a time. */
    __m128i a = _mm_setzero_si128(), b = a, c = a, d;
    switch ((size_t)(end - data) / 16 & 3) {
    case 0:
        a = first, b = lane_at(data + 16), c = lane_at(data + 32), d = lane_at(data + 48);
        data += 64;
        break;
    case 3:
        b = first, c = lane_at(data + 16), d = lane_at(data + 32);
        data += 48;
        break;
    case 2:
        c = first, d = lane_at(data + 16);
        data += 32;
        break;
    default:
        d = first;
        data += 16;
    }
    for (; data < end; data += 64) {
        a = fold_into(a, four, data);
        b = fold_into(b, four, data + 16);
        c = fold_into(c, four, data + 32);
        d = fold_into(d, four, data + 48);
    }
    __m128i ab = _mm_xor_si128(fold(a, three), fold(b, two));
    return ~remainder_of(_mm_xor_si128(ab, _mm_xor_si128(fold(c, one), d)));
}

#endif

uint32_t fb_crc32(const uint8_t *data, size_t bytes) {
#if FB_HAS_FOLDING
    if (folding && bytes >= FB_FOLDING_BYTES_MIN)
        return crc32_folding(data, bytes);
#endif
    return fb_crc32_tables(data, bytes);
}

/* ---- scan ---- */

static bool grow_column(void *column, size_t item_bytes, size_t capacity) {
    void *items;
    memcpy(&items, column, sizeof items);
    if (capacity > SIZE_MAX / item_bytes)
        return false;
    void *grown = realloc(items, capacity * item_bytes);
    if (grown == NULL)
        return false;
    memcpy(column, &grown, sizeof grown);
    return true;
}

static bool grow_frames(fb_frames *frames, size_t capacity) {
    if (!grow_column(&frames->offsets, sizeof *frames->offsets, capacity) ||
        !grow_column(&frames->positions, sizeof *frames->positions, capacity) ||
        !grow_column(&frames->lengths, sizeof *frames->lengths, capacity))
        return false;
    frames->capacity = capacity;
    return true;
}

FB_INLINE bool append_frame(fb_frames *frames, uint64_t offset, size_t position, uint32_t length) {
    if (frames->rows == frames->capacity &&
        !grow_frames(frames, frames->capacity ? 2 * frames->capacity : 256))
        return false;
    frames->offsets[frames->rows] = offset;
    frames->positions[frames->rows] = position;
    frames->lengths[frames->rows] = length;
    frames->rows++;
    return true;
}

bool fb_frames_append(fb_frames *frames, uint64_t offset, size_t position, uint32_t length) {
    return append_frame(frames, offset, position, length);
}

void fb_frames_free(fb_frames *frames) {
    free(frames->offsets);
    free(frames->positions);
    free(frames->lengths);
    memset(frames, 0, sizeof *frames);
}

/* Checks the frame at `at`, of which `remaining` bytes are there. */
FB_INLINE enum fb_end check_frame(const uint8_t *at, size_t remaining, fb_offset expected,
                                  uint64_t offset, uint32_t length) {
    if (length < FB_FRAME_PAYLOAD_BYTES_MIN || length > FB_FRAME_PAYLOAD_BYTES_MAX)
        return FB_BAD_LENGTH;
    if (offset > FB_OFFSET_MAX || (expected.known && offset != expected.value))
        return FB_BAD_OFFSET;
    if (length > remaining - FB_HEADER_BYTES)
        return FB_TORN;
    if (fb_crc32(at + FB_HEADER_BYTES, length) != fb_load_u32(at + 12))
        return FB_BAD_CRC;
    return FB_COMPLETE;
}

bool fb_scan(const uint8_t *data, size_t bytes, size_t start, fb_offset expected, bool consecutive,
             fb_frames *frames, fb_scan_end *result) {
    size_t at = start;
    result->end = FB_COMPLETE;
    result->offset = expected;
    while (at < bytes) {
        if (bytes - at < FB_HEADER_BYTES) {
            result->end = FB_TORN;
            break;
        }
        uint64_t offset = fb_load_u64(data + at);
        uint32_t length = fb_load_u32(data + at + 8);
        result->offset = expected.known ? expected : (fb_offset){true, offset};
        result->end = check_frame(data + at, bytes - at, expected, offset, length);
        if (result->end != FB_COMPLETE)
            break;
        at += FB_HEADER_BYTES;
        if (!append_frame(frames, offset, at, length))
            return false;
        at += length;
        expected = (fb_offset){consecutive, offset + 1};
        result->offset = expected;
    }
    result->safe_length = at;
    return true;
}

/* ---- locate: one reader for both flavours, compiled twice ---- */

typedef struct {
    const uint8_t *data; /* positions are relative to this */
    const uint8_t *at;
    const uint8_t *end;
} cursor;

FB_INLINE size_t remaining(const cursor *in) { return (size_t)(in->end - in->at); }

FB_INLINE bool read_varint(cursor *in, uint64_t *value) {
    if (remaining(in) < 1)
        return false;
    uint8_t first = *in->at++;
    if (first < 251) {
        *value = first;
        return true;
    }
    size_t width = first == 251 ? 2 : first == 252 ? 4 : 8;
    if (first > 253 || remaining(in) < width)
        return false;
    *value = width == 2 ? load_u16(in->at) : width == 4 ? fb_load_u32(in->at) : fb_load_u64(in->at);
    in->at += width;
    return true;
}

FB_INLINE bool read_u64(cursor *in, enum fb_flavour flavour, uint64_t *value) {
    if (flavour == FB_VARINT)
        return read_varint(in, value);
    if (remaining(in) < 8)
        return false;
    *value = fb_load_u64(in->at);
    in->at += 8;
    return true;
}

FB_INLINE bool read_u32(cursor *in, enum fb_flavour flavour, uint64_t *value) {
    if (flavour == FB_VARINT)
        return read_varint(in, value) && *value <= UINT32_MAX;
    if (remaining(in) < 4)
        return false;
    *value = fb_load_u32(in->at);
    in->at += 4;
    return true;
}

FB_INLINE bool read_span(cursor *in, enum fb_flavour flavour, fb_span *span) {
    uint64_t length;
    if (!read_u64(in, flavour, &length) || length > remaining(in))
        return false;
    *span = (fb_span){(size_t)(in->at - in->data), (size_t)length};
    in->at += length;
    return true;
}

FB_INLINE bool read_tag(cursor *in, bool *present) {
    if (remaining(in) < 1)
        return false;
    uint8_t tag = *in->at++;
    *present = tag == 1;
    return tag <= 1;
}

FB_INLINE bool read_attributes(cursor *in, enum fb_flavour flavour, fb_layout *layout) {
    uint64_t count;
    if (!read_u64(in, flavour, &count) || count > remaining(in))
        return false;
    const uint8_t *first = in->at;
    fb_span text;
    for (uint64_t pair = 0; pair < count; pair++)
        if (!read_span(in, flavour, &text) || !read_span(in, flavour, &text))
            return false;
    layout->attributes = (fb_span){(size_t)(first - in->data), (size_t)(in->at - first)};
    layout->attribute_count = count;
    return true;
}

/* Schema id and version, then the routing key. Messages of older writers end before either. */
FB_INLINE bool read_later_fields(cursor *in, enum fb_flavour flavour, fb_layout *layout) {
    layout->later = FB_NO_LATER;
    layout->has_schema_id = layout->has_schema_version = layout->has_routing_key = false;
    if (remaining(in) == 0)
        return true;
    if (!read_tag(in, &layout->has_schema_id) ||
        (layout->has_schema_id && !read_u64(in, flavour, &layout->schema_id)))
        return false;
    if (!read_tag(in, &layout->has_schema_version) ||
        (layout->has_schema_version && !read_u32(in, flavour, &layout->schema_version)))
        return false;
    layout->later = FB_SCHEMA;
    if (remaining(in) == 0)
        return true;
    layout->later = FB_SCHEMA_AND_KEY;
    if (!read_tag(in, &layout->has_routing_key))
        return false;
    return !layout->has_routing_key || read_span(in, flavour, &layout->routing_key);
}

FB_INLINE bool read_message(cursor in, enum fb_flavour flavour, fb_layout *layout) {
    layout->flavour = flavour;
    return read_u64(&in, flavour, &layout->request_id) &&
           read_u64(&in, flavour, &layout->producer_id) &&
           read_span(&in, flavour, &layout->topic_name) &&
           read_span(&in, flavour, &layout->broker_addr) &&
           read_u64(&in, flavour, &layout->topic_offset) &&
           read_span(&in, flavour, &layout->payload) &&
           read_u64(&in, flavour, &layout->publish_time) &&
           read_span(&in, flavour, &layout->producer_name) &&
           read_tag(&in, &layout->has_subscription) &&
           (!layout->has_subscription || read_span(&in, flavour, &layout->subscription_name)) &&
           read_attributes(&in, flavour, layout) && read_later_fields(&in, flavour, layout) &&
           remaining(&in) == 0;
}

static bool read_fixed(cursor in, fb_layout *layout) { return read_message(in, FB_FIXED, layout); }

static bool read_varints(cursor in, fb_layout *layout) {
    return read_message(in, FB_VARINT, layout);
}

FB_INLINE bool rooted(const uint8_t *data, const fb_layout *layout) {
    return layout->topic_name.length > 0 && data[layout->topic_name.position] == '/';
}

bool fb_locate(const uint8_t *data, size_t position, size_t length, fb_layout *layout) {
    cursor in = {data, data + position, data + position + length};
    bool fixed = read_fixed(in, layout);
    if (fixed && rooted(data, layout))
        return true;
    fb_layout other;
    if (read_varints(in, &other) && (!fixed || rooted(data, &other))) {
        *layout = other;
        return true;
    }
    return fixed;
}

FB_INLINE void set_item(uint8_t *column, size_t row, uint64_t value) {
    memcpy(column + 8 * row, &value, sizeof value);
}

static void set_row(const fb_columns *columns, size_t row, const fb_layout *layout) {
    bool keyed = layout->has_routing_key;
    set_item(columns->publish_times, row, layout->publish_time);
    set_item(columns->payload_positions, row, layout->payload.position);
    set_item(columns->payload_lengths, row, layout->payload.length);
    set_item(columns->key_positions, row, keyed ? layout->routing_key.position : 0);
    set_item(columns->key_lengths, row, keyed ? layout->routing_key.length : UINT64_MAX);
    set_item(columns->attribute_positions, row, layout->attributes.position);
    set_item(columns->attribute_lengths, row, layout->attributes.length);
    set_item(columns->attribute_counts, row, layout->attribute_count);
    columns->flavours[row] = (uint8_t)layout->flavour;
}

/* Locates the parts of the message of one row. */
FB_INLINE enum fb_stop locate_row(const uint8_t *data, size_t bytes, const uint8_t *positions,
                                  const uint8_t *lengths, size_t row, fb_layout *layout) {
    uint64_t position;
    uint32_t length;
    memcpy(&position, positions + row * sizeof position, sizeof position);
    memcpy(&length, lengths + row * sizeof length, sizeof length);
    if (length > bytes || position > bytes - length)
        return FB_OUT_OF_RANGE;
    return fb_locate(data, (size_t)position, length, layout) ? FB_ALL_ROWS : FB_NO_MESSAGE;
}

enum fb_stop fb_locate_rows(const uint8_t *data, size_t bytes, const uint8_t *positions,
                            const uint8_t *lengths, size_t rows, const fb_columns *columns,
                            size_t *done) {
    for (*done = 0; *done < rows; ++*done) {
        fb_layout layout;
        enum fb_stop stop = locate_row(data, bytes, positions, lengths, *done, &layout);
        if (stop != FB_ALL_ROWS)
            return stop;
        set_row(columns, *done, &layout);
    }
    return FB_ALL_ROWS;
}

/* ---- survey ---- */

enum fb_stop fb_survey_rows(const uint8_t *data, size_t bytes, const uint8_t *positions,
                            const uint8_t *lengths, size_t rows, const uint8_t *topic,
                            size_t topic_bytes, fb_survey *survey) {
    bool found = false;
    *survey = (fb_survey){0, 0, 0};
    for (size_t row = 0; row < rows; row++) {
        fb_layout layout;
        enum fb_stop stop = locate_row(data, bytes, positions, lengths, row, &layout);
        if (stop != FB_ALL_ROWS)
            return stop;
        survey->rows++;
        if (layout.publish_time > survey->publish_time)
            survey->publish_time = layout.publish_time;
        fb_span name = layout.topic_name;
        if (!found && name.length > 0 &&
            (name.length != topic_bytes || memcmp(data + name.position, topic, topic_bytes) != 0))
            found = true;
        if (!found)
            survey->foreign++;
    }
    return FB_ALL_ROWS;
}

/* ---- find ---- */

#define PREFIX_STEP 64u /* a register is kept for every so many bytes */
#define DIRECT_BYTES_MAX 256u /* a shorter payload is hashed: that takes less time */

/* The registers of the prefixes of the data, from 0: a register is linear in the bytes, so that the
   one of data[from:to] follows from those of data[:from] and data[:to]. */
typedef struct {
    const uint8_t *data;
    size_t bytes;
    uint32_t *registers; /* after 0, PREFIX_STEP, 2 * PREFIX_STEP ... bytes */
    size_t known;
} prefixes;

static bool extend_prefixes(prefixes *of, size_t block) {
    if (of->registers == NULL) {
        of->registers = malloc((of->bytes / PREFIX_STEP + 1) * sizeof *of->registers);
        if (of->registers == NULL)
            return false;
        of->registers[0] = 0;
        of->known = 1;
    }
    for (; of->known <= block; of->known++)
        of->registers[of->known] =
            advance(of->registers[of->known - 1], of->data + (of->known - 1) * PREFIX_STEP,
                    PREFIX_STEP);
    return true;
}

static uint32_t prefix_register(const prefixes *of, size_t bytes) {
    size_t rest = bytes % PREFIX_STEP;
    return advance(of->registers[bytes / PREFIX_STEP], of->data + bytes - rest, rest);
}

static uint32_t shift(uint32_t crc, size_t bytes) {
    for (int digit = 0; digit < POWER_DIGITS && bytes > 0; digit++, bytes >>= POWER_BITS) {
        size_t count = bytes & ((1u << POWER_BITS) - 1);
        if (count > 0)
            crc = multiply(powers[digit][count], crc);
    }
    return crc;
}

/* The CRC of data[from:to]. Returns false only if memory ran out. */
static bool crc_between(prefixes *of, size_t from, size_t to, uint32_t *crc) {
    if (to - from <= DIRECT_BYTES_MAX) {
        *crc = fb_crc32(of->data + from, to - from);
        return true;
    }
    if (!extend_prefixes(of, to / PREFIX_STEP))
        return false;
    *crc = ~(prefix_register(of, to) ^ shift(~prefix_register(of, from), to - from));
    return true;
}

/* Whether the message data[from:to] seems to repeat the offset, in either flavour. */
FB_INLINE bool repeats_as(cursor in, enum fb_flavour flavour, uint64_t offset) {
    uint64_t number;
    fb_span text;
    return read_u64(&in, flavour, &number) && read_u64(&in, flavour, &number) &&
           read_span(&in, flavour, &text) && read_span(&in, flavour, &text) &&
           read_u64(&in, flavour, &number) && number == offset;
}

static bool repeats_offset(const uint8_t *data, size_t from, size_t to, uint64_t offset) {
    cursor in = {data, data + from, data + to};
    return repeats_as(in, FB_FIXED, offset) || repeats_as(in, FB_VARINT, offset);
}

static bool find_frames(prefixes *of, const fb_wanted *wanted, fb_frames *found, size_t *resume) {
    size_t at = 0;
    for (; at < wanted->stop && of->bytes - at >= FB_HEADER_BYTES; at++) {
        uint64_t offset = fb_load_u64(of->data + at);
        uint32_t length = fb_load_u32(of->data + at + 8);
        if (offset < wanted->first || offset > wanted->last ||
            length < FB_FRAME_PAYLOAD_BYTES_MIN || length > FB_FRAME_PAYLOAD_BYTES_MAX)
            continue;
        size_t from = at + FB_HEADER_BYTES;
        if (length > wanted->total - from)
            continue;
        if (length > of->bytes - from)
            break;
        if (wanted->messages_only && !repeats_offset(of->data, from, from + length, offset))
            continue;
        uint32_t crc;
        if (!crc_between(of, from, from + length, &crc))
            return false;
        if (crc != fb_load_u32(of->data + at + 12))
            continue;
        if (!append_frame(found, offset, from, length))
            return false;
        if (found->rows == wanted->limit) {
            at++;
            break;
        }
    }
    *resume = at;
    return true;
}

bool fb_find(const uint8_t *data, size_t bytes, const fb_wanted *wanted, fb_frames *found,
             size_t *resume) {
    prefixes of = {data, bytes, NULL, 0};
    bool done = find_frames(&of, wanted, found, resume);
    free(of.registers);
    return done;
}

/* ---- gather ---- */

FB_INLINE int64_t item_at(const uint8_t *column, size_t row) {
    int64_t value;
    memcpy(&value, column + row * sizeof value, sizeof value);
    return value;
}

/* Whether the span is inside a buffer of `bytes`. */
FB_INLINE bool inside(size_t bytes, int64_t position, int64_t length) {
    return position >= 0 && (uint64_t)length <= bytes &&
           (uint64_t)position <= bytes - (uint64_t)length;
}

enum fb_stop fb_gather_size(size_t bytes, const uint8_t *positions, const uint8_t *lengths,
                            size_t rows, uint64_t *total, size_t *nulls, size_t *done) {
    *total = 0;
    *nulls = 0;
    for (size_t row = 0; row < rows; row++) {
        int64_t length = item_at(lengths, row);
        *done = row;
        if (length < 0) {
            ++*nulls;
            continue;
        }
        if (!inside(bytes, item_at(positions, row), length))
            return FB_OUT_OF_RANGE;
        *total += (uint64_t)length; /* no overflow: INT64_MAX plus a sum under the limit */
        if (*total > FB_GATHER_BYTES_MAX)
            return FB_TOO_LARGE;
    }
    *done = rows;
    return FB_ALL_ROWS;
}

bool fb_gather(const uint8_t *data, size_t bytes, const uint8_t *positions, const uint8_t *lengths,
               size_t rows, const fb_gathered *out) {
    size_t at = 0;
    if (out->validity != NULL)
        memset(out->validity, 0, (rows + 7) / 8);
    for (size_t row = 0; row < rows; row++) {
        int64_t position = item_at(positions, row), length = item_at(lengths, row);
        fb_store_u32(out->offsets + 4 * row, (uint32_t)at);
        if (length < 0)
            continue;
        if (!inside(bytes, position, length) || (uint64_t)length > out->bytes - at)
            return false;
        if (out->validity != NULL)
            out->validity[row / 8] |= (uint8_t)(1u << row % 8);
        if (length > 0)
            memcpy(out->data + at, data + position, (size_t)length);
        at += (size_t)length;
    }
    fb_store_u32(out->offsets + 4 * rows, (uint32_t)at);
    return at == out->bytes;
}

/* ---- encode ---- */

FB_INLINE uint64_t add(uint64_t left, uint64_t right) {
    return right > UINT64_MAX - left ? UINT64_MAX : left + right;
}

uint64_t fb_message_bytes(const fb_message *message) {
    /* offset, payload length, publish time, attribute count; two absent schema fields; key tag */
    uint64_t bytes = 4 * 8 + 2 + 1;
    bytes = add(bytes, message->head.bytes);
    bytes = add(bytes, message->middle.bytes);
    bytes = add(bytes, message->payload.bytes);
    for (size_t text = 0; text < 2 * message->attribute_count; text++)
        bytes = add(add(bytes, 8), message->texts[text].bytes);
    if (message->has_routing_key)
        bytes = add(add(bytes, 8), message->routing_key.bytes);
    return bytes;
}

FB_INLINE uint8_t *put_u64(uint8_t *out, uint64_t value) {
    fb_store_u64(out, value);
    return out + 8;
}

FB_INLINE uint8_t *put_raw(uint8_t *out, fb_bytes raw) {
    if (raw.bytes > 0)
        memcpy(out, raw.data, raw.bytes);
    return out + raw.bytes;
}

FB_INLINE uint8_t *put_text(uint8_t *out, fb_bytes text) {
    return put_raw(put_u64(out, text.bytes), text);
}

void fb_encode(const fb_message *message, uint32_t message_bytes, uint8_t *out) {
    uint8_t *at = out + FB_HEADER_BYTES;
    at = put_raw(at, message->head);
    if (message->numbered)
        fb_store_u64(out + FB_HEADER_BYTES, message->request_id);
    at = put_u64(at, message->offset);
    at = put_text(at, message->payload);
    at = put_u64(at, message->publish_time);
    at = put_raw(at, message->middle);
    at = put_u64(at, message->attribute_count);
    for (size_t text = 0; text < 2 * message->attribute_count; text++)
        at = put_text(at, message->texts[text]);
    *at++ = 0; /* no schema id */
    *at++ = 0; /* no schema version */
    *at++ = message->has_routing_key;
    if (message->has_routing_key)
        put_text(at, message->routing_key);
    fb_store_u64(out, message->offset);
    fb_store_u32(out + 8, message_bytes);
    fb_store_u32(out + 12, fb_crc32(out + FB_HEADER_BYTES, message_bytes));
}
