/* The CPython module: reads raw addresses, lets go of the interpreter lock, shares the rows out among threads.
 *
 * It trusts its arguments; native.py checks them. It keeps no state and knows nothing of torch.
 */
#include "module.h"

#include <stdatomic.h>
#include <stdlib.h>

static const Isa *const isas[] = {&adapt_isa_avx512bf16, &adapt_isa_avx512, &adapt_isa_avx2, &adapt_isa_scalar};
enum { ISAS = sizeof isas / sizeof *isas, MAX_PARTS = 8 };

typedef struct {
    const Isa *isa;
    int64_t M, K, threads;
    Team team;
    const uint16_t *x;
    void *xs;
    float *sums;
    int64_t step, chunks;
    atomic_llong next;
    int parts;
    int64_t ends[MAX_PARTS]; /* chunk after the last of each part */
    Dense dense[MAX_PARTS];
    Int4 int4;
} Job;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static void run_chunk(Job *job, int64_t chunk) {
    int part = 0;
    while (chunk >= job->ends[part]) part++;
    int64_t first = (chunk - (part ? job->ends[part - 1] : 0)) * job->step;
    int64_t block = block_rows(job->M, job->parts ? job->isa->dense_block : job->isa->int4_block);
    for (int64_t m = 0; m < job->M; m += block) {
        int rows = (int)least(block, job->M - m);
        if (job->parts) {
            const Dense *d = &job->dense[part];
            job->isa->dense_rows(d, job->K, job->xs, m, rows, first, least(d->n, first + job->step));
        } else {
            job->isa->int4_rows(&job->int4, job->xs, job->sums, m, rows, first, least(job->int4.n, first + job->step));
        }
    }
}

static void work(void *data) {
    Job *job = data;
    for (;;) {
        int64_t chunk = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
        if (chunk >= job->chunks) return;
        run_chunk(job, chunk);
    }
}

/* Rows per chunk: about 64 KiB of weights, but at least four chunks for each thread. */
static int64_t rows_per_chunk(int64_t rows, int64_t row_bytes, int64_t threads, int64_t unit) {
    int64_t step = least(65536 / row_bytes + 1, ceil_div(rows, 4 * threads));
    return ceil_div(step, unit) * unit;
}

/* Waking the other threads pays from about 20 microseconds of work on. One thread does some 12 weight bytes, or 30
 * multiplications, in a nanosecond. */
static void run(Job *job, int64_t rows, int64_t bytes) {
    int64_t by_arithmetic = rows * job->K * job->M / 30, by_memory = bytes / 12;
    int alone = by_arithmetic < 20000 && by_memory < 20000;
    int64_t threads = alone || !job->team ? 1 : least(job->threads, job->chunks);
    atomic_init(&job->next, 0);
    if (threads > 1) job->team(work, job, (unsigned)threads, 0);
    else work(job);
}

/* Room for the prepared x, at the start of a cache line: loads that cross one cost twice. `*block` is to be freed. */
static void *room(size_t bytes, void **block) {
    *block = malloc(bytes + LINE);
    return *block ? (void *)(((uintptr_t)*block + LINE - 1) / LINE * LINE) : NULL;
}

static int run_dense(Job *job) {
    void *block;
    int64_t rows = 0, chunks = 0;
    for (int i = 0; i < job->parts; i++) rows += job->dense[i].n;
    if (job->M < 1 || rows < 1) return 1;
    job->step = rows_per_chunk(rows, 2 * job->K, job->threads, 4);
    for (int i = 0; i < job->parts; i++) job->ends[i] = chunks += ceil_div(job->dense[i].n, job->step);
    job->chunks = chunks;
    job->xs = room(job->isa->dense_bytes(job->M, job->K), &block);
    if (!block) return 0;
    job->isa->dense_prepare(job->x, job->M, job->K, job->xs);
    run(job, rows, rows * job->K * 2);
    free(block);
    return 1;
}

static int run_int4(Job *job) {
    void *block;
    const Int4 *p = &job->int4;
    if (job->M < 1 || p->n < 1) return 1;
    int64_t tile = p->groups * (p->lines + (p->wide ? 2 : 1)) * LINE;
    job->step = rows_per_chunk(p->n, ceil_div(tile, TILE), job->threads, TILE);
    job->ends[0] = job->chunks = ceil_div(p->n, job->step);
    size_t bytes = job->isa->int4_bytes(job->M, job->K);
    job->xs = room(bytes + (size_t)(job->M * p->groups) * 2 * sizeof(float), &block);
    if (!block) return 0;
    job->sums = (float *)((char *)job->xs + bytes);
    job->isa->int4_prepare(job->x, job->M, job->K, p->groups, job->xs, job->sums);
    run(job, p->n, ceil_div(p->n, TILE) * tile);
    free(block);
    return 1;
}

/* The common arguments: team, threads, isa, x, M, K. False with an exception set. */
enum { COMMON = 6, DENSE_ARGS = 5 };

int adapt_read_numbers(PyObject *const *args, Py_ssize_t count, long long *to) {
    for (Py_ssize_t i = 0; i < count; i++) {
        to[i] = PyLong_AsLongLong(args[i]);
        if (to[i] == -1 && PyErr_Occurred()) return 0;
    }
    return 1;
}

const Isa *adapt_find_isa(long long index) {
    if (index >= 0 && index < ISAS && isas[index]->supported()) return isas[index];
    PyErr_SetString(PyExc_ValueError, "this processor does not have that instruction set");
    return NULL;
}

static int read_common(const long long *a, Job *job) {
    job->isa = adapt_find_isa(a[2]);
    if (!job->isa) return 0;
    job->team = (Team)(uintptr_t)a[0];
    job->threads = a[1] < 1 ? 1 : a[1];
    job->x = (const uint16_t *)(uintptr_t)a[3];
    job->M = a[4];
    job->K = a[5];
    return 1;
}

static PyObject *finish(Job *job, int (*body)(Job *)) {
    int done;
    Py_BEGIN_ALLOW_THREADS
    done = body(job);
    Py_END_ALLOW_THREADS
    if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* dense(team, threads, isa, x, M, K, then w, n, out, out_stride, bias for each matrix) */
static PyObject *dense(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    long long a[COMMON + DENSE_ARGS * MAX_PARTS];
    (void)self;
    if (count < COMMON + DENSE_ARGS || (count - COMMON) % DENSE_ARGS || count > COMMON + DENSE_ARGS * MAX_PARTS) {
        PyErr_SetString(PyExc_TypeError, "dense(team, threads, isa, x, M, K, (w, n, out, out_stride, bias) x 1..8)");
        return NULL;
    }
    Job job = {0};
    if (!adapt_read_numbers(args, count, a) || !read_common(a, &job)) return NULL;
    job.parts = (int)((count - COMMON) / DENSE_ARGS);
    for (int i = 0; i < job.parts; i++) {
        const long long *p = a + COMMON + DENSE_ARGS * i;
        job.dense[i] = (Dense){.w = (const uint16_t *)(uintptr_t)p[0], .n = p[1],
                               .out = (uint16_t *)(uintptr_t)p[2], .out_stride = p[3],
                               .bias = (const uint16_t *)(uintptr_t)p[4]};
    }
    return finish(&job, run_dense);
}

/* int4(team, threads, isa, x, M, K, data, n, out, bias, groups, wide) */
static PyObject *int4(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    long long a[COMMON + 6];
    (void)self;
    if (count != COMMON + 6) {
        PyErr_SetString(PyExc_TypeError, "int4(team, threads, isa, x, M, K, data, n, out, bias, groups, wide)");
        return NULL;
    }
    Job job = {0};
    if (!adapt_read_numbers(args, count, a) || !read_common(a, &job)) return NULL;
    const long long *p = a + COMMON;
    job.int4 = (Int4){.data = (const uint8_t *)(uintptr_t)p[0], .n = p[1], .out = (uint16_t *)(uintptr_t)p[2],
                      .bias = (const uint16_t *)(uintptr_t)p[3], .groups = p[4], .wide = p[5] != 0,
                      .lines = job.K / p[4] / LINE_INPUTS};
    return finish(&job, run_int4);
}

/* names() -> the instruction sets in order of preference; an unsupported one is None */
static PyObject *names(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    PyObject *list = PyList_New(ISAS);
    for (Py_ssize_t i = 0; list && i < ISAS; i++) {
        PyObject *name = isas[i]->supported() ? PyUnicode_FromString(isas[i]->name) : Py_NewRef(Py_None);
        if (!name) Py_CLEAR(list);
        else PyList_SET_ITEM(list, i, name);
    }
    return list;
}

static PyMethodDef methods[] = {
    {"dense", (PyCFunction)(void (*)(void))dense, METH_FASTCALL, "bf16 matrices times bf16 rows"},
    {"int4", (PyCFunction)(void (*)(void))int4, METH_FASTCALL, "a packed 4-bit matrix times bf16 rows"},
    {"int8", (PyCFunction)(void (*)(void))adapt_int8, METH_FASTCALL, "an 8-bit matrix times bf16 rows"},
    {"rms_norm", (PyCFunction)(void (*)(void))adapt_rms_norm, METH_FASTCALL, "RMS norm of bf16 rows"},
    {"gated", (PyCFunction)(void (*)(void))adapt_gated, METH_FASTCALL, "activation(gate) * up of bf16 rows"},
    {"attend_rows", (PyCFunction)(void (*)(void))adapt_attend, METH_FASTCALL, "tokens into the cache, and their attention"},
    {"names", names, METH_NOARGS, "instruction sets, best first"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_native", .m_methods = methods, .m_size = 0};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
