/*
 * fork.c: what a forked child must not inherit. Guards descriptors, counts
 * forks; the one place with an at-fork handler.
 */
#define _GNU_SOURCE
#include "nvo.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

enum { GUARDED_MAX = 1024 };

/* The child handler reads both, and another thread of the parent may be in the
 * middle of a change when it forks: atomics, as a lock could stay locked for good. */
static _Atomic int guarded[GUARDED_MAX]; /* fd + 1; 0: free */
static _Atomic int epoch;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static _Atomic int once_result;

static void in_child(void)
{
    atomic_fetch_add(&epoch, 1);
    for (int i = 0; i < GUARDED_MAX; i++) {
        int stored = atomic_exchange(&guarded[i], 0);
        if (stored > 0)
            close(stored - 1);
    }
}

static void register_handler(void)
{
    atomic_store(&once_result, -pthread_atfork(NULL, NULL, in_child));
}

int nvo_fork_epoch(void)
{
    pthread_once(&once, register_handler);
    return atomic_load(&epoch);
}

int nvo_fork_guard(int fd)
{
    if (fd < 0)
        return -EBADF;
    pthread_once(&once, register_handler);
    int result = atomic_load(&once_result);
    if (result < 0)
        return result;
    for (int i = 0; i < GUARDED_MAX; i++) {
        int expected = 0;
        if (atomic_compare_exchange_strong(&guarded[i], &expected, fd + 1) || expected == fd + 1)
            return 0;
    }
    return -ENOSPC;
}

int nvo_fork_unguard(int fd)
{
    if (fd < 0)
        return -EBADF;
    for (int i = 0; i < GUARDED_MAX; i++) {
        int expected = fd + 1;
        if (atomic_compare_exchange_strong(&guarded[i], &expected, 0))
            return 0;
    }
    return -ENOENT;
}

int64_t nvo_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}
