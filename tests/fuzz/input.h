/* The input of a fuzz target, read byte by byte; after its end come zeros. */
#ifndef INPUT_H
#define INPUT_H
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                                    \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

static const uint8_t *input_data;
static size_t input_left;

static void begin_input(const uint8_t *data, size_t size) {
    input_data = data;
    input_left = size;
}

static uint8_t next_byte(void) {
    if (!input_left) return 0;
    input_left--;
    return *input_data++;
}

static inline uint32_t next_word(void) {
    uint32_t word = 0;
    for (int k = 0; k < 4; k++) word |= (uint32_t)next_byte() << 8 * k;
    return word;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#endif
