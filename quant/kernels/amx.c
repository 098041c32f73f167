/* Many rows of x times bf16 or 4-bit matrices in the tiles of AMX: one instruction multiplies 16 rows of the weight by 16 rows of x,
 * 32 inputs of each.
 *
 * x is laid out once, as tiles: [16 rows][32 inputs] as [pair of inputs][row][2]. A thread takes 32 rows of the weight at a
 * time, lays them out as tiles for itself, and goes over the panels of x with them, two tiles by two. 4-bit weights become bf16
 * numbers on the way, rounded. The order of every sum is that of the inputs.
 */
#include "many.h"

/* GCC from 11 on. Clang has these instructions too; nobody has run them. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __has_include(<amxbf16intrin.h>)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl,avx512bf16,amx-tile,amx-bf16")
#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

enum {
    SIDE = 16,   /* rows of a tile */
    PAIR = 32,   /* of two */
    INPUTS = 32, /* of a tile */
    WORDS = SIDE * INPUTS / 2, /* of 32 bits in a tile: pairs of bf16 values */
    FLOATS = SIDE * SIDE,      /* in a tile of sums */
    LINES = INPUTS / LINE_INPUTS,
    NEAR_BYTES = 1 << 20,      /* of x at a time: half a second-level cache */
};

/* ---- tiles ---- */

/* Eight tiles of 16 rows of 64 bytes. */
static const struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} shapes = {.palette = 1,
            .bytes = {LINE, LINE, LINE, LINE, LINE, LINE, LINE, LINE},
            .rows = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE}};

static void open_tiles(void) { _tile_loadconfig(&shapes); }

/* sums = two tiles of rows of the weight times P of x, over `steps` times 32 inputs: [row of x's tile][weight's tile]. */
INLINE void multiply_tiles(const uint32_t *w, const uint32_t *x, int64_t steps, float *sums, const int P) {
    __asm__ volatile("" ::: "memory"); /* the loads of tiles do not say that they read what was stored before */
    _tile_zero(0);
    _tile_zero(1);
    if (P > 1) _tile_zero(2);
    if (P > 1) _tile_zero(3);
    for (int64_t s = 0; s < steps; s++, w += WORDS, x += WORDS) {
        _tile_loadd(4, w, LINE);
        _tile_loadd(6, x, LINE);
        _tile_loadd(5, w + steps * WORDS, LINE);
        _tile_dpbf16ps(0, 4, 6);
        if (P > 1) _tile_loadd(7, x + steps * WORDS, LINE);
        _tile_dpbf16ps(1, 5, 6);
        if (P > 1) _tile_dpbf16ps(2, 4, 7);
        if (P > 1) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, LINE);
    _tile_stored(1, sums + FLOATS, LINE);
    if (P > 1) _tile_stored(2, sums + 2 * FLOATS, LINE);
    if (P > 1) _tile_stored(3, sums + 3 * FLOATS, LINE);
}

/* Sixteen rows of sixteen words, turned. */
INLINE void turn(__m512 a[SIDE]) {
    __m512 b[SIDE];
    UNROLL for (int i = 0; i < SIDE; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
    UNROLL for (int i = 0; i < SIDE; i += 4) UNROLL for (int j = 0; j < 2; j++) {
        __m512d low = _mm512_castps_pd(b[i + j]), high = _mm512_castps_pd(b[i + j + 2]);
        a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
        a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
    /* a[4 g + c] holds column 4 q + c of rows 4 g .. 4 g + 3 in its quarter q. */
    UNROLL for (int c = 0; c < 4; c++) {
        __m512 even[2], odd[2];
        UNROLL for (int half = 0; half < 2; half++) {
            even[half] = _mm512_shuffle_f32x4(a[8 * half + c], a[8 * half + c + 4], 0x88);
            odd[half] = _mm512_shuffle_f32x4(a[8 * half + c], a[8 * half + c + 4], 0xdd);
        }
        b[c] = _mm512_shuffle_f32x4(even[0], even[1], 0x88);
        b[c + 8] = _mm512_shuffle_f32x4(even[0], even[1], 0xdd);
        b[c + 4] = _mm512_shuffle_f32x4(odd[0], odd[1], 0x88);
        b[c + 12] = _mm512_shuffle_f32x4(odd[0], odd[1], 0xdd);
    }
    UNROLL for (int i = 0; i < SIDE; i++) a[i] = b[i];
}

/* Those of the next `count` inputs that a tile takes. */
static __mmask32 inputs(int64_t count) { return count < INPUTS ? ((__mmask32)1 << count) - 1 : (__mmask32)-1; }

/* ---- x ---- */

/* Rows and inputs that are not there are zeros. */
static void lay_tile(const Job *job, int64_t m, int64_t k, uint32_t *to) {
    int64_t rows = least(SIDE, job->M - m);
    __mmask32 some = inputs(job->K - k);
    __m512 words[SIDE];
    UNROLL for (int r = 0; r < SIDE; r++)
        words[r] = _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(r < rows ? some : 0, job->x + (m + r) * job->K + k));
    turn(words);
    UNROLL for (int r = 0; r < SIDE; r++) _mm512_storeu_ps(to + r * SIDE, words[r]);
}

static int64_t panels(int64_t M) { return ceil_div(M, SIDE); }

static int64_t steps_of(int64_t K) { return ceil_div(K, INPUTS); }

static int64_t most_rows(int64_t K) {
    int64_t rows = NEAR_BYTES / (2 * K) / PAIR * PAIR;
    return least(rows > 2 * PAIR ? rows : 2 * PAIR, MOST_ROWS);
}

static size_t x_bytes(int64_t M, int64_t K) { return sizeof(uint32_t) * (size_t)(panels(M) * steps_of(K) * WORDS); }

static void lay_panels(const void *what, int64_t from, int64_t end) {
    const Many *many = what;
    int64_t steps = steps_of(many->job->K);
    for (int64_t panel = from; panel < end; panel++)
        for (int64_t s = 0; s < steps; s++)
            lay_tile(many->job, panel * SIDE, s * INPUTS, (uint32_t *)many->x + (panel * steps + s) * WORDS);
}

/* ---- the weight ---- */

/* `rows` rows of the weight, up to 32, from `first` on, as two tiles side by side: to[tile][step]; what is not there is zeros. */
static void read_dense(const Dense *d, int64_t K, int64_t first, int64_t rows, uint32_t *to) {
    int64_t steps = steps_of(K);
    for (int64_t r = 0; r < PAIR; r++) {
        uint32_t *at = to + (r / SIDE * steps * SIDE + r % SIDE) * SIDE;
        const uint16_t *from = d->w + (first + r) * K;
        for (int64_t k = 0; k < K; k += INPUTS, at += WORDS)
            _mm512_storeu_si512(at, _mm512_maskz_loadu_epi16(r < rows ? inputs(K - k) : 0, from + k));
    }
}

static __m512 widened(__m256i halves) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16)); }

/* bf16 numbers of two vectors, pair by pair. */
static __m512 in_pairs(__m512 low, __m512 high) {
    __m512i even = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(low));
    __m512i odd = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(high));
    return _mm512_castsi512_ps(_mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
}

typedef struct {
    __m512 scale, shift; /* a weight is code * scale + shift */
} Group;

static Group read_group(const Int4 *p, const uint8_t *at) {
    const __m256i *narrow = (const __m256i *)at;
    __m512 scale = p->wide ? _mm512_loadu_ps(at) : widened(_mm256_loadu_si256(narrow));
    __m512 zero = p->wide ? _mm512_loadu_ps(at + LINE) : widened(_mm256_loadu_si256(narrow + 1));
    return (Group){scale, _mm512_mul_ps(scale, _mm512_sub_ps(_mm512_setzero_ps(), zero))};
}

/* The eight inputs of one line of a tile of the packed matrix, in pairs. */
INLINE void read_line(const Int4 *p, const uint8_t *tile, int64_t line, __m512 pairs[LINE_INPUTS / 2]) {
    const __m512i low = _mm512_set1_epi32(15);
    int64_t head = p->wide ? 2 : 1;
    const uint8_t *start = tile + line / p->lines * (p->lines + head) * LINE;
    Group g = read_group(p, start);
    __m512i codes = _mm512_loadu_si512(start + (head + line % p->lines) * LINE);
    UNROLL for (unsigned pair = 0; pair < LINE_INPUTS / 2; pair++) {
        __m512i even = _mm512_and_si512(_mm512_srli_epi32(codes, 4 * pair), low);
        __m512i odd = _mm512_and_si512(_mm512_srli_epi32(codes, 16 + 4 * pair), low);
        pairs[pair] = in_pairs(_mm512_fmadd_ps(_mm512_cvtepi32_ps(even), g.scale, g.shift),
                               _mm512_fmadd_ps(_mm512_cvtepi32_ps(odd), g.scale, g.shift));
    }
}

/* The lines of one tile of the packed matrix from `line` on, up to `count` of them, as one of ours. */
static void read_lines(const Int4 *p, const uint8_t *tile, int64_t line, int64_t count, uint32_t *to) {
    __m512 words[SIDE];
    UNROLL for (int i = 0; i < SIDE; i++) words[i] = _mm512_setzero_ps();
    UNROLL for (int l = 0; l < LINES; l++)
        if (l < count) read_line(p, tile, line + l, words + l * LINE_INPUTS / 2);
    turn(words);
    UNROLL for (int r = 0; r < SIDE; r++) _mm512_storeu_ps(to + r * SIDE, words[r]);
}

/* As read_dense; `first` begins a tile. */
static void read_int4(const Int4 *p, int64_t K, int64_t first, int64_t rows, uint32_t *to) {
    int64_t steps = steps_of(K);
    for (int64_t t = 0; t < 2; t++, to += steps * WORDS) {
        const uint8_t *tile = p->data + (first / TILE + t) * adapt_tile_bytes(p);
        if (t * SIDE >= rows) memset(to, 0, sizeof *to * (size_t)(steps * WORDS));
        else for (int64_t s = 0; s < steps; s++) read_lines(p, tile, s * LINES, K / LINE_INPUTS - s * LINES, to + s * WORDS);
    }
}

/* ---- the product ---- */

/* Where a product goes: of one part of a job. */
typedef struct {
    const uint16_t *bias;
    uint16_t *out;
    int64_t stride;
} Target;

/* A tile of sums, of which `rows` rows of the weight and `tokens` rows of x are there. */
static void store_tile(const Target *target, const float *sums, int64_t first, int64_t rows, int64_t m, int64_t tokens) {
    __mmask16 there = (__mmask16)((1u << rows) - 1);
    __m512 words[SIDE], bias = _mm512_setzero_ps();
    float turned[SIDE][SIDE];
    UNROLL for (int r = 0; r < SIDE; r++) words[r] = _mm512_loadu_ps(sums + r * SIDE);
    turn(words);
    UNROLL for (int r = 0; r < SIDE; r++) _mm512_storeu_ps(turned[r], words[r]);
    if (target->bias) bias = widened(_mm256_maskz_loadu_epi16(there, target->bias + first));
    for (int64_t r = 0; r < tokens; r++) {
        __m256bh narrow = _mm512_cvtneps_pbh(_mm512_add_ps(_mm512_loadu_ps(turned[r]), bias));
        _mm256_mask_storeu_epi16(target->out + (m + r) * target->stride + first, there, (__m256i)narrow);
    }
}

/* What a thread has for itself: 32 rows of the weight, and sums. */
static size_t own_bytes(int64_t K) { return sizeof(uint32_t) * (size_t)(2 * steps_of(K) * WORDS + 4 * FLOATS); }

/* `rows` rows from `first` on, which `weights` holds, times all panels. */
static void multiply(const Many *many, const uint32_t *weights, float *sums, const Target *target, int64_t first, int64_t rows) {
    int64_t M = many->job->M, steps = steps_of(many->job->K), count = panels(M);
    for (int64_t p = 0; p < count; p += 2) {
        const uint32_t *x = (const uint32_t *)many->x + p * steps * WORDS;
        if (p + 1 < count) multiply_tiles(weights, x, steps, sums, 2);
        else multiply_tiles(weights, x, steps, sums, 1);
        for (int i = 0; i < 4; i++) {
            int64_t n = i % 2 * SIDE, m = (p + i / 2) * SIDE;
            if (n < rows && m < M)
                store_tile(target, sums + i * FLOATS, first + n, least(SIDE, rows - n), m, least(SIDE, M - m));
        }
    }
}

static void run_task(const Many *many, void *own, int64_t part, int64_t first, int64_t last) {
    const Job *job = many->job;
    const Dense *d = &job->dense[part];
    const Int4 *p = &job->int4;
    Target target = job->parts ? (Target){d->bias, d->out, d->out_stride} : (Target){p->bias, p->out, p->n};
    uint32_t *weights = own;
    float *sums = (float *)(weights + 2 * steps_of(job->K) * WORDS);
    for (int64_t row = first; row < last; row += PAIR) {
        int64_t rows = least(PAIR, last - row);
        if (job->parts) read_dense(d, job->K, row, rows, weights);
        else read_int4(p, job->K, row, rows, weights);
        multiply(many, weights, sums, &target, row, rows);
    }
}

static void close_tiles(void) { _tile_release(); }

const Multiplier adapt_many_amx = {.height = PAIR, .most_rows = most_rows, .own_bytes = own_bytes, .x_bytes = x_bytes,
                                   .panels = panels, .lay_panels = lay_panels, .run_task = run_task,
                                   .enter = open_tiles, .leave = close_tiles};

#include "target_end.h"

enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 }; /* of arch_prctl(2) */

/* Linux gives tiles to a process that asks; threads that already run get them too. */
static int ask_for_amx(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    int has_bf16 = d >> 22 & 1, has_tiles = d >> 24 & 1;
    return has_bf16 && has_tiles && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

int adapt_has_amx(void) {
    static atomic_int known; /* 0: not yet */
    int state = atomic_load_explicit(&known, memory_order_relaxed);
    if (!state) atomic_store_explicit(&known, state = ask_for_amx() ? 1 : -1, memory_order_relaxed);
    return state > 0;
}
#else
const Multiplier adapt_many_amx = {0};
int adapt_has_amx(void) { return 0; }
#endif
