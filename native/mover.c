/* The mover: takes the tiles of its jobs through read, kernel and write, as many at once as the
 * pool has buffers. Driven by the pump (ends of transfers) and its own kernel threads; no
 * Python per tile. Never decides what to update.
 *
 * A visit is one tile on its way:
 *
 *   READING -> READY -> WORKING -> [GATED] -> WRITING -> free
 *
 * GATED: the tile is finished, but its write would overwrite the generation before the last
 * one that a manifest names, so it waits for the commit. Every move happens under `lock`.
 *
 * Note [No deadlock]. A gated visit keeps its buffer until the generation before is committed,
 * which needs all writes of that generation. So no tile of a later generation starts while a
 * job of an earlier one still has tiles to start: those that hold buffers then only wait for
 * writes that have theirs. And a job nobody waits for leaves the last free buffer alone. */
#define _POSIX_C_SOURCE 200809L
#include "mover.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

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

/* Book the time since the last call to whatever was waited for. Call before each change.
 * Kernels are what all wait for if tiles queue up before them, or if nothing else moves. */
static void account(nvo_mover *m)
{
    int64_t now = nvo_now_ns(), passed = now - m->waiting_since;
    m->waiting_since = now;
    if (!m->live)
        return;
    m->stats.run_ns += passed;
    if (m->ready.head || (m->computing > 0 && m->transferring == 0))
        return;
    if (m->gated.head && m->transferring == 0)
        m->stats.gate_wait_ns += passed;
    else
        m->stats.disk_wait_ns += passed;
}

static int is_over(const nvo_mover *m, const nvo_job *job)
{
    return job->ended == job->num_tiles || (m->error.code != 0 && job->active == 0);
}

static void unlink_job(nvo_mover *m, nvo_job *job)
{
    nvo_job **at = &m->first;
    while (*at && *at != job)
        at = &(*at)->next;
    if (*at)
        *at = job->next;
    job->next = NULL;
}

static void end_job(nvo_mover *m, nvo_job *job)
{
    unlink_job(m, job);
    m->live--;
    if (job->kind == NVO_UPDATE)
        m->expected[job->generation % NUM_GENERATIONS]--;
    pthread_cond_broadcast(&m->ended);
}

/* The tile's values are where the job should bring them. */
static void note_delivered(nvo_mover *m, visit *v)
{
    v->delivered = 1;
    if (++v->job->delivered == v->job->num_tiles)
        pthread_cond_broadcast(&m->ended);
}

static void end_visit(nvo_mover *m, visit *v)
{
    nvo_job *job = v->job;
    if (v->work.lease)
        nvo_pool_release(m->pool, v->work.lease);
    v->work.lease = NULL;
    if (v->work.tile->busy)
        *v->work.tile->busy = 0;
    push(&m->free, v);
    job->active--;
    job->ended++;
    if (!v->delivered)
        note_delivered(m, v);
    if (is_over(m, job))
        end_job(m, job);
}

static void make_ready(nvo_mover *m, visit *v)
{
    push(&m->ready, v);
    pthread_cond_signal(&m->work);
}

static void link_job(nvo_mover *m, nvo_job *job)
{
    nvo_job **at = &m->first;
    while (*at && (*at)->priority <= job->priority)
        at = &(*at)->next;
    job->next = *at;
    *at = job;
}

/* Is the next tile of `job` free to be visited? See Note [No deadlock]. */
static int can_start(const nvo_mover *m, const nvo_job *job)
{
    const nvo_tile *tile = &job->tiles[job->next_tile];
    if (tile->busy && *tile->busy)
        return 0;
    for (const nvo_job *other = m->first; other; other = other->next) {
        if (other->lane == job->lane && other->order < job->order)
            return 0;
        if (nvo_job_writes(job) && nvo_job_writes(other) && other->generation < job->generation)
            return 0;
    }
    return 1;
}

/* Skip the tiles of a job that have nothing to do in it. */
static void skip_tiles(nvo_mover *m, nvo_job *job)
{
    while (job->next_tile < job->num_tiles) {
        nvo_work work = {.job = job, .tile = &job->tiles[job->next_tile]};
        if (nvo_work_is_needed(&work))
            return;
        job->next_tile++;
        job->delivered++;
        job->ended++;
    }
    unlink_job(m, job);
    if (job->active == 0 && job->ended == job->num_tiles)
        end_job(m, job);
}

/* Start the next tile of `job`: 0, or -EAGAIN when there is no buffer for it. */
static int start_visit(nvo_mover *m, nvo_job *job)
{
    visit *v = m->free.head;
    v->job = job;
    v->tile = job->next_tile;
    v->failed = v->pending = v->delivered = 0;
    v->work = (nvo_work){.job = job, .tile = &job->tiles[job->next_tile],
                         .device = m->device, .simd = m->simd};
    int code = nvo_visit_lease(v);
    if (code == -EAGAIN)
        return code;
    pop(&m->free);
    job->next_tile++;
    job->active++;
    if (v->work.tile->busy)
        *v->work.tile->busy = 1;
    skip_tiles(m, job);
    if (code != 0) {
        nvo_mover_record(m, &(nvo_error){.code = code, .tile = v->tile, .job = job});
        v->failed = 1;
    } else if ((nvo_job_writes(job) || job->kind == NVO_FETCH) && v->work.lease) {
        nvo_visit_read(v);
    }
    if (v->pending == 0 && v->failed)
        end_visit(m, v);
    else if (v->pending == 0)
        make_ready(m, v);
    return 0;
}

/* End what an error has left without a visit. */
static void drop_jobs(nvo_mover *m)
{
    for (visit *v = pop(&m->gated); v; v = pop(&m->gated))
        end_visit(m, v);
    while (m->first) {
        nvo_job *job = m->first;
        job->next_tile = job->num_tiles;
        if (job->active == 0)
            end_job(m, job);
        else
            unlink_job(m, job);
    }
    pthread_cond_broadcast(&m->ended);
}

/* Start as many visits as visits and buffers allow. */
static void advance(nvo_mover *m)
{
    nvo_job *job = m->first;
    while (job && m->error.code == 0 && m->free.head) {
        nvo_job *next = job->next;
        if (!can_start(m, job)) {
            job = next;
        } else {
            if (start_visit(m, job) != 0)
                break;
            job = m->first; /* this one may be through, and an earlier one free to start */
        }
    }
    if (m->error.code != 0)
        drop_jobs(m);
}

/* What follows a finished kernel: the write, the gate, or the end. */
static void finish_work(nvo_mover *m, visit *v)
{
    int is_gated = nvo_job_writes(v->job) && m->committed + 1 < v->job->generation;
    if (!v->failed && !v->delivered)
        note_delivered(m, v);
    if (v->failed || m->error.code != 0 || v->job->kind == NVO_FETCH || !nvo_visit_is_on_disk(v)) {
        end_visit(m, v);
    } else if (is_gated) {
        push(&m->gated, v);
    } else {
        nvo_visit_write(v);
        if (v->pending == 0)
            end_visit(m, v);
    }
}

/* A transfer of a visit has ended; runs on the pump thread. */
void nvo_visit_on_end(nvo_xfer *xfer)
{
    visit *v = xfer->owner;
    nvo_mover *m = v->mover;
    pthread_mutex_lock(&m->lock);
    account(m);
    if (xfer->result != 0) {
        nvo_error error = {.code = xfer->result, .tile = v->tile, .op = xfer->op,
                           .file = xfer->file, .offset = xfer->error_offset,
                           .nbytes = xfer->error_nbytes, .generation = v->job->generation,
                           .job = v->job};
        nvo_mover_record(m, &error);
        v->failed = 1;
    }
    if (--v->pending == 0) {
        m->transferring--;
        if (xfer->op == NVO_READ && !v->failed && m->error.code == 0) {
            make_ready(m, v);
        } else {
            if (xfer->op == NVO_WRITE && !v->failed)
                nvo_visit_note_written(v);
            end_visit(m, v);
        }
    }
    advance(m);
    pthread_mutex_unlock(&m->lock);
}

static void compute(nvo_mover *m, visit *v, int thread)
{
    int64_t start = nvo_now_ns(), verified;
    int code = 0;
    v->work.stream = m->device ? m->device->streams[thread] : NULL;
    if (v->job->verify && (nvo_job_writes(v->job) || v->job->kind == NVO_FETCH) && v->work.lease)
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
        nvo_visit_bad_checksum(v);
    else if (code != 0)
        nvo_mover_record(m, &(nvo_error){.code = code, .tile = v->tile, .job = v->job});
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
    int code = open_visits(m, pool ? PIECES * nvo_pool_free_buffers(pool) + num_threads : 2 * num_threads);
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

int nvo_mover_submit(nvo_mover *m, nvo_job *job)
{
    pthread_mutex_lock(&m->lock);
    int code = m->error.code;
    if (code == 0) {
        account(m);
        job->next_tile = job->active = job->delivered = job->ended = 0;
        m->live++;
        job->order = m->stats.jobs++;
        link_job(m, job);
        skip_tiles(m, job);
        advance(m);
    }
    pthread_mutex_unlock(&m->lock);
    return code;
}

void nvo_mover_promote(nvo_mover *m, nvo_job *job)
{
    pthread_mutex_lock(&m->lock);
    account(m);
    for (nvo_job *other = m->first, *next; other; other = next) {
        next = other->next;
        if (other->lane == job->lane && other->order <= job->order && other->priority != NVO_DEMAND) {
            unlink_job(m, other);
            other->priority = NVO_DEMAND;
            link_job(m, other);
        }
    }
    advance(m);
    pthread_mutex_unlock(&m->lock);
}

/* Wait a tick for something to end, because a buffer that somebody else gives back wakes
 * nobody here. */
static void wait_tick(nvo_mover *m, int64_t end_ns)
{
    int64_t tick_ns = nvo_now_ns() + TICK_MS * 1000000;
    int64_t until_ns = tick_ns < end_ns ? tick_ns : end_ns;
    struct timespec until = {.tv_sec = until_ns / 1000000000, .tv_nsec = until_ns % 1000000000};
    pthread_cond_timedwait(&m->ended, &m->lock, &until);
    account(m);
    advance(m);
}

static int has_come_to(const nvo_mover *m, const nvo_job *job, int stage)
{
    return is_over(m, job) || (stage == NVO_DELIVERED && job->delivered == job->num_tiles);
}

int nvo_mover_wait(nvo_mover *m, nvo_job *job, int stage, int timeout_ms)
{
    int64_t end_ns = nvo_now_ns() + (int64_t)timeout_ms * 1000000;
    pthread_mutex_lock(&m->lock);
    while (!has_come_to(m, job, stage) && nvo_now_ns() < end_ns)
        wait_tick(m, end_ns);
    int has_come = has_come_to(m, job, stage);
    pthread_mutex_unlock(&m->lock);
    return has_come;
}

void nvo_mover_expect(nvo_mover *m, uint64_t generation, int count)
{
    pthread_mutex_lock(&m->lock);
    m->expected[generation % NUM_GENERATIONS] += count;
    pthread_mutex_unlock(&m->lock);
}

static int is_written(const nvo_mover *m, uint64_t generation)
{
    uint64_t oldest = generation < NUM_GENERATIONS / 2 ? 0 : generation - NUM_GENERATIONS / 2;
    for (uint64_t g = oldest; g <= generation; g++)
        if (m->expected[g % NUM_GENERATIONS] != 0)
            return 0;
    return 1;
}

int nvo_mover_wait_written(nvo_mover *m, uint64_t generation, int timeout_ms)
{
    int64_t end_ns = nvo_now_ns() + (int64_t)timeout_ms * 1000000;
    pthread_mutex_lock(&m->lock);
    while (!is_written(m, generation) && m->error.code == 0 && nvo_now_ns() < end_ns)
        wait_tick(m, end_ns);
    int code = m->error.code != 0 ? m->error.code : is_written(m, generation);
    pthread_mutex_unlock(&m->lock);
    return code;
}

int nvo_mover_error(nvo_mover *m, nvo_error *out)
{
    pthread_mutex_lock(&m->lock);
    *out = m->error;
    pthread_mutex_unlock(&m->lock);
    return out->code;
}

void nvo_mover_fail(nvo_mover *m, int code)
{
    pthread_mutex_lock(&m->lock);
    account(m);
    nvo_mover_record(m, &(nvo_error){.code = code, .tile = -1});
    advance(m);
    while (m->computing)
        wait_tick(m, INT64_MAX);
    pthread_mutex_unlock(&m->lock);
}

void nvo_mover_commit(nvo_mover *m, uint64_t generation)
{
    pthread_mutex_lock(&m->lock);
    account(m);
    m->committed = generation;
    queue waiting = m->gated;
    m->gated = (queue){NULL, NULL};
    for (visit *v = pop(&waiting); v; v = pop(&waiting))
        finish_work(m, v);
    advance(m);
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
    int num_live = m->live;
    pthread_mutex_unlock(&m->lock);
    if (num_live)
        return -EBUSY;
    stop_workers(m);
    free_mover(m);
    return 0;
}
