/*
 * fake_aio.c: a stand-in libaio.so.1 that does the real system calls and misbehaves as
 * told by environment variables, read at io_setup. Requests are counted from 1, over
 * all submits; a request shortened or failed by us counts like any other.
 *
 *   FAKE_AIO_QUOTA=n   io_setup answers EAGAIN for more than n
 *   FAKE_AIO_ONE=1     each submit takes one request
 *   FAKE_AIO_EAGAIN=1  every other submit answers EAGAIN
 *   FAKE_AIO_SHORT=n   every nth request moves only its first half and claims 512 bytes more
 *   FAKE_AIO_FAIL=k:e  request k completes with -e, and never reaches the kernel
 *   FAKE_AIO_NEVER=k   request k never completes
 *   FAKE_AIO_REJECT=k  a submit that starts with request k answers EBADF, once
 *   FAKE_AIO_TWICE=1   every event is delivered twice
 *
 * Aborts when a request is not aligned to 4096 or does not ask for an eventfd.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/aio_abi.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { EVENTS_MAX = 4096 };

static long quota, one, eagain, shorten, fail_at, fail_code, never, reject, twice;
static long num_submits, num_requests;
static struct io_event injected[EVENTS_MAX]; /* ours, delivered by the next getevents */
static long num_injected;
static uint64_t shortened[EVENTS_MAX];       /* tokens whose result is to be raised */
static long num_shortened;

static long setting(const char *name)
{
    const char *text = getenv(name);
    return text == NULL ? 0 : strtol(text, NULL, 10);
}

static int from_syscall(long result)
{
    return result < 0 ? -errno : (int)result;
}

int io_setup(int depth, aio_context_t *context)
{
    quota = setting("FAKE_AIO_QUOTA");
    one = setting("FAKE_AIO_ONE");
    eagain = setting("FAKE_AIO_EAGAIN");
    shorten = setting("FAKE_AIO_SHORT");
    fail_at = setting("FAKE_AIO_FAIL");
    fail_code = fail_at > 0 ? strtol(strchr(getenv("FAKE_AIO_FAIL"), ':') + 1, NULL, 10) : 0;
    never = setting("FAKE_AIO_NEVER");
    reject = setting("FAKE_AIO_REJECT");
    twice = setting("FAKE_AIO_TWICE");
    if (quota > 0 && depth > quota)
        return -EAGAIN;
    return from_syscall(syscall(SYS_io_setup, depth, context));
}

int io_destroy(aio_context_t context)
{
    return from_syscall(syscall(SYS_io_destroy, context));
}

static void check(const struct iocb *iocb)
{
    if (iocb->aio_buf % 4096 != 0 || iocb->aio_nbytes % 4096 != 0 || iocb->aio_offset % 4096 != 0)
        abort();
    if ((iocb->aio_flags & IOCB_FLAG_RESFD) == 0 || iocb->aio_nbytes == 0)
        abort();
}

/* One request: 1, or a negative errno. */
static int submit_one(aio_context_t context, const struct iocb *original)
{
    struct iocb copy = *original;
    struct iocb *pointer = &copy;
    uint64_t signal = 1;
    long number = num_requests + 1;

    check(original);
    if (number == reject) {
        reject = 0;
        return -EBADF;
    }
    if (number == never) {
        num_requests++;
        return 1;
    }
    if (number == fail_at) {
        num_requests++;
        injected[num_injected++] = (struct io_event){.data = copy.aio_data, .res = -fail_code};
        return write((int)copy.aio_resfd, &signal, sizeof signal) == sizeof signal ? 1 : -EIO;
    }
    if (shorten > 0 && number % shorten == 0 && copy.aio_nbytes >= 8192) {
        copy.aio_nbytes = copy.aio_nbytes / 8192 * 4096;
        shortened[num_shortened++] = copy.aio_data;
    }
    int result = from_syscall(syscall(SYS_io_submit, context, 1L, &pointer));
    if (result == 1)
        num_requests++;
    return result;
}

int io_submit(aio_context_t context, long num, struct iocb **iocbs)
{
    if (eagain && ++num_submits % 2 == 0)
        return -EAGAIN;
    if (one && num > 1)
        num = 1;
    for (long i = 0; i < num; i++) {
        int result = submit_one(context, iocbs[i]);
        if (result != 1)
            return i > 0 ? (int)i : result;
    }
    return (int)num;
}

static void raise_result(struct io_event *event)
{
    for (long i = 0; i < num_shortened; i++) {
        if (shortened[i] == event->data) {
            shortened[i] = shortened[--num_shortened];
            event->res += 512;
            return;
        }
    }
}

int io_getevents(aio_context_t context, long min, long max, struct io_event *events, struct timespec *timeout)
{
    long num = 0;
    while (num < max && num_injected > 0)
        events[num++] = injected[--num_injected];
    if (num == max)
        return (int)num;
    int result = from_syscall(syscall(SYS_io_getevents, context, min, max - num, events + num, timeout));
    if (result < 0)
        return num > 0 ? (int)num : result;
    for (long i = num; i < num + result; i++) {
        raise_result(&events[i]);
        if (twice)
            injected[num_injected++] = events[i];
    }
    return (int)num + result;
}
