/* Functions behind this are compiled for AVX2 with FMA, up to target_end.h. x86-64 with GCC or clang only. */
#ifdef __clang__
#include <immintrin.h>
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#include <immintrin.h>
#endif
