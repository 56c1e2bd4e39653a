/* A few threads that sleep until a large loop comes, and then share it with the thread that runs it.
 *
 * Every thread, also the caller, takes the next piece when it is ready. So the caller never waits for a thread that
 * has not started, only for one that is in the middle of a piece. The first pieces are large, because a loop is
 * slower at its ends, and the last ones small, because all threads should end together.
 */
#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

/* The least number of single elements in a piece, so that no two threads write to one cache line. */
#define EVEN 1024

struct ocomm_pool {
    pid_t owner;
    int64_t grain;
    int32_t helpers;
    pthread_t *threads;
    pthread_mutex_t lock;
    pthread_cond_t posted, finished;
    /* under the lock */
    int busy, closing;
    pool_work work;
    pool_size size;
    const void *args;
    int64_t count, next, left; /* items; the first one not taken; elements from there on */
    int32_t working;           /* helpers that have a piece */
    int result;
};

/* Takes the next piece: returns its number of items, 0 if there are no more. Called under the lock. */
static int64_t take(ocomm_pool *pool, int64_t *first) {
    int64_t wanted = pool->left / (2 * (pool->helpers + 1));
    if (wanted < pool->grain) wanted = pool->grain;
    *first = pool->next;
    if (!pool->size) {
        wanted = (wanted + EVEN - 1) / EVEN * EVEN;
        if (wanted > pool->left) wanted = pool->left;
        pool->next += wanted;
        pool->left -= wanted;
    } else {
        int64_t taken = 0;
        while (pool->next < pool->count && taken < wanted) taken += pool->size(pool->args, pool->next++);
        pool->left -= taken;
    }
    return pool->next - *first;
}

/* Runs piece after piece until there are no more. Called under the lock, which is released while a piece runs. */
static void work(ocomm_pool *pool) {
    int64_t first, count;
    while ((count = take(pool, &first)) > 0) {
        const pool_work piece = pool->work;
        const void *args = pool->args;
        pthread_mutex_unlock(&pool->lock);
        const int result = piece(args, first, count);
        pthread_mutex_lock(&pool->lock);
        pool->result &= result;
    }
}

static void *help(void *of) {
    ocomm_pool *pool = of;
#ifdef __linux__
    prctl(PR_SET_NAME, "ocomm-kernels");
#endif
    pthread_mutex_lock(&pool->lock);
    while (!pool->closing) {
        if (pool->next == pool->count) {
            pthread_cond_wait(&pool->posted, &pool->lock);
            continue;
        }
        pool->working++;
        work(pool);
        if (--pool->working == 0) pthread_cond_signal(&pool->finished);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

ocomm_pool *ocomm_pool_new(int32_t threads, int64_t grain) {
    ocomm_pool *pool = calloc(1, sizeof *pool);
    if (!pool) return NULL;
    pool->owner = getpid();
    pool->grain = grain;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->posted, NULL);
    pthread_cond_init(&pool->finished, NULL);
    pool->threads = calloc((size_t)threads, sizeof *pool->threads);
    /* Signals are left to the threads of the program. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool->threads && pool->helpers < threads - 1 &&
           pthread_create(&pool->threads[pool->helpers], NULL, help, pool) == 0)
        pool->helpers++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!pool->threads || pool->helpers < threads - 1) {
        ocomm_pool_free(pool);
        return NULL;
    }
    return pool;
}

void ocomm_pool_close(ocomm_pool *pool) {
    if (pool->owner != getpid()) return; /* a forked child has none of the threads */
    pthread_mutex_lock(&pool->lock);
    const int32_t helpers = pool->closing ? 0 : pool->helpers;
    pool->closing = 1;
    pthread_cond_broadcast(&pool->posted);
    pthread_mutex_unlock(&pool->lock);
    for (int32_t i = 0; i < helpers; i++) pthread_join(pool->threads[i], NULL);
}

void ocomm_pool_free(ocomm_pool *pool) {
    if (pool->owner != getpid()) return;
    ocomm_pool_close(pool);
    pthread_mutex_destroy(&pool->lock);
    pthread_cond_destroy(&pool->posted);
    pthread_cond_destroy(&pool->finished);
    free(pool->threads);
    free(pool);
}

static int64_t elements(pool_size size, const void *args, int64_t count) {
    if (!size) return count;
    int64_t sum = 0;
    for (int64_t item = 0; item < count; item++) sum += size(args, item);
    return sum;
}

int pool_run(ocomm_pool *pool, pool_work piece, pool_size size, const void *args, int64_t count) {
    if (!pool || pool->owner != getpid()) return piece(args, 0, count);
    const int64_t numel = elements(size, args, count);
    if (numel < 2 * pool->grain) return piece(args, 0, count);
    pthread_mutex_lock(&pool->lock);
    if (pool->busy || pool->closing) {
        pthread_mutex_unlock(&pool->lock);
        return piece(args, 0, count);
    }
    pool->busy = 1;
    pool->work = piece;
    pool->size = size;
    pool->args = args;
    pool->count = count;
    pool->next = 0;
    pool->left = numel;
    pool->result = 1;
    pthread_cond_broadcast(&pool->posted);
    work(pool);
    while (pool->working) pthread_cond_wait(&pool->finished, &pool->lock);
    const int result = pool->result;
    pool->busy = 0;
    pthread_mutex_unlock(&pool->lock);
    return result;
}
