/* The two products, written once for every vector width; avx2.c and avx512.c give the few operations and include it.
 *
 * Wanted from the includer: NAME(x); LANES; types V (LANES floats), W (LANES words of 32 bits, each a pair of bf16
 * values), O (what a pair is multiplied as) and HALVES: 2 where O holds the even or the odd values of the pairs as
 * floats, 1 where O is the pairs themselves. x is prepared as elements of 4 bytes of that kind. The operations: zero,
 * add, scale_add, splat, sum, load_floats, store_floats, load_words, load_operand, store_operand, broadcast,
 * operand, code_operand, multiply_add, low_codes, high_codes, spread, parameters, prepare_pair.
 *
 * 4-bit codes are never converted to floating point: a code q beside the byte 0x43 is the bf16 number 128 + q. The
 * 128 leaves again with the zero point, through the sum of x over the group:
 *     y_n = sum_g s_ng (sum_k x_k (128 + q_nk) - (128 + z_ng) sum_k x_k).
 * Read as one float, a pair (low, high) of such numbers is 128 + high + (0x4300 + low) / 65536: the high code needs no
 * masking when x_even is prepared as x_even - x_odd / 65536 and the rest, x_odd (0x4300 - 128) / 65536, leaves with
 * the 128.
 */
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

enum { STEP = 2 * LANES, STEP_BYTES = HALVES * LANES * 4, VECTORS = TILE / LANES, STRIP = 32, AHEAD = 1024, NEAR = 28672 };

/* ---- bf16: x is stored per block of rows as [STEP inputs][row][half][lane], padded with zeros ---- */

static int64_t NAME(steps)(int64_t K) { return (K + STEP - 1) / STEP; }

static size_t NAME(dense_bytes)(int64_t M, int64_t K) { return (size_t)(M * NAME(steps)(K) * STEP_BYTES); }

static void NAME(dense_prepare)(const uint16_t *x, int64_t M, int64_t K, void *xs) {
    char *to = xs;
    int64_t block = block_rows(M, DENSE_BLOCK);
    for (int64_t m0 = 0; m0 < M; m0 += block)
        for (int64_t k = 0; k < K; k += STEP)
            for (int64_t m = m0; m < M && m < m0 + block; m++, to += STEP_BYTES) {
                uint16_t step[STEP] = {0};
                const uint16_t *from = x + m * K + k;
                if (K - k < STEP) from = memcpy(step, from, sizeof(uint16_t) * (size_t)(K - k));
                UNROLL for (int h = 0; h < HALVES; h++)
                    store_operand(to + h * 4 * LANES, operand(load_words(from), h));
            }
}

/* acc[h][r][m] += w[r] . x[m] over one step. */
INLINE void NAME(step)(V acc[HALVES][4][BLOCK], const W words[4], const char *x, const int R, const int M) {
    UNROLL for (int h = 0; h < HALVES; h++) {
        O w[4];
        UNROLL for (int r = 0; r < R; r++) w[r] = operand(words[r], h);
        UNROLL for (int m = 0; m < M; m++) {
            O value = load_operand(x + m * STEP_BYTES + h * 4 * LANES);
            UNROLL for (int r = 0; r < R; r++) acc[h][r][m] = multiply_add(w[r], value, acc[h][r][m]);
        }
    }
}

/* totals[r][m] (+)= x[m] . w[r] over `count` inputs, lane by lane; x has `stride` bytes for a step. R and M are constants
 * at each call. A sum has HALVES chains of additions, each in the order of the inputs, whatever R and M are and wherever
 * it stops on its way: so a row of x gives the same bits alone and beside others. `fetch`: w is not in a cache yet. */
INLINE void NAME(dots)(const uint16_t *w, int64_t ldw, int64_t count, const char *x, int64_t stride,
                       V (*totals)[BLOCK][HALVES], int more, const int R, const int M, const int fetch) {
    V acc[HALVES][4][BLOCK];
    W words[4];
    UNROLL for (int h = 0; h < HALVES; h++) UNROLL for (int r = 0; r < R; r++) UNROLL for (int m = 0; m < M; m++)
        acc[h][r][m] = more ? totals[r][m][h] : zero();
    /* Behind the last of these inputs come the same inputs of the rows after these. */
    int64_t k = 0, ahead = AHEAD / 2, turn = count - ahead, jump = ahead + R * ldw - count;
    for (; k + STEP <= count; k += STEP, x += stride) {
        UNROLL for (int r = 0; r < R; r++) {
            const uint16_t *from = w + r * ldw + k;
            if (fetch) __builtin_prefetch(from + (k < turn ? ahead : jump));
            words[r] = load_words(from);
        }
        NAME(step)(acc, words, x, R, M);
    }
    if (k < count) {
        UNROLL for (int r = 0; r < R; r++) {
            uint16_t step[STEP] = {0};
            words[r] = load_words(memcpy(step, w + r * ldw + k, sizeof(uint16_t) * (size_t)(count - k)));
        }
        NAME(step)(acc, words, x, R, M);
    }
    UNROLL for (int h = 0; h < HALVES; h++) UNROLL for (int r = 0; r < R; r++) UNROLL for (int m = 0; m < M; m++)
        totals[r][m][h] = acc[h][r][m];
}

/* R rows of w for M rows of x, N of these at a time: w is in the first-level cache for all but the first. */
INLINE void NAME(some)(const uint16_t *w, int64_t ldw, int64_t count, const char *x, V (*totals)[BLOCK][HALVES],
                       int more, const int R, const int M, const int N) {
    const int64_t stride = M * STEP_BYTES;
    NAME(dots)(w, ldw, count, x, stride, totals, more, R, N, 1);
    if (N < M)
        NAME(dots)(w, ldw, count, x + N * STEP_BYTES, stride, (V(*)[BLOCK][HALVES])&totals[0][N], more, R, M - N, 0);
}

/* Rows of one strip, over inputs [k0, k0 + count). */
INLINE void NAME(strip)(const uint16_t *w, int64_t ldw, int64_t count, const char *x, V (*totals)[BLOCK][HALVES],
                        int more, int height, const int R, const int M, const int N) {
    int r = 0;
    for (; r + R <= height; r += R) NAME(some)(w + r * ldw, ldw, count, x, totals + r, more, R, M, N);
    for (; r < height; r++) NAME(some)(w + r * ldw, ldw, count, x, totals + r, more, 1, M, N);
}

static void NAME(dense_rows)(const Dense *d, int64_t K, const void *xs, int64_t m0, int rows, int64_t first,
                             int64_t last) {
    int64_t steps = NAME(steps)(K), bytes = rows * STEP_BYTES;
    /* The part of x in use stays near. One row of x does so whole, up to 7,168 inputs: then w is read in its own order,
     * which memory likes best. */
    int64_t parts = (steps * bytes + NEAR - 1) / NEAR, width = (steps + parts - 1) / parts * STEP;
    for (int64_t n = first; n < last; n += STRIP) {
        int height = (int)(last - n < STRIP ? last - n : STRIP);
        V totals[STRIP][BLOCK][HALVES];
        float sums[BLOCK * STRIP];
        for (int64_t k = 0; k < K; k += width) {
            const uint16_t *w = d->w + n * K + k;
            const char *x = (const char *)xs + m0 * steps * STEP_BYTES + k / STEP * bytes;
            int64_t count = K - k < width ? K - k : width;
            switch (rows) {
#define CASE(M, R, N) \
    case M: \
        NAME(strip)(w, K, count, x, totals, k > 0, height, R, M, N); \
        break;
                DENSE_CASES
#undef CASE
            }
        }
        for (int r = 0; r < height; r++)
            for (int m = 0; m < rows; m++)
                sums[m * STRIP + r] =
                    sum(HALVES == 1 ? totals[r][m][0] : add(totals[r][m][0], totals[r][m][HALVES - 1]));
        store_rows(sums, STRIP, rows, height, d->bias, d->out, d->out_stride, m0, n);
    }
}

/* ---- int4: x is stored per block of rows as [pair of inputs][half][row], elements of 4 bytes ---- */

enum { PAIR_BYTES = HALVES * 4 };

static size_t NAME(int4_bytes)(int64_t M, int64_t K) { return (size_t)(M * K / 2 * PAIR_BYTES); }

/* For one group the sum of x, and what the 128 and the unmasked high codes add to its dot products; both negative. */
static void NAME(group_sums)(const uint16_t *x, int64_t width, float *to) {
    float even[4] = {0}, odd[4] = {0};
    for (int64_t k = 0; k < width; k += LINE_INPUTS)
        for (int i = 0; i < 4; i++) {
            even[i] += bf16_to_float(x[k + 2 * i]);
            odd[i] += bf16_to_float(x[k + 2 * i + 1]);
        }
    float odds = (odd[0] + odd[1]) + (odd[2] + odd[3]), evens = (even[0] + even[1]) + (even[2] + even[3]);
    to[0] = -(evens + odds);
    to[1] = 128.0f * to[0] - ODD_EXCESS * odds;
}

INLINE void NAME(prepare_block)(const uint16_t *x, int64_t K, char *to, const int64_t rows) {
    for (int64_t k = 0; k < K; k += 2, to += PAIR_BYTES * rows)
        for (int64_t m = 0; m < rows; m++) prepare_pair(x + m * K + k, to + 4 * m, 4 * rows);
}

static void NAME(int4_prepare)(const uint16_t *x, int64_t M, int64_t K, int64_t groups, void *xs, float *sums) {
    char *to = xs;
    int64_t block = block_rows(M, INT4_BLOCK);
    for (int64_t m0 = 0; m0 < M; m0 += block, x += block * K) {
        int64_t rows = M - m0 < block ? M - m0 : block;
        if (rows == 1) NAME(prepare_block)(x, K, to, 1);
        else if (rows == 4) NAME(prepare_block)(x, K, to, 4);
        else NAME(prepare_block)(x, K, to, rows);
        to += K / 2 * PAIR_BYTES * rows;
        for (int64_t g = 0; g < groups; g++)
            for (int64_t m = 0; m < rows; m++, sums += 2)
                NAME(group_sums)(x + m * K + g * (K / groups), K / groups, sums);
    }
}

/* One group of one tile: totals[m][16] += scale * (dots - excess - zero * sum). N vectors of the tile are worked on
 * at once, with S accumulators for each. */
INLINE void NAME(group)(const uint8_t *at, int64_t lines, int wide, const char *xs, const float *sums, float *totals,
                        const int M, const int N, const int S) {
    const uint8_t *codes = at + (wide ? 2 * LINE : LINE);
    UNROLL for (int v0 = 0; v0 < VECTORS; v0 += N) {
        V acc[4][VECTORS][BLOCK];
        UNROLL for (int v = 0; v < N; v++) {
            V zero_point = parameters(at, wide, VECTORS + v0 + v);
            UNROLL for (int m = 0; m < M; m++) {
                acc[0][v][m] = scale_add(zero_point, splat(sums[2 * m]), splat(sums[2 * m + 1]));
                UNROLL for (int s = 1; s < S; s++) acc[s][v][m] = zero();
            }
        }
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
                UNROLL for (int h = 0; h < HALVES; h++, xp += 4 * M) {
                    O w[VECTORS];
                    UNROLL for (int v = 0; v < N; v++) w[v] = code_operand(words[v], h);
                    UNROLL for (int m = 0; m < M; m++) {
                        O x = broadcast(xp + 4 * m);
                        UNROLL for (int v = 0; v < N; v++)
                            acc[pair % S][v][m] = multiply_add(w[v], x, acc[pair % S][v][m]);
                    }
                }
            }
        }
        UNROLL for (int v = 0; v < N; v++) {
            V scale = parameters(at, wide, v0 + v);
            UNROLL for (int m = 0; m < M; m++) {
                V total = acc[0][v][m];
                UNROLL for (int s = 1; s < S; s++) total = add(total, acc[s][v][m]);
                float *to = totals + m * TILE + (v0 + v) * LANES;
                store_floats(to, scale_add(scale, total, load_floats(to)));
            }
        }
    }
}

INLINE void NAME(tile)(const Int4 *p, const uint8_t *at, const char *xs, const float *sums, float *totals, int wide,
                       const int M, const int N, const int S) {
    int64_t bytes = (p->lines + (wide ? 2 : 1)) * LINE, width = p->lines * LINE_INPUTS / 2 * PAIR_BYTES * M;
    for (int64_t g = 0; g < p->groups; g++, at += bytes, xs += width, sums += 2 * M)
        NAME(group)(at, p->lines, wide, xs, sums, totals, M, N, S);
}

static void NAME(int4_rows)(const Int4 *p, const void *xs, const float *sums, int64_t m0, int rows, int64_t first,
                            int64_t last) {
    int64_t K = p->groups * p->lines * LINE_INPUTS, bytes = p->groups * (p->lines + (p->wide ? 2 : 1)) * LINE;
    const char *x = (const char *)xs + m0 * K / 2 * PAIR_BYTES;
    for (int64_t n = first; n < last; n += TILE) {
        float totals[BLOCK * TILE] = {0};
        const uint8_t *at = p->data + n / TILE * bytes;
        switch (rows) {
#define CASE(M, N, S) \
    case M: \
        NAME(tile)(p, at, x, sums + 2 * m0 * p->groups, totals, p->wide, M, N, S); \
        break;
            INT4_CASES
#undef CASE
        }
        store_rows(totals, TILE, rows, p->n - n < TILE ? p->n - n : TILE, p->bias, p->out, p->n, m0, n);
    }
}

#include "rows.h"

const Isa ISA_SYMBOL = {
    ISA_NAME,         NAME(supported), DENSE_BLOCK,        INT4_BLOCK,      NAME(dense_bytes), NAME(dense_prepare),
    NAME(dense_rows), NAME(int4_bytes), NAME(int4_prepare), NAME(int4_rows),
    NAME(rms_norm),   NAME(gated),     NAME(attend),
};
