/* Runs exchange plans (ocomm/collectives/plan.py) without the GIL: computations, nonblocking messages, deadlines.
 *
 * One thread runs ocomm_engine_run; any thread submits and waits. Nothing here blocks inside MPI: a request is tested,
 * with a short spin and then growing sleeps, because a blocking wait busy-polls and starves the training thread. */
#define _GNU_SOURCE
#include "pool.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

#define STAGES_PER_TAG 16
#define TAGS 2048 /* * STAGES_PER_TAG = 32768, the tag range that every MPI has */
#define DISAGREEMENT 0x4f434f44u
#define PASSING_ON_NS 5000000000 /* how long a segment may go on after a disagreement, to tell others about it */
#define LONGEST_SPIN_NS 1000000 /* longest spin while a user's thread waits, whose core is free */
#define TOGETHER_NS 20000 /* messages within this time count as one arrival */
#define LONGEST_PACE_NS 2000000
/* A test of n requests that takes longer than the first and n times the second, and has ended none, has moved bytes. */
#define IDLE_TEST_NS 1000
#define IDLE_REQUEST_NS 10

typedef int (*isend_fn)(const void *, int, intptr_t, int, int, intptr_t, void *);
typedef int (*irecv_fn)(void *, int, intptr_t, int, int, intptr_t, void *);
typedef int (*testsome_fn)(int, void *, int *, int *, void *);
typedef int (*iprobe_fn)(int, int, intptr_t, int *, void *);
typedef int (*get_count_fn)(const void *, intptr_t, int *);

typedef struct {
    ocomm_plan *plan;
    int32_t segment;
    int32_t stage;       /* stage whose messages are posted */
    int32_t begun;       /* its computations have run and its sends are posted */
    int32_t op;          /* index of its next computation */
    int32_t offloaded;   /* that computation has begun, and goes on elsewhere */
    int32_t culprit;     /* 1 + the rank whose header differs, if this rank tells others about it; 0: none */
    int32_t stage_left[STAGES_PER_TAG]; /* messages not yet over, receives of later stages included */
    uint32_t sequence;
    int in_use;
} slot;

struct ocomm_channel {
    ocomm_engine *engine;
    intptr_t communicator;
    int32_t ranks, window;
    uint32_t sequence;
    int abandoned; /* asked for by a user's thread, done by the engine's */
    int failed;
    ocomm_plan *head, *tail; /* plans with segments not yet started or not yet done, oldest first */
    slot *slots;             /* `window` segments in flight */
    int32_t *owed;           /* per rank: messages that the current stages of segments still wait for */
    ocomm_plan *misfit;      /* plan for which a message was too short; NULL: none was */
    int32_t misfit_peer;     /* rank that has sent that message */
    ocomm_channel *next;     /* next in the engine's list */
};

typedef struct {
    ocomm_channel *channel;
    slot *slot;
    int32_t stage, peer, receive, nbytes;
} flight;

typedef struct watch {
    intptr_t communicator;
    struct watch *next;
} watch;

struct ocomm_engine {
    ocomm_mpi mpi;
    int has_mpi;
    ocomm_pool *pool; /* belongs to the caller that made the engine */
    int64_t spin_ns, idle_ns;
    pid_t owner;
    pthread_mutex_t lock;
    pthread_cond_t submitted, finished;
    /* under the lock */
    /* Lists without a limit. Any thread inserts at the front, only the engine's thread removes. So that thread
     * follows them without the lock, from a head that it has read under the lock. */
    ocomm_channel *channels;
    watch *watched;
    int woken, failing, failed;
    int napping; /* 2: until something is submitted, or a while; 1: for a moment, because plans are under way */
    int32_t waiters; /* number of users' threads that wait for a result */
    uint64_t submissions;
    /* engine thread only */
    uint64_t seen_submissions;
    uint8_t *requests; /* MPI_Request[], handle_nbytes each */
    flight *flights;
    int *indices;
    uint8_t *statuses;
    int32_t request_count, request_capacity;
    int64_t last_activity_ns;
    int64_t learned_spin_ns; /* how long spinning has paid off recently while a user's thread waits */
    int64_t pace_ns;  /* recent time between messages */
    int completed, error;
    int offloads; /* since it was last set to 0: 1: some are under way that C asks for, 2: any has begun or ended */
    ocomm_counters counters;
};

static int reserve(ocomm_engine *engine, int32_t more);
static void fail_channel(ocomm_channel *channel, ocomm_plan *culprit, int state, int error);

static void owe(ocomm_channel *channel, int32_t peer, int32_t messages) {
    __atomic_fetch_add(&channel->owed[peer], messages, __ATOMIC_RELAXED);
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static struct timespec until_ns(int64_t ns) {
    int64_t at = now_ns() + ns;
    struct timespec t = {at / 1000000000, at % 1000000000};
    return t;
}

ocomm_engine *ocomm_engine_new(const ocomm_mpi *mpi, ocomm_pool *pool, int64_t spin_ns, int64_t idle_ns) {
    ocomm_engine *engine = calloc(1, sizeof *engine);
    if (!engine)
        return NULL;
    if (mpi) {
        engine->mpi = *mpi;
        engine->has_mpi = 1;
    }
    engine->owner = getpid();
    engine->pool = pool;
    engine->spin_ns = spin_ns;
    engine->idle_ns = idle_ns;
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&engine->lock, NULL);
    pthread_cond_init(&engine->submitted, &monotonic);
    pthread_cond_init(&engine->finished, &monotonic);
    pthread_condattr_destroy(&monotonic);
    engine->last_activity_ns = now_ns();
    engine->learned_spin_ns = LONGEST_SPIN_NS;
    if (mpi && reserve(engine, 64)) {
        ocomm_engine_free(engine);
        return NULL;
    }
    return engine;
}

void ocomm_engine_free(ocomm_engine *engine) {
    if (engine->owner != getpid())
        return; /* a forked child: destroying a condition waits for its waiters, who exist in the parent only */
    for (watch *w = engine->watched, *next; w; w = next) {
        next = w->next;
        free(w);
    }
    free(engine->requests);
    free(engine->flights);
    free(engine->indices);
    free(engine->statuses);
    pthread_mutex_destroy(&engine->lock);
    pthread_cond_destroy(&engine->submitted);
    pthread_cond_destroy(&engine->finished);
    free(engine);
}

int ocomm_engine_watch(ocomm_engine *engine, intptr_t communicator) {
    watch *w = malloc(sizeof *w);
    if (!w)
        return -1;
    w->communicator = communicator;
    pthread_mutex_lock(&engine->lock);
    w->next = engine->watched;
    engine->watched = w;
    pthread_mutex_unlock(&engine->lock);
    return 0;
}

void ocomm_engine_unwatch(ocomm_engine *engine, intptr_t communicator) {
    watch *found = NULL;
    pthread_mutex_lock(&engine->lock);
    for (watch **link = &engine->watched; *link; link = &(*link)->next)
        if ((*link)->communicator == communicator) {
            found = *link;
            *link = found->next;
            break;
        }
    pthread_mutex_unlock(&engine->lock);
    free(found);
}

ocomm_channel *ocomm_channel_new(ocomm_engine *engine, intptr_t communicator, int32_t ranks, int32_t window) {
    ocomm_channel *channel = calloc(1, sizeof *channel);
    if (!channel)
        return NULL;
    channel->engine = engine;
    channel->communicator = communicator;
    channel->ranks = ranks;
    channel->window = window;
    channel->slots = calloc((size_t)window, sizeof(slot));
    channel->owed = calloc((size_t)ranks, sizeof(int32_t));
    if (!channel->slots || !channel->owed) {
        ocomm_channel_free(channel);
        return NULL;
    }
    pthread_mutex_lock(&engine->lock);
    channel->next = engine->channels;
    engine->channels = channel;
    pthread_mutex_unlock(&engine->lock);
    return channel;
}

void ocomm_channel_free(ocomm_channel *channel) {
    free(channel->slots);
    free(channel->owed);
    free(channel);
}

int ocomm_submit(ocomm_channel *channel, ocomm_plan *plan) {
    ocomm_engine *engine = channel->engine;
    plan->opened_ns = now_ns();
    plan->next = NULL;
    pthread_mutex_lock(&engine->lock);
    int state = engine->failed || engine->failing || channel->failed ? OCOMM_ABORTED : OCOMM_QUEUED;
    plan->state = state;
    if (state == OCOMM_QUEUED) {
        if (channel->tail)
            channel->tail->next = plan;
        else
            channel->head = plan;
        channel->tail = plan;
        if (plan->open_segments || !plan->segment_count) { /* else nothing can be done before it is opened */
            engine->submissions++;
            pthread_cond_signal(&engine->submitted);
        }
    }
    pthread_mutex_unlock(&engine->lock);
    return state;
}

void ocomm_open(ocomm_channel *channel, ocomm_plan *plan, int32_t open_segments, const ocomm_inputs *inputs,
                const uint64_t *addresses, int part) {
    ocomm_engine *engine = channel->engine;
    if (inputs) {
        for (int64_t i = 0; i < inputs->count; i++)
            inputs->tensors[inputs->rows[i]].grad = (const float *)(uintptr_t)addresses[i];
        if (part >= -1)
            ocomm_checksums(addresses, inputs->nbytes, inputs->count, part, inputs->sums);
    }
    pthread_mutex_lock(&engine->lock);
    plan->open_segments = open_segments;
    plan->opened_ns = now_ns();
    engine->submissions++;
    int wake = engine->napping == 2;
    pthread_mutex_unlock(&engine->lock);
    if (wake) /* without the lock, which the engine's thread would wait for if both threads share a core */
        pthread_cond_signal(&engine->submitted);
}

void ocomm_engine_wake(ocomm_engine *engine) {
    pthread_mutex_lock(&engine->lock);
    engine->woken = 1;
    pthread_cond_signal(&engine->submitted);
    pthread_mutex_unlock(&engine->lock);
}

void ocomm_engine_expect(ocomm_engine *engine, int32_t waiters, int wake) {
    pthread_mutex_lock(&engine->lock);
    engine->waiters += waiters;
    engine->woken |= wake;
    if (engine->napping && (wake || waiters > 0))
        pthread_cond_signal(&engine->submitted);
    pthread_mutex_unlock(&engine->lock);
}

void ocomm_engine_fail(ocomm_engine *engine) {
    pthread_mutex_lock(&engine->lock);
    engine->failing = 1;
    pthread_cond_signal(&engine->submitted);
    pthread_mutex_unlock(&engine->lock);
}

int ocomm_plan_wait(ocomm_engine *engine, ocomm_plan *plan, int64_t timeout_ns) {
    struct timespec end = until_ns(timeout_ns);
    pthread_mutex_lock(&engine->lock);
    engine->waiters++;
    if (engine->napping)
        pthread_cond_signal(&engine->submitted);
    while (__atomic_load_n(&plan->state, __ATOMIC_ACQUIRE) < OCOMM_DONE && pthread_cond_timedwait(&engine->finished, &engine->lock, &end) != ETIMEDOUT)
        ;
    int state = plan->state;
    engine->waiters--;
    pthread_mutex_unlock(&engine->lock);
    return state;
}

/* Returns 1 unless the channel only waits until its oldest plan is opened further. Called under the lock. */
static int channel_busy(const ocomm_channel *channel) {
    return channel->head && __atomic_load_n(&channel->head->segments_done, __ATOMIC_RELAXED) < channel->head->open_segments;
}

int ocomm_engine_busy(ocomm_engine *engine) {
    int busy = 0;
    pthread_mutex_lock(&engine->lock);
    for (const ocomm_channel *channel = engine->channels; channel; channel = channel->next)
        busy |= channel_busy(channel);
    pthread_mutex_unlock(&engine->lock);
    return busy;
}

void ocomm_channel_abandon(ocomm_channel *channel) {
    pthread_mutex_lock(&channel->engine->lock);
    channel->abandoned = 1;
    channel->engine->submissions++; /* wakes the engine */
    pthread_cond_signal(&channel->engine->submitted);
    pthread_mutex_unlock(&channel->engine->lock);
}

int64_t ocomm_channel_close(ocomm_channel *channel) {
    ocomm_engine *engine = channel->engine;
    int busy = 0;
    for (int32_t i = 0; i < channel->window; i++)
        busy |= channel->slots[i].in_use;
    pthread_mutex_lock(&engine->lock);
    busy |= channel_busy(channel);
    const int64_t segments = channel->failed || channel->abandoned ? -1 : (int64_t)channel->sequence;
    if (segments < 0 || !busy) {
        for (ocomm_channel **link = &engine->channels; *link; link = &(*link)->next)
            if (*link == channel) {
                *link = channel->next;
                break;
            }
        channel->failed = 1; /* later submissions are refused */
    }
    pthread_mutex_unlock(&engine->lock);
    if (segments >= 0 && busy)
        return -2;
    fail_channel(channel, NULL, OCOMM_ABORTED, 0); /* ends plans that wait to be opened further */
    return segments;
}

int ocomm_channel_waiting(ocomm_channel *channel, uint8_t *waiting) {
    pthread_mutex_lock(&channel->engine->lock);
    int busy = channel->head || channel->failed; /* after a failure, what was missing then is reported */
    for (int32_t r = 0; r < channel->ranks; r++)
        waiting[r] = busy && __atomic_load_n(&channel->owed[r], __ATOMIC_RELAXED) > 0;
    pthread_mutex_unlock(&channel->engine->lock);
    return busy;
}

ocomm_counters ocomm_engine_counters(ocomm_engine *engine) {
    pthread_mutex_lock(&engine->lock);
    ocomm_counters counters = engine->counters;
    pthread_mutex_unlock(&engine->lock);
    return counters;
}

/* --- computations ------------------------------------------------------------------------------------------- */

static void write_headers(const ocomm_op *op) {
    ocomm_header header = *(const ocomm_header *)op->a[0].p;
    header.flags |= *(const uint32_t *)op->a[1].p;
    uint8_t *const *messages = op->a[4].p;
    for (int64_t i = 0; i < op->a[5].i; i++) {
        memcpy(messages[i], &header, sizeof header);
        memcpy(messages[i] + sizeof header, op->a[2].p, (size_t)op->a[3].i);
    }
}

/* Returns the first field that should be equal and is not, -1 for none, in the order of wire.COMPARED. */
static int differing(const ocomm_header *a, const ocomm_header *b, uint64_t values[2]) {
    const uint64_t one[] = {a->magic, (uint64_t)a->step, a->signature, a->hyper, a->attempt, a->tensors, a->replica};
    const uint64_t other[] = {b->magic, (uint64_t)b->step, b->signature, b->hyper, b->attempt, b->tensors, b->replica};
    for (int field = 0; field < 7; field++)
        if (one[field] != other[field]) {
            values[0] = one[field];
            values[1] = other[field];
            return field;
        }
    return -1;
}

/* Returns one of `ranks` whose header differs from ours, or -1. */
static int check(const ocomm_op *op, int32_t ranks) {
    const ocomm_header *mine = op->a[0].p;
    const uint8_t *const *messages = op->a[1].p;
    uint32_t *flags = op->a[3].p;
    uint8_t *presence = op->a[4].p;
    ocomm_header *passed_on = op->a[7].p;
    int culprit = -1;
    for (int64_t i = 0; i < op->a[2].i; i++) {
        ocomm_header header;
        uint64_t values[2];
        memcpy(&header, messages[i], sizeof header);
        const int field = differing(mine, &header, values);
        if (field >= 0 && !passed_on)
            return (int)i;
        if (field >= 0) {
            if (passed_on->magic != DISAGREEMENT && header.magic == DISAGREEMENT) {
                *passed_on = header;
            } else if (passed_on->magic != DISAGREEMENT) {
                passed_on->magic = DISAGREEMENT;
                passed_on->gradients = header.rank;
                passed_on->tensors = (uint32_t)field;
                passed_on->signature = values[0];
                passed_on->hyper = values[1];
            }
            /* A header that no rank has written may name any number; then it is this rank, which has seen it. */
            const uint32_t other = passed_on->gradients == mine->rank ? passed_on->rank : passed_on->gradients;
            culprit = (int)(other < (uint32_t)ranks ? other : mine->rank);
            continue;
        }
        *flags |= header.flags;
        for (int64_t b = 0; b < op->a[5].i; b++)
            presence[b] |= messages[i][sizeof header + (size_t)b];
        if (header.announcement) /* only the coordinator makes one, and not in all of its messages */
            *(int64_t *)op->a[6].p = header.announcement;
    }
    return op->a[8].i ? culprit : -1;
}

/* Copies tensors into a buffer, side by side, or out of it. */
static void copy_parts(const ocomm_op *op, int into) {
    uint8_t *const *tensors = op->a[0].p;
    const int64_t *nbytes = op->a[1].p;
    uint8_t *buffer = op->a[3].p;
    for (int64_t i = 0; i < op->a[2].i; buffer += nbytes[i++])
        memcpy(into ? buffer : tensors[i], into ? tensors[i] : buffer, (size_t)nbytes[i]);
}

#include "run_loop.h"

/* Runs a computation. Returns which of `ranks` is at fault when a check fails, else -1. */
static int run_op(ocomm_pool *pool, const ocomm_op *op, int32_t ranks) {
    uint32_t *flags = NULL;
    switch (op->code) {
    case OCOMM_COPY:
        ocomm_copy(pool, op->a[1].p, op->a[0].p, op->a[2].i);
        break;
    case OCOMM_COPY_IN:
    case OCOMM_COPY_OUT:
        copy_parts(op, op->code == OCOMM_COPY_IN);
        break;
    case OCOMM_WRITE_HEADERS:
        write_headers(op);
        break;
    case OCOMM_CHECK_HEADERS:
        return check(op, ranks);
    default:
        if (!run_loop(pool, op, &flags) && flags)
            *flags |= OCOMM_NON_FINITE;
    }
    return -1;
}

/* Checks an offloaded computation: returns 1 when it is over, 0 when not yet, -1 when it has failed. */
static int run_task(ocomm_engine *engine, const ocomm_op *op, int32_t *offloaded) {
    const ocomm_task task = (ocomm_task)(uintptr_t)op->a[0].i;
    void *given = op->a[1].p;
    if (task == ocomm_device_run)
        engine->offloads |= 1;
    if (!*offloaded) {
        *offloaded = 1;
        engine->offloads |= 2;
        if (task(given, 1) < 0)
            return -1;
    }
    int over = task(given, 0);
    if (over) {
        *offloaded = 0;
        engine->offloads |= 2;
    }
    return over;
}

/* --- messages ----------------------------------------------------------------------------------------------- */

static int reserve(ocomm_engine *engine, int32_t more) {
    int32_t need = engine->request_count + more;
    if (need <= engine->request_capacity)
        return 0;
    int32_t capacity = engine->request_capacity ? engine->request_capacity : 64;
    while (capacity < need)
        capacity *= 2;
    void *requests = realloc(engine->requests, (size_t)capacity * (size_t)engine->mpi.handle_nbytes);
    if (requests)
        engine->requests = requests;
    void *flights = realloc(engine->flights, (size_t)capacity * sizeof(flight));
    if (flights)
        engine->flights = flights;
    void *indices = realloc(engine->indices, (size_t)capacity * sizeof(int));
    if (indices)
        engine->indices = indices;
    void *statuses = realloc(engine->statuses, (size_t)capacity * (size_t)engine->mpi.status_nbytes);
    if (statuses)
        engine->statuses = statuses;
    if (!requests || !flights || !indices || !statuses)
        return -1;
    engine->request_capacity = capacity;
    return 0;
}

static int post(ocomm_channel *channel, slot *s, int32_t stage, const ocomm_message *message) {
    ocomm_engine *engine = channel->engine;
    void *request = engine->requests + (size_t)engine->request_count * (size_t)engine->mpi.handle_nbytes;
    int tag = (int)(s->sequence % TAGS) * STAGES_PER_TAG + stage;
    int error;
    if (message->nbytes < 0 || message->nbytes > INT_MAX)
        return -1; /* more than MPI can count; such plans are refused when they are prepared */
    if (message->receive)
        error = ((irecv_fn)engine->mpi.irecv)((void *)(intptr_t)message->address, (int)message->nbytes,
                                              engine->mpi.byte_type, message->peer, tag, channel->communicator, request);
    else
        error = ((isend_fn)engine->mpi.isend)((const void *)(intptr_t)message->address, (int)message->nbytes,
                                              engine->mpi.byte_type, message->peer, tag, channel->communicator, request);
    if (error)
        return error;
    flight *f = &engine->flights[engine->request_count++];
    f->channel = channel;
    f->slot = s;
    f->stage = stage;
    f->peer = message->peer;
    f->receive = message->receive;
    f->nbytes = (int32_t)message->nbytes;
    s->stage_left[stage]++;
    if (!message->receive) {
        engine->counters.bytes_sent += message->nbytes;
        engine->counters.messages_sent++;
    } else if (stage == s->stage)
        owe(channel, message->peer, 1);
    return 0;
}

static int post_messages(ocomm_channel *channel, slot *s, int32_t stage, int receive) {
    const ocomm_plan *plan = s->plan;
    const ocomm_stage *st = &plan->stages[plan->segments[s->segment].first_stage + stage];
    if (st->messages && reserve(channel->engine, st->messages))
        return -1;
    for (int32_t i = 0; i < st->messages; i++) {
        const ocomm_message *message = &plan->messages[st->first_message + i];
        if (message->receive == receive) {
            int error = post(channel, s, stage, message);
            if (error)
                return error;
        }
    }
    return 0;
}

/* --- segments and plans ------------------------------------------------------------------------------------- */

static void finish(ocomm_engine *engine, ocomm_plan *plan, int state, int error) {
    plan->error = error;
    pthread_mutex_lock(&engine->lock);
    engine->counters.plans++;
    if (plan->notify)
        engine->completed = 1;
    __atomic_store_n(&plan->state, state, __ATOMIC_RELEASE); /* from here on its owner may free it */
    pthread_cond_broadcast(&engine->finished);
    pthread_mutex_unlock(&engine->lock);
}

/* Enters the segment's next stage: its messages that have not arrived are owed from now on. */
static void enter_next_stage(ocomm_channel *channel, slot *s) {
    ocomm_engine *engine = channel->engine;
    s->begun = 0;
    s->op = 0;
    if (s->plan->trace)
        s->plan->trace[3 * (s->plan->segments[s->segment].first_stage + s->stage) + 2] = now_ns();
    s->stage++;
    for (int32_t i = 0; i < engine->request_count; i++) {
        const flight *f = &engine->flights[i];
        if (f->slot == s && f->stage == s->stage && f->receive)
            owe(channel, f->peer, 1);
    }
}

/* Ends every plan of the channel: the one at fault with `state`, the others as aborted. MPI keeps its requests, and the
 * owner of the plans keeps their buffers. */
static void fail_channel(ocomm_channel *channel, ocomm_plan *culprit, int state, int error) {
    ocomm_engine *engine = channel->engine;
    pthread_mutex_lock(&engine->lock);
    channel->failed = 1;
    ocomm_plan *plan = channel->head;
    channel->head = channel->tail = NULL;
    pthread_mutex_unlock(&engine->lock);
    int32_t kept = 0;
    for (int32_t i = 0; i < engine->request_count; i++)
        if (engine->flights[i].channel != channel) {
            if (kept != i) {
                engine->flights[kept] = engine->flights[i];
                memcpy(engine->requests + (size_t)kept * (size_t)engine->mpi.handle_nbytes,
                       engine->requests + (size_t)i * (size_t)engine->mpi.handle_nbytes,
                       (size_t)engine->mpi.handle_nbytes);
            }
            kept++;
        }
    engine->request_count = kept;
    for (int32_t i = 0; i < channel->window; i++)
        channel->slots[i].in_use = 0;
    while (plan) {
        ocomm_plan *next = plan->next;
        if (plan->state < OCOMM_DONE)
            finish(engine, plan, plan == culprit ? state : OCOMM_ABORTED, plan == culprit ? error : 0);
        plan = next;
    }
}

/* Runs the computations of stages and posts their sends until one has messages to wait for. Returns 1 when the segment
 * is over, 0 when it waits, -1 when the channel failed. */
static int advance(ocomm_channel *channel, slot *s) {
    ocomm_engine *engine = channel->engine;
    ocomm_plan *plan = s->plan;
    const ocomm_segment *segment = &plan->segments[s->segment];
    while (s->stage < segment->stages) {
        if (!s->begun) {
            const ocomm_stage *st = &plan->stages[segment->first_stage + s->stage];
            int64_t *times = plan->trace ? &plan->trace[3 * (segment->first_stage + s->stage)] : NULL;
            int64_t begin = now_ns();
            if (times && s->op == 0 && !s->offloaded)
                times[0] = begin;
            for (; s->op < st->ops; s->op++) {
                const ocomm_op *op = &plan->ops[st->first_op + s->op];
                if (op->code == OCOMM_OFFLOAD) {
                    int over = run_task(engine, op, &s->offloaded);
                    if (over < 0) {
                        fail_channel(channel, plan, OCOMM_TASK_ERROR, 0);
                        return -1;
                    }
                    if (!over)
                        return 0;
                    continue;
                }
                int culprit = run_op(engine->pool, op, channel->ranks);
                if (culprit < 0)
                    continue;
                if (!op->a[7].p) { /* all ranks see it themselves */
                    plan->error_segment = s->segment;
                    fail_channel(channel, plan, OCOMM_MISMATCH, culprit);
                    return -1;
                }
                s->culprit = culprit + 1;
                if (!plan->culprit) {
                    plan->culprit = s->culprit;
                    plan->error_segment = s->segment;
                    plan->disagreed_ns = now_ns();
                }
            }
            engine->counters.compute_ns += now_ns() - begin;
            int error = post_messages(channel, s, s->stage, 0);
            if (error) {
                fail_channel(channel, plan, OCOMM_MPI_ERROR, error);
                return -1;
            }
            s->begun = 1;
            if (times)
                times[1] = now_ns();
        }
        if (s->stage_left[s->stage] > 0)
            return 0;
        enter_next_stage(channel, s);
    }
    return 1;
}

/* Ends every plan of every channel; later submissions are refused. With MPI_ERROR the oldest plan of each is blamed. */
static void fail_all(ocomm_engine *engine, int state, int error) {
    pthread_mutex_lock(&engine->lock);
    engine->failed = 1; /* before the channels are counted, so that opening one is refused from now on */
    ocomm_channel *channels = engine->channels;
    pthread_mutex_unlock(&engine->lock);
    for (ocomm_channel *channel = channels; channel; channel = channel->next) {
        pthread_mutex_lock(&engine->lock);
        ocomm_plan *oldest = channel->head;
        pthread_mutex_unlock(&engine->lock);
        fail_channel(channel, state == OCOMM_ABORTED ? NULL : oldest, state, error);
    }
}

/* Ends the channel if a segment in which ranks disagree, and all segments before it, are over. A rank that fails
 * here has sent everything that others need to come as far. */
static int conclude(ocomm_channel *channel) {
    const slot *first = NULL;
    for (int32_t i = 0; i < channel->window; i++) {
        const slot *s = &channel->slots[i];
        if (s->in_use && (!first || (int32_t)(s->sequence - first->sequence) < 0))
            first = s;
    }
    if (!first || !first->culprit || first->stage < first->plan->segments[first->segment].stages)
        return 0;
    first->plan->error_segment = first->segment;
    fail_channel(channel, first->plan, OCOMM_MISMATCH, first->culprit - 1);
    return 1;
}

static int retire(ocomm_channel *channel, slot *s) {
    if (s->culprit)
        return 0; /* conclude() ends it */
    ocomm_plan *plan = s->plan;
    s->in_use = 0;
    int32_t past = plan->segments_started;
    for (int32_t i = 0; i < channel->window; i++)
        if (channel->slots[i].in_use && channel->slots[i].plan == plan && channel->slots[i].segment < past)
            past = channel->slots[i].segment;
    /* from here on the memory that these segments have read may be used for other things */
    __atomic_store_n(&plan->segments_past, past, __ATOMIC_RELEASE);
    if (__atomic_add_fetch(&plan->segments_done, 1, __ATOMIC_RELAXED) < plan->segment_count)
        return 0;
    pthread_mutex_lock(&channel->engine->lock);
    /* segments of a later plan may end first, so the plan need not be the head */
    ocomm_plan **link = &channel->head, *before = NULL;
    while (*link && *link != plan) {
        before = *link;
        link = &(*link)->next;
    }
    if (*link) {
        *link = plan->next;
        if (channel->tail == plan)
            channel->tail = before;
    }
    pthread_mutex_unlock(&channel->engine->lock);
    finish(channel->engine, plan, OCOMM_DONE, 0);
    return 1;
}

/* Returns 1 if a segment that is under way uses the memory of the plan's next one. */
static int is_lane_taken(const ocomm_channel *channel, const ocomm_plan *plan) {
    for (int32_t i = 0; i < channel->window && plan->lanes; i++) {
        const slot *s = &channel->slots[i];
        if (s->in_use && s->plan == plan && s->segment <= plan->segments_started - plan->lanes)
            return 1;
    }
    return 0;
}

/* Starts segments while the window has room; returns what moved. */
static int fill_window(ocomm_channel *channel) {
    int moved = 0;
    for (int32_t i = 0; i < channel->window; i++) {
        slot *s = &channel->slots[i];
        if (s->in_use)
            continue;
        pthread_mutex_lock(&channel->engine->lock);
        ocomm_plan *plan = channel->head;
        while (plan && plan->segments_started == plan->segment_count)
            plan = plan->next;
        int closed = plan && plan->segments_started >= plan->open_segments; /* later plans wait, too */
        pthread_mutex_unlock(&channel->engine->lock);
        if (!plan || closed || is_lane_taken(channel, plan))
            break;
        memset(s, 0, sizeof *s);
        s->in_use = 1;
        s->plan = plan;
        s->segment = plan->segments_started++;
        s->sequence = channel->sequence++;
        if (s->segment == 0)
            __atomic_store_n(&plan->state, OCOMM_ACTIVE, __ATOMIC_RELAXED);
        moved = 1;
        int error = 0;
        /* receives of all stages first: a peer may be a stage ahead, and its message then needs no copy */
        for (int32_t stage = 0; stage < plan->segments[s->segment].stages && !error; stage++)
            error = post_messages(channel, s, stage, 1);
        if (error) {
            fail_channel(channel, plan, OCOMM_MPI_ERROR, error);
            return 1;
        }
        int state = advance(channel, s);
        if (state < 0)
            return 1;
        if (state > 0) {
            retire(channel, s);
            i = -1; /* a slot became free: look again from the start */
        }
    }
    return moved;
}

/* Returns 1 if the i-th message that MPI has reported has the expected length. MPI reports a longer one as an error,
 * but not a shorter one. */
static int is_whole(ocomm_engine *engine, const flight *f, int i) {
    if (!f->receive)
        return 1;
    int count = f->nbytes;
    const void *status = engine->statuses + (size_t)i * (size_t)engine->mpi.status_nbytes;
    int error = ((get_count_fn)engine->mpi.get_count)(status, engine->mpi.byte_type, &count);
    if (error)
        engine->error = error; /* not the sender's fault */
    return error || count == f->nbytes;
}

/* What a test of all requests has found, or done. */
typedef enum {
    NOTHING,
    MESSAGES, /* some are over */
    PIECES,   /* none is over, but the next test will move more of them */
    MPI_FAILED,
} progress;

static progress poll_requests(ocomm_engine *engine) {
    if (!engine->request_count)
        return NOTHING;
    int done = 0;
    int64_t begin = now_ns();
    int error = ((testsome_fn)engine->mpi.testsome)(engine->request_count, engine->requests, &done, engine->indices,
                                                    engine->statuses);
    const int64_t took = now_ns() - begin;
    engine->counters.network_ns += took;
    if (error) {
        engine->error = error;
        return MPI_FAILED;
    }
    if (done == engine->mpi.undefined || done <= 0) {
        const int64_t idle_ns = IDLE_TEST_NS + IDLE_REQUEST_NS * engine->request_count;
        return engine->mpi.tests_move_little && took > idle_ns ? PIECES : NOTHING;
    }
    /* first count what has arrived, then close the gaps from the end, then continue segments (which posts more) */
    for (int i = 0; i < done; i++) {
        flight *f = &engine->flights[engine->indices[i]];
        f->slot->stage_left[f->stage]--;
        if (f->receive && f->stage == f->slot->stage)
            owe(f->channel, f->peer, -1);
        if (!is_whole(engine, f, i)) {
            f->channel->misfit = f->slot->plan; /* ends the channel before any segment goes on */
            f->channel->misfit_peer = f->peer;
        }
        f->peer = -1;
    }
    int32_t kept = 0;
    for (int32_t i = 0; i < engine->request_count; i++)
        if (engine->flights[i].peer >= 0) {
            if (kept != i) {
                engine->flights[kept] = engine->flights[i];
                memcpy(engine->requests + (size_t)kept * (size_t)engine->mpi.handle_nbytes,
                       engine->requests + (size_t)i * (size_t)engine->mpi.handle_nbytes,
                       (size_t)engine->mpi.handle_nbytes);
            }
            kept++;
        }
    engine->request_count = kept;
    return engine->error ? MPI_FAILED : MESSAGES;
}

static int step_channel(ocomm_channel *channel) {
    int moved = 0;
    for (int32_t i = 0; i < channel->window; i++) {
        slot *s = &channel->slots[i];
        if (!s->in_use || s->stage >= s->plan->segments[s->segment].stages)
            continue;
        if (s->begun && s->stage_left[s->stage] > 0)
            continue;
        int state = advance(channel, s);
        if (state < 0)
            return 1;
        if (state > 0) {
            retire(channel, s);
            moved = 1;
        }
    }
    moved |= conclude(channel);
    return fill_window(channel) | moved;
}

static void expire(ocomm_channel *channel, int64_t now) {
    pthread_mutex_lock(&channel->engine->lock);
    ocomm_plan *plan = channel->head, *disputed = NULL;
    /* a plan that only waits for ocomm_open waits for no other rank */
    while (plan && !(plan->timeout_ns > 0 && plan->segments_done < plan->open_segments &&
                     now - plan->opened_ns > plan->timeout_ns)) {
        if (plan->culprit && now - plan->disagreed_ns > PASSING_ON_NS)
            disputed = plan;
        plan = plan->next;
    }
    pthread_mutex_unlock(&channel->engine->lock);
    if (disputed)
        fail_channel(channel, disputed, OCOMM_MISMATCH, disputed->culprit - 1);
    else if (plan)
        fail_channel(channel, plan, OCOMM_TIMED_OUT, 0);
}

/* Called when something arrives after a wait: makes the next spin longer if this one was too short, shorter if it
 * was in vain. */
static void learn_from(ocomm_engine *engine, int64_t waited_ns, int spun) {
    const int64_t spins = engine->learned_spin_ns, least = LONGEST_SPIN_NS / 32;
    if (waited_ns > TOGETHER_NS)
        engine->pace_ns += ((waited_ns < LONGEST_PACE_NS ? waited_ns : LONGEST_PACE_NS) - engine->pace_ns) / 4;
    if (!spun)
        return;
    if (waited_ns > LONGEST_SPIN_NS)
        engine->learned_spin_ns = spins > least ? spins / 2 : 0;
    else if (waited_ns > spins)
        engine->learned_spin_ns = spins < least ? least : spins > LONGEST_SPIN_NS / 2 ? LONGEST_SPIN_NS : 2 * spins;
}

/* Serves the plans of all channels. Returns 1 if a segment has moved, and sets *busy to 1 if a plan is under way. */
static int serve(ocomm_channel *channels, int *busy) {
    int moved = 0;
    for (ocomm_channel *channel = channels; channel && !channel->engine->failed; channel = channel->next) {
        pthread_mutex_t *lock = &channel->engine->lock;
        pthread_mutex_lock(lock);
        const int abandoned = channel->abandoned, idle = !channel->head;
        pthread_mutex_unlock(lock);
        if (channel->misfit && !channel->failed)
            fail_channel(channel, channel->misfit, OCOMM_WRONG_SIZE, channel->misfit_peer);
        else if (abandoned && !channel->failed)
            fail_channel(channel, NULL, OCOMM_ABORTED, 0);
        if (idle || channel->failed)
            continue;
        moved |= step_channel(channel);
        pthread_mutex_lock(lock);
        *busy |= channel_busy(channel);
        pthread_mutex_unlock(lock);
    }
    return moved;
}

/* Returns OCOMM_CONTROL if a message has arrived on a watched communicator, OCOMM_FAILED if MPI has failed, or both. */
static int look_for_control(const ocomm_engine *engine, const watch *watched) {
    int reason = 0;
    for (; watched; watched = watched->next) {
        int flag = 0;
        if (((iprobe_fn)engine->mpi.iprobe)(engine->mpi.any_source, 0, watched->communicator, &flag, engine->statuses))
            reason |= OCOMM_FAILED;
        else if (flag)
            reason |= OCOMM_CONTROL;
    }
    return reason;
}

/* Returns for how long to sleep when nothing has moved for `quiet` ns: 0 for not at all, -1 to let other processes run
 * first. A user's thread that does not wait uses the core for something else, so only one that waits is worth a spin. */
static int64_t nap_ns(const ocomm_engine *engine, int64_t quiet, int waited_for, int busy) {
    /* A device is not a network: how long it takes is not learned from messages, and to ask it costs a microsecond. */
    if (engine->offloads & 1)
        return waited_for && quiet < engine->spin_ns ? 0 : waited_for ? 20000 : 100000;
    const int64_t learned = engine->learned_spin_ns, spin = engine->spin_ns < learned ? engine->spin_ns : learned;
    if (waited_for && quiet < spin)
        return 0;
    if (waited_for && quiet < learned)
        return -1; /* if ranks share a core, the awaited rank may need it */
    const int64_t due = engine->pace_ns / (waited_for ? 10 : 3); /* messages that are not due soon are tested rarely */
    const int64_t longest = !busy ? engine->idle_ns : waited_for ? 300000 : 1000000;
    int64_t nap = quiet / 4 < due ? due : quiet / 4;
    return nap < 20000 ? 20000 : nap > longest ? longest : nap;
}

/* Sleeps until something is submitted or `nap` ns are over. `waiters` is how many threads were seen to wait. */
static void sleep_for(ocomm_engine *engine, int64_t nap, int32_t waiters, int busy) {
    struct timespec wake = until_ns(nap);
    pthread_mutex_lock(&engine->lock);
    engine->counters.sleeps++;
    engine->napping = busy ? 1 : 2;
    if (!engine->woken && !engine->failing && engine->submissions == engine->seen_submissions)
        pthread_cond_timedwait(&engine->submitted, &engine->lock, &wake);
    engine->napping = 0;
    if (engine->waiters > waiters)
        engine->last_activity_ns = now_ns(); /* a thread has begun to wait, so poll quickly again */
    pthread_mutex_unlock(&engine->lock);
}

int ocomm_engine_run(ocomm_engine *engine, int64_t max_ns) {
    int64_t end = now_ns() + max_ns, last_expiry = 0, no_nap_before = 0;
#ifdef __linux__
    static __thread int sharp;
    if (!sharp)
        prctl(PR_SET_TIMERSLACK, 1000); /* the default, 50 us, would more than double the short sleeps */
    sharp = 1;
#endif
    for (;;) {
        int reason = 0, busy = 0, moved = 0, came = 0, moves_on = 0;
        pthread_mutex_lock(&engine->lock);
        if (engine->woken) {
            engine->woken = 0;
            reason |= OCOMM_WOKEN;
        }
        if (engine->submissions != engine->seen_submissions) {
            engine->seen_submissions = engine->submissions;
            moved = 1;
        }
        const int failing = engine->failing;
        ocomm_channel *channels = engine->channels;
        const watch *watched = engine->watched;
        const int32_t waiters = engine->waiters;
        engine->counters.polls++;
        pthread_mutex_unlock(&engine->lock);

        if (failing && !engine->failed)
            fail_all(engine, OCOMM_ABORTED, 0);
        int64_t now = now_ns();
        if (!engine->failed) {
            const progress polled = poll_requests(engine);
            if (polled == MPI_FAILED) {
                fail_all(engine, OCOMM_MPI_ERROR, engine->error);
                reason |= OCOMM_FAILED;
            }
            came = polled == MESSAGES;
            moves_on = polled == PIECES;
            engine->offloads = 0;
            moved |= came | serve(channels, &busy) | (engine->offloads & 2);
            if (busy && now - last_expiry > 10000000) {
                last_expiry = now;
                for (ocomm_channel *channel = channels; channel; channel = channel->next)
                    expire(channel, now);
            }
        }
        reason |= look_for_control(engine, watched);
        if (engine->completed) {
            engine->completed = 0;
            reason |= OCOMM_COMPLETED;
        }
        if (came || (waiters && reason & OCOMM_CONTROL))
            learn_from(engine, now - engine->last_activity_ns, waiters > 0);
        now = now_ns();
        if (moved || reason)
            engine->last_activity_ns = now;
        if (reason)
            return reason;
        if (now >= end)
            return 0;
        if (moved || (moves_on && now < no_nap_before))
            continue;
        int64_t nap = nap_ns(engine, now - engine->last_activity_ns, waiters > 0, busy);
        if (nap > 0) {
            sleep_for(engine, nap > end - now ? end - now : nap, waiters, busy);
            no_nap_before = now_ns() + nap; /* so that tests, should each take long, have half of a core at most */
        } else if (nap < 0)
            sched_yield();
    }
}
