/* The two products, written once for every vector width; avx2.c and avx512.c give the few operations and include it.
 *
 * Wanted from the includer: NAME(x); LANES; types V (LANES floats), W (LANES 32-bit words, each a pair of bf16
 * values) and X (what one pair of inputs of x is multiplied from); X_BYTES, the bytes of one prepared value; and
 * zero, add, scale_add, sum, load_words, dot, load_x, broadcast_x, low_codes, high_codes, spread, parameters, splat,
 * remove, load_floats, store_floats.
 *
 * 4-bit codes are never converted to floating point: a code q beside the byte 0x43 is the bf16 number 128 + q. The
 * 128 leaves again with the zero point, through the sum of x over the group:
 *     y_n = sum_g s_ng (sum_k x_k (128 + q_nk) - (128 + z_ng) sum_k x_k).
 */
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

enum { PAIRS = LANES, STEP = 2 * LANES, VECTORS = TILE / LANES, STRIP = 32, AHEAD = 1024 };

/* ---- bf16: x is stored per row in the order of dot(): STEP values at a time, padded with zeros ---- */

static int64_t NAME(padded)(int64_t K) { return (K + STEP - 1) / STEP * STEP; }

static size_t NAME(dense_bytes)(int64_t M, int64_t K) { return (size_t)(M * NAME(padded)(K) * X_BYTES); }

static void NAME(dense_prepare)(const uint16_t *x, int64_t M, int64_t K, void *xs) {
    char *to = xs;
    for (int64_t m = 0; m < M; m++)
        for (int64_t k = 0; k < K; k += STEP, to += STEP * X_BYTES) {
            uint16_t step[STEP] = {0};
            memcpy(step, x + m * K + k, sizeof(uint16_t) * (size_t)(K - k < STEP ? K - k : STEP));
            NAME(prepare_step)(step, to);
        }
}

/* sums[m][r] (+)= x[m] . w[r] over `count` inputs. R, M and U are constants at each call: U steps have their own
 * accumulators so that additions do not wait for one another. */
INLINE void NAME(dots)(const uint16_t *w, int64_t ldw, int64_t count, const char *xs, int64_t ldx, float *sums,
                       int more, const int R, const int M, const int U) {
    V acc[8][4][BLOCK];
    UNROLL for (int u = 0; u < U; u++) UNROLL for (int r = 0; r < R; r++) UNROLL for (int m = 0; m < M; m++)
        acc[u][r][m] = zero();
    int64_t k = 0;
    for (; k + U * STEP <= count; k += U * STEP)
        UNROLL for (int u = 0; u < U; u++) {
            W words[4];
            UNROLL for (int r = 0; r < R; r++) {
                __builtin_prefetch((const char *)(w + r * ldw + k + u * STEP) + AHEAD);
                words[r] = load_words(w + r * ldw + k + u * STEP);
            }
            UNROLL for (int m = 0; m < M; m++) {
                X x = load_x(xs + m * ldx + (k + u * STEP) * X_BYTES);
                UNROLL for (int r = 0; r < R; r++) acc[u][r][m] = dot(acc[u][r][m], words[r], x);
            }
        }
    for (; k < count; k += STEP)
        UNROLL for (int r = 0; r < R; r++) {
            W words;
            if (k + STEP <= count) {
                words = load_words(w + r * ldw + k);
            } else {
                uint16_t step[STEP] = {0};
                memcpy(step, w + r * ldw + k, sizeof(uint16_t) * (size_t)(count - k));
                words = load_words(step);
            }
            UNROLL for (int m = 0; m < M; m++)
                acc[0][r][m] = dot(acc[0][r][m], words, load_x(xs + m * ldx + k * X_BYTES));
        }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int m = 0; m < M; m++) {
        V total = acc[0][r][m];
        UNROLL for (int u = 1; u < U; u++) total = add(total, acc[u][r][m]);
        sums[m * STRIP + r] = sum(total) + (more ? sums[m * STRIP + r] : 0.0f);
    }
}

/* Rows of one strip, over inputs [k0, k0 + count). */
INLINE void NAME(strip)(const uint16_t *w, int64_t ldw, int64_t count, const char *xs, int64_t ldx, float *sums,
                        int more, int height, const int R, const int M, const int U) {
    int r = 0;
    for (; r + R <= height; r += R) NAME(dots)(w + r * ldw, ldw, count, xs, ldx, sums + r, more, R, M, U);
    for (; r < height; r++) NAME(dots)(w + r * ldw, ldw, count, xs, ldx, sums + r, more, 1, M, U);
}

static void NAME(dense_rows)(const Dense *d, int64_t K, const void *xs, int64_t m0, int rows, int64_t first,
                             int64_t last) {
    int64_t ldx = NAME(padded)(K) * X_BYTES;
    /* The part of x in use stays in the first-level cache. */
    int64_t parts = (rows * ldx + 20479) / 20480, width = NAME(padded)((K + parts - 1) / parts);
    for (int64_t n = first; n < last; n += STRIP) {
        int height = (int)(last - n < STRIP ? last - n : STRIP);
        float sums[BLOCK * STRIP];
        for (int64_t k = 0; k < K; k += width) {
            const uint16_t *w = d->w + n * K + k;
            const char *x = (const char *)xs + m0 * ldx + k * X_BYTES;
            int64_t count = K - k < width ? K - k : width;
            switch (rows) {
#define CASE(M, R, U) \
    case M: \
        NAME(strip)(w, K, count, x, ldx, sums, k > 0, height, R, M, U); \
        break;
                DENSE_CASES
#undef CASE
            }
        }
        store_rows(sums, STRIP, rows, height, d->bias, d->out, d->n, m0, n);
    }
}

/* ---- int4: x is stored per block of rows, a pair of inputs at a time: [K / 2][rows] ---- */

static size_t NAME(int4_bytes)(int64_t M, int64_t K) { return (size_t)(M * K * X_BYTES); }

static void NAME(int4_prepare)(const uint16_t *x, int64_t M, int64_t K, void *xs) {
    char *to = xs;
    for (int64_t m0 = 0; m0 < M; m0 += BLOCK) {
        int64_t end = M - m0 < BLOCK ? M : m0 + BLOCK;
        for (int64_t k = 0; k < K; k += 2)
            for (int64_t m = m0; m < end; m++, to += 2 * X_BYTES) NAME(prepare_pair)(x + m * K + k, to);
    }
}

/* One group of one tile: totals[m][16] += scale * (dots - (128 + zero) * sums). N vectors of the tile are worked on
 * at once, with S accumulators for each. */
INLINE void NAME(group)(const uint8_t *at, int64_t lines, int wide, const char *xs, const float *sums, float *totals,
                        const int M, const int N, const int S) {
    const uint8_t *codes = at + (wide ? 2 * LINE : LINE);
    UNROLL for (int v0 = 0; v0 < VECTORS; v0 += N) {
        V acc[4][VECTORS][BLOCK];
        UNROLL for (int s = 0; s < S; s++) UNROLL for (int v = 0; v < N; v++) UNROLL for (int m = 0; m < M; m++)
            acc[s][v][m] = zero();
        const char *xp = xs;
        for (int64_t l = 0; l < lines; l++) {
            const uint8_t *line = codes + l * LINE + v0 * 4 * LANES;
            __builtin_prefetch(line + AHEAD);
            UNROLL for (int pair = 0; pair < 4; pair++) {
                W words[VECTORS];
                UNROLL for (int v = 0; v < N; v++) {
                    W raw = load_words(line + v * 4 * LANES);
                    words[v] = spread(pair < 2 ? low_codes(raw) : high_codes(raw), pair % 2);
                }
                UNROLL for (int m = 0; m < M; m++, xp += 2 * X_BYTES) {
                    X x = broadcast_x(xp);
                    UNROLL for (int v = 0; v < N; v++) acc[pair % S][v][m] = dot(acc[pair % S][v][m], words[v], x);
                }
            }
        }
        UNROLL for (int v = 0; v < N; v++) {
            V scale = parameters(at, wide, v0 + v), zero_point = add(parameters(at, wide, VECTORS + v0 + v), splat(128.0f));
            UNROLL for (int m = 0; m < M; m++) {
                V total = acc[0][v][m];
                UNROLL for (int s = 1; s < S; s++) total = add(total, acc[s][v][m]);
                float *to = totals + m * TILE + (v0 + v) * LANES;
                store_floats(to, scale_add(scale, remove(total, zero_point, splat(sums[m])), load_floats(to)));
            }
        }
    }
}

INLINE void NAME(tile)(const Int4 *p, const uint8_t *at, const char *xs, const float *sums, float *totals, int wide,
                       const int M, const int N, const int S) {
    int64_t bytes = (p->lines + (wide ? 2 : 1)) * LINE, width = p->lines * LINE_INPUTS * X_BYTES * M;
    for (int64_t g = 0; g < p->groups; g++, at += bytes, xs += width, sums += M)
        NAME(group)(at, p->lines, wide, xs, sums, totals, M, N, S);
}

static void NAME(int4_rows)(const Int4 *p, const void *xs, const float *sums, int64_t m0, int rows, int64_t first,
                            int64_t last) {
    int64_t K = p->groups * p->lines * LINE_INPUTS, bytes = p->groups * (p->lines + (p->wide ? 2 : 1)) * LINE;
    const char *x = (const char *)xs + m0 * K * X_BYTES;
    for (int64_t n = first; n < last; n += TILE) {
        float totals[BLOCK * TILE] = {0};
        const uint8_t *at = p->data + n / TILE * bytes;
        switch (rows) {
#define CASE(M, N, S) \
    case M: \
        NAME(tile)(p, at, x, sums + m0 * p->groups, totals, p->wide, M, N, S); \
        break;
            INT4_CASES
#undef CASE
        }
        store_rows(totals, TILE, rows, p->n - n < TILE ? p->n - n : TILE, p->bias, p->out, p->n, m0, n);
    }
}

const Isa ISA_SYMBOL = {ISA_NAME,           NAME(supported),  NAME(dense_bytes),  NAME(dense_prepare),
                        NAME(dense_rows),   NAME(int4_bytes), NAME(int4_prepare), NAME(int4_rows)};
