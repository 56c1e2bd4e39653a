/* Implements tf_exchange.h. A kernel puts its work into a queue and returns. A thread of ocomm takes it out, and
 * calls TensorFlow back when the collective is over. So no thread of TensorFlow waits, and none runs Python.
 *
 * The exchanges are stateful. Otherwise TensorFlow would fold one whose input is constant, merge two that look alike
 * and drop one whose result is not used, and this rank would be missing in the collective. tf.function chains
 * stateful operations in program order: ocomm_tf/engine.py tells it that these are independent.
 */
#include "tf_exchange.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct TF_Status TF_Status;
typedef struct TF_Tensor TF_Tensor;
typedef struct TF_KernelBuilder TF_KernelBuilder;
typedef struct TF_OpKernelConstruction TF_OpKernelConstruction;
typedef struct TF_OpKernelContext TF_OpKernelContext;
typedef struct TF_OpDefinitionBuilder TF_OpDefinitionBuilder;
typedef struct TF_ShapeInferenceContext TF_ShapeInferenceContext;
typedef struct TF_ShapeHandle TF_ShapeHandle;
typedef struct { const char *data; size_t len; } TF_StringView;


/* std::function<void()> of libstdc++, which TensorFlow hands a kernel by reference: its ABI is frozen, and
 * ocomm_tf_register makes sure that it is what TensorFlow was built with. */
typedef struct {
    void *functor[2];
    int (*manager)(void *destination, const void *source, int operation);
    void (*invoker)(const void *functor);
} callback;
enum { DESTROY = 3 };
enum { RESOURCE_EXHAUSTED = 8 }; /* of TF_Code */
/* tensorflow::ThreadPoolDevice::ComputeAsync(AsyncOpKernel*, OpKernelContext*, std::function<void()>) */
#define PROOF_OF_CALLBACK                                                                                              \
    "_ZN10tensorflow16ThreadPoolDevice12ComputeAsyncEPNS_13AsyncOpKernelEPNS_15OpKernelContextESt8functionIFvvEE"

#define API(X)                                                                                                         \
    X(TF_Status *, TF_NewStatus, (void))                                                                               \
    X(void, TF_DeleteStatus, (TF_Status *))                                                                            \
    X(void, TF_SetStatus, (TF_Status *, int, const char *))                                                            \
    X(int, TF_GetCode, (const TF_Status *))                                                                            \
    X(const char *, TF_Message, (const TF_Status *))                                                                   \
    X(int, TF_TensorType, (const TF_Tensor *))                                                                         \
    X(int, TF_NumDims, (const TF_Tensor *))                                                                            \
    X(int64_t, TF_Dim, (const TF_Tensor *, int))                                                                       \
    X(size_t, TF_TensorByteSize, (const TF_Tensor *))                                                                  \
    X(void *, TF_TensorData, (const TF_Tensor *))                                                                      \
    X(void, TF_DeleteTensor, (TF_Tensor *))                                                                            \
    X(TF_OpDefinitionBuilder *, TF_NewOpDefinitionBuilder, (const char *))                                             \
    X(void, TF_OpDefinitionBuilderAddAttr, (TF_OpDefinitionBuilder *, const char *))                                   \
    X(void, TF_OpDefinitionBuilderAddInput, (TF_OpDefinitionBuilder *, const char *))                                  \
    X(void, TF_OpDefinitionBuilderAddOutput, (TF_OpDefinitionBuilder *, const char *))                                 \
    X(void, TF_OpDefinitionBuilderSetIsStateful, (TF_OpDefinitionBuilder *, _Bool))                                    \
    X(void, TF_OpDefinitionBuilderSetShapeInferenceFunction,                                                           \
      (TF_OpDefinitionBuilder *, void (*)(TF_ShapeInferenceContext *, TF_Status *)))                                   \
    X(void, TF_RegisterOpDefinition, (TF_OpDefinitionBuilder *, TF_Status *))                                          \
    X(TF_ShapeHandle *, TF_NewShapeHandle, (void))                                                                     \
    X(void, TF_DeleteShapeHandle, (TF_ShapeHandle *))                                                                  \
    X(int64_t, TF_ShapeInferenceContextNumInputs, (TF_ShapeInferenceContext *))                                        \
    X(void, TF_ShapeInferenceContextGetInput, (TF_ShapeInferenceContext *, int, TF_ShapeHandle *, TF_Status *))        \
    X(void, TF_ShapeInferenceContextSetOutput, (TF_ShapeInferenceContext *, int, TF_ShapeHandle *, TF_Status *))       \
    X(void, TF_ShapeInferenceContextSetUnknownShape, (TF_ShapeInferenceContext *, TF_Status *))                        \
    X(TF_KernelBuilder *, TF_NewAsyncKernelBuilder,                                                                    \
      (const char *, const char *, void *(*)(TF_OpKernelConstruction *),                                               \
       void (*)(void *, TF_OpKernelContext *, callback *), void (*)(void *)))                                          \
    X(void, TF_RegisterKernelBuilder, (const char *, TF_KernelBuilder *, TF_Status *))                                 \
    X(TF_StringView, TF_OpKernelConstruction_GetName, (TF_OpKernelConstruction *))                                     \
    X(void, TF_OpKernelConstruction_GetAttrInt64, (TF_OpKernelConstruction *, const char *, int64_t *, TF_Status *))   \
    X(void, TF_OpKernelConstruction_GetAttrSize,                                                                       \
      (TF_OpKernelConstruction *, const char *, int32_t *, int32_t *, TF_Status *))                                    \
    X(void, TF_OpKernelConstruction_GetAttrInt64List,                                                                  \
      (TF_OpKernelConstruction *, const char *, int64_t *, int, TF_Status *))                                          \
    X(void, TF_OpKernelConstruction_Failure, (TF_OpKernelConstruction *, TF_Status *))                                 \
    X(int, TF_NumInputs, (TF_OpKernelContext *))                                                                       \
    X(void, TF_GetInput, (TF_OpKernelContext *, int, TF_Tensor **, TF_Status *))                                       \
    X(TF_Tensor *, TF_AllocateOutput,                                                                                  \
      (TF_OpKernelContext *, int, int, const int64_t *, int, size_t, TF_Status *))                                     \
    X(TF_Tensor *, TF_ForwardInputOrAllocateOutput,                                                                    \
      (TF_OpKernelContext *, const int *, int, int, const int64_t *, int, int *, TF_Status *))                         \
    X(void, TF_OpKernelContext_Failure, (TF_OpKernelContext *, TF_Status *))

#define DECLARE(result, name, arguments) static result(*name) arguments;
API(DECLARE)

/* Kernels */

typedef struct {
    int64_t call;
    int gathers;
    int compares;
    int32_t known;    /* number of tensors whose size the graph knows: all or none */
    int64_t *nbytes;  /* their sizes, after the name */
    size_t name_length;
    char name[];
} kernel;

typedef struct {
    ocomm_tf_work work; /* the first member, because pointers to the two are cast to each other */
    callback done;
    TF_OpKernelContext *context;
    TF_Tensor *splits;
} execution;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed;
static ocomm_tf_work *first, **last = &first;
static int woken, waiting;

static void *create(TF_OpKernelConstruction *construction, int gathers, int compares) {
    TF_StringView name = TF_OpKernelConstruction_GetName(construction);
    TF_Status *status = TF_NewStatus();
    int32_t known = 0, total;
    TF_OpKernelConstruction_GetAttrSize(construction, "nbytes", &known, &total, status);
    size_t start = (sizeof(kernel) + name.len + 7) / 8 * 8;
    kernel *self = malloc(start + (size_t)(known < 0 ? 0 : known) * sizeof(int64_t));
    if (!self) {
        TF_SetStatus(status, RESOURCE_EXHAUSTED, "ocomm: no memory for an operation");
        TF_OpKernelConstruction_Failure(construction, status);
        TF_DeleteStatus(status);
        return NULL;
    }
    self->gathers = gathers;
    self->compares = compares;
    self->known = known;
    self->nbytes = (int64_t *)((char *)self + start);
    self->name_length = name.len;
    memcpy(self->name, name.data, name.len);
    if (!TF_GetCode(status) && known > 0)
        TF_OpKernelConstruction_GetAttrInt64List(construction, "nbytes", self->nbytes, known, status);
    if (!TF_GetCode(status)) TF_OpKernelConstruction_GetAttrInt64(construction, "call", &self->call, status);
    if (TF_GetCode(status)) TF_OpKernelConstruction_Failure(construction, status);
    TF_DeleteStatus(status);
    return self;
}

static void *create_exchange(TF_OpKernelConstruction *construction) { return create(construction, 0, 0); }
static void *create_gather(TF_OpKernelConstruction *construction) { return create(construction, 1, 0); }
static void *create_compare(TF_OpKernelConstruction *construction) { return create(construction, 0, 1); }

/* Fills in tensor `index`, whose shape is stored after those of the tensors before it, and releases `input`. */
static void locate(execution *e, int index, TF_Tensor *input, int gathers, int64_t **shapes, TF_Status *status) {
    TF_Tensor *output;
    ocomm_tf_tensor *tensor = &e->work.tensors[index];
    tensor->dtype = TF_TensorType(input);
    tensor->rank = TF_NumDims(input);
    tensor->shape = *shapes;
    for (int i = 0; i < tensor->rank; i++) *(*shapes)++ = TF_Dim(input, i);
    tensor->nbytes = (int64_t)TF_TensorByteSize(input);
    tensor->input = TF_TensorData(input);
    TF_DeleteTensor(input); /* the context keeps it; a second reference would keep it from becoming the output */
    if (gathers || TF_GetCode(status)) return;
    int chosen;
    output = TF_ForwardInputOrAllocateOutput(e->context, &index, 1, index, tensor->shape, tensor->rank, &chosen, status);
    if (TF_GetCode(status)) return;
    tensor->output = TF_TensorData(output);
    TF_DeleteTensor(output);
}

static void compute(void *self_, TF_OpKernelContext *context, callback *done) {
    const kernel *self = self_;
    TF_Status *status = TF_NewStatus();
    int count = self->compares ? 1 : TF_NumInputs(context) - self->gathers, got = 0;
    size_t dimensions = 0;
    TF_Tensor **inputs = calloc((size_t)count + 1, sizeof *inputs);
    for (; inputs && got < count; got++) {
        TF_GetInput(context, got, &inputs[got], status);
        if (TF_GetCode(status)) break;
        dimensions += (size_t)TF_NumDims(inputs[got]);
    }
    execution *e = NULL;
    if (inputs) e = calloc(1, sizeof *e + (size_t)count * sizeof(ocomm_tf_tensor) + dimensions * sizeof(int64_t));
    if (!e) {
        for (int i = 0; i < got; i++) TF_DeleteTensor(inputs[i]);
        free(inputs);
        TF_SetStatus(status, RESOURCE_EXHAUSTED, "ocomm: no memory for a collective");
        TF_OpKernelContext_Failure(context, status);
        TF_DeleteStatus(status);
        done->invoker(done); /* the callback of the caller, which destroys it */
        return;
    }
    e->context = context;
    e->work.call = self->call;
    e->work.name = self->name;
    e->work.name_length = (int64_t)self->name_length;
    e->work.count = count;
    e->work.tensors = (ocomm_tf_tensor *)(e + 1);
    int64_t *shapes = (int64_t *)(e->work.tensors + count);
    for (int i = 0; i < got; i++) locate(e, i, inputs[i], self->gathers, &shapes, status);
    free(inputs);
    e->work.is_known = count > 0 && self->known == count;
    for (int i = 0; i < count && e->work.is_known; i++) e->work.is_known = e->work.tensors[i].nbytes == self->nbytes[i];
    if (self->gathers && !TF_GetCode(status)) {
        TF_GetInput(context, count, &e->splits, status);
        if (!TF_GetCode(status)) {
            e->work.splits = TF_TensorData(e->splits);
            e->work.split_count = (int64_t)(TF_TensorByteSize(e->splits) / sizeof(int64_t));
        }
    }
    int failed = TF_GetCode(status);
    if (failed) TF_OpKernelContext_Failure(context, status);
    TF_DeleteStatus(status);
    /* Moves the callback out of the caller's hands, as its move constructor would. */
    e->done = *done;
    done->manager = NULL;
    if (failed) {
        const intptr_t work = (intptr_t)e;
        ocomm_tf_finish(&work, 1, 0, NULL);
        return;
    }
    pthread_mutex_lock(&lock);
    *last = &e->work;
    last = &e->work.next;
    int wake = waiting;
    pthread_mutex_unlock(&lock);
    if (wake) pthread_cond_signal(&changed);
}

/* The queue */

/* The result of ocomm_tf_take, until the next call. */
static ocomm_tf_batch batch;
static struct timespec paced;

static int enlarge(intptr_t **array, int64_t count) {
    intptr_t *larger = realloc(*array, (size_t)count * sizeof **array);
    if (larger) *array = larger;
    return larger != NULL;
}

/* Returns 0 if there is no memory. */
static int describe(ocomm_tf_work *works) {
    static int64_t work_room, tensor_room;
    batch.count = batch.tensors = 0;
    for (ocomm_tf_work *work = works; work; work = work->next) {
        batch.count++;
        batch.tensors += work->is_known ? work->count : 0;
    }
    if (batch.count > work_room) {
        const int64_t room = 2 * batch.count;
        if (!enlarge(&batch.works, room) || !enlarge(&batch.calls, room) || !enlarge(&batch.counts, room)) return 0;
        work_room = room;
    }
    if (batch.tensors > tensor_room) {
        const int64_t room = 2 * batch.tensors;
        if (!enlarge(&batch.inputs, room) || !enlarge(&batch.outputs, room)) return 0;
        tensor_room = room;
    }
    int64_t at = 0, tensor = 0;
    for (ocomm_tf_work *work = works; work; work = work->next, at++) {
        batch.works[at] = (intptr_t)work;
        batch.calls[at] = (intptr_t)work->call;
        batch.counts[at] = work->is_known ? (intptr_t)work->count : 0;
        for (int64_t i = 0; i < batch.counts[at]; i++, tensor++) {
            batch.inputs[tensor] = (intptr_t)work->tensors[i].input;
            batch.outputs[tensor] = (intptr_t)work->tensors[i].output;
        }
    }
    return 1;
}

static struct timespec after(struct timespec time, int64_t nanoseconds) {
    nanoseconds += time.tv_nsec;
    time.tv_sec += nanoseconds / 1000000000;
    time.tv_nsec = nanoseconds % 1000000000;
    return time;
}

const ocomm_tf_batch *ocomm_tf_take(double seconds, double pace) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const struct timespec end = after(now, (int64_t)(seconds * 1e9));
    pthread_mutex_lock(&lock);
    waiting = 1;
    while (!first && !woken && pthread_cond_timedwait(&changed, &lock, &end) != ETIMEDOUT) {}
    waiting = 0;
    pthread_mutex_unlock(&lock);
    /* A burst of works is taken in few portions, because waking a thread for each tensor costs more than the
     * tensors. */
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &paced, NULL) == EINTR) {}
    pthread_mutex_lock(&lock);
    woken = 0;
    ocomm_tf_work *work = first;
    first = NULL;
    last = &first;
    pthread_mutex_unlock(&lock);
    clock_gettime(CLOCK_MONOTONIC, &now);
    paced = after(now, (int64_t)(pace * 1e9));
    if (!describe(work)) {
        batch.count = batch.tensors = 0;
        for (ocomm_tf_work *next; work; work = next) {
            const intptr_t one = (intptr_t)work;
            next = work->next;
            ocomm_tf_finish(&one, 1, RESOURCE_EXHAUSTED, "ocomm: no memory for a batch of collectives");
        }
    }
    return &batch;
}

void ocomm_tf_wake(void) {
    pthread_mutex_lock(&lock);
    woken = 1;
    int wake = waiting;
    pthread_mutex_unlock(&lock);
    if (wake) pthread_cond_signal(&changed);
}

void *ocomm_tf_output(ocomm_tf_work *work, int index, int32_t dtype, const int64_t *shape, int rank, int64_t nbytes) {
    TF_Status *status = TF_NewStatus();
    TF_Tensor *output = TF_AllocateOutput(((execution *)work)->context, index, dtype, shape, rank, (size_t)nbytes, status);
    void *data = NULL;
    if (!TF_GetCode(status)) {
        data = TF_TensorData(output);
        TF_DeleteTensor(output);
    }
    TF_DeleteStatus(status);
    return data;
}

void *ocomm_tf_keep(ocomm_tf_work *work, int index) {
    TF_Status *status = TF_NewStatus();
    TF_Tensor *input = NULL;
    TF_GetInput(((execution *)work)->context, index, &input, status);
    if (TF_GetCode(status)) input = NULL;
    TF_DeleteStatus(status);
    return input;
}

void ocomm_tf_release(void *kept) { TF_DeleteTensor(kept); }

void ocomm_tf_finish(const intptr_t *works, int64_t count, int code, const char *message) {
    for (int64_t i = 0; i < count; i++) {
        execution *e = (execution *)works[i];
        if (code) {
            TF_Status *status = TF_NewStatus();
            TF_SetStatus(status, code, message);
            TF_OpKernelContext_Failure(e->context, status);
            TF_DeleteStatus(status);
        }
        if (e->splits) TF_DeleteTensor(e->splits);
        e->done.invoker(&e->done);
        if (e->done.manager) e->done.manager(&e->done, &e->done, DESTROY);
        free(e);
    }
}

/* Registration */

static void same_shapes(TF_ShapeInferenceContext *context, TF_Status *status) {
    TF_ShapeHandle *shape = TF_NewShapeHandle();
    int count = (int)TF_ShapeInferenceContextNumInputs(context);
    for (int i = 0; i < count && !TF_GetCode(status); i++) {
        TF_ShapeInferenceContextGetInput(context, i, shape, status);
        if (!TF_GetCode(status)) TF_ShapeInferenceContextSetOutput(context, i, shape, status);
    }
    TF_DeleteShapeHandle(shape);
}

static void first_shape(TF_ShapeInferenceContext *context, TF_Status *status) {
    TF_ShapeHandle *shape = TF_NewShapeHandle();
    TF_ShapeInferenceContextGetInput(context, 0, shape, status);
    if (!TF_GetCode(status)) TF_ShapeInferenceContextSetOutput(context, 0, shape, status);
    TF_DeleteShapeHandle(shape);
}

static void unknown_shape(TF_ShapeInferenceContext *context, TF_Status *status) {
    TF_ShapeInferenceContextSetUnknownShape(context, status);
}

static void define(const char *name, const char *const *inputs, const char *const *outputs,
                   void (*shapes)(TF_ShapeInferenceContext *, TF_Status *), TF_Status *status) {
    TF_OpDefinitionBuilder *builder = TF_NewOpDefinitionBuilder(name);
    TF_OpDefinitionBuilderAddAttr(builder, "call: int");
    TF_OpDefinitionBuilderAddAttr(builder, "nbytes: list(int)");
    TF_OpDefinitionBuilderAddAttr(builder, "N: int >= 0 = 0");
    TF_OpDefinitionBuilderAddAttr(builder,
                                  "T: list({uint8, int8, uint16, int16, int32, int64, bool, half, bfloat16, float, double})");
    for (; *inputs; inputs++) TF_OpDefinitionBuilderAddInput(builder, *inputs);
    for (int i = 0; outputs[i]; i++) TF_OpDefinitionBuilderAddOutput(builder, outputs[i]);
    TF_OpDefinitionBuilderSetIsStateful(builder, 1);
    TF_OpDefinitionBuilderSetShapeInferenceFunction(builder, shapes);
    TF_RegisterOpDefinition(builder, status);
}

#define LIST(...) ((const char *const[]){__VA_ARGS__, NULL})

int ocomm_tf_register(const char *library, char *problem, int64_t room) {
    void *handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
    if (!handle) {
        snprintf(problem, (size_t)room, "%s is not loaded", library);
        return -1;
    }
    if (!dlsym(handle, PROOF_OF_CALLBACK)) {
        snprintf(problem, (size_t)room, "this TensorFlow calls asynchronous kernels in another way");
        return -1;
    }
#define RESOLVE(result, name, arguments)                                                                               \
    if (!(*(void **)&name = dlsym(handle, #name))) {                                                                   \
        snprintf(problem, (size_t)room, "this TensorFlow has no %s", #name);                                           \
        return -1;                                                                                                     \
    }
    API(RESOLVE)

    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&changed, &attributes);
    pthread_condattr_destroy(&attributes);

    TF_Status *status = TF_NewStatus();
    define("OcommExchange", LIST("x: T"), LIST("y: T"), same_shapes, status);
    if (!TF_GetCode(status))
        define("OcommGather", LIST("x: T", "splits: int64"), LIST("y: T", "rows: int64"), unknown_shape, status);
    if (!TF_GetCode(status))
        define("OcommCompare", LIST("x: float", "variables: N * resource"), LIST("y: float"), first_shape, status);
    if (!TF_GetCode(status))
        TF_RegisterKernelBuilder(
            "OcommExchange", TF_NewAsyncKernelBuilder("OcommExchange", "CPU", create_exchange, compute, free), status);
    if (!TF_GetCode(status))
        TF_RegisterKernelBuilder(
            "OcommGather", TF_NewAsyncKernelBuilder("OcommGather", "CPU", create_gather, compute, free), status);
    if (!TF_GetCode(status))
        TF_RegisterKernelBuilder(
            "OcommCompare", TF_NewAsyncKernelBuilder("OcommCompare", "CPU", create_compare, compute, free), status);
    int failed = TF_GetCode(status);
    if (failed) snprintf(problem, (size_t)room, "TensorFlow does not take the operations: %s", TF_Message(status));
    TF_DeleteStatus(status);
    return failed ? -1 : 0;
}
