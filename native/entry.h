// What is known of a call that has run: the facts that its plan was made for, and its launches.
#pragma once
#include "dlpack.h"
#include "launch.h"

enum {
    MAX_OBJECTS = 24,
    MAX_DIMS = 8,
    MAX_FACTS = 1 + MAX_OBJECTS * (2 + 2 * MAX_DIMS),
    MAX_RESULTS = 8,
};

// An array that is written and another one, by their places among the operands: between the differences `low` and `high`
// of their addresses their extents overlap, which is right where the difference is `known`.
typedef struct {
    uint32_t written, other;
    int64_t low, high, known;
} Pair;

#define MAX_WORKSPACE_BYTES ((uint64_t)1 << 62)

typedef struct {
    PyObject_HEAD uint64_t hash;
    int64_t* facts;
    uint32_t num_facts, num_objects, num_masks, num_results, num_launches, num_pairs, num_given;
    int with_cache, writes_cache;
    int32_t ordinal;
    int64_t placed;  // place of the array whose address decides; -1 for none
    uint64_t placed_multiple;
    int placed_fits;
    uint64_t workspace_bytes, workspace_alignment;
    Place masks[MAX_OBJECTS];  // operand, and in `add` the bits that its address must not have
    int32_t sources[MAX_RESULTS];
    Pair* pairs;
    PyObject* makers[MAX_RESULTS];  // NULL for a result that is written to an array of the call
    PyObject *operation, *options, *extra, *identity, *problem, *keep;
    PyObject* differentiate;  // (objects) -> results or None, in place of launches; NULL for none
    Launch launches[MAX_LAUNCHES];
} Entry;

// Of objects that stand for another one by its identity, in their attribute `of`; given by `setup`.
extern PyTypeObject* class_of_same;

PyObject* entry_new(PyTypeObject* type, PyObject* args, PyObject* names);
void entry_free(PyObject* self);
uint64_t hash_facts(const int64_t* facts, uint32_t count, const void* operation);
int same(PyObject* a, PyObject* b);
int same_options(PyObject* a, PyObject* b);
