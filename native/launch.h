// One launch: the kernel, its shape, and its arguments without the addresses of a call.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#include "driver.h"

enum { MAX_OPERANDS = 64, MAX_ARGUMENT_BYTES = 4096, MAX_LAUNCHES = 8 };

typedef struct {
    uint32_t offset, operand;
    uint64_t add;
} Place;

typedef struct {
    void* function;
    unsigned grid[3], threads, smem_bytes, num_attributes;
    Attribute attributes[2];
    uint32_t num_bytes, num_places, num_maps;
    char* arguments;  // zeros where addresses go, tensor maps of other addresses
    char* text;       // what an error says of the launch
    Place *places, *maps;
} Launch;

// Fills a launch, zeros before, from the tuple of `launches_of` (plan/native.py); 0 with a Python error. Free it in any
// case.
int launch_of(Launch* launch, PyObject* given);
void launch_free(Launch* launch);

// Queues the kernel with the addresses of a call; the driver's code, and the name of what gave it. Needs no lock.
int launch_queue(const Driver* driver, const Launch* launch, const uint64_t* operands, void* stream, const char** name);

// Sets Python's error, and gives 0.
int refuse(const char* what);
