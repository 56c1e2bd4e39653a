/* Cutting a large loop into pieces for the threads of an ocomm_pool. */
#ifndef POOL_H
#define POOL_H
#include "ocomm.h"

/* Does items [first, first + count) of the work that `args` describes. 0 or 1. */
typedef int (*pool_work)(const void *args, int64_t first, int64_t count);
/* Elements of an item. */
typedef int64_t (*pool_size)(const void *args, int64_t item);

/* All `count` items, in pieces that run at the same time where that pays; 1 if every piece returned 1. `size` may be
 * NULL: each item is one element. Where the pool is NULL, closed, at work for another thread or a copy in a forked
 * child, the caller does everything itself. */
int pool_run(ocomm_pool *pool, pool_work work, pool_size size, const void *args, int64_t count);

#endif
