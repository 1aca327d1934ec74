/*
 * ring_aio.c: the ring on Linux kernel AIO, through libaio when the loader finds it,
 * else through system calls. Both take the same structures, the kernel's.
 */
#define _GNU_SOURCE
#include "engine.h"

#include <dlfcn.h>
#include <errno.h>
#include <linux/aio_abi.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The four oldest entry points; libaio's return negative errno, so do ours. */
typedef struct calls {
    int (*setup)(int depth, aio_context_t *context);
    int (*submit)(aio_context_t context, long num, struct iocb **iocbs);
    int (*getevents)(aio_context_t context, long min, long max, struct io_event *events,
                     struct timespec *timeout);
    int (*destroy)(aio_context_t context);
} calls;

typedef struct ring {
    calls calls;
    void *shared_object;    /* NULL: system calls */
    const char *library;
    aio_context_t context;
    int event_fd;
} ring;

/* ---- system calls -------------------------------------------------------------------- */

static int from_syscall(long result)
{
    return result < 0 ? -errno : (int)result;
}

static int sys_setup(int depth, aio_context_t *context)
{
    return from_syscall(syscall(SYS_io_setup, depth, context));
}

static int sys_submit(aio_context_t context, long num, struct iocb **iocbs)
{
    return from_syscall(syscall(SYS_io_submit, context, num, iocbs));
}

static int sys_getevents(aio_context_t context, long min, long max, struct io_event *events,
                         struct timespec *timeout)
{
    return from_syscall(syscall(SYS_io_getevents, context, min, max, events, timeout));
}

static int sys_destroy(aio_context_t context)
{
    return from_syscall(syscall(SYS_io_destroy, context));
}

/* ---- libaio --------------------------------------------------------------------------- */

/* ISO C has no cast from an object's address to a function's; POSIX says they fit. */
static bool find(void *shared_object, const char *name, void *function, size_t function_bytes)
{
    void *address = dlsym(shared_object, name);
    memcpy(function, &address, function_bytes);
    return address != NULL;
}

static bool find_library(ring *r, const char *soname)
{
    void *so = dlopen(soname, RTLD_NOW | RTLD_LOCAL);
    if (so == NULL)
        return false;
    calls *c = &r->calls;
    if (!find(so, "io_setup", &c->setup, sizeof c->setup) ||
        !find(so, "io_submit", &c->submit, sizeof c->submit) ||
        !find(so, "io_getevents", &c->getevents, sizeof c->getevents) ||
        !find(so, "io_destroy", &c->destroy, sizeof c->destroy)) {
        dlclose(so);
        return false;
    }
    r->shared_object = so;
    r->library = soname;
    return true;
}

/* ---- the four functions of a ring ------------------------------------------------------- */

static void aio_free(ring *r)
{
    if (r->shared_object != NULL)
        dlclose(r->shared_object);
    free(r);
}

static int aio_open(void **out, int *depth, int event_fd)
{
    ring *r = calloc(1, sizeof *r);
    if (r == NULL)
        return -ENOMEM;
    r->event_fd = event_fd;
    if (!find_library(r, "libaio.so.1") && !find_library(r, "libaio.so.1t64")) {
        r->calls = (calls){sys_setup, sys_submit, sys_getevents, sys_destroy};
        r->library = "system calls";
    }
    /* EAGAIN: what all processes together may ask for, aio-max-nr, is spent. */
    int result = r->calls.setup(*depth, &r->context);
    while (result == -EAGAIN && *depth > 1) {
        *depth /= 2;
        result = r->calls.setup(*depth, &r->context);
    }
    if (result < 0) {
        aio_free(r);
        return result;
    }
    *out = r;
    return 0;
}

static int aio_submit(void *opaque, const nvo_block *blocks, int n)
{
    /* The kernel copies them: they may go when the call returns. */
    struct iocb iocbs[NVO_BATCH];
    struct iocb *pointers[NVO_BATCH];
    ring *r = opaque;
    int num = n < NVO_BATCH ? n : NVO_BATCH;

    memset(iocbs, 0, sizeof iocbs[0] * (size_t)num);
    for (int i = 0; i < num; i++) {
        struct iocb *iocb = &iocbs[i];
        iocb->aio_data = blocks[i].token;
        iocb->aio_lio_opcode = blocks[i].op == NVO_READ ? IOCB_CMD_PREAD : IOCB_CMD_PWRITE;
        iocb->aio_fildes = (uint32_t)blocks[i].fd;
        iocb->aio_buf = (uintptr_t)blocks[i].addr;
        iocb->aio_nbytes = (uint64_t)blocks[i].nbytes;
        iocb->aio_offset = blocks[i].offset;
        iocb->aio_flags = IOCB_FLAG_RESFD;
        iocb->aio_resfd = (uint32_t)r->event_fd;
        pointers[i] = iocb;
    }
    return r->calls.submit(r->context, num, pointers);
}

static int aio_reap(void *opaque, nvo_event *events, int max)
{
    struct io_event found[NVO_BATCH];
    struct timespec no_wait = {0, 0};
    ring *r = opaque;

    int num = r->calls.getevents(r->context, 0, max < NVO_BATCH ? max : NVO_BATCH, found, &no_wait);
    for (int i = 0; i < num; i++)
        events[i] = (nvo_event){.token = found[i].data, .result = found[i].res};
    return num;
}

static const char *aio_library(void *opaque)
{
    return ((ring *)opaque)->library;
}

static void aio_close(void *opaque)
{
    ring *r = opaque;
    r->calls.destroy(r->context);
    aio_free(r);
}

const nvo_ring_ops nvo_ring_aio = {
    .open = aio_open,
    .submit = aio_submit,
    .reap = aio_reap,
    .library = aio_library,
    .close = aio_close,
};
