/* A library for LD_PRELOAD that keeps the launcher of a job on one host off the network.
 *
 * prterun, orterun and Hydra's mpiexec listen on all interfaces, or on the first one, for daemons of other hosts,
 * even if there are none, and have no parameter to prevent it. In a program that has one of the names in
 * _OCOMM_LOOPBACK, which colons separate, bind() to another address becomes bind() to loopback. Both variables are
 * removed from that program's environment before it reads it, so that ranks never get them. In any other program (the
 * mpirun that becomes prterun, a wrapper script) nothing happens.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static int is_launcher;

/* Whether name is one of those in names, between colons. */
static int is_among(const char *name, const char *names)
{
    size_t length = strlen(name);
    for (const char *end; names != NULL; names = end == NULL ? NULL : end + 1) {
        end = strchr(names, ':');
        if (length == (end == NULL ? strlen(names) : (size_t)(end - names)) && strncmp(name, names, length) == 0)
            return 1;
    }
    return 0;
}

__attribute__((constructor)) static void begin(void)
{
    const char *names = getenv("_OCOMM_LOOPBACK"), *preloaded = getenv("LD_PRELOAD");
    char program[4096];
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    if (names == NULL || preloaded == NULL || length <= 0)
        return;
    program[length] = 0;
    const char *slash = strrchr(program, '/');
    if (slash == NULL || !is_among(slash + 1, names))
        return;
    is_launcher = 1;
    unsetenv("_OCOMM_LOOPBACK");
    /* ocommrun puts this library before those that LD_PRELOAD has already. */
    Dl_info own;
    size_t own_length = dladdr((void *)begin, &own) ? strlen(own.dli_fname) : 0;
    if (own_length == 0 || strncmp(preloaded, own.dli_fname, own_length) != 0)
        return;
    if (preloaded[own_length] == ':')
        setenv("LD_PRELOAD", strdup(preloaded + own_length + 1), 1);
    else
        unsetenv("LD_PRELOAD");
}

int bind(int descriptor, const struct sockaddr *address, socklen_t length)
{
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
    if (is_launcher && address->sa_family == AF_INET && length >= sizeof v4) {
        memcpy(&v4, address, sizeof v4);
        if (ntohl(v4.sin_addr.s_addr) >> 24 != IN_LOOPBACKNET) {
            v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
            return (int)syscall(SYS_bind, descriptor, &v4, sizeof v4);
        }
    }
    if (is_launcher && address->sa_family == AF_INET6 && length >= sizeof v6) {
        memcpy(&v6, address, sizeof v6);
        if (!IN6_IS_ADDR_LOOPBACK(&v6.sin6_addr)) {
            v6.sin6_addr = in6addr_loopback;
            v6.sin6_scope_id = 0;
            return (int)syscall(SYS_bind, descriptor, &v6, sizeof v6);
        }
    }
    return (int)syscall(SYS_bind, descriptor, address, length);
}
