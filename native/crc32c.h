/* CRC-32C (Castagnoli), which Pulsar puts over every entry. Call `fb_crc32c_init` first. */
#ifndef FOREBAY_CRC32C_H
#define FOREBAY_CRC32C_H

#include <stddef.h>
#include <stdint.h>

void fb_crc32c_init(void);

uint32_t fb_crc32c(const uint8_t *data, size_t bytes);

/* The same with tables only, for processors without an instruction for it. */
uint32_t fb_crc32c_tables(const uint8_t *data, size_t bytes);

#endif
