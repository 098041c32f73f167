/* Plain C for any processor, and the reference that every other instruction set is checked against. It shares no
 * code with products.h on purpose. */
#include "native.h"

static int supported(void) { return 1; }

static size_t x_bytes(int64_t M, int64_t K) { return (size_t)(M * K) * sizeof(float); }

static void prepare(const uint16_t *x, int64_t M, int64_t K, void *xs) {
    float *to = xs;
    for (int64_t i = 0; i < M * K; i++) to[i] = bf16_to_float(x[i]);
}

static void int4_prepare(const uint16_t *x, int64_t M, int64_t K, int64_t groups, void *xs, float *sums) {
    int64_t width = K / groups;
    prepare(x, M, K, xs);
    for (int64_t m = 0; m < M; m++)
        for (int64_t g = 0; g < groups; g++) {
            float total = 0;
            for (int64_t k = 0; k < width; k++) total += bf16_to_float(x[m * K + g * width + k]);
            sums[2 * (m * groups + g)] = total;
        }
}

static float dot(const uint16_t *w, const float *x, int64_t K) {
    float sums[8] = {0};
    int64_t k = 0;
    for (; k + 8 <= K; k += 8)
        for (int i = 0; i < 8; i++) sums[i] += bf16_to_float(w[k + i]) * x[k + i];
    for (; k < K; k++) sums[k & 7] += bf16_to_float(w[k]) * x[k];
    return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

static void dense_rows(const Dense *d, int64_t K, const void *xs, int64_t m0, int rows, int64_t first, int64_t last) {
    const float *x = (const float *)xs + m0 * K;
    for (int64_t n = first; n < last; n++) {
        float sums[BLOCK];
        for (int m = 0; m < rows; m++) sums[m] = dot(d->w + n * K, x + m * K, K);
        store_rows(sums, 1, rows, 1, d->bias, d->out, d->out_stride, m0, n);
    }
}

/* Input k (of 8) of row r (of 16) in a line. */
static int code(const uint8_t *line, int r, int k) {
    uint32_t word;
    memcpy(&word, line + 4 * r, sizeof word);
    return word >> (k % 2 * 16 + k / 2 * 4) & 15;
}

static float parameter(const uint8_t *head, int wide, int index) {
    float value;
    uint16_t narrow;
    if (wide) {
        memcpy(&value, head + 4 * index, sizeof value);
        return value;
    }
    memcpy(&narrow, head + 2 * index, sizeof narrow);
    return bf16_to_float(narrow);
}

static void group_dots(const uint8_t *codes, int64_t lines, const float *x, float dots[TILE]) {
    for (int r = 0; r < TILE; r++) dots[r] = 0;
    for (int64_t l = 0; l < lines; l++)
        for (int k = 0; k < LINE_INPUTS; k++) {
            float value = x[l * LINE_INPUTS + k];
            for (int r = 0; r < TILE; r++) dots[r] += value * (float)code(codes + l * LINE, r, k);
        }
}

static void int4_rows(const Int4 *p, const void *xs, const float *sums, int64_t m0, int rows, int64_t first,
                      int64_t last) {
    int64_t head = p->wide ? 2 * LINE : LINE, group = head + p->lines * LINE, width = p->lines * LINE_INPUTS;
    for (int64_t n = first; n < last; n += TILE)
        for (int m = 0; m < rows; m++) {
            const float *x = (const float *)xs + (m0 + m) * p->groups * width;
            float totals[TILE] = {0}, dots[TILE];
            for (int64_t g = 0; g < p->groups; g++) {
                const uint8_t *at = p->data + (n / TILE * p->groups + g) * group;
                group_dots(at + head, p->lines, x + g * width, dots);
                for (int r = 0; r < TILE; r++)
                    totals[r] += parameter(at, p->wide, r) *
                                 (dots[r] - parameter(at, p->wide, TILE + r) * sums[2 * ((m0 + m) * p->groups + g)]);
            }
            int64_t count = p->n - n < TILE ? p->n - n : TILE;
            store_rows(totals, TILE, 1, count, p->bias, p->out, p->n, m0 + m, n);
        }
}

static void rms_norm(const uint16_t *x, const float *factor, uint16_t *out, int64_t rows, int64_t D, float eps) {
    for (int64_t m = 0; m < rows; m++, x += D, out += D) {
        double total = 0;
        for (int64_t d = 0; d < D; d++) total += (double)bf16_to_float(x[d]) * bf16_to_float(x[d]);
        float scale = (float)(1.0 / sqrt(total / (double)D + eps));
        for (int64_t d = 0; d < D; d++) out[d] = float_to_bf16(bf16_to_float(x[d]) * scale * factor[d]);
    }
}

static void gated(int kind, const uint16_t *gate, const uint16_t *up, uint16_t *out, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        float x = bf16_to_float(gate[i]);
        float share = kind == GELU_TANH ? 0.5f * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)))
                                        : 1.0f / (1.0f + expf(-x));
        out[i] = float_to_bf16(x * share * bf16_to_float(up[i]));
    }
}

/* Scores are computed anew rather than kept: once for the largest, once for the sums. */
static void attend(const Attention *a, int64_t group, int64_t span) {
    int64_t size = a->heads / a->groups, D = a->width, start = span * SPAN, left = a->count - start;
    int64_t first = group * a->stride + (a->first + start) * D, count = left < SPAN ? left : SPAN;
    for (int64_t head = group * size; head < (group + 1) * size; head++) {
        const float *q = a->q + head * a->padded;
        float *sums = a->sums + (span * a->heads + head) * a->padded, *top = a->tops + (span * a->heads + head) * 2;
        float largest = -INFINITY, total = 0;
        for (int64_t t = 0; t < count; t++) {
            float score = dot(a->keys + first + t * D, q, D);
            largest = score > largest ? score : largest;
        }
        for (int64_t d = 0; d < D; d++) sums[d] = 0;
        for (int64_t t = 0; t < count; t++) {
            float weight = expf(dot(a->keys + first + t * D, q, D) - largest);
            const uint16_t *value = a->values + first + t * D;
            for (int64_t d = 0; d < D; d++) sums[d] += weight * bf16_to_float(value[d]);
            total += weight;
        }
        top[0] = largest;
        top[1] = total;
    }
}

const Isa adapt_isa_scalar = {
    "scalar", supported, BLOCK, BLOCK, x_bytes, prepare, dense_rows, x_bytes, int4_prepare, int4_rows,
    rms_norm, gated, attend, NULL, NULL,
};
