/* Adam's dense step, written once. kernels_body.h includes this file once per path; a path defines root(x), square roots
 * of a vector, beside what is named there. Every operation rounds as in ocomm/kernels/reference.py.
 */

#ifndef WITHOUT

INLINE void FN(step_row)(const call *args, int coupled, const ocomm_tensor *tensor, const float *gradient,
                         float *param, float *momentum, float *variance, int n) {
    V g[VECTORS], p[VECTORS], m[VECTORS], v[VECTORS];
    FN(load)(g, gradient, n);
    FN(load)(p, param, n);
    FN(load)(m, momentum, n);
    FN(load)(v, variance, n);
    UNROLL for (int k = 0; k < VECTORS; k++) {
        g[k] *= args->scale;
        if (coupled) g[k] += tensor->weight_decay * p[k];
        m[k] += args->rest1 * (g[k] - m[k]);
        v[k] = v[k] * (float)args->beta2 + args->rest2 * g[k] * g[k];
        p[k] = p[k] * tensor->decay - tensor->step_size * (m[k] / (FN(root)(v[k]) / args->root + args->eps));
    }
    FN(store)(param, p, n);
    FN(store)(momentum, m, n);
    FN(store)(variance, v, n);
}

INLINE void FN(step_block)(const call *args, int coupled, const ocomm_block *block) {
    const ocomm_tensor tensor = args->tensors[block->tensor];
    const float *gradient = args->gradients + block->owned;
    float *param = tensor.param + block->start;
    float *momentum = args->momentum + block->owned, *variance = args->variance + block->owned;
    const int64_t whole = block->length & -ROW;
    int64_t j = 0;
    for (; j < whole; j += ROW) {
        prefetch_row(gradient, j + AHEAD(4));
        prefetch_row(param, j + AHEAD(4));
        prefetch_row(momentum, j + AHEAD(4));
        prefetch_row(variance, j + AHEAD(4));
        FN(step_row)(args, coupled, &tensor, gradient + j, param + j, momentum + j, variance + j, ROW);
    }
    if (j < block->length)
        FN(step_row)(args, coupled, &tensor, gradient + j, param + j, momentum + j, variance + j, (int)(block->length - j));
}

TARGET static int FN(adam_step)(const call *of, const ocomm_block *blocks, int64_t count) {
    const call args = *of;
    for (int64_t k = 0; k < count; k++) {
        if (args.tensors[blocks[k].tensor].weight_decay != 0)
            FN(step_block)(&args, 1, blocks + k);
        else
            FN(step_block)(&args, 0, blocks + k);
    }
    return 1;
}

#endif
