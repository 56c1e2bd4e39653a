/* The loops of 1-bit LAMB, written once. kernels_body.h includes this file once per path; a path defines beside what is
 * named there
 *   root(x)            square roots of a vector
 */

#ifndef WITHOUT

INLINE void FN(adam_row)(const call *args, const lamb_factors *f, int64_t j, int n) {
    V g[VECTORS], m[VECTORS], v[VECTORS];
    FN(load)(g, args->gradient + j, n);
    FN(load)(m, args->momentum + j, n);
    FN(load)(v, args->variance + j, n);
    UNROLL for (int k = 0; k < VECTORS; k++) {
        m[k] = f->beta1 * m[k] + f->one_minus_beta1 * g[k];
        v[k] = f->beta2 * v[k] + f->one_minus_beta2 * (g[k] * g[k]);
        g[k] = f->m_correction * m[k] / (FN(root)(v[k] * f->v_correction) + f->eps);
    }
    FN(store)(args->momentum + j, m, n);
    FN(store)(args->variance + j, v, n);
    FN(store)(args->update + j, g, n);
}

TARGET static int FN(adam_update)(const void *of, int64_t first, int64_t count) {
    const call *args = of;
    const lamb_factors f = factors_of(args);
    const int64_t end = first + count, whole = first + (count & -ROW);
    int64_t j = first;
    for (; j < whole; j += ROW) {
        prefetch_row(args->gradient, j + AHEAD(4));
        prefetch_row(args->momentum, j + AHEAD(4));
        prefetch_row(args->variance, j + AHEAD(4));
        FN(adam_row)(args, &f, j, ROW);
    }
    if (j < end) FN(adam_row)(args, &f, j, (int)(end - j));
    return 1;
}

#endif

/* One block of ocomm_lamb_update. */
typedef struct {
    const uint8_t *bits, *previous_bits, *mask;
    const float *previous, *denominator;
    float *fresh, *update;
    V scale, previous_scale, floor;
} FN(lamb);

INLINE void FN(lamb_row)(const lamb_factors *f, const FN(lamb) *w, int64_t j, int n, V *largest) {
    const uint32_t word = load_bits(w->bits + (j >> 3), n);
    const uint32_t previous_word = w->previous ? 0 : load_bits(w->previous_bits + (j >> 3), n);
    /* Elements past the end of the block count as masked, because they would divide 0 by 0. */
    const uint32_t inside = n == ROW ? ~0u : (1u << n) - 1;
    const uint32_t counted = w->mask ? inside & ~load_bits(w->mask + (j >> 3), n) : inside;
    V previous[VECTORS], below[VECTORS], fresh[VECTORS], update[VECTORS];
    if (w->previous) {
        FN(load)(previous, w->previous + j, n);
    } else {
        UNROLL for (int v = 0; v < VECTORS; v++)
            previous[v] = FN(select)(FN(lanes_of)(counted, v), FN(with_signs)(w->previous_scale, previous_word, v), (V){0});
    }
    FN(load)(below, w->denominator + j, n);
    FN(load)(fresh, w->fresh + j, n);
    UNROLL for (int v = 0; v < VECTORS; v++) {
        const M lanes = FN(lanes_of)(counted, v);
        const V m = FN(select)(lanes, FN(with_signs)(w->scale, word, v), (V){0});
        const V g = (m - f->beta1 * previous[v]) * f->rebuild;
        fresh[v] = f->beta2 * fresh[v] + f->one_minus_beta2 * (g * g);
        update[v] = FN(select)(lanes, f->m_correction * m / below[v], (V){0});
        const V now = FN(root)(fresh[v] * f->v_correction);
        const V ratio = below[v] / (FN(select)(FN(greater)(w->floor, now), w->floor, now) + f->eps);
        *largest = FN(select)(lanes, FN(select)(FN(greater)(ratio, *largest), ratio, *largest), *largest);
    }
    FN(store)(w->fresh + j, fresh, n);
    FN(store)(w->update + j, update, n);
}

TARGET static int FN(lamb_update)(const call *args, const ocomm_block *blocks, int64_t count) {
    const lamb_factors f = factors_of(args);
    for (int64_t k = 0; k < count; k++) {
        const ocomm_block *block = blocks + k;
        const int64_t number = block - args->blocks;
        const FN(lamb) w = {
            .bits = args->packed + block->bits,
            .previous_bits = args->previous ? args->previous + block->bits : NULL,
            .mask = mask_of(args->mask, block),
            .previous = args->previous ? NULL : args->dense + block->start,
            .denominator = args->denominator + block->offset,
            .fresh = args->fresh + block->offset,
            .update = args->update + block->start,
            .scale = FN(splat)(read_float(args->packed + block->scale)),
            .previous_scale = FN(splat)(args->previous ? read_float(args->previous + block->scale) : 0),
            .floor = FN(splat)(args->floors[number]),
        };
        const int64_t whole = block->length & -ROW;
        V largest = {0};
        int64_t j = 0;
        for (; j < whole; j += ROW) {
            prefetch_row(w.denominator, j + AHEAD(3));
            prefetch_row(w.fresh, j + AHEAD(3));
            FN(lamb_row)(&f, &w, j, ROW, &largest);
        }
        if (j < block->length) FN(lamb_row)(&f, &w, j, (int)(block->length - j), &largest);
        float most = 0;
        for (int lane = 0; lane < WIDTH; lane++) most = largest[lane] > most ? largest[lane] : most;
        args->largest[number] = most;
    }
    return 1;
}
