/* AVX2 with FMA: eight lanes. A pair of bf16 values is two floats: the low half shifted up, the high half masked. */
#include "native.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include "target256.h"

#include "sums256.h"

#define NAME(x) avx2_##x
#define ISA_SYMBOL adapt_isa_avx2
#define ISA_NAME "avx2"
#define LANES 8
#define HALVES 2
#define MANY &adapt_many_avx2
typedef __m256 V;
typedef __m256i W;
typedef V O;

static inline V zero(void) { return _mm256_setzero_ps(); }
static inline V splat(float value) { return _mm256_set1_ps(value); }
static inline V add(V a, V b) { return _mm256_add_ps(a, b); }
static inline V multiply(V a, V b) { return _mm256_mul_ps(a, b); }
static inline V scale_add(V scale, V a, V b) { return _mm256_fmadd_ps(scale, a, b); }
static inline V multiply_add(O w, O x, V acc) { return _mm256_fmadd_ps(w, x, acc); }
static inline void store_floats(float *to, V value) { _mm256_storeu_ps(to, value); }
static inline W load_words(const void *from) { return _mm256_loadu_si256(from); }
typedef __m128i H; /* as many bf16 values as a vector has lanes */
static inline W widen_words(H halves) { return _mm256_cvtepu16_epi32(halves); }

static inline float sum(V value) { return sum256(value); }
static inline void store_sums(float *to, V a, V b, V c, V d) { store_sums256(to, a, b, c, d); }

static inline O load_operand(const char *from) { return _mm256_loadu_ps((const float *)from); }
static inline void store_operand(char *to, O value) { _mm256_storeu_ps((float *)to, value); }

static inline O operand(W words, const int half) {
    if (half) return _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32((int)0xffff0000)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
}

static inline W no_words(void) { return _mm256_setzero_si256(); }
static inline W add_words(W a, W b) { return _mm256_add_epi32(a, b); }
static inline W add_pairs(W total, W a, W b) { return add_words(total, _mm256_madd_epi16(a, b)); }
static inline V word_floats(W words) { return _mm256_cvtepi32_ps(words); }

static inline W broadcast_word(const char *from) { return _mm256_set1_epi32(word_at(from)); }

static inline W code_pairs(W raw, const int pair) {
    W shifted = pair ? _mm256_srli_epi16(raw, 4 * pair) : raw;
    return pair < 3 ? _mm256_and_si256(shifted, _mm256_set1_epi16(15)) : shifted;
}

static inline V parameters(const uint8_t *at, int wide, int index) {
    if (wide) return _mm256_loadu_ps((const float *)at + index * LANES);
    __m128i narrow = _mm_loadu_si128((const __m128i *)at + index);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
}

static int avx2_supported(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

/* rows of x; rows of w at once and of x at once (dense), or vectors of the tile at once (int4): the fastest found on Zen 3.
 * Sixteen registers hold no more than six rows of bf16. */
#define DENSE_BLOCK 8
#define DENSE_CASES \
    CASE(1, 1, 1) CASE(2, 1, 2) CASE(3, 1, 3) CASE(4, 1, 4) CASE(5, 1, 5) CASE(6, 1, 6) CASE(7, 1, 4) CASE(8, 1, 4)
#define CHAINS(M) 1
#define INT4_BLOCK 4
#define INT4_CASES CASE(1, 2) CASE(2, 2) CASE(3, 2) CASE(4, 2)
#include "products.h"

#include "target_end.h"
#else
static int never(void) { return 0; }
const Isa adapt_isa_avx2 = {.name = "avx2", .supported = never};
#endif
