/* Fuzzes the loops that read what other ranks send: signs, scales, codes and dense values, of any bits.
 *
 * Blocks lie as in a segment's message: scales, then the elements. The input chooses the loop, the blocks and the ranks,
 * and then fills the messages; what it does not fill is zero. Messages are of the exact size, for AddressSanitizer.
 * Every path of this processor (avx512, avx2) must leave what the portable one leaves, bit for bit, where that says
 * that all is finite; a NaN may be any NaN.
 */
#include "input.h"
#include "ocomm.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MOST_RANKS 9
#define MOST_BLOCKS 3
#define GROUP 128 /* elements that share a scale in 8 or 4 bits */

static const int lengths[] = {1, 5, 16, 31, 32, 33, 64, 127, 128, 129, 500, 512, 513, 1000, 1025, 4100};
static const char *const paths[] = {"portable", "avx2", "avx512"};
enum { AVERAGE, UNPACK, APPLY, APPLY_UPDATE, COMPRESS, SCALES, QUANTIZED, SIGNS, CODES, UNPACK_CODES, REDUCE, SCATTER, LAMB, LOOPS };

/* Everything that a loop writes; each path has a copy of its own. */
enum { ERROR, PARAM, MOMENTUM, UPDATE, SYNCED, OUT, BUFFERS };
typedef struct {
    float *of[BUFFERS];
    uint8_t *packed;
    int finite;
} written;

static ocomm_block blocks[MOST_BLOCKS];
static uint8_t *messages[MOST_RANKS];
static int count, ranks;
static int64_t numel, nbytes, origin;

static void *memory(size_t size) {
    void *found = calloc(1, size ? size : 1);
    CHECK(found);
    return found;
}

/* A number that is often a usual one. */
static float number(uint32_t at) {
    const uint32_t x = at * 2654435761u;
    return (float)((int32_t)(x >> 8) - (1 << 23)) * (x & 64 ? 0x1p-20f : 0x1p-24f);
}

static int is_same(const float *a, const float *b) {
    for (int64_t i = 0; i < numel; i++)
        if (memcmp(a + i, b + i, sizeof *a) && !(isnan(a[i]) && isnan(b[i]))) return 0;
    return 1;
}

static void lay_out(int bits, int with_scales) {
    int64_t scales = 0, codes = 0;
    count = 1 + next_byte() % MOST_BLOCKS;
    numel = 0;
    for (int k = 0; k < count; k++) {
        const int length = lengths[next_byte() % (sizeof lengths / sizeof *lengths)];
        blocks[k] = (ocomm_block){.offset = numel, .start = numel, .owned = numel, .local = numel, .index = numel + next_byte() % 4,
                                  .length = length, .scale = with_scales ? scales : -1};
        scales += !with_scales ? 0 : bits == 1 ? 4 : 4 * ((length + GROUP - 1) / GROUP);
        numel += (length + 15) / 16 * 16;
    }
    for (int k = 0; k < count; k++) {
        blocks[k].bits = scales + codes;
        codes += (blocks[k].length * (int64_t)bits + 7) / 8;
    }
    /* In the packed buffer this message lies behind others. */
    origin = 8 * (next_byte() % 3);
    for (int k = 0; k < count; k++) {
        blocks[k].bits += origin;
        if (with_scales) blocks[k].scale += origin;
    }
    nbytes = scales + codes;
}

static void fill_messages(void) {
    for (int r = 0; r < ranks; r++) {
        messages[r] = memory((size_t)nbytes);
        for (int64_t i = 0; i < nbytes && input_left; i++) messages[r][i] = next_byte();
    }
}

static void run(int loop, int bits, int option, written *w) {
    uint8_t *mask = option & 1 ? memory((size_t)numel / 8) : NULL;
    for (int64_t i = 0; mask && i < numel / 8; i++) mask[i] = (uint8_t)(i * 37 & (option >> 1));
    float *denominator = memory((size_t)numel * sizeof(float)), *value = memory((size_t)numel * sizeof(float));
    for (int64_t i = 0; i < numel; i++) denominator[i] = 0.5f + fabsf(number((uint32_t)i)), value[i] = number((uint32_t)i + 99);
    ocomm_tensor tensor = {.grad = value, .param = w->of[PARAM], .beta1 = 0.9f, .one_minus_beta1 = 0.1f, .weight_decay = 0.01f,
                           .step_size = 0.003f, .decay = 0.999f, .interval_root = 0.2f, .interval_decay = 0.99f};
    const float weights[MOST_RANKS] = {1, 0.5f, 0.25f, 1, 2, 1, 1, 3, 1};
    const ocomm_noise noise = {.seed = 42, .step = 3, .stream = 1, .steady = option >> 2 & 1};
    const uint8_t *const *received = (const uint8_t *const *)messages;
    /* What lies in the packed buffer, `origin` bytes further on. */
    uint8_t *gathered = memory((size_t)(origin + nbytes));
    memcpy(gathered + origin, messages[0], (size_t)nbytes);
    float *error = option & 8 ? NULL : w->of[ERROR];
    switch (loop) {
    case AVERAGE:
        w->finite = ocomm_average(NULL, blocks, count, received, ranks, origin, w->of[ERROR], w->of[OUT], mask, option >> 4 & 1, w->packed);
        break;
    case UNPACK:
        ocomm_unpack(NULL, blocks, count, gathered, mask, w->of[OUT]);
        break;
    case APPLY:
        ocomm_apply(NULL, blocks, count, &tensor, gathered, denominator, mask);
        break;
    case APPLY_UPDATE:
        ocomm_apply_update(NULL, blocks, count, &tensor, gathered, denominator, mask, w->of[MOMENTUM],
                           option & 8 ? NULL : w->of[UPDATE], option & 16 ? NULL : w->of[SYNCED]);
        break;
    case COMPRESS:
        w->finite = ocomm_compress_momentum(NULL, blocks, count, &tensor, gathered, w->of[ERROR], w->of[OUT], mask, option >> 4 & 1, w->packed);
        break;
    case SCALES:
        w->finite = ocomm_finite_scales(NULL, blocks, count, gathered);
        break;
    case QUANTIZED:
        w->finite = ocomm_average_quantized(NULL, blocks, count, received, ranks, origin, weights, error, error ? w->of[OUT] : NULL, &noise, w->packed);
        break;
    case SIGNS:
        ocomm_apply_signs(NULL, blocks, count, &tensor, gathered);
        break;
    case CODES:
        w->finite = ocomm_average_codes(NULL, blocks, count, received, ranks, origin, error, error ? w->of[OUT] : NULL, bits, w->packed);
        break;
    case UNPACK_CODES:
        ocomm_unpack_codes(NULL, blocks, count, gathered, bits, w->of[OUT]);
        break;
    case REDUCE: {
        static const double factors[] = {1, 0.5, -3.7, 0x1p70};
        w->finite = ocomm_reduce(NULL, option % 11, option / 11 % 7, received, ranks, factors[bits % 4], factors[bits / 4 % 4], w->packed, nbytes / 8 * 8);
        break;
    }
    case SCATTER: {
        const ocomm_run run_of_all = {.start = 0, .length = nbytes / 4, .position = 0};
        tensor.grad = w->of[OUT];
        ocomm_scatter(NULL, &run_of_all, 1, &tensor, messages[0]);
        break;
    }
    case LAMB: {
        const float floors[MOST_BLOCKS] = {0, 0.1f, 1};
        float largest[MOST_BLOCKS];
        ocomm_lamb_update(NULL, blocks, count, gathered, option & 8 ? gathered : NULL, value, mask, floors, denominator, w->of[MOMENTUM], w->of[UPDATE], largest, 0.9, 0.999, 1e-6f, 4);
        break;
    }
    }
    free(mask), free(denominator), free(value), free(gathered);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    begin_input(data, size);
    const int loop = next_byte() % LOOPS, option = next_byte();
    ranks = 1 + next_byte() % MOST_RANKS;
    int bits = 1;
    if (loop == CODES || loop == UNPACK_CODES) bits = 4 << next_byte() % 3;
    if (loop == REDUCE) bits = next_byte();
    if (loop == SCATTER) lay_out(32, 0), origin = 0;
    else lay_out(loop == REDUCE ? 16 : bits, loop != QUANTIZED && loop != SIGNS && loop != REDUCE && bits != 16);
    fill_messages();

    written all[3];
    for (int p = 0; p < 3; p++) {
        written *w = &all[p];
        *w = (written){.finite = 1, .packed = memory((size_t)(origin + nbytes))};
        for (int b = 0; b < BUFFERS; b++) {
            w->of[b] = memory((size_t)numel * sizeof(float));
            for (int64_t i = 0; i < numel; i++) w->of[b][i] = b == OUT ? 0 : number((uint32_t)(i + 1000 * b));
        }
        if (ocomm_select_path(paths[p]) < 0) continue;
        run(loop, bits, option, w);
        CHECK(w->finite == all[0].finite);
        if (!w->finite) continue;
        CHECK(loop == REDUCE || !memcmp(w->packed, all[0].packed, (size_t)(origin + nbytes)));
        for (int b = 0; b < BUFFERS; b++) CHECK(is_same(w->of[b], all[0].of[b]));
    }
    for (int p = 0; p < 3; p++) {
        free(all[p].packed);
        for (int b = 0; b < BUFFERS; b++) free(all[p].of[b]);
    }
    for (int r = 0; r < ranks; r++) free(messages[r]);
    return 0;
}
