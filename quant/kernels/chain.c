/* Decoder blocks one behind the other in one call, with one team of threads that meets between the products; and the
 * choice between two forms of each block, by what the blocks before have done (River's exit).
 *
 * Waking a team costs more than many a product of a small model, and Python between them as much again. What threads
 * share is what products write; the rest each of them computes for itself, from the same numbers to the same bits.
 * A product, a norm, a gate and an attention are those of module.c and rows.c, so a chain gives what they give one by one.
 * Trusts its arguments, which chain.py makes.
 */
#include "module.h"

#include <stdlib.h>

#include "job.h"
#include "team.h"
#include "token.h"

/* Numbers of a product: parts, K, then w, n, bias of each part; or 0, K, then data, n, bias, groups, wide. */
enum { PARTS = 3, PRODUCT = 2 + 3 * PARTS };
enum { QKV, OUTPUT, GATE_UP, DOWN, PRODUCTS };
/* Numbers of a block: see chain.py. Norms are float32 factors; 0 where there is none. */
enum { KIND, LAYER, STORES, NORM_IN, NORM_MIXED, NORM_MLP, NORM_OUT, HEAD_NORM, FIRST_PRODUCT };
enum { BLOCK_NUMBERS = FIRST_PRODUCT + PRODUCTS * PRODUCT };
/* Numbers of a row: position, row of the cache, then of each kind of layer its rotation and the first position seen. */
enum { POSITION, CACHE_ROW, FIRST_KIND, COS = 0, SIN, ROTARY, SEEN, KIND_NUMBERS };
enum { STAGES = PRODUCTS + 1, ATTEND = PRODUCTS };

typedef struct {
    /* as given */
    Team team;
    int (*team_size)(void);
    int64_t threads;
    const Isa *products, *small;
    int64_t hidden, inner, queries, groups, width, gate, kinds, M;
    const uint16_t *h;
    uint16_t *result;
    const int64_t *blocks, *places, *rows;
    int64_t count, group_stride, row_stride;
    const int64_t *exits; /* the blocks that run once the rows have left, or NULL: nobody leaves */
    const double *thresholds; /* of each block: the cosine above which a row leaves after it */
    int64_t resident; /* after so many blocks all rows leave */
    float eps, scale;
    /* shared */
    uint16_t *qkv, *attended, *mixed, *wide;
    int64_t spans; /* of the token that sees most */
    float *queries32, *sums, *tops, *spare;
    Attention *tokens;
    atomic_llong *joined;
    char *own; /* `own_bytes` for each thread */
    size_t own_bytes, prepared_bytes;
    atomic_llong *stages;
    Meeting meeting;
    /* found */
    int64_t done, depth; /* blocks that ran, and after how many the rows left; 0: they did not */
} Chain;

/* What a thread has for itself: the residual stream [M, hidden], that before the block, the input of a product, and that
 * laid out; and which blocks it runs, the same as all others. */
typedef struct {
    uint16_t *h, *before, *x;
    void *prepared;
    const int64_t *blocks;
    int64_t index, threads;
} Own;

static const int64_t *numbers_of(const int64_t *blocks, int64_t index) { return blocks + index * BLOCK_NUMBERS; }

/* Whether somebody has described a block: its products have inputs. */
static int is_there(const int64_t *block) { return block[FIRST_PRODUCT + 1] != 0; }

static int64_t padded(const Chain *c) { return ceil_div(c->width, PAD) * PAD; }

/* A product of a block as a job; `out` rows lie side by side, the parts' outputs behind each other. */
static Job job_of(const Chain *c, const int64_t *block, int which, const uint16_t *x, uint16_t *out) {
    const int64_t *p = block + FIRST_PRODUCT + which * PRODUCT;
    Job job = {.isa = c->products, .M = c->M, .K = p[1], .threads = c->threads, .x = x, .parts = (int)p[0]};
    int64_t total = 0;
    p += 2;
    if (!job.parts)
        job.int4 = (Int4){.data = adapt_pointer(p[0]), .n = p[1], .out = out, .bias = adapt_pointer(p[2]),
                          .groups = p[3], .wide = p[4] != 0, .lines = job.K / p[3] / LINE_INPUTS};
    for (int i = 0; i < job.parts; i++) total += p[3 * i + 1];
    for (int i = 0; i < job.parts; out += p[1], p += 3, i++)
        job.dense[i] = (Dense){.w = adapt_pointer(p[0]), .n = p[1], .bias = adapt_pointer(p[2]), .out = out,
                               .out_stride = total};
    adapt_plan(&job);
    return job;
}

static void multiply(Chain *c, Own *own, int64_t block, int which, const uint16_t *x, uint16_t *out) {
    Job job = job_of(c, numbers_of(own->blocks, block), which, x, out);
    job.next = &c->stages[block * STAGES + which];
    adapt_prepare(&job, own->prepared);
    adapt_work(&job);
    meet(&c->meeting, own->threads);
}

static void norm(const Chain *c, int64_t factor, const uint16_t *x, uint16_t *out) {
    c->small->rms_norm(x, adapt_pointer(factor), out, c->M, c->hidden, c->eps);
}

/* h += mixed, normed before where the family does so. */
static void add_mixed(const Chain *c, Own *own, int64_t factor) {
    const uint16_t *mixed = c->mixed;
    if (factor) {
        norm(c, factor, mixed, own->x);
        mixed = own->x;
    }
    for (int64_t i = 0; i < c->M * c->hidden; i++)
        own->h[i] = float_to_bf16(bf16_to_float(own->h[i]) + bf16_to_float(mixed[i]));
}

/* Row m enters the cache, and knows what it will attend to. */
static void enter_row(Chain *c, const int64_t *block, int64_t m) {
    const int64_t *row = c->rows + m * (FIRST_KIND + c->kinds * KIND_NUMBERS);
    const int64_t *kind = row + FIRST_KIND + block[KIND] * KIND_NUMBERS, *place = c->places + 2 * block[LAYER];
    int64_t all = c->queries + (block[STORES] ? 2 * c->groups : 0), P = padded(c), at = row[CACHE_ROW] * c->row_stride;
    const uint16_t *heads = c->qkv + m * all * c->width;
    Token token = {.isa = c->small, .heads = heads, .cos = adapt_pointer(kind[COS]), .sin = adapt_pointer(kind[SIN]),
                   .value = block[STORES] ? heads + (c->queries + c->groups) * c->width : NULL,
                   .factors = adapt_pointer(block[HEAD_NORM]), .keys = (uint16_t *)(uintptr_t)place[0] + at,
                   .values = (uint16_t *)(uintptr_t)place[1] + at, .rotary = kind[ROTARY], .position = row[POSITION],
                   .eps = c->eps, .scale = c->scale};
    token.attention = (Attention){.keys = token.keys, .values = token.values, .heads = c->queries, .groups = c->groups,
                                  .width = c->width, .stride = c->group_stride, .first = kind[SEEN],
                                  .count = row[POSITION] + 1 - kind[SEEN], .padded = P,
                                  .q = c->queries32 + m * c->queries * P,
                                  .sums = c->sums + m * c->spans * c->queries * P,
                                  .tops = c->tops + m * c->spans * c->queries * 2, .joined = c->joined + m * c->groups,
                                  .out = c->attended + m * c->queries * c->width};
    adapt_enter(&token, c->queries32 + m * c->queries * P, c->spare);
    c->tokens[m] = token.attention;
    for (int64_t group = 0; group < c->groups; group++) atomic_init(&token.attention.joined[group], 0);
}

static void attend(Chain *c, Own *own, int64_t block) {
    if (own->index == 0)
        for (int64_t m = 0; m < c->M; m++) enter_row(c, numbers_of(own->blocks, block), m);
    meet(&c->meeting, own->threads);
    atomic_llong *next = &c->stages[block * STAGES + ATTEND];
    for (;;) {
        int64_t at = atomic_fetch_add_explicit(next, 1, memory_order_relaxed);
        if (at >= c->M * c->groups * c->spans) break;
        adapt_attend_task(c->small, c->tokens, c->spans, at);
    }
    meet(&c->meeting, own->threads);
}

static void run_block(Chain *c, Own *own, int64_t index) {
    const int64_t *block = numbers_of(own->blocks, index);
    norm(c, block[NORM_IN], own->h, own->x);
    multiply(c, own, index, QKV, own->x, c->qkv);
    attend(c, own, index);
    multiply(c, own, index, OUTPUT, c->attended, c->mixed);
    add_mixed(c, own, block[NORM_MIXED]);
    norm(c, block[NORM_MLP], own->h, own->x);
    multiply(c, own, index, GATE_UP, own->x, c->wide);
    for (int64_t m = 0; m < c->M; m++) {
        const uint16_t *gate = c->wide + m * 2 * c->inner;
        c->small->gated((int)c->gate, gate, gate + c->inner, own->x + m * c->inner, c->inner);
    }
    multiply(c, own, index, DOWN, own->x, c->mixed);
    add_mixed(c, own, block[NORM_OUT]);
}

/* Whether rows can leave after a block. */
static int is_asked(const Chain *c, const Own *own, int64_t block) {
    return c->exits && own->blocks == c->blocks && (c->thresholds[block] < 1 || block + 1 >= c->resident);
}

/* Whether all do: the backbone ends, or each has turned little in the block (River eq. 1). Every thread finds the same. */
static int leave(const Chain *c, const Own *own, int64_t block) {
    if (block + 1 >= c->resident || c->thresholds[block] < -1) return 1;
    for (int64_t at = 0; at < c->M * c->hidden; at += c->hidden)
        if (!(adapt_cosine(own->before + at, own->h + at, c->hidden) > c->thresholds[block])) return 0;
    return 1;
}

static void run_thread(void *data) {
    Chain *c = data;
    size_t stream = (size_t)(c->M * c->hidden) * sizeof(uint16_t);
    Own own = {.index = atomic_fetch_add(&c->meeting.entered, 1), .threads = c->threads > 1 ? c->team_size() : 1,
               .blocks = c->blocks};
    char *at = c->own + (size_t)own.index * c->own_bytes;
    own.prepared = at;
    own.h = (uint16_t *)(at + c->prepared_bytes);
    own.before = (uint16_t *)(at + c->prepared_bytes + adapt_lines(stream));
    own.x = (uint16_t *)(at + c->prepared_bytes + 2 * adapt_lines(stream));
    memcpy(own.h, c->h, stream);
    int64_t block = 0, depth = 0;
    for (; block < c->count && is_there(numbers_of(own.blocks, block)); block++) {
        int asked = is_asked(c, &own, block);
        if (asked) memcpy(own.before, own.h, stream);
        run_block(c, &own, block);
        if (asked && leave(c, &own, block)) own.blocks = c->exits, depth = block + 1;
    }
    if (own.index) return;
    memcpy(c->result, own.h, stream);
    c->done = block, c->depth = depth;
}

/* The largest room that any product of some blocks needs for its x. */
static size_t room_of(const Chain *c, const int64_t *blocks) {
    size_t most = 0;
    for (int64_t at = 0; blocks && at < c->count * PRODUCTS; at++) {
        const int64_t *block = numbers_of(blocks, at / PRODUCTS);
        if (!is_there(block)) continue;
        Job job = job_of(c, block, (int)(at % PRODUCTS), NULL, NULL);
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
    int64_t M = c->M, P = padded(c), heads = c->queries + 2 * c->groups, most = c->inner > c->hidden ? c->inner : c->hidden;
    size_t room = room_of(c, c->blocks), other = room_of(c, c->exits);
    c->prepared_bytes = room > other ? room : other;
    c->own_bytes = c->prepared_bytes + 2 * adapt_lines((size_t)(2 * M * c->hidden)) + adapt_lines((size_t)(2 * M * most));
    c->stages = take(&memory, c->count * STAGES * (int64_t)sizeof(atomic_llong));
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
    if (c->threads > 1) c->team(run_thread, c, (unsigned)c->threads, 0);
    else run_thread(c);
    free(block);
    return 1;
}

enum { NUMBERS = 23 };
static const char usage[] = "chain(team, team_size, threads, products_isa, small_isa, hidden, inner, queries, groups, width, "
                            "gate, kinds, M, h, result, blocks, count, places, rows, cache_strides, exits, thresholds, "
                            "resident, eps, scale) -> blocks that ran, and those before the rows left";

/* See `usage`; cache_strides points to those of a group and of a row, in values. It ends early where a block is not
 * described. */
PyObject *adapt_chain(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    long long a[NUMBERS];
    int done;
    (void)self;
    if (!adapt_read_all(args, count, a, NUMBERS, 2, usage)) return NULL;
    double eps = PyFloat_AsDouble(args[NUMBERS]), scale = PyFloat_AsDouble(args[NUMBERS + 1]);
    const Isa *products = PyErr_Occurred() ? NULL : adapt_find_isa(a[3]), *small = products ? adapt_find_isa(a[4]) : NULL;
    if (!small) return NULL;
    const int64_t *strides = adapt_pointer(a[19]);
    Chain chain = {.team = (Team)(uintptr_t)a[0], .team_size = (int (*)(void))(uintptr_t)a[1], .threads = a[2],
                   .products = products, .small = small, .hidden = a[5], .inner = a[6], .queries = a[7], .groups = a[8],
                   .width = a[9], .gate = a[10], .kinds = a[11], .M = a[12], .h = adapt_pointer(a[13]),
                   .result = (uint16_t *)(uintptr_t)a[14], .blocks = adapt_pointer(a[15]), .count = a[16],
                   .places = adapt_pointer(a[17]), .rows = adapt_pointer(a[18]), .group_stride = strides[0],
                   .row_stride = strides[1], .exits = adapt_pointer(a[20]), .thresholds = adapt_pointer(a[21]),
                   .resident = a[22], .eps = (float)eps, .scale = (float)scale};
    Py_BEGIN_ALLOW_THREADS
    done = run(&chain);
    Py_END_ALLOW_THREADS
    if (!done) return PyErr_NoMemory();
    return Py_BuildValue("LL", (long long)chain.done, (long long)chain.depth);
}
