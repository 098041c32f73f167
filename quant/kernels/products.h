/* The two products, written once for every vector width; avx2.c and avx512.c give the few operations and include it.
 *
 * Wanted from the includer: NAME(x); LANES; types V (LANES floats), W (LANES words of 32 bits, each a pair of 16-bit
 * values), O (what a pair of bf16 values is multiplied as) and HALVES: 2 where O holds the even or the odd values of the
 * pairs as floats, 1 where O is the pairs themselves. The operations: zero, add, scale_add, splat, sum,
 * store_floats, load_words, load_operand, store_operand, operand, multiply_add; for 4 bits no_words, code_pairs,
 * broadcast_word, add_words, add_pairs, word_floats, parameters, and CHAINS(M): in how many sums at once a dot product
 * of M rows is added up, which hides the time that one addition takes. MANY: the product of many rows, or NULL.
 *
 * 4-bit codes are never converted to floating point: x is prepared in fixed point (fixed.h), so that a group's dot
 * products are exact sums of integers:
 *     y_n = sum_g s_ng u_g (sum_k X_k q_nk - z_ng sum_k X_k),  x_k = u_g X_k.
 */
#include "fixed.h"
#include "many.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

enum { STEP = 2 * LANES, STEP_BYTES = HALVES * LANES * 4, VECTORS = TILE / LANES, STRIP = 32, AHEAD = 4096, NEAR = 28672 };

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

/* ---- int4: x is stored per block of rows as [pair of inputs][row], pairs of 16-bit integers ---- */

enum { PAIR_BYTES = 4, LINE_PAIRS = LINE_INPUTS / 2 };

static size_t NAME(int4_bytes)(int64_t M, int64_t K) { return (size_t)(M * K / 2 * PAIR_BYTES); }

static void NAME(int4_prepare)(const uint16_t *x, int64_t M, int64_t K, int64_t groups, void *xs, float *sums) {
    char *to = xs;
    int64_t block = block_rows(M, INT4_BLOCK), width = K / groups;
    for (int64_t m0 = 0; m0 < M; m0 += block, x += block * K) {
        int64_t rows = M - m0 < block ? M - m0 : block;
        for (int64_t g = 0; g < groups; g++, to += width / 2 * PAIR_BYTES * rows)
            for (int64_t m = 0; m < rows; m++, sums += 2) {
                int16_t fixed[LONGEST_GROUP];
                sums[0] = -(float)to_fixed(x + m * K + g * width, width, fixed, sums + 1);
                if (rows == 1) memcpy(to, fixed, sizeof *fixed * (size_t)width);
                else for (int64_t pair = 0; pair < width / 2; pair++)
                    memcpy(to + (pair * rows + m) * PAIR_BYTES, fixed + 2 * pair, PAIR_BYTES);
            }
    }
}

/* One group of one tile: totals[v][m] += scale * unit * (dots - zero * sum). N vectors of the tile at once. */
INLINE void NAME(group)(const uint8_t *at, int64_t lines, int wide, const char *xs, const float *sums,
                        V totals[VECTORS][BLOCK], const int M, const int N) {
    const uint8_t *codes = at + (wide ? 2 * LINE : LINE);
    UNROLL for (int v0 = 0; v0 < VECTORS; v0 += N) {
        const int chains = CHAINS(M); /* sums of integers: any order gives the same */
        W dots[VECTORS][BLOCK][LINE_PAIRS], raw[VECTORS], pairs[VECTORS];
        UNROLL for (int v = 0; v < N; v++) UNROLL for (int m = 0; m < M; m++) UNROLL for (int c = 0; c < chains; c++)
            dots[v][m][c] = no_words();
        const char *x = xs;
        for (int64_t l = 0; l < lines; l++) {
            const uint8_t *line = codes + l * LINE + v0 * 4 * LANES;
            __builtin_prefetch(line + AHEAD);
            UNROLL for (int v = 0; v < N; v++) raw[v] = load_words(line + v * 4 * LANES);
            UNROLL for (int pair = 0; pair < LINE_PAIRS; pair++, x += PAIR_BYTES * M) {
                UNROLL for (int v = 0; v < N; v++) pairs[v] = code_pairs(raw[v], pair);
                UNROLL for (int m = 0; m < M; m++) {
                    W value = broadcast_word(x + PAIR_BYTES * m);
                    UNROLL for (int v = 0; v < N; v++) {
                        W *dot = &dots[v][m][pair % chains];
                        *dot = add_pairs(*dot, pairs[v], value);
                    }
                }
            }
        }
        UNROLL for (int v = 0; v < N; v++) {
            V scale = parameters(at, wide, v0 + v), zero_point = parameters(at, wide, VECTORS + v0 + v);
            UNROLL for (int m = 0; m < M; m++) {
                W whole = dots[v][m][0];
                UNROLL for (int c = 1; c < chains; c++) whole = add_words(whole, dots[v][m][c]);
                V dot = scale_add(zero_point, splat(sums[2 * m]), word_floats(whole));
                totals[v0 + v][m] = scale_add(multiply(scale, splat(sums[2 * m + 1])), dot, totals[v0 + v][m]);
            }
        }
    }
}

INLINE void NAME(tile)(const Int4 *p, const uint8_t *at, const char *xs, const float *sums, float *out, int wide,
                       const int M, const int N) {
    V totals[VECTORS][BLOCK];
    UNROLL for (int v = 0; v < VECTORS; v++) UNROLL for (int m = 0; m < M; m++) totals[v][m] = zero();
    int64_t bytes = (p->lines + (wide ? 2 : 1)) * LINE, width = p->lines * LINE_PAIRS * PAIR_BYTES * M;
    for (int64_t g = 0; g < p->groups; g++, at += bytes, xs += width, sums += 2 * M)
        NAME(group)(at, p->lines, wide, xs, sums, totals, M, N);
    UNROLL for (int v = 0; v < VECTORS; v++) UNROLL for (int m = 0; m < M; m++)
        store_floats(out + m * TILE + v * LANES, totals[v][m]);
}

static void NAME(int4_rows)(const Int4 *p, const void *xs, const float *sums, int64_t m0, int rows, int64_t first,
                            int64_t last) {
    int64_t K = p->groups * p->lines * LINE_INPUTS, bytes = adapt_tile_bytes(p);
    const char *x = (const char *)xs + m0 * K / 2 * PAIR_BYTES;
    sums += 2 * m0 * p->groups;
    for (int64_t n = first; n < last; n += TILE) {
        float totals[BLOCK * TILE];
        const uint8_t *at = p->data + n / TILE * bytes;
        switch (rows) {
#define CASE(M, N) \
    case M: \
        if (p->wide) NAME(tile)(p, at, x, sums, totals, 1, M, N); \
        else NAME(tile)(p, at, x, sums, totals, 0, M, N); \
        break;
            INT4_CASES
#undef CASE
        }
        store_rows(totals, TILE, rows, p->n - n < TILE ? p->n - n : TILE, p->bias, p->out, p->n, m0, n);
    }
}

#include "rows.h"

#define ISA(name, supported, many, many_int4) \
    {name,             supported,         DENSE_BLOCK,        INT4_BLOCK,      NAME(dense_bytes), NAME(dense_prepare), \
     NAME(dense_rows), NAME(int4_bytes),  NAME(int4_prepare), NAME(int4_rows), NAME(rms_norm),    NAME(gated), \
     NAME(attend),     many,              many_int4}

const Isa ISA_SYMBOL = ISA(ISA_NAME, NAME(supported), MANY, NULL);
