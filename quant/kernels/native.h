/* What the module (module.c) and the instruction sets (scalar.c, avx2.c, ...) share.
 *
 * bf16 values travel as uint16_t. Rows are outputs of a linear layer unless said otherwise.
 */
#ifndef ADAPT_NATIVE_H
#define ADAPT_NATIVE_H

#include <math.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum {
    TILE = 16,       /* rows of a 4-bit tile */
    LINE = 64,       /* bytes of a tile that hold 8 inputs of its 16 rows */
    LINE_INPUTS = 8,
    LONGEST_GROUP = 128, /* inputs of a packed group at most */
    BLOCK = 8,       /* rows of x that one pass over the weights can serve at most */
    ATTEND_HEADS = 8, /* query heads that one pass over keys and values can serve at most */
    PAD = 16,         /* heads in fp32 are padded to a multiple of this with zeros */
    SPAN = 512,       /* positions that are attended to by themselves, by whichever thread comes */
};

/* One bf16 matrix [n, K], row-major, and where its product goes. */
typedef struct {
    const uint16_t *w;
    const uint16_t *bias; /* [n] or NULL */
    uint16_t *out;        /* [M, n], rows `out_stride` apart */
    int64_t n, out_stride;
} Dense;

/* One packed 4-bit matrix: tiles of 16 rows; a tile is a list of groups; a group is its parameters (16 scales, 16
 * zeros: 64 bytes of bf16, or 128 bytes of fp32 when `wide`) and then group / 8 lines of codes. */
typedef struct {
    const uint8_t *data;
    const uint16_t *bias; /* [n] or NULL */
    uint16_t *out;        /* [M, n] */
    int64_t n, groups, lines;
    int wide;
} Int4;

enum { SILU, GELU_TANH }; /* activations of a gate */

/* Attention of one token: `heads` queries of `width`, in `groups` that share keys and values. The positions are taken in
 * spans; each gives its sums, and they are joined in their order once all are there. */
typedef struct {
    const uint16_t *keys, *values; /* [groups, positions, width], the groups `stride` values apart */
    int64_t heads, groups, width, stride;
    int64_t first, count; /* the positions that are seen */
    int64_t padded;       /* width as a multiple of PAD */
    const float *q;       /* [heads, padded], scaled */
    float *sums;          /* [spans, heads, padded]: values, weighted by e^(score - largest) */
    float *tops;          /* [spans, heads, 2]: the largest score, and the sum of the weights */
    atomic_llong *joined; /* [groups]: spans that are done; 0 at first */
    uint16_t *out;        /* [heads, width] */
} Attention;

static inline int64_t count_spans(int64_t positions) { return (positions + SPAN - 1) / SPAN; }

/* An instruction set. `prepare_*` lay x [M, K] out for the products; each product serves rows [first, last) of the
 * weights (a multiple of TILE for int4) for `rows` <= BLOCK rows of x from row m0 on. `sums` has two floats for each
 * group and row of x, which the instruction set chooses. */
typedef struct {
    const char *name;
    int (*supported)(void);
    int dense_block, int4_block; /* rows of x in one pass, at most */
    size_t (*dense_bytes)(int64_t M, int64_t K);
    void (*dense_prepare)(const uint16_t *x, int64_t M, int64_t K, void *xs);
    void (*dense_rows)(const Dense *d, int64_t K, const void *xs, int64_t m0, int rows, int64_t first, int64_t last);
    size_t (*int4_bytes)(int64_t M, int64_t K);
    void (*int4_prepare)(const uint16_t *x, int64_t M, int64_t K, int64_t groups, void *xs, float *sums);
    void (*int4_rows)(const Int4 *p, const void *xs, const float *sums, int64_t m0, int rows, int64_t first, int64_t last);
    void (*rms_norm)(const uint16_t *x, const float *factor, uint16_t *out, int64_t rows, int64_t D, float eps);
    void (*gated)(int kind, const uint16_t *gate, const uint16_t *up, uint16_t *out, int64_t count);
    void (*attend)(const Attention *a, int64_t group, int64_t span);
    const struct Multiplier *many;      /* the bf16 product of many rows of x (many.h); NULL where it has none */
    const struct Multiplier *many_int4; /* and the 4-bit one */
} Isa;

/* M rows in passes of at most `widest`, as equal as can be. */
static inline int64_t block_rows(int64_t M, int64_t widest) {
    int64_t passes = (M + widest - 1) / widest;
    return (M + passes - 1) / passes;
}

extern const Isa adapt_isa_scalar, adapt_isa_avx2, adapt_isa_avx512, adapt_isa_avx512bf16, adapt_isa_amx;

/* An address as Python gives it. */
static inline const void *adapt_pointer(long long number) { return (const void *)(uintptr_t)number; }

/* Bytes of one tile: of 16 rows of the matrix. */
static inline int64_t adapt_tile_bytes(const Int4 *p) { return p->groups * (p->lines + (p->wide ? 2 : 1)) * LINE; }

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* The first cache line of a block that has one byte short of a line to spare. */
static inline void *adapt_aligned(void *block) { return (void *)(((uintptr_t)block + LINE - 1) / LINE * LINE); }

/* Bytes in whole cache lines. */
static inline size_t adapt_lines(size_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }

static inline float bf16_to_float(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

static inline int word_at(const char *from) {
    int word;
    memcpy(&word, from, sizeof word);
    return word;
}

/* Round to nearest, ties to even; NaN stays NaN. Free of branches, so that a loop over rows becomes vector code. */
static inline uint16_t float_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

/* sums [rows][count] of a block of x -> out [M, ld], columns first .. first + count - 1. */
static inline void store_rows(const float *sums, int64_t stride, int rows, int64_t count, const uint16_t *bias,
                              uint16_t *out, int64_t ld, int64_t m0, int64_t first) {
    for (int m = 0; m < rows; m++) {
        uint16_t *to = out + (m0 + m) * ld + first;
        const float *from = sums + m * stride;
        if (bias) {
            for (int64_t i = 0; i < count; i++) to[i] = float_to_bf16(from[i] + bf16_to_float(bias[first + i]));
        } else {
            for (int64_t i = 0; i < count; i++) to[i] = float_to_bf16(from[i]);
        }
    }
}

#endif
