/* Dense values: reductions in rank order, copies of gradients to and from messages, and checksums of buffers.
 *
 * Work goes chunk by chunk through an accumulator in the first-level cache: every source is read before the chunk of
 * `out` is written, so `out` may be one of them.
 */
#include "mixed.h"
#include "pool.h"
#include "processor.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { UINT8, INT8, INT16, INT32, INT64, BOOL, FLOAT16, BFLOAT16, FLOAT32, FLOAT64, UINT16 };
enum { AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT, BITWISE_OR };

#define CHUNK 256

typedef struct job job;
struct job {
    void (*run)(const job *, int64_t first, int64_t end);
    int op, ranks;
    const void *const *sources;
    double prescale, postscale;
    void *out;
};

/* Buffers may start at any byte and hold any type. */
#define ANYWHERE __attribute__((aligned(1), may_alias))
typedef uint8_t any_uint8 ANYWHERE;
typedef int8_t any_int8 ANYWHERE;
typedef int16_t any_int16 ANYWHERE;
typedef uint16_t any_uint16 ANYWHERE;
typedef int32_t any_int32 ANYWHERE;
typedef int64_t any_int64 ANYWHERE;
typedef float any_float32 ANYWHERE;
typedef double any_float64 ANYWHERE;

static void scale_float32(float *x, double factor, int n) {
    const float f = (float)factor;
    for (int k = 0; k < n; k++) x[k] *= f;
}

static void scale_float64(double *x, double factor, int n) {
    for (int k = 0; k < n; k++) x[k] *= factor;
}

/* A product that differs from a whole number by no more than the rounding of the factor and of the product is that
 * number: otherwise the average of 49 ones, 49 * (1.0 / 49), would be 0. Beyond the type's range it is the type's
 * limit. */
static int64_t scaled(int64_t x, double factor, int64_t low, int64_t high) {
    const double exact = (double)x * factor;
    if (exact != exact) return 0;
    if (exact >= (double)high) return high;
    if (exact <= (double)low) return low;
    const int64_t whole = (int64_t)exact;
    const double magnitude = exact < 0 ? -exact : exact;
    const double missing = 1 - (magnitude - (double)(whole < 0 ? -whole : whole));
    if (missing < 1 && missing <= magnitude * 0x1p-51) return exact < 0 ? whole - 1 : whole + 1;
    return whole;
}

#define SCALE_INTEGER(NAME, T, LOW, HIGH)                                                                           \
    static void scale_##NAME(T *x, double factor, int n) {                                                         \
        for (int k = 0; k < n; k++) x[k] = (T)scaled(x[k], factor, LOW, HIGH);                                     \
    }
SCALE_INTEGER(uint8, uint8_t, 0, UINT8_MAX)
SCALE_INTEGER(int8, int8_t, INT8_MIN, INT8_MAX)
SCALE_INTEGER(uint16, uint16_t, 0, UINT16_MAX)
SCALE_INTEGER(int16, int16_t, INT16_MIN, INT16_MAX)
SCALE_INTEGER(int32, int32_t, INT32_MIN, INT32_MAX)
SCALE_INTEGER(int64, int64_t, INT64_MIN, INT64_MAX)

static float bits_to_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint32_t float_to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static void load_bfloat16(float *into, const void *from, int64_t at, int n) {
    const any_uint16 *half = (const any_uint16 *)from + at;
    for (int k = 0; k < n; k++) into[k] = bits_to_float((uint32_t)half[k] << 16);
}

static void store_bfloat16(void *to, int64_t at, const float *from, int n) {
    any_uint16 *half = (any_uint16 *)to + at;
    for (int k = 0; k < n; k++) {
        const uint32_t bits = float_to_bits(from[k]);
        const uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        half[k] = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : nearest);
    }
}

static float half_to_float(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    /* Shifted into place, a half is a float too small by 2^112; the multiplication is exact, subnormals included. */
    const uint32_t magnitude = rest >= 0x7c00 ? rest << 13 | 0x7f800000 : float_to_bits(bits_to_float(rest << 13) * 0x1p112f);
    return bits_to_float(sign | magnitude);
}

static uint16_t float_to_half(float x) {
    const uint32_t bits = float_to_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* rounds to 65536 or more */
    if (magnitude < 0x38800000) {
        /* Below 2^-14: adding 0.5 puts the half's last subnormal bit at the float's last bit, and rounds to it. */
        return (uint16_t)(sign | (float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000));
    }
    return (uint16_t)(sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13));
}

static void load_float16_portable(float *into, const void *from, int64_t at, int n) {
    const any_uint16 *half = (const any_uint16 *)from + at;
    for (int k = 0; k < n; k++) into[k] = half_to_float(half[k]);
}

static void store_float16_portable(void *to, int64_t at, const float *from, int n) {
    any_uint16 *half = (any_uint16 *)to + at;
    for (int k = 0; k < n; k++) half[k] = float_to_half(from[k]);
}

#if defined(__x86_64__)
#define F16C __attribute__((target("avx2,f16c")))

F16C static void load_float16_f16c(float *into, const void *from, int64_t at, int n) {
    const any_uint16 *half = (const any_uint16 *)from + at;
    int k = 0;
    for (; k + 8 <= n; k += 8)
        _mm256_storeu_ps(into + k, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i_u *)(half + k))));
    load_float16_portable(into + k, half, k, n - k);
}

F16C static void store_float16_f16c(void *to, int64_t at, const float *from, int n) {
    any_uint16 *half = (any_uint16 *)to + at;
    int k = 0;
    for (; k + 8 <= n; k += 8)
        _mm_storeu_si128((__m128i_u *)(half + k), _mm256_cvtps_ph(_mm256_loadu_ps(from + k), _MM_FROUND_TO_NEAREST_INT));
    store_float16_portable(half, k, from + k, n - k);
}

static int f16c; /* asking takes longer than a short sum */

__attribute__((constructor)) static void look_for_f16c(void) { f16c = processor_has(HAS_F16C, 0, 0, SAVES_YMM); }

static int has_f16c(void) { return strcmp(ocomm_path(), "portable") != 0 && f16c; }
#endif

static void load_float16(float *into, const void *from, int64_t at, int n) {
#if defined(__x86_64__)
    if (has_f16c()) {
        load_float16_f16c(into, from, at, n);
        return;
    }
#endif
    load_float16_portable(into, from, at, n);
}

static void store_float16(void *to, int64_t at, const float *from, int n) {
#if defined(__x86_64__)
    if (has_f16c()) {
        store_float16_f16c(to, at, from, n);
        return;
    }
#endif
    store_float16_portable(to, at, from, n);
}

/* Returns a chunk of one source as prescaled accumulator elements: the source itself if that is the same. */
#define FETCH(NAME, T)                                                                                             \
    static const any_##NAME *fetch_##NAME(T *buffer, const void *source, int64_t at, int n, double prescale) {     \
        const any_##NAME *from = (const any_##NAME *)source + at;                                                  \
        if (prescale == 1) return from;                                                                            \
        memcpy(buffer, from, (size_t)n * sizeof(T));                                                               \
        scale_##NAME(buffer, prescale, n);                                                                         \
        return buffer;                                                                                             \
    }                                                                                                              \
    static void store_##NAME(void *to, int64_t at, const T *from, int n) {                                         \
        memcpy((any_##NAME *)to + at, from, (size_t)n * sizeof(T));                                                \
    }

#define FETCH_AS_FLOAT32(NAME)                                                                                     \
    static const any_float32 *fetch_##NAME(float *buffer, const void *source, int64_t at, int n, double prescale) { \
        load_##NAME(buffer, source, at, n);                                                                        \
        if (prescale != 1) scale_float32(buffer, prescale, n);                                                     \
        return (const any_float32 *)buffer;                                                                        \
    }

FETCH(uint8, uint8_t)
FETCH(int8, int8_t)
FETCH(uint16, uint16_t)
FETCH(int16, int16_t)
FETCH(int32, int32_t)
FETCH(int64, int64_t)
FETCH(float32, float)
FETCH(float64, double)
FETCH_AS_FLOAT32(float16)
FETCH_AS_FLOAT32(bfloat16)

/* The smaller and the larger, with NumPy's rule that NaN wins; of equal operands the later rank's. */
#define SMALLER(a, b) ((a) < (b) || (a) != (a) ? (a) : (b))
#define LARGER(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))

/* The operation is chosen outside the loops, so that the compiler vectorises them. WIDE is an unsigned type, or the
 * float itself: unsigned arithmetic wraps where signed overflow would be undefined. */
#define COMBINE(NAME, T, WIDE)                                                                                     \
    static void combine_##NAME(int op, T *restrict sum, const any_##NAME *restrict next, int n) {                  \
        if (op == MIN) {                                                                                           \
            for (int k = 0; k < n; k++) sum[k] = SMALLER(sum[k], next[k]);                                         \
        } else if (op == MAX) {                                                                                    \
            for (int k = 0; k < n; k++) sum[k] = LARGER(sum[k], next[k]);                                          \
        } else if (op == PRODUCT) {                                                                                \
            for (int k = 0; k < n; k++) sum[k] = (T)((WIDE)sum[k] * (WIDE)next[k]);                                \
        } else {                                                                                                   \
            for (int k = 0; k < n; k++) sum[k] = (T)((WIDE)sum[k] + (WIDE)next[k]);                                \
        }                                                                                                          \
    }

COMBINE(uint8, uint8_t, uint32_t)
COMBINE(int8, int8_t, uint32_t)
COMBINE(uint16, uint16_t, uint32_t)
COMBINE(int16, int16_t, uint32_t)
COMBINE(int32, int32_t, uint32_t)
COMBINE(int64, int64_t, uint64_t)
COMBINE(float32, float, float)
COMBINE(float64, double, double)

/* NAME: how elements are stored; SUM: the accumulator, of C type T. */
#define REDUCTION(NAME, SUM_NAME, T)                                                                               \
    static void reduce_##NAME(const job *r, int64_t first, int64_t end) {                                          \
        T sum[CHUNK], buffer[CHUNK];                                                                               \
        for (int64_t at = first; at < end; at += CHUNK) {                                                          \
            const int n = (int)(end - at < CHUNK ? end - at : CHUNK);                                              \
            memcpy(sum, fetch_##NAME(buffer, r->sources[0], at, n, r->prescale), (size_t)n * sizeof(T));           \
            for (int i = 1; i < r->ranks; i++)                                                                     \
                combine_##SUM_NAME(r->op, sum, fetch_##NAME(buffer, r->sources[i], at, n, r->prescale), n);        \
            if (r->postscale != 1) scale_##SUM_NAME(sum, r->postscale, n);                                         \
            store_##NAME(r->out, at, sum, n);                                                                      \
        }                                                                                                          \
    }

REDUCTION(uint8, uint8, uint8_t)
REDUCTION(int8, int8, int8_t)
REDUCTION(uint16, uint16, uint16_t)
REDUCTION(int16, int16, int16_t)
REDUCTION(int32, int32, int32_t)
REDUCTION(int64, int64, int64_t)
REDUCTION(float32, float32, float)
REDUCTION(float64, float64, double)
REDUCTION(float16, float32, float)
REDUCTION(bfloat16, float32, float)

/* The mean of integers is rounded towards zero, as Horovod's is. Sums are made in 64 bits, so only those of int64 can
 * wrap. A factor and the division are applied as one factor: rounded twice, the mean of 3 and 0 times 2 would be 2. */
#define INTEGER_MEAN(NAME, T, LOW, HIGH)                                                                            \
    static void mean_##NAME(const job *r, int64_t first, int64_t end) {                                            \
        T buffer[CHUNK];                                                                                           \
        int64_t sum[CHUNK];                                                                                        \
        for (int64_t at = first; at < end; at += CHUNK) {                                                          \
            const int n = (int)(end - at < CHUNK ? end - at : CHUNK);                                              \
            memset(sum, 0, sizeof sum);                                                                            \
            for (int i = 0; i < r->ranks; i++) {                                                                   \
                const any_##NAME *next = fetch_##NAME(buffer, r->sources[i], at, n, r->prescale);                  \
                for (int k = 0; k < n; k++) sum[k] = (int64_t)((uint64_t)sum[k] + (uint64_t)(int64_t)next[k]);     \
            }                                                                                                      \
            const double factor = r->postscale / r->ranks;                                                         \
            for (int k = 0; k < n; k++)                                                                            \
                buffer[k] = (T)(r->postscale == 1 ? sum[k] / r->ranks : scaled(sum[k], factor, LOW, HIGH));        \
            store_##NAME(r->out, at, buffer, n);                                                                   \
        }                                                                                                          \
    }

INTEGER_MEAN(uint8, uint8_t, 0, UINT8_MAX)
INTEGER_MEAN(int8, int8_t, INT8_MIN, INT8_MAX)
INTEGER_MEAN(uint16, uint16_t, 0, UINT16_MAX)
INTEGER_MEAN(int16, int16_t, INT16_MIN, INT16_MAX)
INTEGER_MEAN(int32, int32_t, INT32_MIN, INT32_MAX)
INTEGER_MEAN(int64, int64_t, INT64_MIN, INT64_MAX)

typedef float float32x4 __attribute__((vector_size(16)));
typedef float any_float32x4 __attribute__((vector_size(16), aligned(1), may_alias));

/* The usual reduction without an accumulator in memory: 16 elements of all sources at a time. Vectors are spelled out
 * because compilers do not find them under -fwrapv, which is among Python's own flags. */
static void sum_float32(const job *r, int64_t begin, int64_t end) {
    const float factor = (float)r->postscale;
    int64_t at = begin;
    for (; at + 16 <= end; at += 16) {
        const any_float32x4 *first = (const any_float32x4 *)((const any_float32 *)r->sources[0] + at);
        float32x4 a = first[0], b = first[1], c = first[2], d = first[3];
        for (int i = 1; i < r->ranks; i++) {
            const any_float32x4 *next = (const any_float32x4 *)((const any_float32 *)r->sources[i] + at);
            /* The processor's own prefetching does not follow many streams at once. */
            __builtin_prefetch(next + 64);
            a += next[0], b += next[1], c += next[2], d += next[3];
        }
        if (factor != 1) a *= factor, b *= factor, c *= factor, d *= factor;
        any_float32x4 *out = (any_float32x4 *)((any_float32 *)r->out + at);
        out[0] = a, out[1] = b, out[2] = c, out[3] = d;
    }
    for (; at < end; at++) {
        float sum = ((const any_float32 *)r->sources[0])[at];
        for (int i = 1; i < r->ranks; i++) sum += ((const any_float32 *)r->sources[i])[at];
        ((any_float32 *)r->out)[at] = factor != 1 ? sum * factor : sum;
    }
}

/* Every nonzero byte is true; the result is 0 or 1. */
static void reduce_bool(const job *r, int64_t first, int64_t end) {
    const int any = r->op == SUM || r->op == MAX;
    for (int64_t k = first; k < end; k++) {
        uint8_t result = !any;
        for (int i = 0; i < r->ranks; i++) {
            const uint8_t truth = ((const uint8_t *)r->sources[i])[k] != 0;
            result = any ? result | truth : result & truth;
        }
        ((uint8_t *)r->out)[k] = result;
    }
}

static void reduce_bits(const job *r, int64_t first, int64_t end) {
    uint8_t sum[CHUNK];
    for (int64_t at = first; at < end; at += CHUNK) {
        const int n = (int)(end - at < CHUNK ? end - at : CHUNK);
        memset(sum, 0, sizeof sum);
        for (int i = 0; i < r->ranks; i++) {
            const uint8_t *next = (const uint8_t *)r->sources[i] + at;
            for (int k = 0; k < n; k++) sum[k] |= next[k];
        }
        memcpy((uint8_t *)r->out + at, sum, (size_t)n);
    }
}

/* Returns the loop for an operation on a type, NULL if there is none. */
static void (*loop_for(int dtype, int op, double prescale, double postscale))(const job *, int64_t, int64_t) {
    if (op == BITWISE_OR || dtype == BOOL) {
        if (prescale != 1 || postscale != 1) return NULL;
        if (dtype == BOOL && (op == SUM || op == MIN || op == MAX || op == PRODUCT)) return reduce_bool;
        return dtype == UINT8 && op == BITWISE_OR ? reduce_bits : NULL;
    }
    if (op != AVERAGE && op != SUM && op != MIN && op != MAX && op != PRODUCT) return NULL;
    switch (dtype) {
    case UINT8: return op == AVERAGE ? mean_uint8 : reduce_uint8;
    case INT8: return op == AVERAGE ? mean_int8 : reduce_int8;
    case UINT16: return op == AVERAGE ? mean_uint16 : reduce_uint16;
    case INT16: return op == AVERAGE ? mean_int16 : reduce_int16;
    case INT32: return op == AVERAGE ? mean_int32 : reduce_int32;
    case INT64: return op == AVERAGE ? mean_int64 : reduce_int64;
    case FLOAT16: return reduce_float16;
    case BFLOAT16: return reduce_bfloat16;
    case FLOAT32: return prescale == 1 && (op == SUM || op == AVERAGE) ? sum_float32 : reduce_float32;
    case FLOAT64: return reduce_float64;
    default: return NULL;
    }
}

static int run_piece(const void *args, int64_t first, int64_t count) {
    const job *r = args;
    r->run(r, first, first + count);
    return 1;
}

static int64_t size_of(int dtype) {
    switch (dtype) {
    case INT16: case UINT16: case FLOAT16: case BFLOAT16: return 2;
    case INT32: case FLOAT32: return 4;
    case INT64: case FLOAT64: return 8;
    default: return 1;
    }
}

int ocomm_reduce(ocomm_pool *pool, int dtype, int op, const uint8_t *const *sources, int ranks, double prescale,
                 double postscale, uint8_t *out, int64_t nbytes) {
    const job r = {loop_for(dtype, op, prescale, postscale), op, ranks, (const void *const *)sources, prescale, postscale,
                   out};
    if (!r.run || ranks < 1) return 0;
    pool_run(pool, run_piece, NULL, &r, nbytes / size_of(dtype));
    return 1;
}

/* The arguments of ocomm_gather or ocomm_scatter. */
typedef struct {
    const ocomm_run *runs;
    const ocomm_tensor *tensors;
    float *packed;
    const float *source;
} run_call;

static int64_t run_numel(const void *args, int64_t i) { return ((const run_call *)args)->runs[i].length; }

static int gather(const void *args, int64_t first, int64_t count) {
    const run_call *c = args;
    for (const ocomm_run *run = c->runs + first; run < c->runs + first + count; run++) {
        const float *grad = c->tensors[run->tensor].grad;
        const size_t nbytes = (size_t)run->length * sizeof(float);
        if (grad)
            memcpy(c->packed + run->position, grad + run->start, nbytes);
        else
            memset(c->packed + run->position, 0, nbytes);
    }
    return 1;
}

static int scatter(const void *args, int64_t first, int64_t count) {
    const run_call *c = args;
    for (const ocomm_run *run = c->runs + first; run < c->runs + first + count; run++)
        memcpy((float *)(uintptr_t)c->tensors[run->tensor].grad + run->start, c->source + run->position,
               (size_t)run->length * sizeof(float));
    return 1;
}

void ocomm_gather(ocomm_pool *pool, const ocomm_run *runs, int64_t count, const ocomm_tensor *tensors,
                  uint8_t *destination) {
    pool_run(pool, gather, run_numel, &(run_call){runs, tensors, (float *)destination, NULL}, count);
}

void ocomm_scatter(ocomm_pool *pool, const ocomm_run *runs, int64_t count, const ocomm_tensor *tensors,
                   const uint8_t *source) {
    pool_run(pool, scatter, run_numel, &(run_call){runs, tensors, NULL, (const float *)source}, count);
}

typedef struct {
    uint8_t *to;
    const uint8_t *from;
    int64_t nbytes;
} copying;

static int copy_words(const void *args, int64_t first, int64_t count) {
    const copying *c = args;
    const int64_t rest = c->nbytes - 4 * first;
    memcpy(c->to + 4 * first, c->from + 4 * first, (size_t)(rest < 4 * count ? rest : 4 * count));
    return 1;
}

void ocomm_copy(ocomm_pool *pool, void *to, const void *from, int64_t nbytes) {
    pool_run(pool, copy_words, NULL, &(copying){to, from, nbytes}, (nbytes + 3) / 4);
}

#define PARTS 64
#define SMALL 512 /* words; a buffer of no more is read whole */
/* Returns the sum of the mixed 8-byte words and of the length: a change of any one word that is read changes the
 * result. The last bytes, if the length is no multiple of 8, are always read. */
uint64_t ocomm_checksum(const void *data, int64_t nbytes, int part) {
    const uint8_t *bytes = data;
    const uint64_t words = (uint64_t)nbytes / 8;
    const int whole = part < 0 || words <= SMALL;
    const uint64_t first = whole ? 0 : words * (uint64_t)part / PARTS;
    const uint64_t end = whole ? words : words * ((uint64_t)part + 1) / PARTS;
    uint64_t sum = (uint64_t)nbytes * SPREAD, word = 0;
    for (uint64_t k = first; k < end; k++) {
        memcpy(&word, bytes + 8 * k, 8);
        sum += mixed(word, k);
    }
    if (nbytes % 8) {
        word = 0;
        memcpy(&word, bytes + 8 * words, (size_t)(nbytes % 8));
        sum += mixed(word, words);
    }
    return sum;
}

void ocomm_checksums(const uint64_t *addresses, const int64_t *nbytes, int64_t count, int part, uint64_t *sums) {
    for (int64_t i = 0; i < count; i++)
        sums[i] = addresses[i] ? ocomm_checksum((const void *)(uintptr_t)addresses[i], nbytes[i], part) : 0;
}
