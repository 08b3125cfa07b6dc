// Launches inside of programs that XLA compiled, for JAX.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>

// The capsule of the handler, as `jax.ffi.register_ffi_target` takes it.
PyObject* jax_handler(PyObject* module, PyObject* nothing);
// (id, ordinal, num_args, num_results, sources, workspace, alignment, aligned, launches, keep) -> False where this driver
// cannot launch it.
PyObject* jax_plan(PyObject* module, PyObject* args);
// (id, ordinal, text): a GPU on which the call cannot run, and why.
PyObject* jax_failed(PyObject* module, PyObject* args);
// How often the handler has queued a call.
PyObject* jax_runs(PyObject* module, PyObject* nothing);
