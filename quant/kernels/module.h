/* What the parts of the Python module share: numbers from arguments, instruction sets by index. */
#ifndef ADAPT_MODULE_H
#define ADAPT_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "native.h"
#include "team.h"

/* False with an exception set where an argument is no number. */
int adapt_read_numbers(PyObject *const *args, Py_ssize_t count, long long *to);

/* The same of a function's first arguments, `wanted` of them, which `others` more follow; a wrong count is told by `usage`. */
int adapt_read_all(PyObject *const *args, Py_ssize_t count, long long *to, Py_ssize_t wanted, Py_ssize_t others,
                   const char *usage);

/* NULL with an exception set where this processor does not have it. */
const Isa *adapt_find_isa(long long index);

/* Functions of the module that rows.c, int8.c, chain.c, exits.c and draw.c give; METH_FASTCALL. */
PyObject *adapt_int8(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *adapt_rms_norm(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *adapt_cosines(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *adapt_gated(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *adapt_attend(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *adapt_pack(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *adapt_dequantize(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *adapt_chain(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *adapt_draw(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *adapt_greatest(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *adapt_look(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *adapt_adapter(PyObject *self, PyObject *const *args, Py_ssize_t count);

#endif
