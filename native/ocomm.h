/* Loops over flat float32 buffers, and the engine that runs an exchange plan.
 *
 * This header is the whole native interface: the C files implement it, native/build.py hands the
 * marked part to cffi, and ocomm/kernels/cpu.py and ocomm/collectives/native_engine.py call it.
 * The mathematics is in docs/algorithms.md; ocomm/kernels/reference.py is the law for every loop.
 */
#ifndef OCOMM_H
#define OCOMM_H
#include <stdint.h>

/* cffi: begin kernels */

/* One scale block: a run of elements of one tensor which share a scale and an owner. */
typedef struct {
    int64_t offset;   /* first element in the flat buffers (error, mask, denominator); a multiple of 16 */
    int64_t start;    /* first element inside its tensor */
    int64_t owned;    /* first element in the owner's error buffer; -1 on ranks that do not own it */
    int64_t bits;     /* byte position of its signs in the packed buffer */
    int64_t scale;    /* byte position of its float32 scale in the packed buffer; a multiple of 4 */
    int32_t length;   /* elements */
    int32_t tensor;   /* row of the tensor table */
} ocomm_block;

/* One tensor of the layout as this step sees it. */
typedef struct {
    const float *grad;       /* NULL: no gradient on this rank, counts as zero */
    float *param;            /* updated in place by ocomm_apply; read for a coupled weight decay */
    const float *momentum;   /* dense momentum; NULL: the momentum is the previous packed result */
    float beta1;
    float one_minus_beta1;   /* rounded from double on its own, not 1.0f - beta1 */
    float weight_decay;      /* coupled decay: grad + weight_decay * param; 0 for none */
    float step_size;         /* lr / (1 - beta1^t), rounded once to float32 */
    float decay;             /* decoupled decay: param * decay before the step; 1 for none */
    int32_t skip;            /* 1: ocomm_apply leaves the tensor alone */
} ocomm_tensor;

/* Which build of the loops runs: "avx2" or "portable". Selecting an unknown or unsupported one returns -1. */
const char *ocomm_path(void);
int ocomm_select_path(const char *name);

/* Every loop below works on `count` blocks in table order, allocates nothing and returns 1 if all scales are finite,
 * else 0. `mask` holds one bit per flat element (bit o & 7 of byte o >> 3), 1 = masked; NULL: nothing is masked.
 * `rms` chooses the scale: 0 mean |c|, 1 root of the mean square. */
int ocomm_compress(const ocomm_block *blocks, int64_t count, const float *values, const float *error, float *error_out,
                   const uint8_t *mask, int rms, uint8_t *packed);
int ocomm_compress_momentum(const ocomm_block *blocks, int64_t count, const ocomm_tensor *tensors,
                            const uint8_t *previous, const float *error, float *error_out, const uint8_t *mask, int rms,
                            uint8_t *packed);
/* received[i] is where rank i's message to this owner starts; a block's signs are at received[i] + bits - origin. */
int ocomm_average(const ocomm_block *blocks, int64_t count, const uint8_t *const *received, int64_t origin, int ranks,
                  const float *error, float *error_out, const uint8_t *mask, int rms, uint8_t *packed);
void ocomm_unpack(const ocomm_block *blocks, int64_t count, const uint8_t *packed, const uint8_t *mask, float *out);
void ocomm_apply(const ocomm_block *blocks, int64_t count, const ocomm_tensor *tensors, const uint8_t *packed,
                 const float *denominator, const uint8_t *mask);
/* out = postscale * reduce(prescale * sources[0], ..., prescale * sources[ranks - 1]) in rank order; out may be one of
 * the sources. Returns -1 for an operation the dtype does not have. dtype and op are types.DType and types.ReduceOp. */
int ocomm_reduce(int dtype, int op, int ranks, const void *const *sources, int64_t numel, double prescale,
                 double postscale, void *out);
/* Pseudo-random sample of the bytes of a buffer, for noticing that a gradient was changed after hand-over.
 * full = 1 reads every byte. */
uint64_t ocomm_checksum(const void *data, int64_t nbytes, int full);

/* cffi: end kernels */
#endif
