/* The loops, written once. kernels.c includes this file once per path, after defining for that path
 *   WITHOUT            if the path has only the loops that arithmetic limits, and takes the others from another path
 *   FN(name)           the name of a function on this path
 *   TARGET             its target attribute
 *   WIDTH, V, VU, I    floats per vector; vector types: float, float at any address, int32
 *   VECTORS            vectors per row of 32 elements
 *   M                  answers to a question about each element of a vector; where it is I, all ones or all zeros
 *   word_of(yes)       one bit per element of a row, 1 where the answer is yes
 *   at_least(a, b), greater(a, b), lanes_of(w, v), select(which, yes, no)   where M is not I
 *   stream(to, x)      writes a vector past the caches, to an address that is a multiple of its size
 *   with_signs(s, w, v)  +s where the word's bit is 1, -s where 0, for vector v of the row
 *   toward(c, s)       s with the sign of c, where -0.0 counts as positive
 *   LOOKS_UP           1 if looked_up(row, table, words) exists: a row of sums of the first ranks by their signs
 * A row is 32 elements: one word of signs and one element for each of the 32 summation lanes. So every path adds the
 * same numbers in the same order, whatever its vector width.
 */

#define INLINE TARGET static inline __attribute__((always_inline))

INLINE V FN(splat)(float x) { return x - (V){0}; }

#ifndef M
#define M I
INLINE M FN(at_least)(V a, V b) { return a >= b; }
INLINE M FN(greater)(V a, V b) { return a > b; }
INLINE V FN(select)(M which, V yes, V no) { return (V)((which & (I)yes) | (~which & (I)no)); }

/* Yes where the word's bit is 1, for vector v of the row. */
INLINE M FN(lanes_of)(uint32_t word, int v) {
    const I bits = FN(lane_bits)(v);
    return (I)(((I){0} + (int32_t)word) & bits) == bits;
}
#endif

/* One bit per element of a row, 1 where it is >= 0. */
INLINE uint32_t FN(nonnegative)(const V *row) {
    M yes[VECTORS];
    UNROLL for (int v = 0; v < VECTORS; v++) yes[v] = FN(at_least)(row[v], (V){0});
    return FN(word_of)(yes);
}

/* n elements, the rest of the row zero. n is the constant 32 except in the last row of a block. */
INLINE void FN(load)(V *row, const float *from, int n) {
    if (n == ROW) {
        UNROLL for (int v = 0; v < VECTORS; v++) row[v] = *(const VU *)(from + v * WIDTH);
    } else {
        float padded[ROW];
        UNROLL for (int v = 0; v < VECTORS; v++) *(VU *)(padded + v * WIDTH) = (V){0};
        memcpy(padded, from, (size_t)n * sizeof(float));
        UNROLL for (int v = 0; v < VECTORS; v++) row[v] = *(const VU *)(padded + v * WIDTH);
    }
}

INLINE void FN(store)(float *to, const V *row, int n) {
    if (n == ROW) {
        UNROLL for (int v = 0; v < VECTORS; v++) *(VU *)(to + v * WIDTH) = row[v];
    } else {
        float padded[ROW];
        UNROLL for (int v = 0; v < VECTORS; v++) *(VU *)(padded + v * WIDTH) = row[v];
        memcpy(to, padded, (size_t)n * sizeof(float));
    }
}

/* As store; `streams` says whether past the caches, see streams_to. */
INLINE void FN(store_out)(int streams, float *to, const V *row, int n) {
    if (streams && n == ROW) {
        UNROLL for (int v = 0; v < VECTORS; v++) FN(stream)(to + v * WIDTH, row[v]);
    } else {
        FN(store)(to, row, n);
    }
}

/* Adds the signs of `group` ranks from `first` on, times a scale for each, to the sums of `rows` whole rows. */
INLINE void FN(add_ranks)(int start, int group, const uint8_t *const *received, int first, int64_t bits_at,
                          int64_t scale_at, const float *weights, const sums_table *table, int rows, float *tile) {
    const uint8_t *tabled[TABLED], *bits[TABLED];
    V scale[TABLED];
    if (start == FROM_TABLE) {
        UNROLL for (int i = 0; i < TABLED; i++) tabled[i] = received[i] + bits_at;
    }
    UNROLL for (int i = 0; i < group; i++) {
        bits[i] = received[first + i] + bits_at;
        scale[i] = FN(splat)(weights ? weights[first + i] : read_float(received[first + i] + scale_at));
    }
    for (int k = 0; k < rows; k++) {
        V row[VECTORS];
        if (start == FROM_TABLE) {
            uint32_t words[TABLED];
            UNROLL for (int i = 0; i < TABLED; i++) words[i] = load_bits(tabled[i] + k * (ROW / 8), ROW);
            FN(looked_up)(row, table, words);
        } else if (start == FROM_TILE) {
            FN(load)(row, tile + k * ROW, ROW);
        } else {
            /* -0.0 is what leaves the first addend exactly as it is, negative zero included. */
            UNROLL for (int v = 0; v < VECTORS; v++) row[v] = FN(splat)(-0.0f);
        }
        UNROLL for (int i = 0; i < group; i++) {
            const uint32_t word = load_bits(bits[i] + k * (ROW / 8), ROW);
            UNROLL for (int v = 0; v < VECTORS; v++) row[v] += FN(with_signs)(scale[i], word, v);
        }
        FN(store)(tile + k * ROW, row, ROW);
    }
}

/* Sums over ranks, in order, of what `rows` whole rows of their messages say: signs times weights, or times their own
 * scales where weights is NULL. The table is that of the first ranks. */
TARGET static void FN(sum_ranks)(const uint8_t *const *received, int ranks, int64_t bits_at, int64_t scale_at,
                                 const float *weights, const sums_table *table, int rows, float *tile) {
#define ADD(start, group) FN(add_ranks)(start, group, received, i, bits_at, scale_at, weights, table, rows, tile)
    int i = 0;
    if (LOOKS_UP && ranks >= TABLED) {
        i = TABLED;
        switch (ranks - i) {
        case 0: ADD(FROM_TABLE, 0); break;
        case 1: ADD(FROM_TABLE, 1); break;
        case 2: ADD(FROM_TABLE, 2); break;
        case 3: ADD(FROM_TABLE, 3); break;
        default: ADD(FROM_TABLE, 4); break;
        }
    } else {
        switch (ranks) {
        case 1: ADD(FROM_NOTHING, 1); break;
        case 2: ADD(FROM_NOTHING, 2); break;
        case 3: ADD(FROM_NOTHING, 3); break;
        default: ADD(FROM_NOTHING, 4); break;
        }
    }
    for (i += TABLED; i < ranks; i += TABLED) {
        switch (ranks - i) {
        case 1: ADD(FROM_TILE, 1); break;
        case 2: ADD(FROM_TILE, 2); break;
        case 3: ADD(FROM_TILE, 3); break;
        default: ADD(FROM_TILE, 4); break;
        }
    }
#undef ADD
}

/* The same of the last row of a block. */
INLINE void FN(sum_ranks_of_tail)(V *row, const uint8_t *const *received, int ranks, int64_t bits_at, int64_t scale_at,
                                  const float *weights, int n) {
    UNROLL for (int v = 0; v < VECTORS; v++) row[v] = FN(splat)(-0.0f);
    for (int i = 0; i < ranks; i++) {
        const V scale = FN(splat)(weights ? weights[i] : read_float(received[i] + scale_at));
        const uint32_t word = load_bits(received[i] + bits_at, n);
        UNROLL for (int v = 0; v < VECTORS; v++) row[v] += FN(with_signs)(scale, word, v);
    }
}

/* The mean over ranks of the row's decoded messages, before the owner's error. */
INLINE void FN(mean)(V *row, const work *w, const float *tile, int64_t j, int n) {
    if (n == ROW)
        FN(load)(row, tile + j % TILE, ROW);
    else
        FN(sum_ranks_of_tail)(row, w->received, w->ranks, w->bits_at + (j >> 3), w->scale_at, NULL, n);
    UNROLL for (int v = 0; v < VECTORS; v++) row[v] *= w->over_ranks;
}

/* The momentum this step sends, or in 0/1 Adam what its steps since the last sync add up to, over interval_root, before
 * the worker's error; `masked` as in first_pass. */
INLINE void FN(momentum)(enum content content, V *row, const work *w, int64_t j, int n, uint32_t masked) {
    const int usual = content == FROM_DENSE || content == FROM_BITS || content == FROM_GRADIENT;
    V gradient[VECTORS];
    if (usual || w->grad) {
        FN(load)(gradient, w->grad + j, n);
    } else {
        UNROLL for (int v = 0; v < VECTORS; v++) gradient[v] = (V){0};
    }
    if (!usual && w->weight_decay != 0) {
        V param[VECTORS];
        FN(load)(param, w->param + j, n);
        UNROLL for (int v = 0; v < VECTORS; v++) gradient[v] += w->weight_decay * param[v];
    }
    if (content == FROM_DENSE || content == UPDATE || content == FROM_GRADIENT || (!usual && w->momentum)) {
        FN(load)(row, w->momentum + j, n);
        UNROLL for (int v = 0; v < VECTORS; v++) row[v] *= w->beta1;
    } else if (content == FROM_BITS || w->previous) {
        const uint32_t word = load_bits(w->previous + (j >> 3), n);
        UNROLL for (int v = 0; v < VECTORS; v++) row[v] = FN(with_signs)(FN(splat)(w->decayed), word, v);
        if (__builtin_expect(masked != 0, 0)) {
            UNROLL for (int v = 0; v < VECTORS; v++) row[v] = FN(select)(FN(lanes_of)(masked, v), (V){0}, row[v]);
        }
    } else {
        UNROLL for (int v = 0; v < VECTORS; v++) row[v] = (V){0};
    }
    UNROLL for (int v = 0; v < VECTORS; v++) row[v] += w->one_minus_beta1 * gradient[v];
    if (content == UPDATE || content == FROM_GRADIENT) {
        V update[VECTORS];
        if (w->update) {
            FN(load)(update, w->update + j, n);
        } else {
            UNROLL for (int v = 0; v < VECTORS; v++) update[v] = (V){0};
        }
        UNROLL for (int v = 0; v < VECTORS; v++) row[v] = w->per_root * update[v] + w->share * row[v];
    }
}

/* Signs and magnitudes of one row of c = content + error, which waits in the first-level cache for second_pass. */
INLINE void FN(first_pass)(enum content content, int plain, int rms, work *w, const float *tile, int64_t j, int n,
                           V *sum) {
    /* Elements past the end of the block are treated as masked: they have no magnitude either. */
    const uint32_t masked = (!plain && w->mask ? load_bits(w->mask + (j >> 3), n) : 0) | (n < ROW ? ~0u << n : 0);
    V c[VECTORS], error[VECTORS], kept[VECTORS];
    FN(load)(error, w->error + j, n);
    if (content == VALUES)
        FN(load)(c, w->values + j, n);
    else if (content == MEAN)
        FN(mean)(c, w, tile, j, n);
    else
        FN(momentum)(content, c, w, j, n, masked);
    UNROLL for (int v = 0; v < VECTORS; v++) {
        c[v] += error[v];
        kept[v] = c[v];
    }
    store_bits(w->bits + (j >> 3), FN(nonnegative)(c) | masked, n);
    if (__builtin_expect(masked != 0, 0)) {
        w->masked += __builtin_popcount(n < ROW ? masked & ((1u << n) - 1) : masked);
        UNROLL for (int v = 0; v < VECTORS; v++) {
            const M lanes = FN(lanes_of)(masked, v);
            if (content == MEAN) kept[v] = FN(select)(lanes, error[v], c[v]);
            /* c - c is +0.0, or NaN if c is not finite: a bad gradient is noticed although its element is masked. */
            c[v] = FN(select)(lanes, c[v] - c[v], c[v]);
        }
    }
    FN(store)(w->c + j, kept, n);
    if (rms) {
        UNROLL for (int v = 0; v < VECTORS; v++) sum[v] += c[v] * c[v];
    } else {
        UNROLL for (int v = 0; v < VECTORS; v++) sum[v] += (V)((I)c[v] & INT32_MAX);
    }
}

/* What the row's receivers will not get stays in the error. */
INLINE void FN(second_pass)(int plain, const remainder *last, int64_t j, int n, V scale) {
    const uint32_t masked = !plain && last->mask ? load_bits(last->mask + (j >> 3), n) : 0;
    V c[VECTORS];
    FN(load)(c, last->c + j, n);
    if (__builtin_expect(masked == 0, 1)) {
        UNROLL for (int v = 0; v < VECTORS; v++) c[v] -= FN(toward)(c[v], scale);
    } else {
        UNROLL for (int v = 0; v < VECTORS; v++) {
            const V sent = c[v] - FN(toward)(c[v], scale);
            c[v] = FN(select)(FN(lanes_of)(masked, v), c[v], sent);
        }
    }
    FN(store_out)(last->streams, last->out + j, c, n);
}

INLINE float FN(scale_of)(const work *w, const V *sum) {
    V fold[VECTORS];
    UNROLL for (int v = 0; v < VECTORS; v++) fold[v] = sum[v];
    UNROLL for (int half = VECTORS / 2; half; half /= 2) {
        UNROLL for (int v = 0; v < half; v++) fold[v] += fold[v + half];
    }
    float lane[WIDTH];
    *(VU *)lane = fold[0];
    UNROLL for (int half = WIDTH / 2; half; half /= 2) {
        UNROLL for (int k = 0; k < half; k++) lane[k] += lane[k + half];
    }
    const int64_t elements = w->length - w->masked;
    const float mean = lane[0] * (elements ? (float)(1.0 / (double)elements) : 0.0f);
    return w->rms ? __builtin_sqrtf(mean) : mean;
}

INLINE void FN(finish)(const remainder *last, int64_t from) {
    const V scale = FN(splat)(last->scale);
    const int64_t whole = last->length & -ROW;
    int64_t j = from;
    for (; j < whole; j += ROW) FN(second_pass)(0, last, j, ROW, scale);
    if (j < last->length) FN(second_pass)(0, last, j, (int)(last->length - j), scale);
}

/* First pass of one block, second pass of the block before it. `plain` says that neither has anything masked, `rms`
 * which scale is wanted: both when this is compiled, so that the loop does not ask. */
INLINE void FN(rows_for)(enum content content, int plain, int rms, work *w, const remainder *last, V *sum) {
    sums_table table;
    float tile[TILE] __attribute__((aligned(64)));
    const int64_t whole = w->length & -ROW, ready = last->length & -ROW;
    if (content == MEAN && LOOKS_UP && w->ranks >= TABLED) {
        float scales[TABLED];
        for (int i = 0; i < TABLED; i++) scales[i] = read_float(w->received[i] + w->scale_at);
        fill_table(&table, scales);
    }
    const int64_t together = whole < ready ? whole : ready;
    const V scale = FN(splat)(last->scale);
#define BEFORE_ROW                                                                                                     \
    prefetch(content, w, j);                                                                                           \
    if (content == MEAN && j % TILE == 0)                                                                              \
        FN(sum_ranks)(w->received, w->ranks, w->bits_at + (j >> 3), w->scale_at, NULL, &table,                        \
                      (int)((whole - j < TILE ? whole - j : TILE) / ROW), tile);
    int64_t j = 0;
    for (; j < together; j += ROW) {
        BEFORE_ROW
        FN(second_pass)(plain, last, j, ROW, scale); /* before c of this row takes its place */
        FN(first_pass)(content, plain, rms, w, tile, j, ROW, sum);
    }
    FN(finish)(last, j);
    for (; j < whole; j += ROW) {
        BEFORE_ROW
        FN(first_pass)(content, 0, rms, w, tile, j, ROW, sum);
    }
    if (j < w->length) FN(first_pass)(content, 0, rms, w, tile, j, (int)(w->length - j), sum);
#undef BEFORE_ROW
}

INLINE void FN(rows)(enum content content, int plain, work *w, const remainder *last, V *sum) {
    if (w->rms)
        FN(rows_for)(content, plain, 1, w, last, sum);
    else
        FN(rows_for)(content, plain, 0, w, last, sum);
}

/* The scale of a block is known only after all of it was read. Instead of two passes, one bound by memory and one by
 * arithmetic, the second pass of a block runs together with the first pass of the next one. */
INLINE int FN(run)(enum content content, const call *args, const ocomm_block *blocks, int64_t count) {
    remainder last = {0};
    float waiting[WAITING] __attribute__((aligned(64)));
    int finite = 1;
    for (int64_t k = 0; k < count; k++) {
        const ocomm_block *block = blocks + k;
        /* The addresses of these two go to no real function: a compiler that had to assume that a store through a float
         * pointer changes them would load all of it again for every row. */
        work w;
        prepare(content, args, block, &w);
        w.c = w.streams && w.length <= WAITING ? waiting : w.out;
        V sum[VECTORS];
        UNROLL for (int v = 0; v < VECTORS; v++) sum[v] = (V){0};
        const int plain = !w.mask && !last.mask;
        const int bare = (content == MOMENTUM || content == UPDATE) && plain && w.grad && w.weight_decay == 0;
        if (bare && content == UPDATE)
            FN(rows)(FROM_GRADIENT, 1, &w, &last, sum);
        else if (bare && w.momentum)
            FN(rows)(FROM_DENSE, 1, &w, &last, sum);
        else if (bare && w.previous)
            FN(rows)(FROM_BITS, 1, &w, &last, sum);
        else if (content != MOMENTUM && content != UPDATE && plain)
            FN(rows)(content, 1, &w, &last, sum);
        else
            FN(rows)(content, 0, &w, &last, sum);
        last = (remainder){w.c, w.out, w.mask, w.length, FN(scale_of)(&w, sum), w.c != w.out};
        finite &= last.scale - last.scale == 0;
        memcpy(args->packed + block->scale, &last.scale, sizeof(float));
    }
    FN(finish)(&last, 0);
    return finite;
}

TARGET static int FN(average)(const call *args, const ocomm_block *blocks, int64_t count) {
    return FN(run)(MEAN, args, blocks, count);
}

#ifndef WITHOUT

TARGET static int FN(compress)(const call *args, const ocomm_block *blocks, int64_t count) {
    return FN(run)(VALUES, args, blocks, count);
}

TARGET static int FN(compress_momentum)(const call *args, const ocomm_block *blocks, int64_t count) {
    return FN(run)(MOMENTUM, args, blocks, count);
}

TARGET static int FN(compress_update)(const call *args, const ocomm_block *blocks, int64_t count) {
    return FN(run)(UPDATE, args, blocks, count);
}

INLINE void FN(unpack_row)(const uint8_t *bits, const uint8_t *mask, int64_t j, int n, V scale, float *out) {
    const uint32_t word = load_bits(bits + (j >> 3), n);
    const uint32_t masked = mask ? load_bits(mask + (j >> 3), n) : 0;
    V row[VECTORS];
    UNROLL for (int v = 0; v < VECTORS; v++) row[v] = FN(with_signs)(scale, word, v);
    if (__builtin_expect(masked != 0, 0)) {
        UNROLL for (int v = 0; v < VECTORS; v++) row[v] = FN(select)(FN(lanes_of)(masked, v), (V){0}, row[v]);
    }
    FN(store)(out + j, row, n);
}

TARGET static int FN(unpack)(const call *args, const ocomm_block *blocks, int64_t count) {
    for (int64_t k = 0; k < count; k++) {
        const ocomm_block *block = blocks + k;
        const V scale = FN(splat)(read_float(args->packed + block->scale));
        const uint8_t *bits = args->packed + block->bits, *mask = args->mask ? args->mask + (block->offset >> 3) : NULL;
        float *out = args->out + block->offset;
        const int64_t whole = block->length & -ROW;
        int64_t j = 0;
        for (; j < whole; j += ROW) FN(unpack_row)(bits, mask, j, ROW, scale, out);
        if (j < block->length) FN(unpack_row)(bits, mask, j, (int)(block->length - j), scale, out);
    }
    return 1;
}

INLINE void FN(apply_row)(float *param, float decay, const uint8_t *bits, const uint8_t *mask, const float *denominator,
                          int64_t j, int n, V step) {
    const uint32_t word = load_bits(bits + (j >> 3), n);
    const uint32_t masked = mask ? load_bits(mask + (j >> 3), n) : 0;
    V p[VECTORS], below[VECTORS];
    FN(load)(p, param + j, n);
    FN(load)(below, denominator + j, n);
    if (decay != 1) {
        UNROLL for (int v = 0; v < VECTORS; v++) p[v] *= decay;
    }
    if (__builtin_expect(masked == 0, 1)) {
        UNROLL for (int v = 0; v < VECTORS; v++) p[v] -= FN(with_signs)(step, word, v) / below[v];
    } else {
        UNROLL for (int v = 0; v < VECTORS; v++) {
            const V moved = p[v] - FN(with_signs)(step, word, v) / below[v];
            p[v] = FN(select)(FN(lanes_of)(masked, v), p[v], moved);
        }
    }
    FN(store)(param + j, p, n);
}

TARGET static int FN(apply)(const call *args, const ocomm_block *blocks, int64_t count) {
    for (int64_t k = 0; k < count; k++) {
        const ocomm_block *block = blocks + k;
        const ocomm_tensor *tensor = args->tensors + block->tensor;
        if (tensor->skip) continue;
        const V step = FN(splat)(tensor->step_size * read_float(args->packed + block->scale));
        const uint8_t *bits = args->packed + block->bits, *mask = args->mask ? args->mask + (block->offset >> 3) : NULL;
        float *param = tensor->param + block->start;
        const float *below = args->denominator + block->offset;
        const int64_t whole = block->length & -ROW;
        int64_t j = 0;
        for (; j < whole; j += ROW) {
            prefetch_row(param, j + AHEAD(2));
            prefetch_row(below, j + AHEAD(2));
            FN(apply_row)(param, tensor->decay, bits, mask, below, j, ROW, step);
        }
        if (j < block->length)
            FN(apply_row)(param, tensor->decay, bits, mask, below, j, (int)(block->length - j), step);
    }
    return 1;
}

/* One block of ocomm_local_step: its own part of every buffer. */
typedef struct {
    const float *grad, *denominator;
    float *param, *momentum, *update;
    const uint8_t *mask;
    float beta1, one_minus_beta1, weight_decay, step_size, decay;
} FN(local);

INLINE void FN(local_row)(const FN(local) *w, int64_t j, int n) {
    const uint32_t masked = w->mask ? load_bits(w->mask + (j >> 3), n) : 0;
    V gradient[VECTORS], p[VECTORS], m[VECTORS], below[VECTORS];
    FN(load)(p, w->param + j, n);
    FN(load)(m, w->momentum + j, n);
    FN(load)(below, w->denominator + j, n);
    if (w->grad) {
        FN(load)(gradient, w->grad + j, n);
    } else {
        UNROLL for (int v = 0; v < VECTORS; v++) gradient[v] = (V){0};
    }
    if (w->weight_decay != 0) {
        UNROLL for (int v = 0; v < VECTORS; v++) gradient[v] += w->weight_decay * p[v];
    }
    if (w->decay != 1) {
        UNROLL for (int v = 0; v < VECTORS; v++) p[v] *= w->decay;
    }
    UNROLL for (int v = 0; v < VECTORS; v++) {
        const V moved = w->beta1 * m[v] + w->one_minus_beta1 * gradient[v];
        const V stepped = p[v] - w->step_size * (moved / below[v]);
        gradient[v] = moved;
        if (__builtin_expect(masked != 0, 0)) {
            const M lanes = FN(lanes_of)(masked, v);
            p[v] = FN(select)(lanes, p[v], stepped);
            m[v] = FN(select)(lanes, m[v], moved);
        } else {
            p[v] = stepped;
            m[v] = moved;
        }
    }
    FN(store)(w->param + j, p, n);
    FN(store)(w->momentum + j, m, n);
    if (w->update) {
        FN(load)(p, w->update + j, n);
        UNROLL for (int v = 0; v < VECTORS; v++) p[v] += w->step_size * gradient[v];
        FN(store)(w->update + j, p, n);
    }
}

TARGET static int FN(local_step)(const call *args, const ocomm_block *blocks, int64_t count) {
    for (int64_t k = 0; k < count; k++) {
        const ocomm_block *block = blocks + k;
        const ocomm_tensor *tensor = args->tensors + block->tensor;
        if (tensor->skip) continue;
        const FN(local) w = {
            .grad = tensor->grad ? tensor->grad + block->start : NULL,
            .denominator = args->denominator + block->offset,
            .param = tensor->param + block->start,
            .momentum = args->momentum + block->offset,
            .update = args->update ? args->update + block->offset : NULL,
            .mask = mask_of(args->mask, block),
            .beta1 = tensor->beta1,
            .one_minus_beta1 = tensor->one_minus_beta1,
            .weight_decay = tensor->weight_decay,
            .step_size = tensor->step_size,
            .decay = tensor->decay,
        };
        const int64_t whole = block->length & -ROW;
        int64_t j = 0;
        for (; j < whole; j += ROW) {
            if (w.grad) prefetch_row(w.grad, j + AHEAD(5));
            prefetch_row(w.param, j + AHEAD(5));
            prefetch_row(w.momentum, j + AHEAD(5));
            prefetch_row(w.denominator, j + AHEAD(5));
            if (w.update) prefetch_row(w.update, j + AHEAD(5));
            FN(local_row)(&w, j, ROW);
        }
        if (j < block->length) FN(local_row)(&w, j, (int)(block->length - j));
    }
    return 1;
}

/* One block of ocomm_apply_update. */
typedef struct {
    const uint8_t *bits, *mask;
    const float *denominator;
    float *param, *momentum, *update, *synced;
    float decay;
} FN(synced);

INLINE void FN(synced_row)(const FN(synced) *w, int64_t j, int n, V sent, V average) {
    const uint32_t word = load_bits(w->bits + (j >> 3), n);
    const uint32_t masked = w->mask ? load_bits(w->mask + (j >> 3), n) : 0;
    V p[VECTORS], m[VECTORS], below[VECTORS];
    FN(load)(p, (w->synced ? w->synced : w->param) + j, n);
    FN(load)(below, w->denominator + j, n);
    if (w->decay != 1) {
        UNROLL for (int v = 0; v < VECTORS; v++) p[v] *= w->decay;
    }
    UNROLL for (int v = 0; v < VECTORS; v++) {
        const V moved = p[v] - FN(with_signs)(sent, word, v) / below[v];
        m[v] = FN(with_signs)(average, word, v);
        if (__builtin_expect(masked != 0, 0)) {
            const M lanes = FN(lanes_of)(masked, v);
            p[v] = FN(select)(lanes, p[v], moved);
            m[v] = FN(select)(lanes, (V){0}, m[v]);
        } else {
            p[v] = moved;
        }
    }
    FN(store)(w->param + j, p, n);
    FN(store)(w->momentum + j, m, n);
    if (w->synced) FN(store)(w->synced + j, p, n);
    if (w->update) {
        UNROLL for (int v = 0; v < VECTORS; v++) p[v] = (V){0};
        FN(store)(w->update + j, p, n);
    }
}

TARGET static int FN(apply_update)(const call *args, const ocomm_block *blocks, int64_t count) {
    for (int64_t k = 0; k < count; k++) {
        const ocomm_block *block = blocks + k;
        const ocomm_tensor *tensor = args->tensors + block->tensor;
        if (tensor->skip) continue;
        const float scale = read_float(args->packed + block->scale);
        const V sent = FN(splat)(tensor->interval_root * scale), average = FN(splat)(scale / tensor->interval_root);
        const FN(synced) w = {
            .bits = args->packed + block->bits,
            .mask = mask_of(args->mask, block),
            .denominator = args->denominator + block->offset,
            .param = tensor->param + block->start,
            .momentum = args->momentum + block->offset,
            .update = args->update ? args->update + block->offset : NULL,
            .synced = args->synced ? args->synced + block->offset : NULL,
            .decay = tensor->interval_decay,
        };
        const int64_t whole = block->length & -ROW;
        int64_t j = 0;
        for (; j < whole; j += ROW) {
            prefetch_row(w.param, j + AHEAD(5));
            prefetch_row(w.momentum, j + AHEAD(5));
            prefetch_row(w.denominator, j + AHEAD(5));
            if (w.synced) prefetch_row(w.synced, j + AHEAD(5));
            if (w.update) prefetch_row(w.update, j + AHEAD(5));
            FN(synced_row)(&w, j, ROW, sent, average);
        }
        if (j < block->length) FN(synced_row)(&w, j, (int)(block->length - j), sent, average);
    }
    return 1;
}

/* All ones in a lane that is not finite. */
INLINE void FN(finite_row)(const float *grad, int n, I *bad) {
    V row[VECTORS];
    FN(load)(row, grad, n);
    UNROLL for (int v = 0; v < VECTORS; v++) bad[v] |= (I)(row[v] - row[v] != (V){0});
}

TARGET static int FN(finite)(const call *args, const ocomm_block *blocks, int64_t count) {
    I bad[VECTORS];
    UNROLL for (int v = 0; v < VECTORS; v++) bad[v] = (I){0};
    for (int64_t k = 0; k < count; k++) {
        const ocomm_block *block = blocks + k;
        const float *grad = args->tensors[block->tensor].grad;
        if (!grad) continue;
        grad += block->start;
        const int64_t whole = block->length & -ROW;
        int64_t j = 0;
        for (; j < whole; j += ROW) {
            prefetch_row(grad, j + AHEAD(1));
            FN(finite_row)(grad + j, ROW, bad);
        }
        if (j < block->length) FN(finite_row)(grad + j, (int)(block->length - j), bad);
    }
    int32_t any = 0;
    UNROLL for (int v = 0; v < VECTORS; v++) {
        for (int k = 0; k < WIDTH; k++) any |= bad[v][k];
    }
    return !any;
}

/* Sum of squares in double: a vector of floats becomes two of doubles. */
TARGET static double FN(squares)(const float *x, int64_t numel) {
    typedef float half __attribute__((vector_size(WIDTH / 2 * sizeof(float)), aligned(4), may_alias));
    typedef double D __attribute__((vector_size(sizeof(V))));
    D lanes[2 * VECTORS];
    UNROLL for (int v = 0; v < 2 * VECTORS; v++) lanes[v] = (D){0};
    float padded[ROW] = {0};
    for (int64_t j = 0; j < numel; j += ROW) {
        const float *row = x + j;
        prefetch_row(x, j + AHEAD(1));
        if (j + ROW > numel) row = memcpy(padded, row, (size_t)(numel - j) * sizeof(float));
        UNROLL for (int v = 0; v < 2 * VECTORS; v++) {
            const D wide = __builtin_convertvector(*(const half *)(row + v * (WIDTH / 2)), D);
            lanes[v] += wide * wide;
        }
    }
    double sums[ROW];
    memcpy(sums, lanes, sizeof sums);
    for (int width = ROW / 2; width; width /= 2) {
        for (int k = 0; k < width; k++) sums[k] += sums[k + width];
    }
    return sums[0];
}

/* Adds elements with random signs to the sums of their buckets, a row to ROW adjacent ones. */
TARGET static void FN(sketch)(const float *x, int64_t numel, uint64_t key, float *sums) {
    for (int64_t j = 0; j < numel; j += ROW) {
        const uint64_t number = (uint64_t)(j / ROW), hash = mixed(mixed(key, number), number);
        float *to = sums + hash % SKETCH;
        V row[VECTORS];
        prefetch_row(x, j + AHEAD(1));
        FN(load)(row, x + j, numel - j < ROW ? (int)(numel - j) : ROW);
        UNROLL for (int v = 0; v < VECTORS; v++) {
            VU *sum = (VU *)(to + v * WIDTH);
            *sum += FN(select)(FN(lanes_of)((uint32_t)(hash >> 32), v), -row[v], row[v]);
        }
    }
}

/* Adds elements j to j + LANES of a piece, as far as it has them, to its lanes. */
INLINE void FN(add_lanes)(const ocomm_piece *piece, int64_t j, float *lanes) {
    const float *x = (const float *)(uintptr_t)piece->address + piece->first + j;
    if (j + LANES > piece->count) {
        for (int i = 0; j + i < piece->count; i++) lanes[i] += x[i];
        return;
    }
    for (int i = 0; i < LANES; i += ROW) {
        prefetch_row(x, i + AHEAD(ABREAST));
        UNROLL for (int v = i; v < i + ROW; v += WIDTH) *(VU *)(lanes + v) += *(const VU *)(x + v);
    }
}

TARGET static int FN(sum_floats)(const void *of, int64_t first, int64_t count) {
    const call *args = of;
    for (int64_t k = first; k < first + count; k += ABREAST) {
        const ocomm_piece *pieces = args->pieces + k;
        const int abreast = first + count - k < ABREAST ? (int)(first + count - k) : ABREAST;
        float lanes[ABREAST][LANES] = {{0}};
        int64_t most = 0;
        for (int p = 0; p < abreast; p++) most = pieces[p].count > most ? pieces[p].count : most;
        for (int64_t j = 0; j < most; j += LANES) {
            for (int p = 0; p < abreast; p++) FN(add_lanes)(pieces + p, j, lanes[p]);
        }
        for (int p = 0; p < abreast; p++) {
            for (int width = LANES / 2; width; width /= 2) {
                for (int i = 0; i < width; i++) lanes[p][i] += lanes[p][i + width];
            }
            args->sums[k + p] = lanes[p][0];
        }
    }
    return 1;
}

/* y += factor * x: also the benchmarks' measure of what the memory gives. */
TARGET static int FN(axpy)(const void *of, int64_t first, int64_t count) {
    const call *args = of;
    const float factor = args->factor, *x = args->x + first;
    float *y = args->y + first;
    int64_t j = 0;
    for (; j + ROW <= count; j += ROW) {
        UNROLL for (int v = 0; v < VECTORS; v++)
            *(VU *)(y + j + v * WIDTH) += factor * *(const VU *)(x + j + v * WIDTH);
    }
    for (; j < count; j++) y[j] += factor * x[j];
    return 1;
}

/* y += factor * x + factor * z: the same where three arrays are read and one is written. */
TARGET static int FN(triad)(const void *of, int64_t first, int64_t count) {
    const triad_call *args = of;
    const float factor = args->factor, *x = args->x + first, *z = args->z + first;
    float *y = args->y + first;
    int64_t j = 0;
    for (; j + ROW <= count; j += ROW) {
        UNROLL for (int v = 0; v < VECTORS; v++)
            *(VU *)(y + j + v * WIDTH) +=
                factor * *(const VU *)(x + j + v * WIDTH) + factor * *(const VU *)(z + j + v * WIDTH);
    }
    for (; j < count; j++) y[j] += factor * x[j] + factor * z[j];
    return 1;
}

#endif

#include "quantize_body.h"

#include "lamb_body.h"

#include "adam_body.h"

#include "codes_body.h"

#ifndef WITHOUT
static const loops FN(loops) = {
    FN(name),   FN(compress), FN(compress_momentum), FN(compress_update), FN(average), FN(unpack),
    FN(apply),  FN(local_step), FN(apply_update), FN(finite), FN(squares), FN(sketch), FN(sum_floats),
    FN(axpy), FN(triad),
    FN(compress_quantized), FN(average_quantized), FN(apply_signs), FN(soft_sign), FN(compress_signs),
    FN(adam_update), FN(lamb_update), FN(compress_codes), FN(average_codes), FN(unpack_codes), FN(adam_step),
};
#endif

#undef INLINE
#undef M
