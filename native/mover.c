/* The mover: takes a job of many tiles through read, kernel and write, as many at once as the
 * pool has buffers. Driven by the pump (ends of transfers) and its own kernel threads; no
 * Python per tile. Never decides what to update.
 *
 * A visit is one tile on its way:
 *
 *   READING -> READY -> WORKING -> [GATED] -> WRITING -> free
 *
 * GATED: the tile is finished, but its write would overwrite the generation before the last
 * one that a manifest names, so it waits for the commit. Every move happens under `lock`. */
#define _POSIX_C_SOURCE 200809L
#include "nvo.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_THREADS = 256, NO_COMMIT = 0xffff, TICK_MS = 20 };

typedef struct visit {
    struct nvo_mover *mover;
    struct visit *next;
    nvo_work work;
    int32_t tile;
    int32_t pending;        /* transfers in flight */
    int32_t failed;
    uint16_t param_slot, state_slot; /* that the running writes fill */
    nvo_xfer xfers[2];
} visit;

typedef struct queue {
    visit *head, *tail;
} queue;

typedef struct worker {
    struct nvo_mover *mover;
    pthread_t thread;
    int index;
} worker;

struct nvo_mover {
    pthread_mutex_t lock;
    pthread_cond_t work, ended;
    nvo_engine *engine;
    nvo_pool *pool;
    const nvo_device *device;
    int simd, num_threads, is_stopping;
    worker workers[MAX_THREADS];

    nvo_job job;
    int is_running;
    int32_t next_tile, done_tiles, active, computing;
    uint64_t committed;     /* newest generation that a manifest names */
    nvo_error error;        /* the first one; code 0: none */
    nvo_mover_stats stats;
    int64_t waiting_since;  /* wall clock of the last change of who is waited for */
    queue ready, gated, free;
    visit *visits;
};

static void push(queue *q, visit *v)
{
    v->next = NULL;
    if (q->tail)
        q->tail->next = v;
    else
        q->head = v;
    q->tail = v;
}

static visit *pop(queue *q)
{
    visit *v = q->head;
    if (v) {
        q->head = v->next;
        if (!q->head)
            q->tail = NULL;
    }
    return v;
}

/* Book the time since the last call to whatever was waited for. Call before each change. */
static void account(nvo_mover *m)
{
    int64_t now = nvo_now_ns();
    if (m->is_running) {
        int64_t passed = now - m->waiting_since;
        m->stats.run_ns += passed;
        if (m->computing == 0 && !m->ready.head) {
            if (m->gated.head)
                m->stats.gate_wait_ns += passed;
            else
                m->stats.disk_wait_ns += passed;
        }
    }
    m->waiting_since = now;
}

static void record_error(nvo_mover *m, const nvo_error *error)
{
    if (m->error.code == 0)
        m->error = *error;
}

static void end_visit(nvo_mover *m, visit *v)
{
    if (v->work.lease)
        nvo_pool_release(m->pool, v->work.lease);
    v->work.lease = NULL;
    push(&m->free, v);
    m->active--;
    m->done_tiles++;
}

static void make_ready(nvo_mover *m, visit *v)
{
    push(&m->ready, v);
    pthread_cond_signal(&m->work);
}

static void on_end(nvo_xfer *xfer);

/* Queue one transfer of a visit; an engine that refuses it counts as a failed transfer. */
static void transfer(visit *v, int index, int op, uint8_t *addr, int64_t offset, int64_t nbytes)
{
    const nvo_tile *tile = v->work.tile;
    nvo_xfer *xfer = &v->xfers[index];
    *xfer = (nvo_xfer){.fd = tile->fd, .op = op, .priority = NVO_SHARED, .file = tile->file,
                       .addr = addr, .offset = offset, .nbytes = nbytes,
                       .on_end = on_end, .owner = v};
    int code = nvo_engine_submit(v->mover->engine, xfer);
    if (code == 0) {
        v->pending++;
        return;
    }
    nvo_error error = {.code = code, .tile = v->tile, .op = op, .file = tile->file,
                       .offset = offset, .nbytes = nbytes, .generation = v->mover->job.generation};
    record_error(v->mover, &error);
    v->failed = 1;
}

static void start_reads(visit *v)
{
    const nvo_tile *tile = v->work.tile;
    uint8_t *lease = v->work.lease;
    int index = 0;
    if (tile->param && tile->remainder_bytes)
        transfer(v, index++, NVO_READ, lease + tile->fetched_bytes,
                 tile->param_offset[tile->param->working] + tile->fetched_bytes,
                 tile->remainder_bytes);
    if (tile->state && !v->failed)
        transfer(v, index++, NVO_READ, lease + tile->fetched_bytes + tile->remainder_bytes,
                 tile->state_offset[tile->state->working], tile->num_words * tile->word_bytes);
}

/* The slot that no manifest names; a record without a commit is written in place. */
static uint16_t idle_slot(const nvo_record *record)
{
    return record->committed == NO_COMMIT ? record->working : (uint16_t)(1 - record->committed);
}

static void start_writes(visit *v)
{
    const nvo_tile *tile = v->work.tile;
    int kind = v->mover->job.kind, index = 0;
    if (tile->param && kind != NVO_FILL_STATE) {
        v->param_slot = idle_slot(tile->param);
        transfer(v, index++, NVO_WRITE, v->work.lease, tile->param_offset[v->param_slot],
                 tile->fetched_bytes + tile->remainder_bytes);
    }
    if (tile->state && kind != NVO_FILL_PARAM && !v->failed) {
        v->state_slot = idle_slot(tile->state);
        transfer(v, index++, NVO_WRITE, v->work.lease + tile->fetched_bytes + tile->remainder_bytes,
                 tile->state_offset[v->state_slot], tile->num_words * tile->word_bytes);
    }
}

static void note_written(visit *v)
{
    const nvo_tile *tile = v->work.tile;
    const nvo_job *job = &v->mover->job;
    if (tile->param && job->kind != NVO_FILL_STATE) {
        tile->param->working = v->param_slot;
        tile->param->generation = job->generation;
        tile->param->crc[0] = v->work.crc[0];
        tile->param->crc[1] = v->work.crc[1];
    }
    if (tile->state && job->kind != NVO_FILL_PARAM) {
        tile->state->working = v->state_slot;
        tile->state->generation = job->generation;
        tile->state->crc[2] = v->work.crc[2];
    }
}

static int is_on_disk(const nvo_tile *tile)
{
    return tile->param || tile->state;
}

/* Lease a buffer for a tile that needs one: 0, or -EAGAIN when the pool is empty. */
static int lease_for(nvo_mover *m, visit *v)
{
    const nvo_tile *tile = v->work.tile;
    if (!is_on_disk(tile) && !m->device)
        return 0;
    int64_t staged = m->device ? tile->numel * 4 : 0;
    void *lease = NULL;
    int code = nvo_pool_acquire(m->pool, tile->fetched_bytes + tile->remainder_bytes
                                + tile->num_words * tile->word_bytes + staged, &lease);
    v->work.lease = lease;
    return code;
}

static int is_over(const nvo_mover *m)
{
    return m->active == 0 && (m->error.code != 0 || m->done_tiles == m->job.num_tiles);
}

/* Start as many visits as visits and buffers allow. */
static void advance(nvo_mover *m)
{
    if (m->error.code != 0)
        for (visit *v = pop(&m->gated); v; v = pop(&m->gated))
            end_visit(m, v);
    while (m->is_running && m->error.code == 0 && m->next_tile < m->job.num_tiles && m->free.head) {
        visit *v = m->free.head;
        v->tile = m->next_tile;
        v->failed = v->pending = 0;
        v->work = (nvo_work){.job = &m->job, .tile = &m->job.tiles[m->next_tile],
                             .device = m->device, .simd = m->simd};
        if (!nvo_work_is_needed(&v->work)) {
            m->next_tile++;
            m->done_tiles++;
            continue;
        }
        int code = lease_for(m, v);
        if (code == -EAGAIN)
            break;
        pop(&m->free);
        m->next_tile++;
        m->active++;
        if (code != 0) {
            record_error(m, &(nvo_error){.code = code, .tile = v->tile});
            end_visit(m, v);
            break;
        }
        if (m->job.kind == NVO_UPDATE && is_on_disk(v->work.tile))
            start_reads(v);
        if (v->pending == 0 && v->failed)
            end_visit(m, v);
        else if (v->pending == 0)
            make_ready(m, v);
    }
    if (m->is_running && is_over(m)) {
        m->is_running = 0;
        pthread_cond_broadcast(&m->ended);
    }
}

/* What follows a finished kernel: the write, the gate, or the end. */
static void finish_work(nvo_mover *m, visit *v)
{
    int is_gated = m->job.kind == NVO_UPDATE && m->committed + 1 < m->job.generation;
    if (v->failed || m->error.code != 0 || !is_on_disk(v->work.tile)) {
        end_visit(m, v);
    } else if (is_gated) {
        push(&m->gated, v);
    } else {
        start_writes(v);
        if (v->pending == 0)
            end_visit(m, v);
    }
}

/* A transfer of a visit has ended; runs on the pump thread. */
static void on_end(nvo_xfer *xfer)
{
    visit *v = xfer->owner;
    nvo_mover *m = v->mover;
    pthread_mutex_lock(&m->lock);
    account(m);
    if (xfer->result != 0) {
        nvo_error error = {.code = xfer->result, .tile = v->tile, .op = xfer->op,
                           .file = xfer->file, .offset = xfer->error_offset,
                           .nbytes = xfer->error_nbytes, .generation = m->job.generation};
        record_error(m, &error);
        v->failed = 1;
    }
    if (--v->pending == 0) {
        if (xfer->op == NVO_READ && !v->failed && m->error.code == 0) {
            make_ready(m, v);
        } else {
            if (xfer->op == NVO_WRITE && !v->failed)
                note_written(v);
            end_visit(m, v);
        }
    }
    advance(m);
    pthread_mutex_unlock(&m->lock);
}

static void record_bad_checksum(nvo_mover *m, const visit *v)
{
    const nvo_tile *tile = v->work.tile;
    int is_state = v->work.bad_part == 2;
    const nvo_record *record = is_state ? tile->state : tile->param;
    nvo_error error = {.code = -EBADMSG, .tile = v->tile, .op = NVO_READ, .file = tile->file,
                       .part = v->work.bad_part, .slot = record->working,
                       .generation = record->generation};
    error.offset = is_state ? tile->state_offset[record->working]
                            : tile->param_offset[record->working] + tile->fetched_bytes;
    error.nbytes = is_state ? tile->num_words * tile->word_bytes : tile->remainder_bytes;
    record_error(m, &error);
}

static void compute(nvo_mover *m, visit *v, int thread)
{
    int64_t start = nvo_now_ns(), verified;
    int code = 0;
    v->work.stream = m->device ? m->device->streams[thread] : NULL;
    if (m->job.verify && m->job.kind == NVO_UPDATE && is_on_disk(v->work.tile))
        code = nvo_work_verify(&v->work);
    verified = nvo_now_ns();
    if (code == 0)
        code = nvo_work_run(&v->work);
    int64_t end = nvo_now_ns();
    pthread_mutex_lock(&m->lock);
    account(m);
    m->stats.verify_ns += verified - start;
    m->stats.kernel_ns += end - verified;
    if (code == -EBADMSG)
        record_bad_checksum(m, v);
    else if (code != 0)
        record_error(m, &(nvo_error){.code = code, .tile = v->tile});
    v->failed = code != 0;
    m->stats.tiles++;
}

static void *run_worker(void *argument)
{
    worker *self = argument;
    nvo_mover *m = self->mover;
    if (m->device && m->device->select)
        m->device->select(m->device->ordinal);
    pthread_mutex_lock(&m->lock);
    while (!m->is_stopping) {
        if (!m->ready.head) {
            pthread_cond_wait(&m->work, &m->lock);
            continue;
        }
        account(m);
        visit *v = pop(&m->ready);
        m->computing++;
        if (m->error.code == 0) {
            pthread_mutex_unlock(&m->lock);
            compute(m, v, self->index); /* returns with the lock */
        }
        m->computing--;
        finish_work(m, v);
        advance(m);
    }
    pthread_mutex_unlock(&m->lock);
    return NULL;
}

static int open_visits(nvo_mover *m, int count)
{
    m->visits = calloc((size_t)count, sizeof *m->visits);
    if (!m->visits)
        return -ENOMEM;
    for (int i = 0; i < count; i++) {
        m->visits[i].mover = m;
        push(&m->free, &m->visits[i]);
    }
    return 0;
}

static int start_workers(nvo_mover *m, int num_threads)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int code = 0;
    for (int i = 0; i < num_threads && code == 0; i++) {
        m->workers[i] = (worker){.mover = m, .index = i};
        code = -pthread_create(&m->workers[i].thread, NULL, run_worker, &m->workers[i]);
        if (code == 0)
            m->num_threads = i + 1;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return code;
}

static void stop_workers(nvo_mover *m)
{
    pthread_mutex_lock(&m->lock);
    m->is_stopping = 1;
    pthread_cond_broadcast(&m->work);
    pthread_mutex_unlock(&m->lock);
    for (int i = 0; i < m->num_threads; i++)
        pthread_join(m->workers[i].thread, NULL);
}

static void free_mover(nvo_mover *m)
{
    pthread_cond_destroy(&m->work);
    pthread_cond_destroy(&m->ended);
    pthread_mutex_destroy(&m->lock);
    free(m->visits);
    free(m);
}

int nvo_mover_open(nvo_mover **out, nvo_engine *engine, nvo_pool *pool,
                   const nvo_device *device, int num_threads, int simd)
{
    if (num_threads < 1 || num_threads > MAX_THREADS)
        return -EINVAL;
    nvo_mover *m = calloc(1, sizeof *m);
    if (!m)
        return -ENOMEM;
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&m->lock, NULL);
    pthread_cond_init(&m->work, &monotonic);
    pthread_cond_init(&m->ended, &monotonic);
    pthread_condattr_destroy(&monotonic);
    m->engine = engine;
    m->pool = pool;
    m->device = device;
    m->simd = simd;
    int code = open_visits(m, pool ? nvo_pool_free_buffers(pool) + num_threads : 2 * num_threads);
    if (code == 0)
        code = start_workers(m, num_threads);
    if (code != 0) {
        stop_workers(m);
        free_mover(m);
        return code;
    }
    *out = m;
    return 0;
}

int nvo_mover_start(nvo_mover *m, const nvo_job *job)
{
    pthread_mutex_lock(&m->lock);
    int code = m->error.code;
    if (m->is_running)
        code = -EBUSY;
    if (code == 0) {
        account(m);
        m->job = *job;
        m->next_tile = m->done_tiles = 0;
        m->is_running = 1;
        m->stats.jobs++;
        advance(m);
    }
    pthread_mutex_unlock(&m->lock);
    return code;
}

int nvo_mover_wait(nvo_mover *m, int timeout_ms)
{
    int64_t end_ns = nvo_now_ns() + (int64_t)timeout_ms * 1000000;
    pthread_mutex_lock(&m->lock);
    while (m->is_running && nvo_now_ns() < end_ns) {
        /* Ticks, because a buffer that somebody else gives back wakes nobody here. */
        int64_t tick_ns = nvo_now_ns() + TICK_MS * 1000000;
        int64_t until_ns = tick_ns < end_ns ? tick_ns : end_ns;
        struct timespec until = {.tv_sec = until_ns / 1000000000, .tv_nsec = until_ns % 1000000000};
        pthread_cond_timedwait(&m->ended, &m->lock, &until);
        account(m);
        advance(m);
    }
    int is_ended = !m->is_running;
    pthread_mutex_unlock(&m->lock);
    return is_ended;
}

int nvo_mover_progress(nvo_mover *m)
{
    pthread_mutex_lock(&m->lock);
    int done = m->done_tiles;
    pthread_mutex_unlock(&m->lock);
    return done;
}

int nvo_mover_error(nvo_mover *m, nvo_error *out)
{
    pthread_mutex_lock(&m->lock);
    *out = m->error;
    pthread_mutex_unlock(&m->lock);
    return out->code;
}

/* Let go of the tiles at the gate: to their writes, or, after an error, to their end. */
static void open_gate(nvo_mover *m)
{
    queue waiting = m->gated;
    m->gated = (queue){NULL, NULL};
    for (visit *v = pop(&waiting); v; v = pop(&waiting))
        finish_work(m, v);
    advance(m);
}

void nvo_mover_fail(nvo_mover *m, int code)
{
    pthread_mutex_lock(&m->lock);
    account(m);
    record_error(m, &(nvo_error){.code = code, .tile = -1});
    open_gate(m);
    pthread_mutex_unlock(&m->lock);
}

void nvo_mover_commit(nvo_mover *m, uint64_t generation)
{
    pthread_mutex_lock(&m->lock);
    account(m);
    m->committed = generation;
    open_gate(m);
    pthread_mutex_unlock(&m->lock);
}

void nvo_mover_stats_read(nvo_mover *m, nvo_mover_stats *out)
{
    pthread_mutex_lock(&m->lock);
    account(m);
    *out = m->stats;
    pthread_mutex_unlock(&m->lock);
}

int nvo_mover_close(nvo_mover *m)
{
    pthread_mutex_lock(&m->lock);
    int is_running = m->is_running;
    pthread_mutex_unlock(&m->lock);
    if (is_running)
        return -EBUSY;
    stop_workers(m);
    free_mover(m);
    return 0;
}
