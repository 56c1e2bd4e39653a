/* The loops of dense values in 16, 8 or 4 bits, written once. kernels_body.h includes this file once per path; a path
 * defines beside what is named there
 *   larger(a, b)       the larger int32 of each element
 *   store_bytes(to, row)  the lowest byte of each element of a row of 32 int32
 *   load_bytes(row, from)   a row of 32 int8 as floats
 *   load_pairs(row, from)   the same of whole numbers of 4 bits, two in a byte, the first in its lower half
 */

#ifndef WITHOUT

typedef uint16_t FN(halves) __attribute__((vector_size(WIDTH * 2), aligned(1), may_alias));
typedef uint32_t FN(words) __attribute__((vector_size(WIDTH * 4)));

/* A float of at most 2^22 plus this is rounded to a whole number, which is in the lowest bits then. */
#define ROUNDER 0x1.8p23f

/* A row of bytes of which the lower halves are codes of 4 bits, two in a byte, the first in its lower half. */
SHARED void FN(join_codes)(uint8_t *to, const uint8_t *from) {
    typedef uint16_t h8 __attribute__((vector_size(16), aligned(1), may_alias));
    typedef uint8_t b8 __attribute__((vector_size(8), aligned(1), may_alias));
    UNROLL for (int k = 0; k < 2; k++) {
        const h8 pairs = *(const h8 *)(from + 16 * k);
        *(b8 *)(to + 8 * k) = __builtin_convertvector((pairs & 15) | ((pairs >> 4) & 0xF0), b8);
    }
}

/* What a row of codes stands for, but for the scale. */
INLINE void FN(load_codes)(int bits, V *row, const uint8_t *from, int n) {
    uint8_t padded[2 * ROW];
    if (n < ROW) {
        memset(padded, 0, sizeof padded);
        from = memcpy(padded, from, (size_t)(n * bits + 7) / 8);
        if (bits == 4 && n % 2) padded[n / 2] &= 15; /* whatever follows the last element, the row has zeros there */
    }
    if (bits == 16) {
        UNROLL for (int v = 0; v < VECTORS; v++) {
            const FN(words) wide = __builtin_convertvector(*(const FN(halves) *)(from + 2 * v * WIDTH), FN(words));
            row[v] = (V)(wide << 16);
        }
        return;
    }
    if (bits == 4)
        FN(load_pairs)(row, from);
    else
        FN(load_bytes)(row, from);
}

/* The codes of a row, of `bits` bits each, are the lowest bits of its elements. */
INLINE void FN(store_codes)(int bits, uint8_t *to, const I *row, int n) {
    uint8_t whole[2 * ROW], apart[ROW], *first = n < ROW ? whole : to;
    if (bits == 16) {
        UNROLL for (int v = 0; v < VECTORS; v++)
            *(FN(halves) *)(first + 2 * v * WIDTH) = __builtin_convertvector((FN(words))row[v], FN(halves));
    } else if (bits == 8) {
        FN(store_bytes)(first, row);
    } else {
        FN(store_bytes)(apart, row);
        FN(join_codes)(first, apart);
    }
    if (n < ROW) memcpy(to, whole, (size_t)(n * bits + 7) / 8);
}

INLINE int32_t FN(largest_of)(I x) {
    int32_t lane[WIDTH];
    memcpy(lane, &x, sizeof lane);
    for (int half = WIDTH / 2; half; half /= 2) {
        UNROLL for (int k = 0; k < half; k++) lane[k] = lane[k] > lane[k + half] ? lane[k] : lane[k + half];
    }
    return lane[0];
}

/* Sends up to GROUP elements of a block, from the j-th on, which wait in `c`, zeros behind them; `largest` is the
 * largest of their absolute values, as bits. Returns whether what is sent is finite. */
INLINE int FN(send_codes)(int bits, const code_work *w, const float *c, int32_t largest, int64_t j, int n) {
    const int32_t infinite = 0x7F800000;
    const float top = float_of_bits(largest), levels = bits == 8 ? 127.0f : 7.0f;
    const int bad = largest >= infinite, sends = !bad && top >= 0x1p-100f;
    const float scale = bad ? float_of_bits(0x7FC00000) : sends ? top / levels : 0.0f;
    const V factor = FN(splat)(sends ? levels / top : 0.0f), unit = FN(splat)(scale);
    I carried = (I){0};
    if (bits < 16) memcpy(w->scales + j / GROUP * 4, &scale, sizeof scale);
    for (int at = 0; at < n; at += ROW) {
        const int left = n - at < ROW ? n - at : ROW;
        I code[VECTORS];
        V row[VECTORS];
        FN(load)(row, c + at, ROW);
        UNROLL for (int v = 0; v < VECTORS; v++) {
            V meant;
            if (bits == 16) {
                const FN(words) word = (FN(words))row[v];
                const FN(words) nearest = (word + 0x7FFF + ((word >> 16) & 1)) >> 16;
                const FN(words) is_nan = (FN(words))(row[v] != row[v]);
                const FN(words) chosen = (is_nan & ((word >> 16) | 0x40)) | (~is_nan & nearest);
                code[v] = (I)chosen;
                carried |= (I)(chosen & 0x7F80) == 0x7F80;
                meant = (V)(chosen << 16);
            } else {
                const V rounded = row[v] * factor + ROUNDER;
                code[v] = bad ? (I){0} : (I)rounded;
                meant = (bad ? (V){0} : rounded - ROUNDER) * unit;
            }
            row[v] -= meant;
        }
        FN(store_codes)(bits, w->codes + (j + at) * bits / 8, code, left);
        if (w->error_out) FN(store_out)(w->streams, w->error_out + j + at, row, left);
    }
    if (bits < 16) return !bad;
    int32_t any = 0;
    for (int k = 0; k < WIDTH; k++) any |= carried[k];
    return !any;
}

/* The values of a row that a worker sends, or the mean of those that a server has received, with the error. */
INLINE void FN(row_to_send)(int bits, int averages, const code_work *w, V *row, int64_t j, int n) {
    if (averages) {
        /* -0.0 is what leaves the first addend exactly as it is, negative zero included. */
        UNROLL for (int v = 0; v < VECTORS; v++) row[v] = FN(splat)(-0.0f);
        for (int i = 0; i < w->ranks; i++) {
            V part[VECTORS];
            FN(load_codes)(bits, part, w->received[i] + w->codes_at + j * bits / 8, n);
            const V scale = FN(splat)(bits == 16 ? 1.0f : read_float(w->received[i] + w->scales_at + j / GROUP * 4));
            UNROLL for (int v = 0; v < VECTORS; v++) row[v] += bits == 16 ? part[v] : part[v] * scale;
        }
        UNROLL for (int v = 0; v < VECTORS; v++) row[v] *= w->over_ranks;
    } else if (w->grad) {
        FN(load)(row, w->grad + j, n);
    } else {
        UNROLL for (int v = 0; v < VECTORS; v++) row[v] = (V){0};
    }
    if (w->error) FN(add_row)(row, w->error + j, n);
}

INLINE int FN(run_codes)(int bits, int averages, const call *args, const ocomm_block *blocks, int64_t count) {
    int finite = 1;
    for (int64_t k = 0; k < count; k++) {
        code_work w;
        prepare_codes(averages, args, blocks + k, &w);
        /* A few groups at a time, so that the processor need not wait for the largest element of each. */
        for (int64_t first = 0; first < w.length; first += TILE) {
            float c[TILE] __attribute__((aligned(64)));
            int32_t most[TILE / GROUP];
            const int n = (int)(w.length - first < TILE ? w.length - first : TILE);
            for (int from = 0; from < n; from += GROUP) {
                I largest = (I){0};
                for (int at = from; at < n && at < from + GROUP; at += ROW) {
                    const int64_t j = first + at;
                    V row[VECTORS];
                    if (!averages && w.grad) prefetch_row(w.grad, j + AHEAD(2));
                    if (w.error) prefetch_row(w.error, j + AHEAD(2));
                    if (n - at >= ROW)
                        FN(row_to_send)(bits, averages, &w, row, j, ROW);
                    else
                        FN(row_to_send)(bits, averages, &w, row, j, n - at);
                    UNROLL for (int v = 0; v < VECTORS; v++) largest = FN(larger)(largest, (I)row[v] & INT32_MAX);
                    FN(store)(c + at, row, ROW);
                }
                most[from / GROUP] = FN(largest_of)(largest);
            }
            for (int from = 0; from < n; from += GROUP) {
                if (n - from >= GROUP)
                    finite &= FN(send_codes)(bits, &w, c + from, most[from / GROUP], first + from, GROUP);
                else
                    finite &= FN(send_codes)(bits, &w, c + from, most[from / GROUP], first + from, n - from);
            }
        }
    }
    return finite;
}

TARGET static int FN(compress_codes)(const call *args, const ocomm_block *blocks, int64_t count) {
    if (args->bits == 8) return FN(run_codes)(8, 0, args, blocks, count);
    if (args->bits == 4) return FN(run_codes)(4, 0, args, blocks, count);
    return FN(run_codes)(16, 0, args, blocks, count);
}

TARGET static int FN(average_codes)(const call *args, const ocomm_block *blocks, int64_t count) {
    if (args->bits == 8) return FN(run_codes)(8, 1, args, blocks, count);
    if (args->bits == 4) return FN(run_codes)(4, 1, args, blocks, count);
    return FN(run_codes)(16, 1, args, blocks, count);
}

INLINE void FN(unpack_coded_row)(int bits, float *out, const uint8_t *codes, V scale, int n) {
    V row[VECTORS];
    FN(load_codes)(bits, row, codes, n);
    if (bits < 16) {
        UNROLL for (int v = 0; v < VECTORS; v++) row[v] *= scale;
    }
    FN(store)(out, row, n);
}

INLINE int FN(unpack_blocks)(int bits, const call *args, const ocomm_block *blocks, int64_t count) {
    for (int64_t k = 0; k < count; k++) {
        const ocomm_block *block = blocks + k;
        const uint8_t *codes = args->packed + block->bits, *scales = args->packed + block->scale;
        float *out = args->out + block->offset;
        const int64_t whole = block->length & -ROW;
        for (int64_t j = 0; j < block->length; j += ROW) {
            const V scale = FN(splat)(bits == 16 ? 1.0f : read_float(scales + j / GROUP * 4));
            if (j < whole)
                FN(unpack_coded_row)(bits, out + j, codes + j * bits / 8, scale, ROW);
            else
                FN(unpack_coded_row)(bits, out + j, codes + j * bits / 8, scale, (int)(block->length - j));
        }
    }
    return 1;
}

TARGET static int FN(unpack_codes)(const call *args, const ocomm_block *blocks, int64_t count) {
    if (args->bits == 8) return FN(unpack_blocks)(8, args, blocks, count);
    if (args->bits == 4) return FN(unpack_blocks)(4, args, blocks, count);
    return FN(unpack_blocks)(16, args, blocks, count);
}

#undef ROUNDER

#endif
