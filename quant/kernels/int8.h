/* The 8-bit product, once for every vector width; int8.c gives the few operations and includes it.
 *
 * Wanted: NAME(x), LANES, V, zero(), load(x), codes(w), fma(a, b, c), add(a, b), sum(v). Every row of x is summed in
 * the same order whatever rows are beside it: a token among others gets what it gets alone.
 */
static inline __attribute__((always_inline)) void NAME(dots)(const int8_t *w, const float *x, int64_t K, float *out,
                                                             const int M) {
    V acc[2][4];
    for (int m = 0; m < M; m++)
        for (int u = 0; u < 4; u++) acc[m][u] = zero();
    int64_t k = 0;
    for (; k + 4 * LANES <= K; k += 4 * LANES) {
        __builtin_prefetch(w + k + 512);
        for (int u = 0; u < 4; u++) {
            V value = codes(w + k + u * LANES);
            for (int m = 0; m < M; m++) acc[m][u] = fma(value, load(x + m * K + k + u * LANES), acc[m][u]);
        }
    }
    for (; k < K; k += LANES) {
        V value = codes(w + k);
        for (int m = 0; m < M; m++) acc[m][0] = fma(value, load(x + m * K + k), acc[m][0]);
    }
    for (int m = 0; m < M; m++) out[m] = sum(add(add(acc[m][0], acc[m][1]), add(acc[m][2], acc[m][3])));
}

static void NAME(rows)(const Int8 *p, int64_t first, int64_t last) {
    for (int64_t m = 0; m < p->M; m += 2)
        for (int64_t n = first; n < last; n++) {
            float sums[2];
            int rows = p->M - m < 2 ? 1 : 2;
            if (rows == 2) NAME(dots)(p->w + n * p->K, p->x + m * p->K, p->K, sums, 2);
            else NAME(dots)(p->w + n * p->K, p->x + m * p->K, p->K, sums, 1);
            for (int r = 0; r < rows; r++) p->out[(m + r) * p->n + n] = float_to_bf16(sums[r] * p->scales[n]);
        }
}

#undef NAME
#undef LANES
#undef V
#undef zero
#undef load
#undef codes
#undef fma
#undef add
#undef sum
