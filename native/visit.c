/* A visit's dealings with pool and disk: its lease, its transfers, what the records say then.
 * Called by the mover under its lock. */
#include "mover.h"

#include <errno.h>

void nvo_mover_record(nvo_mover *m, const nvo_error *error)
{
    if (m->error.code == 0)
        m->error = *error;
}

/* Queue one transfer of a visit; an engine that refuses it counts as a failed transfer. */
static void transfer(visit *v, int index, int op, uint8_t *addr, int64_t offset, int64_t nbytes)
{
    const nvo_tile *tile = v->work.tile;
    nvo_xfer *xfer = &v->xfers[index];
    *xfer = (nvo_xfer){.fd = tile->fd, .op = op, .priority = v->job->priority, .file = tile->file,
                       .addr = addr, .offset = offset, .nbytes = nbytes,
                       .on_end = nvo_visit_on_end, .owner = v};
    int code = nvo_engine_submit(v->mover->engine, xfer);
    if (code == 0) {
        nvo_mover_stats *stats = &v->mover->stats;
        v->mover->transferring += v->pending++ == 0;
        *(op == NVO_READ ? &stats->read_bytes : &stats->write_bytes) += nbytes;
        if (v->job->kind == NVO_FETCH)
            stats->fetch_bytes += nbytes;
        return;
    }
    nvo_error error = {.code = code, .tile = v->tile, .op = op, .file = tile->file, .job = v->job,
                       .offset = offset, .nbytes = nbytes, .generation = v->job->generation};
    nvo_mover_record(v->mover, &error);
    v->failed = 1;
}

void nvo_visit_read(visit *v)
{
    const nvo_tile *tile = v->work.tile;
    uint8_t *lease = v->work.lease;
    int kind = v->job->kind, index = 0;
    int64_t start = nvo_work_reads_fetched(&v->work) ? 0 : tile->fetched_bytes;
    int64_t end = tile->fetched_bytes + (kind == NVO_FETCH ? 0 : tile->remainder_bytes);
    if (tile->param && start < end)
        transfer(v, index++, NVO_READ, lease + start,
                 tile->param_offset[tile->param->working] + start, end - start);
    if (tile->state && kind == NVO_UPDATE && !v->failed)
        transfer(v, index++, NVO_READ, lease + tile->fetched_bytes + tile->remainder_bytes,
                 tile->state_offset[tile->state->working], tile->num_words * tile->word_bytes);
}

/* The slot that no manifest names; a record without a commit is written in place. */
static uint16_t idle_slot(const nvo_record *record)
{
    return record->committed == NO_COMMIT ? record->working : (uint16_t)(1 - record->committed);
}

static int has_param_write(const visit *v)
{
    return v->work.tile->param && v->job->kind != NVO_FILL_STATE;
}

static int has_state_write(const visit *v)
{
    return v->work.tile->state && (v->job->kind == NVO_UPDATE || v->job->kind == NVO_FILL_STATE);
}

void nvo_visit_write(visit *v)
{
    const nvo_tile *tile = v->work.tile;
    int index = 0;
    if (has_param_write(v)) {
        v->param_slot = idle_slot(tile->param);
        transfer(v, index++, NVO_WRITE, v->work.lease, tile->param_offset[v->param_slot],
                 tile->fetched_bytes + tile->remainder_bytes);
    }
    if (has_state_write(v) && !v->failed) {
        v->state_slot = idle_slot(tile->state);
        transfer(v, index++, NVO_WRITE, v->work.lease + tile->fetched_bytes + tile->remainder_bytes,
                 tile->state_offset[v->state_slot], tile->num_words * tile->word_bytes);
    }
}

void nvo_visit_note_written(visit *v)
{
    const nvo_tile *tile = v->work.tile;
    if (has_param_write(v)) {
        tile->param->working = v->param_slot;
        tile->param->generation = v->job->generation;
        tile->param->crc[0] = v->work.crc[0];
        tile->param->crc[1] = v->work.crc[1];
    }
    if (has_state_write(v)) {
        tile->state->working = v->state_slot;
        tile->state->generation = v->job->generation;
        tile->state->crc[2] = v->work.crc[2];
    }
}

int nvo_visit_is_on_disk(const visit *v)
{
    return v->work.tile->param || v->work.tile->state;
}

/* What a visit needs of a buffer; 0: it works in place. */
static int64_t lease_bytes(const nvo_mover *m, const visit *v)
{
    const nvo_tile *tile = v->work.tile;
    if (v->job->kind == NVO_FETCH)
        return nvo_work_reads_fetched(&v->work) ? tile->fetched_bytes : 0;
    if (!nvo_visit_is_on_disk(v) && !(m->device && v->job->values_stand))
        return 0;
    return tile->fetched_bytes + tile->remainder_bytes
           + (tile->state ? tile->num_words * tile->word_bytes : 0);
}

/* 0, or -EAGAIN when there is no buffer for this visit now. */
int nvo_visit_lease(visit *v)
{
    nvo_mover *m = v->mover;
    int64_t nbytes = lease_bytes(m, v);
    void *lease = NULL;
    if (nbytes == 0)
        return 0;
    if (v->job->priority != NVO_DEMAND && nvo_pool_free_buffers(m->pool) < 2)
        return -EAGAIN;
    int code = nvo_pool_acquire(m->pool, nbytes, &lease);
    v->work.lease = lease;
    return code;
}

void nvo_visit_bad_checksum(const visit *v)
{
    const nvo_tile *tile = v->work.tile;
    int part = v->work.bad_part;
    const nvo_record *record = part == 2 ? tile->state : tile->param;
    nvo_error error = {.code = -EBADMSG, .tile = v->tile, .op = NVO_READ, .file = tile->file,
                       .part = part, .slot = record->working, .job = v->job,
                       .generation = record->generation};
    error.offset = part == 2 ? tile->state_offset[record->working]
                             : tile->param_offset[record->working]
                                   + (part == 1 ? tile->fetched_bytes : 0);
    error.nbytes = part == 2   ? tile->num_words * tile->word_bytes
                   : part == 1 ? tile->remainder_bytes
                               : tile->fetched_bytes;
    nvo_mover_record(v->mover, &error);
}
