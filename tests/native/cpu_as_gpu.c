// An exchange table that gives what torch's own gives, but for the device: CPU tensors are on the GPU `fake_ordinal`.
// Workspaces are at `fake_workspace`, or torch's own where that is NULL; `fake_live` of them are not released;
// the next `fake_refused` are refused.
#include <stdint.h>
#include <stdlib.h>

typedef struct {
    void *data;
    int32_t type, id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} Facts;

typedef struct Owned {
    uint32_t major, minor;
    void *context;
    void (*release)(struct Owned *);
    uint64_t flags;
    Facts facts;
} Owned;

typedef struct Exchange {
    uint32_t major, minor;
    struct Exchange *older;
    int (*allocate)(Facts *, Owned **, void *, void (*)(void *, const char *, const char *));
    void *unused[2];
    int (*read)(void *, Facts *);
    int (*current_stream)(int32_t, int32_t, void **);
} Exchange;

int fake_ordinal;
int fake_live, fake_refused;
void *fake_stream = (void *)0x51, *fake_workspace;

static Exchange table;
static const Exchange *real;

static int read_as_gpu(void *object, Facts *out) {
    int code = real->read(object, out);
    if (!code) out->type = 2, out->id = fake_ordinal;
    return code;
}
static int stream_of_gpu(int32_t type, int32_t device, void **out) {
    (void)device;
    *out = fake_stream;
    return type == 2 ? 0 : -1;
}

static void release(Owned *made) { --fake_live, free(made); }
static int allocate_as_gpu(Facts *like, Owned **out, void *context, void (*fail)(void *, const char *, const char *)) {
    if (like->type != 2 || like->id != fake_ordinal || like->ndim != 1) return -1;
    if (fake_refused && fake_refused--) return fail(context, "MemoryError", "no memory"), -1;
    if (fake_workspace) {
        *out = calloc(1, sizeof **out);
        (*out)->facts = *like, (*out)->facts.data = fake_workspace, (*out)->release = release;
        return ++fake_live, 0;
    }
    Facts on_cpu = *like;
    on_cpu.type = 1, on_cpu.id = 0;
    return real->allocate(&on_cpu, out, context, fail);
}

const Exchange *fake_exchange(const Exchange *of) {
    real = of, table = *of;
    table.allocate = allocate_as_gpu, table.read = read_as_gpu, table.current_stream = stream_of_gpu;
    return &table;
}
