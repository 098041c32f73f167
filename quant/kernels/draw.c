/* One token drawn from a row of float32 logits: softmax(logits / temperature), inverted at a number in [0, 1).
 *
 * Exponentials and sums are float64. Two passes: sums of blocks, then the block in which the number falls. Nothing of the
 * vocabulary's size is stored. Trusts its arguments, which draw.py makes.
 */
#include "module.h"

#include <stdlib.h>

#if defined(__GNUC__)
#define ALWAYS_INLINE static inline __attribute__((always_inline))
#else
#define ALWAYS_INLINE static inline
#endif

enum { DRAW_BLOCK = 512, SUMS = 8, GREATEST = 16 };

typedef struct {
    const float *logits;
    int64_t count;
    double temperature, greatest;
} Law;

/* Weights e^((x - greatest) / temperature) of a block, within 2 units in the last place; 0 below e^-708.7, where the
 * exponent of the power of two becomes 0. Without a branch, so that it becomes vector code. */
ALWAYS_INLINE void weigh_block(const Law *law, int64_t first, int64_t count, double *weights) {
    const double magic = 6755399441055744.0; /* 1.5 * 2^52: adding it rounds to an integer, held in the low bits */
    for (int64_t i = 0; i < count; i++) {
        double x = ((double)law->logits[first + i] - law->greatest) / law->temperature;
        x = x < -709.09 ? -709.09 : x; /* NaN stays NaN */
        double shifted = x * 1.4426950408889634 + magic, n = shifted - magic;
        double r = x - n * 6.93147180369123816490e-01 - n * 1.90821492927058770002e-10;
        double p = 1.0 / 479001600; /* 1 / 12!; the next term is below half a unit for |r| <= ln 2 / 2 */
        p = p * r + 1.0 / 39916800;
        p = p * r + 1.0 / 3628800;
        p = p * r + 1.0 / 362880;
        p = p * r + 1.0 / 40320;
        p = p * r + 1.0 / 5040;
        p = p * r + 1.0 / 720;
        p = p * r + 1.0 / 120;
        p = p * r + 1.0 / 24;
        p = p * r + 1.0 / 6;
        p = p * r + 0.5;
        p = p * r + 1.0;
        p = p * r + 1.0;
        uint64_t bits;
        double power;
        memcpy(&bits, &shifted, sizeof bits);
        bits = (bits << 52) + 0x3ff0000000000000u;
        memcpy(&power, &bits, sizeof power);
        weights[i] = p * power;
    }
}

ALWAYS_INLINE double sum_block(const Law *law, int64_t first, int64_t count) {
    double weights[DRAW_BLOCK], sums[SUMS] = {0}, total = 0;
    weigh_block(law, first, count, weights);
    for (int64_t i = count; i % SUMS; i++) weights[i] = 0;
    for (int64_t i = 0; i < count; i += SUMS)
        for (int j = 0; j < SUMS; j++) sums[j] += weights[i + j];
    for (int j = 0; j < SUMS; j++) total += sums[j];
    return total;
}

/* NaN is passed over; the sum will be NaN. */
ALWAYS_INLINE float greatest_of(const float *x, int64_t count) {
    float lanes[GREATEST], most;
    int64_t i = 0;
    for (int j = 0; j < GREATEST; j++) lanes[j] = -INFINITY;
    for (; i + GREATEST <= count; i += GREATEST)
        for (int j = 0; j < GREATEST; j++) lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
    most = lanes[0];
    for (int j = 1; j < GREATEST; j++) most = lanes[j] > most ? lanes[j] : most;
    for (; i < count; i++) most = x[i] > most ? x[i] : most;
    return most;
}

ALWAYS_INLINE int64_t block_count(const Law *law, int64_t first) {
    return law->count - first < DRAW_BLOCK ? law->count - first : DRAW_BLOCK;
}

/* The first token of a block at which the sum exceeds `wanted`; the last that can be drawn where rounding hides it. */
ALWAYS_INLINE int64_t find(const Law *law, int64_t first, double wanted) {
    double weights[DRAW_BLOCK], sum = 0;
    int64_t count = block_count(law, first), last = 0;
    weigh_block(law, first, count, weights);
    for (int64_t i = 0; i < count; i++) {
        sum += weights[i];
        if (sum > wanted) return first + i;
        if (weights[i] > 0) last = i;
    }
    return first + last;
}

/* -1 where the logits have no finite maximum or hold NaN. `sums` has room for one number a block. */
ALWAYS_INLINE int64_t choose(Law *law, double uniform, double *sums) {
    double total = 0, below = 0;
    int64_t blocks = 0, last = 0;
    law->greatest = greatest_of(law->logits, law->count);
    for (int64_t first = 0; first < law->count; first += DRAW_BLOCK)
        total += sums[blocks++] = sum_block(law, first, block_count(law, first));
    if (!(total >= 0.5 && total < INFINITY)) return -1;
    for (int64_t block = 0; block < blocks; block++) {
        if (below + sums[block] > uniform * total) return find(law, block * DRAW_BLOCK, uniform * total - below);
        if (sums[block] > 0) last = block;
        below += sums[block];
    }
    return find(law, last * DRAW_BLOCK, INFINITY);
}

/* The first of the greatest; -1 where that is not finite or one is NaN. One pass, and then the block that has it. */
ALWAYS_INLINE int64_t first_greatest(const float *x, int64_t count) {
    float most = -INFINITY;
    int64_t block = 0, wrong = 0;
    for (int64_t first = 0; first < count; first += DRAW_BLOCK) {
        int64_t size = count - first < DRAW_BLOCK ? count - first : DRAW_BLOCK;
        float found = greatest_of(x + first, size);
        int unequal = 0;
        for (int64_t i = 0; i < size; i++) unequal |= x[first + i] != x[first + i];
        wrong |= unequal;
        if (found > most) most = found, block = first;
    }
    if (wrong || !(most - most == 0)) return -1;
    while (x[block] != most) block++;
    return block;
}

static int64_t greatest_plain(const float *x, int64_t count) { return first_greatest(x, count); }

static int64_t choose_plain(Law *law, double uniform, double *sums) { return choose(law, uniform, sums); }

#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target("avx2,fma"))) static int64_t choose_wide(Law *law, double uniform, double *sums) {
    return choose(law, uniform, sums);
}
__attribute__((target("avx2,fma"))) static int64_t greatest_wide(const float *x, int64_t count) {
    return first_greatest(x, count);
}
static int can_be_wide(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#else
#define choose_wide choose_plain
#define greatest_wide greatest_plain
static int can_be_wide(void) { return 0; }
#endif

/* draw(wide, logits, count, temperature, uniform) -> token, or -1 */
PyObject *adapt_draw(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    long long a[3];
    (void)self;
    if (!adapt_read_all(args, count, a, 3, 2, "draw(wide, logits, count, temperature, uniform)")) return NULL;
    double temperature = PyFloat_AsDouble(args[3]), uniform = PyFloat_AsDouble(args[4]);
    if (PyErr_Occurred()) return NULL;
    Law law = {.logits = adapt_pointer(a[1]), .count = a[2], .temperature = temperature};
    double *sums = malloc((size_t)(a[2] / DRAW_BLOCK + 1) * sizeof(double));
    if (!sums) return PyErr_NoMemory();
    int64_t token;
    Py_BEGIN_ALLOW_THREADS
    token = a[0] && can_be_wide() ? choose_wide(&law, uniform, sums) : choose_plain(&law, uniform, sums);
    Py_END_ALLOW_THREADS
    free(sums);
    return PyLong_FromLongLong(token);
}

/* greatest(wide, logits, count) -> token, or -1 */
PyObject *adapt_greatest(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    long long a[3];
    (void)self;
    if (!adapt_read_all(args, count, a, 3, 0, "greatest(wide, logits, count)")) return NULL;
    const float *logits = adapt_pointer(a[1]);
    int64_t token;
    Py_BEGIN_ALLOW_THREADS
    token = a[0] && can_be_wide() ? greatest_wide(logits, a[2]) : greatest_plain(logits, a[2]);
    Py_END_ALLOW_THREADS
    return PyLong_FromLongLong(token);
}
