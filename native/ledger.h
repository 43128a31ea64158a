/*
 * Ledgers of Pulsar in C11, without Python: the same as `src/forebay/format/pulsar/pure.py`.
 *
 *   entry    [i32 length][i64 id][data], big-endian, docs/formats/pulsar-ledger.md
 *   data     [0x0e01][u32 crc32c][u32 size][MessageMetadata][payload], docs/formats/pulsar-entry.md
 *
 * A frame becomes an entry that a Pulsar client can read, and from which the frame is built again,
 * byte for byte. What Pulsar has no field for is in an extension field of the metadata.
 *
 * What a caller gets wrong: call `fb_init` and `fb_ledger_init` before anything else.
 */
#ifndef FOREBAY_LEDGER_H
#define FOREBAY_LEDGER_H

#include "codec.h"

#define FB_ENTRY_HEADER_BYTES 12u
#define FB_METADATA_BYTES_MIN 6u /* the required fields */
#define FB_ENTRY_BYTES_MAX (160u * 1024 * 1024)

void fb_ledger_init(void);

/* CRC-32C (Castagnoli). */
uint32_t fb_crc32c(const uint8_t *data, size_t bytes);

/* The same with tables only. */
uint32_t fb_crc32c_tables(const uint8_t *data, size_t bytes);

/* ---- entries of a block ---- */

enum fb_entries_end {
    FB_ENTRIES_COMPLETE,
    FB_ENTRIES_TORN,
    FB_ENTRIES_PADDING,
    FB_ENTRIES_BAD_LENGTH,
    FB_ENTRIES_BAD_ID
};

/*
 * Scans the entries of data[start:bytes], start <= bytes, of a block of which `left` bytes remain
 * from `start` on, and appends a row (offset: the id) for each whole one. Returns false only if
 * memory ran out.
 */
bool fb_scan_entries(const uint8_t *data, size_t bytes, size_t start, uint64_t left,
                     uint64_t entry_id, fb_frames *rows, size_t *stop, enum fb_entries_end *end);

void fb_store_entry_header(uint8_t *at, uint32_t length, uint64_t entry_id);

/* The first entry, from row 0 on, whose checksum is wrong, or which cannot be a message, or `rows`.
   Messages of old clients have no checksum. Returns false for a row that is not inside the data. */
bool fb_check_entries(const uint8_t *data, size_t bytes, const uint8_t *positions,
                      const uint8_t *lengths, size_t rows, size_t *bad);

/* ---- frames to entries ---- */

/*
 * Writes the messages of the rows from `row` on as entries to out[*at:room], until one does not
 * fit. The frame of `row` has `offset`, its entry `entry_id`. `places` gets the position of each
 * entry's header, as u64. `*needed` is the size of the data that did not fit, or 0. Columns are
 * unaligned. Returns FB_OUT_OF_RANGE for a row that is not inside the data.
 */
enum fb_stop fb_pack_frames(const uint8_t *data, size_t bytes, const uint8_t *positions,
                            const uint8_t *lengths, size_t rows, size_t row, uint64_t offset,
                            uint64_t entry_id, uint8_t *out, size_t room, size_t *at,
                            uint8_t *places, size_t *done, uint64_t *needed);

/* ---- entries to frames ---- */

enum fb_entry_fault { FB_ENTRY_GOOD, FB_ENTRY_CHECKSUM, FB_ENTRY_MALFORMED };

/*
 * Computes the size of the frames of the entries from `row` on, up to `bytes_max` but at least one,
 * or up to the first that is no frame: `*fault` says why. `*done` is the row after the last one.
 */
enum fb_stop fb_unpack_size(const uint8_t *data, size_t bytes, const uint8_t *positions,
                            const uint8_t *lengths, size_t rows, size_t row, uint64_t bytes_max,
                            uint64_t *total, size_t *done, enum fb_entry_fault *fault);

/*
 * Writes these frames to out[:total], and the position and length of each message. Returns false if
 * the entries are not those that `fb_unpack_size` saw: another thread may have written to them.
 */
bool fb_unpack_frames(const uint8_t *data, size_t bytes, const uint8_t *positions,
                      const uint8_t *lengths, size_t row, size_t done, uint64_t offset,
                      uint8_t *out, size_t total, uint8_t *message_positions,
                      uint8_t *message_lengths);

#endif
