/* Decoder blocks one behind the other in one call, with one team of threads that meets between the products: its memory
 * and its arguments. What the threads do is in blocks.c.
 *
 * Waking a team costs more than many a product of a small model, and Python between them as much again. A product, a norm,
 * a gate and an attention are those of module.c and rows.c, so a chain gives what they give one by one.
 * Trusts its arguments, which chain.py makes.
 */
#include "chain.h"

#include <stdlib.h>

#include "module.h"

/* The largest room that any product of some blocks needs for its x. */
static size_t room_of(const Chain *c, const int64_t *blocks) {
    size_t most = 0;
    for (int64_t at = c->first * PRODUCTS; blocks && at < c->last * PRODUCTS; at++) {
        const int64_t *block = adapt_block(blocks, at / PRODUCTS);
        if (!adapt_is_there(block)) continue;
        Job job = adapt_product(c, block, (int)(at % PRODUCTS), c->M, NULL, NULL);
        size_t bytes = adapt_room(&job);
        most = bytes > most ? bytes : most;
    }
    return adapt_lines(most);
}

/* Spans of the token that sees most, in whatever kind of layer. */
static int64_t most_spans(const Chain *c) {
    int64_t most = 1;
    for (int64_t m = 0; m < c->M; m++) {
        const int64_t *row = c->rows + m * (FIRST_KIND + c->kinds * KIND_NUMBERS);
        for (int64_t kind = 0; kind < c->kinds; kind++) {
            int64_t spans = count_spans(row[POSITION] + 1 - row[FIRST_KIND + kind * KIND_NUMBERS + SEEN]);
            most = spans > most ? spans : most;
        }
    }
    return most;
}

/* Memory as it is handed out: addresses from `start` on, in whole cache lines. */
typedef struct {
    uintptr_t start, at;
} Memory;

static void *take(Memory *memory, int64_t bytes) {
    uintptr_t begin = memory->at;
    memory->at += adapt_lines((size_t)bytes);
    return (void *)begin;
}

/* Give every array its place from `start` on, and return the bytes of all; from 0 on that is all it does. */
static size_t lay_out(Chain *c, uintptr_t start) {
    Memory memory = {start, start};
    int64_t M = c->M, P = adapt_padded(c), heads = c->queries + 2 * c->groups, most = c->inner > c->hidden ? c->inner : c->hidden;
    size_t room = room_of(c, c->blocks), other = room_of(c, c->exits);
    c->prepared_bytes = room > other ? room : other;
    c->own_bytes = c->prepared_bytes + 2 * adapt_lines((size_t)(2 * M * c->hidden)) + adapt_lines((size_t)(8 * M)) +
                   adapt_lines((size_t)(2 * M * most));
    c->stages = take(&memory, c->last * STAGES * (int64_t)sizeof(atomic_llong));
    c->queries32 = take(&memory, 4 * M * c->queries * P);
    c->sums = take(&memory, 4 * M * c->spans * c->queries * P);
    c->tops = take(&memory, 4 * M * c->spans * c->queries * 2);
    c->own = take(&memory, c->threads * (int64_t)c->own_bytes);
    c->qkv = take(&memory, 2 * M * heads * c->width);
    c->attended = take(&memory, 2 * M * c->queries * c->width);
    c->mixed = take(&memory, 2 * M * c->hidden);
    c->wide = take(&memory, 4 * M * c->inner);
    c->spare = take(&memory, 4 * P + 2 * heads * c->width);
    c->tokens = take(&memory, M * (int64_t)sizeof(Attention));
    c->joined = take(&memory, M * c->groups * (int64_t)sizeof(atomic_llong));
    return memory.at - memory.start;
}

static int run(Chain *c) {
    if (c->threads < 1 || !c->team || !c->team_size) c->threads = 1;
    c->spans = most_spans(c);
    char *block = malloc(lay_out(c, 0) + LINE);
    if (!block) return 0;
    lay_out(c, (uintptr_t)adapt_aligned(block));
    /* No stage has begun, and what pads a head to whole vectors is 0. */
    memset(c->stages, 0, (size_t)((char *)c->sums - (char *)c->stages));
    open_meeting(&c->meeting);
    if (c->threads > 1) c->team(adapt_run_blocks, c, (unsigned)c->threads, 0);
    else adapt_run_blocks(c);
    free(block);
    return 1;
}

enum { NUMBERS = 26 };
static const char usage[] = "blocks(team, team_size, threads, products_isa, small_isa, hidden, inner, queries, groups, width, "
                            "gate, kinds, M, h, result, blocks, first, last, places, rows, cache_strides, exits, "
                            "thresholds, resident, depths, together, eps, scale) -> the block behind the last one that ran";

/* See `usage`; cache_strides points to those of a group and of a row, in values. It ends early where a block that rows
 * need is not described. */
PyObject *adapt_chain(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    long long a[NUMBERS];
    int done;
    (void)self;
    if (!adapt_read_all(args, count, a, NUMBERS, 2, usage)) return NULL;
    double eps = PyFloat_AsDouble(args[NUMBERS]), scale = PyFloat_AsDouble(args[NUMBERS + 1]);
    const Isa *products = PyErr_Occurred() ? NULL : adapt_find_isa(a[3]), *small = products ? adapt_find_isa(a[4]) : NULL;
    if (!small) return NULL;
    const int64_t *strides = adapt_pointer(a[20]);
    Chain chain = {.team = (Team)(uintptr_t)a[0], .team_size = (int (*)(void))(uintptr_t)a[1], .threads = a[2],
                   .products = products, .small = small, .hidden = a[5], .inner = a[6], .queries = a[7], .groups = a[8],
                   .width = a[9], .gate = a[10], .kinds = a[11], .M = a[12], .h = adapt_pointer(a[13]),
                   .result = (uint16_t *)(uintptr_t)a[14], .blocks = adapt_pointer(a[15]), .first = a[16], .last = a[17],
                   .places = adapt_pointer(a[18]), .rows = adapt_pointer(a[19]), .group_stride = strides[0],
                   .row_stride = strides[1], .exits = adapt_pointer(a[21]), .thresholds = adapt_pointer(a[22]),
                   .resident = a[23], .depths = (int64_t *)(uintptr_t)a[24], .together = a[25] != 0, .eps = (float)eps,
                   .scale = (float)scale};
    Py_BEGIN_ALLOW_THREADS
    done = run(&chain);
    Py_END_ALLOW_THREADS
    return done ? PyLong_FromLongLong(chain.done) : PyErr_NoMemory();
}
