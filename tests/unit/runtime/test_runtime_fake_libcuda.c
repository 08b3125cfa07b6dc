// A stand-in for libcuda with two devices, for tests of the driver bindings on machines without a GPU. It keeps a stack of
// contexts, and writes the calls that matter to stderr when FAKE_CUDA_TRACE is set.
//
// A binary whose text holds "WRONG" is accepted when it is loaded and refused when its kernel is looked up, as the real
// driver does with a cubin of another architecture. One that begins with "any" has kernels of every name.
//
// `fake_record(1)` begins a list of launches as text, `fake_recorded` gives it; `fake_argument_bytes` says how many bytes
// a kernel takes, which no launch says. After `fake_fail(n, code)` the n-th launch from then on gives `code`.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int Result;
typedef struct { unsigned grid[3], block[3], smem; void *stream; void *attrs; unsigned num_attrs; } LaunchConfig;
typedef struct { int id; char pad[4]; unsigned cluster[16]; } LaunchAttribute;

static int contexts[2];  // their addresses are the handles of the primary contexts
static __thread void *stack[16];
static __thread int depth;
static __thread int capture_mode;  // global, until it is exchanged
static int owner;  // process that called cuInit
static int tracing;

static void trace(const char *format, ...) {
    if (!tracing) return;
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
}

enum { MAX_KERNELS = 512, MAX_RECORD = 1 << 24 };
static struct { void *kernel; unsigned bytes; } sizes[MAX_KERNELS];
static int num_sizes, recording, until_failure, failure;
static char record[MAX_RECORD];
static size_t recorded;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void fake_argument_bytes(void *kernel, unsigned bytes) {
    for (int i = 0; i < num_sizes; ++i)
        if (sizes[i].kernel == kernel) return (void)(sizes[i].bytes = bytes);
    if (num_sizes == MAX_KERNELS) abort();
    sizes[num_sizes].kernel = kernel, sizes[num_sizes++].bytes = bytes;
}
void fake_record(int on) { recording = on, recorded = 0, record[0] = 0; }
const char *fake_recorded(void) { return record; }
void fake_fail(int launches, int code) { until_failure = launches, failure = code; }

static void note(const char *format, ...) {
    va_list args;
    va_start(args, format);
    recorded += vsnprintf(record + recorded, MAX_RECORD - recorded, format, args);
    va_end(args);
    if (recorded >= MAX_RECORD) abort();
}

// Writes a launch down; the code that it gives.
static Result launched(void *kernel, const unsigned *shape, unsigned smem, void *stream, const LaunchAttribute *attributes,
                       unsigned num_attributes, const unsigned char *arguments, int device) {
    pthread_mutex_lock(&lock);
    if (recording) {
        unsigned bytes = 0;
        for (int i = 0; i < num_sizes; ++i)
            if (sizes[i].kernel == kernel) bytes = sizes[i].bytes;
        note("%s %u,%u,%u x %u,%u,%u smem %u stream %p on %d", (const char *)kernel, shape[0], shape[1], shape[2], shape[3],
             shape[4], shape[5], smem, stream, device);
        for (unsigned i = 0; i < num_attributes; ++i) {
            const unsigned *value = attributes[i].cluster;
            if (attributes[i].id == 4)
                note(" cluster %u,%u,%u", value[0], value[1], value[2]);
            else
                note(" attribute %d = %u", attributes[i].id, value[0]);
        }
        note(" arguments ");
        for (unsigned i = 0; i < bytes; ++i) note("%02x", arguments[i]);
        note("\n");
    }
    Result code = until_failure && !--until_failure ? failure : 0;
    pthread_mutex_unlock(&lock);
    return code;
}

static Result device_of(void *context) { return (int)((int *)context - contexts); }

Result cuInit(unsigned flags) {
    const char *code = getenv("FAKE_CUDA_INIT");
    if (code) return atoi(code);
    if (owner && owner != getpid()) return 3;
    owner = getpid();
    tracing = getenv("FAKE_CUDA_TRACE") != NULL;
    trace("cuInit\n");
    return flags ? 1 : 0;
}
Result cuDriverGetVersion(int *version) { *version = 13000; return 0; }
Result cuDeviceGetCount(int *count) { *count = 2; return 0; }
Result cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal < 2 ? 0 : 101; }
Result cuDeviceGetName(char *name, int size, int device) { snprintf(name, size, "Fake GPU %d", device); return 0; }
Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
        case 13: *value = 1980000; break;  // kHz of the SMs
        case 16: *value = 132; break;      // multiprocessors
        case 36: *value = 2619000; break;  // kHz of the memory
        case 37: *value = 5120; break;     // bits of its bus
        case 38: *value = 50 << 20; break;  // L2 bytes
        case 75: *value = device ? 8 : 9; break;
        case 76: *value = 0; break;
        case 97: *value = 232448; break;  // opt-in shared memory
        default: return 1;
    }
    return 0;
}
Result cuGetErrorName(Result code, const char **text) {
    *text = code == 3 ? "CUDA_ERROR_NOT_INITIALIZED" : code == 100 ? "CUDA_ERROR_NO_DEVICE" : code == 209 ? "CUDA_ERROR_NO_BINARY_FOR_GPU"
          : code == 500 ? "CUDA_ERROR_NOT_FOUND" : code == 1 ? "CUDA_ERROR_INVALID_VALUE" : NULL;
    return *text ? 0 : 1;
}
Result cuGetErrorString(Result code, const char **text) { *text = code == 1 ? "invalid argument" : "text of the driver"; return 0; }

Result cuCtxGetDevice(int *device) {
    if (owner != getpid()) return 3;
    if (!depth) return 201;
    *device = device_of(stack[depth - 1]);
    return 0;
}
Result cuCtxGetCurrent(void **context) { *context = depth ? stack[depth - 1] : NULL; return 0; }
Result cuDevicePrimaryCtxRetain(void **context, int device) { trace("retain %d\n", device); *context = &contexts[device]; return 0; }
Result cuCtxPushCurrent_v2(void *context) { trace("push %d\n", device_of(context)); if (depth == 16) abort(); stack[depth++] = context; return 0; }
Result cuCtxPopCurrent_v2(void **context) {
    if (!depth) return 201;
    *context = stack[--depth];
    trace("pop %d\n", device_of(*context));
    return 0;
}
Result cuStreamGetCtx(void *stream, void **context) { (void)stream; *context = &contexts[0]; return 0; }
Result cuThreadExchangeStreamCaptureMode(int *mode) {
    trace("capture mode %d\n", *mode);
    int previous = capture_mode;
    capture_mode = *mode;
    *mode = previous;
    return 0;
}

// Events that have always passed, in a process of which some other thread is capturing a graph in the default mode.
Result cuEventCreate(void **event, unsigned flags) { *event = malloc(1); return flags == 2 ? 0 : 1; }
Result cuEventDestroy_v2(void *event) { trace("event destroyed\n"); free(event); return 0; }
Result cuEventRecord(void *event, void *stream) { trace("event recorded on %p\n", stream); return depth ? 0 : 201; }
Result cuEventQuery(void *event) {
    trace("event queried in capture mode %d\n", capture_mode);
    return capture_mode == 2 ? 0 : 900;
}
Result cuStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }

Result cuLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned n, void *c, void *d, unsigned m) {
    *library = (void *)strdup(code);
    trace("load %.12s\n", (const char *)code);
    return n || m ? 1 : 0;
}
Result cuLibraryUnload(void *library) { trace("unload\n"); free(library); return 0; }
Result cuLibraryGetKernel(void **kernel, void *library, const char *name) {
    if (strstr(library, "WRONG")) return 209;
    if (strcmp(name, "toy") && strncmp(library, "any", 3)) return 500;
    *kernel = library;
    return 0;
}
Result cuKernelSetAttribute(int attribute, int value, void *kernel, int device) {
    trace("attribute %d = %d on %d\n", attribute, value, device);
    return 0;
}
Result cuKernelGetFunction(void **function, void *kernel) { *function = kernel; return depth ? 0 : 201; }
Result cuFuncGetAttribute(int *value, int attribute, void *function) { *value = 100 + attribute; return 0; }

// Memory of the host, in the order of streams.
Result cuMemGetInfo_v2(size_t *memory, size_t *all) { *memory = 31 << 20, *all = (size_t)81559 << 20; return depth ? 0 : 201; }
Result cuMemAllocAsync(void **memory, size_t bytes, void *stream) {
    trace("%zu bytes on %p in capture mode %d\n", bytes, stream, capture_mode);
    *memory = malloc(bytes);
    return depth ? 0 : 201;
}
Result cuMemFreeAsync(void *memory, void *stream) { trace("free on %p\n", stream); free(memory); return depth ? 0 : 201; }
Result cuMemsetD8Async(void *memory, unsigned char value, size_t bytes, void *stream) {
    trace("%zu bytes are %d on %p\n", bytes, value, stream);
    memset(memory, value, bytes);
    return 0;
}
Result cuMemcpyDtoDAsync_v2(void *to, void *from, size_t bytes, void *stream) {
    trace("copy %zu bytes on %p\n", bytes, stream);
    memcpy(to, from, bytes);
    return 0;
}
Result cuMemHostAlloc(void **memory, size_t bytes, unsigned flags) {
    trace("%zu bytes on the host, flags %u, in capture mode %d\n", bytes, flags, capture_mode);
    *memory = malloc(bytes);
    return depth ? 0 : 201;
}
Result cuMemFreeHost(void *memory) { trace("free on the host\n"); free(memory); return depth ? 0 : 201; }
Result cuMemcpyAsync(char *to, char *from, size_t bytes, void *stream) {
    trace("copy of %zu bytes on %p\n", bytes, stream);
    memcpy(to, from, bytes);
    return 0;
}
typedef struct {
    size_t x, y;
    unsigned type;
    char *host, *device;
    void *array;
    size_t pitch;
} Side;
typedef struct {
    Side from, to;
    size_t width, height;
} Rows;
Result cuMemcpy2DAsync_v2(const Rows *rows, void *stream) {
    const Side *from = &rows->from, *to = &rows->to;
    if (from->x || from->y || to->x || to->y || from->type != 4 || to->type != 4) return 1;
    trace("copy of %zu x %zu bytes on %p\n", rows->height, rows->width, stream);
    for (size_t i = 0; i < rows->height; ++i)
        memcpy(to->device + i * to->pitch, from->device + i * from->pitch, rows->width);
    return 0;
}
Result cuEventSynchronize(void *event) { trace("host waits in capture mode %d\n", capture_mode); return 0; }
Result cuMemcpyDtoH_v2(void *to, void *from, size_t bytes) { memcpy(to, from, bytes); return 0; }
Result cuStreamSynchronize(void *stream) { trace("wait for %p\n", stream); return 0; }
Result cuStreamCreate(void **stream, unsigned flags) { *stream = (void *)0x51DE; return flags == 1 ? 0 : 1; }
Result cuStreamWaitEvent(void *stream, void *event, unsigned flags) { trace("%p waits\n", stream); return flags ? 1 : 0; }

Result cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned smem,
                      void *stream, void **params, void **extra) {
    if (!gx || extra || by != 1 || bz != 1) return 1;
    if (tracing)
        trace("launch %u,%u,%u x %u smem %u stream %p param %llu on %d\n", gx, gy, gz, bx, smem, stream,
              *(unsigned long long *)params[0], device_of(stack[depth - 1]));
    const unsigned shape[] = {gx, gy, gz, bx, by, bz};
    return launched(f, shape, smem, stream, NULL, 0, params[0], depth ? device_of(stack[depth - 1]) : -1);
}
Result cuLaunchKernelEx(const LaunchConfig *c, void *f, void **params, void **extra) {
    const LaunchAttribute *a = c->attrs;
    if (!c->grid[0] || extra || !c->num_attrs) return 1;
    if (tracing) {
        char asked[128] = "";
        for (unsigned i = 0; i < c->num_attrs; ++i, ++a) {
            char *end = asked + strlen(asked);
            if (a->id == 4)
                sprintf(end, " attribute 4 cluster %u,%u,%u", a->cluster[0], a->cluster[1], a->cluster[2]);
            else
                sprintf(end, " attribute %d = %u", a->id, a->cluster[0]);
        }
        trace("launchex %u,%u,%u x %u smem %u stream %p%s param %llu on %d\n", c->grid[0], c->grid[1], c->grid[2],
              c->block[0], c->smem, c->stream, asked, *(unsigned long long *)params[0], device_of(stack[depth - 1]));
    }
    return launched(f, (const unsigned *)c, c->smem, c->stream, c->attrs, c->num_attrs, params[0],
                    depth ? device_of(stack[depth - 1]) : -1);
}

// The address, then a digest of all else.
Result cuTensorMapEncodeTiled(uint64_t *map, int type, unsigned rank, void *address, const uint64_t *dims,
                              const uint64_t *strides, const unsigned *box, const unsigned *steps, int interleave,
                              int swizzle, int promotion, int fill) {
    uint64_t seed = 14695981039346656037u;
#define MIX(x) seed = (seed ^ (uint64_t)(x)) * 1099511628211u
    MIX(type), MIX(rank), MIX(interleave), MIX(swizzle), MIX(promotion), MIX(fill);
    for (unsigned i = 0; i < rank; ++i) MIX(dims[i]), MIX(box[i]), MIX(steps[i]), MIX(i + 1 < rank ? strides[i] : 0);
    map[0] = (uint64_t)(uintptr_t)address;
    for (int i = 1; i < 16; ++i) MIX(i), map[i] = seed;
    return (uintptr_t)address % 16 ? 1 : 0;
}

Result cuTensorMapReplaceAddress(void *map, void *address) {
    memcpy(map, &address, sizeof address);
    return (uintptr_t)map % 64 ? 1 : 0;
}

// The bindings look every function up here, by its name without a version.
Result cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    char versioned[128];
    snprintf(versioned, sizeof versioned, "%s_v2", symbol);
    void *self = dlopen(NULL, RTLD_LAZY);
    Dl_info info;
    if (dladdr((void *)cuInit, &info)) self = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    *function = dlsym(self, versioned);
    if (!*function) *function = dlsym(self, symbol);
    if (status) *status = *function ? 0 : 1;
    return *function ? 0 : 500;
}
Result cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}
