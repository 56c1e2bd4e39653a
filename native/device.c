/* Work for a CUDA device that the engine queues without Python: copies, kernels and the event at their end.
 *
 * A launch from Python takes some 50 us and the GIL, which the training thread holds most of the time; from here it takes
 * 3. The driver's functions come as pointers, so that building and loading need no CUDA. Every call is made in the
 * device's context, and the calling thread keeps its own. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "ocomm.h"

enum { NOT_READY = 600 };
enum { OF_THIS_THREAD = 1 }; /* CU_STREAM_CAPTURE_MODE_THREAD_LOCAL */

struct ocomm_device {
    ocomm_driver driver;
    pthread_mutex_t lock; /* held while a table is compared and copied, or the driver's event `turn` is in use */
    ocomm_device_calls calls;
};

ocomm_device *ocomm_device_new(const ocomm_driver *driver) {
    ocomm_device *device = calloc(1, sizeof *device);
    if (!device)
        return NULL;
    device->driver = *driver;
    pthread_mutex_init(&device->lock, NULL);
    return device;
}

void ocomm_device_free(ocomm_device *device) {
    pthread_mutex_destroy(&device->lock);
    free(device);
}

ocomm_device_calls ocomm_device_counts(const ocomm_device *device) { return device->calls; }

static int enter(const ocomm_driver *driver) { return ((int (*)(void *))driver->push)(driver->context); }

static void leave(const ocomm_driver *driver) {
    void *own;
    ((int (*)(void **))driver->pop)(&own);
}

/* Returns 1 if an event is over, 0 if not, minus the driver's code if that cannot be told. */
static int is_over(ocomm_device *device, void *event) {
    const ocomm_driver *driver = &device->driver;
    int mode = OF_THIS_THREAD; /* else the graph that another thread may be capturing would be invalid */
    ((int (*)(int *))driver->exchange_mode)(&mode);
    int code = ((int (*)(void *))driver->query)(event);
    ((int (*)(int *))driver->exchange_mode)(&mode);
    __atomic_add_fetch(&device->calls.asks, 1, __ATOMIC_RELAXED);
    return code == NOT_READY ? 0 : code ? -code : 1;
}

static int copy(ocomm_device *device, void *function, int64_t to, int64_t from, int64_t nbytes, void *stream) {
    __atomic_add_fetch(&device->calls.copies, 1, __ATOMIC_RELAXED);
    return ((int (*)(int64_t, int64_t, size_t, void *))function)(to, from, (size_t)nbytes, stream);
}

static int record(const ocomm_driver *driver, void *event, void *stream) {
    return ((int (*)(void *, void *))driver->record)(event, stream);
}

static int launch(ocomm_device *device, void *function, int64_t blocks, int64_t *parameters, int64_t count, void *stream) {
    typedef int (*launch_fn)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                             void **);
    const ocomm_driver *driver = &device->driver;
    void *passed[OCOMM_PARAMETERS];
    for (int64_t i = 0; i < count; i++)
        passed[i] = &parameters[i];
    __atomic_add_fetch(&device->calls.launches, 1, __ATOMIC_RELAXED);
    return ((launch_fn)driver->launch)(function, (unsigned)blocks, 1, 1, (unsigned)driver->threads, 1, 1,
                                       (unsigned)driver->shared_nbytes, stream, passed, NULL);
}

/* Copies a table if it has changed since. Returns 0 when that is queued, 1 if all slots are under way, minus the driver's
 * code on failure. */
static int send_changes(ocomm_device *device, ocomm_mirror *mirror) {
    const ocomm_driver *driver = &device->driver;
    int answer = 0;
    pthread_mutex_lock(&device->lock);
    const int32_t k = mirror->next;
    uint8_t *slot = mirror->slots + mirror->nbytes * k;
    if (!mirror->is_sent || memcmp(mirror->table, mirror->sent, (size_t)mirror->nbytes)) {
        int over = mirror->used[k] ? is_over(device, mirror->events[k]) : 1;
        if (over <= 0)
            answer = over ? over : 1;
        else {
            memcpy(slot, mirror->table, (size_t)mirror->nbytes);
            memcpy(mirror->sent, slot, (size_t)mirror->nbytes);
            mirror->is_sent = mirror->used[k] = 1;
            mirror->next = (k + 1) % OCOMM_MIRROR_SLOTS;
            answer = -copy(device, driver->upload, mirror->copy, (int64_t)(intptr_t)slot, mirror->nbytes, driver->stream);
            if (!answer)
                answer = -record(driver, mirror->events[k], driver->stream);
        }
    }
    pthread_mutex_unlock(&device->lock);
    return answer;
}

int ocomm_mirror_send(ocomm_device *device, ocomm_mirror *mirror) {
    int code = enter(&device->driver);
    if (code)
        return -code;
    int answer = send_changes(device, mirror);
    leave(&device->driver);
    return answer;
}

int ocomm_device_order(ocomm_device *device, void *first, void *second) {
    const ocomm_driver *driver = &device->driver;
    int code = enter(driver);
    if (code)
        return code;
    pthread_mutex_lock(&device->lock);
    code = record(driver, driver->turn, first);
    if (!code) /* for what the event has recorded so far, whatever it records later */
        code = ((int (*)(void *, void *, unsigned))driver->wait)(second, driver->turn, 0);
    pthread_mutex_unlock(&device->lock);
    leave(driver);
    return code;
}

int ocomm_device_launch(ocomm_device *device, void *function, int64_t blocks, int64_t *parameters, int64_t count) {
    int code = enter(&device->driver);
    if (code)
        return code;
    code = launch(device, function, blocks, parameters, count, device->driver.stream);
    leave(&device->driver);
    return code;
}

/* Queues operations from work->next on, and then the event. Returns 0 when all are queued or a table must wait for a slot,
 * else the driver's code. */
static int queue(ocomm_device_work *work) {
    ocomm_device *device = work->device;
    const ocomm_driver *driver = &device->driver;
    void *stream = work->beside ? driver->second : driver->stream;
    for (; work->next < work->count; work->next++) {
        const ocomm_device_op *op = &work->ops[work->next];
        int code = 0, answer;
        switch (op->code) {
        case OCOMM_UPLOAD:
            code = copy(device, driver->upload, op->to, op->from, op->number, stream);
            break;
        case OCOMM_DOWNLOAD:
            code = copy(device, driver->download, op->to, op->from, op->number, stream);
            break;
        case OCOMM_CLEAR:
            code = ((int (*)(int64_t, unsigned char, size_t, void *))driver->clear)(op->to, 0, (size_t)op->number, stream);
            break;
        case OCOMM_MIRROR:
            answer = send_changes(device, (ocomm_mirror *)(intptr_t)op->from);
            if (answer == 1)
                return 0;
            code = -answer;
            break;
        case OCOMM_LAUNCH:
            if (op->noise) {
                const ocomm_noise *noise = op->noise;
                int64_t *counted = op->parameters + op->noise_at;
                counted[0] = (int64_t)(noise->seed & 0xffffffff);
                counted[1] = (int64_t)(noise->seed >> 32);
                counted[2] = noise->step;
                counted[3] = noise->stream;
                counted[4] = noise->steady;
            }
            code = launch(device, (void *)(intptr_t)op->to, op->from, op->parameters, op->number, stream);
        }
        if (code)
            return code;
    }
    work->is_queued = 1;
    int code = record(driver, work->event, stream);
    if (!code && work->beside && !work->awaited) /* what follows on the first stream needs it */
        code = ((int (*)(void *, void *, unsigned))driver->wait)(driver->stream, work->event, 0);
    return code;
}

int ocomm_device_run(void *given, int begin) {
    ocomm_device_work *work = given;
    const ocomm_driver *driver = &work->device->driver;
    int over = 0;
    if (begin)
        work->next = work->is_queued = 0;
    work->error = enter(driver);
    if (work->error)
        return -1;
    if (!work->is_queued)
        work->error = queue(work);
    else if ((over = is_over(work->device, work->event)) < 0)
        work->error = -over;
    leave(driver);
    if (work->error)
        return -1;
    if (work->is_queued && !work->awaited)
        return !begin;
    if (over && *work->status)
        for (int32_t i = 0; i < work->flag_count; i++)
            *work->flags[i] |= OCOMM_NON_FINITE;
    return over;
}
