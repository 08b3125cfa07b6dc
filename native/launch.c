// Making, queueing and freeing of launches.
#include "launch.h"

#include <stdlib.h>
#include <string.h>

int refuse(const char* what) {
    PyErr_Format(PyExc_ValueError, "omniattn._native: %s", what);
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

int launch_of(Launch* launch, PyObject* given) {
    unsigned long long function;
    unsigned *grid = launch->grid, cluster[3];
    const char *arguments, *text;
    Py_ssize_t num_bytes;
    PyObject *shape, *places, *maps;
    int overlap;
    if (!PyTuple_Check(given)) return refuse("a launch is no tuple");
    if (!PyArg_ParseTuple(given, "K(III)IIOpy#O!O!s", &function, &grid[0], &grid[1], &grid[2], &launch->threads,
                          &launch->smem_bytes, &shape, &overlap, &arguments, &num_bytes, &PyTuple_Type, &places,
                          &PyTuple_Type, &maps, &text))
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
    launch->text = malloc(strlen(text) + 1);
    if (!launch->text) return PyErr_NoMemory(), 0;
    strcpy(launch->text, text);
    launch->places = places_of(places, &launch->num_places, launch, 0);
    if (!launch->places) return 0;
    launch->maps = places_of(maps, &launch->num_maps, launch, 1);
    return launch->maps != NULL;
}

void launch_free(Launch* launch) {
    free(launch->arguments);
    free(launch->text);
    free(launch->places);
    free(launch->maps);
}

int launch_queue(const Driver* driver, const Launch* launch, const uint64_t* operands, void* stream,
                 const char** name) {
    char memory[MAX_ARGUMENT_BYTES + MAP_ALIGNMENT];
    char* arguments = (char*)(((uintptr_t)memory + MAP_ALIGNMENT - 1) & ~(uintptr_t)(MAP_ALIGNMENT - 1));
    memcpy(arguments, launch->arguments, launch->num_bytes);
    for (uint32_t i = 0; i < launch->num_places; ++i) {
        uint64_t address = operands[launch->places[i].operand] + launch->places[i].add;
        memcpy(arguments + launch->places[i].offset, &address, 8);
    }
    *name = "cuTensorMapReplaceAddress";
    for (uint32_t i = 0; i < launch->num_maps; ++i) {
        uint64_t address = operands[launch->maps[i].operand] + launch->maps[i].add;
        int code = driver->move_map(arguments + launch->maps[i].offset, (void*)(uintptr_t)address);
        if (code) return code;
    }
    void* parameters[] = {arguments};
    if (!launch->num_attributes) {
        *name = "cuLaunchKernel";
        return driver->launch(launch->function, launch->grid[0], launch->grid[1], launch->grid[2], launch->threads, 1,
                              1, launch->smem_bytes, stream, parameters, NULL);
    }
    *name = "cuLaunchKernelEx";
    Attribute attributes[2];
    memcpy(attributes, launch->attributes, sizeof attributes);
    Config config = {{launch->grid[0], launch->grid[1], launch->grid[2]},
                     {launch->threads, 1, 1},
                     launch->smem_bytes,
                     stream,
                     attributes,
                     launch->num_attributes};
    return driver->launch_ex(&config, launch->function, parameters, NULL);
}
