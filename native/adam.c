/*
 * adam.c: one AdamW step over a span, in one pass over its bytes. The same bits at
 * every SIMD level and however a span is cut: every element sees the same single
 * precision operations in the same order, each rounded on its own.
 */
#include "nvo.h"

#include <errno.h>
#include <math.h>
#include <string.h>

enum { UPDATE, STREAM };      /* what a sweep does to an element */

typedef struct types {
    int32_t weight, grad;
} types;

typedef struct sweep {
    nvo_adamw adamw;          /* of an update */
    uint32_t flip;            /* of a stream */
} sweep;

#define NVO_INLINE inline __attribute__((always_inline))

/* Says of the next loop that its elements are independent: weight_out is either
 * weight_in or apart from it, and no other two arrays overlap. */
#if defined(__clang__)
#define NVO_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define NVO_INDEPENDENT _Pragma("GCC ivdep")
#endif

void nvo_adamw_prepare(nvo_adamw *out, const nvo_group *group, double grad_scale, int64_t step)
{
    double correction1 = 1 - pow(group->beta1, (double)step);
    double correction2 = 1 - pow(group->beta2, (double)step);

    out->decay = (float)(1 - group->lr * group->weight_decay);
    out->beta1 = (float)group->beta1;
    out->beta1_rest = (float)(1 - group->beta1);
    out->beta2 = (float)group->beta2;
    out->beta2_rest = (float)(1 - group->beta2);
    out->denom_scale = (float)(1 / sqrt(correction2));
    out->eps = (float)group->eps;
    out->step_size = (float)(group->lr / correction1);
    out->grad_scale = (float)grad_scale;
}

/* ---- numbers and their bits ------------------------------------------------------- */

static NVO_INLINE float float_of(uint32_t bits)
{
    float value;

    memcpy(&value, &bits, sizeof value);
    return value;
}

static NVO_INLINE uint32_t bits_of(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/*
 * Note [One NaN]. Which sign and payload come out of an operation on NaNs depends on
 * the processor and on the order of operands, which the compiler may change. So every
 * NaN that is stored becomes this one. It also splits into halves, 0x7fc0 and 0, that
 * are NaN both alone and joined, where other NaNs may show as a number. A weight is
 * NaN wherever one of its moments is, so the loops look at the weights alone, and only
 * a span with a NaN pays for a second pass.
 */
static NVO_INLINE float with_one_nan(float value)
{
    return value != value ? float_of(0x7fc00000) : value;
}

/*
 * Note [Halves]. A master is kept as the bf16 nearest to it (of two equally near, the
 * one away from zero) and its low 16 bits. Read as a signed number, these are the
 * master's bits minus those of the bf16, so the sum restores every bit. The high half
 * of a finite master from 3.3962e38 on is an infinity; the sum restores it all the same.
 */
static NVO_INLINE float join_halves(uint16_t high, uint16_t low)
{
    return float_of(((uint32_t)high << 16) + (uint32_t)(int32_t)(int16_t)low);
}

/* ---- one element ------------------------------------------------------------------ */

static NVO_INLINE float load_weight(const nvo_span *on, int64_t i, types of)
{
    if (of.weight == NVO_F32)
        return ((const float *)on->weight_in)[i];
    return join_halves(((const uint16_t *)on->weight_in)[i], on->low[i]);
}

static NVO_INLINE void store_weight(const nvo_span *on, int64_t i, types of, float w)
{
    if (of.weight == NVO_F32) {
        ((float *)on->weight_out)[i] = w;
    } else {
        ((uint16_t *)on->weight_out)[i] = (uint16_t)((bits_of(w) + 0x8000) >> 16);
        on->low[i] = (uint16_t)bits_of(w);
    }
}

static NVO_INLINE float load_grad(const nvo_span *on, int64_t i, types of)
{
    if (of.grad == NVO_F32)
        return ((const float *)on->grad)[i];
    return float_of((uint32_t)((const uint16_t *)on->grad)[i] << 16);
}

/* Update element `i`; 1 if the new weight is NaN, as it is if either moment is. */
static NVO_INLINE uint32_t update(const nvo_adamw *by, const nvo_span *on, int64_t i, types of)
{
    float g = load_grad(on, i, of) * by->grad_scale;
    float m = by->beta1 * on->exp_avg[i] + by->beta1_rest * g;
    float v = by->beta2 * on->exp_avg_sq[i] + by->beta2_rest * g * g;
    float denom = sqrtf(v) * by->denom_scale + by->eps;
    float w = load_weight(on, i, of) * by->decay - by->step_size * (m / denom);

    on->exp_avg[i] = m;
    on->exp_avg_sq[i] = v;
    store_weight(on, i, of, w);
    return w != w;
}

static NVO_INLINE void stream(uint32_t flip, const nvo_span *on, int64_t i, types of)
{
    uint32_t g = bits_of(load_grad(on, i, of));

    on->exp_avg[i] = float_of(bits_of(on->exp_avg[i]) ^ (g & flip));
    on->exp_avg_sq[i] = float_of(bits_of(on->exp_avg_sq[i]) ^ flip);
    if (of.weight == NVO_F32) {
        uint32_t w = bits_of(((const float *)on->weight_in)[i]);
        ((float *)on->weight_out)[i] = float_of(w ^ flip);
    } else {
        uint16_t half = ((const uint16_t *)on->weight_in)[i];
        ((uint16_t *)on->weight_out)[i] = (uint16_t)(half ^ flip);
        on->low[i] = (uint16_t)(on->low[i] ^ flip);
    }
}

static NVO_INLINE uint32_t visit(const sweep *by, const nvo_span *on, int64_t i, const int task,
                             types of)
{
    if (task == UPDATE)
        return update(&by->adamw, on, i, of);
    stream(by->flip, on, i, of);
    return 0;
}

/* The second pass of Note [One NaN]; joining undoes the split of any NaN. */
static void settle_nans(const nvo_span *on)
{
    const types of = {on->weight_dtype, on->grad_dtype};
    nvo_span stored = *on;

    stored.weight_in = on->weight_out;
    for (int64_t i = 0; i < on->numel; i++) {
        on->exp_avg[i] = with_one_nan(on->exp_avg[i]);
        on->exp_avg_sq[i] = with_one_nan(on->exp_avg_sq[i]);
        store_weight(on, i, of, with_one_nan(load_weight(&stored, i, of)));
    }
}

/* ---- levels ----------------------------------------------------------------------- */

#define NVO_TARGET
#define NVO_LEVEL(name) name##_scalar
#include "adam_body.h"

#if defined(__x86_64__)
#define NVO_TARGET __attribute__((target("avx2")))
#define NVO_LEVEL(name) name##_avx2
#include "adam_body.h"

/* Full width: the loops wait for memory, not for the clock. */
#if defined(__clang__)
#define NVO_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#else
#define NVO_TARGET \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif
#define NVO_LEVEL(name) name##_avx512
#include "adam_body.h"
#endif

int nvo_simd_best(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return NVO_SIMD_AVX512;
    if (__builtin_cpu_supports("avx2"))
        return NVO_SIMD_AVX2;
#endif
    return NVO_SIMD_SCALAR;
}

static int check_call(int simd, const nvo_span *span)
{
    if (simd < NVO_SIMD_SCALAR || simd > nvo_simd_best())
        return -EINVAL;
    if (span->weight_dtype != NVO_F32 && span->weight_dtype != NVO_BF16)
        return -EINVAL;
    if (span->grad_dtype != NVO_F32 && span->grad_dtype != NVO_BF16)
        return -EINVAL;
    return span->numel < 0 ? -EINVAL : 0;
}

int nvo_adamw_update(int simd, const nvo_adamw *adamw, const nvo_span *span)
{
    const sweep how = {.adamw = *adamw};
    int code = check_call(simd, span);

    if (code != 0)
        return code;
#if defined(__x86_64__)
    if (simd == NVO_SIMD_AVX512) {
        update_avx512(&how, span);
        return 0;
    }
    if (simd == NVO_SIMD_AVX2) {
        update_avx2(&how, span);
        return 0;
    }
#endif
    update_scalar(&how, span);
    return 0;
}

int nvo_adamw_stream(int simd, uint32_t flip, const nvo_span *span)
{
    const sweep how = {.flip = flip};
    int code = check_call(simd, span);

    if (code != 0)
        return code;
#if defined(__x86_64__)
    if (simd == NVO_SIMD_AVX512) {
        stream_avx512(&how, span);
        return 0;
    }
    if (simd == NVO_SIMD_AVX2) {
        stream_avx2(&how, span);
        return 0;
    }
#endif
    stream_scalar(&how, span);
    return 0;
}
