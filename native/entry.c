// Making, comparing and freeing of entries.
#include "entry.h"

#include <stdlib.h>
#include <string.h>

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

static int refuse(const char* what) {
    PyErr_Format(PyExc_ValueError, "entry: %s", what);
    return 0;
}

// (offset, operand, add) or (offset, operand, add, map); the bytes that they take lie within the arguments.
static Place* places_of(PyObject* given, uint32_t* count, Launch* launch, int maps) {
    Py_ssize_t size = PyTuple_Size(given);
    if (size < 0) return NULL;
    Place* made = calloc((size_t)size + 1, sizeof *made);
    if (!made) return (Place*)PyErr_NoMemory();
    uint32_t bytes = maps ? MAP_BYTES : 8;
    for (Py_ssize_t i = 0; i < size; ++i) {
        unsigned long long add;
        unsigned offset, operand;
        const char* map = NULL;
        Py_ssize_t length = 0;
        PyObject* item = PyTuple_GetItem(given, i);
        if (!PyTuple_Check(item)) {
            refuse("a place is no tuple");
        } else if (maps ? PyArg_ParseTuple(item, "IIKy#", &offset, &operand, &add, &map, &length)
                        : PyArg_ParseTuple(item, "IIK", &offset, &operand, &add)) {
            if (operand < MAX_OPERANDS && offset <= launch->num_bytes && launch->num_bytes - offset >= bytes &&
                (!maps || (length == MAP_BYTES && offset % MAP_ALIGNMENT == 0))) {
                made[i].offset = offset, made[i].operand = operand, made[i].add = add;
                if (map) memcpy(launch->arguments + offset, map, MAP_BYTES);
                continue;
            }
            refuse("a place outside of the arguments");
        }
        free(made);
        return NULL;
    }
    *count = (uint32_t)size;
    return made;
}

static int launch_of(Launch* launch, PyObject* given) {
    unsigned long long function;
    unsigned *grid = launch->grid, cluster[3];
    const char* arguments;
    Py_ssize_t num_bytes;
    PyObject *shape, *places, *maps;
    int overlap;
    if (!PyTuple_Check(given)) return refuse("a launch is no tuple");
    if (!PyArg_ParseTuple(given, "K(III)IIOpy#O!O!", &function, &grid[0], &grid[1], &grid[2], &launch->threads,
                          &launch->smem_bytes, &shape, &overlap, &arguments, &num_bytes, &PyTuple_Type, &places,
                          &PyTuple_Type, &maps))
        return 0;
    if (num_bytes > MAX_ARGUMENT_BYTES) return refuse("too many bytes of arguments");
    launch->function = (void*)(uintptr_t)function;
    if (overlap) {
        launch->attributes[launch->num_attributes].id = ATTRIBUTE_OVERLAP;
        launch->attributes[launch->num_attributes++].value.flag = 1;
    }
    if (shape != Py_None) {
        if (!PyTuple_Check(shape)) return refuse("a cluster is no tuple");
        if (!PyArg_ParseTuple(shape, "III", &cluster[0], &cluster[1], &cluster[2])) return 0;
        launch->attributes[launch->num_attributes].id = ATTRIBUTE_CLUSTER;
        memcpy(launch->attributes[launch->num_attributes++].value.cluster, cluster, sizeof cluster);
    }
    launch->num_bytes = (uint32_t)num_bytes;
    launch->arguments = malloc((size_t)num_bytes + 1);
    if (!launch->arguments) return PyErr_NoMemory(), 0;
    memcpy(launch->arguments, arguments, (size_t)num_bytes);
    launch->places = places_of(places, &launch->num_places, launch, 0);
    if (!launch->places) return 0;
    launch->maps = places_of(maps, &launch->num_maps, launch, 1);
    return launch->maps != NULL;
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
    PyObject *launches, *placed, *differentiate;
    unsigned long long workspace_bytes, alignment;
    if (names && PyDict_Size(names)) return refuse("takes no names"), NULL;
    if (!PyArg_ParseTuple(args, "OO!OOOOO!O!O!KKO!OO", &operation, &PyTuple_Type, &options, &extra, &identity, &problem,
                          &keep, &PyTuple_Type, &objects, &PyTuple_Type, &masks, &PyTuple_Type, &results,
                          &workspace_bytes, &alignment, &PyTuple_Type, &launches, &placed, &differentiate))
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
    if (fill(e, objects, masks, results, launches, placed)) return (PyObject*)e;
    Py_DECREF(e);
    return NULL;
}

void entry_free(PyObject* self) {
    Entry* e = (Entry*)self;
    PyTypeObject* type = Py_TYPE(self);
    PyObject* held[] = {e->operation, e->options, e->extra, e->identity, e->problem, e->keep, e->differentiate};
    for (size_t i = 0; i < sizeof held / sizeof *held; ++i) Py_XDECREF(held[i]);
    for (uint32_t i = 0; i < e->num_results; ++i) Py_XDECREF(e->makers[i]);
    for (uint32_t i = 0; i < e->num_launches; ++i)
        free(e->launches[i].arguments), free(e->launches[i].places), free(e->launches[i].maps);
    free(e->facts);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}
