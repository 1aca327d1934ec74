/* The device twin: a stream that keeps its copies until somebody waits for it, so that code
 * which forgets to wait reads old bytes. For tests; plays the CUDA runtime's two functions. */
#include "nvo.h"

#include <stdlib.h>
#include <string.h>

typedef struct copy {
    void *dst;
    const void *src;
    size_t nbytes;
} copy;

typedef struct stream {
    copy *copies;
    size_t count, room;
} stream;

void *nvo_simdev_stream_open(void)
{
    return calloc(1, sizeof(stream));
}

void nvo_simdev_stream_close(void *handle)
{
    stream *self = handle;
    free(self->copies);
    free(self);
}

int nvo_simdev_copy(void *dst, const void *src, size_t nbytes, int kind, void *handle)
{
    stream *self = handle;
    if (kind != 1 && kind != 2) /* host to device, device to host */
        return 1;
    if (self->count == self->room) {
        size_t room = self->room ? 2 * self->room : 64;
        copy *grown = realloc(self->copies, room * sizeof *grown);
        if (!grown)
            return 2;
        self->copies = grown;
        self->room = room;
    }
    self->copies[self->count++] = (copy){dst, src, nbytes};
    return 0;
}

int nvo_simdev_wait(void *handle)
{
    stream *self = handle;
    for (size_t i = 0; i < self->count; i++)
        memcpy(self->copies[i].dst, self->copies[i].src, self->copies[i].nbytes);
    self->count = 0;
    return 0;
}
