/* AVX-512 with bf16 dot products; see avx512.c. */
#define BF16_DOT
#include "avx512.c"
