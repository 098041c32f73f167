/* Functions behind this are compiled for the module's own target again. */
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
