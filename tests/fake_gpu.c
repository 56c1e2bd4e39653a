/* Two GPUs without any for TensorFlow, a plugin by its StreamExecutor interface: their memory is the host's. TensorFlow
 * has no kernels for them but those that move tensors, and does the rest on the CPU; here is the one that ocomm needs.
 *
 * What DeepCopy writes is garbage until a stream has been waited for, or its memory is copied to the host. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "tensorflow/c/experimental/stream_executor/stream_executor.h"
#include "tensorflow/c/kernels.h"
#include "tensorflow/c/tf_tensor.h"

#define DEVICE const SP_Device *device
#define MEMORY SP_DeviceMemoryBase

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct { TF_Tensor *to, *from; } pending[4096];
static long queued, waits, copied_to_host, allocated;

/* For tests: how often a stream was waited for, bytes that were copied to the host, pieces of memory made. */
long fake_waits(void) { return waits; }
long fake_copied_to_host(void) { return copied_to_host; }
long fake_allocated(void) { return allocated; }

static void fine(TF_Status *status) { TF_SetStatus(status, TF_OK, ""); }

static void finish(long to_host, int waited) {
    pthread_mutex_lock(&lock);
    for (long k = 0; k < queued; k++) {
        memcpy(TF_TensorData(pending[k].to), TF_TensorData(pending[k].from), TF_TensorByteSize(pending[k].to));
        TF_DeleteTensor(pending[k].to);
        TF_DeleteTensor(pending[k].from);
    }
    queued = 0;
    copied_to_host += to_host;
    waits += waited;
    pthread_mutex_unlock(&lock);
}

static void deep_copy(void *kernel, TF_OpKernelContext *context) {
    TF_Status *status = TF_NewStatus();
    TF_Tensor *from = NULL, *to = NULL;
    int64_t shape[8];
    TF_GetInput(context, 0, &from, status);
    for (int k = 0; k < TF_NumDims(from); k++) shape[k] = TF_Dim(from, k);
    to = TF_AllocateOutput(context, 0, TF_FLOAT, shape, TF_NumDims(from), TF_TensorByteSize(from), status);
    memset(TF_TensorData(to), 0x5A, TF_TensorByteSize(to));
    pthread_mutex_lock(&lock);
    if (queued == sizeof pending / sizeof *pending) abort();
    pending[queued].to = to, pending[queued++].from = from;
    pthread_mutex_unlock(&lock);
    TF_DeleteStatus(status);
}

void TF_InitKernel(void) {
    TF_Status *status = TF_NewStatus();
    TF_KernelBuilder *builder = TF_NewKernelBuilder("DeepCopy", "GPU", NULL, deep_copy, NULL);
    TF_KernelBuilder_TypeConstraint(builder, "T", TF_FLOAT, status);
    TF_RegisterKernelBuilder("DeepCopy", builder, status);
    if (TF_GetCode(status) != TF_OK) abort();
    TF_DeleteStatus(status);
}

/* Memory */

static void *host_allocate(DEVICE, uint64_t nbytes) { return aligned_alloc(256, nbytes + 256 & ~(uint64_t)255); }
static void host_free(DEVICE, void *memory) { free(memory); }
static void allocate(DEVICE, uint64_t nbytes, int64_t space, MEMORY *memory) {
    *memory = (MEMORY){SP_DEVICE_MEMORY_BASE_STRUCT_SIZE, NULL, host_allocate(device, nbytes), nbytes, 0};
    __atomic_add_fetch(&allocated, 1, __ATOMIC_RELAXED);
}
static void deallocate(DEVICE, MEMORY *memory) { free(memory->opaque); }
static TF_Bool stats(DEVICE, SP_AllocatorStats *unused) { return 0; }
static TF_Bool usage(DEVICE, int64_t *unused, int64_t *all) { *unused = *all = 1L << 30; return 1; }

static void to_host_now(DEVICE, void *to, const MEMORY *from, uint64_t nbytes, TF_Status *status) {
    finish(nbytes, 0);
    memcpy(to, from->opaque, nbytes);
    fine(status);
}
static void to_device_now(DEVICE, MEMORY *to, const void *from, uint64_t nbytes, TF_Status *status) {
    memcpy(to->opaque, from, nbytes);
    fine(status);
}
static void inside_now(DEVICE, MEMORY *to, const MEMORY *from, uint64_t nbytes, TF_Status *status) {
    finish(0, 0);
    to_device_now(device, to, from->opaque, nbytes, status);
}
static void to_host(DEVICE, SP_Stream stream, void *to, const MEMORY *from, uint64_t nbytes, TF_Status *status) {
    to_host_now(device, to, from, nbytes, status);
}
static void to_device(DEVICE, SP_Stream stream, MEMORY *to, const void *from, uint64_t nbytes, TF_Status *status) {
    to_device_now(device, to, from, nbytes, status);
}
static void inside(DEVICE, SP_Stream stream, MEMORY *to, const MEMORY *from, uint64_t nbytes, TF_Status *status) {
    inside_now(device, to, from, nbytes, status);
}
static void fill(DEVICE, SP_Stream stream, MEMORY *to, uint8_t byte, uint64_t nbytes, TF_Status *status) {
    memset(to->opaque, byte, nbytes);
    fine(status);
}
static void zero(DEVICE, SP_Stream stream, MEMORY *to, uint64_t nbytes, TF_Status *status) {
    fill(device, stream, to, 0, nbytes, status);
}
static void fill_words(DEVICE, SP_Stream stream, MEMORY *to, uint32_t word, uint64_t nbytes, TF_Status *status) {
    for (uint64_t k = 0; k < nbytes / 4; k++) ((uint32_t *)to->opaque)[k] = word;
    fine(status);
}

/* Streams, events, timers: there is nothing to know of them. */

static void make(DEVICE, void **thing, TF_Status *status) { *thing = malloc(1); fine(status); }
static void make_stream(DEVICE, SP_Stream *stream, TF_Status *status) { make(device, (void **)stream, status); }
static void make_event(DEVICE, SP_Event *event, TF_Status *status) { make(device, (void **)event, status); }
static void make_timer(DEVICE, SP_Timer *timer, TF_Status *status) { make(device, (void **)timer, status); }
static void free_stream(DEVICE, SP_Stream stream) { free(stream); }
static void free_event(DEVICE, SP_Event event) { free(event); }
static void free_timer(DEVICE, SP_Timer timer) { free(timer); }
static void depend(DEVICE, SP_Stream stream, SP_Stream on, TF_Status *status) { fine(status); }
static void ask_stream(DEVICE, SP_Stream stream, TF_Status *status) { fine(status); }
static SE_EventStatus ask_event(DEVICE, SP_Event event) { return SE_EVENT_COMPLETE; }
static void record(DEVICE, SP_Stream stream, SP_Event event, TF_Status *status) { fine(status); }
static void time_stream(DEVICE, SP_Stream stream, SP_Timer timer, TF_Status *status) { fine(status); }
static void wait_event(DEVICE, SP_Event event, TF_Status *status) { finish(0, 1); fine(status); }
static void wait_stream(DEVICE, SP_Stream stream, TF_Status *status) { finish(0, 1); fine(status); }
static void wait_all(DEVICE, TF_Status *status) { finish(0, 1); fine(status); }
static uint64_t nanoseconds(SP_Timer timer) { return 0; }
static TF_Bool call(DEVICE, SP_Stream stream, SE_StatusCallbackFn function, void *argument) {
    TF_Status *status = TF_NewStatus();
    function(argument, status);
    TF_DeleteStatus(status);
    return 1;
}

/* The platform */

static void count(const SP_Platform *platform, int *devices, TF_Status *status) { *devices = 2; fine(status); }
static void make_device(const SP_Platform *platform, SE_CreateDeviceParams *given, TF_Status *status) {
    *given->device = (SP_Device){.struct_size = SP_DEVICE_STRUCT_SIZE, .ordinal = given->ordinal};
    fine(status);
}
static void make_device_functions(const SP_Platform *platform, SE_CreateDeviceFnsParams *given, TF_Status *status) {
    given->device_fns->struct_size = SP_DEVICE_FNS_STRUCT_SIZE;
    fine(status);
}
static void make_timer_functions(const SP_Platform *platform, SP_TimerFns *functions, TF_Status *status) {
    *functions = (SP_TimerFns){SP_TIMER_FNS_STRUCT_SIZE, NULL, nanoseconds};
    fine(status);
}
static void make_executor(const SP_Platform *platform, SE_CreateStreamExecutorParams *given, TF_Status *status) {
    *given->stream_executor = (SP_StreamExecutor){
        .struct_size = SP_STREAMEXECUTOR_STRUCT_SIZE,
        .allocate = allocate, .deallocate = deallocate, .host_memory_allocate = host_allocate,
        .host_memory_deallocate = host_free, .get_allocator_stats = stats, .device_memory_usage = usage,
        .create_stream = make_stream, .destroy_stream = free_stream, .create_stream_dependency = depend,
        .get_stream_status = ask_stream, .create_event = make_event, .destroy_event = free_event,
        .get_event_status = ask_event, .record_event = record, .wait_for_event = record, .create_timer = make_timer,
        .destroy_timer = free_timer, .start_timer = time_stream, .stop_timer = time_stream, .memcpy_dtoh = to_host,
        .memcpy_htod = to_device, .memcpy_dtod = inside, .sync_memcpy_dtoh = to_host_now,
        .sync_memcpy_htod = to_device_now, .sync_memcpy_dtod = inside_now, .block_host_for_event = wait_event,
        .block_host_until_done = wait_stream, .synchronize_all_activity = wait_all, .mem_zero = zero, .memset = fill,
        .memset32 = fill_words, .host_callback = call,
    };
    fine(status);
}
static void nothing(const SP_Platform *platform, void *functions) {}
static void no_platform(SP_Platform *platform) {}
static void no_functions(SP_PlatformFns *functions) {}

void SE_InitPlugin(SE_PlatformRegistrationParams *given, TF_Status *status) {
    *given->platform = (SP_Platform){
        .struct_size = SP_PLATFORM_STRUCT_SIZE, .name = "FAKE", .type = "GPU", .force_memory_growth = 1};
    *given->platform_fns = (SP_PlatformFns){
        .struct_size = SP_PLATFORM_FNS_STRUCT_SIZE, .get_device_count = count, .create_device = make_device,
        .destroy_device = (void *)nothing, .create_device_fns = make_device_functions,
        .destroy_device_fns = (void *)nothing, .create_stream_executor = make_executor,
        .destroy_stream_executor = (void *)nothing, .create_timer_fns = make_timer_functions,
        .destroy_timer_fns = (void *)nothing};
    given->destroy_platform = no_platform;
    given->destroy_platform_fns = no_functions;
    fine(status);
}
