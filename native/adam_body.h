/*
 * adam_body.h: the loops of adam.c at one SIMD level. Included once per level, with
 * NVO_TARGET, the attribute of the level, and NVO_LEVEL(name), the name of a function
 * at it. What happens to an element stands in adam.c and is the same at every level;
 * the compiler makes vectors of it, as wide as the level has them.
 */

NVO_TARGET static NVO_INLINE void NVO_LEVEL(sweep)(const sweep *how, const nvo_span *span,
                                                   const int task, const types of)
{
    const sweep by = *how; /* copies: no store into the arrays can change them */
    const nvo_span on = *span;
    uint32_t has_nan = 0;

    NVO_INDEPENDENT
    for (int64_t i = 0; i < on.numel; i++)
        has_nan |= visit(&by, &on, i, task, of);
    if (has_nan)
        settle_nans(&on);
}

/* One copy of the loop for each pair of types, so that no element has to ask. */
NVO_TARGET static NVO_INLINE void NVO_LEVEL(sweep_typed)(const sweep *how, const nvo_span *span,
                                                         const int task)
{
    if (span->weight_dtype == NVO_F32 && span->grad_dtype == NVO_F32)
        NVO_LEVEL(sweep)(how, span, task, (types){NVO_F32, NVO_F32});
    else if (span->weight_dtype == NVO_F32)
        NVO_LEVEL(sweep)(how, span, task, (types){NVO_F32, NVO_BF16});
    else if (span->grad_dtype == NVO_F32)
        NVO_LEVEL(sweep)(how, span, task, (types){NVO_BF16, NVO_F32});
    else
        NVO_LEVEL(sweep)(how, span, task, (types){NVO_BF16, NVO_BF16});
}

NVO_TARGET static void NVO_LEVEL(update)(const sweep *how, const nvo_span *span)
{
    NVO_LEVEL(sweep_typed)(how, span, UPDATE);
}

NVO_TARGET static void NVO_LEVEL(stream)(const sweep *how, const nvo_span *span)
{
    NVO_LEVEL(sweep_typed)(how, span, STREAM);
}

#undef NVO_TARGET
#undef NVO_LEVEL
