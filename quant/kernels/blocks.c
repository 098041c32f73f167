/* What each thread of a chain does: block after block, and the choice between two forms of each block, by what a row has
 * done in the blocks before (River's exit).
 *
 * What threads share is what products write; the rest each of them computes for itself, from the same numbers to the same
 * bits. Rows that have left lie behind those that have not, so that either side is one product, as for fewer rows.
 */
#include "chain.h"
#include "token.h"

/* What a thread has for itself: the residual stream [M, hidden], that before the block, the input of a product, and that
 * laid out; and in which order rows lie, the same as all others have them. */
typedef struct {
    uint16_t *h, *before, *x;
    void *prepared;
    int64_t *order;  /* the row of the call that each row of h is */
    int64_t staying; /* rows [0, staying) of h have not left */
    int64_t index, threads;
} Own;

/* Rows [first, first + count) and the block that they go through. */
typedef struct {
    const int64_t *block;
    int64_t first, count;
} Side;

typedef struct {
    Side of[SIDES];
    int count;
} Sides;

/* Who goes through which form of a block: all rows as one where both are the same. */
static Sides sides_of(const Chain *c, const Own *own, int64_t index) {
    const int64_t *one = adapt_block(c->blocks, index), *other = c->exits ? adapt_block(c->exits, index) : one;
    int same = one == other || memcmp(one, other, BLOCK_NUMBERS * sizeof *one) == 0;
    int64_t staying = same && own->staying ? c->M : own->staying;
    Sides sides = {.count = 0};
    if (staying) sides.of[sides.count++] = (Side){one, 0, staying};
    if (staying < c->M) sides.of[sides.count++] = (Side){other, staying, c->M - staying};
    return sides;
}

Job adapt_product(const Chain *c, const int64_t *block, int which, int64_t M, const uint16_t *x, uint16_t *out) {
    const int64_t *p = block + FIRST_PRODUCT + which * PRODUCT;
    Job job = {.isa = c->products, .M = M, .K = p[1], .threads = c->threads, .x = x, .parts = (int)p[0]};
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

/* A product of `columns` outputs of all rows of x; threads meet behind it. */
static void multiply(Chain *c, Own *own, int64_t index, const Sides *sides, int which, const uint16_t *x, uint16_t *out,
                     int64_t columns) {
    for (int i = 0; i < sides->count; i++) {
        const Side *side = &sides->of[i];
        int64_t K = side->block[FIRST_PRODUCT + which * PRODUCT + 1];
        Job job = adapt_product(c, side->block, which, side->count, x + side->first * K, out + side->first * columns);
        job.next = &c->stages[index * STAGES + which * SIDES + i];
        adapt_prepare(&job, own->prepared);
        adapt_work(&job);
    }
    meet(&c->meeting, own->threads);
}

static void norm(const Chain *c, const Sides *sides, int which, const uint16_t *x, uint16_t *out) {
    for (int i = 0; i < sides->count; i++) {
        const Side *side = &sides->of[i];
        int64_t at = side->first * c->hidden;
        c->small->rms_norm(x + at, adapt_pointer(side->block[which]), out + at, side->count, c->hidden, c->eps);
    }
}

/* h += mixed, normed before where the family does so. */
static void add_mixed(const Chain *c, Own *own, const Sides *sides, int factor) {
    const uint16_t *mixed = c->mixed;
    if (sides->of[0].block[factor]) {
        norm(c, sides, factor, mixed, own->x);
        mixed = own->x;
    }
    for (int64_t i = 0; i < c->M * c->hidden; i++)
        own->h[i] = float_to_bf16(bf16_to_float(own->h[i]) + bf16_to_float(mixed[i]));
}

/* Values that a row has in `qkv`. */
static int64_t heads_of(const Chain *c, const int64_t *block) {
    return (c->queries + (block[STORES] ? 2 * c->groups : 0)) * c->width;
}

/* Row m of h enters the cache as row `from` of the call, and knows what it will attend to. */
static void enter_row(Chain *c, const int64_t *block, int64_t m, int64_t from) {
    const int64_t *row = c->rows + from * (FIRST_KIND + c->kinds * KIND_NUMBERS);
    const int64_t *kind = row + FIRST_KIND + block[KIND] * KIND_NUMBERS, *place = c->places + 2 * block[LAYER];
    int64_t P = adapt_padded(c), at = row[CACHE_ROW] * c->row_stride;
    const uint16_t *heads = c->qkv + m * heads_of(c, block);
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

static void attend(Chain *c, Own *own, int64_t index, const Sides *sides) {
    for (int i = 0; own->index == 0 && i < sides->count; i++) {
        const Side *side = &sides->of[i];
        for (int64_t m = side->first; m < side->first + side->count; m++) enter_row(c, side->block, m, own->order[m]);
    }
    meet(&c->meeting, own->threads);
    atomic_llong *next = &c->stages[index * STAGES + ATTEND];
    for (;;) {
        int64_t at = atomic_fetch_add_explicit(next, 1, memory_order_relaxed);
        if (at >= c->M * c->groups * c->spans) break;
        adapt_attend_task(c->small, c->tokens, c->spans, at);
    }
    meet(&c->meeting, own->threads);
}

static void run_block(Chain *c, Own *own, int64_t index) {
    Sides sides = sides_of(c, own, index);
    norm(c, &sides, NORM_IN, own->h, own->x);
    multiply(c, own, index, &sides, QKV, own->x, c->qkv, heads_of(c, sides.of[0].block));
    attend(c, own, index, &sides);
    multiply(c, own, index, &sides, OUTPUT, c->attended, c->mixed, c->hidden);
    add_mixed(c, own, &sides, NORM_MIXED);
    norm(c, &sides, NORM_MLP, own->h, own->x);
    multiply(c, own, index, &sides, GATE_UP, own->x, c->wide, 2 * c->inner);
    for (int64_t m = 0; m < c->M; m++) {
        const uint16_t *gate = c->wide + m * 2 * c->inner;
        c->small->gated((int)c->gate, gate, gate + c->inner, own->x + m * c->inner, c->inner);
    }
    multiply(c, own, index, &sides, DOWN, own->x, c->mixed, c->hidden);
    add_mixed(c, own, &sides, NORM_OUT);
}

static void swap_rows(uint16_t *rows, int64_t D, int64_t one, int64_t other) {
    for (int64_t i = 0; i < D; i++) {
        uint16_t kept = rows[one * D + i];
        rows[one * D + i] = rows[other * D + i];
        rows[other * D + i] = kept;
    }
}

/* Row m of those that stay goes behind them. */
static void move_out(const Chain *c, Own *own, int64_t m) {
    int64_t last = --own->staying, row = own->order[m];
    if (m == last) return;
    swap_rows(own->h, c->hidden, m, last);
    swap_rows(own->before, c->hidden, m, last);
    own->order[m] = own->order[last];
    own->order[last] = row;
}

/* Whether a row can leave after a block. */
static int is_asked(const Chain *c, const Own *own, int64_t index) {
    return c->exits && own->staying && (c->thresholds[index] < 1 || index + 1 >= c->resident);
}

/* Whether row m of h turned little in a block (River eq. 1). */
static int turned_little(const Chain *c, const Own *own, int64_t index, int64_t m) {
    return adapt_cosine(own->before + m * c->hidden, own->h + m * c->hidden, c->hidden) > c->thresholds[index];
}

/* Let rows leave after a block: all where the backbone ends, else those that turned little. Every thread finds the same. */
static void leave(const Chain *c, Own *own, int64_t index) {
    int64_t before = own->staying, m = 0;
    if (index + 1 >= c->resident || c->thresholds[index] < -1) {
        own->staying = 0;
    } else if (c->together) {
        while (m < before && turned_little(c, own, index, m)) m++;
        if (m == before) own->staying = 0;
    } else {
        while (m < own->staying)
            if (turned_little(c, own, index, m)) move_out(c, own, m);
            else m++;
    }
    for (m = own->staying; own->index == 0 && m < before; m++) c->depths[own->order[m]] = index + 1;
}

/* Whether the forms of a block that rows go through have been described. */
static int is_ready(const Chain *c, const Own *own, int64_t index) {
    int here = !own->staying || adapt_is_there(adapt_block(c->blocks, index));
    return here && (own->staying == c->M || adapt_is_there(adapt_block(c->exits, index)));
}

/* Rows as they come, those that have left behind the others. */
static void take_rows(const Chain *c, Own *own) {
    size_t row = (size_t)c->hidden * sizeof(uint16_t);
    int64_t behind = c->M;
    for (int64_t from = 0; from < c->M; from++) {
        int64_t m = c->exits && c->depths[from] ? --behind : own->staying++;
        own->order[m] = from;
        memcpy(own->h + m * c->hidden, c->h + from * c->hidden, row);
    }
}

void adapt_run_blocks(void *data) {
    Chain *c = data;
    size_t stream = (size_t)(c->M * c->hidden) * sizeof(uint16_t);
    Own own = {.index = atomic_fetch_add(&c->meeting.entered, 1), .threads = c->threads > 1 ? c->team_size() : 1};
    char *at = c->own + (size_t)own.index * c->own_bytes;
    own.prepared = at;
    own.h = (uint16_t *)(at += c->prepared_bytes);
    own.before = (uint16_t *)(at += adapt_lines(stream));
    own.order = (int64_t *)(at += adapt_lines(stream));
    own.x = (uint16_t *)(at += adapt_lines((size_t)c->M * sizeof *own.order));
    take_rows(c, &own);
    int64_t index = c->first;
    for (; index < c->last && is_ready(c, &own, index); index++) {
        int asked = is_asked(c, &own, index);
        if (asked) memcpy(own.before, own.h, stream);
        run_block(c, &own, index);
        if (asked) leave(c, &own, index);
    }
    if (own.index) return;
    for (int64_t m = 0; m < c->M; m++)
        memcpy(c->result + own.order[m] * c->hidden, own.h + m * c->hidden, (size_t)c->hidden * sizeof(uint16_t));
    c->done = index;
}
