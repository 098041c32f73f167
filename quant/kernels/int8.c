/* Few bf16 rows times a matrix of 8-bit codes with a scale for each of its rows: out = (x q^T) * scale.
 *
 * For the head, whose 16-bit weights are the largest part of what a token of a small model reads. x is in fixed point, in
 * groups of 128 inputs that share a unit, so that a group's dot product is an exact sum of integers. Like module.c it
 * trusts its arguments, which native8.py checks.
 */
#include "fixed.h"
#include "job.h"
#include "module.h"

#include <stdatomic.h>
#include <stdlib.h>

enum { GROUP = 128, AHEAD = 4096 };

typedef struct Int8 Int8;
struct Int8 {
    void (*rows)(const Int8 *p, int64_t first, int64_t last);
    const int8_t *w;     /* [n, K] */
    const float *scales; /* [n] */
    const int16_t *x;    /* [M, groups, GROUP], the last group filled up with zeros */
    const float *units;  /* [M, groups] */
    uint16_t *out;       /* [M, n] */
    int64_t M, K, n, groups, step;
    atomic_llong next;
};

/* Inputs of a group: GROUP, but for the last one. */
static inline int64_t group_width(const Int8 *p, int64_t group) {
    int64_t left = p->K - group * GROUP;
    return left < GROUP ? left : GROUP;
}

static int32_t scalar_dot(const int8_t *w, const int16_t *x, int64_t count) {
    int32_t total = 0;
    for (int64_t k = 0; k < count; k++) total += w[k] * x[k];
    return total;
}

static void scalar_rows(const Int8 *p, int64_t first, int64_t last) {
    for (int64_t m = 0; m < p->M; m++)
        for (int64_t n = first; n < last; n++) {
            float total = 0;
            for (int64_t g = 0; g < p->groups; g++) {
                int64_t at = g * GROUP, count = group_width(p, g), group = m * p->groups + g;
                total += p->units[group] * (float)scalar_dot(p->w + n * p->K + at, p->x + group * GROUP, count);
            }
            p->out[m * p->n + n] = float_to_bf16(total * p->scales[n]);
        }
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#include "target256.h"
#include "sums256.h"
#define NAME(x) avx2_##x
#define STEP 16
#define V __m256
#define W __m256i
#define zero() _mm256_setzero_ps()
#define no_words() _mm256_setzero_si256()
#define codes(from) _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(from)))
#define pairs(from) _mm256_loadu_si256((const __m256i *)(from))
#define add_dots(total, a, b) _mm256_add_epi32(total, _mm256_madd_epi16(a, b))
#define scale_add(scale, words, total) _mm256_fmadd_ps(_mm256_set1_ps(scale), _mm256_cvtepi32_ps(words), total)
#define sum(v) sum256(v)
#include "int8.h"
#include "target_end.h"
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw")
#endif
#define NAME(x) avx512_##x
#define add_dots(total, a, b) _mm512_add_epi32(total, _mm512_madd_epi16(a, b))
#include "int8_512.h"
#include "target_end.h"
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512vnni"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vnni")
#endif
#define NAME(x) vnni_##x
#define add_dots(total, a, b) _mm512_dpwssd_epi32(total, a, b)
#include "int8_512.h"
#include "target_end.h"
#else
#define avx2_rows scalar_rows
#define avx512_rows scalar_rows
#define vnni_rows scalar_rows
#endif

static void work(void *data) {
    Int8 *p = data;
    for (;;) {
        int64_t first = atomic_fetch_add_explicit(&p->next, p->step, memory_order_relaxed);
        if (first >= p->n) return;
        p->rows(p, first, first + p->step < p->n ? first + p->step : p->n);
    }
}

/* x [M, K] in fixed point, with what it takes at `p`. */
static void prepare(Int8 *p, const uint16_t *x, int16_t *fixed, float *units) {
    memset(fixed, 0, sizeof *fixed * (size_t)(p->M * p->groups * GROUP));
    for (int64_t m = 0; m < p->M; m++)
        for (int64_t g = 0; g < p->groups; g++) {
            int64_t at = g * GROUP, count = group_width(p, g), group = m * p->groups + g;
            to_fixed(x + m * p->K + at, count, fixed + group * GROUP, units + group);
        }
    p->x = fixed;
    p->units = units;
}

static int run(Int8 *p, const uint16_t *x, int64_t threads, Team team) {
    p->groups = (p->K + GROUP - 1) / GROUP;
    size_t count = (size_t)(p->M * p->groups), bytes = count * GROUP * sizeof(int16_t);
    char *block = malloc(bytes + count * sizeof(float) + LINE);
    if (!block) return 0;
    int16_t *fixed = adapt_aligned(block);
    prepare(p, x, fixed, (float *)((char *)fixed + bytes));
    p->step = least(chunk_bytes(p->M, 1) / p->K + 1, ceil_div(p->n, 4 * (threads < 1 ? 1 : threads)));
    atomic_init(&p->next, 0);
    if (threads > 1 && team && p->n * p->K * p->M > 600000) team(work, p, (unsigned)threads, 0);
    else work(p);
    free(block);
    return 1;
}

/* int8(team, threads, isa, x, M, K, w, n, out, scales); K is a multiple of 16 */
PyObject *adapt_int8(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    long long a[10];
    (void)self;
    if (!adapt_read_all(args, count, a, 10, 0, "int8(team, threads, isa, x, M, K, w, n, out, scales)")) return NULL;
    const Isa *isa = adapt_find_isa(a[2]);
    if (!isa) return NULL;
    Int8 p = {.w = adapt_pointer(a[6]), .scales = adapt_pointer(a[9]),
              .out = (uint16_t *)(uintptr_t)a[8], .M = a[4], .K = a[5], .n = a[7]};
    p.rows = isa == &adapt_isa_scalar ? scalar_rows
             : isa == &adapt_isa_avx2 ? avx2_rows
             : isa == &adapt_isa_avx512 ? avx512_rows
                                        : vnni_rows;
    int done = 1;
    Py_BEGIN_ALLOW_THREADS
    if (p.M > 0 && p.n > 0) done = run(&p, (const uint16_t *)(uintptr_t)a[3], a[1], (Team)(uintptr_t)a[0]);
    Py_END_ALLOW_THREADS
    if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}
