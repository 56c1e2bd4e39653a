/* Fuzzes what the engine makes of headers and lengths that other ranks send.
 *
 * One rank runs a plan over an MPI that is played here: workers' messages come, are compared and added up, owners'
 * messages come and are compared, as in an optimizer's step. Every message is what a rank would send, until the input
 * says how it differs. So the empty input is an exchange without a fault. Memory is of the exact size, for
 * AddressSanitizer. What is checked: the plan ends; it ends well only if no header differs in a field that all ranks
 * compare; and the rank and segment that it blames exist.
 */
#include "input.h"
#include "ocomm.h"

#include <stdlib.h>
#include <string.h>

#define MOST_RANKS 4
#define SEGMENTS 2
#define PRESENCE 8
#define PAYLOAD 64
#define NBYTES (sizeof(ocomm_header) + PRESENCE + PAYLOAD)
#define MAGIC 0x4f434f4du
#define DISAGREEMENT 0x4f434f44u
enum { AT_ONCE, PASS_ON, GO_ON };
enum { FLOAT32 = 8, SUM = 1 }; /* of reduce.c */

/* The exchange, and what has been done to it. */
static int ranks, me, mode, differs, is_short, has_failed;
static uint32_t heard_flags;

typedef struct {
    ocomm_header header, passed_on;
    uint8_t presence[PRESENCE], heard[PRESENCE];
    uint32_t flags, node_flags;
    int64_t announcement;
    uint8_t *rows[MOST_RANKS], *results[MOST_RANKS], *payloads[MOST_RANKS], *whole;
} exchange;
static exchange exchanges[SEGMENTS];

typedef struct {
    uint8_t *buffer;
    int nbytes, peer, is_receive;
} request;
static request requests[4 * SEGMENTS * MOST_RANKS];
static int64_t made;

static int post(void *buffer, int nbytes, int peer, int is_receive, void *out) {
    CHECK(made < (int64_t)(sizeof requests / sizeof *requests));
    requests[made++] = (request){buffer, nbytes, peer, is_receive};
    memcpy(out, &made, sizeof made);
    return 0;
}

static int isend(const void *buffer, int nbytes, intptr_t type, int peer, int tag, intptr_t on, void *out) {
    (void)type, (void)tag, (void)on;
    return post((void *)(uintptr_t)buffer, nbytes, peer, 0, out);
}

static int irecv(void *buffer, int nbytes, intptr_t type, int peer, int tag, intptr_t on, void *out) {
    (void)type, (void)tag, (void)on;
    return post(buffer, nbytes, peer, 1, out);
}

static const exchange *exchange_of(const uint8_t *buffer, int peer) {
    for (int k = 0; k < SEGMENTS; k++)
        if (buffer == exchanges[k].rows[peer] || buffer == exchanges[k].results[peer]) return &exchanges[k];
    CHECK(!"a message of no segment");
    return NULL;
}

static int is_alike(const ocomm_header *a, const ocomm_header *b) {
    return a->magic == b->magic && a->step == b->step && a->signature == b->signature && a->hyper == b->hyper &&
           a->attempt == b->attempt && a->tensors == b->tensors && a->replica == b->replica;
}

/* Fills a buffer as the input says, and returns how many bytes have come. */
static int arrive(const request *r) {
    const exchange *x = exchange_of(r->buffer, r->peer);
    ocomm_header header = x->header;
    header.rank = (uint32_t)r->peer;
    int nbytes = r->nbytes;
    memset(r->buffer, 0, (size_t)r->nbytes);
    memcpy(r->buffer, &header, sizeof header);
    switch (next_byte() % 6) {
    case 1:
        nbytes -= 1 + next_byte() % r->nbytes;
        is_short = 1;
        break;
    case 2:
        for (int left = 1 + next_byte() % 4; left; left--) r->buffer[next_byte() % r->nbytes] ^= next_byte();
        break;
    case 3:
        header = (ocomm_header){.magic = DISAGREEMENT};
        header.rank = next_word(), header.gradients = next_word(), header.tensors = next_word();
        memcpy(r->buffer, &header, sizeof header);
        break;
    case 4:
        header.rank = next_word(), header.hyper = next_byte(), header.flags = next_word();
        memcpy(r->buffer, &header, sizeof header);
        break;
    case 5:
        for (int k = 0; k < r->nbytes; k++) r->buffer[k] = next_byte();
        break;
    }
    memcpy(&header, r->buffer, sizeof header);
    if (is_alike(&header, &x->header)) heard_flags |= header.flags;
    else differs = 1;
    return nbytes;
}

static int testsome(int count, void *of, int *done, int *indices, void *statuses) {
    int64_t *handles = of;
    const int first = next_byte(), most = 1 + next_byte() % count;
    *done = 0;
    for (int k = 0; k < count && *done < most; k++) {
        const int i = (first + k) % count;
        const request *r = &requests[handles[i] - 1];
        const int nbytes = r->is_receive ? arrive(r) : r->nbytes;
        memcpy((uint8_t *)statuses + sizeof(int) * (size_t)*done, &nbytes, sizeof nbytes);
        indices[(*done)++] = i;
    }
    /* MPI's indices ascend. */
    for (int i = 0; i < *done; i++)
        for (int k = i + 1; k < *done; k++)
            if (indices[k] < indices[i]) {
                int *status = statuses, index = indices[i], nbytes = status[i];
                indices[i] = indices[k], indices[k] = index, status[i] = status[k], status[k] = nbytes;
            }
    has_failed |= next_byte() == 255;
    return has_failed ? 17 : 0;
}

static int get_count(const void *status, intptr_t type, int *count) {
    (void)type;
    memcpy(count, status, sizeof *count);
    return 0;
}

/* A segment's operations, messages and stages. */
typedef struct {
    ocomm_op ops[5];
    ocomm_message messages[4 * MOST_RANKS];
    int op_count, message_count;
} segment;

static void add_messages(segment *s, uint8_t *const *buffers) {
    for (int peer = 0; peer < ranks; peer++)
        for (int receive = 0; receive < 2 && peer != me; receive++)
            s->messages[s->message_count++] =
                (ocomm_message){(int64_t)(uintptr_t)buffers[receive ? peer : me], NBYTES, peer, receive};
}

static void add_check(segment *s, exchange *x, uint8_t **messages) {
    s->ops[s->op_count++] = (ocomm_op){
        .code = OCOMM_CHECK_HEADERS,
        .a = {{.p = &x->header}, {.p = messages}, {.i = ranks}, {.p = &x->node_flags}, {.p = x->heard}, {.i = PRESENCE},
              {.p = &x->announcement}, {.p = mode == AT_ONCE ? NULL : &x->passed_on}, {.i = mode != GO_ON}}};
}

static void add_write(segment *s, ocomm_header *header, uint32_t *flags, uint8_t *presence, uint8_t **to) {
    s->ops[s->op_count++] = (ocomm_op){
        .code = OCOMM_WRITE_HEADERS,
        .a = {{.p = header}, {.p = flags}, {.p = presence}, {.i = PRESENCE}, {.p = to}, {.i = 1}}};
}

static uint8_t *memory(size_t nbytes) {
    uint8_t *found = calloc(1, nbytes);
    CHECK(found);
    return found;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    begin_input(data, size);
    static segment segments[SEGMENTS];
    static ocomm_segment table[SEGMENTS];
    static ocomm_stage stages[3 * SEGMENTS];
    static ocomm_op ops[5 * SEGMENTS];
    static ocomm_message messages[4 * MOST_RANKS * SEGMENTS];
    memset(segments, 0, sizeof segments);
    memset(exchanges, 0, sizeof exchanges);
    made = differs = is_short = has_failed = heard_flags = 0;
    ranks = 2 + next_byte() % (MOST_RANKS - 1);
    me = next_byte() % ranks;
    mode = next_byte() % 3;
    const int window = 1 + next_byte() % SEGMENTS;
    int op_count = 0, message_count = 0;
    for (int k = 0; k < SEGMENTS; k++) {
        exchange *x = &exchanges[k];
        x->header = (ocomm_header){.magic = MAGIC, .rank = (uint32_t)me, .step = 7, .signature = 0x1234567890u + (uint64_t)k,
                                   .hyper = 99, .tensors = 3};
        x->passed_on = x->header;
        x->presence[0] = 5;
        x->whole = memory(PAYLOAD);
        for (int r = 0; r < ranks; r++) {
            x->rows[r] = memory(NBYTES), x->results[r] = memory(NBYTES);
            x->payloads[r] = x->rows[r] + sizeof(ocomm_header) + PRESENCE;
        }
        segment *s = &segments[k];
        int from_op[4] = {0}, from_message[4] = {0};
        add_write(s, &x->header, &x->flags, x->presence, &x->rows[me]);
        add_messages(s, x->rows);
        from_op[1] = s->op_count, from_message[1] = s->message_count;
        add_check(s, x, x->rows);
        s->ops[s->op_count++] = (ocomm_op){
            .code = OCOMM_REDUCE,
            .a = {{.i = FLOAT32}, {.i = SUM}, {.p = x->payloads}, {.i = ranks}, {.d = 1.0}, {.d = 1.0}, {.p = x->whole},
                  {.i = PAYLOAD}}};
        add_write(s, mode == AT_ONCE ? &x->header : &x->passed_on, &x->node_flags, x->heard, &x->results[me]);
        add_messages(s, x->results);
        from_op[2] = s->op_count, from_message[2] = from_message[3] = s->message_count;
        add_check(s, x, x->results);
        from_op[3] = s->op_count;
        table[k] = (ocomm_segment){3 * k, 3};
        for (int stage = 0; stage < 3; stage++)
            stages[3 * k + stage] = (ocomm_stage){op_count + from_op[stage], from_op[stage + 1] - from_op[stage],
                                                  message_count + from_message[stage],
                                                  from_message[stage + 1] - from_message[stage]};
        memcpy(ops + op_count, s->ops, (size_t)s->op_count * sizeof *ops);
        memcpy(messages + message_count, s->messages, (size_t)s->message_count * sizeof *messages);
        op_count += s->op_count, message_count += s->message_count;
    }
    const ocomm_mpi mpi = {(void *)isend, (void *)irecv, (void *)testsome, NULL, (void *)get_count, 0, sizeof(int64_t),
                           sizeof(int), -1, -1};
    ocomm_engine *engine = ocomm_engine_new(&mpi, NULL, 0, 1000000);
    CHECK(engine);
    ocomm_channel *channel = ocomm_channel_new(engine, 1, ranks, window);
    CHECK(channel);
    ocomm_plan plan = {.ops = ops, .messages = messages, .stages = stages, .segments = table, .segment_count = SEGMENTS,
                       .open_segments = SEGMENTS};
    CHECK(ocomm_submit(channel, &plan) == OCOMM_QUEUED);
    for (int turn = 0; turn < 1000 && plan.state < OCOMM_DONE; turn++) ocomm_engine_run(engine, 0);

    const int is_harmed = (differs && mode != GO_ON) || is_short || has_failed;
    CHECK(plan.state >= OCOMM_DONE);
    CHECK((plan.state == OCOMM_DONE) == !is_harmed);
    if (plan.state == OCOMM_MISMATCH) CHECK(differs && plan.error >= 0 && plan.error < ranks);
    if (plan.state == OCOMM_WRONG_SIZE) CHECK(is_short && plan.error >= 0 && plan.error < ranks && plan.error != me);
    if (plan.state == OCOMM_MPI_ERROR) CHECK(has_failed);
    CHECK(plan.error_segment >= 0 && plan.error_segment < SEGMENTS);
    if (plan.state == OCOMM_DONE) {
        uint32_t flags = 0;
        int has_disagreement = 0;
        for (int k = 0; k < SEGMENTS; k++) {
            flags |= exchanges[k].node_flags;
            has_disagreement |= exchanges[k].passed_on.magic == DISAGREEMENT;
        }
        CHECK(flags == heard_flags && has_disagreement == differs);
    }
    ocomm_channel_close(channel);
    ocomm_engine_free(engine);
    ocomm_channel_free(channel);
    for (int k = 0; k < SEGMENTS; k++) {
        free(exchanges[k].whole);
        for (int r = 0; r < ranks; r++) free(exchanges[k].rows[r]), free(exchanges[k].results[r]);
    }
    return 0;
}
