/*
 * ring_bridge.c: the ring that somebody else serves. A queue of blocks to take and
 * a list of answers; waits in C, so that a puller in Python waits without the GIL.
 */
#include "engine.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct bridge {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* a block came, stop, a puller left */
    int event_fd;
    int32_t depth;
    int32_t num_pullers;    /* inside take */
    bool stopped;
    /* The engine never has more than depth blocks here, so none of these fills up. */
    nvo_block *waiting;     /* a ring */
    int32_t waiting_first, num_waiting;
    uint64_t *taken;
    int32_t num_taken;
    nvo_event *answers;
    int32_t num_answers;
} bridge;

/* ---- the four functions of a ring ------------------------------------------------------ */

static void bridge_close(void *opaque)
{
    bridge *b = opaque;
    pthread_cond_destroy(&b->changed);
    pthread_mutex_destroy(&b->lock);
    free(b->waiting);
    free(b->taken);
    free(b->answers);
    free(b);
}

static int bridge_open(void **out, int *depth, int event_fd)
{
    bridge *b = calloc(1, sizeof *b);
    if (b == NULL)
        return -ENOMEM;
    int result = nvo_cond_open(&b->changed);
    if (result < 0) {
        free(b);
        return result;
    }
    pthread_mutex_init(&b->lock, NULL);
    b->event_fd = event_fd;
    b->depth = *depth;
    b->waiting = calloc((size_t)*depth, sizeof *b->waiting);
    b->taken = calloc((size_t)*depth, sizeof *b->taken);
    b->answers = calloc((size_t)*depth, sizeof *b->answers);
    if (b->waiting == NULL || b->taken == NULL || b->answers == NULL) {
        bridge_close(b);
        return -ENOMEM;
    }
    *out = b;
    return 0;
}

static int bridge_submit(void *opaque, const nvo_block *blocks, int n)
{
    bridge *b = opaque;
    pthread_mutex_lock(&b->lock);
    for (int i = 0; i < n; i++)
        b->waiting[(b->waiting_first + b->num_waiting++) % b->depth] = blocks[i];
    pthread_cond_broadcast(&b->changed);
    pthread_mutex_unlock(&b->lock);
    return n;
}

static int bridge_reap(void *opaque, nvo_event *events, int max)
{
    bridge *b = opaque;
    pthread_mutex_lock(&b->lock);
    int num = b->num_answers < max ? b->num_answers : max;
    size_t rest = (size_t)(b->num_answers - num);
    memcpy(events, b->answers, (size_t)num * sizeof *events);
    memmove(b->answers, b->answers + num, rest * sizeof *events);
    b->num_answers -= num;
    pthread_mutex_unlock(&b->lock);
    return num;
}

static const char *bridge_library(void *opaque)
{
    (void)opaque;
    return "bridge";
}

const nvo_ring_ops nvo_ring_bridge = {
    .open = bridge_open,
    .submit = bridge_submit,
    .reap = bridge_reap,
    .library = bridge_library,
    .close = bridge_close,
};

/* ---- the pullers' side ------------------------------------------------------------------- */

static bridge *bridge_of(const nvo_engine *engine)
{
    return engine->ops == &nvo_ring_bridge ? engine->ring : NULL;
}

void nvo_bridge_stop(void *opaque)
{
    bridge *b = opaque;
    pthread_mutex_lock(&b->lock);
    b->stopped = true;
    pthread_cond_broadcast(&b->changed);
    while (b->num_pullers > 0)
        pthread_cond_wait(&b->changed, &b->lock);
    pthread_mutex_unlock(&b->lock);
}

/* REQUIRES: lock, num_waiting > 0. */
static void take_first(bridge *b, nvo_block *out)
{
    *out = b->waiting[b->waiting_first];
    b->waiting_first = (b->waiting_first + 1) % b->depth;
    b->num_waiting--;
    b->taken[b->num_taken++] = out->token;
}

int nvo_bridge_take(nvo_engine *engine, nvo_block *out, int timeout_ms)
{
    bridge *b = bridge_of(engine);
    if (b == NULL)
        return -EINVAL;
    if (engine->epoch != nvo_fork_epoch())
        return -ESHUTDOWN;

    struct timespec deadline = nvo_deadline(timeout_ms);
    int timed_out = 0;
    int result = 0;
    pthread_mutex_lock(&b->lock);
    b->num_pullers++;
    while (b->num_waiting == 0 && !b->stopped && timed_out == 0)
        timed_out = pthread_cond_timedwait(&b->changed, &b->lock, &deadline);
    if (b->stopped) {
        result = -ESHUTDOWN;
    } else if (b->num_waiting > 0) {
        take_first(b, out);
        result = 1;
    }
    b->num_pullers--;
    if (b->stopped)
        pthread_cond_broadcast(&b->changed);
    pthread_mutex_unlock(&b->lock);
    return result;
}

/* REQUIRES: lock. */
static int32_t find_taken(const bridge *b, uint64_t token)
{
    for (int32_t i = 0; i < b->num_taken; i++) {
        if (b->taken[i] == token)
            return i;
    }
    return -1;
}

int nvo_bridge_done(nvo_engine *engine, uint64_t token, int64_t result)
{
    bridge *b = bridge_of(engine);
    if (b == NULL)
        return -EINVAL;
    if (engine->epoch != nvo_fork_epoch())
        return -ESHUTDOWN;

    uint64_t one = 1;
    int code = -EINVAL;
    pthread_mutex_lock(&b->lock);
    int32_t index = find_taken(b, token);
    if (index >= 0) {
        b->taken[index] = b->taken[--b->num_taken];
        b->answers[b->num_answers++] = (nvo_event){.token = token, .result = result};
        /* Under the lock: with this answer the engine may drain and close the descriptor. */
        code = write(b->event_fd, &one, sizeof one) < 0 && errno != EAGAIN ? -errno : 0;
    }
    pthread_mutex_unlock(&b->lock);
    return code;
}
