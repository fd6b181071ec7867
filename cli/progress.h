/* Progress: a job's way to its end for people: on a terminal one block that is drawn again,
 * elsewhere a line every few seconds.
 * Threading: main thread.
 */
#ifndef CLI_PROGRESS_H
#define CLI_PROGRESS_H

#include "viaduct/v1/viaduct.pb-c.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

typedef struct Progress {
    FILE *file;
    bool is_terminal;
    int lines_drawn; /* of the block that stands on the terminal */
    int64_t last_draw_ns;
    int last_state;
    /* the beginning of the window over which rates are taken */
    int64_t window_ns;
    int64_t window_step;
    double window_tokens, window_seconds, window_encoder, window_llm;
    /* of the last full window; zero until there is one */
    double step_seconds, tokens_per_second, encoder_share, llm_share;
} Progress;

void progress_init(Progress *progress, FILE *file);

/* Shows the job as it is now, unless it was shown a moment ago. */
void progress_show(Progress *progress, const Viaduct__V1__Job *job);

/* Takes the block away, so that other lines can follow. */
void progress_clear(Progress *progress);

#endif
