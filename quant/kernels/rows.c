/* The operations between the products: arguments, threads, the rotation of a token and its step into the cache.
 * Like module.c it trusts its arguments, which small.py checks. The arithmetic that is worth vectors is in rows.h.
 */
#include "module.h"
#include "token.h"

#include <stdatomic.h>
#include <stdlib.h>

enum { SOME = 16384, ALONE = 40000 }; /* values at a time, and those that one thread does before others have woken */

static void share_rows(Shared *shared, long long team, long long threads, int64_t width) {
    shared->step = width < SOME ? SOME / (width ? width : 1) : 1;
    Py_BEGIN_ALLOW_THREADS
    share(shared, (Team)(uintptr_t)team, shared->count * width > ALONE ? threads : 1);
    Py_END_ALLOW_THREADS
}

typedef struct {
    const Isa *isa;
    const uint16_t *x;
    const float *factor;
    uint16_t *out;
    int64_t D;
    float eps;
} Norms;

static void norm_rows(const void *what, int64_t first, int64_t last) {
    const Norms *n = what;
    n->isa->rms_norm(n->x + first * n->D, n->factor, n->out + first * n->D, last - first, n->D, n->eps);
}

/* rms_norm(team, threads, isa, x, factor, out, rows, D, eps) */
PyObject *adapt_rms_norm(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    long long a[8];
    (void)self;
    if (!adapt_read_all(args, count, a, 8, 1, "rms_norm(team, threads, isa, x, factor, out, rows, D, eps)")) return NULL;
    double eps = PyFloat_AsDouble(args[8]);
    Norms norms = {PyErr_Occurred() ? NULL : adapt_find_isa(a[2]), adapt_pointer(a[3]), adapt_pointer(a[4]),
                   (uint16_t *)(uintptr_t)a[5], a[7], (float)eps};
    if (!norms.isa) return NULL;
    Shared shared = {.work = norm_rows, .what = &norms, .count = a[6]};
    share_rows(&shared, a[0], a[1], norms.D);
    Py_RETURN_NONE;
}

enum { LANES64 = 8 }; /* sums beside each other: an order of additions that vectors keep too */

static double product(const uint16_t *x, const uint16_t *y, int64_t D) {
    double sums[LANES64] = {0}, total = 0;
    int64_t d = 0;
    for (; d + LANES64 <= D; d += LANES64)
        for (int i = 0; i < LANES64; i++) sums[i] += (double)bf16_to_float(x[d + i]) * bf16_to_float(y[d + i]);
    for (; d < D; d++) total += (double)bf16_to_float(x[d]) * bf16_to_float(y[d]);
    for (int i = 0; i < LANES64; i++) total += sums[i];
    return total;
}

float adapt_cosine(const uint16_t *x, const uint16_t *y, int64_t D) {
    double size = fmax(sqrt(product(x, x, D)), 1e-8) * fmax(sqrt(product(y, y, D)), 1e-8);
    return (float)(product(x, y, D) / size);
}

/* cosines(x, y, out, rows, D): float32 [rows] */
PyObject *adapt_cosines(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    long long a[5];
    (void)self;
    if (!adapt_read_all(args, count, a, 5, 0, "cosines(x, y, out, rows, D)")) return NULL;
    const uint16_t *x = adapt_pointer(a[0]), *y = adapt_pointer(a[1]);
    float *out = (float *)(uintptr_t)a[2];
    for (int64_t m = 0; m < a[3]; m++, x += a[4], y += a[4]) out[m] = adapt_cosine(x, y, a[4]);
    Py_RETURN_NONE;
}

typedef struct {
    const Isa *isa;
    int kind;
    const uint16_t *gate, *up;
    uint16_t *out;
    int64_t N, gate_stride, up_stride;
} Gates;

static void gate_rows(const void *what, int64_t first, int64_t last) {
    const Gates *g = what;
    for (int64_t m = first; m < last; m++)
        g->isa->gated(g->kind, g->gate + m * g->gate_stride, g->up + m * g->up_stride, g->out + m * g->N, g->N);
}

static const char gated_usage[] = "gated(team, threads, isa, kind, gate, up, out, rows, N, gate_stride, up_stride)";

/* See `gated_usage`; strides in values. */
PyObject *adapt_gated(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    long long a[11];
    (void)self;
    if (!adapt_read_all(args, count, a, 11, 0, gated_usage)) return NULL;
    Gates gates = {adapt_find_isa(a[2]), (int)a[3], adapt_pointer(a[4]), adapt_pointer(a[5]), (uint16_t *)(uintptr_t)a[6],
                   a[8], a[9], a[10]};
    if (!gates.isa) return NULL;
    Shared shared = {.work = gate_rows, .what = &gates, .count = a[7]};
    share_rows(&shared, a[0], a[1], gates.N);
    Py_RETURN_NONE;
}

/* One head, turned: pairs (i, i + rotary / 2) rotate, the dimensions behind `rotary` pass. */
static void turn(const Token *token, const uint16_t *from, float scale, float *to) {
    int64_t half = token->cos ? token->rotary / 2 : 0, D = token->attention.width;
    for (int64_t i = 0; i < half; i++) {
        float low = bf16_to_float(from[i]), high = bf16_to_float(from[i + half]);
        to[i] = scale * (low * bf16_to_float(token->cos[i]) + high * bf16_to_float(token->sin[i]));
        to[i + half] = scale * (high * bf16_to_float(token->cos[i + half]) + low * bf16_to_float(token->sin[i + half]));
    }
    for (int64_t i = 2 * half; i < D; i++) to[i] = scale * bf16_to_float(from[i]);
}

void adapt_enter(Token *token, float *q, float *spare) {
    const Attention *a = &token->attention;
    int64_t D = a->width, P = a->padded, count = a->heads + (token->value ? a->groups : 0);
    const uint16_t *heads = token->heads;
    if (token->factors) {
        uint16_t *normed = (uint16_t *)(spare + P);
        for (int64_t h = 0; h < count; h++)
            token->isa->rms_norm(heads + h * D, token->factors + h * D, normed + h * D, 1, D, token->eps);
        heads = normed;
    }
    for (int64_t h = 0; h < a->heads; h++) turn(token, heads + h * D, token->scale, q + h * P);
    if (!token->value) return;
    for (int64_t g = 0; g < a->groups; g++) {
        int64_t at = g * a->stride + token->position * D;
        turn(token, heads + (a->heads + g) * D, 1.0f, spare);
        for (int64_t i = 0; i < D; i++) token->keys[at + i] = float_to_bf16(spare[i]);
        memcpy(token->values + at, token->value + g * D, sizeof(uint16_t) * (size_t)D);
    }
}

/* The spans of one head, put together in the place of the first; returns the sum of all weights. */
static float join_spans(const Attention *a, int64_t head, int64_t spans) {
    int64_t next = a->heads * a->padded;
    const float *top = a->tops + 2 * head;
    float *sums = a->sums + head * a->padded, largest = -INFINITY, total = 0;
    for (int64_t s = 0; s < spans; s++) largest = fmaxf(largest, top[2 * s * a->heads]);
    for (int64_t s = 0; s < spans; s++) {
        float share = expf(top[2 * s * a->heads] - largest);
        total += share * top[2 * s * a->heads + 1];
        for (int64_t d = 0; d < a->width; d++) sums[d] = (s ? sums[d] : 0) + share * sums[s * next + d];
    }
    return total;
}

void adapt_attend_task(const Isa *isa, const Attention *tokens, int64_t most, int64_t at) {
    const Attention *a = &tokens[at / most / tokens->groups];
    int64_t group = at / most % a->groups, span = at % most, spans = count_spans(a->count), size = a->heads / a->groups;
    if (span >= spans) return;
    isa->attend(a, group, span);
    if (atomic_fetch_add_explicit(&a->joined[group], 1, memory_order_acq_rel) + 1 < spans) return;
    for (int64_t head = group * size; head < (group + 1) * size; head++) {
        float total = spans > 1 ? join_spans(a, head, spans) : a->tops[2 * head + 1];
        const float *sums = a->sums + head * a->padded;
        for (int64_t d = 0; d < a->width; d++) a->out[head * a->width + d] = float_to_bf16(sums[d] / total);
    }
}

/* Every span of every group of heads of every token, for whichever thread comes next. */
typedef struct {
    const Isa *isa;
    const Attention *tokens;
    int64_t spans, count; /* at most, of a token; tasks */
    atomic_llong next;
} Tasks;

static void attend_next(void *data) {
    Tasks *tasks = data;
    for (;;) {
        int64_t at = atomic_fetch_add_explicit(&tasks->next, 1, memory_order_relaxed);
        if (at >= tasks->count) return;
        adapt_attend_task(tasks->isa, tasks->tokens, tasks->spans, at);
    }
}

/* Tokens at `position` and behind it; `window`: positions that each one sees at most, its own included; 0: all. */
typedef struct {
    Team team;
    int64_t threads, rows, heads_stride, value_stride, window;
} Rows;

/* Floats that one token wants for its queries, and for its sums and their tops. */
typedef struct {
    int64_t queries, sums, tops;
} Room;

/* The tokens enter the cache; each has its part of `floats`, and of `joined`. */
static void enter_all(Token *token, const Rows *rows, Attention *tokens, float *floats, float *spare, const Room *room,
                      atomic_llong *joined) {
    for (int64_t r = 0; r < rows->rows; r++, floats += room->queries + room->sums + room->tops) {
        Attention *a = &tokens[r];
        *a = token->attention;
        a->q = floats;
        a->sums = floats + room->queries;
        a->tops = a->sums + room->sums;
        a->joined = joined + r * a->groups;
        a->out += r * a->heads * a->width;
        if (rows->window && token->position + 1 - rows->window > a->first) a->first = token->position + 1 - rows->window;
        a->count = token->position + 1 - a->first;
        memset(floats, 0, sizeof(float) * (size_t)room->queries); /* what pads a head */
        adapt_enter(token, floats, spare);
        token->position++;
        token->heads += rows->heads_stride;
        if (token->value) token->value += rows->value_stride;
        if (token->cos) token->cos += token->rotary, token->sin += token->rotary;
    }
}

static void attend_all(const Token *token, const Rows *rows, const Attention *tokens, int64_t spans) {
    Tasks tasks = {.isa = token->isa, .tokens = tokens, .spans = spans, .count = rows->rows * tokens->groups * spans};
    atomic_init(&tasks.next, 0);
    int64_t threads = rows->threads < tasks.count ? rows->threads : tasks.count;
    if (threads > 1 && rows->team) rows->team(attend_next, &tasks, (unsigned)threads, 0);
    else attend_next(&tasks);
}

static int run_rows(Token *token, const Rows *rows) {
    Attention *a = &token->attention;
    a->padded = (a->width + PAD - 1) / PAD * PAD;
    int64_t seen = token->position + rows->rows - a->first;
    int64_t spans = count_spans(rows->window && rows->window < seen ? rows->window : seen);
    Room room = {a->heads * a->padded, spans * a->heads * a->padded, spans * a->heads * 2};
    int64_t each = room.queries + room.sums + room.tops, spare = a->padded + (a->heads + a->groups) * a->width;
    Attention *tokens = malloc((size_t)rows->rows * sizeof(Attention));
    float *floats = malloc(sizeof(float) * (size_t)(rows->rows * each + spare));
    atomic_llong *joined = calloc((size_t)(rows->rows * a->groups), sizeof(atomic_llong));
    int done = tokens && floats && joined;
    if (done) {
        enter_all(token, rows, tokens, floats, floats + rows->rows * each, &room, joined);
        attend_all(token, rows, tokens, spans);
    }
    free(tokens);
    free(floats);
    free(joined);
    return done;
}

enum { ATTEND_NUMBERS = 22 };
static const char attend_usage[] = "attend_rows(team, threads, isa, heads, value, cos, sin, factors, keys, values, out, "
                                   "queries, groups, width, rotary, stride, first, position, rows, heads_stride, "
                                   "value_stride, window, eps, scale)";

PyObject *adapt_attend(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    long long a[ATTEND_NUMBERS];
    int done;
    (void)self;
    if (!adapt_read_all(args, count, a, ATTEND_NUMBERS, 2, attend_usage)) return NULL;
    double eps = PyFloat_AsDouble(args[ATTEND_NUMBERS]), scale = PyFloat_AsDouble(args[ATTEND_NUMBERS + 1]);
    const Isa *isa = PyErr_Occurred() ? NULL : adapt_find_isa(a[2]);
    if (!isa) return NULL;
    Token token = {.isa = isa, .heads = adapt_pointer(a[3]), .value = adapt_pointer(a[4]),
                   .cos = adapt_pointer(a[5]), .sin = adapt_pointer(a[6]),
                   .factors = (const float *)(uintptr_t)a[7], .keys = (uint16_t *)(uintptr_t)a[8],
                   .values = (uint16_t *)(uintptr_t)a[9], .rotary = a[14], .position = a[17], .eps = (float)eps,
                   .scale = (float)scale};
    token.attention = (Attention){.keys = token.keys, .values = token.values, .out = (uint16_t *)(uintptr_t)a[10],
                                  .heads = a[11], .groups = a[12], .width = a[13], .stride = a[15], .first = a[16]};
    Rows rows = {.team = (Team)(uintptr_t)a[0], .threads = a[1], .rows = a[18], .heads_stride = a[19], .value_stride = a[20], .window = a[21]};
    Py_BEGIN_ALLOW_THREADS
    done = run_rows(&token, &rows);
    Py_END_ALLOW_THREADS
    if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}
