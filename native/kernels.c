/* The 1-bit loops: what both paths share, their few instructions that differ, and the choice between them. */
#include "mixed.h"
#include "pool.h"
#include "processor.h"

#include "call.h" /* its types are those of ocomm.h */

#include <stddef.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "signs travel as little-endian words"
#endif

#define ROW 32

/* Buckets of a sketch, and elements that are added in float before their sums are added in double. */
#define SKETCH 1024
#define SKETCHED 131072

/* Floats of a piece that are added side by side, as the threads of a block add them on a device. */
#define LANES 256
/* Pieces that are read abreast: from so many places at once memory gives a quarter more than from one. */
#define ABREAST 4
#define UNROLL _Pragma("GCC unroll 8")

/* How many floats to prefetch ahead of what is read, for each of so many streams. A row is so many instructions that
 * the processor itself looks only a row or two ahead. What was best, 1024 for two streams, 640 for three, 384 for
 * five, is a part of the first-level cache for all together; 384 throughout was up to 15 % slower. */
#define AHEAD(streams) (2048 / (streams))

/* Elements of the blocks whose c waits in a buffer of its own: it stays in the first-level cache. */
#define WAITING 4096

/* What a block sends. FROM_DENSE and FROM_BITS are MOMENTUM in its two usual forms, FROM_GRADIENT is UPDATE in its
 * usual one: known when compiled, so that the loop need not ask. */
enum content { VALUES, MOMENTUM, FROM_DENSE, FROM_BITS, UPDATE, FROM_GRADIENT, MEAN };

/* One block of a call of compress, compress_momentum, compress_update or average: its own part of every buffer. */
typedef struct {
    const float *values, *grad, *param, *momentum, *update, *error;
    const uint8_t *previous, *mask;
    const uint8_t *const *received;
    uint8_t *bits;
    float *out, *c;
    int64_t length, masked, scale_at, bits_at;
    float beta1, one_minus_beta1, weight_decay, decayed, per_root, share, over_ranks;
    int ranks, rms, streams;
} work;

/* A block after its first pass: c waits for the second, which turns it into the new error. */
typedef struct {
    const float *c;
    float *out;
    const uint8_t *mask;
    int64_t length;
    float scale;
    int streams;
} remainder;

/* One block of a call of compress_quantized, soft_sign or compress_signs: its momentum and magnitude. */
typedef struct {
    const float *grad, *momentum, *magnitude;
    float *momentum_out, *magnitude_out;
    int64_t length;
    float beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
    int amsgrad, momentum_streams, magnitude_streams;
} ratio_work;

/* Philox-4x32-7 (Salmon et al., SC 2011), all that does not change within a call. */
#define PHILOX_ROUNDS 7
#define PHILOX_M0 0xD2511F53u
#define PHILOX_M1 0xCD9E8D57u
typedef struct {
    uint32_t key0[PHILOX_ROUNDS], key1[PHILOX_ROUNDS], step, stream;
} generator;

/* Where a row's numbers come from: counters that begin with it, counters that do not, or U = 1/2 throughout. */
enum { ALIGNED, SHIFTED, STEADY };

/* One block of a call of compress_quantized or average_quantized: its random numbers, and where what they make of it
 * goes. Element j takes word (shift + j) % 4 of counter quad + (shift + j) / 4. */
typedef struct {
    const float *error;
    float *error_out;
    uint8_t *bits;
    generator generator;
    uint64_t quad;
    int shift, source, streams;
} draws;

/* What a step of 1-bit LAMB multiplies by. A correction of Adam's moments is 1 / (1 - beta^step). */
typedef struct {
    float beta1, one_minus_beta1, rebuild, beta2, one_minus_beta2, m_correction, v_correction, eps;
} lamb_factors;

/* The elements that share a scale in dense values of 8 or 4 bits. */
#define GROUP 128

/* One block of a call of compress_codes or average_codes. */
typedef struct {
    const float *grad, *error;
    float *error_out;
    const uint8_t *const *received;
    uint8_t *scales, *codes;
    int64_t length, scales_at, codes_at;
    float over_ranks;
    int ranks, streams;
} code_work;

/* The arguments of ocomm_triad. */
typedef struct {
    float *y;
    const float *x, *z;
    float factor;
} triad_call;

/* A loop over `count` blocks, with the arguments of its call. */
typedef int (*loop)(const call *, const ocomm_block *, int64_t count);

typedef struct {
    const char *name;
    loop compress, compress_momentum, compress_update, average, unpack, apply, local_step, apply_update, finite;
    double (*squares)(const float *, int64_t);
    void (*sketch)(const float *, int64_t, uint64_t, float *);
    pool_work sum_floats, axpy, triad;
    loop compress_quantized, average_quantized, apply_signs, soft_sign, compress_signs;
    pool_work adam_update;
    loop lamb_update, compress_codes, average_codes, unpack_codes, adam_step;
} loops;

/* Sums of the first ranks' scales with every combination of signs: bit i of the index is rank i's. A plane holds one
 * byte of each sum, for byte shuffles, which look up sixteen bytes at once. */
#define TABLED 4
typedef struct {
    float sum[1 << TABLED];
    uint8_t plane[4][1 << TABLED];
} sums_table;

/* Sums over ranks are made for so many elements at a time, so that scales and addresses stay in registers meanwhile. */
#define TILE 512
enum { FROM_NOTHING, FROM_TABLE, FROM_TILE };

#define SHARED static inline __attribute__((always_inline))

SHARED float read_float(const uint8_t *from) {
    float x;
    memcpy(&x, from, sizeof x);
    return x;
}

SHARED float float_of_bits(int32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The bits of n elements; only their bytes are read, and bits past n are 0. */
SHARED uint32_t load_bits(const uint8_t *from, int n) {
    uint32_t word = 0;
    if (n == ROW) {
        memcpy(&word, from, sizeof word);
    } else {
        memcpy(&word, from, (size_t)(n + 7) / 8);
        word &= (1u << n) - 1;
    }
    return word;
}

SHARED void store_bits(uint8_t *to, uint32_t word, int n) {
    if (n == ROW) {
        memcpy(to, &word, sizeof word);
    } else {
        word &= (1u << n) - 1;
        memcpy(to, &word, (size_t)(n + 7) / 8);
    }
}

/* Is a block's part of a buffer written past the caches? Nobody reads it before the next step, and a store that goes
 * through them would first read what it is about to write over. */
SHARED int streams_to(const float *out, const float *from) {
#if defined(__x86_64__)
    return out != from && (uintptr_t)out % 64 == 0;
#else
    (void)out, (void)from;
    return 0;
#endif
}

/* The block's part of the mask, NULL if it masks none of its elements. */
SHARED const uint8_t *mask_of(const uint8_t *mask, const ocomm_block *block) {
    if (!mask) return NULL;
    const uint8_t *own = mask + (block->offset >> 3);
    uint32_t any = 0;
    int32_t j = 0;
    for (; j + ROW <= block->length; j += ROW) any |= load_bits(own + (j >> 3), ROW);
    if (j < block->length) any |= load_bits(own + (j >> 3), block->length - j);
    return any ? own : NULL;
}

SHARED void prepare_gradient(const call *args, const ocomm_block *block, work *w) {
    const ocomm_tensor *tensor = args->tensors + block->tensor;
    w->grad = tensor->grad ? tensor->grad + block->start : NULL;
    w->param = tensor->param ? tensor->param + block->start : NULL;
    w->beta1 = tensor->beta1;
    w->one_minus_beta1 = tensor->one_minus_beta1;
    w->weight_decay = tensor->weight_decay;
}

SHARED void prepare(enum content content, const call *args, const ocomm_block *block, work *w) {
    /* Errors hold only the blocks that this rank owns, or compresses; the rest is laid out as the whole model. */
    const int64_t at = content == MEAN ? block->owned : block->local;
    w->error = args->error + at;
    w->out = args->error_out + at;
    w->streams = streams_to(w->out, w->error);
    w->mask = mask_of(args->mask, block);
    w->bits = args->packed + block->bits;
    w->length = block->length;
    w->masked = 0;
    w->rms = args->rms;
    if (content == VALUES) {
        w->values = args->values + block->local;
    } else if (content == UPDATE) {
        prepare_gradient(args, block, w);
        w->momentum = args->momentum + block->offset;
        w->update = args->update ? args->update + block->offset : NULL;
        const ocomm_tensor *tensor = args->tensors + block->tensor;
        const float root = tensor->interval_root;
        w->per_root = root > 0 ? 1 / root : 0;
        w->share = root > 0 ? tensor->step_size / root : 0;
    } else if (content == MOMENTUM) {
        const ocomm_tensor *tensor = args->tensors + block->tensor;
        prepare_gradient(args, block, w);
        w->momentum = tensor->momentum ? tensor->momentum + block->start : NULL;
        w->previous = args->previous ? args->previous + block->bits : NULL;
        /* beta1 * (s * sign) is exactly (beta1 * s) * sign: one multiplication per block instead of per element. */
        w->decayed = args->previous ? w->beta1 * read_float(args->previous + block->scale) : 0;
    } else {
        w->received = args->received;
        w->ranks = args->ranks;
        w->bits_at = block->bits - args->origin;
        w->scale_at = block->scale - args->origin;
        w->over_ranks = (float)(1.0 / args->ranks);
    }
}

SHARED void prefetch_row(const float *stream, int64_t at) {
    __builtin_prefetch(stream + at);
    __builtin_prefetch(stream + at + 16);
}

SHARED void prefetch(enum content content, const work *w, int64_t j) {
    const int has_grad = content == FROM_DENSE || content == FROM_BITS || content == FROM_GRADIENT;
    const int has_momentum = content == FROM_DENSE || content == UPDATE || content == FROM_GRADIENT;
    const int has_update = content == UPDATE || content == FROM_GRADIENT;
    const int64_t at = j + AHEAD(1 + (content == VALUES) + has_grad + has_momentum + has_update);
    prefetch_row(w->error, at);
    if (content == VALUES) prefetch_row(w->values, at);
    if (has_grad) prefetch_row(w->grad, at);
    if (has_momentum) prefetch_row(w->momentum, at);
    if (has_update && w->update) prefetch_row(w->update, at);
}

SHARED void fill_table(sums_table *table, const float *scales) {
    for (int index = 0; index < 1 << TABLED; index++) {
        float sum = -0.0f;
        for (int i = 0; i < TABLED; i++) sum += index >> i & 1 ? scales[i] : -scales[i];
        table->sum[index] = sum;
        uint8_t bytes[4];
        memcpy(bytes, &sum, sizeof bytes);
        for (int k = 0; k < 4; k++) table->plane[k][index] = bytes[k];
    }
}

SHARED void prepare_momentum(const call *args, const ocomm_block *block, ratio_work *w) {
    const ocomm_tensor *tensor = args->tensors + block->tensor;
    w->grad = tensor->grad ? tensor->grad + block->start : NULL;
    w->momentum = args->momentum + block->local;
    w->momentum_out = args->momentum_out + block->local;
    w->momentum_streams = streams_to(w->momentum_out, w->momentum);
    w->length = block->length;
    w->beta1 = tensor->beta1;
    w->one_minus_beta1 = tensor->one_minus_beta1;
    w->beta2 = (float)args->beta2;
    w->one_minus_beta2 = args->one_minus_beta2;
}

SHARED void prepare_ratio(const call *args, const ocomm_block *block, ratio_work *w) {
    prepare_momentum(args, block, w);
    w->magnitude = args->magnitude + block->local;
    w->magnitude_out = args->magnitude_out + block->local;
    w->magnitude_streams = streams_to(w->magnitude_out, w->magnitude);
    w->eps = args->eps;
    w->amsgrad = args->amsgrad;
}

/* `at` is the block's first element in the error buffers; NULL where there are none. */
SHARED void prepare_draws(const call *args, const ocomm_block *block, int64_t at, draws *d) {
    d->error = args->error ? args->error + at : NULL;
    d->error_out = args->error_out ? args->error_out + at : NULL;
    d->streams = streams_to(d->error_out, d->error);
    d->bits = args->packed + block->bits;
    for (uint32_t r = 0; r < PHILOX_ROUNDS; r++) {
        d->generator.key0[r] = (uint32_t)args->noise->seed + r * 0x9E3779B9u;
        d->generator.key1[r] = (uint32_t)(args->noise->seed >> 32) + r * 0xBB67AE85u;
    }
    d->generator.step = args->noise->step;
    d->generator.stream = args->noise->stream;
    d->quad = (uint64_t)block->index >> 2;
    d->shift = (int)(block->index & 3);
    d->source = args->noise->steady ? STEADY : d->shift ? SHIFTED : ALIGNED;
}

SHARED void prepare_codes(int averages, const call *args, const ocomm_block *block, code_work *w) {
    const int64_t at = averages ? block->owned : block->local;
    const float *grad = averages ? NULL : args->tensors[block->tensor].grad;
    w->grad = grad ? grad + block->start : NULL;
    w->error = args->error ? args->error + at : NULL;
    w->error_out = args->error_out ? args->error_out + at : NULL;
    w->streams = streams_to(w->error_out, w->error);
    w->received = args->received;
    w->scales = args->packed + block->scale;
    w->codes = args->packed + block->bits;
    w->length = block->length;
    w->scales_at = block->scale - args->origin;
    w->codes_at = block->bits - args->origin;
    w->over_ranks = averages ? (float)(1.0 / args->ranks) : 0;
    w->ranks = args->ranks;
}

/* Computed as the reference does, in double, and rounded once. */
SHARED lamb_factors factors_of(const call *args) {
    return (lamb_factors){.beta1 = (float)args->beta1,
                          .one_minus_beta1 = (float)(1.0 - args->beta1),
                          .rebuild = (float)(1.0 / (1.0 - args->beta1)),
                          .beta2 = (float)args->beta2,
                          .one_minus_beta2 = (float)(1.0 - args->beta2),
                          .m_correction = (float)(1.0 / (1.0 - __builtin_pow(args->beta1, (double)args->step))),
                          .v_correction = (float)(1.0 / (1.0 - __builtin_pow(args->beta2, (double)args->step))),
                          .eps = args->eps};
}

/* The portable path: 16-byte vectors, which every x86-64 and every aarch64 has. */

#define PASTE(a, b) a##_##b
#define FN(name) PASTE(name, portable)
#define TARGET
#define WIDTH 4
#define VECTORS (ROW / WIDTH)
#define V v4
#define VU v4_anywhere
#define I i4

typedef float v4 __attribute__((vector_size(16)));
typedef float v4_anywhere __attribute__((vector_size(16), aligned(1), may_alias));
typedef int32_t i4 __attribute__((vector_size(16)));

static const char name_portable[] = "portable";

SHARED i4 lane_bits_portable(int v) { return (i4){1, 2, 4, 8} << (v * WIDTH); }

SHARED uint32_t word_of_portable(const i4 *yes) {
    uint32_t signs = 0;
    UNROLL for (int v = 0; v < VECTORS; v++) {
#if defined(__x86_64__)
        const int four = _mm_movemask_ps((__m128)yes[v]);
#elif defined(__aarch64__)
        const int four = vaddvq_s32((int32x4_t)(yes[v] & (i4){1, 2, 4, 8}));
#else
        const int four = (yes[v][0] & 1) | (yes[v][1] & 2) | (yes[v][2] & 4) | (yes[v][3] & 8);
#endif
        signs |= (uint32_t)four << (v * WIDTH);
    }
    return signs;
}

SHARED v4 with_signs_portable(v4 scale, uint32_t word, int v) {
    const i4 negative = (((i4){0} + (int32_t)word) & lane_bits_portable(v)) == (i4){0};
    return (v4)((i4)scale ^ (negative & INT32_MIN));
}

SHARED i4 larger_portable(i4 a, i4 b) {
    const i4 first = a > b;
    return (a & first) | (b & ~first);
}

SHARED void store_bytes_portable(uint8_t *to, const i4 *row) {
#if defined(__x86_64__)
    const __m128i low = _mm_set1_epi32(255);
    UNROLL for (int v = 0; v < VECTORS; v += 4) {
        const __m128i first = _mm_packs_epi32(_mm_and_si128((__m128i)row[v], low), _mm_and_si128((__m128i)row[v + 1], low));
        const __m128i last =
            _mm_packs_epi32(_mm_and_si128((__m128i)row[v + 2], low), _mm_and_si128((__m128i)row[v + 3], low));
        _mm_storeu_si128((__m128i_u *)(to + v * WIDTH), _mm_packus_epi16(first, last));
    }
#else
    UNROLL for (int v = 0; v < VECTORS; v++) {
        for (int k = 0; k < WIDTH; k++) to[v * WIDTH + k] = (uint8_t)row[v][k];
    }
#endif
}

#if defined(__x86_64__)
/* 16 bytes as four vectors. Without a sign extension of bytes: each goes to the top of a word, and is shifted down. */
SHARED void widen_portable(v4 *row, __m128i bytes) {
    const __m128i none = _mm_setzero_si128();
    const __m128i low = _mm_unpacklo_epi8(none, bytes), high = _mm_unpackhi_epi8(none, bytes);
    row[0] = (v4)_mm_cvtepi32_ps(_mm_srai_epi32(_mm_unpacklo_epi16(none, low), 24));
    row[1] = (v4)_mm_cvtepi32_ps(_mm_srai_epi32(_mm_unpackhi_epi16(none, low), 24));
    row[2] = (v4)_mm_cvtepi32_ps(_mm_srai_epi32(_mm_unpacklo_epi16(none, high), 24));
    row[3] = (v4)_mm_cvtepi32_ps(_mm_srai_epi32(_mm_unpackhi_epi16(none, high), 24));
}

SHARED void load_bytes_portable(v4 *row, const uint8_t *from) {
    widen_portable(row, _mm_loadu_si128((const __m128i_u *)from));
    widen_portable(row + 4, _mm_loadu_si128((const __m128i_u *)(from + 16)));
}

/* 32 whole numbers of 4 bits as bytes, in two halves. */
SHARED void split_pairs(__m128i *halves, const uint8_t *from) {
    const __m128i pairs = _mm_loadu_si128((const __m128i_u *)from), low = _mm_set1_epi8(15), top = _mm_set1_epi8(8);
    const __m128i first = _mm_and_si128(pairs, low), second = _mm_and_si128(_mm_srli_epi16(pairs, 4), low);
    /* (x ^ 8) - 8 extends the sign. */
    halves[0] = _mm_sub_epi8(_mm_xor_si128(_mm_unpacklo_epi8(first, second), top), top);
    halves[1] = _mm_sub_epi8(_mm_xor_si128(_mm_unpackhi_epi8(first, second), top), top);
}

SHARED void load_pairs_portable(v4 *row, const uint8_t *from) {
    __m128i halves[2];
    split_pairs(halves, from);
    widen_portable(row, halves[0]);
    widen_portable(row + 4, halves[1]);
}
#else
SHARED void load_bytes_portable(v4 *row, const uint8_t *from) {
    float wide[ROW];
    for (int k = 0; k < ROW; k++) wide[k] = (float)(int8_t)from[k];
    UNROLL for (int v = 0; v < VECTORS; v++) row[v] = *(const v4_anywhere *)(wide + v * WIDTH);
}

SHARED void load_pairs_portable(v4 *row, const uint8_t *from) {
    float wide[ROW];
    for (int k = 0; k < ROW; k++) wide[k] = (float)(((from[k / 2] >> (4 * (k % 2)) & 15) ^ 8) - 8);
    UNROLL for (int v = 0; v < VECTORS; v++) row[v] = *(const v4_anywhere *)(wide + v * WIDTH);
}
#endif

SHARED v4 root_portable(v4 x) {
#if defined(__x86_64__)
    return (v4)_mm_sqrt_ps((__m128)x);
#elif defined(__aarch64__)
    return (v4)vsqrtq_f32((float32x4_t)x);
#else
    for (int k = 0; k < WIDTH; k++) x[k] = __builtin_sqrtf(x[k]);
    return x;
#endif
}

SHARED v4 toward_portable(v4 c, v4 scale) {
    const i4 yes = c >= (v4){0};
    return (v4)((i4)scale ^ (~yes & INT32_MIN));
}

SHARED void stream_portable(float *to, v4 x) {
#if defined(__x86_64__)
    _mm_stream_ps(to, (__m128)x);
#else
    *(v4 *)to = x;
#endif
}

#define LOOKS_UP 0
SHARED void looked_up_portable(v4 *row, const sums_table *table, const uint32_t *words) {
    (void)row, (void)table, (void)words;
}

SHARED void drawn_portable(v4 *row, const generator *g, uint64_t quad) {
    for (int v = 0; v < VECTORS; v++) {
        uint32_t c0 = (uint32_t)(quad + (uint64_t)v), c1 = (uint32_t)((quad + (uint64_t)v) >> 32), c2 = g->step,
                 c3 = g->stream;
        for (int r = 0; r < PHILOX_ROUNDS; r++) {
            const uint64_t p0 = (uint64_t)PHILOX_M0 * c0, p1 = (uint64_t)PHILOX_M1 * c2;
            c0 = (uint32_t)(p1 >> 32) ^ c1 ^ g->key0[r];
            c1 = (uint32_t)p1;
            c2 = (uint32_t)(p0 >> 32) ^ c3 ^ g->key1[r];
            c3 = (uint32_t)p0;
        }
        row[v] = (v4){(float)(c0 >> 8), (float)(c1 >> 8), (float)(c2 >> 8), (float)(c3 >> 8)};
    }
}

SHARED void shifted_portable(v4 *row, const v4 *now, const v4 *next, int by) {
    float both[ROW + WIDTH];
    UNROLL for (int v = 0; v < VECTORS; v++) *(v4_anywhere *)(both + v * WIDTH) = now[v];
    *(v4_anywhere *)(both + ROW) = next[0];
    UNROLL for (int v = 0; v < VECTORS; v++) row[v] = *(const v4_anywhere *)(both + v * WIDTH + by);
}

#include "kernels_body.h"

#undef LOOKS_UP
#undef FN
#undef TARGET
#undef WIDTH
#undef V
#undef VU
#undef I

#if defined(__x86_64__)

#define FN(name) PASTE(name, avx2)
#define TARGET __attribute__((target("avx2,popcnt")))
#define WIDTH 8
#define V v8
#define VU v8_anywhere
#define I i8

typedef float v8 __attribute__((vector_size(32)));
typedef float v8_anywhere __attribute__((vector_size(32), aligned(1), may_alias));
typedef int32_t i8 __attribute__((vector_size(32)));

static const char name_avx2[] = "avx2";

TARGET SHARED i8 lane_bits_avx2(int v) { return (i8){1, 2, 4, 8, 16, 32, 64, 128} << (v * WIDTH); }

TARGET SHARED void stream_avx2(float *to, v8 x) { _mm256_stream_ps(to, (__m256)x); }

TARGET SHARED uint32_t word_of_avx2(const i8 *yes) {
    /* Packing works on halves of 16 bytes; the permutation puts groups of four elements back in order. */
    const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32((__m256i)yes[0], (__m256i)yes[1]),
                                              _mm256_packs_epi32((__m256i)yes[2], (__m256i)yes[3]));
    const __m256i ordered = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    return (uint32_t)_mm256_movemask_epi8(ordered);
}

TARGET SHARED v8 with_signs_avx2(v8 scale, uint32_t word, int v) {
    const i8 to_top = (i8){31, 30, 29, 28, 27, 26, 25, 24} - v * WIDTH;
    const __m256i signs = _mm256_sllv_epi32(_mm256_set1_epi32((int32_t)word), (__m256i)to_top);
    return _mm256_blendv_ps(-scale, scale, (__m256)signs);
}

TARGET SHARED i8 larger_avx2(i8 a, i8 b) { return (i8)_mm256_max_epi32((__m256i)a, (__m256i)b); }

TARGET SHARED void store_bytes_avx2(uint8_t *to, const i8 *row) {
    const __m256i low = _mm256_set1_epi32(255);
    __m256i byte[4];
    UNROLL for (int v = 0; v < 4; v++) byte[v] = _mm256_and_si256((__m256i)row[v], low);
    const __m256i packed =
        _mm256_packus_epi16(_mm256_packus_epi32(byte[0], byte[1]), _mm256_packus_epi32(byte[2], byte[3]));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); /* as in word_of_avx2 */
    _mm256_storeu_si256((__m256i_u *)to, _mm256_permutevar8x32_epi32(packed, order));
}

/* The lower eight bytes. */
TARGET SHARED v8 widen_avx2(__m128i bytes) { return (v8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)); }

TARGET SHARED void load_bytes_avx2(v8 *row, const uint8_t *from) {
    UNROLL for (int v = 0; v < 4; v++) row[v] = widen_avx2(_mm_loadl_epi64((const __m128i_u *)(from + 8 * v)));
}

TARGET SHARED void load_pairs_avx2(v8 *row, const uint8_t *from) {
    __m128i halves[2];
    split_pairs(halves, from);
    UNROLL for (int h = 0; h < 2; h++) {
        row[2 * h] = widen_avx2(halves[h]);
        row[2 * h + 1] = widen_avx2(_mm_unpackhi_epi64(halves[h], halves[h]));
    }
}

TARGET SHARED v8 root_avx2(v8 x) { return (v8)_mm256_sqrt_ps((__m256)x); }

TARGET SHARED v8 toward_avx2(v8 c, v8 scale) {
    return _mm256_blendv_ps(-scale, scale, _mm256_cmp_ps(c, _mm256_setzero_ps(), _CMP_GE_OQ));
}

#define LOOKS_UP 1
TARGET SHARED void looked_up_avx2(v8 *row, const sums_table *table, const uint32_t *words) {
    /* Which byte of the word each byte of the index takes its bit from, and which bit. Interleaving bytes into floats
     * stays within halves of 16 bytes, so the first half holds elements 0-3 of each group of eight, the second 4-7. */
    const __m256i byte_of = _mm256_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 0, 0, 0, 0, 1, 1, 1, 1, 2,
                                             2, 2, 2, 3, 3, 3, 3);
    const __m256i bit_of = _mm256_setr_epi32(0x08040201, 0x08040201, 0x08040201, 0x08040201, (int)0x80402010,
                                             (int)0x80402010, (int)0x80402010, (int)0x80402010);
    __m256i set[TABLED]; /* -1 where the rank's bit is 1 */
    UNROLL for (int i = 0; i < TABLED; i++) {
        const __m256i bits = _mm256_shuffle_epi8(_mm256_set1_epi32((int32_t)words[i]), byte_of);
        set[i] = _mm256_cmpeq_epi8(_mm256_and_si256(bits, bit_of), bit_of);
    }
    const __m256i low = _mm256_add_epi8(_mm256_add_epi8(set[1], set[1]), set[0]);
    const __m256i high = _mm256_add_epi8(_mm256_add_epi8(set[3], set[3]), set[2]);
    const __m256i high2 = _mm256_add_epi8(high, high);
    const __m256i index = _mm256_abs_epi8(_mm256_add_epi8(_mm256_add_epi8(high2, high2), low));
    __m256i byte[4];
    UNROLL for (int k = 0; k < 4; k++)
        byte[k] = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i_u *)table->plane[k])), index);
    const __m256i low01 = _mm256_unpacklo_epi8(byte[0], byte[1]), high01 = _mm256_unpackhi_epi8(byte[0], byte[1]);
    const __m256i low23 = _mm256_unpacklo_epi8(byte[2], byte[3]), high23 = _mm256_unpackhi_epi8(byte[2], byte[3]);
    row[0] = (v8)_mm256_unpacklo_epi16(low01, low23);
    row[1] = (v8)_mm256_unpackhi_epi16(low01, low23);
    row[2] = (v8)_mm256_unpacklo_epi16(high01, high23);
    row[3] = (v8)_mm256_unpackhi_epi16(high01, high23);
}

TARGET SHARED void drawn_avx2(v8 *row, const generator *g, uint64_t quad) {
    const __m256i m0 = _mm256_set1_epi64x(PHILOX_M0), m1 = _mm256_set1_epi64x(PHILOX_M1);
    /* Two vectors of four counters, one in each 64-bit lane. A multiplication reads the lower halves of its lanes only,
     * so what is in the upper ones does no harm. Their order is the one that interleaving below puts right. */
    const __m256i first = _mm256_add_epi64(_mm256_set1_epi64x((int64_t)quad), _mm256_setr_epi64x(0, 2, 1, 3));
    __m256i c0[2] = {first, _mm256_add_epi64(first, _mm256_set1_epi64x(4))}, c1[2], c2[2], c3[2];
    UNROLL for (int h = 0; h < 2; h++) {
        c1[h] = _mm256_srli_epi64(c0[h], 32);
        c2[h] = _mm256_set1_epi64x(g->step);
        c3[h] = _mm256_set1_epi64x(g->stream);
    }
    UNROLL for (int r = 0; r < PHILOX_ROUNDS; r++) {
        const __m256i k0 = _mm256_set1_epi64x(g->key0[r]), k1 = _mm256_set1_epi64x(g->key1[r]);
        UNROLL for (int h = 0; h < 2; h++) {
            const __m256i p0 = _mm256_mul_epu32(c0[h], m0), p1 = _mm256_mul_epu32(c2[h], m1);
            c0[h] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p1, 32), c1[h]), k0);
            c1[h] = p1;
            c2[h] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p0, 32), c3[h]), k1);
            c3[h] = p0;
        }
    }
    UNROLL for (int h = 0; h < 2; h++) {
        const __m256i words01 = _mm256_blend_epi32(c0[h], _mm256_slli_epi64(c1[h], 32), 0xAA);
        const __m256i words23 = _mm256_blend_epi32(c2[h], _mm256_slli_epi64(c3[h], 32), 0xAA);
        row[2 * h] = (v8)_mm256_cvtepi32_ps(_mm256_srli_epi32(_mm256_unpacklo_epi64(words01, words23), 8));
        row[2 * h + 1] = (v8)_mm256_cvtepi32_ps(_mm256_srli_epi32(_mm256_unpackhi_epi64(words01, words23), 8));
    }
}

TARGET SHARED void shifted_avx2(v8 *row, const v8 *now, const v8 *next, int by) {
    const i8 lane = {0, 1, 2, 3, 4, 5, 6, 7};
    const i8 later = lane < by;
    UNROLL for (int v = 0; v < VECTORS; v++) {
        const __m256 both = _mm256_blendv_ps(now[v], v + 1 < VECTORS ? now[v + 1] : next[0], (__m256)later);
        row[v] = (v8)_mm256_permutevar8x32_ps(both, (__m256i)((lane + by) & 7));
    }
}

#include "kernels_body.h"

#undef FN
#undef TARGET
#undef WIDTH
#undef V
#undef VU
#undef I

#define FN(name) PASTE(name, avx512)
#define TARGET __attribute__((target("avx512f,avx512dq,popcnt")))
#define WIDTH 16
#define V v16
#define VU v16_anywhere
#define I i16
#define M __mmask16
#define WITHOUT

typedef float v16 __attribute__((vector_size(64)));
typedef float v16_anywhere __attribute__((vector_size(64), aligned(1), may_alias));
typedef int32_t i16 __attribute__((vector_size(64)));

static const char name_avx512[] = "avx512";

TARGET SHARED M at_least_avx512(v16 a, v16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
TARGET SHARED M greater_avx512(v16 a, v16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
TARGET SHARED M lanes_of_avx512(uint32_t word, int v) {
    /* Faster than a shift of the word and a move of its half to a mask register. */
    const i16 bits = (i16){1 << 0, 1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                           1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15}
                     << (v * WIDTH);
    return _mm512_test_epi32_mask(_mm512_set1_epi32((int32_t)word), (__m512i)bits);
}
TARGET SHARED void stream_avx512(float *to, v16 x) { _mm512_stream_ps(to, (__m512)x); }
TARGET SHARED v16 select_avx512(M which, v16 yes, v16 no) { return _mm512_mask_blend_ps(which, no, yes); }
TARGET SHARED uint32_t word_of_avx512(const M *yes) { return yes[0] | (uint32_t)yes[1] << WIDTH; }

TARGET SHARED v16 with_signs_avx512(v16 scale, uint32_t word, int v) {
    return select_avx512(lanes_of_avx512(word, v), scale, -scale);
}

TARGET SHARED v16 root_avx512(v16 x) { return (v16)_mm512_sqrt_ps((__m512)x); }

TARGET SHARED v16 toward_avx512(v16 c, v16 scale) {
    return select_avx512(at_least_avx512(c, _mm512_setzero_ps()), scale, -scale);
}

TARGET SHARED void looked_up_avx512(v16 *row, const sums_table *table, const uint32_t *words) {
    const __m512 sums = _mm512_loadu_ps(table->sum);
    UNROLL for (int v = 0; v < VECTORS; v++) {
        __m512i index = _mm512_maskz_set1_epi32(lanes_of_avx512(words[0], v), 1);
        UNROLL for (int i = 1; i < TABLED; i++)
            index = _mm512_mask_or_epi32(index, lanes_of_avx512(words[i], v), index, _mm512_set1_epi32(1 << i));
        row[v] = (v16)_mm512_permutexvar_ps(index, sums);
    }
}

TARGET SHARED void drawn_avx512(v16 *row, const generator *g, uint64_t quad) {
    const __m512i m0 = _mm512_set1_epi64(PHILOX_M0), m1 = _mm512_set1_epi64(PHILOX_M1);
    /* As drawn_avx2, with all eight counters of a row in one vector. */
    __m512i c0 = _mm512_add_epi64(_mm512_set1_epi64((int64_t)quad), _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7));
    __m512i c1 = _mm512_srli_epi64(c0, 32), c2 = _mm512_set1_epi64(g->step), c3 = _mm512_set1_epi64(g->stream);
    UNROLL for (int r = 0; r < PHILOX_ROUNDS; r++) {
        enum { xor3 = 0x96 }; /* clang takes no variable here */
        const __m512i p0 = _mm512_mul_epu32(c0, m0), p1 = _mm512_mul_epu32(c2, m1);
        c0 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p1, 32), c1, _mm512_set1_epi64(g->key0[r]), xor3);
        c1 = p1;
        c2 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p0, 32), c3, _mm512_set1_epi64(g->key1[r]), xor3);
        c3 = p0;
    }
    const __m512i words01 = _mm512_mask_blend_epi32(0xAAAA, c0, _mm512_slli_epi64(c1, 32));
    const __m512i words23 = _mm512_mask_blend_epi32(0xAAAA, c2, _mm512_slli_epi64(c3, 32));
    row[0] = (v16)_mm512_cvtepi32_ps(_mm512_srli_epi32(_mm512_unpacklo_epi64(words01, words23), 8));
    row[1] = (v16)_mm512_cvtepi32_ps(_mm512_srli_epi32(_mm512_unpackhi_epi64(words01, words23), 8));
}

TARGET SHARED void shifted_avx512(v16 *row, const v16 *now, const v16 *next, int by) {
    const __m512i from = _mm512_add_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                          _mm512_set1_epi32(by));
    row[0] = (v16)_mm512_permutex2var_ps(now[0], from, now[1]);
    row[1] = (v16)_mm512_permutex2var_ps(now[1], from, next[0]);
}

#include "kernels_body.h"

/* Loops that memory limits are a few percent faster with AVX2, whose smaller steps spread its loads. */
static const loops loops_avx512 = {
    name_avx512, compress_avx2, compress_momentum_avx2, compress_update_avx2, average_avx512, unpack_avx2,
    apply_avx2, local_step_avx2, apply_update_avx2, finite_avx2, squares_avx2, sketch_avx2, sum_floats_avx2, axpy_avx2,
    triad_avx2,
    compress_quantized_avx512, average_quantized_avx512, apply_signs_avx2, soft_sign_avx2, compress_signs_avx2,
    adam_update_avx2, lamb_update_avx512, compress_codes_avx2, average_codes_avx2, unpack_codes_avx2, adam_step_avx2,
};

static int has_avx2(void) { return processor_has(HAS_POPCNT, HAS_AVX2, 0, SAVES_YMM); }

/* VBMI2 is not needed: whoever has it keeps his clock rate with wide vectors, as the first with AVX-512 did not. */
static int has_avx512(void) {
    return has_avx2() && processor_has(0, HAS_AVX512F | HAS_AVX512DQ, HAS_AVX512VBMI2, SAVES_ZMM);
}

#endif

static const loops *active = &loops_portable;

__attribute__((constructor)) static void choose_path(void) {
#if defined(__x86_64__)
    active = has_avx512() ? &loops_avx512 : has_avx2() ? &loops_avx2 : active;
#endif
}

const char *ocomm_path(void) { return active->name; }

int ocomm_select_path(const char *name) {
    if (strcmp(name, loops_portable.name) == 0) {
        active = &loops_portable;
        return 0;
    }
#if defined(__x86_64__)
    if (strcmp(name, loops_avx2.name) == 0 && has_avx2()) {
        active = &loops_avx2;
        return 0;
    }
    if (strcmp(name, loops_avx512.name) == 0 && has_avx512()) {
        active = &loops_avx512;
        return 0;
    }
#endif
    return -1;
}

/* A loop and its blocks, to be cut. */
typedef struct {
    loop run;
    const call *args;
} blockwise;

static int run_blocks(const void *args, int64_t first, int64_t count) {
    const blockwise *whole = args;
    const int finite = whole->run(whole->args, whole->args->blocks + first, count);
#if defined(__x86_64__)
    _mm_sfence(); /* what was written past the caches is there before anything that says so */
#endif
    return finite;
}

static int64_t block_numel(const void *args, int64_t k) { return ((const blockwise *)args)->args->blocks[k].length; }

static int on_blocks(ocomm_pool *pool, loop run, const call *args) {
    return pool_run(pool, run_blocks, block_numel, &(blockwise){run, args}, args->count);
}

static int on_elements(ocomm_pool *pool, pool_work run, const call *args) {
    return pool_run(pool, run, NULL, args, args->numel);
}

static int64_t piece_numel(const void *args, int64_t k) { return ((const call *)args)->pieces[k].count; }

static int on_pieces(ocomm_pool *pool, pool_work run, const call *args) {
    return pool_run(pool, run, piece_numel, args, args->count);
}

#include "cut_loops.h"

int ocomm_finite_scales(ocomm_pool *pool, const ocomm_block *blocks, int64_t count, const uint8_t *packed) {
    (void)pool; /* a few bytes of each block */
    int finite = 1;
    for (int64_t k = 0; k < count; k++) {
        const float scale = read_float(packed + blocks[k].scale);
        finite &= scale - scale == 0;
    }
    return finite;
}

void ocomm_squares(const uint64_t *addresses, const int64_t *numels, int64_t count, double *sums) {
    for (int64_t k = 0; k < count; k++) {
        sums[k] = addresses[k] ? active->squares((const float *)(uintptr_t)addresses[k], numels[k]) : 0;
    }
}

void ocomm_sketch(const uint64_t *addresses, const int64_t *numels, int64_t count, uint64_t seed, double *sums) {
    memset(sums, 0, SKETCH * sizeof *sums);
    for (int64_t k = 0; k < count; k++) {
        const float *x = (const float *)(uintptr_t)addresses[k];
        const uint64_t key = mixed(seed, (uint64_t)k);
        for (int64_t first = 0; x && first < numels[k]; first += SKETCHED) {
            float part[SKETCH + ROW] = {0};
            const int64_t left = numels[k] - first;
            active->sketch(x + first, left < SKETCHED ? left : SKETCHED, mixed(key, (uint64_t)(first / SKETCHED)), part);
            for (int b = 0; b < ROW; b++) part[b] += part[SKETCH + b];
            for (int b = 0; b < SKETCH; b++) sums[b] += part[b];
        }
    }
}

void ocomm_triad(ocomm_pool *pool, float *y, const float *x, const float *z, float factor, int64_t numel) {
    pool_run(pool, active->triad, NULL, &(triad_call){y, x, z, factor}, numel);
}
