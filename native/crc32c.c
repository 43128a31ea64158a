#include "crc32c.h"

#include <stdbool.h>
#include <string.h>

#define POLYNOMIAL 0x82f63b78u

static uint32_t tables[8][256];
static bool in_hardware;

void fb_crc32c_init(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
        tables[0][byte] = crc;
    }
    for (uint32_t byte = 0; byte < 256; byte++)
        for (int slice = 1; slice < 8; slice++)
            tables[slice][byte] =
                tables[slice - 1][byte] >> 8 ^ tables[0][tables[slice - 1][byte] & 0xff];
#if defined(__x86_64__) && defined(__GNUC__)
    in_hardware = __builtin_cpu_supports("sse4.2");
#endif
}

uint32_t fb_crc32c_tables(const uint8_t *data, size_t bytes) {
    uint32_t crc = 0xffffffffu;
    for (; bytes >= 8; bytes -= 8, data += 8) {
        crc ^= (uint32_t)data[0] | (uint32_t)data[1] << 8 | (uint32_t)data[2] << 16 |
               (uint32_t)data[3] << 24;
        crc = tables[7][crc & 0xff] ^ tables[6][crc >> 8 & 0xff] ^ tables[5][crc >> 16 & 0xff] ^
              tables[4][crc >> 24] ^ tables[3][data[4]] ^ tables[2][data[5]] ^
              tables[1][data[6]] ^ tables[0][data[7]];
    }
    for (; bytes; bytes--, data++)
        crc = crc >> 8 ^ tables[0][(crc ^ *data) & 0xff];
    return ~crc;
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <nmmintrin.h>

__attribute__((target("sse4.2"))) static uint32_t crc32c_instruction(const uint8_t *data,
                                                                     size_t bytes) {
    uint64_t crc = 0xffffffffu;
    for (; bytes >= 8; bytes -= 8, data += 8) {
        uint64_t eight;
        memcpy(&eight, data, 8);
        crc = _mm_crc32_u64(crc, eight);
    }
    for (; bytes; bytes--, data++)
        crc = _mm_crc32_u8((uint32_t)crc, *data);
    return ~(uint32_t)crc;
}
#endif

uint32_t fb_crc32c(const uint8_t *data, size_t bytes) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (in_hardware)
        return crc32c_instruction(data, bytes);
#endif
    return fb_crc32c_tables(data, bytes);
}
