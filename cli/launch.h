/* Launch: the programs that `viaduct train` runs on this machine: started, watched, and gone for
 * certain at the end.
 *
 * A child dies with this process, however it ends (PR_SET_PDEATHSIG), and stands in a process group
 * of its own, so that Ctrl-C reaches only this program, which then stops them in order. Their logs
 * go to files.
 * Threading: the main thread, which must outlive them: the kernel ties a child to the thread that
 * forked it.
 */
#ifndef CLI_LAUNCH_H
#define CLI_LAUNCH_H

#include "base/status.h"

#include <stdbool.h>
#include <sys/types.h>
#include <uv.h>

typedef struct LaunchChild {
    char name[64];
    char log[512];
    pid_t pid;
    bool is_running;
    int wait_status; /* of waitpid, once it ended */
} LaunchChild;

typedef struct Launch {
    LaunchChild *children; /* [capacity] */
    int count;
    int capacity;
    uv_loop_t *loop;
    uv_signal_t reaper;
    void (*on_end)(void *context, const LaunchChild *child); /* each child's end */
    void *context;
} Launch;

Status launch_init(Launch *launch, uv_loop_t *loop, int capacity,
                   void (*on_end)(void *context, const LaunchChild *child),
                   void *context) STATUS_CHECKED;
/* All children must have ended. */
void launch_done(Launch *launch);

/* Path of a program beside this one. STATUS_NOT_FOUND. */
Status launch_find_program(const char *name, char *path_out, size_t size) STATUS_CHECKED;

/* Starts argv[0] (a path) with standard error, and unless output_out is given standard output,
 * going to `log_path`. environment may be NULL: this process'. *output_out: the read end of its
 * standard output. */
Status launch_start(Launch *launch, const char *name, const char *const *argv,
                    char *const *environment, const char *log_path, int *output_out) STATUS_CHECKED;

/* Sends a signal to the children from `first` on that still run. */
void launch_signal(Launch *launch, int first, int number);

/* Runs the loop until the children from `first` on have ended or the time is over. Returns whether
 * they have. */
bool launch_wait(Launch *launch, int first, int64_t timeout_ms);

/* "was killed by signal 9" or "ended with exit status 1" */
void launch_describe_end(const LaunchChild *child, char *text, size_t size);

#endif
