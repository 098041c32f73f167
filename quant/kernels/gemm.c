/* Many rows of x times bf16 matrices, with eight lanes and twelve sums at once: three vectors of x by four rows of the weight.
 *
 * Both are fp32 while they are multiplied. x is laid out once, in panels of up to 24 of its rows, [input][row]. A thread
 * takes a chunk of the weight's rows, 256 inputs at a time, and goes over the panels with it: the part of a panel in use
 * stays in the first-level cache, that of the chunk in the second. The order of every sum is that of the inputs.
 */
#include "many.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include "target256.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
/* Read from memory once and not again with every use: twelve sums, three of these and one factor fill the registers. */
#define IN_REGISTER(value) __asm__("" : "+x"(value))

enum { LANES = 8, HEIGHT = 4, WIDEST = 3, DEPTH = 256 };

/* What a thread has for itself. */
typedef struct {
    float weights[CHUNK * DEPTH];                 /* [row of the weight][input] */
    float sums[CHUNK * MOST_ROWS];                /* [row of the weight][row of x], until the next inputs */
    float done[MOST_ROWS * CHUNK];                /* [row of x][row of the weight] */
} Own;

/* ---- x ---- */

static int64_t panels(int64_t M) { return ceil_div(M, LANES * WIDEST); }

/* The vectors before panel `at`: panels are as equal as can be, 3 vectors or 2. */
static int64_t vectors_before(int64_t M, int64_t at) {
    int64_t vectors = ceil_div(M, LANES), count = panels(M);
    return at * (vectors / count) + least(at, vectors % count);
}

static int64_t most_rows(int64_t K) { return (void)K, MOST_ROWS; }

static size_t own_bytes(int64_t K) { return (void)K, sizeof(Own); }

static size_t x_bytes(int64_t M, int64_t K) { return sizeof(float) * (size_t)(ceil_div(M, LANES) * LANES * K); }

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
    const Many *many = what;
    const Job *job = many->job;
    for (int64_t panel = from; panel < end; panel++) {
        int64_t first = vectors_before(job->M, panel), count = vectors_before(job->M, panel + 1) - first;
        float *to = (float *)many->x + first * LANES * job->K;
        for (int64_t v = 0; v < count; v++) lay_vector(job, (first + v) * LANES, to + v * LANES, count * LANES);
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
static void multiply(const Many *many, Own *own, int64_t rows, int64_t k, int64_t count) {
    int64_t K = many->job->K, M = many->job->M;
    int more = k > 0, end = k + count == K;
    for (int64_t panel = 0; panel < panels(M); panel++) {
        int64_t m = vectors_before(M, panel) * LANES, width = vectors_before(M, panel + 1) - m / LANES;
        const float *x = (const float *)many->x + m * K + k * width * LANES;
        for (int64_t r = 0; r < rows; r += HEIGHT) {
            const float *w = own->weights + r * DEPTH;
            float *sums = own->sums + r * MOST_ROWS + m, *done = end ? own->done + m * CHUNK + r : NULL;
            if (width == WIDEST) tile(w, count, x, sums, more, done, WIDEST);
            else tile(w, count, x, sums, more, done, WIDEST - 1);
        }
    }
}

static void run_task(const Many *many, void *at, int64_t part, int64_t first, int64_t last) {
    const Job *job = many->job;
    const Dense *d = &job->dense[part];
    Own *own = at;
    int64_t rows = last - first, odd = rows % HEIGHT;
    /* What fills the last four rows up is multiplied and not kept. */
    if (odd) memset(own->weights + rows * DEPTH, 0, sizeof(float) * (size_t)((HEIGHT - odd) * DEPTH));
    for (int64_t k = 0; k < job->K; k += DEPTH) {
        int64_t count = least(DEPTH, job->K - k);
        read_rows(job, d, first, rows, k, count, own->weights);
        multiply(many, own, rows, k, count);
    }
    store_rows(own->done, CHUNK, (int)job->M, rows, d->bias, d->out, d->out_stride, 0, first);
}

const Multiplier adapt_many_avx2 = {.height = TILE, .most_rows = most_rows, .own_bytes = own_bytes, .x_bytes = x_bytes,
                                    .panels = panels, .lay_panels = lay_panels, .run_task = run_task};

#include "target_end.h"
#else
const Multiplier adapt_many_avx2 = {0};
#endif
