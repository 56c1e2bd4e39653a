/* Preloaded into a test: makes chosen allocations of one library fail. A call belongs to that library if it returns
 * into its code, and to the site that it returns to. Nothing of the library is changed or built anew. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stddef.h>

#define SITES 256

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

typedef struct {
    uintptr_t offset;
    const char *function;
    int calls;
} site;

static uintptr_t low, high; /* of the library's code */
static site sites[SITES];
static int known, chosen_number, lasting, failed;
static uintptr_t chosen;
static atomic_flag busy = ATOMIC_FLAG_INIT;

static int fails(const void *returns_to, const char *function) {
    const uintptr_t at = (uintptr_t)returns_to;
    if (at < low || at >= high) return 0;
    while (atomic_flag_test_and_set(&busy))
        ;
    int number = 0;
    while (number < known && sites[number].offset != at - low) number++;
    if (number == known && known < SITES) sites[known++] = (site){at - low, function, 0};
    const int calls = number < known ? ++sites[number].calls : 0;
    const int now = at - low == chosen && (calls == chosen_number || (lasting && calls > chosen_number));
    failed |= now;
    atomic_flag_clear(&busy);
    if (now) errno = ENOMEM;
    return now;
}

#define FAILS fails(__builtin_return_address(0), __func__)

void *malloc(size_t nbytes) { return FAILS ? NULL : __libc_malloc(nbytes); }
void *calloc(size_t count, size_t nbytes) { return FAILS ? NULL : __libc_calloc(count, nbytes); }
void *realloc(void *old, size_t nbytes) { return FAILS ? NULL : __libc_realloc(old, nbytes); }
void *aligned_alloc(size_t to, size_t nbytes) { return FAILS ? NULL : __libc_memalign(to, nbytes); }

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *given) {
    typedef int (*create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    return FAILS ? EAGAIN : ((create)dlsym(RTLD_NEXT, "pthread_create"))(thread, attributes, run, given);
}

/* Counts anew, in the library whose code is there. */
void faults_begin(uintptr_t from, uintptr_t to, uintptr_t at, int number, int and_later) {
    low = from, high = to, chosen = at, chosen_number = number, lasting = and_later;
    known = failed = 0;
}

/* Returns 1 if there is a site of this number. */
int faults_site(int number, uintptr_t *offset, const char **function, const char **inside, int *calls) {
    if (number >= known) return 0;
    Dl_info found = {0};
    dladdr((void *)(low + sites[number].offset), &found);
    *offset = sites[number].offset;
    *function = sites[number].function;
    *inside = found.dli_sname ? found.dli_sname : "a static function";
    *calls = sites[number].calls;
    return 1;
}

int faults_have_failed(void) { return failed; }
