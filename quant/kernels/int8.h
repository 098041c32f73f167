/* The 8-bit product, once for every vector width; int8.c gives the few operations and includes it.
 *
 * Wanted: NAME(x), STEP (codes that a vector of 16-bit integers holds), V, W, zero(), no_words(), codes(w), pairs(x),
 * add_dots(total, a, b), scale_add(scale, words, total), sum(v). Every row of x is summed in the same order whatever rows
 * are beside it: a token among others gets what it gets alone.
 */

/* Of M rows of x, from row m0 on, and one row of the weights. */
static inline __attribute__((always_inline)) void NAME(dots)(const Int8 *p, const int8_t *w, int64_t m0, float *out,
                                                             const int M) {
    const int16_t *x = p->x + m0 * p->groups * GROUP;
    const float *units = p->units + m0 * p->groups;
    V totals[4];
    for (int m = 0; m < M; m++) totals[m] = zero();
    for (int64_t g = 0; g < p->groups; g++, x += GROUP, w += GROUP) {
        int64_t count = group_width(p, g), k = 0;
        W dots[4];
        for (int m = 0; m < M; m++) dots[m] = no_words();
        __builtin_prefetch(w + AHEAD);
        __builtin_prefetch(w + AHEAD + 64);
        for (; k + STEP <= count; k += STEP) {
            W values = codes(w + k);
            for (int m = 0; m < M; m++) dots[m] = add_dots(dots[m], values, pairs(x + m * p->groups * GROUP + k));
        }
        if (k < count) {
            int8_t step[STEP] = {0};
            W values = codes(memcpy(step, w + k, (size_t)(count - k)));
            for (int m = 0; m < M; m++) dots[m] = add_dots(dots[m], values, pairs(x + m * p->groups * GROUP + k));
        }
        for (int m = 0; m < M; m++) totals[m] = scale_add(units[m * p->groups + g], dots[m], totals[m]);
    }
    for (int m = 0; m < M; m++) out[m] = sum(totals[m]);
}

static void NAME(rows)(const Int8 *p, int64_t first, int64_t last) {
    for (int64_t m0 = 0; m0 < p->M; m0 += 4)
        for (int64_t n = first; n < last; n++) {
            float sums[4];
            int rows = (int)(p->M - m0 < 4 ? p->M - m0 : 4);
            const int8_t *w = p->w + n * p->K;
            if (rows == 4) NAME(dots)(p, w, m0, sums, 4);
            else if (rows == 3) NAME(dots)(p, w, m0, sums, 3);
            else if (rows == 2) NAME(dots)(p, w, m0, sums, 2);
            else NAME(dots)(p, w, m0, sums, 1);
            for (int m = 0; m < rows; m++) p->out[(m0 + m) * p->n + n] = float_to_bf16(sums[m] * p->scales[n]);
        }
}

#undef NAME
#undef STEP
#undef V
#undef W
#undef zero
#undef no_words
#undef codes
#undef pairs
#undef add_dots
#undef scale_add
#undef sum
