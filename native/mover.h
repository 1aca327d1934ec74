/*
 * mover.h: what mover.c and visit.c share, and nobody else.
 */
#ifndef NVO_MOVER_H
#define NVO_MOVER_H

#include "nvo.h"

#include <pthread.h>

enum { MAX_THREADS = 256, NO_COMMIT = 0xffff, TICK_MS = 20, NUM_GENERATIONS = 8, PIECES = 8 };

typedef struct visit {
    struct nvo_mover *mover;
    struct visit *next;
    nvo_job *job;
    nvo_work work;
    int32_t tile;
    int32_t pending;        /* transfers in flight */
    int32_t failed, delivered;
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

    nvo_job *first;         /* jobs that have tiles to start, those waited for first */
    int32_t live;           /* jobs that are not over */
    int32_t computing, transferring; /* visits */
    int32_t expected[NUM_GENERATIONS]; /* updates not ended, by generation modulo */
    uint64_t committed;     /* newest generation that a manifest names */
    nvo_error error;        /* the first one; code 0: none */
    nvo_mover_stats stats;
    int64_t waiting_since;  /* wall clock of the last change of who is waited for */
    queue ready, gated, free;
    visit *visits;
};

/* Keep the first error. */
void nvo_mover_record(nvo_mover *mover, const nvo_error *error);
/* Does the job write tiles that it has read? */
static inline int nvo_job_writes(const nvo_job *job)
{
    return job->kind == NVO_UPDATE || job->kind == NVO_STORE;
}

int nvo_visit_is_on_disk(const visit *v);
/* Lease what the visit needs: 0, or -EAGAIN when there is no buffer for it now. */
int nvo_visit_lease(visit *v);
/* Start what it has to read, or to write; `pending` says how many transfers that are. */
void nvo_visit_read(visit *v);
void nvo_visit_write(visit *v);
/* The writes have landed: readers use them from now on. */
void nvo_visit_note_written(visit *v);
/* Record that what was read does not match its checksum. */
void nvo_visit_bad_checksum(const visit *v);
/* A transfer of a visit has ended; runs on the pump thread, takes the mover's lock. */
void nvo_visit_on_end(nvo_xfer *xfer);

#endif
