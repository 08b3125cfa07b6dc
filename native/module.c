// omniattn._native: repeated calls on torch tensors without Python code in between.
//
// `run(call)` reads the call's arrays, looks for an entry with their facts and the call's options, lets torch make the
// results and queues the kernels. A call that gradients are wanted of goes to a Python function instead: it has
// autograd ask `run_as` for the launches of the forward and, later, of the backward. Whatever is not the usual makes
// them return None before anything has been done: the engine then copes, in Python, or raises. Stable interface of
// Python 3.10 and newer; neither CUDA nor torch is linked.
#include <string.h>

#include "entry.h"
#include "jax.h"
#include "objects.h"

enum { BUCKETS = 1024, PER_BUCKET = 16, MAX_GPUS = 64 };

static Driver driver;
static Entry* table[BUCKETS][PER_BUCKET];
static unsigned char turn[BUCKETS];
static unsigned long long hits, misses;

// Given by `setup`.
static PyObject *is_inference, *is_inference_mode, *increment_version;
static PyObject *modes, *transform, *tangents, *environment, *forced, *fail;
// Names of attributes; those of a cache itself, because its properties are Python code.
static PyObject *name_extra, *name_problem, *name_level, *name_plain, *name_addresses, *name_written;

// Whether traces, transforms or differentiation watch, or a kernel is forced: the engine has to see such calls.
static int is_watched(void) {
    int found = ask(modes, NULL);
    if (found) goto end;
    PyObject* inner = PyObject_CallNoArgs(transform);
    found = inner ? inner != Py_None : -1;
    Py_XDECREF(inner);
    if (found) goto end;
    PyObject* level = PyObject_GetAttr(tangents, name_level);
    if (level) {
        found = PyLong_AsLong(level) >= 0;
        Py_DECREF(level);
    }
    if (PyErr_Occurred()) found = level ? -1 : (PyErr_Clear(), 0);
    if (found) goto end;
    found = PyDict_Contains(environment, forced);
end:
    if (found < 0) PyErr_Clear();
    return found != 0;
}

static Entry* find(uint64_t hash, const int64_t* facts, uint32_t num_facts, const uint64_t* addresses,
                   PyObject* const* of) {
    Entry** row = table[hash % BUCKETS];
    for (int i = 0; i < PER_BUCKET; ++i) {
        Entry* e = row[i];
        if (!e || e->hash != hash || e->operation != of[0] || e->num_facts != num_facts) continue;
        if (memcmp(e->facts, facts, num_facts * sizeof *facts)) continue;
        if (e->placed >= 0 && (addresses[e->placed] % e->placed_multiple == 0) != e->placed_fits) continue;
        Py_INCREF(e);
        if (same_options(e->options, of[1]) && same(e->extra, of[2]) && e->identity == of[3]) return e;
        Py_DECREF(e);
    }
    return NULL;
}

// New reference to an array that torch makes, and its address; NULL without an error where it has no memory.
static PyObject* make(PyObject* maker, PyObject* like, uint64_t* address) {
    PyObject* made = PyObject_CallFunctionObjArgs(maker, like, NULL);
    if (!made) return NULL;
    Facts t;
    if (read_one(made, &t) && t.data) {
        *address = (uint64_t)(uintptr_t)t.data + t.byte_offset;
        return made;
    }
    Py_DECREF(made);
    return NULL;
}

static void ignore(void* context, const char* kind, const char* message) { (void)context, (void)kind, (void)message; }

// Scratch memory from torch's allocator, which gives it without a tensor: a third of the time. NULL where it does not;
// the engine asks again then, and raises what torch does.
static Owned* scratch(const Entry* e, uint64_t* address) {
    int64_t shape[] = {(int64_t)(e->workspace_bytes + e->workspace_alignment)}, strides[] = {1};
    Facts like = {NULL, {DEVICE_CUDA, e->ordinal}, 1, DTYPE_UINT, 8, 1, shape, strides, 0};
    Owned* made = NULL;
    if (reader.exchange->allocate(&like, &made, NULL, ignore) || !made || !made->release) return PyErr_Clear(), NULL;
    if (!made->facts.data) return made->release(made), NULL;
    *address = (uint64_t)(uintptr_t)made->facts.data + made->facts.byte_offset;
    *address = (*address + e->workspace_alignment - 1) & ~(e->workspace_alignment - 1);
    return made;
}

// The primary context of a GPU, retained once; NULL if there is none.
static void* primary_of(int32_t ordinal) {
    static void* contexts[MAX_GPUS];
    int device;
    if (ordinal < 0 || ordinal >= MAX_GPUS || !driver.get || !driver.retain || !driver.push || !driver.pop) return NULL;
    if (!contexts[ordinal] && !driver.get(&device, ordinal) && driver.retain(&contexts[ordinal], device))
        contexts[ordinal] = NULL;
    return contexts[ordinal];
}

// Queues all launches; the driver's code, and the name of what gave it, and for which launch (NULL for none). context:
// made current for them, if not NULL.
static int queue_all(const Entry* e, const uint64_t* operands, void* stream, void* context, const char** name,
                     const Launch** launch) {
    int code = 0;
    *name = "cuCtxPushCurrent";
    if (context && (code = driver.push(context))) return code;
    for (uint32_t i = 0; i < e->num_launches && !code; ++i)
        code = launch_queue(&driver, *launch = &e->launches[i], operands, stream, name);
    if (context) driver.pop(&context);
    return code;
}

// Whether what a call writes is apart from its other arrays, or as in a call that the engine has looked at.
static int are_apart(const Entry* e, const uint64_t* operands, uint32_t used) {
    for (uint32_t i = 0; i < e->num_pairs; ++i) {
        const Pair* pair = &e->pairs[i];
        if (pair->written >= used || pair->other >= used) return 0;
        int64_t apart = (int64_t)(operands[pair->other] - operands[pair->written]);
        if (pair->low < apart && apart < pair->high && apart != pair->known) return 0;
    }
    return 1;
}

// Whether torch lets anybody write a tensor now.
static int may_write(PyObject* object) {
    int frozen = ask(is_inference, object);
    int found = !frozen || (frozen > 0 && ask(is_inference_mode, NULL) > 0);
    PyErr_Clear();
    return found;
}

// New reference to a tuple of the tensors that a call changes; NULL where the engine has to look at them.
static PyObject* changed_by(const Entry* e, PyObject* objects, PyObject* cache) {
    if (e->writes_cache) {
        PyObject* planes = PyObject_GetAttr(cache, name_written);
        if (!planes || !PyTuple_Check(planes) || !PyTuple_Size(planes)) return Py_XDECREF(planes), NULL;
        if (may_write(PyTuple_GetItem(planes, 0))) return planes;  // all of one kind
        return Py_DECREF(planes), NULL;
    }
    Py_ssize_t count = e->num_given;
    PyObject* made = PyTuple_New(count);
    for (uint32_t r = e->num_results; made && r-- > 0;) {
        if (e->makers[r]) continue;
        PyObject* object = PyTuple_GetItem(objects, e->sources[r]);
        if (object == Py_None || !may_write(object)) return Py_DECREF(made), NULL;
        Py_INCREF(object);
        PyTuple_SetItem(made, --count, object);
    }
    return made;
}

// Addresses of the call's arrays and its cache's; how many there are, 0 for a call that the engine has to look at.
static uint32_t operands_of(const Entry* e, PyObject* cache, const uint64_t* addresses, uint64_t* operands) {
    for (uint32_t i = 0; i < e->num_masks; ++i)
        if (addresses[e->masks[i].operand] & e->masks[i].add) return 0;
    for (uint32_t r = 0; r < e->num_results; ++r)
        if (!e->makers[r] && !addresses[e->sources[r]]) return 0;
    uint32_t used = e->num_objects;
    memcpy(operands, addresses, used * sizeof *operands);
    if (e->with_cache) {
        PyObject* own = PyObject_GetAttr(cache, name_addresses);
        if (!own) return 0;
        Py_ssize_t count = PyTuple_Check(own) ? PyTuple_Size(own) : MAX_OPERANDS;
        for (Py_ssize_t i = 0; i < count && count + used + MAX_RESULTS + 1 <= MAX_OPERANDS; ++i)
            operands[used + i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(own, i));
        used += (uint32_t)count;
        Py_DECREF(own);
        if (PyErr_Occurred() || used + MAX_RESULTS + 1 > MAX_OPERANDS) return 0;
    }
    return are_apart(e, operands, used) ? used : 0;
}

// Results of the call; NULL without an error for one that the engine has to look at. wanted: None or a stream's handle.
static PyObject* run_entry(const Entry* e, PyObject* objects, PyObject* cache, PyObject* wanted,
                           const uint64_t* addresses) {
    uint64_t operands[MAX_OPERANDS] = {0};
    void *stream, *context = NULL;
    const char* name = NULL;
    const Launch* launch = NULL;
    int device = -1, code = driver.device(&device);
    if (code && code != INVALID_CONTEXT) return NULL;
    // Threads of torch's autograd may have none.
    if ((code || device != e->ordinal) && !(context = primary_of(e->ordinal))) return NULL;
    if (reader.exchange->current_stream(DEVICE_CUDA, e->ordinal, &stream)) return PyErr_Clear(), NULL;
    if (wanted != Py_None && PyLong_AsUnsignedLongLong(wanted) != (uintptr_t)stream) return PyErr_Clear(), NULL;
    uint32_t used = operands_of(e, cache, addresses, operands);
    if (!used) return NULL;
    Owned* memory = NULL;
    PyObject *changed = NULL, *results = NULL, *none;
    if ((e->num_given || e->writes_cache) && !(changed = changed_by(e, objects, cache))) return NULL;
    if (!(results = PyList_New(e->num_results))) goto leave;
    for (uint32_t r = 0; r < e->num_results; ++r) {
        PyObject *result, *source = PyTuple_GetItem(objects, e->sources[r]);
        if (e->makers[r]) {
            result = make(e->makers[r], source, &operands[used]);
        } else {
            Py_INCREF(result = source);
            operands[used] = addresses[e->sources[r]];
        }
        if (!result) goto leave;
        PyList_SetItem(results, r, result);
        ++used;
    }
    // Held until the kernels are queued: another thread on this stream could be given its memory before that.
    if (e->workspace_bytes && !(memory = scratch(e, &operands[used]))) goto leave;
    if (changed) {
        none = PyObject_CallFunctionObjArgs(increment_version, changed, NULL);
        Py_XDECREF(none);
        if (!none) goto leave;
    }
    // A launch waits where the stream is full; meanwhile other threads may go on.
    Py_BEGIN_ALLOW_THREADS;
    code = queue_all(e, operands, stream, context, &name, &launch);
    Py_END_ALLOW_THREADS;
    if (code) {
        unsigned long long function = launch ? (uintptr_t)launch->function : 0;
        none = PyObject_CallFunction(fail, "siKs", name, code, function, launch ? launch->text : "");
        Py_XDECREF(none);
        if (!PyErr_Occurred()) PyErr_Format(PyExc_RuntimeError, "%s failed with code %d", name, code);
        goto leave;
    }
    if (memory) memory->release(memory);
    Py_XDECREF(changed);
    return results;
leave:
    if (memory) memory->release(memory);
    Py_XDECREF(changed);
    Py_XDECREF(results);
    return NULL;
}

// (call or None, its operation, arrays, options, stream, cache, facts): the caller reads attributes faster than this
// interface does.
static PyObject* run(PyObject* module, PyObject* const* of, Py_ssize_t count) {
    (void)module;
    uint64_t addresses[MAX_OBJECTS];
    int64_t facts[MAX_FACTS];
    uint32_t num_facts, num_objects;
    int32_t ordinal;
    int counted = 1;
    if (count != 7) return PyErr_Format(PyExc_TypeError, "run: expected 7 arguments, received %zd", count), NULL;
    PyObject *call = of[0], *operation = of[1], *objects = of[2], *options = of[3], *stream = of[4], *cache = of[5];
    PyObject *layout = Py_None, *results = NULL;
    if (!reader.exchange) Py_RETURN_NONE;
    Py_INCREF(layout);
    Entry* e = NULL;
    if ((stream != Py_None && !PyLong_CheckExact(stream)) || !PyTuple_Check(objects) || is_watched()) goto end;
    if (read_objects(objects, addresses, facts, &num_facts, &num_objects, &ordinal) != 1) goto end;
    if (cache != Py_None) {
        PyObject* plain = PyObject_GetAttr(cache, name_plain);
        Py_XDECREF(plain);
        if (plain != Py_True) goto end;
        Py_DECREF(layout);
        if (!(layout = PyObject_GetAttr(cache, name_extra))) goto end;
    }
    PyObject* key[] = {operation, options, of[6], layout};
    e = find(hash_facts(facts, num_facts, operation), facts, num_facts, addresses, key);
    if (!e || (e->differentiate && stream != Py_None)) goto end;  // autograd chooses the stream
    if (e->differentiate) {
        results = PyObject_CallFunctionObjArgs(e->differentiate, objects, NULL);
        if (results == Py_None) Py_DECREF(results), results = NULL;
        counted = 0;  // where the launches are
        goto end;
    }
    results = run_entry(e, objects, cache, stream, addresses);
    if (results && call != Py_None && PyObject_SetAttr(call, name_problem, e->problem)) {
        Py_DECREF(results);
        results = NULL;
    }
end:
    Py_XDECREF(e);
    Py_XDECREF(layout);
    if (results) return hits += counted, results;
    ++misses;
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

// The launches of an entry by its operation and options alone, which are no call's; nobody asks for gradients of them.
static PyObject* run_as(PyObject* module, PyObject* const* of, Py_ssize_t count) {
    (void)module;
    uint64_t addresses[MAX_OBJECTS];
    int64_t facts[MAX_FACTS];
    uint32_t num_facts, num_objects;
    int32_t ordinal;
    if (count != 3) return PyErr_Format(PyExc_TypeError, "run_as: expected 3 arguments, received %zd", count), NULL;
    PyObject *key[] = {of[0], of[1], Py_None, Py_None}, *objects = of[2], *results = NULL;
    if (reader.exchange && PyTuple_Check(objects) && !is_watched() &&
        read_objects(objects, addresses, facts, &num_facts, &num_objects, &ordinal) == 1 && !facts[0]) {
        Entry* e = find(hash_facts(facts, num_facts, key[0]), facts, num_facts, addresses, key);
        if (e && !e->differentiate) results = run_entry(e, objects, Py_None, Py_None, addresses);
        Py_XDECREF(e);
    }
    if (results) return ++hits, results;
    ++misses;
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

// 1 for an entry of the same calls, and for none.
static int replaces(const Entry* e, Entry* old) {
    if (!old) return 1;
    if (old->hash != e->hash || old->operation != e->operation || old->num_facts != e->num_facts ||
        old->identity != e->identity || old->placed != e->placed || old->placed_fits != e->placed_fits)
        return 0;
    return !memcmp(old->facts, e->facts, e->num_facts * sizeof *e->facts) && same_options(old->options, e->options) &&
           same(old->extra, e->extra);
}

static PyObject* learn(PyObject* module, PyObject* given) {
    PyTypeObject* type = (PyTypeObject*)PyObject_GetAttrString(module, "Entry");
    if (!type) return NULL;
    int fits = Py_TYPE(given) == type;
    Py_DECREF(type);
    if (!fits) return PyErr_Format(PyExc_TypeError, "learn: expected an Entry"), NULL;
    Entry *e = (Entry*)given, *old;
    for (uint32_t i = 0; i < e->num_launches; ++i)
        if (e->launches[i].num_maps && !driver.move_map) Py_RETURN_FALSE;
    size_t bucket = e->hash % BUCKETS;
    unsigned at = 0;
    while (at < PER_BUCKET && !replaces(e, table[bucket][at])) ++at;
    if (at == PER_BUCKET) at = turn[bucket]++ % PER_BUCKET;
    old = table[bucket][at];
    Py_INCREF(given);
    table[bucket][at] = e;
    Py_XDECREF(old);
    Py_RETURN_TRUE;
}

static PyObject* clear(PyObject* module, PyObject* nothing) {
    (void)module, (void)nothing;
    for (int i = 0; i < BUCKETS; ++i)
        for (int j = 0; j < PER_BUCKET; ++j) {
            Entry* old = table[i][j];
            table[i][j] = NULL;
            Py_XDECREF(old);
        }
    Py_RETURN_NONE;
}

static PyObject* counts(PyObject* module, PyObject* nothing) {
    (void)module, (void)nothing;
    return Py_BuildValue("KK", hits, misses);
}

static PyObject* setup(PyObject* module, PyObject* args) {
    (void)module;
    PyObject *kinds, *capsule, *same_class, *given[11];
    PyObject** kept[] = {&reader.is_neg,
                         &reader.is_grad_enabled,
                         &is_inference,
                         &is_inference_mode,
                         &increment_version,
                         &modes,
                         &transform,
                         &tangents,
                         &environment,
                         &forced,
                         &fail};
    if (!PyArg_ParseTuple(args, "O!OOOOOOOOOO!OOO!", &PyTuple_Type, &kinds, &capsule, &given[0], &given[1], &given[2],
                          &given[3], &given[4], &given[5], &given[6], &given[7], &PyDict_Type, &given[8], &given[9],
                          &given[10], &PyType_Type, &same_class))
        return NULL;
    const Exchange* found = PyCapsule_GetPointer(capsule, EXCHANGE_CAPSULE);
    if (!found) return NULL;
    while (found && found->major > 1) found = found->older;
    if (!found || found->major != 1 || !found->read || !found->current_stream || !found->allocate) Py_RETURN_FALSE;
    Py_ssize_t count = PyTuple_Size(kinds);
    if (count > MAX_CLASSES) return PyErr_Format(PyExc_ValueError, "setup: too many classes"), NULL;
    for (Py_ssize_t i = 0; i < count; ++i)
        if (!PyType_Check(PyTuple_GetItem(kinds, i))) return PyErr_Format(PyExc_TypeError, "setup: no class"), NULL;
    if (!driver_open(&driver)) Py_RETURN_FALSE;
    reader.num_classes = 0;
    for (Py_ssize_t i = 0; i < count; ++i) {
        Py_INCREF(reader.classes[reader.num_classes] = (PyTypeObject*)PyTuple_GetItem(kinds, i));
        ++reader.num_classes;
    }
    for (size_t i = 0; i < sizeof kept / sizeof *kept; ++i) {
        PyObject* old = *kept[i];
        Py_INCREF(*kept[i] = given[i]);
        Py_XDECREF(old);
    }
    Py_INCREF(same_class);
    Py_XDECREF((PyObject*)class_of_same);
    class_of_same = (PyTypeObject*)same_class;
    reader.exchange = found;
    Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL, "Results of a call like one that has run, or None."},
    {"run_as", (PyCFunction)(void (*)(void))run_as, METH_FASTCALL,
     "(operation, options, arrays) -> results of an entry of these, or None."},
    {"learn", learn, METH_O, "Keep an entry; False where this driver cannot launch it."},
    {"clear", clear, METH_NOARGS, "Forget all entries."},
    {"jax_handler", jax_handler, METH_NOARGS, "Capsule of the handler for jax.ffi.register_ffi_target."},
    {"jax_plan", jax_plan, METH_VARARGS, "Keep the launches of a call on a GPU; False where this driver has no way."},
    {"jax_failed", jax_failed, METH_VARARGS, "Keep why a call cannot run on a GPU."},
    {"jax_runs", jax_runs, METH_NOARGS, "How often the handler has queued a call."},
    {"counts", counts, METH_NOARGS, "Calls that were run here, calls that were not."},
    {"setup", setup, METH_VARARGS, "Take what is asked of torch; False where there is nothing to work with."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {{Py_tp_new, entry_new}, {Py_tp_dealloc, entry_free}, {0, NULL}};
static PyType_Spec spec = {"omniattn._native.Entry", sizeof(Entry), 0, Py_TPFLAGS_DEFAULT, slots};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "omniattn._native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    const struct {
        PyObject** name;
        const char* text;
    } names[] = {
        {&name_extra, "_facts"},
        {&name_problem, "problem"},
        {&name_level, "_current_level"},
        {&name_plain, "_plain_torch"},
        {&name_addresses, "_addresses"},
        {&name_written, "_written"},
        {&reader.name_requires_grad, "requires_grad"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; ++i)
        if (!(*names[i].name = PyUnicode_InternFromString(names[i].text))) return NULL;
    PyObject* module = PyModule_Create(&definition);
    if (!module) return NULL;
    PyObject* type = PyType_FromSpec(&spec);
    if (!type || PyModule_AddObject(module, "Entry", type)) {
        Py_XDECREF(type);
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
