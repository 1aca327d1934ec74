/*
 * nvo.h: the whole C face of nvoffload. The compiler reads all of it; cffi
 * reads the part between the two marks, which therefore holds declarations only.
 *
 * Conventions: every function returns 0 or a count, or a negative errno; errno
 * itself is never set. Memory that a caller passes in stays the caller's and
 * must live until the call's stated end. Nothing is allocated after an open.
 * Sizes and offsets are bytes unless a name says otherwise.
 */
#ifndef NVO_H
#define NVO_H

#include <stddef.h>
#include <stdint.h>

/* cffi: begin */

/* ---- checksums (crc32c.c) ---------------------------------------------- */

/* Continue `crc` (0 to start) over `nbytes` bytes: CRC-32C (Castagnoli,
 * reflected polynomial 0x82f63b78, inverted in and out). */
uint32_t nvo_crc32c(uint32_t crc, const void *bytes, int64_t nbytes);
/* The same without CPU instructions, for tests and old processors. */
uint32_t nvo_crc32c_soft(uint32_t crc, const void *bytes, int64_t nbytes);

/* ---- AdamW (adam.c) ------------------------------------------------------ */

enum nvo_dtype { NVO_F32 = 0, NVO_BF16 = 1, NVO_RAW = 2 };
enum nvo_simd { NVO_SIMD_SCALAR = 0, NVO_SIMD_AVX2 = 1, NVO_SIMD_AVX512 = 2 };

/* Hyper-parameters of one param group at one step. */
typedef struct nvo_group {
    double lr, beta1, beta2, eps, weight_decay;
} nvo_group;

/* What the kernel needs of a group at a step number, rounded once to float. */
typedef struct nvo_adamw {
    float decay;        /* 1 - lr * weight_decay                    */
    float beta1, beta1_rest; /* beta1, 1 - beta1                     */
    float beta2, beta2_rest;
    float denom_scale;  /* 1 / sqrt(1 - beta2^step)                  */
    float eps;
    float step_size;    /* lr / (1 - beta1^step)                     */
    float grad_scale;   /* the gradient is multiplied by it first    */
} nvo_adamw;

/* A run of `numel` elements of one parameter. Pointers need only the
 * alignment of their element. `weight_out` may equal `weight_in`. */
typedef struct nvo_span {
    const void *weight_in;  /* compute weight, dtype `weight_dtype`      */
    void *weight_out;
    uint16_t *low;          /* NVO_BF16: low half of the master, in place */
    float *exp_avg;         /* in place */
    float *exp_avg_sq;      /* in place */
    const void *grad;       /* dtype `grad_dtype` */
    int64_t numel;
    int32_t weight_dtype;   /* NVO_F32 or NVO_BF16 */
    int32_t grad_dtype;     /* NVO_F32 or NVO_BF16 */
} nvo_span;

/* Fill `out`; `step` counts from 1. REQUIRES: step >= 1. */
void nvo_adamw_prepare(nvo_adamw *out, const nvo_group *group, double grad_scale,
                       int64_t step);
/* One AdamW update of `span`, in one pass. Every `simd` gives the same bits. */
int nvo_adamw_update(int simd, const nvo_adamw *adamw, const nvo_span *span);
/* The loads and stores of an update without its arithmetic, for benchmarks. `flip` is
 * added bit by bit to what is stored; 0 leaves the span as it was. */
int nvo_adamw_stream(int simd, uint32_t flip, const nvo_span *span);
/* The best `enum nvo_simd` that this processor runs. */
int nvo_simd_best(void);

/* ---- engine (engine.c, ring_*.c) ----------------------------------------- */

typedef struct nvo_engine nvo_engine;

enum nvo_op { NVO_READ = 0, NVO_WRITE = 1 };
enum nvo_ring_kind { NVO_RING_AIO = 0, NVO_RING_BRIDGE = 1 };
/* Demand goes first; everything else shares the queue by age. */
enum nvo_class { NVO_DEMAND = 0, NVO_SHARED = 1 };

/* One transfer, of any length: the engine cuts it into blocks. The first group
 * of fields is the caller's, to be set before submit and left alone until the
 * transfer has ended; the rest is the engine's. */
typedef struct nvo_xfer {
    int32_t fd;
    int32_t op;             /* enum nvo_op */
    int32_t priority;       /* enum nvo_class */
    int32_t file;           /* the caller's number for the file, for messages */
    void *addr;
    int64_t offset;
    int64_t nbytes;
    void (*on_end)(struct nvo_xfer *xfer); /* on the pump thread, or NULL */
    void *owner;            /* for on_end */

    int32_t ended;          /* 1 once nothing of it is in flight */
    int32_t result;         /* 0 or negative errno; valid once ended */
    int64_t error_offset;   /* where the first failed block started, its length */
    int64_t error_nbytes;
    int64_t issued;
    int32_t inflight;
    int32_t reserved;
    struct nvo_xfer *next;
} nvo_xfer;

typedef struct nvo_engine_stats {
    int64_t read_bytes, write_bytes;         /* completed */
    int64_t read_requests, write_requests;   /* blocks submitted, retries too */
    int64_t busy_ns;                         /* at least one block in flight */
    int64_t inflight, queued;                /* blocks now, transfers now */
    int64_t last_progress_ns;                /* CLOCK_MONOTONIC of the last completion */
} nvo_engine_stats;

/* Open an engine and its pump thread. `depth` is the most blocks in flight; a
 * kernel that gives less is asked for half until it agrees (see nvo_engine_depth).
 * `block_bytes` and `align` in bytes; block_bytes is a multiple of align.
 * -ENOSYS, -EPERM, -EAGAIN: the kernel gives no ring. */
int nvo_engine_open(nvo_engine **out, int kind, int depth, int64_t block_bytes, int64_t align);
int nvo_engine_depth(const nvo_engine *engine);
/* "libaio.so.1", "libaio.so.1t64", "system calls" or "bridge". */
const char *nvo_engine_library(const nvo_engine *engine);
/* Queue a transfer; never waits. REQUIRES: addr, offset and nbytes are multiples
 * of align (else -EINVAL), nbytes > 0. After close or in a forked child -ESHUTDOWN. */
int nvo_engine_submit(nvo_engine *engine, nvo_xfer *xfer);
/* Wait until `xfer` (submitted with on_end == NULL) has ended: 1; 0 after `timeout_ms`. */
int nvo_engine_wait(nvo_engine *engine, nvo_xfer *xfer, int timeout_ms);
void nvo_engine_stats_read(nvo_engine *engine, nvo_engine_stats *out);
/* Refuse new transfers and wait until none is left and every on_end has returned: 0, or
 * -ETIMEDOUT; may be called again. After 0 the bridge's pullers have been told to go. */
int nvo_engine_drain(nvo_engine *engine, int timeout_ms);
/* Refuse new transfers, drain, stop the pump, free. Waits at most `timeout_ms` for
 * the drain: -ETIMEDOUT means that transfers are still in flight, nothing was freed,
 * and neither the engine nor the memory it moves may be freed by anyone. */
int nvo_engine_close(nvo_engine *engine, int timeout_ms);

/* The bridge: somebody else does the I/O. Only on NVO_RING_BRIDGE. */
typedef struct nvo_block {
    uint64_t token;
    int32_t fd;
    int32_t op;
    void *addr;
    int64_t offset;
    int64_t nbytes;
} nvo_block;
/* Take the oldest block: 1; 0 after `timeout_ms`; -ESHUTDOWN once the engine is drained:
 * then the puller makes no further call, and only after that may the engine be closed. */
int nvo_bridge_take(nvo_engine *engine, nvo_block *out, int timeout_ms);
/* Answer a taken block: `result` is bytes moved or negative errno, as from the kernel. */
int nvo_bridge_done(nvo_engine *engine, uint64_t token, int64_t result);

/* fallocate(2), retried when interrupted. */
int nvo_fallocate(int fd, int64_t offset, int64_t nbytes);

/* Is the page of the file at `offset` in the page cache? 1 or 0. */
int nvo_is_cached(int fd, int64_t offset);

/* Give memory that was freed back to the system, where the C library can. */
void nvo_trim(void);

/* Close `fd` in every child this process forks from now on. */
int nvo_fork_guard(int fd);
int nvo_fork_unguard(int fd);

/* ---- pool (pool.c) --------------------------------------------------------- */

typedef struct nvo_pool nvo_pool;
/* `count` buffers of `buffer_bytes` over the caller's memory at `base`. */
int nvo_pool_open(nvo_pool **out, void *base, int64_t buffer_bytes, int32_t count, int64_t align);
/* Lease at least `nbytes`, contiguous, in one buffer: 0; -EAGAIN when none is free;
 * -EINVAL when nbytes exceeds a buffer. Whole buffers and pieces never share one. */
int nvo_pool_acquire(nvo_pool *pool, int64_t nbytes, void **out);
/* The same, waiting: -ETIMEDOUT after `timeout_ms`. */
int nvo_pool_acquire_wait(nvo_pool *pool, int64_t nbytes, int timeout_ms, void **out);
/* Give a lease back: 0, or -EINVAL when `lease` is not one. */
int nvo_pool_release(nvo_pool *pool, void *lease);
/* Buffers with no lease on them. */
int nvo_pool_free_buffers(nvo_pool *pool);
/* -EBUSY while a lease is out. */
int nvo_pool_close(nvo_pool *pool);

/* ---- mover (mover.c) --------------------------------------------------------- */

typedef struct nvo_mover nvo_mover;

/* What is known of one extent, in memory and, as it stands, in the manifest. */
typedef struct nvo_record {
    uint64_t generation;    /* that wrote the working slot */
    uint32_t crc[3];        /* parameters: fetched part, remainder; state: [2] */
    uint16_t working;       /* slot that reads use */
    uint16_t committed;     /* slot that the newest manifest names */
} nvo_record;

/* One tile and where its parts live. On disk: offsets are those of slot 0 and 1 in
 * the file, lengths are padded to align. On the host: `host_*`, one copy in place. */
typedef struct nvo_tile {
    int64_t numel;
    int32_t fd;
    int32_t file;
    int32_t dtype;              /* enum nvo_dtype of the fetched part */
    int32_t item_bytes;         /* of the fetched part */
    int32_t first_segment, num_segments;
    int64_t fetched_bytes, remainder_bytes;   /* padded */
    int64_t word_bytes;         /* padded length of one state word */
    int32_t num_words, reserved;
    int64_t param_offset[2];    /* [fetched part, remainder], contiguous */
    int64_t state_offset[2];
    void *host_fetched;         /* home or standing copy of the fetched part, or NULL */
    void *host_remainder;
    void *host_state;           /* num_words x word_bytes */
    nvo_record *param;          /* NULL: home on the host */
    nvo_record *state;
    int32_t *busy;              /* a visit is on it; one per tile, shared by all jobs */
} nvo_tile;

/* The part of one parameter in one tile. */
typedef struct nvo_segment {
    int64_t tile_start, numel, param_start;   /* elements */
    int32_t param, reserved;
} nvo_segment;

/* One parameter in one job. `value` and `grad` are dense, in one memory order; `value` may
 * be device memory, `grad` is host memory. */
typedef struct nvo_param {
    void *value;                /* where values come from or go to, by the job's kind; or NULL */
    const void *grad;
    int64_t step;               /* counts from 1 */
    double scale;
    int32_t pending;            /* the job is about this parameter; others are copied as they are */
    int32_t group;
    int32_t grad_dtype, reserved;
} nvo_param;

/* How the bytes of a parameter that is not in host memory are reached. The functions
 * have the signatures of the CUDA runtime's cudaMemcpyAsync, cudaStreamSynchronize and
 * cudaSetDevice (once per kernel thread, or NULL); one stream per kernel thread. */
typedef struct nvo_device {
    int (*copy)(void *dst, const void *src, size_t nbytes, int kind, void *stream);
    int (*wait)(void *stream);
    int (*select)(int ordinal);
    int32_t ordinal, reserved;
    void **streams;
} nvo_device;

enum nvo_kind {
    NVO_FILL_PARAM = 0,     /* write all values, remainders 0 */
    NVO_FILL_STATE = 1,     /* write zeros */
    NVO_UPDATE = 2,         /* read, update what is pending, deliver to `value`, write */
    NVO_FETCH = 3,          /* read, deliver what is pending */
    NVO_STORE = 4           /* read, take `value` of what is pending, its remainder 0, write */
};
enum nvo_kernel { NVO_KERNEL_NULL = 0, NVO_KERNEL_ADAMW = 1 };
enum nvo_stage { NVO_DELIVERED = 0, NVO_ENDED = 1 };

/* One pass over tiles, in order. Everything is the caller's until the job has ended. */
typedef struct nvo_job {
    int32_t kind, kernel;
    int32_t num_tiles, verify;
    int32_t priority;           /* enum nvo_class; see nvo_mover_promote */
    int32_t values_stand;       /* `value` is where the compute weights live: they are taken
                                   from there and delivered there */
    int32_t lane;               /* jobs of one lane, of which some may share tiles, start in
                                   the order of their submission */
    int32_t reserved;
    uint64_t generation;        /* that the writes belong to */
    const nvo_tile *tiles;
    const nvo_segment *segments;
    const nvo_param *params;
    const nvo_group *groups;

    int64_t order;              /* the mover's, from here on */
    int32_t next_tile, active, delivered, ended;
    struct nvo_job *next;
} nvo_job;

typedef struct nvo_error {
    int32_t code;           /* negative errno; -EBADMSG: a checksum was wrong */
    int32_t tile;           /* index in the job, -1: none */
    int32_t op;             /* enum nvo_op; of a checksum: NVO_READ */
    int32_t file;
    int64_t offset, nbytes;
    int32_t part;           /* of a checksum: 0 fetched, 1 remainder, 2 state */
    int32_t slot;
    uint64_t generation;
    const nvo_job *job;
} nvo_error;

typedef struct nvo_mover_stats {
    int64_t jobs, tiles;
    int64_t run_ns;             /* wall: at least one job was not over */
    int64_t verify_ns, kernel_ns;           /* thread time; kernel with its checksums */
    int64_t disk_wait_ns;       /* wall, of run_ns: the disk was what all else waited for */
    int64_t gate_wait_ns;       /* wall, of run_ns: a commit was */
    int64_t read_bytes, write_bytes;        /* of tiles, handed to the engine */
    int64_t fetch_bytes;        /* of read_bytes: by NVO_FETCH */
} nvo_mover_stats;

/* Open a mover with `num_threads` kernel threads. engine may be NULL when all tiles live
 * on the host, pool too if parameters do; they outlive the mover, and so do `device`
 * (NULL: parameters in host memory) and its streams. */
int nvo_mover_open(nvo_mover **out, nvo_engine *engine, nvo_pool *pool,
                   const nvo_device *device, int num_threads, int simd);
/* Queue a job behind those of its priority. Jobs run side by side as far as buffers go,
 * but two visits of one tile never do: the later job waits. The first error is for good:
 * it ends every job, and is returned here from then on. */
int nvo_mover_submit(nvo_mover *mover, nvo_job *job);
/* Somebody waits for the job: it, and what stands before it in its lane, go first from now on. */
void nvo_mover_promote(nvo_mover *mover, nvo_job *job);
/* Wait until all tiles of a job have come to `stage`, or an error has ended it (then see
 * nvo_mover_error): 1; 0 after `timeout_ms`. */
int nvo_mover_wait(nvo_mover *mover, nvo_job *job, int stage, int timeout_ms);
/* Say that `count` jobs of kind NVO_UPDATE of `generation` will be submitted. */
void nvo_mover_expect(nvo_mover *mover, uint64_t generation, int count);
/* Wait until all expected jobs up to `generation` have ended: 1; 0 after `timeout_ms`; the
 * first error. */
int nvo_mover_wait_written(nvo_mover *mover, uint64_t generation, int timeout_ms);
/* Copy the first error; 0 when there is none, else its code. */
int nvo_mover_error(nvo_mover *mover, nvo_error *out);
/* Fail all jobs, as if I/O had failed with `code`. Once it returns no kernel runs and no
 * transfer begins any more; those in flight end. */
void nvo_mover_fail(nvo_mover *mover, int code);
/* Generation `generation` is durable: writes of the next one may go. */
void nvo_mover_commit(nvo_mover *mover, uint64_t generation);
void nvo_mover_stats_read(nvo_mover *mover, nvo_mover_stats *out);
/* -EBUSY while a job is not over. */
int nvo_mover_close(nvo_mover *mover);

/* ---- gradients (land.c) ----------------------------------------------------- */

/* Of a gradient: the sum of its squares, added up in chunks of 1024 elements from its
 * start; the largest absolute value, NaN left out; is every element finite. */
typedef struct nvo_sums {
    double squares;
    float largest;
    int32_t finite;
} nvo_sums;
/* acc = fresh ? g : scale * acc + g, in one pass; `sums` are those of acc. `grad` is
 * NVO_F32 or NVO_BF16, else -EINVAL. */
int nvo_land(float *acc, const void *grad, int32_t grad_dtype, int64_t numel, int32_t fresh,
             float scale, nvo_sums *sums);

/* ---- poison (poison.c) -------------------------------------------------------- */

/* Map at least `nbytes` of NaN (as float, bfloat16 and half) that take one huge page of
 * memory, for good. A write stays where it was made until nvo_poison_clean. */
int nvo_poison_map(int64_t nbytes, void **out);
int nvo_poison_clean(void *poison, int64_t nbytes);

/* The device twin: copies happen only when their stream is waited for. */
int nvo_simdev_copy(void *dst, const void *src, size_t nbytes, int kind, void *stream);
int nvo_simdev_wait(void *stream);
void *nvo_simdev_stream_open(void);
void nvo_simdev_stream_close(void *stream);

/* cffi: end */

/* ---- the seam between the pump and a ring (for ring_*.c only) -------------- */

typedef struct nvo_event {
    uint64_t token;
    int64_t result;
} nvo_event;

/* A ring takes blocks and gives events; it never waits. `event_fd` becomes
 * readable whenever reap would find something. */
typedef struct nvo_ring_ops {
    /* Open for at most *depth blocks in flight; may lower *depth. */
    int (*open)(void **ring, int *depth, int event_fd);
    /* How many of `n` blocks were taken, from the first on; or negative errno for
     * the first. */
    int (*submit)(void *ring, const nvo_block *blocks, int n);
    int (*reap)(void *ring, nvo_event *events, int max);
    const char *(*library)(void *ring);
    void (*close)(void *ring);
} nvo_ring_ops;

extern const nvo_ring_ops nvo_ring_aio;
extern const nvo_ring_ops nvo_ring_bridge;

/* ---- what a kernel thread does with one tile (tile.c, called by mover.c) ---- */

typedef struct nvo_work {
    const nvo_job *job;
    const nvo_tile *tile;
    uint8_t *lease;             /* [fetched, remainder, state words]; NULL: in place */
    const nvo_device *device;   /* NULL: parameters in host memory */
    void *stream;
    int32_t simd;
    int32_t bad_part;           /* out, with -EBADMSG */
    uint32_t crc[3];            /* out: of what is to be written */
} nvo_work;

/* Does the tile have anything to do in this job? */
int nvo_work_is_needed(const nvo_work *work);
/* Does the job read the tile's fetched part from disk? */
int nvo_work_reads_fetched(const nvo_work *work);
/* Compare what was read with its record: 0 or -EBADMSG. */
int nvo_work_verify(nvo_work *work);
/* Do the job's work on the lease (or the host home) and the parameters. 0, -EIO: the device. */
int nvo_work_run(nvo_work *work);

/* Bumped in every forked child: handles opened before are inert there. */
int nvo_fork_epoch(void);
int64_t nvo_now_ns(void);

#endif
