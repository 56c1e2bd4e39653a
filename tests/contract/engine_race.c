/* Two threads on one engine, as in a job: the one runs it, the other submits, opens, waits, abandons and asks. Built with
 * -fsanitize=thread by test_engine_race.py; exits with 0 if every plan came to its end. */
#include "ocomm.h"

#include <pthread.h>
#include <string.h>

static int over;

static void *run(void *engine) {
    while (!__atomic_load_n(&over, __ATOMIC_RELAXED))
        ocomm_engine_run(engine, 1000000);
    return NULL;
}

/* A plan of two segments that copy from one buffer to another. */
typedef struct {
    ocomm_plan plan;
    ocomm_op ops[2];
    ocomm_stage stages[2];
    ocomm_segment segments[2];
    char from[64], to[2][64];
} copying;

static void begin(ocomm_channel *channel, copying *c, int open_segments) {
    memset(&c->plan, 0, sizeof c->plan);
    for (int i = 0; i < 2; i++) {
        c->ops[i] = (ocomm_op){.code = OCOMM_COPY, .a = {{.p = c->from}, {.p = c->to[i]}, {.i = sizeof c->from}}};
        c->stages[i] = (ocomm_stage){i, 1, 0, 0};
        c->segments[i] = (ocomm_segment){i, 1};
    }
    c->plan.ops = c->ops;
    c->plan.stages = c->stages;
    c->plan.segments = c->segments;
    c->plan.segment_count = 2;
    c->plan.open_segments = open_segments;
    ocomm_submit(channel, &c->plan);
}

int main(void) {
    static copying first, second;
    ocomm_engine *engine = ocomm_engine_new(NULL, NULL, 50000, 1000000);
    ocomm_channel *channel = ocomm_channel_new(engine, 0, 1, 2);
    pthread_t thread;
    pthread_create(&thread, NULL, run, engine);
    int failures = 0;
    for (int i = 0; i < 300; i++) {
        begin(channel, &first, i % 3);
        begin(channel, &second, 2);
        uint8_t waiting[1];
        ocomm_channel_waiting(channel, waiting);
        ocomm_engine_busy(engine);
        if (i % 3 < 2)
            ocomm_open(channel, &first.plan, 2, NULL, NULL, 0);
        failures += ocomm_plan_wait(engine, &first.plan, 10000000000) != OCOMM_DONE;
        failures += ocomm_plan_wait(engine, &second.plan, 10000000000) != OCOMM_DONE;
    }
    ocomm_channel *another = ocomm_channel_new(engine, 0, 1, 2);
    begin(another, &first, 0);
    ocomm_channel_abandon(another);
    failures += ocomm_plan_wait(engine, &first.plan, 10000000000) != OCOMM_ABORTED;
    __atomic_store_n(&over, 1, __ATOMIC_RELAXED);
    ocomm_engine_wake(engine);
    pthread_join(thread, NULL);
    ocomm_engine_free(engine);
    return failures;
}
