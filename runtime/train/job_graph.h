/* JobGraph: a job's modules as the schedule sees them: grids, parts, what runs backward, and what a
 * part costs on the job's own data. Threading: pure.
 */
#ifndef TRAIN_JOB_GRAPH_H
#define TRAIN_JOB_GRAPH_H

#include "train/place.h"
#include "train/schedule.h"
#include "train/step_plan.h"

/* first_trained [place->num_modules]: the first part of each module with a trained parameter
 * (ModuleOps.first_trained). STATUS_INVALID when nothing at all is trained. */
Status job_graph_make(const JobSpec *spec, const Place *place, const StepSource *source,
                      const int *first_trained, ScheduleGraph *graph_out) STATUS_CHECKED;

/* Microbatches in flight in an encoder: training.encoder_window ahead of those that keep the
 * decoder's pipeline full; not more than there are, nor than a boundary can keep apart. */
int job_graph_window(const JobSpec *spec, const Place *place);

/* What an encoder encodes. */
SampleMedia job_graph_media(const char *module);

#endif
