/* The end of a rank whose job has failed while the rank itself was ending. */
#define _DEFAULT_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "ocomm.h"

/* Microseconds for which a rank that ends well waits, so that the launcher sees first the exit of one that did not. */
#define PATIENCE_US 500000

static void end(int status, void *unused)
{
    (void)unused;
    fflush(NULL);
    if (status == 0)
        usleep(PATIENCE_US);
    _exit(status ? status : 1);
}

int ocomm_end_with_status(void)
{
    return on_exit(end, NULL);
}
