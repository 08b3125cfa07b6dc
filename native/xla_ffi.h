// The part of XLA's FFI, C interface version 0, that a handler of launches needs: what it gets, and two functions.
//
// Sizes and places of fields are those of XLA's c_api.h since version 0.1; structs begin with their size in bytes.
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef struct XlaExtension {
    size_t size;
    int type;
    struct XlaExtension* next;
} XlaExtension;

typedef struct {
    size_t size;
    XlaExtension* extensions;
    int major, minor;
} XlaVersion;

enum { XLA_EXTENSION_METADATA = 1, XLA_COMMAND_BUFFER_COMPATIBLE = 1 };

// What XLA asks for when a handler is registered.
typedef struct {
    size_t size;
    XlaVersion version;
    uint32_t traits;
} XlaMetadata;

typedef struct {
    XlaExtension base;
    XlaMetadata* metadata;
} XlaMetadataExtension;

typedef struct XlaError XlaError;
typedef struct XlaContext XlaContext;

enum { XLA_INVALID_ARGUMENT = 3, XLA_FAILED_PRECONDITION = 9, XLA_INTERNAL = 13 };

typedef struct {
    size_t size;
    XlaExtension* extensions;
    const char* message;
    int code;
} XlaErrorCreate;

typedef struct {
    size_t size;
    XlaExtension* extensions;
    XlaContext* context;
    void* stream;
} XlaStreamGet;

typedef struct {
    size_t size;
    XlaExtension* extensions;
    XlaError* error;
} XlaErrorDestroy;

typedef struct {
    size_t size;
    XlaExtension* extensions;
    XlaVersion version;
    const void* internal;
    XlaError* (*error_create)(XlaErrorCreate*);
    void (*error_message)(void*);
    void (*error_destroy)(XlaErrorDestroy*);
    XlaError* (*handler_register)(void*);
    XlaError* (*stream_get)(XlaStreamGet*);
} XlaApi;

typedef struct {
    size_t size;
    XlaExtension* extensions;
    int dtype;
    void* data;
    int64_t rank;
    int64_t* dims;
} XlaBuffer;

enum { XLA_BUFFER = 1, XLA_SCALAR = 3, XLA_S64 = 5, XLA_EXECUTE = 3 };

// Arguments, and results.
typedef struct {
    size_t size;
    XlaExtension* extensions;
    int64_t count;
    int* types;
    void** values;
} XlaValues;

typedef struct {
    const char* text;
    size_t length;
} XlaText;

typedef struct {
    int dtype;
    void* value;
} XlaScalar;

typedef struct {
    size_t size;
    XlaExtension* extensions;
    int64_t count;
    int* types;
    XlaText** names;
    void** values;
} XlaAttributes;

typedef struct {
    size_t size;
    XlaExtension* extensions;
    const XlaApi* api;
    XlaContext* context;
    int stage;
    XlaValues arguments, results;
    XlaAttributes attributes;
} XlaFrame;
