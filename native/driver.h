// The functions of the CUDA driver that a repeated call needs, found in the library that the process has.
#pragma once
#include <stddef.h>
#ifdef _WIN32
#include <windows.h>
#else
#include <dlfcn.h>
#endif

#ifdef _WIN32
#define CUDA_CALL __stdcall
#else
#define CUDA_CALL
#endif

typedef union {
    char bytes[64];
    unsigned cluster[3];
    int flag;
} AttributeValue;

typedef struct {
    int id;
    char pad[4];
    AttributeValue value;
} Attribute;

enum { ATTRIBUTE_CLUSTER = 4, ATTRIBUTE_OVERLAP = 6, INVALID_CONTEXT = 201 };

typedef struct {
    unsigned grid[3], block[3], smem_bytes;
    void* stream;
    Attribute* attributes;
    unsigned num_attributes;
} Config;

typedef struct {
    int(CUDA_CALL* device)(int*);
    int(CUDA_CALL* launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                           void**);
    int(CUDA_CALL* launch_ex)(const Config*, void*, void**, void**);
    int(CUDA_CALL* move_map)(void* map, void* address);
    int(CUDA_CALL* error_name)(int code, const char** name);
    // For threads without a context, or with that of another GPU.
    int(CUDA_CALL* get)(int* device, int ordinal);
    int(CUDA_CALL* retain)(void** context, int device);
    int(CUDA_CALL* stream_context)(void* stream, void** context);
    int(CUDA_CALL* push)(void* context);
    int(CUDA_CALL* pop)(void** context);
} Driver;

// A tensor map is 128 bytes, and the driver wants it at a multiple of 64.
enum { MAP_BYTES = 128, MAP_ALIGNMENT = 64 };

static inline void* driver_symbol(void* library, const char* name) {
#ifdef _WIN32
    return (void*)GetProcAddress((HMODULE)library, name);
#else
    return dlsym(library, name);
#endif
}

// 1 if the library and its launches are there; `move_map` is NULL before CUDA 12.
static inline int driver_open(Driver* driver) {
#ifdef _WIN32
    void* library = (void*)LoadLibraryA("nvcuda.dll");
#else
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
#endif
    if (!library) return 0;
    *(void**)&driver->device = driver_symbol(library, "cuCtxGetDevice");
    *(void**)&driver->launch = driver_symbol(library, "cuLaunchKernel");
    *(void**)&driver->launch_ex = driver_symbol(library, "cuLaunchKernelEx");
    *(void**)&driver->move_map = driver_symbol(library, "cuTensorMapReplaceAddress");
    *(void**)&driver->error_name = driver_symbol(library, "cuGetErrorName");
    *(void**)&driver->get = driver_symbol(library, "cuDeviceGet");
    *(void**)&driver->retain = driver_symbol(library, "cuDevicePrimaryCtxRetain");
    *(void**)&driver->stream_context = driver_symbol(library, "cuStreamGetCtx");
    *(void**)&driver->push = driver_symbol(library, "cuCtxPushCurrent_v2");
    *(void**)&driver->pop = driver_symbol(library, "cuCtxPopCurrent_v2");
    return driver->device && driver->launch && driver->launch_ex;
}
