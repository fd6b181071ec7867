/* Watch: follows one job to its end.
 * Threading: main thread.
 */
#ifndef CLI_WATCH_H
#define CLI_WATCH_H

#include "cli/session.h"

#include <stdio.h>

/* Shows progress on `file` until the job has ended, then its result. Ctrl-C ends the watching,
 * never the job. timeout_ms 0: no limit. */
ExitCode watch_follow(Session *session, const char *name, FILE *file, int64_t timeout_ms);

#endif
