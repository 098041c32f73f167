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

enum {
    KEYS = 64, /* keys whose scores are held at a time: their keys and values stay in the first-level cache */
    FOUR = 4,  /* keys at once */
    MOST_AT_ONCE = 3, /* heads beside four keys: what sixteen registers hold */
};

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

/* acc[k][g] += q[g] . LANES dimensions of key k, of which `width` are there. */
INLINE void NAME(score)(Floats acc[FOUR][MOST_AT_ONCE], const uint16_t *const keys[FOUR], int64_t d, int64_t width,
                        const float *q, int64_t P, const int G) {
    /* Twelve sums, three queries and one key at a time: sixteen registers, and no sum waits for the stack. */
    Floats query[MOST_AT_ONCE];
    UNROLL for (int g = 0; g < G; g++) query[g] = NAME(load_fp32)(q + g * P + d, LANES);
    UNROLL for (int k = 0; k < FOUR; k++) {
        Floats wide = NAME(load)(keys[k] + d, width);
        UNROLL for (int g = 0; g < G; g++) acc[k][g] += wide * query[g];
    }
}

/* Scores of four keys for G heads. */
INLINE void NAME(four)(const uint16_t *const keys[FOUR], int64_t D, const float *q, int64_t P, float (*scores)[KEYS],
                       int64_t t, const int G) {
    Floats acc[FOUR][MOST_AT_ONCE];
    UNROLL for (int k = 0; k < FOUR; k++) UNROLL for (int g = 0; g < G; g++) acc[k][g] = NAME(all)(0);
    int64_t d = 0;
    for (; d + LANES <= D; d += LANES) NAME(score)(acc, keys, d, LANES, q, P, G);
    if (d < D) NAME(score)(acc, keys, d, D - d, q, P, G);
    UNROLL for (int g = 0; g < G; g++)
        store_sums(scores[g] + t, (V)acc[0][g], (V)acc[1][g], (V)acc[2][g], (V)acc[3][g]);
}

/* scores[g][t] = q[g] . key t, for G query heads that share the keys; four keys at a time, the last one again where there
 * are fewer. `next` is what is read after these keys. */
INLINE void NAME(scores)(const Attention *a, const float *q, const uint16_t *key, const uint16_t *next, int64_t count,
                         float (*scores)[KEYS], const int G) {
    int64_t D = a->width, P = a->padded;
    for (int64_t t = 0; t < count; t += FOUR) {
        const uint16_t *keys[FOUR];
        UNROLL for (int k = 0; k < FOUR; k++) keys[k] = key + (t + k < count ? t + k : count - 1) * D;
        for (int64_t d = 0; d < FOUR * D; d += LINE / 2) __builtin_prefetch(next + t * D + d);
        UNROLL for (int g = 0; g < G; g += MOST_AT_ONCE)
            NAME(four)(keys, D, q + g * P, P, scores + g, t, G - g < MOST_AT_ONCE ? G - g : MOST_AT_ONCE);
    }
}

/* One chunk of scores becomes weights; `largest` and `total` go on from the chunks before. Returns what those shrink by. */
INLINE float NAME(weights)(float *scores, int64_t count, float *largest, float *total) {
    for (int64_t t = count; t < KEYS && t % LANES; t++) scores[t] = -INFINITY;
    Floats greatest = NAME(all)(*largest), added = {0};
    for (int64_t t = 0; t < count; t += LANES) {
        Floats score = NAME(load_fp32)(scores + t, LANES);
        greatest = NAME(choose)(score > greatest, score, greatest);
    }
    float most = greatest[0];
    for (int lane = 1; lane < LANES; lane++) most = greatest[lane] > most ? greatest[lane] : most;
    Floats shrink = NAME(exponential)(NAME(all)(*largest - most));
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

/* sums[g] = shrink[g] * sums[g] + weights[g] . values, N times LANES dimensions of it, of the last of which `width`; and
 * the cache lines that begin there are fetched of the rows at `next`. */
INLINE void NAME(mix)(const uint16_t *value, const uint16_t *next, int64_t D, int64_t width, int64_t count,
                      float (*weights)[KEYS], const float *shrink, float *sums, int64_t P, int fetch, const int G, const int N) {
    Floats acc[8][ATTEND_HEADS];
    UNROLL for (int n = 0; n < N; n++) UNROLL for (int g = 0; g < G; g++)
        acc[n][g] = NAME(load_fp32)(sums + g * P + n * LANES, LANES) * shrink[g];
    for (int64_t t = 0; t < count; t++) {
        Floats weight[ATTEND_HEADS];
        if (fetch) UNROLL for (int n = 0; n < N; n += LINE / 2 / LANES) __builtin_prefetch(next + t * D + n * LANES);
        UNROLL for (int g = 0; g < G; g++) weight[g] = NAME(all)(weights[g][t]);
        UNROLL for (int n = 0; n < N; n++) {
            Floats v = NAME(load)(value + t * D + n * LANES, n == N - 1 ? width : LANES);
            UNROLL for (int g = 0; g < G; g++) acc[n][g] += v * weight[g];
        }
    }
    UNROLL for (int n = 0; n < N; n++) UNROLL for (int g = 0; g < G; g++)
        memcpy(sums + g * P + n * LANES, &acc[n][g], sizeof acc[n][g]);
}

/* All dimensions, as many at once as registers hold. */
INLINE void NAME(mix_all)(const uint16_t *value, const uint16_t *next, int64_t D, int64_t count, float (*weights)[KEYS],
                          const float *shrink, float *sums, int64_t P, const int G) {
    const int N = G == 1 ? 64 / LANES : G <= 3 ? 4 : G <= 6 ? 2 : 1;
    int64_t d = 0;
    for (; d + N * LANES <= D; d += N * LANES)
        NAME(mix)(value + d, next + d, D, LANES, count, weights, shrink, sums + d, P, d % (LINE / 2) == 0, G, N);
    for (; d < D; d += LANES)
        NAME(mix)(value + d, next + d, D, D - d < LANES ? D - d : LANES, count, weights, shrink, sums + d, P, d % (LINE / 2) == 0, G, 1);
}

/* G query heads from `head` on over one span of the keys of one group. */
INLINE void NAME(heads)(const Attention *a, int64_t group, int64_t head, int64_t span, const int G) {
    int64_t D = a->width, P = a->padded, start = span * SPAN, left = a->count - start;
    float scores[ATTEND_HEADS][KEYS], largest[ATTEND_HEADS], total[ATTEND_HEADS], shrink[ATTEND_HEADS];
    const float *q = a->q + head * P;
    float *sums = a->sums + (span * a->heads + head) * P, *tops = a->tops + (span * a->heads + head) * 2;
    int64_t from = group * a->stride + (a->first + start) * D, end = left < SPAN ? left : SPAN;
    memset(sums, 0, sizeof(float) * (size_t)(G * P));
    UNROLL for (int g = 0; g < G; g++) largest[g] = -INFINITY, total[g] = 0;
    for (int64_t t = 0; t < end; t += KEYS) {
        int64_t count = end - t < KEYS ? end - t : KEYS;
        const uint16_t *key = a->keys + from + t * D, *value = a->values + from + t * D;
        NAME(scores)(a, q, key, value, count, scores, G);
        UNROLL for (int g = 0; g < G; g++) shrink[g] = NAME(weights)(scores[g], count, &largest[g], &total[g]);
        NAME(mix_all)(value, key + KEYS * D, D, count, scores, shrink, sums, P, G);
    }
    UNROLL for (int g = 0; g < G; g++) tops[2 * g] = largest[g], tops[2 * g + 1] = total[g];
}

static void NAME(attend)(const Attention *a, int64_t group, int64_t span) {
    int64_t size = a->heads / a->groups, head = group * size, end = head + size;
    while (head < end) {
        int64_t G = end - head < ATTEND_HEADS ? end - head : ATTEND_HEADS;
        switch (G) {
#define CASE(G) \
    case G: \
        NAME(heads)(a, group, head, span, G); \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
        }
        head += G;
    }
}
