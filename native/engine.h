/*
 * engine.h: what engine.c, pump.c and ring_bridge.c share, and nobody else.
 *
 * Note [Who owns what]
 * The lock guards the queues, the stats, the flags and the engine's fields of every
 * transfer that has not ended. Slots, `ready` and `free` are the pump's alone; the
 * number of free slots is only ever looked at by the pump. A transfer stands in its
 * queue until its last block is cut, so only the head of a queue is partly issued.
 */
#ifndef NVO_ENGINE_H
#define NVO_ENGINE_H

#include "nvo.h"

#include <pthread.h>
#include <stdbool.h>
#include <time.h>

enum { NVO_BATCH = 32, NVO_NUM_CLASSES = 2, NVO_DEPTH_MAX = 4096 };

/* First in, first out, linked through nvo_xfer.next. */
typedef struct nvo_queue {
    nvo_xfer *head, *tail;
} nvo_queue;

/* One block in flight. Token: `serial` above, the slot's index below. */
typedef struct nvo_slot {
    nvo_xfer *xfer;         /* NULL: free */
    int64_t start;          /* in the transfer */
    int64_t nbytes, moved;
    uint32_t serial;        /* of this submission; an older one's event is stale */
    int32_t tries;          /* in a row that moved nothing */
    bool flying;            /* the ring has it */
} nvo_slot;

struct nvo_engine {
    const nvo_ring_ops *ops;
    void *ring;
    int32_t depth;
    int32_t epoch;          /* of the process that opened it */
    int64_t block_bytes, align;
    int event_fd;           /* the ring's: events are there */
    int wake_fd;            /* the submitters': work is there, or stop */
    pthread_t pump;

    pthread_mutex_t lock;
    pthread_cond_t changed; /* a transfer ended, callbacks returned */
    nvo_queue queues[NVO_NUM_CLASSES];
    nvo_engine_stats stats;
    int64_t busy_since_ns;  /* valid while stats.inflight > 0 */
    int32_t calling;        /* ended transfers whose on_end has not returned */
    bool closing, stop;
    bool sleeping;          /* the pump needs wake_fd to notice work */

    nvo_slot *slots;        /* depth of each */
    int32_t *free;
    int32_t *ready;         /* a ring of slots to be submitted */
    int32_t num_free, ready_first, num_ready;
    int64_t refused_since_ns; /* submits are refused with nothing in flight; 0: no */
};

/* The pump thread's body; returns once `stop` is set. */
void *nvo_pump_run(void *engine);

void nvo_queue_push(nvo_queue *queue, nvo_xfer *xfer);
/* REQUIRES: not empty. */
void nvo_queue_pop(nvo_queue *queue);

/* Tell every puller that no block will come, and wait until none is in take. */
void nvo_bridge_stop(void *ring);

/* A condition that waits by CLOCK_MONOTONIC. */
int nvo_cond_open(pthread_cond_t *cond);
struct timespec nvo_deadline(int timeout_ms);

#endif
