#include "rpc/rpc.h"

#include "base/log.h"
#include "base/memory.h"
#include "rpc/rpc_internal.h"

#include <grpc/support/log.h>

struct Rpc {
    uv_loop_t *loop;
    grpc_completion_queue *queue;
    uv_thread_t thread;
    uv_async_t async;
    uv_mutex_t lock;
    /* Under the lock: finished events, in order. */
    RpcEvent *first;
    RpcEvent **last;
    /* Of the loop thread: what it has taken out and not yet run. */
    RpcEvent *taken;
    int num_users; /* servers and clients */
};

grpc_completion_queue *rpc_queue(const Rpc *rpc)
{
    return rpc->queue;
}

uv_loop_t *rpc_loop(const Rpc *rpc)
{
    return rpc->loop;
}

void rpc_retain(Rpc *rpc)
{
    rpc->num_users++;
}

void rpc_release(Rpc *rpc)
{
    CHECK(rpc->num_users > 0);
    rpc->num_users--;
}

void rpc_post(Rpc *rpc, RpcEvent *event, bool ok)
{
    uv_mutex_lock(&rpc->lock);
    event->ok = ok;
    event->next = NULL;
    bool was_empty = rpc->first == NULL;
    *rpc->last = event;
    rpc->last = &event->next;
    uv_mutex_unlock(&rpc->lock);
    /* A list that was not empty has its wake-up under way already. */
    if (was_empty) {
        CHECK(uv_async_send(&rpc->async) == 0);
    }
}

void rpc_publish(Rpc *rpc)
{
    uv_mutex_lock(&rpc->lock);
    uv_mutex_unlock(&rpc->lock);
}

void rpc_start(Rpc *rpc, grpc_call *call, const grpc_op *ops, size_t num_ops, RpcEvent *event)
{
    rpc_publish(rpc);
    CHECK(grpc_call_start_batch(call, ops, num_ops, event, NULL) == GRPC_CALL_OK);
}

/* The thread of the completion queue, until the queue is shut down and empty. */
static void run_queue(void *argument)
{
    Rpc *rpc = argument;
    for (;;) {
        grpc_event event =
            grpc_completion_queue_next(rpc->queue, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
        if (event.type == GRPC_QUEUE_SHUTDOWN) {
            return;
        }
        if (event.type == GRPC_OP_COMPLETE) {
            rpc_post(rpc, event.tag, event.success != 0);
        }
    }
}

/* Events are unlinked before they run: rpc_destroy may be called from one of them and runs the
 * rest. */
static void run_taken(Rpc *rpc)
{
    while (rpc->taken != NULL) {
        RpcEvent *event = rpc->taken;
        rpc->taken = event->next;
        event->done(event, event->ok);
    }
}

static void take(Rpc *rpc)
{
    uv_mutex_lock(&rpc->lock);
    rpc->taken = rpc->first;
    rpc->first = NULL;
    rpc->last = &rpc->first;
    uv_mutex_unlock(&rpc->lock);
}

static void on_async(uv_async_t *async)
{
    Rpc *rpc = async->data;
    run_taken(rpc);
    take(rpc);
    run_taken(rpc);
}

/* gRPC's own lines repeat what the status of a call says; they are for debugging. */
static void on_log(gpr_log_func_args *line)
{
    log_debug("grpc %s:%d %s", line->file, line->line, line->message);
}

Status rpc_create(uv_loop_t *loop, Rpc **rpc_out)
{
    Rpc *rpc = NULL;
    TRY(MEMORY_NEW(&rpc, 1));
    rpc->loop = loop;
    rpc->last = &rpc->first;
    Status status = STATUS_OK;
    if (uv_mutex_init(&rpc->lock) != 0) {
        status = fail(STATUS_INTERNAL, "cannot make a mutex for gRPC's events");
        goto free_rpc;
    }
    gpr_set_log_function(on_log);
    grpc_init();
    rpc->queue = grpc_completion_queue_create_for_next(NULL);
    int error = uv_thread_create(&rpc->thread, run_queue, rpc);
    if (error != 0) {
        status = fail(STATUS_INTERNAL, "cannot start gRPC's thread: %s", uv_strerror(error));
        goto destroy_queue;
    }
    /* The thread posts nothing before a server or client exists, so the handle may come after it;
     * in this order no failure leaves a handle open on the loop. */
    error = uv_async_init(loop, &rpc->async, on_async);
    if (error != 0) {
        status = fail(STATUS_INTERNAL, "cannot add gRPC to the loop: %s", uv_strerror(error));
        goto join_thread;
    }
    rpc->async.data = rpc;
    *rpc_out = rpc;
    return STATUS_OK;
join_thread:
    grpc_completion_queue_shutdown(rpc->queue);
    uv_thread_join(&rpc->thread);
    grpc_completion_queue_destroy(rpc->queue);
    goto shut_down;
destroy_queue:
    grpc_completion_queue_shutdown(rpc->queue);
    (void)grpc_completion_queue_next(rpc->queue, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
    grpc_completion_queue_destroy(rpc->queue);
shut_down:
    grpc_shutdown();
    uv_mutex_destroy(&rpc->lock);
free_rpc:
    memory_free(rpc);
    return status;
}

static void on_async_closed(uv_handle_t *handle)
{
    Rpc *rpc = handle->data;
    uv_mutex_destroy(&rpc->lock);
    memory_free(rpc);
}

void rpc_destroy(Rpc *rpc)
{
    if (rpc == NULL) {
        return;
    }
    CHECK(rpc->num_users == 0);
    /* Calls of destroyed clients are cancelled, so their last events come before the queue ends. */
    grpc_completion_queue_shutdown(rpc->queue);
    uv_thread_join(&rpc->thread);
    do {
        run_taken(rpc);
        take(rpc);
    } while (rpc->taken != NULL);
    grpc_completion_queue_destroy(rpc->queue);
    grpc_shutdown();
    uv_close((uv_handle_t *)&rpc->async, on_async_closed);
}
