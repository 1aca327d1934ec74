/* One tile: verify what was read, fill or update it, make its checksums. Runs on a kernel
 * thread; touches memory only.
 *
 * Note [Absorb]: checksums follow the kernel in chunks, while the bytes are in cache. A part
 * of several words (state) has as checksum the crc32c of its words' crc32c values, so that
 * the words can be absorbed side by side. */
#include "nvo.h"

#include <errno.h>
#include <string.h>

enum { CHUNK_NUMEL = 4096, MAX_WORDS = 4, TO_DEVICE = 1, TO_HOST = 2 };

/* Where the parts of the tile stand in memory, and how far the checksums have come. */
typedef struct parts {
    uint8_t *fetched;       /* NULL: the parameters themselves are the home */
    uint16_t *low;
    uint8_t *words[MAX_WORDS];
    uint8_t *grads;         /* staged gradient, only with a device */
    int64_t absorbed;       /* elements */
    uint32_t fetched_crc, low_crc, word_crc[MAX_WORDS];
} parts;

static parts place_parts(const nvo_work *work)
{
    const nvo_tile *tile = work->tile;
    parts out = {0};
    uint8_t *at = work->lease;
    if (at)
        out.fetched = at;
    uint8_t *remainder = tile->host_remainder;
    uint8_t *state = tile->host_state;
    if (at && !remainder)
        remainder = at + tile->fetched_bytes;
    if (at && !state)
        state = at + tile->fetched_bytes + tile->remainder_bytes;
    if (at)
        out.grads = at + tile->fetched_bytes + tile->remainder_bytes
                    + tile->num_words * tile->word_bytes;
    out.low = tile->remainder_bytes ? (uint16_t *)(void *)remainder : NULL;
    for (int32_t i = 0; i < tile->num_words; i++)
        out.words[i] = state + i * tile->word_bytes;
    return out;
}

static uint32_t join_words(const parts *at, int32_t num_words)
{
    return nvo_crc32c(0, at->word_crc, num_words * (int64_t)sizeof at->word_crc[0]);
}

/* Extend the checksums of the parts that will be written up to element `end`. */
static void absorb(const nvo_work *work, parts *at, int64_t end)
{
    const nvo_tile *tile = work->tile;
    int64_t start = at->absorbed, item = tile->item_bytes;
    int is_last = end == tile->numel;
    if (start == tile->numel)
        return; /* the last segment ended with the tile: its padding is in already */
    if (tile->param) {
        int64_t stop = is_last ? tile->fetched_bytes : end * item;
        at->fetched_crc = nvo_crc32c(at->fetched_crc, at->fetched + start * item, stop - start * item);
        if (at->low) {
            stop = is_last ? tile->remainder_bytes : end * 2;
            at->low_crc = nvo_crc32c(at->low_crc, at->low + start, stop - start * 2);
        }
    }
    if (tile->state)
        for (int32_t i = 0; i < tile->num_words; i++) {
            int64_t stop = is_last ? tile->word_bytes : end * 4;
            at->word_crc[i] = nvo_crc32c(at->word_crc[i], at->words[i] + start * 4, stop - start * 4);
        }
    at->absorbed = end;
}

static int is_pending(const nvo_work *work, const nvo_segment *segment)
{
    return work->job->params[segment->param].pending;
}

int nvo_work_is_needed(const nvo_work *work)
{
    const nvo_tile *tile = work->tile;
    if (work->job->kind != NVO_UPDATE)
        return 1;
    for (int32_t i = 0; i < tile->num_segments; i++)
        if (is_pending(work, &work->job->segments[tile->first_segment + i]))
            return 1;
    return 0;
}

int nvo_work_verify(nvo_work *work)
{
    const nvo_tile *tile = work->tile;
    parts at = place_parts(work);
    if (tile->param && at.low
        && nvo_crc32c(0, at.low, tile->remainder_bytes) != tile->param->crc[1]) {
        work->bad_part = 1;
        return -EBADMSG;
    }
    if (tile->state) {
        for (int32_t i = 0; i < tile->num_words; i++)
            at.word_crc[i] = nvo_crc32c(0, at.words[i], tile->word_bytes);
        if (join_words(&at, tile->num_words) != tile->state->crc[2]) {
            work->bad_part = 2;
            return -EBADMSG;
        }
    }
    return 0;
}

/* Copy between a parameter and the lease, by the device if there is one. */
static int move(const nvo_work *work, void *dst, const void *src, int64_t nbytes, int kind)
{
    if (!work->device) {
        memcpy(dst, src, (size_t)nbytes);
        return 0;
    }
    return work->device->copy(dst, src, (size_t)nbytes, kind, work->stream) ? -EIO : 0;
}

static int wait_device(const nvo_work *work)
{
    return work->device && work->device->wait(work->stream) ? -EIO : 0;
}

static const uint8_t *value_of(const nvo_work *work, const nvo_segment *segment)
{
    const uint8_t *value = work->job->params[segment->param].value;
    return value + segment->param_start * work->tile->item_bytes;
}

static int64_t grad_bytes(const nvo_param *param)
{
    return param->grad_dtype == NVO_BF16 ? 2 : 4;
}

static const uint8_t *grad_of(const nvo_param *param, const nvo_segment *segment)
{
    return (const uint8_t *)param->grad + segment->param_start * grad_bytes(param);
}

/* Bring values (all segments) and gradients (pending ones) of the tile into the lease. */
static int stage_in(const nvo_work *work, const parts *at)
{
    const nvo_tile *tile = work->tile;
    for (int32_t i = 0; i < tile->num_segments; i++) {
        const nvo_segment *segment = &work->job->segments[tile->first_segment + i];
        const nvo_param *param = &work->job->params[segment->param];
        uint8_t *fetched = at->fetched + segment->tile_start * tile->item_bytes;
        int64_t nbytes = segment->numel * tile->item_bytes;
        if (move(work, fetched, value_of(work, segment), nbytes, TO_HOST))
            return -EIO;
        if (work->job->kind != NVO_UPDATE || !param->pending)
            continue;
        uint8_t *staged = at->grads + segment->tile_start * 4;
        if (move(work, staged, grad_of(param, segment), segment->numel * grad_bytes(param), TO_HOST))
            return -EIO;
    }
    return wait_device(work);
}

static int stage_out(const nvo_work *work, const parts *at)
{
    const nvo_tile *tile = work->tile;
    for (int32_t i = 0; i < tile->num_segments; i++) {
        const nvo_segment *segment = &work->job->segments[tile->first_segment + i];
        if (!is_pending(work, segment))
            continue;
        uint8_t *value = (uint8_t *)work->job->params[segment->param].value
                         + segment->param_start * tile->item_bytes;
        if (move(work, value, at->fetched + segment->tile_start * tile->item_bytes,
                 segment->numel * tile->item_bytes, TO_DEVICE))
            return -EIO;
    }
    return wait_device(work);
}

/* The update of `count` elements of a segment from element `first` of the tile. */
static void update_chunk(const nvo_work *work, const parts *at, const nvo_segment *segment,
                         const nvo_adamw *adamw, int64_t first, int64_t count)
{
    const nvo_tile *tile = work->tile;
    const nvo_param *param = &work->job->params[segment->param];
    int64_t in_segment = first - segment->tile_start;
    int64_t item = tile->item_bytes;
    uint8_t *value = (uint8_t *)param->value + (segment->param_start + in_segment) * item;
    uint8_t *fetched = at->fetched ? at->fetched + first * item : value;
    nvo_span span = {
        .weight_in = work->device ? fetched : value,
        .weight_out = fetched,
        .low = at->low ? at->low + first : NULL,
        .exp_avg = (float *)(void *)at->words[0] + first,
        .exp_avg_sq = (float *)(void *)at->words[1] + first,
        .grad = work->device ? at->grads + segment->tile_start * 4 + in_segment * grad_bytes(param)
                             : grad_of(param, segment) + in_segment * grad_bytes(param),
        .numel = count,
        .weight_dtype = tile->dtype,
        .grad_dtype = param->grad_dtype,
    };
    nvo_adamw_update(work->simd, adamw, &span);
    if (!work->device && fetched != value)
        memcpy(value, fetched, (size_t)(count * item));
}

static void run_segment(const nvo_work *work, parts *at, const nvo_segment *segment)
{
    const nvo_tile *tile = work->tile;
    const nvo_job *job = work->job;
    const nvo_param *param = &job->params[segment->param];
    int is_update = job->kind == NVO_UPDATE && job->kernel == NVO_KERNEL_ADAMW && param->pending;
    int64_t item = tile->item_bytes, end = segment->tile_start + segment->numel;
    nvo_adamw adamw = {0};
    if (is_update)
        nvo_adamw_prepare(&adamw, &job->groups[param->group], param->scale, param->step);
    if (at->low && (param->fresh || job->kind == NVO_FILL_PARAM))
        memset(at->low + segment->tile_start, 0, (size_t)segment->numel * 2);
    for (int64_t first = segment->tile_start; first < end; first += CHUNK_NUMEL) {
        int64_t count = end - first < CHUNK_NUMEL ? end - first : CHUNK_NUMEL;
        if (is_update)
            update_chunk(work, at, segment, &adamw, first, count);
        else if (at->fetched && !work->device)
            memcpy(at->fetched + first * item,
                   value_of(work, segment) + (first - segment->tile_start) * item,
                   (size_t)(count * item));
        absorb(work, at, first + count);
    }
}

/* Zero the parts that the file needs and nothing else sets: gaps between segments and the
 * padding of the fetched part; on a fill also remainder or state. */
static void clear(const nvo_work *work, const parts *at)
{
    const nvo_tile *tile = work->tile;
    int64_t covered = 0;
    for (int32_t i = 0; i < tile->num_segments; i++)
        covered += work->job->segments[tile->first_segment + i].numel;
    if (at->fetched && covered * tile->item_bytes != tile->fetched_bytes)
        memset(at->fetched, 0, (size_t)tile->fetched_bytes);
    if (work->job->kind == NVO_FILL_PARAM && at->low)
        memset(at->low, 0, (size_t)tile->remainder_bytes);
}

static void fill_state(const nvo_work *work, parts *at)
{
    const nvo_tile *tile = work->tile;
    for (int32_t i = 0; i < tile->num_words; i++)
        memset(at->words[i], 0, (size_t)tile->word_bytes);
    absorb(work, at, tile->numel);
}

int nvo_work_run(nvo_work *work)
{
    const nvo_tile *tile = work->tile;
    parts at = place_parts(work);
    if (work->job->kind == NVO_FILL_STATE) {
        fill_state(work, &at);
    } else {
        clear(work, &at);
        if (work->device && stage_in(work, &at))
            return -EIO;
        for (int32_t i = 0; i < tile->num_segments; i++)
            run_segment(work, &at, &work->job->segments[tile->first_segment + i]);
        absorb(work, &at, tile->numel);
        if (work->device && work->job->kind == NVO_UPDATE && stage_out(work, &at))
            return -EIO;
    }
    work->crc[0] = at.fetched_crc;
    work->crc[1] = at.low_crc;
    work->crc[2] = join_words(&at, tile->num_words);
    return 0;
}
