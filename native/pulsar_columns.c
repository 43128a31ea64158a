#include "pulsar_columns.h"

#include <stdlib.h>
#include <string.h>

#include "ledger.h"

#define BROKER_MAGIC 0x0e02u
#define CHECKSUM_MAGIC 0x0e01u
#define WIRE_VARINT 0
#define WIRE_FIXED_64 1
#define WIRE_BYTES 2
#define WIRE_FIXED_32 5
#define FIELD_NUMBER_MAX 0x1fffffffu
#define FIELDS_MAX 100000 /* PROTOBUF_FIELDS_MAX of src/forebay/limits.py */

typedef struct {
    uint32_t number;
    uint32_t wire;
    uint64_t value;
    const uint8_t *bytes;
    size_t length;
} field;

typedef struct {
    const uint8_t *at;
    const uint8_t *end;
    size_t fields;
} reader;

static uint32_t load_u16_be(const uint8_t *at) { return (uint32_t)at[0] << 8 | at[1]; }

static uint32_t load_u32_be(const uint8_t *at) {
    return load_u16_be(at) << 16 | load_u16_be(at + 2);
}

static bool read_varint(reader *from, uint64_t *value) {
    uint64_t found = 0;
    for (int shift = 0; shift < 70 && from->at < from->end; shift += 7) {
        uint8_t byte = *from->at++;
        if (shift == 63 && byte > 1)
            return false;
        found |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80) {
            *value = found;
            return true;
        }
    }
    return false;
}

static bool skip(reader *from, uint64_t count) {
    if (count > (uint64_t)(from->end - from->at))
        return false;
    from->at += count;
    return true;
}

static bool read_field(reader *from, field *found) {
    uint64_t tag;
    if (from->fields++ == FIELDS_MAX)
        return false;
    if (!read_varint(from, &tag) || (tag >> 3) == 0 || (tag >> 3) > FIELD_NUMBER_MAX)
        return false;
    found->number = (uint32_t)(tag >> 3);
    found->wire = (uint32_t)(tag & 7);
    found->value = 0;
    found->bytes = from->at;
    found->length = 0;
    switch (found->wire) {
    case WIRE_VARINT:
        return read_varint(from, &found->value);
    case WIRE_FIXED_64:
        return skip(from, 8);
    case WIRE_FIXED_32:
        return skip(from, 4);
    case WIRE_BYTES:
        if (!read_varint(from, &found->value))
            return false;
        found->bytes = from->at;
        found->length = (size_t)found->value;
        return skip(from, found->value);
    default:
        return false;
    }
}

/* Whether the bytes are what Python decodes as UTF-8. */
static bool is_utf8(const uint8_t *at, size_t bytes) {
    const uint8_t *end = at + bytes;
    while (at < end) {
        uint64_t eight;
        if (end - at >= 8) {
            memcpy(&eight, at, 8);
            if (!(eight & 0x8080808080808080u)) {
                at += 8;
                continue;
            }
        }
        uint8_t lead = *at++;
        if (lead < 0x80)
            continue;
        int more = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : 1;
        if (lead < 0xc2 || lead > 0xf4 || end - at < more)
            return false;
        uint8_t low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
        uint8_t high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
        if (*at < low || *at > high)
            return false;
        for (int number = 1; number < more; number++)
            if ((at[number] & 0xc0) != 0x80)
                return false;
        at += more;
    }
    return true;
}

/* ---- one entry ---- */

typedef struct {
    int64_t numbers[FB_ENTRY_COLUMNS];
    const uint8_t *data;
    bool has_producer, has_sequence, has_time, null_value, null_key;
} row;

static void put_span(row *row, int column, const field *found) {
    row->numbers[column] = found->bytes - row->data;
    row->numbers[column + 1] = (int64_t)found->length;
}

static bool put_number(row *row, int column, const field *found) {
    row->numbers[column] = (int64_t)found->value;
    return found->wire == WIRE_VARINT && found->value <= INT64_MAX;
}

static bool grow(fb_properties *properties) {
    if (properties->count + 4 <= properties->capacity)
        return true;
    size_t capacity = properties->capacity ? 2 * properties->capacity : 256;
    int64_t *numbers = realloc(properties->numbers, capacity * sizeof *numbers);
    if (numbers == NULL)
        return false;
    properties->numbers = numbers;
    properties->capacity = capacity;
    return true;
}

enum parsed { PLAIN, NOT_PLAIN, NO_MEMORY };

static enum parsed read_property(row *row, const field *found, fb_properties *properties) {
    reader from = {found->bytes, found->bytes + found->length, 0};
    field part, name = {0}, value = {0};
    bool named = false, valued = false;
    while (from.at < from.end) {
        if (!read_field(&from, &part))
            return NOT_PLAIN;
        if (part.number > 2)
            continue;
        if (part.wire != WIRE_BYTES || !is_utf8(part.bytes, part.length))
            return NOT_PLAIN;
        if (part.number == 1) {
            name = part;
            named = true;
        } else {
            value = part;
            valued = true;
        }
    }
    if (!named || !valued)
        return NOT_PLAIN;
    if (!grow(properties))
        return NO_MEMORY;
    int64_t *to = properties->numbers + properties->count;
    to[0] = name.bytes - row->data;
    to[1] = (int64_t)name.length;
    to[2] = value.bytes - row->data;
    to[3] = (int64_t)value.length;
    properties->count += 4;
    row->numbers[FB_ENTRY_PROPERTIES]++;
    return PLAIN;
}

static enum parsed plain_if(bool plain) { return plain ? PLAIN : NOT_PLAIN; }

static enum parsed take_field(row *row, const field *found, fb_properties *properties) {
    bool bytes = found->wire == WIRE_BYTES;
    switch (found->number) {
    case 1:
        put_span(row, FB_ENTRY_PRODUCER_POSITION, found);
        row->has_producer = true;
        return plain_if(bytes && is_utf8(found->bytes, found->length));
    case 2:
        row->has_sequence = true;
        row->numbers[FB_ENTRY_SEQUENCE_ID] = (int64_t)found->value;
        return plain_if(found->wire == WIRE_VARINT);
    case 3:
        row->has_time = true;
        return plain_if(put_number(row, FB_ENTRY_PUBLISH_TIME, found));
    case 4:
        return bytes ? read_property(row, found, properties) : NOT_PLAIN;
    case 6:
        put_span(row, FB_ENTRY_KEY_POSITION, found);
        return plain_if(bytes && is_utf8(found->bytes, found->length));
    case 8: /* compression */
    case 17: /* the key is in Base64 */
        return plain_if(found->wire == WIRE_VARINT && found->value == 0);
    case 12:
        return plain_if(put_number(row, FB_ENTRY_EVENT_TIME, found));
    case 16:
        put_span(row, FB_ENTRY_SCHEMA_POSITION, found);
        return plain_if(bytes);
    case 18:
        put_span(row, FB_ENTRY_ORDERING_POSITION, found);
        return plain_if(bytes);
    case 22:
    case 23:
        row->numbers[FB_ENTRY_FLAGS] |= FB_ENTRY_TRANSACTIONAL;
        return plain_if(found->wire == WIRE_VARINT);
    case 25:
        row->null_value = found->value != 0;
        return plain_if(found->wire == WIRE_VARINT);
    case 30:
        row->null_key = found->value != 0;
        return plain_if(found->wire == WIRE_VARINT);
    case 27: /* chunks */
        return plain_if(found->wire == WIRE_VARINT && found->value <= 1);
    case 5:
    case 7:
    case 14:
    case 15:
    case 26:
    case 32:
        return plain_if(bytes);
    case 9:
    case 19:
    case 24:
    case 28:
    case 29:
    case 33:
    case 34:
        return plain_if(found->wire == WIRE_VARINT);
    case 11: /* a batch */
    case 13: /* encrypted */
    case 20: /* a marker */
    case 31: /* compacted */
        return NOT_PLAIN;
    default:
        return PLAIN;
    }
}

static bool read_broker_metadata(row *row, reader from) {
    field found;
    while (from.at < from.end) {
        if (!read_field(&from, &found))
            return false;
        if (found.number == 1 && found.wire != WIRE_VARINT)
            return false;
        if (found.number == 2 && !put_number(row, FB_ENTRY_INDEX, &found))
            return false;
    }
    return true;
}

/* Leaves `from` at the size of the metadata. */
static bool read_head(row *row, reader *from) {
    if (from->end - from->at >= 6 && load_u16_be(from->at) == BROKER_MAGIC) {
        uint32_t size = load_u32_be(from->at + 2);
        from->at += 6;
        const uint8_t *start = from->at;
        if (!skip(from, size) || !read_broker_metadata(row, (reader){start, from->at, 0}))
            return false;
    }
    if (from->end - from->at >= 6 && load_u16_be(from->at) == CHECKSUM_MAGIC) {
        uint32_t wanted = load_u32_be(from->at + 2);
        from->at += 6;
        return fb_crc32c(from->at, (size_t)(from->end - from->at)) == wanted;
    }
    return true;
}

static enum parsed read_entry(row *row, reader from, fb_properties *properties) {
    if (!read_head(row, &from) || from.end - from.at < 4)
        return NOT_PLAIN;
    uint32_t size = load_u32_be(from.at);
    from.at += 4;
    reader metadata = {from.at, NULL, 0};
    if (!skip(&from, size))
        return NOT_PLAIN;
    metadata.end = from.at;
    field found;
    while (metadata.at < metadata.end) {
        if (!read_field(&metadata, &found))
            return NOT_PLAIN;
        enum parsed parsed = take_field(row, &found, properties);
        if (parsed != PLAIN)
            return parsed;
    }
    row->numbers[FB_ENTRY_PAYLOAD_POSITION] = from.at - row->data;
    row->numbers[FB_ENTRY_PAYLOAD_LENGTH] = row->null_value ? -1 : from.end - from.at;
    if (row->null_key) {
        row->numbers[FB_ENTRY_KEY_POSITION] = 0;
        row->numbers[FB_ENTRY_KEY_LENGTH] = -1;
    }
    return plain_if(row->has_producer && row->has_sequence && row->has_time);
}

enum fb_entry_stop fb_entry_columns(const uint8_t *data, size_t bytes, const uint8_t *positions,
                                    const uint8_t *lengths, size_t rows, int64_t *columns,
                                    fb_properties *properties, size_t *done) {
    for (size_t number = 0; number < rows; number++) {
        uint64_t position;
        uint32_t length;
        memcpy(&position, positions + 8 * number, 8);
        memcpy(&length, lengths + 4 * number, 4);
        *done = number;
        if (position > bytes || length > bytes - position)
            return FB_ENTRIES_OUTSIDE;
        row row = {{0}, data, false, false, false, false, false};
        row.numbers[FB_ENTRY_KEY_LENGTH] = row.numbers[FB_ENTRY_ORDERING_LENGTH] = -1;
        row.numbers[FB_ENTRY_SCHEMA_LENGTH] = row.numbers[FB_ENTRY_INDEX] = -1;
        size_t known = properties->count;
        reader from = {data + position, data + position + length, 0};
        enum parsed parsed = read_entry(&row, from, properties);
        if (parsed == NO_MEMORY)
            return FB_ENTRIES_MEMORY;
        if (parsed == NOT_PLAIN) {
            properties->count = known;
            memset(row.numbers, 0, sizeof row.numbers);
        } else {
            row.numbers[FB_ENTRY_FLAGS] |= FB_ENTRY_PLAIN;
        }
        for (int column = 0; column < FB_ENTRY_COLUMNS; column++)
            columns[(size_t)column * rows + number] = row.numbers[column];
    }
    *done = rows;
    return FB_ENTRIES_ALL;
}

/* ---- batches ---- */

static enum parsed take_single(row *row, const field *found, fb_properties *properties,
                               uint64_t *size) {
    bool bytes = found->wire == WIRE_BYTES;
    switch (found->number) {
    case 1:
        return bytes ? read_property(row, found, properties) : NOT_PLAIN;
    case 2:
        put_span(row, FB_ENTRY_KEY_POSITION, found);
        return plain_if(bytes && is_utf8(found->bytes, found->length));
    case 3:
        *size = found->value;
        return plain_if(found->wire == WIRE_VARINT && found->value <= INT32_MAX);
    case 4: /* taken out by a compaction */
    case 6: /* the key is in Base64 */
        return plain_if(found->wire == WIRE_VARINT && found->value == 0);
    case 5:
        row->numbers[FB_ENTRY_FLAGS] |= FB_ENTRY_HAS_EVENT_TIME;
        return plain_if(put_number(row, FB_ENTRY_EVENT_TIME, found));
    case 7:
        put_span(row, FB_ENTRY_ORDERING_POSITION, found);
        return plain_if(bytes);
    case 8:
        row->numbers[FB_ENTRY_FLAGS] |= FB_ENTRY_HAS_SEQUENCE_ID;
        row->numbers[FB_ENTRY_SEQUENCE_ID] = (int64_t)found->value;
        return plain_if(found->wire == WIRE_VARINT);
    case 9:
        row->null_value = found->value != 0;
        return plain_if(found->wire == WIRE_VARINT);
    case 10:
        row->null_key = found->value != 0;
        return plain_if(found->wire == WIRE_VARINT);
    default:
        return PLAIN;
    }
}

static enum parsed read_single(row *row, reader *from, fb_properties *properties) {
    if (from->end - from->at < 4)
        return NOT_PLAIN;
    uint32_t head = load_u32_be(from->at);
    from->at += 4;
    reader metadata = {from->at, NULL, 0};
    if (!skip(from, head))
        return NOT_PLAIN;
    metadata.end = from->at;
    uint64_t size = UINT64_MAX;
    field found;
    while (metadata.at < metadata.end) {
        if (!read_field(&metadata, &found))
            return NOT_PLAIN;
        enum parsed parsed = take_single(row, &found, properties, &size);
        if (parsed != PLAIN)
            return parsed;
    }
    row->numbers[FB_ENTRY_PAYLOAD_POSITION] = from->at - row->data;
    row->numbers[FB_ENTRY_PAYLOAD_LENGTH] = row->null_value ? -1 : (int64_t)size;
    if (row->null_key) {
        row->numbers[FB_ENTRY_KEY_POSITION] = 0;
        row->numbers[FB_ENTRY_KEY_LENGTH] = -1;
    }
    return plain_if(skip(from, size));
}

enum fb_entry_stop fb_batch_columns(const uint8_t *data, size_t bytes, const uint8_t *positions,
                                    const uint8_t *lengths, const uint8_t *counts, size_t entries,
                                    size_t rows, int64_t *columns, fb_properties *properties,
                                    size_t *done) {
    *done = 0;
    for (size_t entry = 0; entry < entries; entry++) {
        uint64_t position;
        uint32_t length, count;
        memcpy(&position, positions + 8 * entry, 8);
        memcpy(&length, lengths + 4 * entry, 4);
        memcpy(&count, counts + 4 * entry, 4);
        if (position > bytes || length > bytes - position || count > rows - *done)
            return FB_ENTRIES_OUTSIDE;
        reader from = {data + position, data + position + length, 0};
        for (uint32_t number = 0; number < count; number++, (*done)++) {
            row row = {{0}, data, false, false, false, false, false};
            row.numbers[FB_ENTRY_KEY_LENGTH] = row.numbers[FB_ENTRY_ORDERING_LENGTH] = -1;
            row.numbers[FB_ENTRY_PUBLISH_TIME] = (int64_t)entry;
            row.numbers[FB_ENTRY_INDEX] = number;
            row.numbers[FB_ENTRY_FLAGS] = FB_ENTRY_PLAIN;
            enum parsed parsed = read_single(&row, &from, properties);
            if (parsed != PLAIN)
                return parsed == NO_MEMORY ? FB_ENTRIES_MEMORY : FB_ENTRIES_OUTSIDE;
            for (int column = 0; column < FB_ENTRY_COLUMNS; column++)
                columns[(size_t)column * rows + *done] = row.numbers[column];
        }
        if (from.at != from.end)
            return FB_ENTRIES_OUTSIDE;
    }
    return *done == rows ? FB_ENTRIES_ALL : FB_ENTRIES_OUTSIDE;
}
