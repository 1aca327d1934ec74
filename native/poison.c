/* Memory for storages whose bytes are elsewhere: reads give NaN, never what was there before. */
#define _GNU_SOURCE
#include "nvo.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE_BYTES = 2 << 20 };

/* Fill a memory file with 0x7fc0: a NaN as bfloat16 and half, and, twice, as float. */
static int fill(int fd)
{
    uint16_t *pattern = malloc(PAGE_BYTES);
    if (!pattern)
        return -ENOMEM;
    for (int i = 0; i < PAGE_BYTES / 2; i++)
        pattern[i] = 0x7fc0;
    ssize_t written = write(fd, pattern, PAGE_BYTES);
    int code = written == PAGE_BYTES ? 0 : written < 0 ? -errno : -ENOSPC;
    free(pattern);
    return code;
}

int nvo_poison_map(int64_t nbytes, void **out)
{
    size_t size = (size_t)((nbytes + PAGE_BYTES - 1) / PAGE_BYTES) * PAGE_BYTES;
    int fd = memfd_create("nvoffload-poison", MFD_CLOEXEC);
    if (fd < 0)
        return -errno;
    int code = fill(fd);
    uint8_t *base = MAP_FAILED;
    if (code == 0) {
        base = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        code = base == MAP_FAILED ? -errno : 0;
    }
    for (size_t at = 0; code == 0 && at < size; at += PAGE_BYTES)
        if (mmap(base + at, PAGE_BYTES, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, fd, 0) == MAP_FAILED)
            code = -errno;
    if (code != 0 && base != MAP_FAILED)
        munmap(base, size);
    close(fd);
    if (code == 0)
        *out = base;
    return code;
}

int nvo_poison_clean(void *poison, int64_t nbytes)
{
    size_t size = (size_t)((nbytes + PAGE_BYTES - 1) / PAGE_BYTES) * PAGE_BYTES;
    return madvise(poison, size, MADV_DONTNEED) == 0 ? 0 : -errno;
}
