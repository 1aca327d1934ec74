/* The pinned pool's bookkeeping: equal buffers over the caller's memory, leased whole or
 * in pieces. Owns no memory but its table; never waits except in nvo_pool_acquire_wait. */
#define _POSIX_C_SOURCE 200809L
#include "nvo.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct buffer {
    int32_t leases;
    int32_t whole;   /* leased as one; pieces never join it */
    int64_t used;    /* bytes cut off as pieces so far */
} buffer;

struct nvo_pool {
    pthread_mutex_t lock;
    pthread_cond_t released;
    uint8_t *base;
    int64_t buffer_bytes;
    int64_t align;
    int32_t count;
    int32_t open_piece;   /* buffer that pieces are cut from, -1: none */
    buffer *buffers;
    uint8_t *starts;      /* one flag per align unit: a lease starts here */
};

int nvo_pool_open(nvo_pool **out, void *base, int64_t buffer_bytes, int32_t count, int64_t align)
{
    if (count < 1 || align < 1 || buffer_bytes < align || buffer_bytes % align != 0)
        return -EINVAL;
    nvo_pool *pool = calloc(1, sizeof *pool);
    if (!pool)
        return -ENOMEM;
    pool->base = base;
    pool->buffer_bytes = buffer_bytes;
    pool->align = align;
    pool->count = count;
    pool->open_piece = -1;
    pool->buffers = calloc((size_t)count, sizeof *pool->buffers);
    pool->starts = calloc((size_t)(count * (buffer_bytes / align)), 1);
    if (!pool->buffers || !pool->starts) {
        free(pool->buffers);
        free(pool->starts);
        free(pool);
        return -ENOMEM;
    }
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->released, &monotonic);
    pthread_condattr_destroy(&monotonic);
    *out = pool;
    return 0;
}

static int32_t find_free(const nvo_pool *pool)
{
    for (int32_t i = 0; i < pool->count; i++)
        if (pool->buffers[i].leases == 0)
            return i;
    return -1;
}

static void *lease_at(nvo_pool *pool, int32_t index, int64_t offset)
{
    int64_t place = index * pool->buffer_bytes + offset;
    pool->buffers[index].leases++;
    pool->starts[place / pool->align] = 1;
    return pool->base + place;
}

static int acquire_locked(nvo_pool *pool, int64_t nbytes, void **out)
{
    int64_t padded = (nbytes + pool->align - 1) / pool->align * pool->align;
    if (nbytes < 1 || padded > pool->buffer_bytes)
        return -EINVAL;
    int is_piece = padded <= pool->buffer_bytes / 2;
    if (is_piece && pool->open_piece >= 0) {
        buffer *open = &pool->buffers[pool->open_piece];
        if (open->used + padded <= pool->buffer_bytes) {
            *out = lease_at(pool, pool->open_piece, open->used);
            open->used += padded;
            return 0;
        }
    }
    int32_t index = find_free(pool);
    if (index < 0)
        return -EAGAIN;
    pool->buffers[index].whole = !is_piece;
    pool->buffers[index].used = padded;
    if (is_piece)
        pool->open_piece = index;
    *out = lease_at(pool, index, 0);
    return 0;
}

int nvo_pool_acquire(nvo_pool *pool, int64_t nbytes, void **out)
{
    pthread_mutex_lock(&pool->lock);
    int code = acquire_locked(pool, nbytes, out);
    pthread_mutex_unlock(&pool->lock);
    return code;
}

int nvo_pool_acquire_wait(nvo_pool *pool, int64_t nbytes, int timeout_ms, void **out)
{
    int64_t end_ns = nvo_now_ns() + (int64_t)timeout_ms * 1000000;
    struct timespec end = {.tv_sec = end_ns / 1000000000, .tv_nsec = end_ns % 1000000000};
    pthread_mutex_lock(&pool->lock);
    int code = acquire_locked(pool, nbytes, out);
    while (code == -EAGAIN) {
        if (pthread_cond_timedwait(&pool->released, &pool->lock, &end) == ETIMEDOUT) {
            code = -ETIMEDOUT;
            break;
        }
        code = acquire_locked(pool, nbytes, out);
    }
    pthread_mutex_unlock(&pool->lock);
    return code;
}

int nvo_pool_release(nvo_pool *pool, void *lease)
{
    int64_t place = (uint8_t *)lease - pool->base;
    if (place < 0 || place >= pool->count * pool->buffer_bytes || place % pool->align != 0)
        return -EINVAL;
    pthread_mutex_lock(&pool->lock);
    int code = -EINVAL;
    if (pool->starts[place / pool->align]) {
        int32_t index = (int32_t)(place / pool->buffer_bytes);
        buffer *owner = &pool->buffers[index];
        pool->starts[place / pool->align] = 0;
        if (--owner->leases == 0) {
            owner->used = 0;
            owner->whole = 0;
            if (pool->open_piece == index)
                pool->open_piece = -1;
        }
        pthread_cond_broadcast(&pool->released);
        code = 0;
    }
    pthread_mutex_unlock(&pool->lock);
    return code;
}

int nvo_pool_free_buffers(nvo_pool *pool)
{
    int num_free = 0;
    pthread_mutex_lock(&pool->lock);
    for (int32_t i = 0; i < pool->count; i++)
        num_free += pool->buffers[i].leases == 0;
    pthread_mutex_unlock(&pool->lock);
    return num_free;
}

int nvo_pool_close(nvo_pool *pool)
{
    if (nvo_pool_free_buffers(pool) != pool->count)
        return -EBUSY;
    pthread_cond_destroy(&pool->released);
    pthread_mutex_destroy(&pool->lock);
    free(pool->buffers);
    free(pool->starts);
    free(pool);
    return 0;
}
