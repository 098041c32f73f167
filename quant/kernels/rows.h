/* The small operations between the products, once for every vector width: RMS norm, gated activation, attention of one
 * token. Included by avx2.c and avx512.c after their operations; written with the compiler's vector types, since they
 * need nothing that is special to a processor but a width. scalar.c has the same again in plain C.
 *
 * Everything is fp32 inside and rounded to bf16 once.
 */
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef int32_t Mask __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

enum { KEYS = 64 }; /* keys whose scores are held at a time: their keys and values stay in the first-level cache */

INLINE Floats NAME(all)(float value) { return (Floats)splat(value); }

INLINE Floats NAME(choose)(Mask mask, Floats yes, Floats no) { return (Floats)((mask & (Mask)yes) | (~mask & (Mask)no)); }

INLINE Floats NAME(widen)(Halves narrow) { return (Floats)((Bits)widen_words((H)narrow) << 16); }

INLINE Halves NAME(narrow)(Floats value) {
    Bits bits = (Bits)value, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    Bits nan = (Bits)(value != value);
    return __builtin_convertvector((nan & 0x7fc0) | (~nan & rounded), Halves);
}

/* The first `count` (at most LANES) values from an address; zeros behind them. */
INLINE Floats NAME(load)(const uint16_t *from, int64_t count) {
    Halves narrow = {0};
    if (count >= LANES) memcpy(&narrow, from, sizeof narrow);
    else memcpy(&narrow, from, 2 * (size_t)count);
    return NAME(widen)(narrow);
}

INLINE Floats NAME(load_fp32)(const float *from, int64_t count) {
    Floats value = {0};
    if (count >= LANES) memcpy(&value, from, sizeof value);
    else memcpy(&value, from, 4 * (size_t)count);
    return value;
}

INLINE void NAME(store)(uint16_t *to, Floats value, int64_t count) {
    Halves narrow = NAME(narrow)(value);
    if (count >= LANES) memcpy(to, &narrow, sizeof narrow);
    else memcpy(to, &narrow, 2 * (size_t)count);
}

/* e^x within 2 units in the last place for -87 <= x <= 88; x is brought into that range first. */
INLINE Floats NAME(exponential)(Floats x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, held in the low bits */
    x = NAME(choose)(x < -87.0f, NAME(all)(-87.0f), x);
    x = NAME(choose)(x > 88.0f, NAME(all)(88.0f), x);
    Floats shifted = x * 1.44269504f + magic, n = shifted - magic;
    Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (Floats)(((Bits)shifted << 23) + 0x3f800000u);
}

static void NAME(rms_norm)(const uint16_t *x, const float *factor, uint16_t *out, int64_t rows, int64_t D, float eps) {
    for (int64_t m = 0; m < rows; m++, x += D, out += D) {
        Floats even = {0}, odd = {0};
        int64_t d = 0;
        for (; d + 2 * LANES <= D; d += 2 * LANES) {
            Floats a = NAME(load)(x + d, LANES), b = NAME(load)(x + d + LANES, LANES);
            even += a * a;
            odd += b * b;
        }
        for (; d < D; d += LANES) {
            Floats a = NAME(load)(x + d, D - d);
            even += a * a;
        }
        Floats scale = NAME(all)(1.0f / sqrtf(sum((V)(even + odd)) / (float)D + eps));
        for (d = 0; d + LANES <= D; d += LANES)
            NAME(store)(out + d, NAME(load)(x + d, LANES) * scale * NAME(load_fp32)(factor + d, LANES), LANES);
        if (d < D) NAME(store)(out + d, NAME(load)(x + d, D - d) * scale * NAME(load_fp32)(factor + d, D - d), D - d);
    }
}

/* Both activations are x / (1 + e^-u): u = x is SiLU, and 1 + tanh(u / 2) = 2 / (1 + e^-u). */
INLINE Floats NAME(activate)(Floats x, int kind) {
    Floats u = kind == GELU_TANH ? x * (1.5957691216f + 0.0713548162726f * x * x) : x;
    return NAME(choose)(u < -87.0f, NAME(all)(0), x / (1.0f + NAME(exponential)(-u)));
}

INLINE void NAME(gate)(const int kind, const uint16_t *gate, const uint16_t *up, uint16_t *out, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        NAME(store)(out + i, NAME(activate)(NAME(load)(gate + i, LANES), kind) * NAME(load)(up + i, LANES), LANES);
    count -= i;
    if (count) NAME(store)(out + i, NAME(activate)(NAME(load)(gate + i, count), kind) * NAME(load)(up + i, count), count);
}

static void NAME(gated)(int kind, const uint16_t *gate, const uint16_t *up, uint16_t *out, int64_t count) {
    if (kind == GELU_TANH) NAME(gate)(GELU_TANH, gate, up, out, count);
    else NAME(gate)(SILU, gate, up, out, count);
}

/* scores[g][t] = q[g] . key t, for G query heads that share the keys. */
INLINE void NAME(scores)(const Attention *a, const float *q, const uint16_t *key, int64_t count, float (*scores)[KEYS],
                         const int G) {
    int64_t D = a->width, P = a->padded;
    for (int64_t t = 0; t < count; t++, key += D) {
        Floats acc[ATTEND_HEADS];
        UNROLL for (int g = 0; g < G; g++) acc[g] = NAME(all)(0);
        int64_t d = 0;
        for (; d + LANES <= D; d += LANES) {
            Floats k = NAME(load)(key + d, LANES);
            UNROLL for (int g = 0; g < G; g++) acc[g] += k * NAME(load_fp32)(q + g * P + d, LANES);
        }
        if (d < D) {
            Floats k = NAME(load)(key + d, D - d);
            UNROLL for (int g = 0; g < G; g++) acc[g] += k * NAME(load_fp32)(q + g * P + d, LANES);
        }
        UNROLL for (int g = 0; g < G; g++) scores[g][t] = sum((V)acc[g]);
    }
}

/* One chunk of scores becomes weights; `largest` and `total` go on from the chunks before. Returns what those shrink by. */
INLINE float NAME(weights)(float *scores, int64_t count, float *largest, float *total) {
    float most = *largest;
    for (int64_t t = 0; t < count; t++) most = scores[t] > most ? scores[t] : most;
    Floats added = {0}, shrink = NAME(exponential)(NAME(all)(*largest - most));
    for (int64_t t = count; t < KEYS && t % LANES; t++) scores[t] = -INFINITY;
    for (int64_t t = 0; t < count; t += LANES) {
        Floats score = NAME(load_fp32)(scores + t, LANES) - most, weight = NAME(exponential)(score);
        weight = NAME(choose)(score < -87.0f, NAME(all)(0), weight);
        memcpy(scores + t, &weight, sizeof weight);
        added += weight;
    }
    *largest = most;
    *total = *total * shrink[0] + sum((V)added);
    return shrink[0];
}

/* sums[g] = shrink[g] * sums[g] + weights[g] . values, LANES dimensions of it. */
INLINE void NAME(mix)(const uint16_t *value, int64_t D, int64_t width, int64_t count, float (*weights)[KEYS],
                      const float *shrink, float *sums, int64_t P, const int G) {
    Floats acc[ATTEND_HEADS];
    UNROLL for (int g = 0; g < G; g++) acc[g] = NAME(load_fp32)(sums + g * P, LANES) * shrink[g];
    for (int64_t t = 0; t < count; t++) {
        Floats v = NAME(load)(value + t * D, width);
        UNROLL for (int g = 0; g < G; g++) acc[g] += v * NAME(all)(weights[g][t]);
    }
    UNROLL for (int g = 0; g < G; g++) memcpy(sums + g * P, &acc[g], sizeof acc[g]);
}

/* G query heads from `head` on over the keys of one group; sums must be 0 at first. */
INLINE void NAME(heads)(const Attention *a, int64_t group, int64_t head, const int G) {
    int64_t D = a->width, P = a->padded, first = group * a->stride + a->first * D;
    float scores[ATTEND_HEADS][KEYS], largest[ATTEND_HEADS], total[ATTEND_HEADS], shrink[ATTEND_HEADS];
    const float *q = a->q + head * P;
    float *sums = a->sums + head * P;
    UNROLL for (int g = 0; g < G; g++) largest[g] = -INFINITY, total[g] = 0;
    for (int64_t t = 0; t < a->count; t += KEYS) {
        int64_t count = a->count - t < KEYS ? a->count - t : KEYS;
        NAME(scores)(a, q, a->keys + first + t * D, count, scores, G);
        UNROLL for (int g = 0; g < G; g++) shrink[g] = NAME(weights)(scores[g], count, &largest[g], &total[g]);
        const uint16_t *value = a->values + first + t * D;
        int64_t d = 0;
        for (; d + LANES <= D; d += LANES) NAME(mix)(value + d, D, LANES, count, scores, shrink, sums + d, P, G);
        if (d < D) NAME(mix)(value + d, D, D - d, count, scores, shrink, sums + d, P, G);
    }
    UNROLL for (int g = 0; g < G; g++)
        for (int64_t d = 0; d < D; d += LANES)
            NAME(store)(a->out + (head + g) * D + d, NAME(load_fp32)(sums + g * P + d, LANES) / total[g], D - d);
}

static void NAME(attend)(const Attention *a, int64_t group) {
    int64_t size = a->heads / a->groups, head = group * size, end = head + size;
    while (head < end) {
        int64_t G = end - head < ATTEND_HEADS ? end - head : ATTEND_HEADS;
        switch (G) {
#define CASE(G) \
    case G: \
        NAME(heads)(a, group, head, G); \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
        }
        head += G;
    }
}
