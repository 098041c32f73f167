/* bf16 values in fixed point: 16-bit integers that share a unit.
 *
 * The unit is a power of two, such that the largest takes all 15 bits. A bf16 number has 8 significant bits, so that every
 * value of at least 1/128 of the largest power of two among them is exact; the others are rounded to the same unit.
 */
#ifndef ADAPT_FIXED_H
#define ADAPT_FIXED_H

#include "native.h"

enum { LARGEST_EXPONENT = 14, EXPONENT_BIAS = 127, FIXED_LOWEST = LARGEST_EXPONENT + 1 };

static inline float power_of_two(uint32_t biased) {
    uint32_t bits = biased << 23;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

/* x[i] = to[i] * unit for `count` values; returns the sum of `to`. The unit is NaN where a value is not finite. */
static inline int32_t to_fixed(const uint16_t *x, int64_t count, int16_t *to, float *unit) {
    uint16_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        uint16_t size = x[i] & 0x7fff;
        largest = size > largest ? size : largest;
    }
    uint32_t exponent = largest >> 7;
    exponent = exponent < FIXED_LOWEST ? FIXED_LOWEST : exponent > 254 ? 254 : exponent;
    *unit = largest < 0x7f80 ? power_of_two(exponent - LARGEST_EXPONENT) : NAN;
    float factor = power_of_two(2 * EXPONENT_BIAS + LARGEST_EXPONENT - exponent);
    int32_t sum = 0;
    for (int64_t i = 0; i < count; i++) {
        /* A float of 1.5 * 2^23 and a small integer has that integer, rounded to even, in its low bits. */
        float shifted = bf16_to_float(x[i]) * factor + 12582912.0f;
        int32_t bits;
        memcpy(&bits, &shifted, sizeof bits);
        to[i] = (int16_t)(bits & 0xffff);
        sum += to[i];
    }
    return sum;
}

#endif
