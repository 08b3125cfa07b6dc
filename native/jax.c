// The handler of XLA's FFI that queues a call's launches: no Python, no memory, no waiting.
//
// Python makes the plan of a call when the call is lowered, and gives it a number, which the compiled program holds.
// The handler finds the plan by number and GPU, puts addresses of arguments and results into the launches, and queues
// them on the program's stream. Plans stay for the life of the process, as the kernels do: a program may run at any
// time. XLA calls the handler from threads of its own, which do not hold Python's lock.
#include "jax.h"

#ifdef __linux__
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "launch.h"
#include "xla_ffi.h"

enum { BUCKETS = 1024, MAX_ALIGNED = 32, MAX_NAME = 32, MAX_TEXT = 4096 };

typedef struct {
    uint32_t source, multiple;
    char name[MAX_NAME];
} Aligned;

typedef struct Plan {
    struct Plan* next;
    uint64_t id, alignment;
    int32_t ordinal, workspace;  // place of the scratch memory among arguments and results, -1 for none
    uint32_t num_args, num_results, num_sources, num_aligned, num_launches;
    int32_t sources[MAX_OPERANDS];  // place of each operand's memory among arguments and results, -1 for an absent one
    Aligned aligned[MAX_ALIGNED];
    char* failure;  // why there are no launches
    PyObject* keep;
    Launch launches[MAX_LAUNCHES];
} Plan;

static Driver driver;
static int is_open;
static Plan* table[BUCKETS];  // lists that only grow, at their heads
static unsigned long long runs;

static Plan* find(uint64_t id, int32_t ordinal) {
    Plan* plan = __atomic_load_n(&table[id % BUCKETS], __ATOMIC_ACQUIRE);
    while (plan && (plan->id != id || plan->ordinal != ordinal)) plan = plan->next;
    return plan;
}

static void add(Plan* plan) {
    Plan** head = &table[plan->id % BUCKETS];  // Python's lock is held: nobody else adds
    plan->next = *head;
    __atomic_store_n(head, plan, __ATOMIC_RELEASE);
}

static XlaError* error_of(const XlaFrame* frame, int code, const char* text) {
    XlaErrorCreate made = {sizeof made, NULL, text, code};
    return frame->api->error_create(&made);
}

static int number_of(const XlaFrame* frame, uint64_t* id) {
    for (int64_t i = 0; i < frame->attributes.count; ++i) {
        const XlaText* name = frame->attributes.names[i];
        const XlaScalar* scalar = frame->attributes.values[i];
        if (name->length != 4 || memcmp(name->text, "plan", 4)) continue;
        if (frame->attributes.types[i] != XLA_SCALAR || scalar->dtype != XLA_S64) return 0;
        memcpy(id, scalar->value, sizeof *id);
        return 1;
    }
    return 0;
}

// Addresses of arguments, then of results; 0 if there are others than the plan says.
static int addresses_of(const XlaFrame* frame, const Plan* plan, uint64_t* addresses) {
    const XlaValues* both[] = {&frame->arguments, &frame->results};
    const uint32_t counts[] = {plan->num_args, plan->num_results};
    for (int which = 0; which < 2; ++which) {
        if (both[which]->count != counts[which]) return 0;
        for (uint32_t i = 0; i < counts[which]; ++i) {
            if (both[which]->types[i] != XLA_BUFFER) return 0;
            *addresses++ = (uint64_t)(uintptr_t)((const XlaBuffer*)both[which]->values[i])->data;
        }
    }
    return 1;
}

static XlaError* queue(const XlaFrame* frame, const Plan* plan, void* stream) {
    char text[MAX_TEXT];
    const char* name = NULL;
    uint64_t addresses[2 * MAX_OPERANDS], operands[MAX_OPERANDS + 1] = {0};
    if (!addresses_of(frame, plan, addresses)) {
        snprintf(text, sizeof text, "omniattn: expected %u arguments and %u results, received %lld and %lld",
                 plan->num_args, plan->num_results, (long long)frame->arguments.count, (long long)frame->results.count);
        return error_of(frame, XLA_INVALID_ARGUMENT, text);
    }
    for (uint32_t i = 0; i < plan->num_aligned; ++i) {
        const Aligned* a = &plan->aligned[i];
        if (addresses[a->source] % a->multiple == 0) continue;
        snprintf(text, sizeof text,
                 "omniattn: argument '%s': expected an address that is a multiple of %u bytes, received 0x%llx",
                 a->name, a->multiple, (unsigned long long)addresses[a->source]);
        return error_of(frame, XLA_INVALID_ARGUMENT, text);
    }
    for (uint32_t i = 0; i < plan->num_sources; ++i)
        if (plan->sources[i] >= 0) operands[i] = addresses[plan->sources[i]];
    if (plan->workspace >= 0)
        operands[plan->num_sources] = (addresses[plan->workspace] + plan->alignment - 1) & ~(plan->alignment - 1);
    for (uint32_t i = 0; i < plan->num_launches; ++i) {
        int code = launch_queue(&driver, &plan->launches[i], operands, stream, &name);
        if (!code) continue;
        const char* means = NULL;
        if (!driver.error_name || driver.error_name(code, &means) || !means) means = "unknown to the driver";
        snprintf(text, sizeof text,
                 "omniattn: %s failed with code %d on GPU %d: %s. Launch: %s. What to do: free GPU memory if little is "
                 "free, and see DriverError in docs/troubleshooting.md",
                 name, code, plan->ordinal, means, plan->launches[i].text);
        return error_of(frame, XLA_INTERNAL, text);
    }
    __atomic_fetch_add(&runs, 1, __ATOMIC_RELAXED);
    return NULL;
}

static XlaError* stream_of(const XlaFrame* frame, void** stream) {
    XlaStreamGet get = {sizeof get, NULL, frame->context, NULL};
    XlaError* error = frame->api->stream_get(&get);
    *stream = get.stream;
#ifdef OMNIATTN_TEST_STREAM  // tests run programs of the CPU, which has no streams
    if (error) {
        XlaErrorDestroy destroy = {sizeof destroy, NULL, error};
        frame->api->error_destroy(&destroy);
        *stream = (void*)(uintptr_t)OMNIATTN_TEST_STREAM;
        error = NULL;
    }
#endif
    return error;
}

static XlaError* handle(XlaFrame* frame) {
    for (XlaExtension* x = frame->extensions; x; x = x->next) {
        if (x->type != XLA_EXTENSION_METADATA) continue;
        XlaMetadata* metadata = ((XlaMetadataExtension*)x)->metadata;
        // Of version 0 only the part that is declared here is used, which no minor version has changed.
        metadata->version.major = 0;
        metadata->version.minor = frame->api ? frame->api->version.minor : 1;
        metadata->traits = XLA_COMMAND_BUFFER_COMPATIBLE;
        return NULL;
    }
    char text[MAX_TEXT];
    uint64_t id;
    void* stream;
    if (frame->size < sizeof *frame || frame->api->size < sizeof(XlaApi) || frame->api->version.major != 0) {
        snprintf(text, sizeof text,
                 "omniattn: expected version 0 of XLA's FFI, received %d.%d; OMNIATTN_NATIVE=0 helps",
                 frame->api->version.major, frame->api->version.minor);
        return error_of(frame, XLA_FAILED_PRECONDITION, text);
    }
    if (frame->stage != XLA_EXECUTE) return NULL;
    if (!number_of(frame, &id)) return error_of(frame, XLA_INVALID_ARGUMENT, "omniattn: a call without its plan");
    XlaError* error = stream_of(frame, &stream);
    if (error) return error;
    int ordinal = -1, pushed = 0;
    int code = driver.device ? driver.device(&ordinal) : INVALID_CONTEXT;
    if (code == INVALID_CONTEXT && driver.stream_context && driver.push && driver.pop) {
        void* context = NULL;
        if (!driver.stream_context(stream, &context) && !driver.push(context)) {
            pushed = 1;
            code = driver.device(&ordinal);
        }
    }
    const Plan* plan = code ? NULL : find(id, ordinal);
    if (plan && !plan->failure) {
        error = queue(frame, plan, stream);
    } else if (plan) {
        error = error_of(frame, XLA_FAILED_PRECONDITION, plan->failure);
    } else if (code) {
        snprintf(text, sizeof text, "omniattn: cuCtxGetDevice failed with code %d", code);
        error = error_of(frame, XLA_INTERNAL, text);
    } else {
        snprintf(text, sizeof text,
                 "omniattn: this program has no launches for GPU %d: it was compiled by another process, or for other "
                 "GPUs. Expected: a program that jax.jit traced in this process",
                 ordinal);
        error = error_of(frame, XLA_FAILED_PRECONDITION, text);
    }
    if (pushed) {
        void* context;
        driver.pop(&context);
    }
    return error;
}

PyObject* jax_handler(PyObject* module, PyObject* nothing) {
    (void)module, (void)nothing;
    if (!is_open) is_open = driver_open(&driver);
    return PyCapsule_New((void*)(uintptr_t)handle, "xla._CUSTOM_CALL_TARGET", NULL);
}

static int aligned_of(Plan* plan, PyObject* aligned) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(aligned); ++i) {
        const char* name;
        Aligned* a = &plan->aligned[plan->num_aligned];
        PyObject* item = PyTuple_GetItem(aligned, i);
        if (plan->num_aligned == MAX_ALIGNED || !PyTuple_Check(item)) return refuse("aligned: too many, or no tuples");
        if (!PyArg_ParseTuple(item, "IIs", &a->source, &a->multiple, &name)) return 0;
        if (a->source >= plan->num_args + plan->num_results || !a->multiple) return refuse("aligned: no such array");
        snprintf(a->name, sizeof a->name, "%s", name);
        ++plan->num_aligned;
    }
    return 1;
}

static int fill(Plan* plan, PyObject* sources, PyObject* aligned, PyObject* launches) {
    int32_t buffers = (int32_t)(plan->num_args + plan->num_results);
    if (plan->num_args > MAX_OPERANDS || plan->num_results > MAX_OPERANDS) return refuse("too many arrays");
    if (plan->workspace >= buffers) return refuse("workspace: no such array");
    if (!plan->alignment || plan->alignment & (plan->alignment - 1)) return refuse("the alignment is no power of two");
    // One place is left for the workspace.
    if (PyTuple_Size(sources) >= MAX_OPERANDS || PyTuple_Size(launches) > MAX_LAUNCHES)
        return refuse("too many operands or launches");
    for (Py_ssize_t i = 0; i < PyTuple_Size(sources); ++i) {
        long source = PyLong_AsLong(PyTuple_GetItem(sources, i));
        if (source == -1 && PyErr_Occurred()) return 0;
        if (source < -1 || source >= buffers) return refuse("sources: no such array");
        plan->sources[plan->num_sources++] = (int32_t)source;
    }
    if (!aligned_of(plan, aligned)) return 0;
    for (Py_ssize_t i = 0; i < PyTuple_Size(launches); ++i) {
        Launch* launch = &plan->launches[plan->num_launches++];
        if (!launch_of(launch, PyTuple_GetItem(launches, i))) return 0;
        for (uint32_t j = 0; j < launch->num_places; ++j)
            if (launch->places[j].operand > plan->num_sources) return refuse("a place of no operand");
        for (uint32_t j = 0; j < launch->num_maps; ++j)
            if (launch->maps[j].operand > plan->num_sources) return refuse("a tensor map of no operand");
    }
    return 1;
}

static void release(Plan* plan) {
    for (uint32_t i = 0; i < plan->num_launches; ++i) launch_free(&plan->launches[i]);
    Py_XDECREF(plan->keep);
    free(plan->failure);
    free(plan);
}

PyObject* jax_plan(PyObject* module, PyObject* args) {
    (void)module;
    unsigned long long id, alignment;
    unsigned num_args, num_results;
    int ordinal, workspace;
    PyObject *sources, *aligned, *launches, *keep;
    if (!PyArg_ParseTuple(args, "KiIIO!iKO!O!O", &id, &ordinal, &num_args, &num_results, &PyTuple_Type, &sources,
                          &workspace, &alignment, &PyTuple_Type, &aligned, &PyTuple_Type, &launches, &keep))
        return NULL;
    if (!is_open) is_open = driver_open(&driver);
    if (!is_open) Py_RETURN_FALSE;
    if (find(id, ordinal)) Py_RETURN_TRUE;
    Plan* plan = calloc(1, sizeof *plan);
    if (!plan) return PyErr_NoMemory();
    plan->id = id, plan->ordinal = ordinal, plan->num_args = num_args, plan->num_results = num_results;
    plan->workspace = workspace < 0 ? -1 : workspace, plan->alignment = alignment;
    Py_INCREF(plan->keep = keep);
    if (!fill(plan, sources, aligned, launches)) return release(plan), NULL;
    for (uint32_t i = 0; i < plan->num_launches; ++i)
        if (plan->launches[i].num_maps && !driver.move_map) {
            release(plan);
            Py_RETURN_FALSE;
        }
    add(plan);
    Py_RETURN_TRUE;
}

PyObject* jax_failed(PyObject* module, PyObject* args) {
    (void)module;
    unsigned long long id;
    int ordinal;
    const char* text;
    if (!PyArg_ParseTuple(args, "Kis", &id, &ordinal, &text)) return NULL;
    if (find(id, ordinal)) Py_RETURN_NONE;
    Plan* plan = calloc(1, sizeof *plan);
    if (!plan || !(plan->failure = malloc(strlen(text) + 1))) return free(plan), PyErr_NoMemory();
    strcpy(plan->failure, text);
    plan->id = id, plan->ordinal = ordinal;
    add(plan);
    Py_RETURN_NONE;
}

PyObject* jax_runs(PyObject* module, PyObject* nothing) {
    (void)module, (void)nothing;
    return PyLong_FromUnsignedLongLong(__atomic_load_n(&runs, __ATOMIC_RELAXED));
}

#else  // JAX has no CUDA elsewhere

static PyObject* missing(void) {
    PyErr_SetString(PyExc_NotImplementedError, "JAX has CUDA on Linux only");
    return NULL;
}

PyObject* jax_handler(PyObject* module, PyObject* nothing) {
    (void)module, (void)nothing;
    return missing();
}

PyObject* jax_plan(PyObject* module, PyObject* args) {
    (void)module, (void)args;
    return missing();
}

PyObject* jax_failed(PyObject* module, PyObject* args) {
    (void)module, (void)args;
    return missing();
}

PyObject* jax_runs(PyObject* module, PyObject* nothing) {
    (void)module, (void)nothing;
    return missing();
}
#endif
