#include "ledger.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define FB_HAS_CRC32C 1
#include <immintrin.h>
#else
#define FB_HAS_CRC32C 0
#endif

#define FB_INLINE static inline __attribute__((always_inline))

/* ---- big-endian numbers ---- */

FB_INLINE uint32_t load_be32(const uint8_t *at) {
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | (uint32_t)at[3];
}

FB_INLINE uint64_t load_be64(const uint8_t *at) {
    return (uint64_t)load_be32(at) << 32 | load_be32(at + 4);
}

FB_INLINE void store_be32(uint8_t *at, uint32_t value) {
    at[0] = (uint8_t)(value >> 24);
    at[1] = (uint8_t)(value >> 16);
    at[2] = (uint8_t)(value >> 8);
    at[3] = (uint8_t)value;
}

FB_INLINE void store_be64(uint8_t *at, uint64_t value) {
    store_be32(at, (uint32_t)(value >> 32));
    store_be32(at + 4, (uint32_t)value);
}

/* ---- CRC-32C: tables[k][b] is the register after byte b and k zero bytes ---- */

static uint32_t tables[8][256];
static bool accelerated;

enum { UNBUILT, BUILDING, BUILT };
static atomic_int tables_state = UNBUILT;

static void build_tables(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (0x82F63B78u & (0u - (crc & 1)));
        tables[0][byte] = crc;
    }
    for (int zeros = 1; zeros < 8; zeros++)
        for (int byte = 0; byte < 256; byte++) {
            uint32_t crc = tables[zeros - 1][byte];
            tables[zeros][byte] = crc >> 8 ^ tables[0][crc & 0xFF];
        }
#if FB_HAS_CRC32C
    __builtin_cpu_init();
    accelerated = __builtin_cpu_supports("sse4.2");
#endif
}

void fb_ledger_init(void) {
    int state = UNBUILT;
    if (atomic_compare_exchange_strong(&tables_state, &state, BUILDING)) {
        build_tables();
        atomic_store(&tables_state, BUILT);
    }
    while (atomic_load(&tables_state) != BUILT) {
        /* another thread finishes within microseconds */
    }
}

uint32_t fb_crc32c_tables(const uint8_t *data, size_t bytes) {
    uint32_t crc = 0xFFFFFFFFu;
    for (; bytes >= 8; bytes -= 8, data += 8) {
        uint32_t low = crc ^ fb_load_u32(data), high = fb_load_u32(data + 4);
        crc = tables[7][low & 0xFF] ^ tables[6][low >> 8 & 0xFF] ^ tables[5][low >> 16 & 0xFF] ^
              tables[4][low >> 24] ^ tables[3][high & 0xFF] ^ tables[2][high >> 8 & 0xFF] ^
              tables[1][high >> 16 & 0xFF] ^ tables[0][high >> 24];
    }
    for (; bytes > 0; bytes--, data++)
        crc = crc >> 8 ^ tables[0][(crc ^ *data) & 0xFF];
    return ~crc;
}

#if FB_HAS_CRC32C
__attribute__((target("sse4.2"))) static uint32_t crc32c_instructions(const uint8_t *data,
                                                                      size_t bytes) {
    uint64_t crc = 0xFFFFFFFFu;
    for (; bytes >= 8; bytes -= 8, data += 8)
        crc = _mm_crc32_u64(crc, fb_load_u64(data));
    uint32_t rest = (uint32_t)crc;
    for (; bytes > 0; bytes--, data++)
        rest = _mm_crc32_u8(rest, *data);
    return ~rest;
}
#endif

uint32_t fb_crc32c(const uint8_t *data, size_t bytes) {
#if FB_HAS_CRC32C
    if (accelerated)
        return crc32c_instructions(data, bytes);
#endif
    return fb_crc32c_tables(data, bytes);
}

/* ---- entries of a block ---- */

/* Checks the entry at `at`: `room` bytes of it are there, and `left` bytes of its block remain. */
FB_INLINE enum fb_entries_end check_entry(const uint8_t *at, size_t room, uint64_t left,
                                          uint64_t entry_id, uint32_t *length) {
    if (left < 4)
        return FB_ENTRIES_PADDING;
    if (room < 4)
        return FB_ENTRIES_TORN;
    *length = load_be32(at);
    if (*length > INT32_MAX)
        return FB_ENTRIES_PADDING;
    if (*length > FB_ENTRY_BYTES_MAX || left < FB_ENTRY_HEADER_BYTES ||
        *length > left - FB_ENTRY_HEADER_BYTES)
        return FB_ENTRIES_BAD_LENGTH;
    if (room < FB_ENTRY_HEADER_BYTES)
        return FB_ENTRIES_TORN;
    if (load_be64(at + 4) != entry_id)
        return FB_ENTRIES_BAD_ID;
    return *length > room - FB_ENTRY_HEADER_BYTES ? FB_ENTRIES_TORN : FB_ENTRIES_COMPLETE;
}

void fb_store_entry_header(uint8_t *at, uint32_t length, uint64_t entry_id) {
    store_be32(at, length);
    store_be64(at + 4, entry_id);
}

bool fb_scan_entries(const uint8_t *data, size_t bytes, size_t start, uint64_t left,
                     uint64_t entry_id, fb_frames *rows, size_t *stop, enum fb_entries_end *end) {
    size_t at = start;
    size_t available = left < bytes - start ? start + (size_t)left : bytes;
    *end = FB_ENTRIES_COMPLETE;
    while (at < available) {
        uint32_t length = 0;
        *end = check_entry(data + at, available - at, left, entry_id, &length);
        if (*end != FB_ENTRIES_COMPLETE)
            break;
        if (!fb_frames_append(rows, entry_id, at + FB_ENTRY_HEADER_BYTES, length))
            return false;
        at += FB_ENTRY_HEADER_BYTES + length;
        left -= FB_ENTRY_HEADER_BYTES + length;
        entry_id++;
    }
    *stop = at;
    return true;
}

/* ---- writing within bounds ---- */

/* Where bytes are written. Once something does not fit, nothing more is written. */
typedef struct {
    uint8_t *at;
    uint8_t *end;
    bool full;
} sink;

FB_INLINE bool reserve(sink *out, size_t bytes) {
    if (bytes > (size_t)(out->end - out->at))
        out->full = true;
    return !out->full;
}

FB_INLINE void put(sink *out, const uint8_t *data, size_t bytes) {
    if (bytes > 0 && reserve(out, bytes)) {
        memcpy(out->at, data, bytes);
        out->at += bytes;
    }
}

FB_INLINE void put_byte(sink *out, uint8_t byte) {
    if (reserve(out, 1))
        *out->at++ = byte;
}

FB_INLINE void put_u64(sink *out, uint64_t value) {
    if (reserve(out, 8)) {
        fb_store_u64(out->at, value);
        out->at += 8;
    }
}

FB_INLINE void put_text(sink *out, const uint8_t *data, size_t bytes) {
    put_u64(out, bytes);
    put(out, data, bytes);
}

FB_INLINE void put_varint(sink *out, uint64_t value) {
    for (; value > 0x7F; value >>= 7)
        put_byte(out, (uint8_t)(value | 0x80));
    put_byte(out, (uint8_t)value);
}

/* A field of bytes whose tag has one byte. */
FB_INLINE void put_field(sink *out, uint8_t tag, const uint8_t *data, size_t bytes) {
    put_byte(out, tag);
    put_varint(out, bytes);
    put(out, data, bytes);
}

FB_INLINE size_t varint_bytes(uint64_t value) {
    size_t bytes = 1;
    for (; value > 0x7F; value >>= 7)
        bytes++;
    return bytes;
}

FB_INLINE uint64_t field_bytes(uint64_t bytes) { return 1 + varint_bytes(bytes) + bytes; }

/* ---- frames to entries ---- */

#define TAG_PRODUCER 0x0A   /* 1, bytes */
#define TAG_SEQUENCE 0x10   /* 2, varint */
#define TAG_TIME 0x18       /* 3, varint */
#define TAG_PROPERTY 0x22   /* 4, bytes */
#define TAG_KEY 0x32        /* 6, bytes */
#define NUMBER_EXTENSION 16000u
static const uint8_t extension_tag[3] = {0x82, 0xE8, 0x07};

enum { EXTENSION_PARTS = 1, EXTENSION_VERBATIM = 2 };
enum { HAS_SUBSCRIPTION = 1, HAS_SCHEMA_ID = 2, HAS_SCHEMA_VERSION = 4, LATER_SHIFT = 3 };

/* Whether the bytes are UTF-8, by the rules of Python: no surrogates, nothing longer than needed. */
static bool is_text(const uint8_t *at, size_t bytes) {
    const uint8_t *end = at + bytes;
    while (at < end) {
        uint8_t first = *at++;
        if (first < 0x80)
            continue;
        size_t more = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : 1;
        if (first < 0xC2 || first > 0xF4 || (size_t)(end - at) < more)
            return false;
        uint8_t low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
        uint8_t high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
        if (*at < low || *at > high)
            return false;
        for (at++; more > 1; more--, at++)
            if ((*at & 0xC0) != 0x80)
                return false;
    }
    return true;
}

/* The message of a frame, and the sizes of what it becomes. */
typedef struct {
    const uint8_t *data;
    fb_span message;
    fb_layout layout;
    bool located; /* it is a message; otherwise all of it is payload */
    bool named;   /* its texts are UTF-8, and so can be Pulsar's */
    bool parts;   /* it can be built again from its parts */
    uint64_t extension;
    uint64_t metadata;
    uint64_t size; /* the data of the entry */
} packed;

/* The next text of located attributes, in either flavour; never past their end, even if another
   thread has written to the buffer since they were located. */
FB_INLINE fb_span next_text(const fb_layout *layout, const uint8_t *data, size_t *at) {
    size_t end = layout->attributes.position + layout->attributes.length;
    size_t width = 8, skipped = 0;
    if (layout->flavour == FB_VARINT) {
        uint8_t first = *at < end ? data[*at] : 0;
        width = first < 251 ? 1 : first == 251 ? 2 : first == 252 ? 4 : 8;
        skipped = first < 251 ? 0 : 1;
    }
    if (end - *at < skipped + width) {
        *at = end;
        return (fb_span){end, 0};
    }
    uint64_t length = 0;
    for (size_t byte = 0; byte < width; byte++)
        length |= (uint64_t)data[*at + skipped + byte] << 8 * byte;
    *at += skipped + width;
    fb_span text = {*at, length < end - *at ? (size_t)length : end - *at};
    *at += text.length;
    return text;
}

static bool texts_named(const uint8_t *data, const fb_layout *layout) {
    if (!is_text(data + layout->producer_name.position, layout->producer_name.length) ||
        (layout->has_routing_key &&
         !is_text(data + layout->routing_key.position, layout->routing_key.length)))
        return false;
    size_t at = layout->attributes.position;
    for (uint64_t text = 0; text < 2 * layout->attribute_count; text++) {
        fb_span span = next_text(layout, data, &at);
        if (!is_text(data + span.position, span.length))
            return false;
    }
    return true;
}

FB_INLINE uint64_t pair_bytes(fb_span key, fb_span value) {
    return field_bytes(key.length) + field_bytes(value.length);
}

static uint64_t extension_bytes(const packed *of) {
    const fb_layout *layout = &of->layout;
    if (!of->located)
        return 2;
    if (!of->parts) {
        size_t prefix = layout->payload.position - of->message.position;
        return 1 + varint_bytes(prefix) + of->message.length - layout->payload.length;
    }
    uint64_t bytes = 2 + varint_bytes(layout->producer_id) + field_bytes(layout->topic_name.length) -
                     1 + field_bytes(layout->broker_addr.length) - 1;
    if (layout->has_subscription)
        bytes += field_bytes(layout->subscription_name.length) - 1;
    if (layout->has_schema_id)
        bytes += varint_bytes(layout->schema_id);
    if (layout->has_schema_version)
        bytes += varint_bytes(layout->schema_version);
    return bytes;
}

static uint64_t metadata_bytes(const packed *of) {
    const fb_layout *layout = &of->layout;
    uint64_t bytes = sizeof extension_tag + varint_bytes(of->extension) + of->extension;
    if (!of->located)
        return bytes + 2 + 2 + 2;
    bytes += 1 + varint_bytes(layout->request_id) + 1 + varint_bytes(layout->publish_time);
    if (!of->named)
        return bytes + 2;
    bytes += field_bytes(layout->producer_name.length);
    size_t at = layout->attributes.position;
    for (uint64_t pair = 0; pair < layout->attribute_count; pair++) {
        fb_span key = next_text(layout, of->data, &at);
        bytes += field_bytes(pair_bytes(key, next_text(layout, of->data, &at)));
    }
    if (layout->has_routing_key)
        bytes += field_bytes(layout->routing_key.length);
    return bytes;
}

static void measure(packed *of, uint64_t offset) {
    of->located =
        fb_locate(of->data, of->message.position, of->message.length, &of->layout);
    of->named = of->located && texts_named(of->data, &of->layout);
    of->parts =
        of->named && of->layout.flavour == FB_FIXED && of->layout.topic_offset == offset;
    of->extension = extension_bytes(of);
    of->metadata = metadata_bytes(of);
    size_t payload = of->located ? of->layout.payload.length : of->message.length;
    of->size = 10 + of->metadata + payload;
}

static void put_extension(sink *out, const packed *of) {
    const fb_layout *layout = &of->layout;
    const uint8_t *data = of->data;
    put(out, extension_tag, sizeof extension_tag);
    put_varint(out, of->extension);
    put_byte(out, of->parts ? EXTENSION_PARTS : EXTENSION_VERBATIM);
    if (!of->located) {
        put_byte(out, 0);
        return;
    }
    if (!of->parts) {
        size_t prefix = layout->payload.position - of->message.position;
        size_t after = layout->payload.position + layout->payload.length;
        put_varint(out, prefix);
        put(out, data + of->message.position, prefix);
        put(out, data + after, of->message.position + of->message.length - after);
        return;
    }
    put_byte(out, (uint8_t)((layout->has_subscription ? HAS_SUBSCRIPTION : 0) |
                            (layout->has_schema_id ? HAS_SCHEMA_ID : 0) |
                            (layout->has_schema_version ? HAS_SCHEMA_VERSION : 0) |
                            (int)layout->later << LATER_SHIFT));
    put_varint(out, layout->producer_id);
    put_varint(out, layout->topic_name.length);
    put(out, data + layout->topic_name.position, layout->topic_name.length);
    put_varint(out, layout->broker_addr.length);
    put(out, data + layout->broker_addr.position, layout->broker_addr.length);
    if (layout->has_subscription) {
        put_varint(out, layout->subscription_name.length);
        put(out, data + layout->subscription_name.position, layout->subscription_name.length);
    }
    if (layout->has_schema_id)
        put_varint(out, layout->schema_id);
    if (layout->has_schema_version)
        put_varint(out, layout->schema_version);
}

static void put_metadata(sink *out, const packed *of) {
    const fb_layout *layout = &of->layout;
    const uint8_t *data = of->data;
    fb_span nobody = {0, 0};
    fb_span producer = of->named ? layout->producer_name : nobody;
    put_field(out, TAG_PRODUCER, data + producer.position, producer.length);
    put_byte(out, TAG_SEQUENCE);
    put_varint(out, of->located ? layout->request_id : 0);
    put_byte(out, TAG_TIME);
    put_varint(out, of->located ? layout->publish_time : 0);
    if (of->named) {
        size_t at = layout->attributes.position;
        for (uint64_t pair = 0; pair < layout->attribute_count; pair++) {
            fb_span key = next_text(layout, data, &at), value = next_text(layout, data, &at);
            put_byte(out, TAG_PROPERTY);
            put_varint(out, pair_bytes(key, value));
            put_field(out, 0x0A, data + key.position, key.length);
            put_field(out, 0x12, data + value.position, value.length);
        }
        if (layout->has_routing_key)
            put_field(out, TAG_KEY, data + layout->routing_key.position,
                      layout->routing_key.length);
    }
    put_extension(out, of);
}

static void put_entry(sink *out, const packed *of, uint64_t entry_id) {
    fb_span payload = of->located ? of->layout.payload : of->message;
    uint8_t *head = out->at;
    out->at += FB_ENTRY_HEADER_BYTES + 10;
    put_metadata(out, of);
    put(out, of->data + payload.position, payload.length);
    fb_store_entry_header(head, (uint32_t)of->size, entry_id);
    head[12] = 0x0E;
    head[13] = 0x01;
    store_be32(head + 18, (uint32_t)of->metadata);
    store_be32(head + 14, fb_crc32c(head + 18, (size_t)of->size - 6));
}

FB_INLINE bool row_span(const uint8_t *positions, const uint8_t *lengths, size_t row, size_t bytes,
                        fb_span *span) {
    uint64_t position;
    uint32_t length;
    memcpy(&position, positions + row * sizeof position, sizeof position);
    memcpy(&length, lengths + row * sizeof length, sizeof length);
    if (length > bytes || position > bytes - length)
        return false;
    *span = (fb_span){(size_t)position, length};
    return true;
}

/* Whether these bytes can be a message, and have the checksum that they say. */
static bool is_whole(const uint8_t *at, size_t left) {
    if (left >= 6 && at[0] == 0x0E && at[1] == 0x02) {
        uint32_t broker = load_be32(at + 2);
        if (broker > left - 6)
            return false;
        at += 6 + broker;
        left -= 6 + broker;
    }
    if (left >= 6 && at[0] == 0x0E && at[1] == 0x01) {
        if (fb_crc32c(at + 6, left - 6) != load_be32(at + 2))
            return false;
        at += 6;
        left -= 6;
    }
    if (left < 4)
        return false;
    uint32_t metadata = load_be32(at);
    return metadata >= FB_METADATA_BYTES_MIN && metadata <= left - 4;
}

bool fb_check_entries(const uint8_t *data, size_t bytes, const uint8_t *positions,
                      const uint8_t *lengths, size_t rows, size_t *bad) {
    for (*bad = 0; *bad < rows; ++*bad) {
        fb_span span;
        if (!row_span(positions, lengths, *bad, bytes, &span))
            return false;
        if (!is_whole(data + span.position, span.length))
            break;
    }
    return true;
}

enum fb_stop fb_pack_frames(const uint8_t *data, size_t bytes, const uint8_t *positions,
                            const uint8_t *lengths, size_t rows, size_t row, uint64_t offset,
                            uint64_t entry_id, uint8_t *out, size_t room, size_t *at,
                            uint8_t *places, size_t *done, uint64_t *needed) {
    *needed = 0;
    for (*done = row; *done < rows; ++*done, offset++, entry_id++) {
        packed message = {.data = data};
        if (!row_span(positions, lengths, *done, bytes, &message.message))
            return FB_OUT_OF_RANGE;
        measure(&message, offset);
        if (message.size > FB_ENTRY_BYTES_MAX || room - *at < FB_ENTRY_HEADER_BYTES ||
            message.size > room - *at - FB_ENTRY_HEADER_BYTES) {
            *needed = message.size;
            return FB_ALL_ROWS;
        }
        sink into = {out + *at, out + *at + FB_ENTRY_HEADER_BYTES + message.size, false};
        uint64_t place = *at;
        put_entry(&into, &message, entry_id);
        if (into.full || into.at != into.end)
            return FB_NO_MESSAGE; /* the buffer changed meanwhile */
        memcpy(places + (*done - row) * sizeof place, &place, sizeof place);
        *at += FB_ENTRY_HEADER_BYTES + (size_t)message.size;
    }
    return FB_ALL_ROWS;
}

/* ---- entries to frames ---- */

typedef struct {
    const uint8_t *at;
    const uint8_t *end;
} reader;

FB_INLINE bool read_varint(reader *in, uint64_t *value) {
    *value = 0;
    for (unsigned shift = 0; shift < 70 && in->at < in->end; shift += 7) {
        uint8_t byte = *in->at++;
        if (shift == 63 && byte > 1)
            return false;
        *value |= (uint64_t)(byte & 0x7F) << shift;
        if (byte < 0x80)
            return true;
    }
    return false;
}

FB_INLINE bool read_bytes(reader *in, fb_bytes *bytes) {
    uint64_t length;
    if (!read_varint(in, &length) || length > (size_t)(in->end - in->at))
        return false;
    *bytes = (fb_bytes){in->at, (size_t)length};
    in->at += length;
    return true;
}

typedef struct {
    uint64_t number;
    bool is_bytes;
    uint64_t value; /* of a number */
    fb_bytes bytes;
} field;

/* Reads one field; fixed numbers, which nobody writes here, are skipped as numbers. */
FB_INLINE bool read_field(reader *in, field *field) {
    uint64_t tag;
    if (!read_varint(in, &tag))
        return false;
    field->number = tag >> 3;
    if (field->number == 0 || field->number > 0x1FFFFFFF)
        return false;
    field->is_bytes = (tag & 7) == 2;
    field->value = 0;
    field->bytes = (fb_bytes){NULL, 0};
    size_t width = (tag & 7) == 1 ? 8 : 4;
    switch (tag & 7) {
    case 0:
        return read_varint(in, &field->value);
    case 2:
        return read_bytes(in, &field->bytes);
    case 1:
    case 5:
        if ((size_t)(in->end - in->at) < width)
            return false;
        field->value = width == 8 ? fb_load_u64(in->at) : fb_load_u32(in->at);
        in->at += width;
        return true;
    default:
        return false;
    }
}

static bool read_property(fb_bytes pair, fb_bytes *key, fb_bytes *value) {
    reader in = {pair.data, (const uint8_t *)pair.data + pair.bytes};
    *key = *value = (fb_bytes){pair.data, 0};
    field field;
    while (in.at < in.end) {
        if (!read_field(&in, &field))
            return false;
        if (field.number > 2)
            continue;
        if (!field.is_bytes)
            return false;
        *(field.number == 1 ? key : value) = field.bytes;
    }
    return true;
}

/* What an entry says, and the size of the message that it becomes. */
typedef struct {
    fb_bytes metadata;
    fb_bytes payload;
    uint64_t sequence_id;
    uint64_t publish_time;
    fb_bytes producer;
    bool keyed;
    fb_bytes key;
    uint64_t properties;
    uint64_t property_bytes;
    int kind;
    fb_bytes prefix; /* verbatim */
    fb_bytes suffix;
    int flags; /* parts */
    uint64_t producer_id;
    fb_bytes topic;
    fb_bytes broker;
    fb_bytes subscription;
    uint64_t schema_id;
    uint64_t schema_version;
    uint64_t size;
} unpacked;

static bool read_parts(reader *in, unpacked *entry) {
    if (in->at == in->end)
        return false;
    entry->flags = *in->at++;
    int later = entry->flags >> LATER_SHIFT;
    if (later > FB_SCHEMA_AND_KEY ||
        (later == FB_NO_LATER && (entry->flags & (HAS_SCHEMA_ID | HAS_SCHEMA_VERSION))) ||
        (entry->keyed && later != FB_SCHEMA_AND_KEY))
        return false;
    if (!read_varint(in, &entry->producer_id) || !read_bytes(in, &entry->topic) ||
        !read_bytes(in, &entry->broker))
        return false;
    if (entry->flags & HAS_SUBSCRIPTION && !read_bytes(in, &entry->subscription))
        return false;
    if (entry->flags & HAS_SCHEMA_ID && !read_varint(in, &entry->schema_id))
        return false;
    if (entry->flags & HAS_SCHEMA_VERSION &&
        (!read_varint(in, &entry->schema_version) || entry->schema_version > UINT32_MAX))
        return false;
    entry->size = 72 + entry->topic.bytes + entry->broker.bytes + entry->payload.bytes +
                  entry->producer.bytes + 1 + 16 * entry->properties + entry->property_bytes;
    if (entry->flags & HAS_SUBSCRIPTION)
        entry->size += 8 + entry->subscription.bytes;
    if (later >= FB_SCHEMA)
        entry->size += 2 + (entry->flags & HAS_SCHEMA_ID ? 8 : 0) +
                       (entry->flags & HAS_SCHEMA_VERSION ? 4 : 0);
    if (later == FB_SCHEMA_AND_KEY)
        entry->size += 1 + (entry->keyed ? 8 + entry->key.bytes : 0);
    return in->at == in->end;
}

static bool read_extension(fb_bytes extension, unpacked *entry) {
    reader in = {extension.data, (const uint8_t *)extension.data + extension.bytes};
    if (in.at == in.end)
        return false;
    entry->kind = *in.at++;
    if (entry->kind == EXTENSION_PARTS)
        return read_parts(&in, entry);
    if (entry->kind != EXTENSION_VERBATIM || !read_bytes(&in, &entry->prefix))
        return false;
    entry->suffix = (fb_bytes){in.at, (size_t)(in.end - in.at)};
    entry->size = entry->prefix.bytes + entry->payload.bytes + entry->suffix.bytes;
    return true;
}

static bool read_metadata(unpacked *entry) {
    reader in = {entry->metadata.data,
                 (const uint8_t *)entry->metadata.data + entry->metadata.bytes};
    fb_bytes extension = {NULL, 0}, key, value;
    bool sequenced = false, timed = false, named = false;
    field field;
    while (in.at < in.end) {
        if (!read_field(&in, &field))
            return false;
        bool wants_bytes = true;
        switch (field.number) {
        case 1:
            entry->producer = field.bytes;
            named = true;
            break;
        case 2:
            wants_bytes = false;
            entry->sequence_id = field.value;
            sequenced = true;
            break;
        case 3:
            wants_bytes = false;
            entry->publish_time = field.value;
            timed = true;
            break;
        case 4:
            if (!field.is_bytes || !read_property(field.bytes, &key, &value))
                return false;
            entry->properties++;
            entry->property_bytes += key.bytes + value.bytes;
            break;
        case 6:
            entry->keyed = true;
            entry->key = field.bytes;
            break;
        case NUMBER_EXTENSION:
            extension = field.bytes;
            break;
        default:
            continue;
        }
        if (field.is_bytes != wants_bytes)
            return false;
    }
    return named && sequenced && timed && extension.data != NULL &&
           read_extension(extension, entry);
}

static enum fb_entry_fault read_entry(const uint8_t *data, size_t bytes, bool verify,
                                      unpacked *entry) {
    *entry = (unpacked){0};
    if (bytes < 10 || data[0] != 0x0E || data[1] != 0x01)
        return FB_ENTRY_MALFORMED;
    if (verify && fb_crc32c(data + 6, bytes - 6) != load_be32(data + 2))
        return FB_ENTRY_CHECKSUM;
    uint32_t metadata = load_be32(data + 6);
    if (metadata > bytes - 10)
        return FB_ENTRY_MALFORMED;
    entry->metadata = (fb_bytes){data + 10, metadata};
    entry->payload = (fb_bytes){data + 10 + metadata, bytes - 10 - metadata};
    if (!read_metadata(entry) || entry->size < FB_FRAME_PAYLOAD_BYTES_MIN ||
        entry->size > FB_FRAME_PAYLOAD_BYTES_MAX)
        return FB_ENTRY_MALFORMED;
    return FB_ENTRY_GOOD;
}

enum fb_stop fb_unpack_size(const uint8_t *data, size_t bytes, const uint8_t *positions,
                            const uint8_t *lengths, size_t rows, size_t row, uint64_t bytes_max,
                            uint64_t *total, size_t *done, enum fb_entry_fault *fault) {
    *total = 0;
    *fault = FB_ENTRY_GOOD;
    for (*done = row; *done < rows; ++*done) {
        fb_span span;
        unpacked entry;
        if (!row_span(positions, lengths, *done, bytes, &span))
            return FB_OUT_OF_RANGE;
        *fault = read_entry(data + span.position, span.length, true, &entry);
        if (*fault != FB_ENTRY_GOOD)
            return FB_ALL_ROWS;
        uint64_t size = FB_HEADER_BYTES + entry.size;
        if (*done > row && (size > bytes_max || *total > bytes_max - size))
            return FB_ALL_ROWS;
        *total += size;
    }
    return FB_ALL_ROWS;
}

static void put_option(sink *out, bool present) { put_byte(out, present); }

static void put_properties(sink *out, const unpacked *entry) {
    reader in = {entry->metadata.data,
                 (const uint8_t *)entry->metadata.data + entry->metadata.bytes};
    fb_bytes key, value;
    field field;
    while (in.at < in.end && read_field(&in, &field))
        if (field.number == 4 && field.is_bytes && read_property(field.bytes, &key, &value)) {
            put_text(out, key.data, key.bytes);
            put_text(out, value.data, value.bytes);
        }
}

static void put_message(sink *out, const unpacked *entry, uint64_t offset) {
    if (entry->kind == EXTENSION_VERBATIM) {
        put(out, entry->prefix.data, entry->prefix.bytes);
        put(out, entry->payload.data, entry->payload.bytes);
        put(out, entry->suffix.data, entry->suffix.bytes);
        return;
    }
    int flags = entry->flags, later = flags >> LATER_SHIFT;
    put_u64(out, entry->sequence_id);
    put_u64(out, entry->producer_id);
    put_text(out, entry->topic.data, entry->topic.bytes);
    put_text(out, entry->broker.data, entry->broker.bytes);
    put_u64(out, offset);
    put_text(out, entry->payload.data, entry->payload.bytes);
    put_u64(out, entry->publish_time);
    put_text(out, entry->producer.data, entry->producer.bytes);
    put_option(out, flags & HAS_SUBSCRIPTION);
    if (flags & HAS_SUBSCRIPTION)
        put_text(out, entry->subscription.data, entry->subscription.bytes);
    put_u64(out, entry->properties);
    if (entry->properties > 0)
        put_properties(out, entry);
    if (later == FB_NO_LATER)
        return;
    put_option(out, (flags & HAS_SCHEMA_ID) != 0);
    if (flags & HAS_SCHEMA_ID)
        put_u64(out, entry->schema_id);
    put_option(out, (flags & HAS_SCHEMA_VERSION) != 0);
    if (flags & HAS_SCHEMA_VERSION && reserve(out, 4)) {
        fb_store_u32(out->at, (uint32_t)entry->schema_version);
        out->at += 4;
    }
    if (later != FB_SCHEMA_AND_KEY)
        return;
    put_option(out, entry->keyed);
    if (entry->keyed)
        put_text(out, entry->key.data, entry->key.bytes);
}

bool fb_unpack_frames(const uint8_t *data, size_t bytes, const uint8_t *positions,
                      const uint8_t *lengths, size_t row, size_t done, uint64_t offset,
                      uint8_t *out, size_t total, uint8_t *message_positions,
                      uint8_t *message_lengths) {
    sink into = {out, out + total, false};
    for (size_t at = row; at < done; at++, offset++) {
        fb_span span;
        unpacked entry;
        if (!row_span(positions, lengths, at, bytes, &span) ||
            read_entry(data + span.position, span.length, false, &entry) != FB_ENTRY_GOOD ||
            !reserve(&into, FB_HEADER_BYTES))
            return false;
        uint8_t *head = into.at, *message = head + FB_HEADER_BYTES;
        into.at = message;
        put_message(&into, &entry, offset);
        if (into.full || (uint64_t)(into.at - message) != entry.size)
            return false;
        uint64_t position = (uint64_t)(message - out);
        uint32_t length = (uint32_t)entry.size;
        fb_store_u64(head, offset);
        fb_store_u32(head + 8, length);
        fb_store_u32(head + 12, fb_crc32(message, length));
        memcpy(message_positions + (at - row) * sizeof position, &position, sizeof position);
        memcpy(message_lengths + (at - row) * sizeof length, &length, sizeof length);
    }
    return into.at == into.end;
}
