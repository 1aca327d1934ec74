/*
 * engine.c: an engine's life and the calls that other threads make on it. The
 * work is done by pump.c.
 */
#define _GNU_SOURCE
#include "engine.h"

#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

static const int64_t block_bytes_max = (int64_t)1 << 30; /* the kernel moves < 2 GiB at once */

/* ---- small things ------------------------------------------------------------------ */

void nvo_queue_push(nvo_queue *queue, nvo_xfer *xfer)
{
    xfer->next = NULL;
    if (queue->head == NULL)
        queue->head = xfer;
    else
        queue->tail->next = xfer;
    queue->tail = xfer;
}

void nvo_queue_pop(nvo_queue *queue)
{
    queue->head = queue->head->next;
}

int nvo_cond_open(pthread_cond_t *cond)
{
    pthread_condattr_t attr;
    int result = -pthread_condattr_init(&attr);
    if (result < 0)
        return result;
    result = -pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    if (result == 0)
        result = -pthread_cond_init(cond, &attr);
    pthread_condattr_destroy(&attr);
    return result;
}

struct timespec nvo_deadline(int timeout_ms)
{
    int64_t at_ns = nvo_now_ns() + (int64_t)(timeout_ms > 0 ? timeout_ms : 0) * 1000000;
    return (struct timespec){.tv_sec = at_ns / 1000000000, .tv_nsec = at_ns % 1000000000};
}

/* Handles from before a fork are inert: their locks may be locked by threads that the
 * child does not have. */
static bool is_foreign(const nvo_engine *e)
{
    return e->epoch != nvo_fork_epoch();
}

/* REQUIRES: lock, under which wake_fd cannot be closed. */
static void wake_pump(nvo_engine *e)
{
    uint64_t one = 1;
    if (!e->sleeping)
        return;
    e->sleeping = false;
    if (write(e->wake_fd, &one, sizeof one) < 0)
        return; /* only when the counter is full, and then it is readable anyway */
}

/* ---- open -------------------------------------------------------------------------- */

static int open_event_fd(int *fd)
{
    *fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    return *fd < 0 ? -errno : nvo_fork_guard(*fd);
}

static void close_event_fd(int fd)
{
    if (fd < 0)
        return;
    nvo_fork_unguard(fd);
    close(fd);
}

static int open_tables(nvo_engine *e)
{
    size_t depth = (size_t)e->depth;
    e->slots = calloc(depth, sizeof *e->slots);
    e->free = calloc(depth, sizeof *e->free);
    e->ready = calloc(depth, sizeof *e->ready);
    if (e->slots == NULL || e->free == NULL || e->ready == NULL)
        return -ENOMEM;
    for (int32_t i = 0; i < e->depth; i++)
        e->free[i] = e->depth - 1 - i;
    e->num_free = e->depth;
    return 0;
}

static int open_pump(nvo_engine *e)
{
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old); /* inherited: signals are the user's threads' */
    int result = -pthread_create(&e->pump, NULL, nvo_pump_run, e);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (result == 0)
        pthread_setname_np(e->pump, "nvo-pump");
    return result;
}

/* Everything but the thread. */
static void free_parts(nvo_engine *e)
{
    if (e->ring != NULL)
        e->ops->close(e->ring);
    close_event_fd(e->event_fd);
    close_event_fd(e->wake_fd);
    free(e->slots);
    free(e->free);
    free(e->ready);
    pthread_cond_destroy(&e->changed);
    pthread_mutex_destroy(&e->lock);
    free(e);
}

static bool is_openable(int kind, int depth, int64_t block_bytes, int64_t align)
{
    if (kind != NVO_RING_AIO && kind != NVO_RING_BRIDGE)
        return false;
    if (depth < 1 || depth > NVO_DEPTH_MAX)
        return false;
    if (align < 1 || (align & (align - 1)) != 0)
        return false;
    return block_bytes >= align && block_bytes <= block_bytes_max && block_bytes % align == 0;
}

int nvo_engine_open(nvo_engine **out, int kind, int depth, int64_t block_bytes, int64_t align)
{
    if (!is_openable(kind, depth, block_bytes, align))
        return -EINVAL;
    nvo_engine *e = calloc(1, sizeof *e);
    if (e == NULL)
        return -ENOMEM;
    int result = nvo_cond_open(&e->changed);
    if (result < 0) {
        free(e);
        return result;
    }
    pthread_mutex_init(&e->lock, NULL);
    e->ops = kind == NVO_RING_AIO ? &nvo_ring_aio : &nvo_ring_bridge;
    e->epoch = nvo_fork_epoch();
    e->block_bytes = block_bytes;
    e->align = align;
    e->event_fd = e->wake_fd = -1;

    result = open_event_fd(&e->event_fd);
    if (result < 0)
        goto out;
    result = open_event_fd(&e->wake_fd);
    if (result < 0)
        goto out;
    result = e->ops->open(&e->ring, &depth, e->event_fd);
    if (result < 0)
        goto out;
    e->depth = depth;
    result = open_tables(e);
    if (result < 0)
        goto out;
    result = open_pump(e);
    if (result < 0)
        goto out;
    *out = e;
    return 0;
out:
    free_parts(e);
    return result;
}

int nvo_engine_depth(const nvo_engine *engine)
{
    return engine->depth;
}

const char *nvo_engine_library(const nvo_engine *engine)
{
    return engine->ops->library(engine->ring);
}

/* ---- transfers --------------------------------------------------------------------- */

static bool is_valid(const nvo_engine *e, const nvo_xfer *xfer)
{
    int64_t mask = e->align - 1;
    if (xfer->fd < 0 || (xfer->op != NVO_READ && xfer->op != NVO_WRITE))
        return false;
    if (xfer->priority < 0 || xfer->priority >= NVO_NUM_CLASSES)
        return false;
    if (xfer->addr == NULL || ((uintptr_t)xfer->addr & (uintptr_t)mask) != 0)
        return false;
    if (xfer->offset < 0 || (xfer->offset & mask) != 0)
        return false;
    return xfer->nbytes > 0 && (xfer->nbytes & mask) == 0 && xfer->offset <= INT64_MAX - xfer->nbytes;
}

int nvo_engine_submit(nvo_engine *engine, nvo_xfer *xfer)
{
    if (is_foreign(engine))
        return -ESHUTDOWN;
    if (!is_valid(engine, xfer))
        return -EINVAL;

    int result = -ESHUTDOWN;
    pthread_mutex_lock(&engine->lock);
    if (!engine->closing) {
        xfer->ended = 0;
        xfer->result = 0;
        xfer->error_offset = xfer->error_nbytes = 0;
        xfer->issued = 0;
        xfer->inflight = 0;
        nvo_queue_push(&engine->queues[xfer->priority], xfer);
        engine->stats.queued++;
        wake_pump(engine);
        result = 0;
    }
    pthread_mutex_unlock(&engine->lock);
    return result;
}

int nvo_engine_wait(nvo_engine *engine, nvo_xfer *xfer, int timeout_ms)
{
    if (is_foreign(engine))
        return 1;
    struct timespec deadline = nvo_deadline(timeout_ms);
    int timed_out = 0;
    pthread_mutex_lock(&engine->lock);
    while (!xfer->ended && timed_out == 0)
        timed_out = pthread_cond_timedwait(&engine->changed, &engine->lock, &deadline);
    int ended = xfer->ended;
    pthread_mutex_unlock(&engine->lock);
    return ended;
}

void nvo_engine_stats_read(nvo_engine *engine, nvo_engine_stats *out)
{
    if (is_foreign(engine)) {
        memset(out, 0, sizeof *out);
        return;
    }
    pthread_mutex_lock(&engine->lock);
    *out = engine->stats;
    if (out->inflight > 0)
        out->busy_ns += nvo_now_ns() - engine->busy_since_ns;
    pthread_mutex_unlock(&engine->lock);
}

/* ---- close ------------------------------------------------------------------------- */

int nvo_engine_drain(nvo_engine *engine, int timeout_ms)
{
    if (is_foreign(engine))
        return 0;
    if (pthread_equal(pthread_self(), engine->pump))
        return -EDEADLK;
    struct timespec deadline = nvo_deadline(timeout_ms);
    int timed_out = 0;
    pthread_mutex_lock(&engine->lock);
    engine->closing = true;
    while ((engine->stats.queued > 0 || engine->calling > 0) && timed_out == 0)
        timed_out = pthread_cond_timedwait(&engine->changed, &engine->lock, &deadline);
    bool drained = engine->stats.queued == 0 && engine->calling == 0;
    pthread_mutex_unlock(&engine->lock);
    if (!drained)
        return -ETIMEDOUT;
    if (engine->ops == &nvo_ring_bridge)
        nvo_bridge_stop(engine->ring);
    return 0;
}

int nvo_engine_close(nvo_engine *engine, int timeout_ms)
{
    int result = nvo_engine_drain(engine, timeout_ms);
    if (result < 0 || is_foreign(engine))
        return result;

    pthread_mutex_lock(&engine->lock);
    engine->stop = true;
    wake_pump(engine);
    pthread_mutex_unlock(&engine->lock);
    pthread_join(engine->pump, NULL);
    free_parts(engine);
    return 0;
}
