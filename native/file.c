/* What Python's os module lacks about files and memory. */
#define _GNU_SOURCE
#include "nvo.h"

#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

int nvo_fallocate(int fd, int64_t offset, int64_t nbytes)
{
    int code;
    do
        code = fallocate(fd, 0, offset, nbytes);
    while (code != 0 && errno == EINTR);
    return code == 0 ? 0 : -errno;
}

int nvo_is_cached(int fd, int64_t offset)
{
    size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    unsigned char state = 0;
    void *page = mmap(NULL, page_bytes, PROT_READ, MAP_SHARED, fd, offset);
    if (page == MAP_FAILED)
        return -errno;
    int code = mincore(page, page_bytes, &state) == 0 ? state & 1 : -errno;
    munmap(page, page_bytes);
    return code;
}

void nvo_trim(void)
{
#if defined(__GLIBC__)
    malloc_trim(0);
#endif
}
