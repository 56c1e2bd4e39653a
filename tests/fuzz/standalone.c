/* Runs a fuzz target without libFuzzer, the same inputs each time:
 *
 *     TARGET COUNT SEED [FILE ...]
 *
 * each file, and COUNT inputs that are random bytes or a file with some bytes changed, as SEED says. */
#include "input.h"

#include <string.h>

#define MOST 4096

static uint64_t state = 0x9e3779b97f4a7c15u;

static uint32_t drawn(uint32_t below) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17; /* Marsaglia's xorshift64 */
    return (uint32_t)(state >> 32) % below;
}

int main(int argc, char **argv) {
    static uint8_t data[MOST];
    CHECK(argc > 2);
    const int count = atoi(argv[1]), files = argc - 3;
    state += (uint64_t)atoi(argv[2]);
    for (int k = 0; k < files + count; k++) {
        size_t size = 1 + drawn(drawn(8) ? 64 : MOST);
        for (size_t i = 0; i < size; i++) data[i] = drawn(3) ? 0 : (uint8_t)drawn(256);
        if (files && (k < files || drawn(4))) {
            FILE *file = fopen(argv[3 + (k < files ? (uint32_t)k : drawn((uint32_t)files))], "rb");
            CHECK(file);
            size = fread(data, 1, MOST, file);
            fclose(file);
            for (uint32_t edits = k < files || !size ? 0 : 1 + drawn(8); edits; edits--)
                data[drawn((uint32_t)size)] = (uint8_t)drawn(256);
        }
        uint8_t *exact = malloc(size ? size : 1); /* so that the target cannot read past it unnoticed */
        CHECK(exact);
        memcpy(exact, data, size);
        LLVMFuzzerTestOneInput(exact, size);
        free(exact);
    }
    return 0;
}
