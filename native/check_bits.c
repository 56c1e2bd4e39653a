/* Prints a checksum of what every loop gives on fixed pseudo-random input: the same on every machine. */
#include "ocomm.h"

#include <stdio.h>
#include <string.h>

#define BLOCKS 9
#define STRIDE 1024
#define RANKS 5
#define MESSAGE (BLOCKS * (4 + STRIDE / 8))

static uint32_t state = 1;

static uint32_t drawn(void) {
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}

static void fill(float *x, int n) {
    for (int k = 0; k < n; k++) x[k] = drawn() % 16 ? ((float)drawn() - 8388608.0f) * 0x1p-22f : 0.0f;
}

static void print(const char *what, int finite, const void *data, int64_t nbytes) {
    printf("%s %d %016llx\n", what, finite, (unsigned long long)ocomm_checksum(data, nbytes, -1));
}

int main(void) {
    static float values[BLOCKS * STRIDE], error[BLOCKS * STRIDE], momentum[BLOCKS * STRIDE], param[BLOCKS * STRIDE];
    static float denominator[BLOCKS * STRIDE], update[BLOCKS * STRIDE], synced[BLOCKS * STRIDE], out[BLOCKS * STRIDE];
    static uint8_t mask[BLOCKS * STRIDE / 8], packed[MESSAGE], messages[RANKS][MESSAGE];
    static const int lengths[BLOCKS] = {1024, 1000, 1024, 31, 1, 33, 64, 777, 1024};
    ocomm_block blocks[BLOCKS];
    for (int k = 0; k < BLOCKS; k++) {
        const int64_t at = (int64_t)k * STRIDE, scale = (int64_t)k * (4 + STRIDE / 8);
        blocks[k] = (ocomm_block){at, at, at, at, scale + 4, scale, at + k, lengths[k], 0};
    }
    fill(values, BLOCKS * STRIDE);
    fill(error, BLOCKS * STRIDE);
    fill(momentum, BLOCKS * STRIDE);
    fill(param, BLOCKS * STRIDE);
    fill(update, BLOCKS * STRIDE);
    fill(synced, BLOCKS * STRIDE);
    for (int k = 0; k < BLOCKS * STRIDE; k++) denominator[k] = 0.1f + values[k] * values[k];
    for (int i = 0; i < RANKS; i++) {
        for (int k = 0; k < MESSAGE; k++) messages[i][k] = (uint8_t)drawn();
        for (int k = 0; k < BLOCKS; k++) {
            const float scale = (float)drawn() * 0x1p-24f;
            memcpy(messages[i] + blocks[k].scale, &scale, sizeof scale);
        }
    }
    for (int round = 0; round < 4; round++) {
        const int rms = round & 1;
        const uint8_t *hidden = round & 2 ? mask : NULL;
        for (unsigned k = 0; hidden && k < sizeof mask; k++) mask[k] = drawn() % 4 ? 0 : (uint8_t)drawn();
        int finite = ocomm_compress(NULL, blocks, BLOCKS, values, error, out, hidden, rms, packed);
        print("compress", finite, out, sizeof out);
        print("packed", finite, packed, sizeof packed);
        for (int kind = 0; kind < 3; kind++) {
            ocomm_tensor tensor = {values, param, kind ? NULL : momentum, 0.9f, 0.1f, kind == 2 ? 0.01f : 0.0f, 1e-3f,
                                   0.99f,  0.1f,  0.98f, 0, 0};
            finite =
                ocomm_compress_momentum(NULL, blocks, BLOCKS, &tensor, messages[0], error, out, hidden, rms, packed);
            print("momentum", finite, out, sizeof out);
            print("packed", finite, packed, sizeof packed);
            ocomm_apply(NULL, blocks, BLOCKS, &tensor, packed, denominator, hidden);
            print("apply", 1, param, sizeof param);
        }
        for (int kind = 0; kind < 3; kind++) {
            ocomm_tensor tensor = {values, param, NULL, 0.9f, 0.1f, kind == 2 ? 0.01f : 0.0f, 1e-3f,
                                   0.99f,  0.1f,  0.98f, 0, 0};
            float *sum = kind ? update : NULL, *last = kind ? synced : NULL;
            finite =
                ocomm_compress_update(NULL, blocks, BLOCKS, &tensor, momentum, sum, error, out, hidden, rms, packed);
            print("update", finite, out, sizeof out);
            print("packed", finite, packed, sizeof packed);
            ocomm_local_step(NULL, blocks, BLOCKS, &tensor, momentum, sum, denominator, hidden);
            print("local", ocomm_finite(NULL, blocks, BLOCKS, &tensor), momentum, sizeof momentum);
            ocomm_apply_update(NULL, blocks, BLOCKS, &tensor, packed, denominator, hidden, momentum, NULL, last);
            print("synced", 1, param, sizeof param);
        }
        for (int ranks = 1; ranks <= RANKS; ranks++) {
            const uint8_t *received[RANKS];
            for (int i = 0; i < ranks; i++) received[i] = messages[i];
            finite = ocomm_average(NULL, blocks, BLOCKS, received, ranks, 0, error, out, hidden, rms, packed);
            print("average", finite, out, sizeof out);
            print("packed", finite, packed, sizeof packed);
        }
        ocomm_unpack(NULL, blocks, BLOCKS, packed, hidden, out);
        print("unpack", 1, out, sizeof out);
    }
    const ocomm_noise noise = {0x0123456789ABCDEF, 7, 3, 0};
    const float weights[RANKS] = {0.3f, 0.1f, 0.2f, 0.3f, 0.1f};
    for (int amsgrad = 0; amsgrad < 2; amsgrad++) {
        ocomm_tensor tensor = {values, param, NULL, 0.95f, 0.05f, 0.0f, 1e-3f, 0.99f, 0, 0, 0, 0};
        int finite = ocomm_compress_quantized(NULL, blocks, BLOCKS, &tensor, momentum, momentum, denominator, denominator, error,
                                    error, 1e-12f, amsgrad, &noise, packed);
        print("compress_quantized", finite, error, sizeof error);
        print("momentum", finite, momentum, sizeof momentum);
        print("magnitude", finite, denominator, sizeof denominator);
        print("packed", finite, packed, sizeof packed);
        finite = ocomm_soft_sign(NULL, blocks, BLOCKS, &tensor, momentum, momentum, denominator, denominator, 1e-12f,
                                 amsgrad, out);
        print("soft_sign", finite, out, sizeof out);
        finite = ocomm_compress_signs(NULL, blocks, BLOCKS, &tensor, momentum, momentum, 0.99f, 0.01f, amsgrad, packed);
        print("compress_signs", finite, momentum, sizeof momentum);
        print("packed", finite, packed, sizeof packed);
        ocomm_apply_signs(NULL, blocks, BLOCKS, &tensor, packed);
        print("apply_signs", 1, param, sizeof param);
    }
    for (int ranks = 1; ranks <= RANKS; ranks++) {
        const uint8_t *received[RANKS];
        for (int i = 0; i < ranks; i++) received[i] = messages[i];
        const int finite =
            ocomm_average_quantized(NULL, blocks, BLOCKS, received, ranks, 0, weights, error, out, &noise, packed);
        print("average_quantized", finite, out, sizeof out);
        print("packed", finite, packed, sizeof packed);
        ocomm_average_quantized(NULL, blocks, BLOCKS, received, ranks, 0, weights, NULL, NULL, &noise, packed);
        print("without error", finite, packed, sizeof packed);
    }
    for (int bits = 16; bits >= 4; bits /= 2) {
        enum { CODED = 4 * STRIDE / 128 + 2 * STRIDE };
        static uint8_t coded[RANKS][BLOCKS * CODED];
        for (int k = 0; k < BLOCKS; k++) {
            blocks[k].scale = k * CODED;
            blocks[k].bits = k * CODED + 4 * STRIDE / 128;
        }
        const uint8_t *received[RANKS];
        for (int i = 0; i < RANKS; i++) {
            ocomm_tensor tensor = {.grad = i % 2 ? values : param};
            const int finite = ocomm_compress_codes(NULL, blocks, BLOCKS, &tensor, error, error, bits, coded[i]);
            print("compress_codes", finite, error, sizeof error);
            print("coded", finite, coded[i], sizeof coded[i]);
            received[i] = coded[i];
        }
        for (int ranks = 1; ranks <= RANKS; ranks++) {
            const int finite =
                ocomm_average_codes(NULL, blocks, BLOCKS, received, ranks, 0, momentum, out, bits, coded[0]);
            print("average_codes", finite, out, sizeof out);
        }
        ocomm_unpack_codes(NULL, blocks, BLOCKS, coded[0], bits, out);
        print("unpack_codes", 1, out, sizeof out);
    }
    const uint64_t addresses[] = {(uint64_t)(uintptr_t)values, 0, (uint64_t)(uintptr_t)(error + 1)};
    const int64_t numels[] = {sizeof values / 4, 9, sizeof error / 4 - 1};
    double sums[3];
    ocomm_squares(addresses, numels, 3, sums);
    print("squares", 1, sums, sizeof sums);
    const ocomm_piece pieces[] = {{addresses[0], 3, numels[0] - 3, 0}, {addresses[2], 0, numels[2], 0}};
    float floats[2];
    ocomm_sum_floats(NULL, pieces, 2, floats);
    print("sum_floats", 1, floats, sizeof floats);
    static double buckets[1024];
    ocomm_sketch(addresses, numels, 3, 7, buckets);
    print("sketch", 1, buckets, sizeof buckets);
    const uint8_t *sources[] = {(uint8_t *)values, (uint8_t *)error, (uint8_t *)momentum};
    for (int dtype = 6; dtype <= 8; dtype++) {
        for (int op = 0; op <= 5; op++) {
            const int known = ocomm_reduce(NULL, dtype, op, sources, 3, 1.0, 0.3, (uint8_t *)out, sizeof out);
            if (known && (dtype == 8 || op == 3 || op == 4))
                print("reduce", dtype, out, sizeof out);
        }
    }
    return 0;
}
