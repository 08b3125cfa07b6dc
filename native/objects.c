// A call's arrays, read by torch's own table.
#include "objects.h"

Reader reader;

int ask(PyObject* function, PyObject* argument) {
    PyObject* answer =
        argument ? PyObject_CallFunctionObjArgs(function, argument, NULL) : PyObject_CallNoArgs(function);
    if (!answer) return -1;
    int found = PyObject_IsTrue(answer);
    Py_DECREF(answer);
    return found;
}

int read_one(PyObject* object, Facts* t) {
    PyTypeObject* type = Py_TYPE(object);
    int known = 0;
    for (int i = 0; i < reader.num_classes; ++i) known |= reader.classes[i] == type;
    if (!known || !reader.exchange) return 0;
    // No strides, or an element type without a name: the engine says what is wrong.
    if (reader.exchange->read(object, t)) {
        PyErr_Clear();
        return 0;
    }
    return t->device.type == DEVICE_CUDA && t->ndim >= 0 && t->ndim <= MAX_DIMS &&
           (!t->ndim || (t->shape && t->strides));
}

int read_objects(PyObject* objects, uint64_t* addresses, int64_t* facts, uint32_t* num_facts, uint32_t* num_objects,
                 int32_t* ordinal) {
    Py_ssize_t count = PyTuple_Size(objects);
    if (count < 0 || count > MAX_OBJECTS) return 0;
    uint32_t used = 1;
    int is_enabled = -1;  // not asked
    *ordinal = -1;
    facts[0] = 0;
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject* object = PyTuple_GetItem(objects, i);
        addresses[i] = 0;
        if (object == Py_None) {
            facts[used++] = -1;
            continue;
        }
        Facts t;
        if (!read_one(object, &t)) return 0;
        if (*ordinal >= 0 && t.device.id != *ordinal) return 0;
        *ordinal = t.device.id;
        addresses[i] = t.data ? (uint64_t)(uintptr_t)t.data + t.byte_offset : 0;
        facts[used++] = t.ndim;
        facts[used++] = (int64_t)((uint64_t)(uint32_t)t.device.id << 32 | (uint32_t)t.code << 24 |
                                  (uint32_t)t.bits << 16 | t.lanes);
        for (int32_t d = 0; d < t.ndim; ++d) {
            facts[used++] = t.shape[d];
            facts[used++] = t.strides[d];
        }
        // The facts are copied: what is asked now may run Python code.
        int answer = ask(reader.is_neg, object);
        if (answer) return answer < 0 ? (PyErr_Clear(), 0) : 0;
        PyObject* wanted = PyObject_GetAttr(object, reader.name_requires_grad);
        if (!wanted) return PyErr_Clear(), 0;
        if (wanted != Py_False && is_enabled < 0) is_enabled = ask(reader.is_grad_enabled, NULL);
        if (wanted != Py_False && is_enabled > 0) facts[0] |= (int64_t)1 << i;
        Py_DECREF(wanted);
        if (PyErr_Occurred()) return PyErr_Clear(), 0;
    }
    *num_facts = used;
    *num_objects = (uint32_t)count;
    return *ordinal >= 0;
}
