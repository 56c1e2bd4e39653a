/* TensorFlow's side of a collective inside a graph: three operations, and the queue through which their work leaves
 * TensorFlow's threads.
 *
 * No header and no library of TensorFlow is needed to build this: its stable C API is looked up at run time in the
 * library that the process has loaded, so one binary serves every version. native/build_tf.py hands the marked part
 * to cffi; ocomm_tf/engine.py is the caller.
 *
 *   OcommExchange(x...) -> y...              y has the shape of x: allreduce, broadcast
 *   OcommGather(x..., splits) -> y..., rows  the shape of y is known once all ranks have come: allgather, alltoall,
 *                                            reducescatter
 *   OcommCompare(x, variables...) -> y       runs after the operations that have written to the variables (their
 *                                            handles), and before those that write next; its caller reads them
 *
 * A group of tensors is one operation, which TensorFlow starts when all of them are ready.
 */
#ifndef OCOMM_TF_EXCHANGE_H
#define OCOMM_TF_EXCHANGE_H
#include <stddef.h>
#include <stdint.h>

/* cffi: begin tensorflow */

typedef struct {
    const int64_t *shape;
    const void *input;
    void *output;          /* OcommExchange: may be the input; OcommGather: NULL until ocomm_tf_output */
    int64_t nbytes;        /* of the input */
    int32_t dtype;         /* TF_DataType */
    int32_t rank;          /* number of dimensions */
} ocomm_tf_tensor;

/* One execution of one of these operations. What it points to lives until ocomm_tf_finish. */
typedef struct ocomm_tf_work {
    int64_t call;          /* the operation's attribute: which call of the Python program it belongs to */
    const char *name;      /* the node's name in the graph, not terminated */
    int64_t name_length;
    int64_t count;
    int is_known;          /* its tensors have the sizes in the operation's attribute `nbytes` */
    ocomm_tf_tensor *tensors;
    const int64_t *splits; /* OcommGather */
    int64_t split_count;
    struct ocomm_tf_work *next;
} ocomm_tf_work;

/* Works in order of arrival, and the addresses of the tensors of all of them in turn. */
typedef struct {
    int64_t count, tensors;
    intptr_t *works;       /* ocomm_tf_work * */
    intptr_t *calls;
    intptr_t *counts;      /* number of each work's tensors; 0 if it is not known, and the work must be examined */
    intptr_t *inputs, *outputs;
} ocomm_tf_batch;

/* Registers the operations with the TensorFlow in `library` (libtensorflow_framework). Returns 0, or -1 with a sentence
 * in `problem`. Once per process. */
int ocomm_tf_register(const char *library, char *problem, int64_t room);
/* Waits until there is work, a wake or the end of `seconds`, but at least `pace` seconds since its last return. The
 * result is valid until the next call. For one thread. */
const ocomm_tf_batch *ocomm_tf_take(double seconds, double pace);
/* Makes the waiting ocomm_tf_take return. */
void ocomm_tf_wake(void);
/* Allocates output `index` of an OcommGather (its rows are the last one); NULL if there is no memory. */
/* Keeps the memory of an input until ocomm_tf_release, also if the graph's run fails meanwhile. NULL if TensorFlow
 * refuses. */
void *ocomm_tf_keep(ocomm_tf_work *work, int index);
void ocomm_tf_release(void *kept);
void *ocomm_tf_output(ocomm_tf_work *work, int index, int32_t dtype, const int64_t *shape, int rank, int64_t nbytes);
/* Ends works and frees them: with TensorFlow's status `code` and `message`, or successfully if `code` is 0. */
void ocomm_tf_finish(const intptr_t *works, int64_t count, int code, const char *message);

/* cffi: end tensorflow */

#endif
