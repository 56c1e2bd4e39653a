/* Loops over flat float32 buffers, and the engine that runs an exchange plan.
 *
 * This header and loops.h, which native/build.py makes, are the whole native interface: the C files implement it,
 * native/build.py hands loops.h and the marked parts to cffi, and ocomm/kernels/cpu.py and
 * ocomm/collectives/native_engine.py call it.
 * docs/algorithms.md has the mathematics; every loop must equal that of ocomm/kernels/reference.py.
 */
#ifndef OCOMM_H
#define OCOMM_H
#include <stdint.h>

/* cffi: begin types */

/* One scale block: a run of elements of one tensor that share a scale and an owner. */
typedef struct {
    int64_t offset;   /* first element in the flat buffers (mask, denominator, 0/1 Adam's state); a multiple of 16 */
    int64_t start;    /* first element inside its tensor */
    int64_t owned;    /* first element in the owner's error buffer; -1 on ranks that do not own it */
    int64_t local;    /* first element in the worker's buffers (values, error); -1 on ranks that do not compress it */
    int64_t bits;     /* byte position of its signs in the packed buffer */
    int64_t scale;    /* byte position of its float32 scale in the packed buffer; a multiple of 4; -1: it has none */
    int64_t index;    /* first element in the layout without padding, by which its random numbers are counted */
    int32_t length;   /* elements */
    int32_t tensor;   /* row of the tensor table */
} ocomm_block;

/* One tensor of the layout in this step. */
typedef struct {
    const float *grad;       /* NULL: no gradient on this rank, counts as zero */
    float *param;            /* updated in place by ocomm_apply; read for a coupled weight decay */
    const float *momentum;   /* dense momentum; NULL: the momentum is the previous packed result */
    float beta1;
    float one_minus_beta1;   /* rounded from double separately, not 1.0f - beta1 */
    float weight_decay;      /* coupled decay: grad + weight_decay * param; 0 for none */
    float step_size;         /* lr / (1 - beta1^t), rounded once to float32 */
    float decay;             /* decoupled decay: param * decay before the step; 1 for none */
    float interval_root;     /* 0/1 Adam: square root of the sum of lr since the last sync, with this step's */
    float interval_decay;    /* 0/1 Adam: product of the decays since the last sync, with this step's */
    int32_t skip;            /* 1: ocomm_apply, ocomm_local_step and ocomm_apply_update do not change the tensor */
    int32_t grad_dtype;      /* of grad: 0 float32, or, on a device alone, the number of float16 or bfloat16 */
} ocomm_tensor;

/* What the random numbers of a step depend on, besides an element's index: U = (word >> 8) * 2^-24, word index % 4 of
 * Philox-4x32-7 with the seed as its key and the counter (index / 4 low, index / 4 high, step, stream). */
typedef struct {
    uint64_t seed;
    uint32_t step;     /* committed steps */
    uint32_t stream;   /* rank of the worker; 0xFFFFFFFF for servers */
    uint32_t steady;   /* 1: U = 1/2 for every element, whatever the other fields are */
} ocomm_noise;

/* Elements [start, start + length) of a tensor are at element `position` of a message's float32 payload. */
typedef struct {
    int64_t start, position, length, tensor;
} ocomm_run;

/* A part of the memory at an address: `count` whole elements from element `first` on. */
typedef struct {
    uint64_t address;
    int64_t first, count, also;
} ocomm_piece;

/* Threads that help with large loops. They sleep until one comes; a second loop at the same time is run by its caller.
 * A result has the same bits with every number of threads, because blocks do not depend on each other. */
typedef struct ocomm_pool ocomm_pool;
/* `threads` includes the caller. A loop of less than twice `grain` elements is not cut. NULL: no thread can be made. */
ocomm_pool *ocomm_pool_new(int32_t threads, int64_t grain);
/* Ends the threads; later loops are run by their callers alone. Any thread. */
void ocomm_pool_close(ocomm_pool *pool);
void ocomm_pool_free(ocomm_pool *pool);

/* Which build of the loops runs: "avx512", "avx2" or "portable". Selecting an unknown or unsupported one returns -1. */
const char *ocomm_path(void);
int ocomm_select_path(const char *name);

/* cffi: end types */

/* The loops, and ocomm_op, which calls one. They are made from ocomm/kernels/loops.py, which describes them.
 *
 * Every loop works on `count` rows of its table, in table order where the pool is NULL, and allocates nothing. It
 * returns 1 if everything that it examines is finite, else 0, and error_out is then meaningless. `mask` holds one
 * bit per flat element (bit o & 7 of byte o >> 3), 1 = masked; NULL: nothing is masked. A masked element is not
 * counted in the scale, its bit is 1, and its value stays in the error; if that is not finite, the block's scale is
 * NaN, so that every rank detects it. `rms` chooses the scale: 0 mean |c|, 1 root of the mean square. error_out may
 * be error. Signs of a block fill whole bytes, 1 is positive (zero too), the bits after its last element are 0.
 * received[i] is where rank i's message to this owner starts; a block's signs are at received[i] + bits - origin. */
#include "loops.h"

/* cffi: begin more */

/* Copies nbytes bytes; the two buffers may not overlap. */
void ocomm_copy(ocomm_pool *pool, void *to, const void *from, int64_t nbytes);
/* The checksum of a buffer (part = -1), or of one of its 64 equal parts, numbered from 0. A buffer of at most 4 KiB is
 * always read whole. */
uint64_t ocomm_checksum(const void *data, int64_t nbytes, int part);
/* The checksums of many buffers; an address of 0 has checksum 0. */
void ocomm_checksums(const uint64_t *addresses, const int64_t *nbytes, int64_t count, int part, uint64_t *sums);
/* Sums of squares of float buffers, in double: lane k of 32 adds elements k, k + 32, ..., lanes fold by halves. An
 * address of 0 has sum 0. */
void ocomm_squares(const uint64_t *addresses, const int64_t *numels, int64_t count, double *sums);
/* Sums, in double, of the 1024 buckets of a CountSketch of float buffers, which ocomm/kernels/base.py describes. */
void ocomm_sketch(const uint64_t *addresses, const int64_t *numels, int64_t count, uint64_t seed, double *sums);
/* y += factor * x + factor * z: what the benchmarks compare the loops with, as with ocomm_axpy. */
void ocomm_triad(ocomm_pool *pool, float *y, const float *x, const float *z, float factor, int64_t numel);

/* What the engine needs of MPI: entry points of the loaded library and the sizes of its types. Handles are intptr_t
 * (pointers in Open MPI, ints in MPICH), so one build serves every MPI. */
typedef struct {
    void *isend, *irecv, *testsome, *iprobe, *get_count;
    intptr_t byte_type;
    int32_t handle_nbytes;
    int32_t status_nbytes;
    int32_t any_source;
    int32_t undefined;
    int32_t tests_move_little; /* a long message between ranks of a host takes many tests, each of which moves a piece */
} ocomm_mpi;

/* The operations that are not loops, with their slots in this order:
 *   source, destination, nbytes
 *   addresses of parts, their nbytes, their number, the buffer (in and out)
 *   header, flags, presence, its nbytes, messages, their number
 *   header, messages, their number, flags, presence, its nbytes, announcement, passed_on, ends
 *   an ocomm_task and its argument */
enum { OCOMM_COPY, OCOMM_COPY_IN, OCOMM_COPY_OUT, OCOMM_WRITE_HEADERS, OCOMM_CHECK_HEADERS, OCOMM_OFFLOAD };
enum { OCOMM_QUEUED, OCOMM_ACTIVE, OCOMM_DONE, OCOMM_MISMATCH, OCOMM_MPI_ERROR, OCOMM_TIMED_OUT, OCOMM_ABORTED,
       OCOMM_TASK_ERROR, OCOMM_WRONG_SIZE };
enum { OCOMM_NON_FINITE = 1 }; /* in flags of ranks and nodes */
enum { OCOMM_WOKEN = 1, OCOMM_COMPLETED = 2, OCOMM_CONTROL = 4, OCOMM_FAILED = 8 };

typedef struct {
    uint32_t magic, rank;
    int64_t step;
    uint64_t signature, hyper;
    uint32_t flags, attempt;
    int64_t announcement;
    uint32_t tensors, gradients;
    uint64_t replica;
    double lr, squares;
} ocomm_header;

/* The function of an OCOMM_OFFLOAD. It is called once with `begin` set, then without until it no longer returns 0: 1
 * when the work is over, -1 when it has failed. It must not wait. */
typedef int (*ocomm_task)(void *task, int begin);

typedef struct {
    int64_t address, nbytes;
    int32_t peer, receive;
} ocomm_message;

typedef struct {
    int32_t first_op, ops, first_message, messages;
} ocomm_stage;

typedef struct {
    int32_t first_stage, stages;
} ocomm_segment;

typedef struct ocomm_plan {
    const ocomm_op *ops;
    const ocomm_message *messages;
    const ocomm_stage *stages;
    const ocomm_segment *segments;
    int32_t segment_count;
    int32_t lanes;              /* segment k uses the memory of segment k - lanes, which must be over; 0: its own */
    int32_t notify;             /* ocomm_engine_run returns OCOMM_COMPLETED when it is over */
    int32_t open_segments;               /* number of segments that may start, set by ocomm_open */
    int64_t timeout_ns;         /* from the submission or the last ocomm_open; 0 for none */
    int64_t *trace;             /* NULL, or three times per stage: it begins, messages are posted, they are over */
    /* written by the engine, read once state is OCOMM_DONE or later */
    int32_t state;
    int32_t error;              /* MPI error code (-1: no memory), or the rank whose header or message differs */
    int32_t error_segment;      /* the segment in which that differs */
    int32_t culprit;            /* 1 + that rank while this rank still tells others about it; 0: none */
    int64_t disagreed_ns;
    int64_t opened_ns;
    int32_t segments_started, segments_done;
    int32_t segments_past;      /* all segments before this one are over; read at any time */
    struct ocomm_plan *next;
} ocomm_plan;

typedef struct {
    int64_t bytes_sent, messages_sent, plans, polls, sleeps;
    int64_t compute_ns, network_ns;
} ocomm_counters;

/* Buffers of a plan that are found through a table of tensors; set when the segments that read them are opened. */
typedef struct {
    ocomm_tensor *tensors;
    const int64_t *rows, *nbytes; /* each buffer's row of the table, and its length */
    uint64_t *sums;               /* each buffer's checksum, if one is asked for */
    int64_t count;
} ocomm_inputs;

typedef struct ocomm_engine ocomm_engine;
typedef struct ocomm_channel ocomm_channel;

/* mpi may be NULL for a job of one rank, whose plans have no messages. The pool, or NULL, must outlive the engine.
 * idle_ns bounds the sleep while nothing is queued. */
ocomm_engine *ocomm_engine_new(const ocomm_mpi *mpi, ocomm_pool *pool, int64_t spin_ns, int64_t idle_ns);
void ocomm_engine_free(ocomm_engine *engine);
/* Makes ocomm_engine_run return OCOMM_CONTROL when a message has arrived on this communicator. */
int ocomm_engine_watch(ocomm_engine *engine, intptr_t communicator);
void ocomm_engine_unwatch(ocomm_engine *engine, intptr_t communicator);
/* A channel has its own communicator, order and window of segments in flight. */
ocomm_channel *ocomm_channel_new(ocomm_engine *engine, intptr_t communicator, int32_t ranks, int32_t window);
/* Called on the thread of ocomm_engine_run, between two runs. Returns -2, and does nothing, while the channel is
 * busy. Else the engine forgets it, plans that wait to be opened end as OCOMM_ABORTED, and later submissions are
 * refused; returns the number of segments that have started, which are all over, or -1 if it has failed. The
 * communicator belongs to the caller. */
int64_t ocomm_channel_close(ocomm_channel *channel);
/* Frees the memory of a channel that is closed, or whose engine is freed or about to be. */
void ocomm_channel_free(ocomm_channel *channel);
/* Thread-safe. Returns the state OCOMM_QUEUED, or OCOMM_ABORTED when the engine or channel has failed. */
int ocomm_submit(ocomm_channel *channel, ocomm_plan *plan);
/* Lets the first `open_segments` segments of a submitted plan start, and later plans once these are all of them.
 * Before that, unless `inputs` is NULL, sets its buffers to those at `addresses` (0: none) and computes their
 * checksums: `part` -2 none, -1 of every byte, else of that part (ocomm_checksum). Any thread; a plan that is over
 * is not changed. */
void ocomm_open(ocomm_channel *channel, ocomm_plan *plan, int32_t open_segments, const ocomm_inputs *inputs,
                const uint64_t *addresses, int part);
/* Runs plans until there is a reason to return (OCOMM_WOKEN | ...) or max_ns have passed (0). One thread. */
int ocomm_engine_run(ocomm_engine *engine, int64_t max_ns);
void ocomm_engine_wake(ocomm_engine *engine);
/* Counts the threads that wait for a result outside of ocomm_plan_wait: while there are any the engine spins a little
 * longer. Also wakes it if `wake`. Any thread. */
void ocomm_engine_expect(ocomm_engine *engine, int32_t waiters, int wake);
/* Waits, without the GIL, until the plan is over or timeout_ns have passed; returns its state. Any thread. */
int ocomm_plan_wait(ocomm_engine *engine, ocomm_plan *plan, int64_t timeout_ns);
/* Ends every plan of every channel as OCOMM_ABORTED; later submissions are refused. Any thread. */
void ocomm_engine_fail(ocomm_engine *engine);
/* Returns 1 while any plan of any channel is not over, except for plans that only wait for ocomm_open. Any thread. */
int ocomm_engine_busy(ocomm_engine *engine);
/* Ends every plan of one channel as OCOMM_ABORTED; later submissions to it are refused. Any thread. */
void ocomm_channel_abandon(ocomm_channel *channel);
/* Sets waiting[r] = 1 for every rank whose message the stages in flight wait for, or waited for when the channel
 * failed. Messages of later stages do not count, because they wait for this rank, too. */
int ocomm_channel_waiting(ocomm_channel *channel, uint8_t *waiting);
ocomm_counters ocomm_engine_counters(ocomm_engine *engine);

/* The driver of a CUDA device: its functions, and what they are called with. */
typedef struct {
    void *push, *pop, *exchange_mode, *upload, *download, *clear, *launch, *record, *query, *wait;
    void *context, *stream, *second; /* the device's own two streams */
    void *turn;                      /* an event with which streams are ordered */
    int64_t threads, shared_nbytes;  /* of each thread block of a launch */
} ocomm_driver;

/* Calls that have been made of the driver. */
typedef struct {
    int64_t launches, copies, asks;
} ocomm_device_calls;

typedef struct ocomm_device ocomm_device;

enum { OCOMM_MIRROR_SLOTS = 16, OCOMM_PARAMETERS = 32 };

/* A table of the host that changes, and its copy on the device. Each change travels through another slot of page-locked
 * memory, in which it stays until it has arrived. */
typedef struct {
    const void *table;
    int64_t copy, nbytes;
    uint8_t *sent, *slots; /* what was sent last; nbytes for each slot */
    void *events[OCOMM_MIRROR_SLOTS];
    int32_t used[OCOMM_MIRROR_SLOTS];
    int32_t next, is_sent;
} ocomm_mirror;

/* Slots by operation: to, from, number of bytes of a copy; to, number of bytes to clear; from: the mirror; to: the
 * function to launch, from: thread blocks, number of parameters of 8 bytes each, of which five from `noise_at` on come from
 * `noise`, unless that is NULL. */
enum { OCOMM_UPLOAD, OCOMM_DOWNLOAD, OCOMM_CLEAR, OCOMM_MIRROR, OCOMM_LAUNCH };
typedef struct {
    int64_t code, to, from, number;
    int64_t *parameters;
    const ocomm_noise *noise;
    int64_t noise_at;
} ocomm_device_op;

/* What ocomm_device_run queues. On the second stream if `beside`. If it is not `awaited` the engine goes on at once, and the
 * first stream waits for the second. `*status` is nonzero at the end if something was not finite. */
typedef struct {
    ocomm_device *device;
    const ocomm_device_op *ops;
    int32_t count, beside, awaited, flag_count;
    void *event;
    const int32_t *status;
    uint32_t **flags; /* get OCOMM_NON_FINITE */
    int32_t next, is_queued;
    int32_t error; /* the driver's code */
} ocomm_device_work;

ocomm_device *ocomm_device_new(const ocomm_driver *driver);
void ocomm_device_free(ocomm_device *device);
ocomm_device_calls ocomm_device_counts(const ocomm_device *device);
/* An ocomm_task; `work` is an ocomm_device_work. */
int ocomm_device_run(void *work, int begin);
/* Queues a copy of the table if it has changed since the last one. Returns 1, and does nothing, if all slots are under way;
 * minus the driver's code on failure. Any thread. */
int ocomm_mirror_send(ocomm_device *device, ocomm_mirror *mirror);
/* Makes what is queued on the stream `second` from now on run after what is queued on `first` so far; returns the driver's
 * code. Any thread. */
int ocomm_device_order(ocomm_device *device, void *first, void *second);
/* Queues a launch on the first stream; returns the driver's code. Any thread. */
int ocomm_device_launch(ocomm_device *device, void *function, int64_t blocks, int64_t *parameters, int64_t count);

/* Arranges that the process, which is ending, ends with the status that it was given, or with 1 instead of 0, and
 * without what MPI does at exit, which would wait for ranks that have died. Returns 0 if that could be arranged. */
int ocomm_end_with_status(void);

/* cffi: end more */
#endif
