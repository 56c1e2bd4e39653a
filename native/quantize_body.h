/* The loops of Birder, SoftSignSGD and Lion, written once. kernels_body.h includes this file once per path; a path defines
 * beside what is named there
 *   drawn(row, g, quad)       numbers of 24 random bits for the elements of eight counters, from `quad` on
 *   shifted(row, now, next, by)  elements by ... by + 31 of the row `now` followed by the first vector of `next`
 */

/* Remembers in `bad` what is not finite: x - x is 0, or NaN, and a NaN stays. */
INLINE void FN(note)(V *bad, V x) { *bad += x - x; }

INLINE int FN(all_finite)(const V *bad) {
    int finite = 1;
    for (int k = 0; k < WIDTH; k++) finite &= (*bad)[k] == 0;
    return finite;
}

/* One row of m and b, written beside the old ones, and of m / (b + eps). */
INLINE void FN(ratio)(const ratio_work *w, int64_t j, int n, V *row, V *bad) {
    V m[VECTORS], b[VECTORS], grad[VECTORS];
    FN(load)(m, w->momentum + j, n);
    FN(load)(b, w->magnitude + j, n);
    if (w->grad) {
        FN(load)(grad, w->grad + j, n);
    } else {
        UNROLL for (int v = 0; v < VECTORS; v++) grad[v] = (V){0};
    }
    UNROLL for (int v = 0; v < VECTORS; v++) {
        m[v] = w->beta1 * m[v] + w->one_minus_beta1 * grad[v];
        const V now = w->beta1 * b[v] + w->one_minus_beta1 * (V)((I)grad[v] & INT32_MAX);
        b[v] = w->amsgrad ? (V)FN(select)(b[v] > now, (I)b[v], (I)now) : now;
        row[v] = m[v] / (b[v] + w->eps);
        /* Elements past the end of the block are 0 / eps, and eps may be 0. */
        if (n < ROW) row[v] = (V)(FN(lanes_of)((1u << n) - 1, v) & (I)row[v]);
        FN(note)(bad, b[v]); /* its ratio would be 0; an m that is not finite shows in the ratio */
    }
    FN(store)(w->momentum_out + j, m, n);
    FN(store)(w->magnitude_out + j, b, n);
}

INLINE void FN(add_row)(V *row, const float *from, int n) {
    V x[VECTORS];
    FN(load)(x, from, n);
    UNROLL for (int v = 0; v < VECTORS; v++) row[v] += x[v];
}

/* A row of random signs whose mean is y where that is in [-1, 1]; what they leave of y is the new error. */
INLINE void FN(send)(const draws *d, int64_t j, int n, V *y, const V *number, V *bad) {
    I yes[VECTORS];
    UNROLL for (int v = 0; v < VECTORS; v++) {
        FN(note)(bad, y[v]);
        /* U < (y + 1) / 2, both sides times 2^24: exact, and one multiplication less. */
        yes[v] = number[v] < (y[v] + 1.0f) * 0x1p23f;
        y[v] -= (V)((I)FN(splat)(1.0f) ^ (~yes[v] & INT32_MIN));
    }
    store_bits(d->bits + (j >> 3), FN(word_of)(yes), n);
    if (d->error_out) FN(store)(d->error_out + j, y, n);
}

/* The random numbers of the next row. `ahead` are those of the aligned row which starts at d->quad, where elements are
 * not aligned to counters: every row then takes a few from the row after it. */
INLINE void FN(next_numbers)(int source, draws *d, V *row, V *ahead) {
    d->quad += ROW / 4;
    if (source == STEADY) {
        UNROLL for (int v = 0; v < VECTORS; v++) row[v] = FN(splat)(0x1p23f);
    } else if (source == ALIGNED) {
        FN(drawn)(row, &d->generator, d->quad - ROW / 4);
    } else {
        V next[VECTORS];
        FN(drawn)(next, &d->generator, d->quad);
        FN(shifted)(row, ahead, next, d->shift);
        UNROLL for (int v = 0; v < VECTORS; v++) ahead[v] = next[v];
    }
}

INLINE void FN(quantize_rows)(int source, const ratio_work *w, draws *d, V *bad) {
    const int64_t whole = w->length & -ROW;
    V ahead[VECTORS];
    if (source == SHIFTED) FN(drawn)(ahead, &d->generator, d->quad);
    for (int64_t j = 0; j < w->length; j += ROW) {
        const int n = (int)(w->length - j);
        V y[VECTORS], number[VECTORS];
        FN(next_numbers)(source, d, number, ahead);
        if (j < whole) {
            prefetch_row(w->momentum, j);
            prefetch_row(w->magnitude, j);
            prefetch_row(d->error, j);
            if (w->grad) prefetch_row(w->grad, j);
            FN(ratio)(w, j, ROW, y, bad);
            FN(add_row)(y, d->error + j, ROW);
            FN(send)(d, j, ROW, y, number, bad);
        } else {
            FN(ratio)(w, j, n, y, bad);
            FN(add_row)(y, d->error + j, n);
            FN(send)(d, j, n, y, number, bad);
        }
    }
}

TARGET static int FN(quantize)(const ratio_call *args) {
    V bad = {0};
    for (int64_t k = 0; k < args->count; k++) {
        const ocomm_block *block = args->blocks + k;
        ratio_work w;
        draws d;
        prepare_ratio(args, block, &w);
        prepare_draws(args, block, block->local, &d);
        switch (d.source) {
        case ALIGNED: FN(quantize_rows)(ALIGNED, &w, &d, &bad); break;
        case SHIFTED: FN(quantize_rows)(SHIFTED, &w, &d, &bad); break;
        case STEADY: FN(quantize_rows)(STEADY, &w, &d, &bad); break;
        }
    }
    return FN(all_finite)(&bad);
}

INLINE void FN(weighted_signs)(int from_table, const ratio_call *args, const sums_table *table, int64_t at, int64_t j,
                               int n, V *row) {
    int i = 0;
    if (from_table) {
        uint32_t words[TABLED];
        for (; i < TABLED; i++) words[i] = load_bits(args->received[i] + at + (j >> 3), n);
        FN(looked_up)(row, table, words);
    } else {
        /* As in mean(): what leaves the first addend exactly as it is. */
        UNROLL for (int v = 0; v < VECTORS; v++) row[v] = FN(splat)(-0.0f);
    }
    for (; i < args->ranks; i++) {
        const uint32_t word = load_bits(args->received[i] + at + (j >> 3), n);
        const V weight = FN(splat)(args->weights[i]);
        UNROLL for (int v = 0; v < VECTORS; v++) row[v] += FN(with_signs)(weight, word, v);
    }
}

INLINE void FN(average_rows)(int source, int from_table, const ratio_call *args, const sums_table *table,
                             const ocomm_block *block, draws *d, V *bad) {
    const int64_t length = block->length, whole = length & -ROW, at = block->bits - args->origin;
    V ahead[VECTORS];
    if (source == SHIFTED) FN(drawn)(ahead, &d->generator, d->quad);
    for (int64_t j = 0; j < length; j += ROW) {
        const int n = (int)(length - j);
        V a[VECTORS], number[VECTORS];
        FN(next_numbers)(source, d, number, ahead);
        if (j < whole) {
            FN(weighted_signs)(from_table, args, table, at, j, ROW, a);
            if (d->error) {
                prefetch_row(d->error, j);
                FN(add_row)(a, d->error + j, ROW);
            }
            FN(send)(d, j, ROW, a, number, bad);
        } else {
            FN(weighted_signs)(from_table, args, table, at, j, n, a);
            if (d->error) FN(add_row)(a, d->error + j, n);
            FN(send)(d, j, n, a, number, bad);
        }
    }
}

TARGET static int FN(quantized_average)(const ratio_call *args) {
    V bad = {0};
    sums_table table;
    const int from_table = LOOKS_UP && args->ranks >= TABLED;
    if (from_table) fill_table(&table, args->weights);
    for (int64_t k = 0; k < args->count; k++) {
        const ocomm_block *block = args->blocks + k;
        draws d;
        prepare_draws(args, block, block->owned, &d);
        switch (2 * d.source + from_table) {
        case 2 * ALIGNED: FN(average_rows)(ALIGNED, 0, args, &table, block, &d, &bad); break;
        case 2 * ALIGNED + 1: FN(average_rows)(ALIGNED, 1, args, &table, block, &d, &bad); break;
        case 2 * SHIFTED: FN(average_rows)(SHIFTED, 0, args, &table, block, &d, &bad); break;
        case 2 * SHIFTED + 1: FN(average_rows)(SHIFTED, 1, args, &table, block, &d, &bad); break;
        case 2 * STEADY: FN(average_rows)(STEADY, 0, args, &table, block, &d, &bad); break;
        case 2 * STEADY + 1: FN(average_rows)(STEADY, 1, args, &table, block, &d, &bad); break;
        }
    }
    return FN(all_finite)(&bad);
}

TARGET static int FN(soft_sign)(const ratio_call *args) {
    V bad = {0};
    for (int64_t k = 0; k < args->count; k++) {
        const ocomm_block *block = args->blocks + k;
        float *out = args->out + block->offset;
        ratio_work w;
        prepare_ratio(args, block, &w);
        const int64_t whole = w.length & -ROW;
        V row[VECTORS];
        int64_t j = 0;
        for (; j < whole; j += ROW) {
            prefetch_row(w.momentum, j);
            prefetch_row(w.magnitude, j);
            if (w.grad) prefetch_row(w.grad, j);
            FN(ratio)(&w, j, ROW, row, &bad);
            UNROLL for (int v = 0; v < VECTORS; v++) FN(note)(&bad, row[v]);
            FN(store)(out + j, row, ROW);
        }
        if (j < w.length) {
            FN(ratio)(&w, j, (int)(w.length - j), row, &bad);
            UNROLL for (int v = 0; v < VECTORS; v++) FN(note)(&bad, row[v]);
            FN(store)(out + j, row, (int)(w.length - j));
        }
    }
    return FN(all_finite)(&bad);
}

/* One row of Lion: the signs of c, and m beside the old one. */
INLINE void FN(compress_signs_row)(int zero_up, const ratio_work *w, int64_t j, int n, uint8_t *bits, V *bad) {
    V m[VECTORS], grad[VECTORS];
    I yes[VECTORS];
    FN(load)(m, w->momentum + j, n);
    if (w->grad) {
        FN(load)(grad, w->grad + j, n);
    } else {
        UNROLL for (int v = 0; v < VECTORS; v++) grad[v] = (V){0};
    }
    UNROLL for (int v = 0; v < VECTORS; v++) {
        const V c = w->beta1 * m[v] + w->one_minus_beta1 * grad[v];
        m[v] = w->beta2 * m[v] + w->one_minus_beta2 * grad[v];
        yes[v] = zero_up ? c >= (V){0} : c > (V){0};
        FN(note)(bad, c);
        FN(note)(bad, m[v]);
    }
    store_bits(bits + (j >> 3), FN(word_of)(yes), n);
    FN(store)(w->momentum_out + j, m, n);
}

TARGET static int FN(compress_signs)(const ratio_call *args) {
    V bad = {0};
    for (int64_t k = 0; k < args->count; k++) {
        const ocomm_block *block = args->blocks + k;
        uint8_t *bits = args->packed + block->bits;
        ratio_work w;
        prepare_momentum(args, block, &w);
        const int64_t whole = w.length & -ROW;
        int64_t j = 0;
        for (; j < whole; j += ROW) {
            prefetch_row(w.momentum, j);
            if (w.grad) prefetch_row(w.grad, j);
            FN(compress_signs_row)(args->zero_up, &w, j, ROW, bits, &bad);
        }
        if (j < w.length) FN(compress_signs_row)(args->zero_up, &w, j, (int)(w.length - j), bits, &bad);
    }
    return FN(all_finite)(&bad);
}

INLINE void FN(apply_signs_row)(float *param, float decay, const uint8_t *bits, int64_t j, int n, V step) {
    const uint32_t word = load_bits(bits + (j >> 3), n);
    V p[VECTORS];
    FN(load)(p, param + j, n);
    if (decay != 1) {
        UNROLL for (int v = 0; v < VECTORS; v++) p[v] *= decay;
    }
    UNROLL for (int v = 0; v < VECTORS; v++) p[v] -= FN(with_signs)(step, word, v);
    FN(store)(param + j, p, n);
}

TARGET static void FN(apply_signs)(const ocomm_block *blocks, int64_t count, const ocomm_tensor *tensors,
                                   const uint8_t *packed) {
    for (int64_t k = 0; k < count; k++) {
        const ocomm_block *block = blocks + k;
        const ocomm_tensor *tensor = tensors + block->tensor;
        if (tensor->skip) continue;
        const V step = FN(splat)(tensor->step_size);
        const uint8_t *bits = packed + block->bits;
        float *param = tensor->param + block->start;
        const int64_t whole = block->length & -ROW;
        int64_t j = 0;
        for (; j < whole; j += ROW) {
            prefetch_row(param, j);
            FN(apply_signs_row)(param, tensor->decay, bits, j, ROW, step);
        }
        if (j < block->length) FN(apply_signs_row)(param, tensor->decay, bits, j, (int)(block->length - j), step);
    }
}
