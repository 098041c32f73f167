/* Many rows of x times bf16 matrices, with eight lanes and twelve sums at once: three vectors of x by four rows of the weight.
 *
 * Both are fp32 while they are multiplied. x is laid out once, in panels of up to 24 of its rows, [input][row]. A thread
 * takes a chunk of the weight's rows, 256 inputs at a time, and goes over the panels with it: the part of a panel in use
 * stays in the first-level cache, that of the chunk in the second. More than 384 rows of x are taken in turn. The order of
 * every sum is that of the inputs.
 */
#include "gemm.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <stdlib.h>

#include "target256.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
/* Read from memory once and not again with every use: twelve sums, three of these and one factor fill the registers. */
#define IN_REGISTER(value) __asm__("" : "+x"(value))

enum { LANES = 8, HEIGHT = 4, WIDEST = 3, DEPTH = 256, CHUNK = 64, MOST_ROWS = 384 };
enum { ALONE = 100000 }; /* values of x that one thread lays out sooner than others wake */

/* What a thread has for itself. */
typedef struct {
    float weights[CHUNK * DEPTH];                 /* [row of the weight][input] */
    float sums[CHUNK * MOST_ROWS];                /* [row of the weight][row of x], until the next inputs */
    float done[MOST_ROWS * CHUNK];                /* [row of x][row of the weight] */
} Own;

typedef struct {
    const Job *job;
    int64_t vectors, panels; /* of x, as equal as can be: 3 vectors or 2 */
    int64_t chunks, height;
    int64_t ends[MAX_PARTS]; /* chunk after the last of each part */
    float *x;
    Own *own;
    atomic_llong task, entered; /* the next chunk, and thread */
} Gemm;

/* ---- x ---- */

/* The vectors before panel `at`. */
static int64_t vectors_before(const Gemm *g, int64_t at) {
    return at * (g->vectors / g->panels) + least(at, g->vectors % g->panels);
}

static __m256 widened(__m128i halves) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16)); }

/* Eight inputs of eight rows, turned: to[k * stride + row]. */
static void turn(const uint16_t *from, int64_t ld, float *to, int64_t stride) {
    __m128i a[8], b[8];
    UNROLL for (int r = 0; r < 8; r++) a[r] = _mm_loadu_si128((const __m128i *)(from + r * ld));
    UNROLL for (int r = 0; r < 4; r++) {
        b[2 * r] = _mm_unpacklo_epi16(a[2 * r], a[2 * r + 1]);
        b[2 * r + 1] = _mm_unpackhi_epi16(a[2 * r], a[2 * r + 1]);
    }
    UNROLL for (int half = 0; half < 2; half++) UNROLL for (int pair = 0; pair < 2; pair++) {
        a[4 * half + 2 * pair] = _mm_unpacklo_epi32(b[4 * pair + half], b[4 * pair + 2 + half]);
        a[4 * half + 2 * pair + 1] = _mm_unpackhi_epi32(b[4 * pair + half], b[4 * pair + 2 + half]);
    }
    UNROLL for (int half = 0; half < 2; half++) UNROLL for (int two = 0; two < 2; two++) {
        float *at = to + (4 * half + 2 * two) * stride;
        _mm256_storeu_ps(at, widened(_mm_unpacklo_epi64(a[4 * half + two], a[4 * half + 2 + two])));
        _mm256_storeu_ps(at + stride, widened(_mm_unpackhi_epi64(a[4 * half + two], a[4 * half + 2 + two])));
    }
}

/* A vector of rows of x, from row m on; rows and inputs that are not there are zeros and not stored. */
static void lay_vector(const Job *job, int64_t m, float *to, int64_t stride) {
    int64_t rows = least(LANES, job->M - m), K = job->K, k = 0;
    const uint16_t *x = job->x + m * K;
    if (rows == LANES)
        for (; k + LANES <= K; k += LANES) turn(x + k, K, to + k * stride, stride);
    for (; k < K; k += LANES) {
        uint16_t some[LANES * LANES] = {0};
        float turned[LANES * LANES];
        int64_t count = least(LANES, K - k);
        for (int64_t r = 0; r < rows; r++) memcpy(some + r * LANES, x + r * K + k, sizeof *x * (size_t)count);
        turn(some, LANES, turned, LANES);
        for (int64_t i = 0; i < count; i++) memcpy(to + (k + i) * stride, turned + i * LANES, sizeof *to * LANES);
    }
}

static void lay_panels(const void *what, int64_t from, int64_t end) {
    const Gemm *g = what;
    for (int64_t panel = from; panel < end; panel++) {
        int64_t first = vectors_before(g, panel), count = vectors_before(g, panel + 1) - first;
        float *to = g->x + first * LANES * g->job->K;
        for (int64_t v = 0; v < count; v++) lay_vector(g->job, (first + v) * LANES, to + v * LANES, count * LANES);
    }
}

/* ---- the weight ---- */

/* What follows is fetched meanwhile: the same rows' next inputs, or the first ones of the chunk behind this. */
static void read_rows(const Job *job, const Dense *d, int64_t first, int64_t rows, int64_t k, int64_t count, float *to) {
    int64_t ahead = k + count < job->K ? DEPTH : CHUNK * job->K - k;
    for (int64_t r = 0; r < rows; r++, to += DEPTH) {
        const uint16_t *from = d->w + (first + r) * job->K + k;
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) {
            if (i % (LINE / 2) == 0) __builtin_prefetch(from + i + ahead);
            _mm256_storeu_ps(to + i, widened(_mm_loadu_si128((const __m128i *)(from + i))));
        }
        for (; i < count; i++) to[i] = bf16_to_float(from[i]);
    }
}

/* ---- the product ---- */

/* Four rows of four vectors are eight rows of four values, [row of x][row of the weight]. */
INLINE void store_turned(float *to, __m256 a, __m256 b, __m256 c, __m256 d) {
    __m256 ab = _mm256_unpacklo_ps(a, b), cd = _mm256_unpacklo_ps(c, d);
    __m256 AB = _mm256_unpackhi_ps(a, b), CD = _mm256_unpackhi_ps(c, d);
    __m256 rows[4] = {_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee), _mm256_shuffle_ps(AB, CD, 0x44),
                      _mm256_shuffle_ps(AB, CD, 0xee)};
    UNROLL for (int r = 0; r < 4; r++) {
        _mm_storeu_ps(to + r * CHUNK, _mm256_castps256_ps128(rows[r]));
        _mm_storeu_ps(to + (r + 4) * CHUNK, _mm256_extractf128_ps(rows[r], 1));
    }
}

/* Four rows of the weight by P vectors of x, over `count` inputs. The sums go on where they stopped (`more`), and stop
 * in `sums`, or in `done` where that is given. */
INLINE void tile(const float *w, int64_t count, const float *x, float *sums, int more, float *done, const int P) {
    __m256 acc[HEIGHT][WIDEST];
    UNROLL for (int r = 0; r < HEIGHT; r++) UNROLL for (int p = 0; p < P; p++)
        acc[r][p] = more ? _mm256_loadu_ps(sums + r * MOST_ROWS + p * LANES) : _mm256_setzero_ps();
    for (int64_t k = 0; k < count; k++, x += P * LANES) {
        __m256 values[WIDEST];
        UNROLL for (int p = 0; p < P; p++) {
            values[p] = _mm256_loadu_ps(x + p * LANES);
            IN_REGISTER(values[p]);
        }
        UNROLL for (int r = 0; r < HEIGHT; r++) {
            __m256 factor = _mm256_broadcast_ss(w + r * DEPTH + k);
            UNROLL for (int p = 0; p < P; p++) acc[r][p] = _mm256_fmadd_ps(factor, values[p], acc[r][p]);
        }
    }
    UNROLL for (int p = 0; p < P; p++) {
        if (done) store_turned(done + p * LANES * CHUNK, acc[0][p], acc[1][p], acc[2][p], acc[3][p]);
        else UNROLL for (int r = 0; r < HEIGHT; r++) _mm256_storeu_ps(sums + r * MOST_ROWS + p * LANES, acc[r][p]);
    }
}

/* The inputs from k on, of a chunk of `rows` rows. */
static void multiply(const Gemm *g, Own *own, int64_t rows, int64_t k, int64_t count) {
    int64_t K = g->job->K;
    int more = k > 0, end = k + count == K;
    for (int64_t panel = 0; panel < g->panels; panel++) {
        int64_t m = vectors_before(g, panel) * LANES, width = vectors_before(g, panel + 1) - m / LANES;
        const float *x = g->x + m * K + k * width * LANES;
        for (int64_t r = 0; r < rows; r += HEIGHT) {
            const float *w = own->weights + r * DEPTH;
            float *sums = own->sums + r * MOST_ROWS + m, *done = end ? own->done + m * CHUNK + r : NULL;
            if (width == WIDEST) tile(w, count, x, sums, more, done, WIDEST);
            else tile(w, count, x, sums, more, done, WIDEST - 1);
        }
    }
}

/* The rows first to last of one part. */
static void run_task(const Gemm *g, Own *own, int64_t part, int64_t first, int64_t last) {
    const Job *job = g->job;
    const Dense *d = &job->dense[part];
    int64_t rows = last - first, odd = rows % HEIGHT;
    /* What fills the last four rows up is multiplied and not kept. */
    if (odd) memset(own->weights + rows * DEPTH, 0, sizeof(float) * (size_t)((HEIGHT - odd) * DEPTH));
    for (int64_t k = 0; k < job->K; k += DEPTH) {
        int64_t count = least(DEPTH, job->K - k);
        read_rows(job, d, first, rows, k, count, own->weights);
        multiply(g, own, rows, k, count);
    }
    store_rows(own->done, CHUNK, (int)job->M, rows, d->bias, d->out, d->out_stride, 0, first);
}

static void run_tasks(void *data) {
    Gemm *g = data;
    Own *own = g->own + atomic_fetch_add_explicit(&g->entered, 1, memory_order_relaxed);
    for (;;) {
        int64_t task = atomic_fetch_add_explicit(&g->task, 1, memory_order_relaxed);
        if (task >= g->chunks) return;
        int64_t part = 0;
        while (task >= g->ends[part]) part++;
        int64_t first = (task - (part ? g->ends[part - 1] : 0)) * g->height;
        run_task(g, own, part, first, least(g->job->dense[part].n, first + g->height));
    }
}

/* Chunks of at most 64 rows, and at least eight for each thread where there are rows enough. */
static void plan(Gemm *g) {
    g->height = ceil_div(least(ceil_div(g->job->rows, 8 * g->job->threads), CHUNK), 16) * 16;
    for (int i = 0; i < g->job->parts; i++) g->ends[i] = g->chunks += ceil_div(g->job->dense[i].n, g->height);
}

/* The product of up to 384 rows of x. */
static void run_rows(Gemm *g, const Job *job, Team team, int64_t threads) {
    g->job = job;
    g->vectors = ceil_div(job->M, LANES);
    g->panels = ceil_div(g->vectors, WIDEST);
    atomic_init(&g->task, 0);
    atomic_init(&g->entered, 0);
    Shared panels = {.work = lay_panels, .what = g, .count = g->panels, .step = 1};
    share(&panels, team, job->M * job->K < ALONE ? 1 : threads);
    if (team && threads > 1) team(run_tasks, g, (unsigned)threads, 0);
    else run_tasks(g);
}

int adapt_gemm(const Job *job, Team team) {
    int64_t most = ceil_div(block_rows(job->M, MOST_ROWS), LANES) * LANES;
    Gemm g = {.job = job};
    plan(&g);
    int64_t threads = team ? least(job->threads, g.chunks) : 1;
    size_t x_bytes = adapt_lines(sizeof(float) * (size_t)(most * job->K));
    char *memory = malloc(x_bytes + (size_t)threads * sizeof(Own) + LINE);
    if (!memory) return 0;
    g.x = adapt_aligned(memory);
    g.own = (Own *)((char *)g.x + x_bytes);
    for (int64_t m = 0; m < job->M; m += most) {
        Job some = *job;
        some.M = least(most, job->M - m);
        some.x += m * job->K;
        for (int i = 0; i < job->parts; i++) some.dense[i].out += m * job->dense[i].out_stride;
        run_rows(&g, &some, team, threads);
    }
    free(memory);
    return 1;
}

#include "target_end.h"
#else
int adapt_gemm(const Job *job, Team team) { return (void)job, (void)team, 0; }
#endif
