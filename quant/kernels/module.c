/* The CPython module: reads raw addresses, lets go of the interpreter lock, shares the rows out among threads.
 *
 * It trusts its arguments; native.py checks them. It keeps no state and knows nothing of torch.
 */
#include "module.h"

#include <stdlib.h>

#include "job.h"
#include "many.h"

static const Isa *const isas[] = {&adapt_isa_amx, &adapt_isa_avx512bf16, &adapt_isa_avx512, &adapt_isa_avx2, &adapt_isa_scalar};
enum { ISAS = sizeof isas / sizeof *isas };

static void share_out(Job *job, Team team) {
    int alone = adapt_alone(job->rows * job->K * job->M, job->bytes);
    int64_t least_rows = ceil_div(job->fewest, job->unit) * job->unit; /* of a chunk */
    int64_t threads = alone || !team ? 1 : least(job->threads, ceil_div(job->rows, least_rows));
    if (threads > 1) team(adapt_work, job, (unsigned)threads, 0);
    else adapt_work(job);
}

static int run(Job *job, Team team) {
    atomic_llong next;
    atomic_init(&next, 0);
    adapt_plan(job);
    if (job->M < 1 || job->rows < 1) return 1;
    const Multiplier *many = job->parts ? job->isa->many : job->isa->many_int4;
    if (many && job->M > MANY_ABOVE) return adapt_multiply_many(many, job, team);
    void *block = malloc(adapt_room(job) + LINE);
    if (!block) return 0;
    job->next = &next;
    adapt_prepare(job, adapt_aligned(block));
    share_out(job, team);
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

int adapt_read_all(PyObject *const *args, Py_ssize_t count, long long *to, Py_ssize_t wanted, Py_ssize_t others,
                   const char *usage) {
    if (count == wanted + others) return adapt_read_numbers(args, wanted, to);
    PyErr_SetString(PyExc_TypeError, usage);
    return 0;
}

const Isa *adapt_find_isa(long long index) {
    if (index >= 0 && index < ISAS && isas[index]->supported()) return isas[index];
    PyErr_SetString(PyExc_ValueError, "this processor does not have that instruction set");
    return NULL;
}

static int read_common(const long long *a, Job *job, Team *team) {
    job->isa = adapt_find_isa(a[2]);
    if (!job->isa) return 0;
    *team = (Team)(uintptr_t)a[0];
    job->threads = a[1] < 1 ? 1 : a[1];
    job->x = (const uint16_t *)(uintptr_t)a[3];
    job->M = a[4];
    job->K = a[5];
    return 1;
}

static PyObject *finish(Job *job, Team team) {
    int done;
    Py_BEGIN_ALLOW_THREADS
    done = run(job, team);
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
    Team team;
    if (!adapt_read_numbers(args, count, a) || !read_common(a, &job, &team)) return NULL;
    job.parts = (int)((count - COMMON) / DENSE_ARGS);
    for (int i = 0; i < job.parts; i++) {
        const long long *p = a + COMMON + DENSE_ARGS * i;
        job.dense[i] = (Dense){.w = (const uint16_t *)(uintptr_t)p[0], .n = p[1],
                               .out = (uint16_t *)(uintptr_t)p[2], .out_stride = p[3],
                               .bias = (const uint16_t *)(uintptr_t)p[4]};
    }
    return finish(&job, team);
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
    Team team;
    if (!adapt_read_numbers(args, count, a) || !read_common(a, &job, &team)) return NULL;
    const long long *p = a + COMMON;
    job.int4 = (Int4){.data = (const uint8_t *)(uintptr_t)p[0], .n = p[1], .out = (uint16_t *)(uintptr_t)p[2],
                      .bias = (const uint16_t *)(uintptr_t)p[3], .groups = p[4], .wide = p[5] != 0,
                      .lines = job.K / p[4] / LINE_INPUTS};
    return finish(&job, team);
}

/* instruction_sets() -> names in order of preference, None for what is not supported here */
static PyObject *instruction_sets(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    PyObject *list = PyList_New(ISAS);
    for (Py_ssize_t i = 0; list && i < ISAS; i++) {
        PyObject *name = Py_BuildValue("z", isas[i]->supported() ? isas[i]->name : NULL);
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
    {"cosines", (PyCFunction)(void (*)(void))adapt_cosines, METH_FASTCALL, "cosines of the angles between bf16 rows"},
    {"attend_rows", (PyCFunction)(void (*)(void))adapt_attend, METH_FASTCALL, "tokens into the cache, and their attention"},
    {"pack", (PyCFunction)(void (*)(void))adapt_pack, METH_FASTCALL, "4-bit codes into the lines of tiles"},
    {"dequantize", (PyCFunction)(void (*)(void))adapt_dequantize, METH_FASTCALL, "rows of a packed 4-bit matrix as fp32"},
    {"blocks", (PyCFunction)(void (*)(void))adapt_chain, METH_FASTCALL, "decoder blocks, one behind the other"},
    {"look", (PyCFunction)(void (*)(void))adapt_look, METH_FASTCALL, "rows normed, and the score of each"},
    {"adapter", (PyCFunction)(void (*)(void))adapt_adapter, METH_FASTCALL, "rows and what two products add to them"},
    {"draw", (PyCFunction)(void (*)(void))adapt_draw, METH_FASTCALL, "a token drawn from logits"},
    {"greatest", (PyCFunction)(void (*)(void))adapt_greatest, METH_FASTCALL, "the first of the greatest logits"},
    {"instruction_sets", instruction_sets, METH_NOARGS, "those that exist, best first"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_native", .m_methods = methods, .m_size = 0};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
