// How a call's arrays are read.
#pragma once
#include "entry.h"

enum { MAX_CLASSES = 8 };

// Given by `setup`.
typedef struct {
    const Exchange* exchange;
    PyTypeObject* classes[MAX_CLASSES];
    int num_classes;
    PyObject *is_neg, *is_grad_enabled, *name_requires_grad;
} Reader;
extern Reader reader;

// 1 for a true result, 0 for a false one, -1 for an error.
int ask(PyObject* function, PyObject* argument);
// Whether it is plain memory of a GPU.
int read_one(PyObject* object, Facts* t);
// 1 if all arrays are plain memory of one GPU, 0 if not, -1 for an error. The first of the facts has a bit for each
// array that a gradient is wanted of.
int read_objects(PyObject* objects, uint64_t* addresses, int64_t* facts, uint32_t* num_facts, uint32_t* num_objects,
                 int32_t* ordinal);
