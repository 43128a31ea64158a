/*
 * Fuzzes native/codec.c and native/ledger.c under the address and undefined-behaviour sanitizers.
 *
 *   fuzz_codec SEED ITERATIONS
 *
 * Every input lies in a block of exactly its size, so that reading one byte too many ends the run.
 * An iteration builds frames of random messages in both flavours, expects scan and locate to give
 * them back, then damages the bytes in some ways and expects no more than sanity. Deterministic:
 * the failing iteration is printed, and its seed repeats it with one iteration.
 */
#include "codec.h"
#include "ledger.h"
#include "pulsar_columns.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: seed %llu: %s\n", __FILE__, __LINE__,                          \
                    (unsigned long long)seed, #condition);                                         \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

#define FRAMES_MAX 6
#define PAIRS_MAX 4

static uint64_t seed, state;

static uint64_t next_random(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static size_t below(size_t limit) { return (size_t)(next_random() % limit); }

/* Lengths that matter: none, few, around the widths of varints, sometimes more. */
static size_t random_length(void) {
    switch (below(6)) {
    case 0:
        return 0;
    case 1:
        return 245 + below(12);
    case 2:
        return below(1500);
    default:
        return below(24);
    }
}

static uint64_t random_number(void) { return next_random() >> below(64); }

/* ---- a block of exact size ---- */

typedef struct {
    uint8_t *data;
    size_t bytes;
} block;

static block block_of(const uint8_t *data, size_t bytes) {
    block made = {malloc(bytes), bytes};
    if (bytes > 0)
        memcpy(made.data, data, bytes);
    return made;
}

/* ---- building messages ---- */

typedef struct {
    uint8_t *data;
    size_t bytes;
    size_t room;
} builder;

static void put(builder *out, const void *data, size_t bytes) {
    if (out->room - out->bytes < bytes) {
        out->room = 2 * (out->room + bytes);
        out->data = realloc(out->data, out->room);
    }
    if (bytes > 0)
        memcpy(out->data + out->bytes, data, bytes);
    out->bytes += bytes;
}

static void put_le(builder *out, uint64_t value, size_t width) {
    uint8_t bytes[8];
    for (size_t at = 0; at < width; at++)
        bytes[at] = (uint8_t)(value >> 8 * at);
    put(out, bytes, width);
}

static void put_byte(builder *out, uint8_t byte) { put(out, &byte, 1); }

/* Varints are now and then wider than they need to be: readers take those too. */
static void put_number(builder *out, enum fb_flavour flavour, uint64_t value, size_t fixed_width) {
    size_t wider = below(8) == 0 ? below(4) : 0;
    if (flavour == FB_FIXED) {
        put_le(out, value, fixed_width);
    } else if (value < 251 && wider < 1) {
        put_byte(out, (uint8_t)value);
    } else if (value <= UINT16_MAX && wider < 2) {
        put_byte(out, 251);
        put_le(out, value, 2);
    } else if (value <= UINT32_MAX && wider < 3) {
        put_byte(out, 252);
        put_le(out, value, 4);
    } else {
        put_byte(out, 253);
        put_le(out, value, 8);
    }
}

/* Random bytes after their length; answers where they lie. */
static fb_span put_text(builder *out, enum fb_flavour flavour, size_t length) {
    put_number(out, flavour, length, 8);
    fb_span span = {out->bytes, length};
    for (size_t at = 0; at < length; at++)
        put_byte(out, (uint8_t)next_random());
    return span;
}

static bool put_tag(builder *out) {
    bool present = below(2);
    put_byte(out, present);
    return present;
}

static fb_span put_topic(builder *out, enum fb_flavour flavour) {
    fb_span span = put_text(out, flavour, 1 + random_length());
    out->data[span.position] = '/';
    return span;
}

static void put_attributes(builder *out, enum fb_flavour flavour, fb_layout *layout) {
    layout->attribute_count = below(PAIRS_MAX + 1);
    put_number(out, flavour, layout->attribute_count, 8);
    size_t first = out->bytes;
    for (uint64_t text = 0; text < 2 * layout->attribute_count; text++)
        put_text(out, flavour, random_length());
    layout->attributes = (fb_span){first, out->bytes - first};
}

static void put_later_fields(builder *out, enum fb_flavour flavour, fb_layout *layout) {
    size_t fields = below(3);
    layout->has_routing_key = false;
    if (fields == 0)
        return;
    if (put_tag(out))
        put_number(out, flavour, random_number(), 8);
    if (put_tag(out))
        put_number(out, flavour, (uint32_t)random_number(), 4);
    if (fields == 2 && (layout->has_routing_key = put_tag(out)))
        layout->routing_key = put_text(out, flavour, random_length());
}

/* One message with a rooted topic, in any shape that a writer ever gave it. */
static void put_message(builder *out, fb_layout *layout) {
    enum fb_flavour flavour = below(2) ? FB_FIXED : FB_VARINT;
    layout->flavour = flavour;
    put_number(out, flavour, random_number(), 8);
    put_number(out, flavour, random_number(), 8);
    layout->topic_name = put_topic(out, flavour);
    put_text(out, flavour, random_length());
    put_number(out, flavour, random_number(), 8);
    layout->payload = put_text(out, flavour, random_length());
    layout->publish_time = random_number();
    put_number(out, flavour, layout->publish_time, 8);
    put_text(out, flavour, random_length());
    if (put_tag(out))
        put_text(out, flavour, random_length());
    put_attributes(out, flavour, layout);
    put_later_fields(out, flavour, layout);
}

/* ---- CRC ---- */

static uint32_t crc_bit_by_bit(const uint8_t *data, size_t bytes) {
    uint32_t crc = 0xFFFFFFFFu;
    for (size_t at = 0; at < bytes; at++) {
        crc ^= data[at];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
    }
    return ~crc;
}

static void check_crc(block input) {
    uint32_t expected = crc_bit_by_bit(input.data, input.bytes);
    CHECK(fb_crc32(input.data, input.bytes) == expected);
    CHECK(fb_crc32_tables(input.data, input.bytes) == expected);
}

/* Every length around the lanes of the folding, at every alignment. */
static void check_crc_lengths(void) {
    for (size_t bytes = 0; bytes < 400; bytes++)
        for (size_t skip = 0; skip < 16; skip++) {
            block input = {malloc(skip + bytes), skip + bytes};
            for (size_t at = 0; at < input.bytes; at++)
                input.data[at] = (uint8_t)next_random();
            check_crc((block){input.data + skip, bytes});
            free(input.data);
        }
}

/* ---- locate, one message and many ---- */

static void check_span(fb_span span, fb_span inside) {
    CHECK(span.position >= inside.position);
    CHECK(span.length <= inside.length);
    CHECK(span.position - inside.position <= inside.length - span.length);
}

static bool locate(block input, fb_span message, fb_layout *layout) {
    if (!fb_locate(input.data, message.position, message.length, layout))
        return false;
    check_span(layout->topic_name, message);
    check_span(layout->payload, message);
    check_span(layout->attributes, message);
    CHECK(layout->attribute_count <= layout->attributes.length);
    if (layout->has_routing_key)
        check_span(layout->routing_key, message);
    return true;
}

static uint64_t item(const uint8_t *column, size_t row) {
    uint64_t value;
    memcpy(&value, column + 8 * row, sizeof value);
    return value;
}

static void check_row(const fb_columns *columns, size_t row, const fb_layout *layout) {
    CHECK(item(columns->publish_times, row) == layout->publish_time);
    CHECK(item(columns->payload_positions, row) == layout->payload.position);
    CHECK(item(columns->payload_lengths, row) == layout->payload.length);
    CHECK(item(columns->attribute_positions, row) == layout->attributes.position);
    CHECK(item(columns->attribute_lengths, row) == layout->attributes.length);
    CHECK(item(columns->attribute_counts, row) == layout->attribute_count);
    CHECK(columns->flavours[row] == layout->flavour);
    if (layout->has_routing_key) {
        CHECK(item(columns->key_positions, row) == layout->routing_key.position);
        CHECK(item(columns->key_lengths, row) == layout->routing_key.length);
    } else {
        CHECK(item(columns->key_positions, row) == 0);
        CHECK(item(columns->key_lengths, row) == UINT64_MAX);
    }
}

static void check_columns(block input, const uint64_t *positions, const uint32_t *lengths,
                          size_t rows) {
    uint8_t *room[9];
    for (int column = 0; column < 9; column++)
        room[column] = malloc(column == 8 ? rows : 8 * rows);
    fb_columns columns = {room[0], room[1], room[2], room[3], room[4],
                          room[5], room[6], room[7], room[8]};
    size_t done = 0;
    enum fb_stop stop =
        fb_locate_rows(input.data, input.bytes, (const uint8_t *)positions,
                       (const uint8_t *)lengths, rows, &columns, &done);
    fb_layout layout;
    for (size_t row = 0; row < done; row++) {
        CHECK(locate(input, (fb_span){positions[row], lengths[row]}, &layout));
        check_row(&columns, row, &layout);
    }
    fb_survey survey;
    CHECK(fb_survey_rows(input.data, input.bytes, (const uint8_t *)positions,
                         (const uint8_t *)lengths, rows, (const uint8_t *)"/t", 2,
                         &survey) == stop);
    CHECK(survey.rows == done && survey.foreign <= done);
    CHECK((stop == FB_ALL_ROWS) == (done == rows));
    if (stop != FB_ALL_ROWS) {
        bool inside = lengths[done] <= input.bytes && positions[done] <= input.bytes - lengths[done];
        CHECK(inside == (stop == FB_NO_MESSAGE));
    }
    for (int column = 0; column < 9; column++)
        free(room[column]);
}

/* Positions and lengths from nowhere, on blocks of exact size. */
static void check_random_rows(block input) {
    size_t rows = 1 + below(4);
    uint64_t *positions = malloc(rows * sizeof *positions);
    uint32_t *lengths = malloc(rows * sizeof *lengths);
    for (size_t row = 0; row < rows; row++) {
        positions[row] = below(4) ? below(input.bytes + 2) : random_number();
        if (below(8) == 0)
            positions[row] = UINT64_MAX - below(input.bytes + 2);
        lengths[row] = (uint32_t)(below(4) ? below(input.bytes + 2) : random_number());
    }
    check_columns(input, positions, lengths, rows);
    free(positions);
    free(lengths);
}

/* ---- gather ---- */

/* Into blocks of exact size: first with what its own size says, then with one byte less. */
static void check_gather(block input, const int64_t *positions, const int64_t *lengths,
                         size_t rows) {
    uint64_t total;
    size_t nulls, done;
    const uint8_t *places = (const uint8_t *)positions, *sizes = (const uint8_t *)lengths;
    enum fb_stop stop = fb_gather_size(input.bytes, places, sizes, rows, &total, &nulls, &done);
    size_t room = stop == FB_ALL_ROWS ? (size_t)total : below(64);
    for (int less = 0; less < 2 && room >= (size_t)less; less++) {
        fb_gathered out = {malloc(room - (size_t)less), room - (size_t)less, malloc(4 * (rows + 1)),
                           nulls ? malloc((rows + 7) / 8) : NULL};
        bool whole = fb_gather(input.data, input.bytes, places, sizes, rows, &out);
        CHECK(stop != FB_ALL_ROWS || whole == (less == 0));
        size_t at = 0;
        for (size_t row = 0; whole && row < rows; row++) {
            CHECK(fb_load_u32(out.offsets + 4 * row) == at);
            if (out.validity != NULL)
                CHECK((out.validity[row / 8] >> row % 8 & 1) == (lengths[row] >= 0));
            if (lengths[row] <= 0)
                continue;
            CHECK(memcmp(out.data + at, input.data + positions[row], (size_t)lengths[row]) == 0);
            at += (size_t)lengths[row];
        }
        CHECK(!whole || fb_load_u32(out.offsets + 4 * rows) == out.bytes);
        free(out.data);
        free(out.offsets);
        free(out.validity);
    }
}

static void check_random_spans(block input) {
    size_t rows = below(12);
    int64_t *positions = malloc(rows * sizeof *positions);
    int64_t *lengths = malloc(rows * sizeof *lengths);
    bool wild = below(4) == 0;
    for (size_t row = 0; row < rows; row++) {
        positions[row] = (int64_t)(wild && below(2) ? random_number() : below(input.bytes + 1));
        size_t left = wild ? input.bytes + 2 : input.bytes - (size_t)positions[row] + 1;
        lengths[row] = (int64_t)(wild && below(4) == 0 ? random_number() : below(left));
        if (below(4) == 0)
            lengths[row] = -1;
    }
    check_gather(input, positions, lengths, rows);
    free(positions);
    free(lengths);
}

/* ---- scan ---- */

static void check_frames(block input, size_t start, const fb_frames *frames,
                         const fb_scan_end *end) {
    size_t at = start;
    for (size_t row = 0; row < frames->rows; row++) {
        CHECK(frames->positions[row] == at + FB_HEADER_BYTES);
        CHECK(frames->lengths[row] <= input.bytes - frames->positions[row]);
        CHECK(frames->offsets[row] <= FB_OFFSET_MAX);
        at = frames->positions[row] + frames->lengths[row];
    }
    CHECK(end->safe_length == at && at <= input.bytes);
    CHECK((end->end == FB_COMPLETE) == (at == input.bytes));
    check_columns(input, frames->positions, frames->lengths, frames->rows);
}

static void check_scan(block input) {
    fb_frames frames = {0};
    fb_scan_end end;
    fb_offset expected = {below(2), below(2) ? random_number() : 0};
    size_t start = below(4) ? 0 : below(input.bytes + 1);
    CHECK(fb_scan(input.data, input.bytes, start, expected, below(2), &frames, &end));
    check_frames(input, start, &frames, &end);
    fb_frames_free(&frames);
}

/* ---- find ---- */

/* Whether a whole valid frame with a wanted offset begins at `at`, bit by bit. */
static bool is_wanted(block input, size_t at, const fb_wanted *wanted) {
    const uint8_t *header = input.data + at;
    uint64_t offset = fb_load_u64(header);
    uint32_t length = fb_load_u32(header + 8);
    return offset >= wanted->first && offset <= wanted->last &&
           length >= FB_FRAME_PAYLOAD_BYTES_MIN && length <= input.bytes - at - FB_HEADER_BYTES &&
           crc_bit_by_bit(header + FB_HEADER_BYTES, length) == fb_load_u32(header + 12);
}

static void check_find(block input) {
    size_t more = below(3) ? 0 : below(2000), resume;
    fb_wanted wanted = {0};
    wanted.first = below(2) ? 0 : random_number() >> 1;
    wanted.last = FB_OFFSET_MAX - (below(2) ? 0 : random_number() >> 1);
    wanted.total = input.bytes + more;
    wanted.stop = below(2) ? input.bytes : below(input.bytes + 1);
    wanted.messages_only = below(2);
    wanted.limit = below(3);
    fb_frames found = {0};
    CHECK(fb_find(input.data, input.bytes, &wanted, &found, &resume));
    CHECK(resume <= wanted.stop);
    size_t row = 0;
    for (size_t at = 0; at < resume; at++)
        if (row < found.rows && found.positions[row] == at + FB_HEADER_BYTES) {
            CHECK(is_wanted(input, at, &wanted));
            row++;
        } else {
            CHECK(wanted.messages_only || !is_wanted(input, at, &wanted));
        }
    CHECK(row == found.rows && (wanted.limit == 0 || row <= wanted.limit));
    if (resume < wanted.stop && input.bytes - resume >= FB_HEADER_BYTES && more == 0)
        CHECK(row > 0 && row == wanted.limit);
    fb_frames_free(&found);
}

/* ---- valid input gives itself back ---- */

typedef struct {
    uint64_t first;
    size_t count;
    fb_layout layouts[FRAMES_MAX]; /* positions in the whole buffer */
} expectation;

static void move_span(fb_span *span, size_t by) { span->position += by; }

static void put_frame(builder *out, expectation *expected) {
    builder message = {0};
    fb_layout *layout = &expected->layouts[expected->count];
    put_message(&message, layout);
    put_le(out, expected->first + expected->count, 8);
    put_le(out, message.bytes, 4);
    put_le(out, crc_bit_by_bit(message.data, message.bytes), 4);
    move_span(&layout->topic_name, out->bytes);
    move_span(&layout->payload, out->bytes);
    move_span(&layout->attributes, out->bytes);
    move_span(&layout->routing_key, out->bytes);
    put(out, message.data, message.bytes);
    expected->count++;
    free(message.data);
}

static void check_same_span(fb_span left, fb_span right) {
    CHECK(left.position == right.position && left.length == right.length);
}

static void check_same_layout(const fb_layout *left, const fb_layout *right) {
    CHECK(left->flavour == right->flavour);
    CHECK(left->publish_time == right->publish_time);
    CHECK(left->attribute_count == right->attribute_count);
    CHECK(left->has_routing_key == right->has_routing_key);
    check_same_span(left->topic_name, right->topic_name);
    check_same_span(left->payload, right->payload);
    check_same_span(left->attributes, right->attributes);
    if (left->has_routing_key)
        check_same_span(left->routing_key, right->routing_key);
}

static void check_valid(block input, const expectation *expected) {
    fb_frames frames = {0};
    fb_scan_end end;
    fb_offset first = {true, expected->first};
    CHECK(fb_scan(input.data, input.bytes, 0, first, true, &frames, &end));
    CHECK(end.end == FB_COMPLETE && frames.rows == expected->count);
    CHECK(end.offset.known && end.offset.value == expected->first + expected->count);
    check_frames(input, 0, &frames, &end);
    for (size_t row = 0; row < frames.rows; row++) {
        fb_layout layout;
        CHECK(frames.offsets[row] == expected->first + row);
        CHECK(locate(input, (fb_span){frames.positions[row], frames.lengths[row]}, &layout));
        check_same_layout(&layout, &expected->layouts[row]);
    }
    fb_frames_free(&frames);
}

/* A cut inside frame k leaves frames 0..k-1 and is torn, never corrupt. */
static void check_torn(block input, size_t count) {
    block cut = block_of(input.data, below(input.bytes + 1));
    fb_frames frames = {0};
    fb_scan_end end;
    CHECK(fb_scan(cut.data, cut.bytes, 0, (fb_offset){false, 0}, true, &frames, &end));
    CHECK(end.end == FB_COMPLETE || end.end == FB_TORN);
    CHECK(frames.rows <= count);
    check_frames(cut, 0, &frames, &end);
    check_random_rows(cut);
    check_random_spans(cut);
    fb_frames_free(&frames);
    free(cut.data);
}

/* ---- damage ---- */

static void damage_once(block input) {
    size_t at = below(input.bytes), length = 1 + below(24), from = below(input.bytes);
    if (length > input.bytes - at)
        length = input.bytes - at;
    if (length > input.bytes - from)
        length = input.bytes - from;
    switch (below(5)) {
    case 0:
        input.data[at] ^= (uint8_t)(1u << below(8));
        break;
    case 1:
        memset(input.data + at, below(2) ? 0 : 0xFF, length);
        break;
    case 2:
        memmove(input.data + at, input.data + from, length);
        break;
    case 3:
        input.data[at] = (uint8_t)(248 + below(8));
        break;
    default:
        for (size_t byte = 0; byte < length; byte++)
            input.data[at + byte] = (uint8_t)next_random();
    }
}

/* Makes the CRCs right again, so that damage gets past them and into locate. */
static void mend_crcs(block input) {
    size_t at = 0;
    while (input.bytes - at >= FB_HEADER_BYTES) {
        uint8_t *header = input.data + at;
        size_t length = header[8] | (size_t)header[9] << 8 | (size_t)header[10] << 16 |
                        (size_t)header[11] << 24;
        if (length > input.bytes - at - FB_HEADER_BYTES)
            return;
        uint32_t crc = crc_bit_by_bit(header + FB_HEADER_BYTES, length);
        for (int byte = 0; byte < 4; byte++)
            header[12 + byte] = (uint8_t)(crc >> 8 * byte);
        at += FB_HEADER_BYTES + length;
    }
}

static void check_damaged(block input) {
    block damaged = block_of(input.data, below(8) ? input.bytes : 1 + below(input.bytes));
    for (size_t times = 1 + below(3); times > 0; times--)
        damage_once(damaged);
    if (below(2))
        mend_crcs(damaged);
    check_scan(damaged);
    check_find(damaged);
    check_random_rows(damaged);
    check_random_spans(damaged);
    free(damaged.data);
}

/* ---- encode ---- */

static fb_bytes random_bytes(void) {
    size_t bytes = random_length();
    uint8_t *data = malloc(bytes);
    for (size_t at = 0; at < bytes; at++)
        data[at] = (uint8_t)next_random();
    return (fb_bytes){data, bytes};
}

static void check_text(block frame, fb_span span, fb_bytes text) {
    CHECK(span.length == text.bytes);
    CHECK(text.bytes == 0 || memcmp(frame.data + span.position, text.data, text.bytes) == 0);
}

static void check_encoded(block frame, const fb_message *message) {
    fb_frames frames = {0};
    fb_scan_end end;
    fb_layout layout;
    CHECK(fb_scan(frame.data, frame.bytes, 0, (fb_offset){true, message->offset}, true, &frames,
                  &end));
    CHECK(end.end == FB_COMPLETE && frames.rows == 1);
    CHECK(locate(frame, (fb_span){frames.positions[0], frames.lengths[0]}, &layout));
    CHECK(layout.flavour == FB_FIXED && layout.publish_time == message->publish_time);
    const uint8_t *head = frame.data + FB_HEADER_BYTES, *wanted = message->head.data;
    CHECK(fb_load_u64(head) == (message->numbered ? message->request_id : fb_load_u64(wanted)));
    CHECK(memcmp(head + FB_REQUEST_BYTES, wanted + FB_REQUEST_BYTES,
                 message->head.bytes - FB_REQUEST_BYTES) == 0);
    check_text(frame, layout.payload, message->payload);
    CHECK(layout.attribute_count == message->attribute_count);
    CHECK(layout.has_routing_key == message->has_routing_key);
    if (layout.has_routing_key)
        check_text(frame, layout.routing_key, message->routing_key);
    size_t at = layout.attributes.position;
    for (size_t text = 0; text < 2 * message->attribute_count; text++) {
        check_text(frame, (fb_span){at + 8, message->texts[text].bytes}, message->texts[text]);
        at += 8 + message->texts[text].bytes;
    }
    CHECK(at == layout.attributes.position + layout.attributes.length);
    fb_frames_free(&frames);
}

static void check_encode(void) {
    builder head = {0}, middle = {0};
    put_le(&head, random_number(), 8);
    put_le(&head, random_number(), 8);
    put_topic(&head, FB_FIXED);
    put_text(&head, FB_FIXED, random_length());
    put_text(&middle, FB_FIXED, random_length());
    if (put_tag(&middle))
        put_text(&middle, FB_FIXED, random_length());
    fb_bytes texts[2 * PAIRS_MAX];
    fb_message message = {.head = {head.data, head.bytes},
                          .numbered = below(2),
                          .request_id = random_number(),
                          .middle = {middle.data, middle.bytes},
                          .payload = random_bytes(),
                          .offset = random_number() >> 1,
                          .publish_time = random_number(),
                          .texts = texts,
                          .attribute_count = below(PAIRS_MAX + 1),
                          .has_routing_key = below(2),
                          .routing_key = random_bytes()};
    for (size_t text = 0; text < 2 * message.attribute_count; text++)
        texts[text] = random_bytes();
    uint64_t bytes = fb_message_bytes(&message);
    block frame = {malloc(FB_HEADER_BYTES + bytes), FB_HEADER_BYTES + bytes};
    fb_encode(&message, (uint32_t)bytes, frame.data);
    check_encoded(frame, &message);
    for (size_t text = 0; text < 2 * message.attribute_count; text++)
        free((void *)texts[text].data);
    free((void *)message.payload.data);
    free((void *)message.routing_key.data);
    free(frame.data);
    free(head.data);
    free(middle.data);
}

/* ---- ledgers ---- */

static uint32_t crc32c_bit_by_bit(const uint8_t *data, size_t bytes) {
    uint32_t crc = 0xFFFFFFFFu;
    for (size_t at = 0; at < bytes; at++) {
        crc ^= data[at];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78u : 0);
    }
    return ~crc;
}

static void check_crc32c(block input) {
    uint32_t expected = crc32c_bit_by_bit(input.data, input.bytes);
    CHECK(fb_crc32c(input.data, input.bytes) == expected);
    CHECK(fb_crc32c_tables(input.data, input.bytes) == expected);
}

/* Frames as entries in a block of `room` bytes; fewer, if they do not fit. */
static block pack_ledger(block input, const fb_frames *frames, size_t room, uint64_t offset,
                         size_t *done) {
    block ledger = {malloc(room), 0};
    uint8_t *places = malloc(8 * frames->rows);
    uint64_t needed;
    CHECK(fb_pack_frames(input.data, input.bytes, (const uint8_t *)frames->positions,
                         (const uint8_t *)frames->lengths, frames->rows, 0, offset, 5, ledger.data,
                         room, &ledger.bytes, places, done, &needed) == FB_ALL_ROWS);
    CHECK(ledger.bytes <= room && (needed > 0) == (*done < frames->rows));
    CHECK(needed == 0 || needed + FB_ENTRY_HEADER_BYTES > room - ledger.bytes);
    for (size_t row = 0; row < *done; row++) {
        uint64_t place = item(places, row);
        CHECK(place < ledger.bytes && (row > 0 || place == 0));
    }
    free(places);
    block exact = block_of(ledger.data, ledger.bytes);
    free(ledger.data);
    return exact;
}

/* The frames of entries, in a block of exactly their size. */
static block unpack_ledger(block ledger, const fb_frames *entries, uint64_t offset,
                           uint64_t bytes_max, size_t *done, enum fb_entry_fault *fault) {
    uint64_t total;
    const uint8_t *positions = (const uint8_t *)entries->positions;
    const uint8_t *lengths = (const uint8_t *)entries->lengths;
    CHECK(fb_unpack_size(ledger.data, ledger.bytes, positions, lengths, entries->rows, 0,
                         bytes_max, &total, done, fault) == FB_ALL_ROWS);
    block frames = {malloc((size_t)total), (size_t)total};
    uint8_t *places = malloc(8 * *done), *sizes = malloc(4 * *done);
    CHECK(fb_unpack_frames(ledger.data, ledger.bytes, positions, lengths, 0, *done, offset,
                           frames.data, frames.bytes, places, sizes));
    if (frames.bytes > 0)
        CHECK(!fb_unpack_frames(ledger.data, ledger.bytes, positions, lengths, 0, *done, offset,
                                frames.data, frames.bytes - 1, places, sizes));
    free(places);
    free(sizes);
    fb_frames again = {0};
    fb_scan_end end;
    CHECK(fb_scan(frames.data, frames.bytes, 0, (fb_offset){true, offset}, true, &again, &end));
    CHECK(*done == 0 || (end.end == FB_COMPLETE && again.rows == *done));
    fb_frames_free(&again);
    return frames;
}

/* Every span of a plain entry is inside it, and an entry that is not plain says nothing. */
static void check_entry_columns(block ledger, const fb_frames *entries) {
    static const int spans[] = {FB_ENTRY_PAYLOAD_POSITION, FB_ENTRY_KEY_POSITION,
                                FB_ENTRY_ORDERING_POSITION, FB_ENTRY_PRODUCER_POSITION,
                                FB_ENTRY_SCHEMA_POSITION};
    size_t rows = entries->rows, done, property = 0;
    int64_t *columns = calloc(rows * FB_ENTRY_COLUMNS + 1, sizeof *columns);
    fb_properties properties = {NULL, 0, 0};
    CHECK(columns != NULL);
    CHECK(fb_entry_columns(ledger.data, ledger.bytes, (const uint8_t *)entries->positions,
                           (const uint8_t *)entries->lengths, rows, columns, &properties,
                           &done) == FB_ENTRIES_ALL);
    CHECK(done == rows);
    for (size_t row = 0; row < rows; row++) {
        int64_t start = (int64_t)entries->positions[row], end = start + entries->lengths[row];
        int64_t count = columns[FB_ENTRY_PROPERTIES * rows + row];
        CHECK(columns[FB_ENTRY_FLAGS * rows + row] || count == 0);
        for (size_t span = 0; span < 5 && columns[FB_ENTRY_FLAGS * rows + row]; span++) {
            int64_t at = columns[(size_t)spans[span] * rows + row];
            int64_t length = columns[(size_t)(spans[span] + 1) * rows + row];
            CHECK(length < 0 || (start <= at && length <= end - at));
        }
        for (; count > 0; count--, property += 4)
            for (int half = 0; half < 4; half += 2) {
                const int64_t *found = properties.numbers + property + half;
                CHECK(start <= found[0] && found[1] >= 0 && found[1] <= end - found[0]);
            }
    }
    CHECK(property == properties.count);
    free(columns);
    free(properties.numbers);
}

static void damage_ledger(block ledger, uint64_t offset) {
    if (ledger.bytes == 0)
        return;
    block damaged = block_of(ledger.data, below(8) ? ledger.bytes : 1 + below(ledger.bytes));
    for (size_t times = 1 + below(3); times > 0; times--)
        damage_once(damaged);
    fb_frames entries = {0};
    size_t stop, done;
    enum fb_entries_end end;
    enum fb_entry_fault fault;
    size_t start = below(4) ? 0 : below(damaged.bytes + 1);
    CHECK(fb_scan_entries(damaged.data, damaged.bytes, start,
                          below(2) ? damaged.bytes - start : random_number(), 5, &entries, &stop,
                          &end));
    CHECK(stop <= damaged.bytes);
    for (size_t row = 0; row < entries.rows; row++) {
        CHECK(entries.lengths[row] <= damaged.bytes - entries.positions[row]);
        size_t length = entries.lengths[row];
        uint8_t *entry = damaged.data + entries.positions[row];
        if (length < 10 || below(4) == 0)
            continue;
        uint32_t crc = crc32c_bit_by_bit(entry + 6, length - 6); /* so that damage gets past it */
        for (int byte = 0; byte < 4; byte++)
            entry[2 + byte] = (uint8_t)(crc >> 8 * (3 - byte));
    }
    size_t bad;
    CHECK(fb_check_entries(damaged.data, damaged.bytes, (const uint8_t *)entries.positions,
                           (const uint8_t *)entries.lengths, entries.rows, &bad));
    CHECK(bad <= entries.rows);
    block frames = unpack_ledger(damaged, &entries, offset, random_number(), &done, &fault);
    check_entry_columns(damaged, &entries);
    free(frames.data);
    fb_frames_free(&entries);
    free(damaged.data);
}

static void check_ledger(block input, uint64_t offset) {
    fb_frames frames = {0}, entries = {0};
    fb_scan_end end;
    enum fb_entries_end entries_end;
    enum fb_entry_fault fault;
    size_t done, stop, again;
    CHECK(fb_scan(input.data, input.bytes, 0, (fb_offset){false, 0}, true, &frames, &end));
    size_t room = below(3) ? 4 * input.bytes + 4096 : below(2 * input.bytes + 1);
    block ledger = pack_ledger(input, &frames, room, offset, &done);
    CHECK(fb_scan_entries(ledger.data, ledger.bytes, 0, ledger.bytes, 5, &entries, &stop,
                          &entries_end));
    CHECK(entries.rows == done && stop == ledger.bytes && entries_end == FB_ENTRIES_COMPLETE);
    check_entry_columns(ledger, &entries);
    uint64_t bytes_max = below(2) ? UINT64_MAX : below(input.bytes);
    block back = unpack_ledger(ledger, &entries, offset, bytes_max, &again, &fault);
    CHECK(fault == FB_ENTRY_GOOD && (again == done || bytes_max < UINT64_MAX));
    size_t at = 0;
    for (size_t row = 0; row < again; row++) {
        at += FB_HEADER_BYTES;
        CHECK(memcmp(back.data + at, input.data + frames.positions[row], frames.lengths[row]) == 0);
        at += frames.lengths[row];
    }
    CHECK(at == back.bytes);
    for (int times = 0; times < 4; times++)
        damage_ledger(ledger, offset);
    free(back.data);
    free(ledger.data);
    fb_frames_free(&frames);
    fb_frames_free(&entries);
}

static void iterate(void) {
    builder built = {0};
    expectation expected = {random_number() >> 2, 0, {{0}}};
    for (size_t frames = 1 + below(FRAMES_MAX); frames > 0; frames--)
        put_frame(&built, &expected);
    block input = block_of(built.data, built.bytes);
    free(built.data);
    check_crc(input);
    check_crc32c(input);
    check_ledger(input, below(2) ? expected.first : random_number() >> 2);
    check_valid(input, &expected);
    check_scan(input);
    check_find(input);
    for (int times = 0; times < 4; times++) {
        check_torn(input, expected.count);
        check_damaged(input);
    }
    check_encode();
    free(input.data);
}

static void start_random(uint64_t with) {
    seed = with;
    state = with * 0x9E3779B97F4A7C15u | 1;
    for (int warm = 0; warm < 8; warm++)
        next_random();
}

int main(int count, char **words) {
    if (count != 3) {
        fprintf(stderr, "usage: fuzz_codec SEED ITERATIONS\n");
        return 2;
    }
    uint64_t first = strtoull(words[1], NULL, 10), iterations = strtoull(words[2], NULL, 10);
    fb_init();
    fb_ledger_init();
    start_random(first);
    check_crc_lengths();
    for (uint64_t iteration = 0; iteration < iterations; iteration++) {
        start_random(first + iteration);
        iterate();
    }
    printf("%llu iterations from seed %llu\n", (unsigned long long)iterations,
           (unsigned long long)first);
    return 0;
}
