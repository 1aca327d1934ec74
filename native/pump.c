/*
 * pump.c: the thread behind an engine. Cuts transfers into blocks, keeps the ring
 * full, checks every completion. Decides nothing but order; never looks at bytes.
 */
#define _GNU_SOURCE
#include "engine.h"

#include <errno.h>
#include <poll.h>
#include <unistd.h>

enum { TRIES_MAX = 16 };                 /* completions in a row that moved nothing */
static const int64_t refused_max_ns = 10000000000; /* with nothing in flight */
static const struct timespec refused_pause = {0, 500000};

/* ---- slots that wait for a submit ---------------------------------------------- */

static void ready_push(nvo_engine *e, int32_t index)
{
    e->ready[(e->ready_first + e->num_ready) % e->depth] = index;
    e->num_ready++;
}

static void ready_push_front(nvo_engine *e, int32_t index)
{
    e->ready_first = (e->ready_first + e->depth - 1) % e->depth;
    e->ready[e->ready_first] = index;
    e->num_ready++;
}

static int32_t ready_pop(nvo_engine *e)
{
    int32_t index = e->ready[e->ready_first];
    e->ready_first = (e->ready_first + 1) % e->depth;
    e->num_ready--;
    return index;
}

/* ---- cutting -------------------------------------------------------------------- */

static nvo_queue *first_queue(nvo_engine *e)
{
    for (int i = 0; i < NVO_NUM_CLASSES; i++) {
        if (e->queues[i].head != NULL)
            return &e->queues[i];
    }
    return NULL;
}

/* REQUIRES: lock. */
static void cut_blocks(nvo_engine *e)
{
    nvo_queue *queue;

    while (e->num_free > 0 && (queue = first_queue(e)) != NULL) {
        nvo_xfer *xfer = queue->head;
        int32_t index = e->free[--e->num_free];
        nvo_slot *slot = &e->slots[index];
        int64_t rest = xfer->nbytes - xfer->issued;

        slot->xfer = xfer;
        slot->start = xfer->issued;
        slot->nbytes = rest < e->block_bytes ? rest : e->block_bytes;
        slot->moved = 0;
        slot->tries = 0;
        xfer->issued += slot->nbytes;
        xfer->inflight++;
        if (xfer->issued == xfer->nbytes)
            nvo_queue_pop(queue);
        ready_push(e, index);
    }
}

/* ---- ending --------------------------------------------------------------------- */

/* REQUIRES: lock. After this a transfer without on_end may be gone. */
static void end_xfer(nvo_engine *e, nvo_xfer *xfer, nvo_queue *ended)
{
    e->stats.queued--;
    if (xfer->on_end != NULL) {
        nvo_queue_push(ended, xfer);
        e->calling++;
    }
    xfer->ended = 1;
    pthread_cond_broadcast(&e->changed);
}

/* The block in slot `index` is over, with 0 or a negative errno. REQUIRES: lock. */
static void end_block(nvo_engine *e, int32_t index, int code, nvo_queue *ended)
{
    nvo_slot *slot = &e->slots[index];
    nvo_xfer *xfer = slot->xfer;

    slot->xfer = NULL;
    e->free[e->num_free++] = index;
    xfer->inflight--;
    if (code < 0 && xfer->result == 0) {
        xfer->result = code;
        xfer->error_offset = xfer->offset + slot->start;
        xfer->error_nbytes = slot->nbytes;
        if (xfer->issued < xfer->nbytes)
            nvo_queue_pop(&e->queues[xfer->priority]); /* Note [Who owns what]: it is the head */
    }
    if (xfer->inflight == 0 && (xfer->issued == xfer->nbytes || xfer->result < 0))
        end_xfer(e, xfer, ended);
}

/* Call back without the lock; a callback may submit, and reuse its transfer. */
static void call_back(nvo_engine *e, const nvo_queue *ended)
{
    int32_t num_called = 0;

    for (nvo_xfer *xfer = ended->head, *next; xfer != NULL; xfer = next) {
        next = xfer->next;
        xfer->on_end(xfer);
        num_called++;
    }
    if (num_called == 0)
        return;
    pthread_mutex_lock(&e->lock);
    e->calling -= num_called;
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);
}

/* ---- submitting ------------------------------------------------------------------ */

static uint64_t token_of(const nvo_slot *slot, int32_t index)
{
    return (uint64_t)slot->serial << 32 | (uint32_t)index;
}

/* Take blocks from `ready`, at most a batch; those of failed transfers end here. */
static int pop_batch(nvo_engine *e, int32_t *batch, nvo_block *blocks, nvo_queue *ended)
{
    int num = 0;

    while (num < NVO_BATCH && e->num_ready > 0) {
        int32_t index = ready_pop(e);
        const nvo_slot *slot = &e->slots[index];
        const nvo_xfer *xfer = slot->xfer;
        int64_t at = slot->start + slot->moved;

        if (xfer->result < 0) {
            pthread_mutex_lock(&e->lock);
            end_block(e, index, 0, ended);
            pthread_mutex_unlock(&e->lock);
            continue;
        }
        batch[num] = index;
        blocks[num++] = (nvo_block){
            .token = token_of(slot, index),
            .fd = xfer->fd,
            .op = xfer->op,
            .addr = (char *)xfer->addr + at,
            .offset = xfer->offset + at,
            .nbytes = slot->nbytes - slot->moved,
        };
    }
    return num;
}

static void count_sent(nvo_engine *e, const int32_t *batch, int sent, int64_t now_ns)
{
    pthread_mutex_lock(&e->lock);
    if (e->stats.inflight == 0)
        e->busy_since_ns = now_ns;
    e->stats.inflight += sent;
    for (int i = 0; i < sent; i++) {
        nvo_slot *slot = &e->slots[batch[i]];
        slot->flying = true;
        if (slot->xfer->op == NVO_READ)
            e->stats.read_requests++;
        else
            e->stats.write_requests++;
    }
    pthread_mutex_unlock(&e->lock);
}

/* Whether a refused submit (-EAGAIN, -EINTR) has been refused for too long. What is
 * in flight may free what the kernel lacks, so time counts only when nothing is. */
static bool is_hopeless(nvo_engine *e, int64_t now_ns)
{
    if (e->stats.inflight > 0 || e->refused_since_ns == 0) {
        e->refused_since_ns = now_ns;
        return false;
    }
    return now_ns - e->refused_since_ns > refused_max_ns;
}

/* Submit one batch: 0; -EAGAIN when the ring took nothing and it is to be tried later. */
static int push_batch(nvo_engine *e, nvo_queue *ended)
{
    int32_t batch[NVO_BATCH];
    nvo_block blocks[NVO_BATCH];
    int num = pop_batch(e, batch, blocks, ended);
    if (num == 0)
        return 0;

    int64_t now_ns = nvo_now_ns();
    int sent = e->ops->submit(e->ring, blocks, num);
    for (int i = num; i > (sent > 0 ? sent : 0); i--)
        ready_push_front(e, batch[i - 1]);
    if (sent > 0) {
        e->refused_since_ns = 0;
        count_sent(e, batch, sent, now_ns);
        return 0;
    }
    if (sent == 0 || sent == -EAGAIN || sent == -EINTR) {
        if (!is_hopeless(e, now_ns))
            return -EAGAIN;
        sent = -EAGAIN;
    }
    pthread_mutex_lock(&e->lock);
    end_block(e, ready_pop(e), sent, ended); /* an error is the first block's alone */
    pthread_mutex_unlock(&e->lock);
    return 0;
}

/* ---- completions ----------------------------------------------------------------- */

enum { AGAIN = 1 };

static int try_again(nvo_slot *slot, int code)
{
    return ++slot->tries > TRIES_MAX ? code : AGAIN;
}

/* Take in what the ring says of a block: 0 it is complete, AGAIN, or a negative
 * errno. REQUIRES: lock. */
static int judge(nvo_engine *e, nvo_slot *slot, int64_t result)
{
    int64_t rest = slot->nbytes - slot->moved;
    bool is_read = slot->xfer->op == NVO_READ;

    if (result == -EAGAIN || result == -EINTR)
        return try_again(slot, (int)result);
    if (result < 0)
        return result >= -4095 ? (int)result : -EIO;
    if (result > rest)
        return -EIO;
    if (result == 0 && is_read)
        return -ENODATA; /* the file ends here */

    int64_t moved = result - result % e->align;
    slot->moved += moved;
    if (is_read)
        e->stats.read_bytes += moved;
    else
        e->stats.write_bytes += moved;
    if (slot->moved == slot->nbytes)
        return 0;
    if (moved == 0)
        return try_again(slot, -EIO);
    slot->tries = 0;
    return AGAIN;
}

/* REQUIRES: lock. */
static void land(nvo_engine *e, const nvo_event *event, int64_t now_ns, nvo_queue *ended)
{
    uint32_t index = (uint32_t)event->token;
    if (index >= (uint32_t)e->depth)
        return;
    nvo_slot *slot = &e->slots[index];
    if (!slot->flying || event->token != token_of(slot, (int32_t)index))
        return; /* stale or twice: the block it belonged to is over */

    slot->flying = false;
    slot->serial++;
    e->stats.last_progress_ns = now_ns;
    if (--e->stats.inflight == 0)
        e->stats.busy_ns += now_ns - e->busy_since_ns;
    int code = judge(e, slot, event->result);
    if (code == AGAIN)
        ready_push_front(e, (int32_t)index);
    else
        end_block(e, (int32_t)index, code, ended);
}

static void reap_events(nvo_engine *e, nvo_queue *ended)
{
    nvo_event events[NVO_BATCH];
    int num;

    do {
        num = e->ops->reap(e->ring, events, NVO_BATCH);
        if (num <= 0)
            return;
        int64_t now_ns = nvo_now_ns();
        pthread_mutex_lock(&e->lock);
        for (int i = 0; i < num; i++)
            land(e, &events[i], now_ns, ended);
        pthread_mutex_unlock(&e->lock);
    } while (num == NVO_BATCH);
}

/* ---- the loop -------------------------------------------------------------------- */

static void drain_fd(const struct pollfd *poll_fd)
{
    uint64_t count;
    if ((poll_fd->revents & POLLIN) != 0 && read(poll_fd->fd, &count, sizeof count) < 0)
        return; /* somebody else's wake-up: nothing to drain */
}

/* Sleep until there may be something to do. The descriptors are drained before
 * the next reap, so an event that comes in between leaves them readable. */
static void doze(nvo_engine *e, bool refused)
{
    pthread_mutex_lock(&e->lock);
    bool work = e->stop || (e->num_free > 0 && first_queue(e) != NULL);
    e->sleeping = refused || !work;
    bool sleeping = e->sleeping;
    pthread_mutex_unlock(&e->lock);
    if (!sleeping)
        return;

    struct pollfd fds[2] = {
        {.fd = e->event_fd, .events = POLLIN},
        {.fd = e->wake_fd, .events = POLLIN},
    };
    if (ppoll(fds, 2, refused ? &refused_pause : NULL, NULL) <= 0)
        return;
    drain_fd(&fds[0]);
    drain_fd(&fds[1]);
}

void *nvo_pump_run(void *engine)
{
    nvo_engine *e = engine;

    for (;;) {
        nvo_queue ended = {NULL, NULL};
        int refused = 0;

        reap_events(e, &ended);
        pthread_mutex_lock(&e->lock);
        e->sleeping = false;
        bool stop = e->stop;
        cut_blocks(e);
        pthread_mutex_unlock(&e->lock);
        while (e->num_ready > 0 && refused == 0)
            refused = push_batch(e, &ended);
        call_back(e, &ended);
        if (stop)
            return NULL;
        doze(e, refused != 0);
    }
}
