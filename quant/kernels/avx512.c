/* AVX-512: sixteen lanes; the same steps as avx2.c. avx512bf16.c includes this file with BF16_DOT defined, where one
 * instruction multiplies a pair of bf16 values and adds both, and another one (VNNI) does so for 16-bit integers. With AMX
 * it is the same but for many rows. */
#include "native.h"

#ifdef BF16_DOT
#define NAME(x) avx512bf16_##x
#define ISA_SYMBOL adapt_isa_avx512bf16
#define ISA_NAME "avx512bf16"
#else
#define NAME(x) avx512_##x
#define ISA_SYMBOL adapt_isa_avx512
#define ISA_NAME "avx512"
#endif

/* GCC knows bf16 from 10 on. */
#if defined(__x86_64__) && defined(__GNUC__) && (!defined(BF16_DOT) || __has_include(<avx512bf16intrin.h>))
#ifdef __clang__
#include <immintrin.h>
#ifdef BF16_DOT
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512bf16,avx512vnni"))), apply_to = function)
#else
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw"))), apply_to = function)
#endif
#else
#pragma GCC push_options
#ifdef BF16_DOT
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512bf16,avx512vnni")
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw")
#endif
#include <immintrin.h>
#endif

#include "sums256.h"

#define LANES 16
#define MANY NULL /* torch has products for these */
typedef __m512 V;
typedef __m512i W;

static inline V zero(void) { return _mm512_setzero_ps(); }
static inline V splat(float value) { return _mm512_set1_ps(value); }
static inline V add(V a, V b) { return _mm512_add_ps(a, b); }
static inline V multiply(V a, V b) { return _mm512_mul_ps(a, b); }
static inline V scale_add(V scale, V a, V b) { return _mm512_fmadd_ps(scale, a, b); }
static inline void store_floats(float *to, V value) { _mm512_storeu_ps(to, value); }
static inline W load_words(const void *from) { return _mm512_loadu_si512(from); }
typedef __m256i H; /* as many bf16 values as a vector has lanes */
static inline W widen_words(H halves) { return _mm512_cvtepu16_epi32(halves); }
static inline float sum(V value) { return _mm512_reduce_add_ps(value); }

/* Half of a vector on the other half. */
static inline __m256 fold(V value) {
    __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(value), 1));
    return _mm256_add_ps(_mm512_castps512_ps256(value), high);
}

static inline void store_sums(float *to, V a, V b, V c, V d) { store_sums256(to, fold(a), fold(b), fold(c), fold(d)); }

#ifdef BF16_DOT
#define HALVES 1
typedef W O;

static inline V multiply_add(O w, O x, V acc) { return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)x); }
static inline O load_operand(const char *from) { return _mm512_loadu_si512(from); }
static inline void store_operand(char *to, O value) { _mm512_storeu_si512(to, value); }
static inline O operand(W words, const int half) { return (void)half, words; }
static inline W add_pairs(W total, W a, W b) { return _mm512_dpwssd_epi32(total, a, b); }

static int NAME(supported)(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}
#else
#define HALVES 2
typedef V O;

static inline V multiply_add(O w, O x, V acc) { return _mm512_fmadd_ps(w, x, acc); }
static inline O load_operand(const char *from) { return _mm512_loadu_ps(from); }
static inline void store_operand(char *to, O value) { _mm512_storeu_ps(to, value); }
static inline W add_pairs(W total, W a, W b) { return _mm512_add_epi32(total, _mm512_madd_epi16(a, b)); }

static inline O operand(W words, const int half) {
    if (half) return _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32((int)0xffff0000)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
}

static int NAME(supported)(void) { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw"); }
#endif

static inline W no_words(void) { return _mm512_setzero_si512(); }
static inline W add_words(W a, W b) { return _mm512_add_epi32(a, b); }
static inline V word_floats(W words) { return _mm512_cvtepi32_ps(words); }

static inline W broadcast_word(const char *from) { return _mm512_set1_epi32(word_at(from)); }

static inline W code_pairs(W raw, const int pair) {
    W shifted = pair ? _mm512_srli_epi16(raw, 4 * (unsigned)pair) : raw;
    return pair < 3 ? _mm512_and_si512(shifted, _mm512_set1_epi16(15)) : shifted;
}

static inline V parameters(const uint8_t *at, int wide, int index) {
    if (wide) return _mm512_loadu_ps((const float *)at + index * LANES);
    __m256i narrow = _mm256_loadu_si256((const __m256i *)at + index);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

#define DENSE_BLOCK 8
#define DENSE_CASES \
    CASE(1, 1, 1) CASE(2, 4, 2) CASE(3, 4, 3) CASE(4, 2, 4) CASE(5, 2, 5) CASE(6, 2, 6) CASE(7, 1, 7) CASE(8, 1, 8)
#ifdef BF16_DOT
#define CHAINS(M) (M == 1 ? 4 : 2) /* the fastest found on Sapphire Rapids */
#else
#define CHAINS(M) 1
#endif
#define INT4_BLOCK 8
#define INT4_CASES \
    CASE(1, 1) CASE(2, 1) CASE(3, 1) CASE(4, 1) CASE(5, 1) CASE(6, 1) CASE(7, 1) CASE(8, 1)
#include "products.h"

#ifdef BF16_DOT
static int amx_supported(void) { return NAME(supported)() && __builtin_cpu_supports("avx512vl") && adapt_has_amx(); }

const Isa adapt_isa_amx = ISA("amx", amx_supported, &adapt_many_amx, &adapt_many_amx);
#endif

#include "target_end.h"
#else
static int never(void) { return 0; }
#ifdef BF16_DOT
const Isa adapt_isa_amx = {.name = "amx", .supported = never};
#endif
const Isa ISA_SYMBOL = {.name = ISA_NAME, .supported = never};
#endif
