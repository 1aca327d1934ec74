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
    uint8_t *fetched;       /* what is written or delivered; NULL: the values themselves are the home */
    uint16_t *low;
    uint8_t *words[MAX_WORDS];
    int64_t absorbed;       /* elements */
    uint32_t fetched_crc, low_crc, word_crc[MAX_WORDS];
} parts;

static parts place_parts(const nvo_work *work)
{
    const nvo_tile *tile = work->tile;
    parts out = {0};
    uint8_t *at = work->lease;
    uint8_t *remainder = tile->host_remainder;
    uint8_t *state = tile->host_state;
    out.fetched = at ? at : tile->host_fetched;
    if (at && !remainder)
        remainder = at + tile->fetched_bytes;
    if (at && !state)
        state = at + tile->fetched_bytes + tile->remainder_bytes;
    out.low = tile->remainder_bytes ? (uint16_t *)(void *)remainder : NULL;
    for (int32_t i = 0; i < tile->num_words && state; i++)
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
    if (work->job->kind == NVO_FILL_PARAM || work->job->kind == NVO_FILL_STATE)
        return 1;
    for (int32_t i = 0; i < tile->num_segments; i++)
        if (is_pending(work, &work->job->segments[tile->first_segment + i]))
            return 1;
    return 0;
}

int nvo_work_reads_fetched(const nvo_work *work)
{
    return work->tile->param && !work->tile->host_fetched && !work->job->values_stand;
}

int nvo_work_verify(nvo_work *work)
{
    const nvo_tile *tile = work->tile;
    int kind = work->job->kind;
    parts at = place_parts(work);
    work->bad_part = 0;
    if (nvo_work_reads_fetched(work)
        && nvo_crc32c(0, at.fetched, tile->fetched_bytes) != tile->param->crc[0])
        return -EBADMSG;
    work->bad_part = 1;
    if (kind != NVO_FETCH && tile->param && at.low
        && nvo_crc32c(0, at.low, tile->remainder_bytes) != tile->param->crc[1])
        return -EBADMSG;
    work->bad_part = 2;
    if (kind == NVO_UPDATE && tile->state) {
        for (int32_t i = 0; i < tile->num_words; i++)
            at.word_crc[i] = nvo_crc32c(0, at.words[i], tile->word_bytes);
        if (join_words(&at, tile->num_words) != tile->state->crc[2])
            return -EBADMSG;
    }
    return 0;
}

static uint8_t *value_of(const nvo_work *work, const nvo_segment *segment)
{
    uint8_t *value = work->job->params[segment->param].value;
    return value ? value + segment->param_start * work->tile->item_bytes : NULL;
}

static int wait_device(const nvo_work *work)
{
    return work->device->wait(work->stream) ? -EIO : 0;
}

static int is_source(const nvo_work *work, const nvo_segment *segment)
{
    int kind = work->job->kind;
    return work->job->values_stand || kind == NVO_FILL_PARAM
           || (kind == NVO_STORE && is_pending(work, segment));
}

/* Bring the values that the job takes from the device to where they are worked on. */
static int stage_in(const nvo_work *work, const parts *at)
{
    const nvo_tile *tile = work->tile;
    for (int32_t i = 0; i < tile->num_segments; i++) {
        const nvo_segment *segment = &work->job->segments[tile->first_segment + i];
        if (is_source(work, segment)
            && work->device->copy(at->fetched + segment->tile_start * tile->item_bytes,
                                  value_of(work, segment),
                                  (size_t)(segment->numel * tile->item_bytes), TO_HOST, work->stream))
            return -EIO;
    }
    return wait_device(work);
}

static int is_delivered(const nvo_work *work, const nvo_segment *segment)
{
    int kind = work->job->kind;
    if (kind == NVO_UPDATE && work->job->values_stand)
        return is_pending(work, segment);
    return (kind == NVO_UPDATE || (kind == NVO_FETCH && is_pending(work, segment)))
           && work->job->params[segment->param].value;
}

static int stage_out(const nvo_work *work, const parts *at)
{
    const nvo_tile *tile = work->tile;
    for (int32_t i = 0; i < tile->num_segments; i++) {
        const nvo_segment *segment = &work->job->segments[tile->first_segment + i];
        if (is_delivered(work, segment)
            && work->device->copy(value_of(work, segment),
                                  at->fetched + segment->tile_start * tile->item_bytes,
                                  (size_t)(segment->numel * tile->item_bytes), TO_DEVICE, work->stream))
            return -EIO;
    }
    return wait_device(work);
}

/* Where the compute weights of a segment stand in host memory from element `first` of the
 * tile on, beside what is written; NULL: nowhere else. */
static uint8_t *standing_at(const nvo_work *work, const nvo_segment *segment, int64_t first)
{
    const nvo_tile *tile = work->tile;
    if (work->job->values_stand)
        return work->device ? NULL : value_of(work, segment) + (first - segment->tile_start) * tile->item_bytes;
    return tile->host_fetched ? (uint8_t *)tile->host_fetched + first * tile->item_bytes : NULL;
}

static void copy(uint8_t *dst, const uint8_t *src, int64_t nbytes)
{
    if (dst && src && dst != src)
        memcpy(dst, src, (size_t)nbytes);
}

/* The update of `count` elements of a segment from element `first` of the tile. */
static void update_chunk(const nvo_work *work, const parts *at, const nvo_segment *segment,
                         const nvo_adamw *adamw, int64_t first, int64_t count)
{
    const nvo_tile *tile = work->tile;
    const nvo_param *param = &work->job->params[segment->param];
    int64_t start = segment->param_start + first - segment->tile_start;
    int64_t item = tile->item_bytes, grad_item = param->grad_dtype == NVO_BF16 ? 2 : 4;
    uint8_t *standing = standing_at(work, segment, first);
    uint8_t *fetched = at->fetched ? at->fetched + first * item : standing;
    nvo_span span = {
        .weight_in = standing ? standing : fetched,
        .weight_out = fetched,
        .low = at->low ? at->low + first : NULL,
        .exp_avg = (float *)(void *)at->words[0] + first,
        .exp_avg_sq = (float *)(void *)at->words[1] + first,
        .grad = (const uint8_t *)param->grad + start * grad_item,
        .numel = count,
        .weight_dtype = tile->dtype,
        .grad_dtype = param->grad_dtype,
    };
    nvo_adamw_update(work->simd, adamw, &span);
    copy(standing, fetched, count * item);
}

/* Everything else that gives the elements their values: as they stand, or as offered. */
static void take_chunk(const nvo_work *work, const parts *at, const nvo_segment *segment,
                       int64_t first, int64_t count)
{
    int64_t item = work->tile->item_bytes;
    uint8_t *standing = standing_at(work, segment, first);
    uint8_t *fetched = at->fetched ? at->fetched + first * item : NULL;
    if (is_source(work, segment) && !work->device) {
        const uint8_t *value = value_of(work, segment) + (first - segment->tile_start) * item;
        copy(fetched, value, count * item);
        copy(standing, value, count * item);
    } else if (is_source(work, segment)) {
        copy(standing, fetched, count * item); /* staged */
    } else {
        copy(fetched, standing, count * item);
    }
}

static void run_segment(const nvo_work *work, parts *at, const nvo_segment *segment)
{
    const nvo_tile *tile = work->tile;
    const nvo_job *job = work->job;
    const nvo_param *param = &job->params[segment->param];
    int is_update = job->kind == NVO_UPDATE && job->kernel == NVO_KERNEL_ADAMW && param->pending;
    int delivers = !work->device && !job->values_stand && is_delivered(work, segment);
    int64_t item = tile->item_bytes, end = segment->tile_start + segment->numel;
    nvo_adamw adamw = {0};
    if (is_update)
        nvo_adamw_prepare(&adamw, &job->groups[param->group], param->scale, param->step);
    if (at->low && (job->kind == NVO_FILL_PARAM || (job->kind == NVO_STORE && param->pending)))
        memset(at->low + segment->tile_start, 0, (size_t)segment->numel * 2);
    for (int64_t first = segment->tile_start; first < end; first += CHUNK_NUMEL) {
        int64_t count = end - first < CHUNK_NUMEL ? end - first : CHUNK_NUMEL;
        if (is_update)
            update_chunk(work, at, segment, &adamw, first, count);
        else
            take_chunk(work, at, segment, first, count);
        if (delivers)
            copy(value_of(work, segment) + (first - segment->tile_start) * item,
                 at->fetched + first * item, count * item);
        if (job->kind != NVO_FETCH)
            absorb(work, at, first + count);
    }
}

/* Zero what the file needs and nothing else sets: gaps between segments and the padding of
 * a fetched part that was not read; on a fill also the remainder. */
static void clear(const nvo_work *work, const parts *at)
{
    const nvo_tile *tile = work->tile;
    int64_t covered = 0;
    for (int32_t i = 0; i < tile->num_segments; i++)
        covered += work->job->segments[tile->first_segment + i].numel;
    int is_fill = work->job->kind == NVO_FILL_PARAM;
    if (work->lease && (is_fill || !nvo_work_reads_fetched(work))
        && covered * tile->item_bytes != tile->fetched_bytes)
        memset(at->fetched, 0, (size_t)tile->fetched_bytes);
    if (is_fill && at->low)
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
    int has_fetched = work->device && at.fetched;
    if (work->job->kind == NVO_FILL_STATE) {
        fill_state(work, &at);
    } else {
        clear(work, &at);
        if (has_fetched && stage_in(work, &at))
            return -EIO;
        for (int32_t i = 0; i < tile->num_segments; i++)
            run_segment(work, &at, &work->job->segments[tile->first_segment + i]);
        if (work->job->kind != NVO_FETCH)
            absorb(work, &at, tile->numel);
        if (has_fetched && stage_out(work, &at))
            return -EIO;
    }
    work->crc[0] = at.fetched_crc;
    work->crc[1] = at.low_crc;
    work->crc[2] = join_words(&at, tile->num_words);
    return 0;
}
