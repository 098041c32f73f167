/* int8.h with vectors of 512 bits. Wanted: NAME(x), add_dots(total, a, b). */
#define STEP 32
#define V __m512
#define W __m512i
#define zero() _mm512_setzero_ps()
#define no_words() _mm512_setzero_si512()
#define codes(from) _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(from)))
#define pairs(from) _mm512_loadu_si512(from)
#define scale_add(scale, words, total) _mm512_fmadd_ps(_mm512_set1_ps(scale), _mm512_cvtepi32_ps(words), total)
#define sum(v) _mm512_reduce_add_ps(v)
#include "int8.h"
