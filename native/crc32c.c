/*
 * crc32c.c: CRC-32C over any bytes. The processor's instruction where it has
 * one, tables elsewhere; both give the same number.
 */
#include "nvo.h"

#include <pthread.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define SLICES 16

/* slice[k][b] is the checksum register after byte b and k zero bytes. */
static uint32_t slice[SLICES][256];
static pthread_once_t slice_once = PTHREAD_ONCE_INIT;

static void fill_slices(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t reg = byte;
        for (int bit = 0; bit < 8; bit++)
            reg = (reg >> 1) ^ (reg & 1 ? 0x82f63b78u : 0);
        slice[0][byte] = reg;
    }
    for (int k = 1; k < SLICES; k++)
        for (int byte = 0; byte < 256; byte++)
            slice[k][byte] = (slice[k - 1][byte] >> 8) ^ slice[0][slice[k - 1][byte] & 255];
}

/* Four bytes, lowest first on any machine; compilers make one load of it. */
static inline uint32_t load_word(const uint8_t *at)
{
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

/* What the four bytes of `word` add when `after` more bytes of the step follow them. */
static inline uint32_t slice_word(uint32_t word, int after)
{
    return slice[after + 3][word & 255] ^ slice[after + 2][word >> 8 & 255] ^
           slice[after + 1][word >> 16 & 255] ^ slice[after][word >> 24];
}

uint32_t nvo_crc32c_soft(uint32_t crc, const void *bytes, int64_t nbytes)
{
    pthread_once(&slice_once, fill_slices);
    const uint8_t *at = bytes;
    uint32_t reg = ~crc;
    for (; nbytes >= SLICES; nbytes -= SLICES, at += SLICES)
        reg = slice_word(load_word(at) ^ reg, 12) ^ slice_word(load_word(at + 4), 8) ^
              slice_word(load_word(at + 8), 4) ^ slice_word(load_word(at + 12), 0);
    for (; nbytes > 0; nbytes--, at++)
        reg = (reg >> 8) ^ slice[0][(reg ^ *at) & 255];
    return ~reg;
}

#if defined(__x86_64__)

#define NVO_CRC_TARGET __attribute__((target("sse4.2,pclmul")))

/*
 * Note [Three streams]. The crc32 instruction can start every cycle but takes
 * three, so three neighbouring runs of equal length go side by side, the second
 * and third from a zero register. To join them, a register must be carried over
 * the n bytes of the runs behind it: multiplied by x^(8n) modulo the polynomial.
 * A carry-less product of two reflected 32-bit values is x times too high, and
 * the crc32 instruction that reduces it multiplies by x^32; so the factor is
 * x^(8n - 33). The factors below are that for once and twice each run length.
 */
typedef struct run {
    int nbytes;
    uint32_t over_one, over_two;
} run;
static const run long_run = {4096, 0x82f89c77, 0x54a86326};
static const run short_run = {256, 0xb9e02b86, 0xdd7e3b0c};

NVO_CRC_TARGET static inline uint64_t load_long(const uint8_t *at)
{
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

NVO_CRC_TARGET static inline uint64_t carry(uint64_t reg, uint32_t factor)
{
    __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128((int64_t)reg),
                                           _mm_cvtsi64_si128((int64_t)factor), 0);
    return _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(product));
}

/* Take three runs off the front of *at as often as *nbytes holds them. */
NVO_CRC_TARGET static inline uint64_t take_runs(uint64_t reg, const uint8_t **at, int64_t *nbytes,
                                                run size)
{
    for (; *nbytes >= 3 * size.nbytes; *nbytes -= 3 * size.nbytes, *at += 3 * size.nbytes) {
        const uint8_t *first = *at, *second = first + size.nbytes, *third = second + size.nbytes;
        uint64_t reg_second = 0, reg_third = 0;
        for (int i = 0; i < size.nbytes; i += 8) {
            reg = _mm_crc32_u64(reg, load_long(first + i));
            reg_second = _mm_crc32_u64(reg_second, load_long(second + i));
            reg_third = _mm_crc32_u64(reg_third, load_long(third + i));
        }
        reg = carry(reg, size.over_two) ^ carry(reg_second, size.over_one) ^ reg_third;
    }
    return reg;
}

NVO_CRC_TARGET static uint32_t crc32c_hard(uint32_t crc, const uint8_t *at, int64_t nbytes)
{
    uint64_t reg = ~crc;
    reg = take_runs(reg, &at, &nbytes, long_run);
    reg = take_runs(reg, &at, &nbytes, short_run);
    for (; nbytes >= 8; nbytes -= 8, at += 8)
        reg = _mm_crc32_u64(reg, load_long(at));
    for (; nbytes > 0; nbytes--, at++)
        reg = _mm_crc32_u8((uint32_t)reg, *at);
    return ~(uint32_t)reg;
}

uint32_t nvo_crc32c(uint32_t crc, const void *bytes, int64_t nbytes)
{
    if (__builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul"))
        return crc32c_hard(crc, bytes, nbytes);
    return nvo_crc32c_soft(crc, bytes, nbytes);
}

#else

uint32_t nvo_crc32c(uint32_t crc, const void *bytes, int64_t nbytes)
{
    return nvo_crc32c_soft(crc, bytes, nbytes);
}

#endif
