/* A landing gradient: folded into its accumulator, and summed, in one pass over its bytes. */
#include "nvo.h"

#include <errno.h>
#include <math.h>
#include <string.h>

/* Note [Chunks]: sums are taken in double over chunks of 1024 elements counted from the
 * start, each in LANES partial sums, and added in order. So a norm depends on the values
 * alone: not on threads, tiles, tiers or vector width. */
enum { CHUNK = 1024, LANES = 16 };

static inline float widen(const void *grad, int32_t dtype, int64_t i)
{
    float value;
    if (dtype == NVO_F32)
        return ((const float *)grad)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)grad)[i] << 16;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline __attribute__((always_inline)) void fold(float *acc, const void *grad,
                                                       const int32_t dtype, int64_t start, int64_t end,
                                                       const int32_t fresh, float scale)
{
    if (fresh) {
        for (int64_t i = start; i < end; i++)
            acc[i] = widen(grad, dtype, i);
    } else {
        for (int64_t i = start; i < end; i++)
            acc[i] = scale * acc[i] + widen(grad, dtype, i);
    }
}

static void sum(const float *acc, int64_t count, nvo_sums *sums)
{
    double lanes[LANES] = {0};
    float largest[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int k = 0; k < LANES; k++) {
            float size = fabsf(acc[i + k]);
            lanes[k] += (double)size * size;
            largest[k] = size > largest[k] ? size : largest[k];
        }
    for (int k = 0; i < count; i++, k++) {
        float size = fabsf(acc[i]);
        lanes[k] += (double)size * size;
        largest[k] = size > largest[k] ? size : largest[k];
    }
    double squares = 0;
    for (int k = 0; k < LANES; k++) {
        squares += lanes[k];
        sums->largest = largest[k] > sums->largest ? largest[k] : sums->largest;
    }
    sums->squares += squares;
}

/* The compiler makes one loop per pair of constants, so that no element has to ask. */
#define NVO_FOLD(dtype)                                                                       \
    do {                                                                                      \
        if (fresh)                                                                            \
            fold(acc, grad, dtype, start, end, 1, 0);                                         \
        else                                                                                  \
            fold(acc, grad, dtype, start, end, 0, scale);                                     \
    } while (0)

int nvo_land(float *acc, const void *grad, int32_t grad_dtype, int64_t numel, int32_t fresh,
             float scale, nvo_sums *sums)
{
    if (numel < 0 || (grad_dtype != NVO_F32 && grad_dtype != NVO_BF16))
        return -EINVAL;
    *sums = (nvo_sums){0};
    for (int64_t start = 0; start < numel; start += CHUNK) {
        int64_t end = numel - start < CHUNK ? numel : start + CHUNK;
        if (grad_dtype == NVO_F32)
            NVO_FOLD(NVO_F32);
        else
            NVO_FOLD(NVO_BF16);
        sum(acc + start, end - start, sums);
    }
    /* A float's square is finite as a double, and a sum of them in reach too. */
    sums->finite = isfinite(sums->squares) != 0;
    return 0;
}
