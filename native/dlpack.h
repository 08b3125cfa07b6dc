// The part of DLPack 1 that is read here: a tensor's facts, and the table of C functions that a class of tensors has.
#pragma once
#include <stdint.h>

typedef struct {
    int32_t type, id;
} Device;

enum { DEVICE_CUDA = 2, DTYPE_UINT = 1 };

typedef struct {
    void* data;
    Device device;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} Facts;

typedef struct Owned {
    uint32_t major, minor;
    void* context;
    void (*release)(struct Owned* self);
    uint64_t flags;
    Facts facts;
} Owned;

typedef void (*SetError)(void* context, const char* kind, const char* message);

typedef struct Exchange {
    uint32_t major, minor;
    struct Exchange* older;
    // Memory for the current stream, with the element type, shape and device of `like`; 0 or -1.
    int (*allocate)(Facts* like, Owned** out, void* context, SetError fail);
    void *export_owned, *import_owned;
    int (*read)(void* object, Facts* out);  // 0, or -1 with a Python error; the object keeps what `out` points to
    int (*current_stream)(int32_t device_type, int32_t device, void** out);
} Exchange;

#define EXCHANGE_CAPSULE "dlpack_exchange_api"
