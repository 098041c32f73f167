/* What an early exit computes of few rows, in one call with one team: two products with an activation between them.
 *
 * `look` norms rows and gives each a score, `adapter` adds to each row what the products make of it. Products and norms are
 * those of module.c and rows.c; what lies between is rounded to bf16 where single operations round it.
 * Trusts its arguments, which exits.py makes.
 */
#include "module.h"

#include <stdlib.h>

#include "job.h"
#include "team.h"

enum { FIRST, SECOND, PRODUCTS };

typedef struct {
    Team team;
    int (*team_size)(void);
    int64_t threads;
    const Isa *isa;
    int64_t M, K, inner;
    const uint16_t *x;
    const uint16_t *weights[PRODUCTS], *biases[PRODUCTS];
    float (*activation)(float);
    uint16_t *middle, *result; /* of the products: [M, inner] and [M, K] */
    char *own;                 /* `own_bytes` for each thread: x laid out, then its activated middle */
    size_t own_bytes, room;
    void *block;
    atomic_llong next[PRODUCTS];
    Meeting meeting;
} Pair;

static float gelu(float x) { return x * 0.5f * (1.0f + erff(x * 0.70710678118654752440f)); }

static float silu(float x) { return x / (1.0f + expf(-x)); }

static Job job_of(Pair *pair, int which, const uint16_t *x) {
    int64_t n = which == FIRST ? pair->inner : pair->K;
    Job job = {.isa = pair->isa, .M = pair->M, .K = which == FIRST ? pair->K : pair->inner, .threads = pair->threads,
               .x = x, .parts = 1, .next = &pair->next[which]};
    job.dense[0] = (Dense){.w = pair->weights[which], .bias = pair->biases[which], .n = n, .out_stride = n,
                           .out = which == FIRST ? pair->middle : pair->result};
    adapt_plan(&job);
    return job;
}

static void multiply(Pair *pair, int which, const uint16_t *x, void *room) {
    Job job = job_of(pair, which, x);
    adapt_prepare(&job, room);
    adapt_work(&job);
}

static void run_thread(void *data) {
    Pair *pair = data;
    int64_t index = atomic_fetch_add(&pair->meeting.entered, 1);
    char *room = pair->own + (size_t)index * pair->own_bytes;
    uint16_t *activated = (uint16_t *)(room + pair->room);
    multiply(pair, FIRST, pair->x, room);
    meet(&pair->meeting, pair->threads > 1 ? pair->team_size() : 1);
    for (int64_t i = 0; i < pair->M * pair->inner; i++)
        activated[i] = float_to_bf16(pair->activation(bf16_to_float(pair->middle[i])));
    multiply(pair, SECOND, activated, room);
}

/* Both products. False where there is no memory; otherwise the caller frees `block`, in which `result` lies. */
static int run(Pair *pair) {
    int64_t each = pair->K * pair->inner;
    if (!pair->team || !pair->team_size || adapt_alone(2 * each * pair->M, 4 * each) || pair->threads < 1) pair->threads = 1;
    Job first = job_of(pair, FIRST, NULL), second = job_of(pair, SECOND, NULL);
    size_t rooms[] = {adapt_room(&first), adapt_room(&second)};
    size_t middle = adapt_lines((size_t)(pair->M * pair->inner) * sizeof(uint16_t));
    size_t result = adapt_lines((size_t)(pair->M * pair->K) * sizeof(uint16_t));
    pair->room = adapt_lines(rooms[FIRST] > rooms[SECOND] ? rooms[FIRST] : rooms[SECOND]);
    pair->own_bytes = pair->room + middle;
    pair->block = malloc((size_t)pair->threads * pair->own_bytes + middle + result + LINE);
    if (!pair->block) return 0;
    char *at = adapt_aligned(pair->block);
    pair->middle = (uint16_t *)at;
    pair->result = (uint16_t *)(at + middle);
    pair->own = at + middle + result;
    for (int i = 0; i < PRODUCTS; i++) atomic_init(&pair->next[i], 0);
    open_meeting(&pair->meeting);
    if (pair->threads > 1) pair->team(run_thread, pair, (unsigned)pair->threads, 0);
    else run_thread(pair);
    return 1;
}

/* (u . weight) / rms(u) + bias of each row: an RMS norm whose factor is part of the weight, then one output. */
static void score_rows(const Pair *pair, const float *weight, double eps, double bias, double *scores) {
    for (int64_t m = 0; m < pair->M; m++) {
        double dot = 0, squares = 0;
        for (int64_t i = 0; i < pair->K; i++) {
            double u = bf16_to_float(pair->result[m * pair->K + i]);
            dot += u * weight[i];
            squares += u * u;
        }
        scores[m] = dot / sqrt(squares / (double)pair->K + eps) + bias;
    }
}

/* The common arguments: team, team_size, threads, isa, M, K, inner, then weight and bias of each product. */
enum { COMMON = 11 };

/* False with an exception set. */
static int read_pair(PyObject *const *args, Py_ssize_t count, Py_ssize_t wanted, Py_ssize_t floats, const char *usage,
                     long long *a, Pair *pair) {
    if (!adapt_read_all(args, count, a, wanted, floats, usage)) return 0;
    *pair = (Pair){.team = (Team)(uintptr_t)a[0], .team_size = (int (*)(void))(uintptr_t)a[1], .threads = a[2],
                   .isa = adapt_find_isa(a[3]), .M = a[4], .K = a[5], .inner = a[6]};
    for (int i = 0; i < PRODUCTS; i++) {
        pair->weights[i] = adapt_pointer(a[7 + 2 * i]);
        pair->biases[i] = adapt_pointer(a[8 + 2 * i]);
    }
    return pair->isa != NULL;
}

static PyObject *list_of(const double *values, int64_t count) {
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list && i < count; i++) {
        PyObject *value = PyFloat_FromDouble(values[i]);
        if (!value) Py_CLEAR(list);
        else PyList_SET_ITEM(list, i, value);
    }
    return list;
}

enum { LOOK_NUMBERS = COMMON + 5, MOST_ROWS = 16 };
static const char look_usage[] = "look(team, team_size, threads, isa, M, K, inner, (weight, bias) x 2, small_isa, h, normed, "
                                 "factor, head, eps, bias), M at most 16";

/* See `look_usage`: `normed` [M, K] is written; gives the scores as numbers. */
PyObject *adapt_look(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    long long a[LOOK_NUMBERS];
    double scores[MOST_ROWS];
    Pair pair;
    int done;
    (void)self;
    if (!read_pair(args, count, LOOK_NUMBERS, 2, look_usage, a, &pair)) return NULL;
    double eps = PyFloat_AsDouble(args[LOOK_NUMBERS]), bias = PyFloat_AsDouble(args[LOOK_NUMBERS + 1]);
    const Isa *small = PyErr_Occurred() ? NULL : adapt_find_isa(a[COMMON]);
    if (!small) return NULL;
    if (pair.M < 1 || pair.M > MOST_ROWS) {
        PyErr_SetString(PyExc_ValueError, look_usage);
        return NULL;
    }
    uint16_t *normed = (uint16_t *)(uintptr_t)a[COMMON + 2];
    pair.x = normed;
    pair.activation = gelu;
    Py_BEGIN_ALLOW_THREADS
    small->rms_norm(adapt_pointer(a[COMMON + 1]), adapt_pointer(a[COMMON + 3]), normed, pair.M, pair.K, (float)eps);
    done = run(&pair);
    if (done) score_rows(&pair, adapt_pointer(a[COMMON + 4]), eps, bias, scores);
    free(pair.block);
    Py_END_ALLOW_THREADS
    return done ? list_of(scores, pair.M) : PyErr_NoMemory();
}

enum { ADAPTER_NUMBERS = COMMON + 2 };
static const char adapter_usage[] = "adapter(team, team_size, threads, isa, M, K, inner, (weight, bias) x 2, x, out)";

/* See `adapter_usage`: out = x + second(SiLU(first(x))). */
PyObject *adapt_adapter(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    long long a[ADAPTER_NUMBERS];
    Pair pair;
    int done;
    (void)self;
    if (!read_pair(args, count, ADAPTER_NUMBERS, 0, adapter_usage, a, &pair)) return NULL;
    uint16_t *out = (uint16_t *)(uintptr_t)a[COMMON + 1];
    pair.x = adapt_pointer(a[COMMON]);
    pair.activation = silu;
    Py_BEGIN_ALLOW_THREADS
    done = run(&pair);
    for (int64_t i = 0; done && i < pair.M * pair.K; i++)
        out[i] = float_to_bf16(bf16_to_float(pair.x[i]) + bf16_to_float(pair.result[i]));
    free(pair.block);
    Py_END_ALLOW_THREADS
    if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}
