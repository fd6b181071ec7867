/* The half of cluster.h that makes messages. */
#include "base/hash.h"
#include "base/memory.h"
#include "coordinator/cluster.h"
#include "job/message.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static int64_t to_wall(const Cluster *cluster, int64_t ms)
{
    return ms ? ms + cluster->options.wall_offset_ms : 0;
}

static Status set_format(char **field, const char *prefix, const char *text)
{
    char whole[1200];
    snprintf(whole, sizeof whole, "%s%s", prefix, text);
    return message_set_text(field, whole);
}

static Status copy_step_metrics(const StepMetrics *from, StepMetrics **field)
{
    ProtobufCMessage *copy = NULL;
    TRY(message_create(&viaduct__v1__step_metrics__descriptor, &copy));
    *(StepMetrics *)copy = *from;
    *field = (StepMetrics *)copy;
    return STATUS_OK;
}

/* Of the pools that serve encoders only. */
static int count_encoder_groups(const JobSpec *spec)
{
    int groups = 0;
    for (size_t i = 0; i < spec->n_pools; i++) {
        groups += strcmp(spec->pools[i]->role, "encoder") == 0 ? spec->pools[i]->desired_groups : 0;
    }
    return groups;
}

static Status render_status(const Cluster *cluster, const ClusterJob *job,
                            Viaduct__V1__JobStatus *status)
{
    status->state = job->state;
    TRY(message_set_text(&status->reason, job->reason));
    TRY(message_set_text(&status->message, job->message));
    status->observed_generation = 1;
    status->epoch = job->epoch;
    status->committed_step = job->committed_step;
    status->samples_committed = job->samples_committed;
    TRY(message_set_timestamp(&status->start_time, to_wall(cluster, job->start_ms)));
    TRY(message_set_timestamp(&status->end_time, to_wall(cluster, job->end_ms)));
    TRY(message_set_timestamp(&status->last_progress_time, to_wall(cluster, job->progress_ms)));
    TRY(message_set_text(&status->checkpoint, job->checkpoint));
    if (job->committed_step > 0) {
        TRY(copy_step_metrics(&job->latest, &status->latest_metrics));
        TRY(copy_step_metrics(&job->totals, &status->totals));
    }
    if (job->evaluation) {
        TRY(message_copy(&job->evaluation->base, (ProtobufCMessage **)&status->latest_evaluation));
    }
    if (job->state == JOB_STATE(RUNNING)) {
        status->current_encoder_groups = count_encoder_groups(job->submitted->spec);
        status->ready_encoder_groups = status->current_encoder_groups;
    }
    return STATUS_OK;
}

static Status fill_job(const Cluster *cluster, const ClusterJob *job, Viaduct__V1__Job *message)
{
    char etag[32];
    TRY(set_format(&message->name, "jobs/", job->id));
    TRY(message_set_text(&message->uid, job->uid));
    TRY(message_set_timestamp(&message->create_time, to_wall(cluster, job->create_ms)));
    TRY(message_set_timestamp(&message->update_time, to_wall(cluster, job->update_ms)));
    message->generation = 1;
    snprintf(etag, sizeof etag, "%" PRId64, job->revision);
    TRY(message_set_text(&message->etag, etag));
    viaduct__v1__job_status__free_unpacked(message->status,
                                           NULL); /* output only: what came is void */
    message->status = NULL;
    TRY(message_create(&viaduct__v1__job_status__descriptor,
                       (ProtobufCMessage **)&message->status));
    return render_status(cluster, job, message->status);
}

Status cluster_render_job(const Cluster *cluster, const ClusterJob *job,
                          Viaduct__V1__Job **message_out)
{
    ProtobufCMessage *copy = NULL;
    TRY(message_copy(&job->submitted->base, &copy));
    Viaduct__V1__Job *message = (Viaduct__V1__Job *)copy;
    Status status = fill_job(cluster, job, message);
    if (status != STATUS_OK) {
        viaduct__v1__job__free_unpacked(message, NULL);
        return status_trace(status, __FILE__, __LINE__);
    }
    *message_out = message;
    return STATUS_OK;
}

static Status append_label(Viaduct__V1__Worker *message, const WorkerLabel *label)
{
    const ProtobufCFieldDescriptor *field =
        protobuf_c_message_descriptor_get_field_by_name(message->base.descriptor, "labels");
    ProtobufCMessage *entry = NULL;
    TRY(message_create(field->descriptor, &entry));
    Viaduct__V1__Worker__LabelsEntry *pair = (Viaduct__V1__Worker__LabelsEntry *)entry;
    Status status = message_set_text(&pair->key, label->key);
    if (status == STATUS_OK) {
        status = message_set_text(&pair->value, label->value);
    }
    if (status == STATUS_OK) {
        status = message_append(&message->base, field, &entry);
    }
    if (status != STATUS_OK) {
        protobuf_c_message_free_unpacked(entry, NULL);
    }
    return status;
}

static const char *job_name_of(const Cluster *cluster, int64_t serial)
{
    for (int i = 0; i < cluster->num_jobs && serial != 0; i++) {
        if (cluster->jobs[i]->serial == serial) {
            return cluster->jobs[i]->id;
        }
    }
    return "";
}

static Status fill_worker(const Cluster *cluster, const WorkerRecord *worker,
                          Viaduct__V1__Worker *message)
{
    TRY(set_format(&message->name, "workers/", worker->name));
    TRY(message_set_text(&message->incarnation, worker->incarnation));
    TRY(message_set_text(&message->role, worker->role));
    TRY(message_set_text(&message->control_address, worker->control_address));
    TRY(message_set_text(&message->data_address, worker->data_address));
    TRY(message_set_text(&message->software_version, worker->software_version));
    message->protocol_version = MEMBERSHIP_PROTOCOL;
    message->state = worker->state;
    message->epoch = worker->epoch;
    const char *job = job_name_of(cluster, worker->job);
    if (job[0]) {
        TRY(set_format(&message->job, "jobs/", job));
    }
    TRY(message_set_timestamp(&message->last_heartbeat_time,
                              to_wall(cluster, worker->last_heartbeat_ms)));
    for (int i = 0; i < worker->num_labels; i++) {
        TRY(append_label(message, &worker->labels[i]));
    }
    return STATUS_OK;
}

Status cluster_render_worker(const Cluster *cluster, int slot, Viaduct__V1__Worker **message_out)
{
    ProtobufCMessage *message = NULL;
    TRY(message_create(&viaduct__v1__worker__descriptor, &message));
    Status status =
        fill_worker(cluster, &cluster->membership.workers[slot], (Viaduct__V1__Worker *)message);
    if (status != STATUS_OK) {
        protobuf_c_message_free_unpacked(message, NULL);
        return status_trace(status, __FILE__, __LINE__);
    }
    *message_out = (Viaduct__V1__Worker *)message;
    return STATUS_OK;
}

/* The key of an epoch's links: eight bytes that strangers and other epochs do not know. */
static Status set_key(const Cluster *cluster, int64_t epoch, ProtobufCBinaryData *field)
{
    uint8_t *bytes = NULL;
    TRY(MEMORY_NEW(&bytes, sizeof(uint64_t)));
    uint64_t key = rng_bits64((Rng){cluster->options.seed, hash_text("links")}, (uint64_t)epoch);
    memcpy(bytes, &key, sizeof key);
    field->data = bytes;
    field->len = sizeof key;
    return STATUS_OK;
}

static Status fill_prepare(const Cluster *cluster, const ClusterJob *job, int slot,
                           Viaduct__V1__WatchAssignmentResponse *message)
{
    const ProtobufCFieldDescriptor *members =
        protobuf_c_message_descriptor_get_field_by_name(message->base.descriptor, "members");
    message->rank = cluster->membership.workers[slot].rank;
    TRY(set_key(cluster, job->epoch, &message->comm_id));
    TRY(message_set_text(&message->resume_from, job->resume_from));
    TRY(message_copy(&job->submitted->spec->base, (ProtobufCMessage **)&message->spec));
    for (int rank = 0; rank < job->num_members; rank++) {
        Viaduct__V1__Worker *worker = NULL;
        TRY(cluster_render_worker(cluster, job->members[rank], &worker));
        Status status = message_append(&message->base, members, &worker);
        if (status != STATUS_OK) {
            viaduct__v1__worker__free_unpacked(worker, NULL);
            return status;
        }
    }
    return STATUS_OK;
}

static Status fill_assignment(Cluster *cluster, const ClusterEffect *effect,
                              Viaduct__V1__WatchAssignmentResponse *message)
{
    message->phase = effect->phase;
    message->epoch = effect->epoch;
    TRY(set_format(&message->job, "jobs/", effect->job_id));
    TRY(message_set_text(&message->reason, effect->text));
    const ClusterJob *job = cluster_find_serial(cluster, effect->job);
    if (effect->phase == ASSIGNMENT_PHASE(PREPARE) && job) {
        TRY(fill_prepare(cluster, job, effect->slot, message));
    }
    return STATUS_OK;
}

Status cluster_render_assignment(Cluster *cluster, const ClusterEffect *effect,
                                 Viaduct__V1__WatchAssignmentResponse **message_out)
{
    ProtobufCMessage *message = NULL;
    TRY(message_create(&viaduct__v1__watch_assignment_response__descriptor, &message));
    Status status =
        fill_assignment(cluster, effect, (Viaduct__V1__WatchAssignmentResponse *)message);
    if (status != STATUS_OK) {
        protobuf_c_message_free_unpacked(message, NULL);
        return status_trace(status, __FILE__, __LINE__);
    }
    *message_out = (Viaduct__V1__WatchAssignmentResponse *)message;
    return STATUS_OK;
}
