/* What this processor can run, asked of it directly: __builtin_cpu_supports() says no to everything where the
 * compiler's library does not fill its table, as Zig's does not. */

#ifndef OCOMM_PROCESSOR_H
#define OCOMM_PROCESSOR_H

#if defined(__x86_64__)
#include <cpuid.h>

/* Features of leaf 1, register c; of leaf 7, registers b and c; and parts of XCR0: what the operating system saves. */
enum { HAS_POPCNT = 1 << 23, HAS_OSXSAVE = 1 << 27, HAS_AVX = 1 << 28, HAS_F16C = 1 << 29 };
enum { HAS_AVX2 = 1 << 5, HAS_AVX512F = 1 << 16, HAS_AVX512DQ = 1 << 17 };
enum { HAS_AVX512VBMI2 = 1 << 6 };
enum { SAVES_YMM = 0x06, SAVES_ZMM = 0xe6 };

/* Returns whether the processor has these features and the operating system saves these registers. */
static inline int processor_has(unsigned c1, unsigned b7, unsigned c7, unsigned saved) {
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & (c1 | HAS_OSXSAVE | HAS_AVX)) != (c1 | HAS_OSXSAVE | HAS_AVX)) return 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & saved) != saved) return 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return !(b7 | c7);
    return (b & b7) == b7 && (c & c7) == c7;
}
#endif

#endif
