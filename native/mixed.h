/* Hashes of words, for checksums and for the signs and buckets of sketches. */
#ifndef OCOMM_MIXED_H
#define OCOMM_MIXED_H

#include <stdint.h>

#define STEP 0x9e3779b97f4a7c15u
#define SPREAD 0xd6e8feb86659fd93u

/* The result changes whenever the word or its position does: xor with the upper half and odd factors are invertible. */
static inline uint64_t mixed(uint64_t word, uint64_t position) {
    const uint64_t x = word + (position + 1) * STEP;
    return (x ^ x >> 32) * SPREAD;
}

#endif
