/* The loops of Birder, SoftSignSGD and Lion, written once. kernels_body.h includes this file once per path; a path
 * defines beside what is named there
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
        b[v] = w->amsgrad ? FN(select)(FN(greater)(b[v], now), b[v], now) : now;
        row[v] = m[v] / (b[v] + w->eps);
        /* Elements past the end of the block are 0 / eps, and eps may be 0. */
        if (n < ROW) row[v] = FN(select)(FN(lanes_of)((1u << n) - 1, v), row[v], (V){0});
        FN(note)(bad, b[v]); /* its ratio would be 0; an m that is not finite shows in the ratio */
    }
    FN(store_out)(w->momentum_streams, w->momentum_out + j, m, n);
    FN(store_out)(w->magnitude_streams, w->magnitude_out + j, b, n);
}

INLINE void FN(add_row)(V *row, const float *from, int n) {
    V x[VECTORS];
    FN(load)(x, from, n);
    UNROLL for (int v = 0; v < VECTORS; v++) row[v] += x[v];
}

/* A row of random signs whose mean is y where that is in [-1, 1]; what they leave of y is the new error. */
INLINE void FN(send)(const draws *d, int64_t j, int n, V *y, const V *number, V *bad) {
    M yes[VECTORS];
    UNROLL for (int v = 0; v < VECTORS; v++) {
        FN(note)(bad, y[v]);
        /* U < (y + 1) / 2, both sides times 2^24: exact, and one multiplication less. */
        yes[v] = FN(greater)((y[v] + 1.0f) * 0x1p23f, number[v]);
        y[v] -= FN(select)(yes[v], FN(splat)(1.0f), FN(splat)(-1.0f));
    }
    store_bits(d->bits + (j >> 3), FN(word_of)(yes), n);
    if (d->error_out) FN(store_out)(d->streams, d->error_out + j, y, n);
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
            prefetch_row(w->momentum, j + AHEAD(4));
            prefetch_row(w->magnitude, j + AHEAD(4));
            prefetch_row(d->error, j + AHEAD(4));
            if (w->grad) prefetch_row(w->grad, j + AHEAD(4));
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

TARGET static int FN(compress_quantized)(const call *args, const ocomm_block *blocks, int64_t count) {
    V bad = {0};
    for (int64_t k = 0; k < count; k++) {
        const ocomm_block *block = blocks + k;
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

INLINE void FN(average_rows)(int source, const call *args, const sums_table *table, const ocomm_block *block,
                             draws *d, V *bad) {
    const int64_t length = block->length, whole = length & -ROW, at = block->bits - args->origin;
    float tile[TILE] __attribute__((aligned(64)));
    V ahead[VECTORS];
    if (source == SHIFTED) FN(drawn)(ahead, &d->generator, d->quad);
    V a[VECTORS], number[VECTORS];
    int64_t j = 0;
    while (j < whole) {
        const int64_t end = whole - j < TILE ? whole : j + TILE;
        const float *sums = tile - j;
        FN(sum_ranks)(args->received, args->ranks, at + (j >> 3), 0, args->weights, table, (int)((end - j) / ROW), tile);
        for (; j < end; j += ROW) {
            FN(next_numbers)(source, d, number, ahead);
            FN(load)(a, sums + j, ROW);
            if (d->error) {
                prefetch_row(d->error, j + AHEAD(1));
                FN(add_row)(a, d->error + j, ROW);
            }
            FN(send)(d, j, ROW, a, number, bad);
        }
    }
    if (j < length) {
        const int n = (int)(length - j);
        FN(next_numbers)(source, d, number, ahead);
        FN(sum_ranks_of_tail)(a, args->received, args->ranks, at + (j >> 3), 0, args->weights, n);
        if (d->error) FN(add_row)(a, d->error + j, n);
        FN(send)(d, j, n, a, number, bad);
    }
}

TARGET static int FN(average_quantized)(const call *args, const ocomm_block *blocks, int64_t count) {
    V bad = {0};
    sums_table table;
    if (LOOKS_UP && args->ranks >= TABLED) fill_table(&table, args->weights);
    for (int64_t k = 0; k < count; k++) {
        const ocomm_block *block = blocks + k;
        draws d;
        prepare_draws(args, block, block->owned, &d);
        switch (d.source) {
        case ALIGNED: FN(average_rows)(ALIGNED, args, &table, block, &d, &bad); break;
        case SHIFTED: FN(average_rows)(SHIFTED, args, &table, block, &d, &bad); break;
        case STEADY: FN(average_rows)(STEADY, args, &table, block, &d, &bad); break;
        }
    }
    return FN(all_finite)(&bad);
}

#ifndef WITHOUT

TARGET static int FN(soft_sign)(const call *args, const ocomm_block *blocks, int64_t count) {
    V bad = {0};
    for (int64_t k = 0; k < count; k++) {
        const ocomm_block *block = blocks + k;
        float *out = args->out + block->offset;
        ratio_work w;
        prepare_ratio(args, block, &w);
        const int64_t whole = w.length & -ROW;
        V row[VECTORS];
        int64_t j = 0;
        for (; j < whole; j += ROW) {
            prefetch_row(w.momentum, j + AHEAD(3));
            prefetch_row(w.magnitude, j + AHEAD(3));
            if (w.grad) prefetch_row(w.grad, j + AHEAD(3));
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
    M yes[VECTORS];
    FN(load)(m, w->momentum + j, n);
    if (w->grad) {
        FN(load)(grad, w->grad + j, n);
    } else {
        UNROLL for (int v = 0; v < VECTORS; v++) grad[v] = (V){0};
    }
    UNROLL for (int v = 0; v < VECTORS; v++) {
        const V c = w->beta1 * m[v] + w->one_minus_beta1 * grad[v];
        m[v] = w->beta2 * m[v] + w->one_minus_beta2 * grad[v];
        yes[v] = zero_up ? FN(at_least)(c, (V){0}) : FN(greater)(c, (V){0});
        FN(note)(bad, c);
        FN(note)(bad, m[v]);
    }
    store_bits(bits + (j >> 3), FN(word_of)(yes), n);
    FN(store_out)(w->momentum_streams, w->momentum_out + j, m, n);
}

TARGET static int FN(compress_signs)(const call *args, const ocomm_block *blocks, int64_t count) {
    V bad = {0};
    for (int64_t k = 0; k < count; k++) {
        const ocomm_block *block = blocks + k;
        uint8_t *bits = args->packed + block->bits;
        ratio_work w;
        prepare_momentum(args, block, &w);
        const int64_t whole = w.length & -ROW;
        int64_t j = 0;
        for (; j < whole; j += ROW) {
            prefetch_row(w.momentum, j + AHEAD(2));
            if (w.grad) prefetch_row(w.grad, j + AHEAD(2));
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

TARGET static int FN(apply_signs)(const call *args, const ocomm_block *blocks, int64_t count) {
    for (int64_t k = 0; k < count; k++) {
        const ocomm_block *block = blocks + k;
        const ocomm_tensor *tensor = args->tensors + block->tensor;
        if (tensor->skip) continue;
        const V step = FN(splat)(tensor->step_size);
        const uint8_t *bits = args->packed + block->bits;
        float *param = tensor->param + block->start;
        const int64_t whole = block->length & -ROW;
        int64_t j = 0;
        for (; j < whole; j += ROW) {
            prefetch_row(param, j + AHEAD(1));
            FN(apply_signs_row)(param, tensor->decay, bits, j, ROW, step);
        }
        if (j < block->length) FN(apply_signs_row)(param, tensor->decay, bits, j, (int)(block->length - j), step);
    }
    return 1;
}

#endif
