/* libcuda.so.1 with two devices, as far as ocomm, cuda.bindings and numba-cuda call it: device memory is the host's, copies
 * are done at once, a kernel is written down instead of being run, and an event is over when it has been asked twice.
 *
 * It is strict where a device is: a call needs a context in its thread, a stream and an event are used in the context that
 * they were made in, only what was allocated is freed, a copy to the device is from page-locked memory, and while some other
 * thread captures a graph nothing is allocated or freed and no event is asked in the usual mode. Streams below 256 are the
 * framework's, of any context.
 *
 * With INSTANT it takes as little time as it can: events are over at once, launches are not printed, copies of more than
 * SMALL bytes are not made. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef INSTANT
enum { ASKED = 0, PIECES = 1 << 14, SMALL = 1 << 22 };
#else
enum { ASKED = 2, PIECES = 64, SMALL = INT32_MAX };
#endif
enum { INVALID = 1, NO_MEMORY = 2, NO_DEVICE = 101, NO_CONTEXT = 201, BAD_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, CAPTURING = 900 };
typedef struct { int number; } context;
typedef struct { context *of; int left; } thing;
typedef uint64_t address;

static context contexts[2] = {{0}, {1}};
static __thread context *stack[16];
static __thread int depth;
static __thread int mode;
static long allocated, broken, captured, refused, events, full;
static struct { const char *first; size_t nbytes; } locked[PIECES];

static context *now(void) { return depth ? stack[depth - 1] : NULL; }
static int in(const void *handle) {
    if (broken) return broken;
    if (!now()) return NO_CONTEXT;
    return (uintptr_t)handle < 256 || ((const thing *)handle)->of == now() ? 0 : BAD_HANDLE;
}
static int made(void **handle) {
    thing *new = calloc(1, sizeof *new);
    new->of = now();
    *handle = new;
    return in(new);
}

/* For tests. */
long fake_allocated(void) { return allocated; }
void fake_break(int code) { broken = code; }
void fake_capture(int begins) { captured = begins; }
void fake_refuse(int code) { refused = code; }
void fake_fill(int allocations) { full = allocations; }
long fake_events(void) { return events; }
int fake_depth(void) { return depth; }
int fake_mode(void) { return mode; }

int cuInit(unsigned flags) { return flags ? INVALID : 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return number < 2 ? 0 : NO_DEVICE; }
int cuDeviceGetUuid_v2(void *uuid, int device) { memset(uuid, device + 1, 16); return 0; }
int cuDeviceGetName(char *name, int room, int device) { snprintf(name, room, "fake %d", device); return 0; }
int cuDeviceTotalMem_v2(size_t *nbytes, int device) { *nbytes = (size_t)1 << (34 + device); return 0; }
int cuDeviceGetAttribute(int *value, int which, int device) { *value = which == 75 ? 9 : which == 76 ? 0 : 1024; return device > 1; }
int cuDevicePrimaryCtxRetain(void **handle, int device) { *handle = &contexts[device]; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return device > 1; }
int cuCtxPushCurrent_v2(void *handle) { stack[depth++] = handle; return 0; }
int cuCtxPopCurrent_v2(void **handle) { if (!depth) return NO_CONTEXT; *handle = stack[--depth]; return 0; }
int cuCtxGetCurrent(void **handle) { *handle = now(); return 0; }
int cuCtxSetCurrent(void *handle) { stack[depth ? depth - 1 : depth++] = handle; return 0; }
int cuCtxGetDevice(int *device) { *device = now() ? now()->number : 0; return now() ? 0 : NO_CONTEXT; }
int cuMemGetInfo_v2(size_t *unused, size_t *all) { *unused = *all = (size_t)1 << 34; return 0; }

static int take(void **memory, size_t nbytes) {
    if (in(0) || (captured && !mode)) return in(0) ? in(0) : CAPTURING;
    if (nbytes >> 40 || full-- > 0) return NO_MEMORY;
    char *whole = calloc(1, nbytes + 512), *aligned = (char *)(((uintptr_t)whole + 512) & ~(uintptr_t)255);
    if (!whole) return NO_MEMORY;
    ((void **)aligned)[-1] = whole;
    *memory = aligned;
    allocated++;
    return 0;
}
static int give(void *memory) { if (captured && !mode) return CAPTURING; free(((void **)memory)[-1]); allocated--; return in(0); }
int cuMemAlloc_v2(address *memory, size_t nbytes) { return take((void **)memory, nbytes); }
int cuMemFree_v2(address memory) { return give((void *)memory); }
/* Which of the pieces of page-locked memory begins, or has n bytes, there; the first free one for NULL; -1. */
static int piece(const char *memory, size_t n) {
    for (int k = 0; k < PIECES; k++)
        if (memory ? locked[k].first && memory >= locked[k].first && memory + n <= locked[k].first + locked[k].nbytes : !locked[k].first)
            return k;
    return -1;
}
int cuMemHostAlloc(void **memory, size_t nbytes, unsigned flags) {
    int code = flags == 1 ? take(memory, nbytes) : INVALID, k = piece(NULL, 0);
    if (code || k < 0) return code ? code : NO_MEMORY;
    locked[k].first = *memory, locked[k].nbytes = nbytes;
    return 0;
}
int cuMemFreeHost(void *memory) {
    int k = piece(memory, 0), code = k < 0 ? INVALID : give(memory);
    if (!code) locked[k].first = NULL;
    return code;
}
int cuMemcpyHtoDAsync_v2(address to, const void *from, size_t n, void *s) {
    int code = in(s) ? in(s) : piece(from, n) < 0 ? INVALID : 0;
    if (!code && n <= SMALL) memcpy((void *)to, from, n);
    return code;
}
int cuMemcpyDtoHAsync_v2(void *to, address from, size_t n, void *s) { if (!in(s) && n <= SMALL) memcpy(to, (void *)from, n); return in(s); }
int cuMemcpyDtoDAsync_v2(address to, address from, size_t n, void *s) { if (!in(s) && n <= SMALL) memcpy((void *)to, (void *)from, n); return in(s); }
int cuMemsetD8Async(address to, unsigned char value, size_t n, void *s) { if (!in(s) && n <= SMALL) memset((void *)to, value, n); return in(s); }

int cuStreamCreate(void **stream, unsigned flags) { return flags == 1 ? made(stream) : INVALID; }
int cuThreadExchangeStreamCaptureMode(int *other) { int was = mode; mode = *other; *other = was; return 0; }
int cuEventCreate(void **event, unsigned flags) { events++; return flags == 2 ? made(event) : INVALID; }
int cuEventRecord(thing *event, void *stream) { event->left = ASKED; return in(event) ? in(event) : in(stream); }
int cuEventQuery(thing *event) { return captured && !mode ? CAPTURING : in(event) ? in(event) : event->left-- > 0 ? NOT_READY : 0; }
int cuStreamWaitEvent(void *stream, thing *event, unsigned flags) { return flags || in(event) ? INVALID : in(stream); }

int cuLinkCreate_v2(unsigned n, void *names, void *values, void **link) { return made(link); }
int cuLinkAddData_v2(void *link, int kind, void *data, size_t n, const char *name, unsigned m, void *a, void *b) { return in(link); }
int cuLinkComplete(void *link, void **cubin, size_t *nbytes) { *cubin = "\x7f" "ELF"; *nbytes = 4; return in(link); }
int cuLinkDestroy(void *link) { return in(link); }
int cuLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned n, void *c, void *d, unsigned m) { return refused ? refused : made(library); }
int cuLibraryUnload(void *library) { return 0; }
int cuLibraryGetKernel(void **kernel, void *library, const char *name) { *kernel = library; return 0; }
int cuKernelGetFunction(void **function, void *kernel) { *function = kernel; return in(0); }
int cuKernelGetAttribute(int *value, int which, void *kernel, int device) { *value = 0; return 0; }
int cuFuncGetAttribute(int *value, int which, void *function) { *value = 0; return 0; }
struct launch { unsigned blocks, y, z, threads, ty, tz, shared; void *stream; };
int cuLaunchKernelEx(const struct launch *launch, void *kernel, void **arguments, void **extra) {
#ifndef INSTANT
    printf("%u x %u threads, %u bytes, device %d\n", launch->blocks, launch->threads, launch->shared, now()->number);
    fflush(stdout);
#endif
    return in(launch->stream);
}
int cuLaunchKernel(void *kernel, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz, unsigned shared, void *stream, void **arguments, void **extra) {
    struct launch launch = {x, y, z, threads, ty, tz, shared, stream};
    return kernel ? cuLaunchKernelEx(&launch, kernel, arguments, extra) : BAD_HANDLE;
}

int cuGetErrorName(int code, const char **name) { *name = "CUDA_ERROR"; return 0; }
int cuGetErrorString(int code, const char **words) {
    *words = code == NO_MEMORY ? "out of memory" : code == 700 ? "an illegal memory access was encountered" : "an error";
    return 0;
}
int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    char versioned[128];
    void *self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    snprintf(versioned, sizeof versioned, "%s_v2", name);
    *function = dlsym(self, versioned);
    if (!*function) *function = dlsym(self, name);
    if (status) *status = !*function;
    return *function ? 0 : NOT_FOUND;
}
int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
