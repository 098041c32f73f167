/* Codes into tiles, and packed 4-bit matrices read back as fp32, for products with many rows. docs/kernels.md shows a tile. */
#include "module.h"

enum { TILES_AT_ONCE = 4, ALONE = 100000 }; /* codes that one thread does before others have woken */

typedef uint8_t Bytes __attribute__((vector_size(4)));
typedef float Four __attribute__((vector_size(16)));

typedef struct {
    const uint8_t *data;
    float *out; /* [last - first, K] */
    int64_t first, last, K, groups, wide;
} Reading;

static float parameter(const uint8_t *at, int wide, int row) {
    float value;
    uint16_t narrow;
    if (wide) memcpy(&value, at + 4 * row, sizeof value);
    else memcpy(&narrow, at + 2 * row, sizeof narrow), value = bf16_to_float(narrow);
    return value;
}

static uint32_t swap_middle(uint32_t word) {
    return (word & 0xff0000ffu) | (word & 0x0000ff00u) << 8 | (word & 0x00ff0000u) >> 8;
}

static void store_four(uint32_t word, float zero, float scale, float *out) {
    Bytes codes;
    memcpy(&codes, &word, sizeof codes);
    Four values = (__builtin_convertvector(codes, Four) - zero) * scale;
    memcpy(out, &values, sizeof values);
}

/* One row of a group: of every line its word, even inputs in the low half and odd ones in the high half. */
static void read_row(const uint8_t *lines, int row, int64_t count, float zero, float scale, float *out) {
    const uint8_t *at = lines + 4 * row;
    for (int64_t line = 0; line < count; line++, at += LINE, out += LINE_INPUTS) {
        uint32_t word;
        memcpy(&word, at, sizeof word);
        uint32_t first = word & 0x0f0f0f0fu, next = word >> 4 & 0x0f0f0f0fu; /* inputs 0 4 1 5, and 2 6 3 7 */
        uint32_t even = (first & 0x00ff00ffu) | (next & 0x00ff00ffu) << 8;   /* 0 2 1 3 */
        uint32_t odd = (first & 0xff00ff00u) >> 8 | (next & 0xff00ff00u);    /* 4 6 5 7 */
        store_four(swap_middle(even), zero, scale, out);
        store_four(swap_middle(odd), zero, scale, out + 4);
    }
}

static void read_tile(const Reading *reading, int64_t tile) {
    int wide = reading->wide != 0, head = wide ? LINE : LINE / 2;
    int64_t group = reading->K / reading->groups, count = group / LINE_INPUTS;
    const uint8_t *at = reading->data + tile * reading->groups * (2 * head + count * LINE);
    for (int64_t g = 0; g < reading->groups; g++, at += 2 * head + count * LINE) {
        for (int row = 0; row < TILE; row++) {
            int64_t n = tile * TILE + row;
            if (n < reading->first || n >= reading->last) continue;
            float *out = reading->out + (n - reading->first) * reading->K + g * group;
            read_row(at + 2 * head, row, count, parameter(at + head, wide, row), parameter(at, wide, row), out);
        }
    }
}

/* Tiles counted from the one that holds the first row wanted. */
static void read_tiles(const void *what, int64_t first, int64_t last) {
    const Reading *reading = what;
    for (int64_t tile = first; tile < last; tile++) read_tile(reading, reading->first / TILE + tile);
}

/* dequantize(team, threads, data, first, last, K, groups, wide, out): rows first to last, from 0 */
PyObject *adapt_dequantize(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    long long a[9];
    (void)self;
    static const char usage[] = "dequantize(team, threads, data, first, last, K, groups, wide, out)";
    if (!adapt_read_all(args, count, a, 9, 0, usage)) return NULL;
    Reading reading = {.data = adapt_pointer(a[2]), .first = a[3], .last = a[4], .K = a[5], .groups = a[6],
                       .wide = a[7], .out = (float *)(uintptr_t)a[8]};
    Shared shared = {.work = read_tiles, .what = &reading, .step = TILES_AT_ONCE,
                     .count = ceil_div(reading.last, TILE) - reading.first / TILE};
    Py_BEGIN_ALLOW_THREADS
    share(&shared, (Team)(uintptr_t)a[0], (reading.last - reading.first) * reading.K > ALONE ? a[1] : 1);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* Codes [n, K], a byte each, on their way into tiles. */
typedef struct {
    const uint8_t *codes;
    uint8_t *out;
    int64_t n, K, groups, head; /* bytes of a group before its lines */
} Packing;

/* Codes 2 and 3 go beside 0 and 1, and 6 and 7 beside 4 and 5; then even inputs are the low half and odd ones the high one. */
static uint32_t word_of(const uint8_t *codes) {
    uint64_t all;
    memcpy(&all, codes, sizeof all);
    all |= all >> 12;
    return (uint32_t)((all & 0xff) | (all >> 24 & 0xff00) | (all << 8 & 0xff0000) | (all >> 16 & 0xff000000));
}

static void pack_tile(const Packing *p, int64_t tile) {
    int64_t width = p->K / p->groups, lines = width / LINE_INPUTS, bytes = p->head + lines * LINE;
    for (int64_t row = 0; row < TILE; row++) {
        int64_t n = tile * TILE + row;
        for (int64_t k = 0; k < p->K; k += LINE_INPUTS) {
            uint32_t word = n < p->n ? word_of(p->codes + n * p->K + k) : 0;
            int64_t group = tile * p->groups + k / width, line = k % width / LINE_INPUTS;
            memcpy(p->out + group * bytes + p->head + line * LINE + 4 * row, &word, sizeof word);
        }
    }
}

static void pack_tiles(const void *what, int64_t first, int64_t last) {
    for (int64_t tile = first; tile < last; tile++) pack_tile(what, tile);
}

/* pack(team, threads, codes, n, K, groups, head, out): the lines of every group; K / groups is a multiple of 8 */
PyObject *adapt_pack(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    long long a[8];
    (void)self;
    if (!adapt_read_all(args, count, a, 8, 0, "pack(team, threads, codes, n, K, groups, head, out)")) return NULL;
    Packing packing = {.codes = adapt_pointer(a[2]), .n = a[3], .K = a[4], .groups = a[5], .head = a[6],
                       .out = (uint8_t *)(uintptr_t)a[7]};
    Shared shared = {.work = pack_tiles, .what = &packing, .count = ceil_div(packing.n, TILE), .step = 1};
    Py_BEGIN_ALLOW_THREADS
    share(&shared, (Team)(uintptr_t)a[0], packing.n * packing.K > ALONE ? a[1] : 1);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
