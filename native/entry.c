// Making, comparing and freeing of entries.
#include "entry.h"

#include <stdlib.h>
#include <string.h>

#include "objects.h"

uint64_t hash_facts(const int64_t* facts, uint32_t count, const void* operation) {
    uint64_t hash = (uint64_t)(uintptr_t)operation;
    for (uint32_t i = 0; i < count; ++i) hash = (hash ^ (uint64_t)facts[i]) * 0x9E3779B97F4A7C15u, hash ^= hash >> 29;
    return hash;
}

PyTypeObject* class_of_same;

// 1 for objects that stand for the same option. True == 1 == 1.0, but these are not the same option. Objects of other
// classes than these are the same if they are one: no code of theirs is run. Those of `Same` stand for another one.
int same(PyObject* a, PyObject* b) {
    if (a == b) return 1;
    if (Py_TYPE(a) != Py_TYPE(b)) return 0;
    if (PyTuple_Check(a)) {  // and named tuples, which are lists of options here
        Py_ssize_t count = PyTuple_Size(a);
        if (count != PyTuple_Size(b)) return 0;
        for (Py_ssize_t i = 0; i < count; ++i)
            if (!same(PyTuple_GetItem(a, i), PyTuple_GetItem(b, i))) return 0;
        return 1;
    }
    if (Py_TYPE(a) == class_of_same) {
        PyObject *of_a = PyObject_GetAttrString(a, "of"), *of_b = of_a ? PyObject_GetAttrString(b, "of") : NULL;
        int found = of_a && of_a == of_b;
        Py_XDECREF(of_a);
        Py_XDECREF(of_b);
        PyErr_Clear();
        return found;
    }
    if (!PyLong_CheckExact(a) && !PyFloat_CheckExact(a) && !PyUnicode_CheckExact(a) && !PyBytes_CheckExact(a)) return 0;
    int equal = PyObject_RichCompareBool(a, b, Py_EQ);
    if (equal < 0) PyErr_Clear();
    return equal == 1;
}

// 1 for the same values of an operation's options, whatever class of tuple holds them.
int same_options(PyObject* a, PyObject* b) {
    Py_ssize_t count = PyTuple_Size(a);
    if (!PyTuple_Check(b) || count != PyTuple_Size(b)) return 0;
    for (Py_ssize_t i = 0; i < count; ++i)
        if (!same(PyTuple_GetItem(a, i), PyTuple_GetItem(b, i))) return 0;
    return 1;
}

static int fill_pairs(Entry* e, PyObject* pairs) {
    size_t count = (size_t)PyTuple_Size(pairs);
    if (!(e->pairs = malloc(count * sizeof *e->pairs + 1))) return PyErr_NoMemory(), 0;
    for (size_t i = 0; i < count; ++i) {
        Pair pair;
        long long low, high, known;
        PyObject* item = PyTuple_GetItem(pairs, (Py_ssize_t)i);
        if (!PyTuple_Check(item)) return refuse("a pair is no tuple");
        if (!PyArg_ParseTuple(item, "IILLL", &pair.written, &pair.other, &low, &high, &known)) return 0;
        if (pair.written >= MAX_OPERANDS || pair.other >= MAX_OPERANDS) return refuse("no such array");
        pair.low = low, pair.high = high, pair.known = known;
        e->pairs[e->num_pairs++] = pair;
    }
    return 1;
}

static int fill(Entry* e, PyObject* objects, PyObject* masks, PyObject* results, PyObject* launches, PyObject* placed) {
    uint64_t addresses[MAX_OBJECTS];
    int64_t facts[MAX_FACTS];
    int found = read_objects(objects, addresses, facts, &e->num_facts, &e->num_objects, &e->ordinal);
    if (found <= 0) return found < 0 ? 0 : refuse("arrays that are not plain");
    if (!facts[0] != !e->differentiate)
        return refuse("gradients are wanted where none are made, or the other way round");
    e->facts = malloc(e->num_facts * sizeof *facts + 1);
    if (!e->facts) return PyErr_NoMemory(), 0;
    memcpy(e->facts, facts, e->num_facts * sizeof *facts);
    e->hash = hash_facts(facts, e->num_facts, e->operation);
    e->placed = -1;
    if (placed != Py_None) {
        unsigned index;
        unsigned long long multiple;
        if (!PyTuple_Check(placed)) return refuse("placed is no tuple");
        if (!PyArg_ParseTuple(placed, "IK", &index, &multiple)) return 0;
        if (index >= e->num_objects || !multiple) return refuse("no such array");
        e->placed = index, e->placed_multiple = multiple, e->placed_fits = addresses[index] % multiple == 0;
    }
    if (PyTuple_Size(masks) > MAX_OBJECTS || PyTuple_Size(results) > MAX_RESULTS ||
        PyTuple_Size(launches) > MAX_LAUNCHES)
        return refuse("too many masks, results or launches");
    for (Py_ssize_t i = 0; i < PyTuple_Size(masks); ++i) {
        unsigned index;
        unsigned long long bits;
        PyObject* item = PyTuple_GetItem(masks, i);
        if (!PyTuple_Check(item)) return refuse("a mask is no tuple");
        if (!PyArg_ParseTuple(item, "IK", &index, &bits)) return 0;
        if (index >= e->num_objects) return refuse("no such array");
        e->masks[e->num_masks].operand = index, e->masks[e->num_masks++].add = bits;
    }
    for (Py_ssize_t i = 0; i < PyTuple_Size(results); ++i) {
        unsigned index;
        PyObject *maker, *item = PyTuple_GetItem(results, i);
        if (!PyTuple_Check(item)) return refuse("a result is no tuple");
        if (!PyArg_ParseTuple(item, "IO", &index, &maker)) return 0;
        if (index >= e->num_objects) return refuse("no such array");
        e->sources[i] = (int32_t)index;
        e->makers[i] = maker == Py_None ? NULL : (Py_INCREF(maker), maker);
        e->num_given += !e->makers[i];
        e->num_results++;
    }
    for (Py_ssize_t i = 0; i < PyTuple_Size(launches); ++i) {
        e->num_launches++;
        if (!launch_of(&e->launches[i], PyTuple_GetItem(launches, i))) return 0;
    }
    return 1;
}

PyObject* entry_new(PyTypeObject* type, PyObject* args, PyObject* names) {
    PyObject *operation, *options, *extra, *identity, *problem, *keep, *objects, *masks, *results;
    PyObject *launches, *placed, *differentiate, *pairs;
    int writes_cache;
    unsigned long long workspace_bytes, alignment;
    if (names && PyDict_Size(names)) return refuse("takes no names"), NULL;
    if (!PyArg_ParseTuple(args, "OO!OOOOO!O!O!KKO!OOO!p", &operation, &PyTuple_Type, &options, &extra, &identity,
                          &problem, &keep, &PyTuple_Type, &objects, &PyTuple_Type, &masks, &PyTuple_Type, &results,
                          &workspace_bytes, &alignment, &PyTuple_Type, &launches, &placed, &differentiate,
                          &PyTuple_Type, &pairs, &writes_cache))
        return NULL;
    if (!alignment || alignment & (alignment - 1)) return refuse("the alignment is no power of two"), NULL;
    if (workspace_bytes > MAX_WORKSPACE_BYTES) return refuse("too large a workspace"), NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Entry* e = (Entry*)allocate(type, 0);
    if (!e) return NULL;
    PyObject* held[] = {operation, options, extra, identity, problem, keep};
    PyObject** fields[] = {&e->operation, &e->options, &e->extra, &e->identity, &e->problem, &e->keep};
    for (size_t i = 0; i < sizeof held / sizeof *held; ++i) Py_INCREF(*fields[i] = held[i]);
    if (differentiate != Py_None) Py_INCREF(e->differentiate = differentiate);
    e->workspace_bytes = workspace_bytes;
    e->workspace_alignment = alignment;
    e->with_cache = identity != Py_None;
    e->writes_cache = writes_cache;
    if (fill_pairs(e, pairs) && fill(e, objects, masks, results, launches, placed)) return (PyObject*)e;
    Py_DECREF(e);
    return NULL;
}

void entry_free(PyObject* self) {
    Entry* e = (Entry*)self;
    PyTypeObject* type = Py_TYPE(self);
    PyObject* held[] = {e->operation, e->options, e->extra, e->identity, e->problem, e->keep, e->differentiate};
    for (size_t i = 0; i < sizeof held / sizeof *held; ++i) Py_XDECREF(held[i]);
    for (uint32_t i = 0; i < e->num_results; ++i) Py_XDECREF(e->makers[i]);
    for (uint32_t i = 0; i < e->num_launches; ++i) launch_free(&e->launches[i]);
    free(e->facts);
    free(e->pairs);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}
