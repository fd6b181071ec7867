/* A server and clients in one process, mostly on one loop; clients and servers that die are
 * processes of their own, made by running this program again ("die PORT", "serve"). Another
 * argument is a pattern for the tests to run. */
#include "base/clock.h"
#include "base/memory.h"
#include "rpc/rpc.h"
#include "viaduct/v1/viaduct.pb-c.h"

#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

#define JOBS (&viaduct__v1__job_service__descriptor)

enum {
    HELD_MAX = 16,
    TIMEOUT_MS = 20000,
    NUM_LATENCIES = 2000
};

/* ---------------------------------------------------------------- the loop under test */
typedef struct Fixture {
    uv_loop_t loop;
    Rpc *rpc;
    RpcServer *server;
    RpcClient *client;
    uv_timer_t watchdog;
    /* Of the server. */
    RpcCall *held[HELD_MAX]; /* calls that the handler has not ended */
    int num_held;
    int num_closed; /* closed callbacks */
    int num_sent;   /* messages of the flood */
    bool is_server_done;
} Fixture;

static void on_watchdog(uv_timer_t *timer)
{
    (void)timer;
    fprintf(stderr, "rpc_test: nothing happened for %d ms\n", TIMEOUT_MS);
    abort();
}

static void run_until(Fixture *fixture, const volatile bool *flag)
{
    uv_update_time(&fixture->loop);
    uv_timer_start(&fixture->watchdog, on_watchdog, TIMEOUT_MS, 0);
    while (!*flag) {
        uv_run(&fixture->loop, UV_RUN_ONCE);
    }
    uv_timer_stop(&fixture->watchdog);
}

static void run_until_count(Fixture *fixture, const volatile int *count, int wanted)
{
    uv_update_time(&fixture->loop);
    uv_timer_start(&fixture->watchdog, on_watchdog, TIMEOUT_MS, 0);
    while (*count < wanted) {
        uv_run(&fixture->loop, UV_RUN_ONCE);
    }
    uv_timer_stop(&fixture->watchdog);
}

/* ---------------------------------------------------------------- the server's handlers */
static void on_closed(void *context, RpcCall *call)
{
    Fixture *fixture = context;
    (void)call;
    fixture->num_closed++;
}

static void hold(Fixture *fixture, RpcCall *call)
{
    assert_true(fixture->num_held < HELD_MAX);
    fixture->held[fixture->num_held++] = call;
}

static void reply_job(RpcCall *call, const char *name)
{
    Viaduct__V1__Job job = VIADUCT__V1__JOB__INIT;
    job.name = (char *)name;
    rpc_call_reply(call, &job.base);
}

/* What the job's name asks for. */
static void on_get_job(void *context, RpcCall *call, const ProtobufCMessage *message)
{
    Fixture *fixture = context;
    const Viaduct__V1__GetJobRequest *request = (const Viaduct__V1__GetJobRequest *)message;
    if (strcmp(request->name, "error") == 0) {
        RpcError error = rpc_error(RPC_CODE_ALREADY_EXISTS, "JOB_EXISTS", "job \"%s\" ü %%", "a");
        error.retry_after_ms = 1500;
        rpc_call_fail(call, &error);
    } else if (strcmp(request->name, "hold") == 0) {
        hold(fixture, call);
    } else if (strcmp(request->name, "hold and tell") == 0) {
        rpc_call_on_closed(call, on_closed, fixture);
        hold(fixture, call);
    } else if (strcmp(request->name, "peer") == 0) {
        reply_job(call, rpc_call_peer(call));
    } else {
        reply_job(call, request->name);
    }
}

static int send_log(RpcCall *call, int64_t offset, uint8_t *data, size_t num_bytes)
{
    Viaduct__V1__StreamJobLogsResponse line = VIADUCT__V1__STREAM_JOB_LOGS_RESPONSE__INIT;
    line.next_offset = offset;
    line.data.data = data;
    line.data.len = num_bytes;
    return rpc_call_send(call, &line.base);
}

/* Sends until `backlog` messages wait, then gives the reader up. */
static void flood(Fixture *fixture, RpcCall *call, int backlog)
{
    uint8_t data[1024] = {0};
    while (send_log(call, fixture->num_sent, data, sizeof data) <= backlog) {
        fixture->num_sent++;
    }
    RpcError error = rpc_error(RPC_CODE_RESOURCE_EXHAUSTED, "READER_TOO_SLOW", "read faster");
    rpc_call_fail(call, &error);
}

static void on_stream_logs(void *context, RpcCall *call, const ProtobufCMessage *message)
{
    Fixture *fixture = context;
    const Viaduct__V1__StreamJobLogsRequest *request =
        (const Viaduct__V1__StreamJobLogsRequest *)message;
    rpc_call_on_closed(call, on_closed, fixture);
    if (strcmp(request->name, "flood") == 0) {
        flood(fixture, call, (int)request->offset);
        return;
    }
    for (int64_t i = 0; i < request->offset; i++) {
        send_log(call, i, NULL, 0);
    }
    if (request->follow) {
        hold(fixture, call);
    } else {
        rpc_call_end(call);
    }
}

static const RpcMethod METHODS[] = {
    {&viaduct__v1__job_service__descriptor, "GetJob", on_get_job, false},
    {&viaduct__v1__job_service__descriptor, "StreamJobLogs", on_stream_logs, true},
    {&viaduct__v1__job_service__descriptor, "ListJobs", NULL, false},
};

static void on_server_done(void *context)
{
    Fixture *fixture = context;
    fixture->is_server_done = true;
}

static void start_server(Fixture *fixture, const char *address)
{
    RpcServerOptions options = {.address = address,
                                .methods = METHODS,
                                .num_methods = sizeof METHODS / sizeof METHODS[0],
                                .context = fixture,
                                .message_bytes_max = 64 << 10};
    fixture->is_server_done = false;
    assert_int_equal(rpc_server_create(fixture->rpc, &options, &fixture->server), STATUS_OK);
    assert_true(rpc_server_port(fixture->server) > 0);
}

static RpcClient *dial(Fixture *fixture, int port)
{
    char target[32];
    snprintf(target, sizeof target, "127.0.0.1:%d", port);
    RpcClient *client = NULL;
    assert_int_equal(rpc_client_create(fixture->rpc, target, &client), STATUS_OK);
    return client;
}

static void init_loop(Fixture *fixture)
{
    memset(fixture, 0, sizeof *fixture);
    assert_int_equal(uv_loop_init(&fixture->loop), 0);
    uv_timer_init(&fixture->loop, &fixture->watchdog);
    assert_int_equal(rpc_create(&fixture->loop, &fixture->rpc), STATUS_OK);
}

static void stop_server(Fixture *fixture, int64_t grace_ms)
{
    rpc_server_shutdown(fixture->server, grace_ms, on_server_done, fixture);
    run_until(fixture, &fixture->is_server_done);
    fixture->server = NULL;
}

static void done_loop(Fixture *fixture)
{
    rpc_destroy(fixture->rpc);
    uv_close((uv_handle_t *)&fixture->watchdog, NULL);
    uv_run(&fixture->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&fixture->loop), 0);
}

static int setup(void **state)
{
    Fixture *fixture = NULL;
    assert_int_equal(MEMORY_NEW(&fixture, 1), STATUS_OK);
    init_loop(fixture);
    start_server(fixture, "127.0.0.1:0");
    fixture->client = dial(fixture, rpc_server_port(fixture->server));
    *state = fixture;
    return 0;
}

static int teardown(void **state)
{
    Fixture *fixture = *state;
    rpc_client_destroy(fixture->client);
    if (fixture->server != NULL) {
        stop_server(fixture, 0);
    }
    done_loop(fixture);
    memory_free(fixture);
    return 0;
}

/* ---------------------------------------------------------------- the client's side */
typedef struct Answer {
    bool is_over;
    int num_calls;
    char name[256];
    RpcError error;
    int *count; /* counts answers, if not NULL */
} Answer;

static void on_answer(void *context, const ProtobufCMessage *response, const RpcError *error)
{
    Answer *answer = context;
    answer->is_over = true;
    answer->num_calls++;
    answer->error = *error;
    assert_int_equal(response != NULL, error->code == RPC_CODE_OK);
    if (response != NULL) {
        const Viaduct__V1__Job *job = (const Viaduct__V1__Job *)response;
        snprintf(answer->name, sizeof answer->name, "%s", job->name);
    }
    if (answer->count != NULL) {
        ++*answer->count;
    }
}

static RpcRequest *ask(RpcClient *client, const char *name, int64_t timeout_ms, Answer *answer)
{
    Viaduct__V1__GetJobRequest request = VIADUCT__V1__GET_JOB_REQUEST__INIT;
    request.name = (char *)name;
    RpcRequest *handle = NULL;
    assert_int_equal(rpc_client_call(client, JOBS, "GetJob", &request.base, timeout_ms, on_answer,
                                     answer, &handle),
                     STATUS_OK);
    return handle;
}

static Answer get(Fixture *fixture, const char *name, int64_t timeout_ms)
{
    Answer answer = {0};
    ask(fixture->client, name, timeout_ms, &answer);
    run_until(fixture, &answer.is_over);
    return answer;
}

typedef struct Reader {
    bool is_over;
    int num_messages;
    int num_ends;
    bool is_ordered;
    RpcError error;
    RpcClient *destroy_at_first; /* destroyed in the first message's callback */
    int die_at;                  /* the process kills itself at this message; 0: never */
} Reader;

static void on_message(void *context, const ProtobufCMessage *message)
{
    Reader *reader = context;
    const Viaduct__V1__StreamJobLogsResponse *line =
        (const Viaduct__V1__StreamJobLogsResponse *)message;
    assert_false(reader->is_over);
    reader->is_ordered &= line->next_offset == reader->num_messages;
    reader->num_messages++;
    if (reader->die_at == reader->num_messages) {
        kill(getpid(), SIGKILL);
    }
    if (reader->destroy_at_first != NULL) {
        RpcClient *client = reader->destroy_at_first;
        reader->destroy_at_first = NULL;
        rpc_client_destroy(client);
    }
}

static void on_ended(void *context, const RpcError *error)
{
    Reader *reader = context;
    reader->is_over = true;
    reader->num_ends++;
    reader->error = *error;
}

static RpcRequest *read_logs(RpcClient *client, const char *name, int64_t count, bool follow,
                             Reader *reader)
{
    Viaduct__V1__StreamJobLogsRequest request = VIADUCT__V1__STREAM_JOB_LOGS_REQUEST__INIT;
    request.name = (char *)name;
    request.offset = count;
    request.follow = follow;
    reader->is_ordered = true;
    RpcRequest *handle = NULL;
    assert_int_equal(rpc_client_stream(client, JOBS, "StreamJobLogs", &request.base, on_message,
                                       on_ended, reader, &handle),
                     STATUS_OK);
    return handle;
}

/* ---------------------------------------------------------------- unary calls */
static void test_unary(void **state)
{
    Fixture *fixture = *state;
    Answer answer = get(fixture, "jobs/a", TIMEOUT_MS);
    assert_int_equal(answer.error.code, RPC_CODE_OK);
    assert_string_equal(answer.name, "jobs/a");
    assert_string_equal(answer.error.message, "");
}

static void test_empty_message(void **state)
{
    /* No field is set, so the request's body has no byte. */
    Answer answer = get(*state, "", TIMEOUT_MS);
    assert_int_equal(answer.error.code, RPC_CODE_OK);
    assert_string_equal(answer.name, "");
}

static void test_peer(void **state)
{
    Answer answer = get(*state, "peer", TIMEOUT_MS);
    assert_memory_equal(answer.name, "ipv4:127.0.0.1:", 15);
}

static void test_error_details(void **state)
{
    Answer answer = get(*state, "error", TIMEOUT_MS);
    assert_int_equal(answer.error.code, RPC_CODE_ALREADY_EXISTS);
    assert_string_equal(answer.error.reason, "JOB_EXISTS");
    assert_string_equal(answer.error.message, "job \"a\" ü %");
    assert_int_equal(answer.error.retry_after_ms, 1500);
}

static void test_error_text(void **state)
{
    (void)state;
    char text[2048];
    memset(text, 'x', sizeof text);
    text[sizeof text - 1] = '\0';
    memcpy(text,
           "\xFF"
           "a\xC3\xBC",
           4);
    memcpy(text + 1022, "\xC3\xBC", 2); /* the cut at 1023 bytes goes through it */
    RpcError error = rpc_error(RPC_CODE_INTERNAL, "R", "%s", text);
    assert_int_equal(strlen(error.message), 1023);
    assert_memory_equal(error.message, "?a\xC3\xBC", 4);
    assert_int_equal(error.message[1022], '?');
    assert_string_equal(rpc_code_name(RPC_CODE_DATA_LOSS), "DATA_LOSS");
    assert_string_equal(rpc_code_name((RpcCode)99), "UNKNOWN");
}

static void test_deadline(void **state)
{
    Fixture *fixture = *state;
    int64_t begin_ns = clock_now_ns();
    Answer answer = get(fixture, "hold and tell", 100);
    int64_t elapsed_ms = (clock_now_ns() - begin_ns) / CLOCK_NS_PER_MS;
    assert_int_equal(answer.error.code, RPC_CODE_DEADLINE_EXCEEDED);
    assert_true(elapsed_ms >= 99);
    run_until_count(fixture, &fixture->num_closed, 1);
}

static void test_cancel(void **state)
{
    Fixture *fixture = *state;
    Answer answer = {0};
    RpcRequest *request = ask(fixture->client, "hold and tell", TIMEOUT_MS, &answer);
    run_until_count(fixture, &fixture->num_held, 1);
    rpc_request_cancel(request);
    run_until(fixture, &answer.is_over);
    assert_int_equal(answer.error.code, RPC_CODE_CANCELLED);
    run_until_count(fixture, &fixture->num_closed, 1);
}

/* A handler that has not asked to be told may answer long after the client has gone. */
static void test_late_reply(void **state)
{
    Fixture *fixture = *state;
    Answer answer = {0};
    RpcRequest *request = ask(fixture->client, "hold", TIMEOUT_MS, &answer);
    run_until_count(fixture, &fixture->num_held, 1);
    rpc_request_cancel(request);
    run_until(fixture, &answer.is_over);
    get(fixture, "something else", TIMEOUT_MS);
    reply_job(fixture->held[0], "too late");
    assert_int_equal(answer.num_calls, 1);
}

static void test_held_reply(void **state)
{
    Fixture *fixture = *state;
    Answer answer = {0};
    ask(fixture->client, "hold and tell", TIMEOUT_MS, &answer);
    run_until_count(fixture, &fixture->num_held, 1);
    assert_int_equal(fixture->num_closed, 0);
    reply_job(fixture->held[0], "in the end");
    run_until(fixture, &answer.is_over);
    assert_string_equal(answer.name, "in the end");
    run_until_count(fixture, &fixture->num_closed, 1);
}

static void test_unimplemented(void **state)
{
    Fixture *fixture = *state;
    const char *const methods[] = {"ListJobs", "CreateJob"}; /* without handler, and not listed */
    Viaduct__V1__ListJobsRequest list = VIADUCT__V1__LIST_JOBS_REQUEST__INIT;
    Viaduct__V1__CreateJobRequest create = VIADUCT__V1__CREATE_JOB_REQUEST__INIT;
    const ProtobufCMessage *const requests[] = {&list.base, &create.base};
    for (int i = 0; i < 2; i++) {
        Answer answer = {0};
        assert_int_equal(rpc_client_call(fixture->client, JOBS, methods[i], requests[i], TIMEOUT_MS,
                                         on_answer, &answer, NULL),
                         STATUS_OK);
        run_until(fixture, &answer.is_over);
        assert_int_equal(answer.error.code, RPC_CODE_UNIMPLEMENTED);
        assert_string_equal(answer.error.reason, "METHOD_UNKNOWN");
        assert_non_null(strstr(answer.error.message, methods[i]));
    }
}

/* Sends `message` as if GetJob took one of its kind. */
static Answer get_forged(Fixture *fixture, const ProtobufCMessage *message)
{
    ProtobufCMethodDescriptor method = {"GetJob", message->descriptor,
                                        &viaduct__v1__job__descriptor};
    const unsigned order = 0;
    ProtobufCServiceDescriptor service = viaduct__v1__job_service__descriptor;
    service.n_methods = 1;
    service.methods = &method;
    service.method_indices_by_name = &order;
    Answer answer = {0};
    assert_int_equal(rpc_client_call(fixture->client, &service, "GetJob", message, TIMEOUT_MS,
                                     on_answer, &answer, NULL),
                     STATUS_OK);
    run_until(fixture, &answer.is_over);
    return answer;
}

static void test_undecodable(void **state)
{
    /* Field 1 as a varint, where GetJobRequest has text. */
    Viaduct__V1__WatchJobsResponse number = VIADUCT__V1__WATCH_JOBS_RESPONSE__INIT;
    number.type = 1;
    Answer answer = get_forged(*state, &number.base);
    assert_int_equal(answer.error.code, RPC_CODE_INVALID_ARGUMENT);
    assert_string_equal(answer.error.reason, "REQUEST_UNDECODABLE");
    /* Field 1 as bytes: overlong, surrogate, cut short, NUL; then a good one. */
    static const struct {
        const char *bytes;
        size_t length;
        bool is_text;
    } CASES[] = {{"\xC0\xAF", 2, false},
                 {"\xED\xA0\x80", 3, false},
                 {"a\xE2\x82", 3, false},
                 {"a\0b", 3, false},
                 {"\xF4\x90\x80\x80", 4, false},
                 {"\x80", 1, false},
                 {"\xE2\x82\xAC\xF0\x9F\x9A\x82", 7, true}};
    for (size_t i = 0; i < sizeof CASES / sizeof CASES[0]; i++) {
        Viaduct__V1__StreamJobLogsResponse bytes = VIADUCT__V1__STREAM_JOB_LOGS_RESPONSE__INIT;
        bytes.data.data = (uint8_t *)CASES[i].bytes;
        bytes.data.len = CASES[i].length;
        answer = get_forged(*state, &bytes.base);
        assert_int_equal(answer.error.code,
                         CASES[i].is_text ? RPC_CODE_OK : RPC_CODE_INVALID_ARGUMENT);
    }
}

static void test_oversize(void **state)
{
    Fixture *fixture = *state;
    enum {
        NUM_BYTES = 100 << 10
    };
    char *name = NULL;
    assert_int_equal(MEMORY_NEW(&name, NUM_BYTES + 1), STATUS_OK);
    memset(name, 'x', NUM_BYTES);
    Answer answer = get(fixture, name, TIMEOUT_MS);
    assert_int_equal(answer.error.code, RPC_CODE_RESOURCE_EXHAUSTED);
    name[60 << 10] = '\0';
    answer = get(fixture, name, TIMEOUT_MS);
    assert_int_equal(answer.error.code, RPC_CODE_OK);
    memory_free(name);
}

static void test_concurrent(void **state)
{
    Fixture *fixture = *state;
    enum {
        NUM_CALLS = 1000
    };
    Answer *answers = NULL;
    int count = 0;
    assert_int_equal(MEMORY_NEW(&answers, NUM_CALLS), STATUS_OK);
    for (int i = 0; i < NUM_CALLS; i++) {
        char name[32];
        snprintf(name, sizeof name, "jobs/%d", i);
        answers[i].count = &count;
        ask(fixture->client, name, TIMEOUT_MS, &answers[i]);
    }
    run_until_count(fixture, &count, NUM_CALLS);
    for (int i = 0; i < NUM_CALLS; i++) {
        char name[32];
        snprintf(name, sizeof name, "jobs/%d", i);
        assert_int_equal(answers[i].error.code, RPC_CODE_OK);
        assert_int_equal(answers[i].num_calls, 1);
        assert_string_equal(answers[i].name, name);
    }
    memory_free(answers);
}

static int compare_ns(const void *left, const void *right)
{
    int64_t a = *(const int64_t *)left;
    int64_t b = *(const int64_t *)right;
    return (a > b) - (a < b);
}

static void test_latency(void **state)
{
    Fixture *fixture = *state;
    int64_t *latencies_ns = NULL;
    assert_int_equal(MEMORY_NEW(&latencies_ns, NUM_LATENCIES), STATUS_OK);
    for (int i = 0; i < NUM_LATENCIES; i++) {
        int64_t begin_ns = clock_now_ns();
        get(fixture, "jobs/a", TIMEOUT_MS);
        latencies_ns[i] = clock_now_ns() - begin_ns;
    }
    qsort(latencies_ns, NUM_LATENCIES, sizeof *latencies_ns, compare_ns);
    printf("unary call: p50 %" PRId64 " us, p99 %" PRId64 " us\n",
           latencies_ns[NUM_LATENCIES / 2] / 1000, latencies_ns[NUM_LATENCIES * 99 / 100] / 1000);
    memory_free(latencies_ns);
}

/* ---------------------------------------------------------------- streams */
static void test_stream(void **state)
{
    Fixture *fixture = *state;
    enum {
        NUM_MESSAGES = 10000
    };
    Reader reader = {0};
    int64_t begin_ns = clock_now_ns();
    read_logs(fixture->client, "count", NUM_MESSAGES, false, &reader);
    run_until(fixture, &reader.is_over);
    printf("stream: %.0f messages/s\n", NUM_MESSAGES * 1e9 / (double)(clock_now_ns() - begin_ns));
    assert_int_equal(reader.error.code, RPC_CODE_OK);
    assert_int_equal(reader.num_messages, NUM_MESSAGES);
    assert_true(reader.is_ordered);
    run_until_count(fixture, &fixture->num_closed, 1);
    assert_int_equal(reader.num_ends, 1);
}

static void test_empty_stream(void **state)
{
    Fixture *fixture = *state;
    Reader reader = {0};
    read_logs(fixture->client, "count", 0, false, &reader);
    run_until(fixture, &reader.is_over);
    assert_int_equal(reader.error.code, RPC_CODE_OK);
    assert_int_equal(reader.num_messages, 0);
}

static void test_stream_cancel(void **state)
{
    Fixture *fixture = *state;
    Reader reader = {0};
    RpcRequest *request = read_logs(fixture->client, "open", 5, true, &reader);
    run_until_count(fixture, &reader.num_messages, 5);
    rpc_request_cancel(request);
    run_until(fixture, &reader.is_over);
    assert_int_equal(reader.error.code, RPC_CODE_CANCELLED);
    run_until_count(fixture, &fixture->num_closed, 1);
    assert_int_equal(reader.num_ends, 1);
}

static void test_stream_held(void **state)
{
    Fixture *fixture = *state;
    Reader reader = {0};
    read_logs(fixture->client, "open", 2, true, &reader);
    run_until_count(fixture, &reader.num_messages, 2);
    send_log(fixture->held[0], 2, NULL, 0);
    run_until_count(fixture, &reader.num_messages, 3);
    RpcError error = rpc_error(RPC_CODE_OUT_OF_RANGE, "REVISION_COMPACTED", "start again");
    rpc_call_fail(fixture->held[0], &error);
    run_until(fixture, &reader.is_over);
    assert_int_equal(reader.error.code, RPC_CODE_OUT_OF_RANGE);
    assert_string_equal(reader.error.reason, "REVISION_COMPACTED");
    assert_true(reader.is_ordered);
    run_until_count(fixture, &fixture->num_closed, 1);
}

/* On one loop the reader cannot read while the handler sends. */
static void test_slow_reader(void **state)
{
    Fixture *fixture = *state;
    Reader reader = {0};
    read_logs(fixture->client, "flood", 500, false, &reader);
    run_until(fixture, &reader.is_over);
    assert_int_equal(reader.error.code, RPC_CODE_RESOURCE_EXHAUSTED);
    assert_string_equal(reader.error.reason, "READER_TOO_SLOW");
    assert_true(reader.num_messages < fixture->num_sent);
    run_until_count(fixture, &fixture->num_closed, 1);
}

static void on_timer(uv_timer_t *timer)
{
    *(bool *)timer->data = true;
}

static void run_for(Fixture *fixture, uint64_t time_ms)
{
    bool is_over = false;
    uv_timer_t timer;
    uv_timer_init(&fixture->loop, &timer);
    timer.data = &is_over;
    uv_timer_start(&timer, on_timer, time_ms, 0);
    run_until(fixture, &is_over);
    uv_close((uv_handle_t *)&timer, NULL);
    uv_run(&fixture->loop, UV_RUN_NOWAIT);
}

/* A reader that does not read at all: its loop stands still, so that flow control holds the message
 * in flight. The failed call ends all the same, without waiting for it. */
static void test_stuck_reader(void **state)
{
    Fixture *fixture = *state;
    Fixture other;
    init_loop(&other);
    RpcClient *client = dial(&other, rpc_server_port(fixture->server));
    Reader reader = {0};
    read_logs(client, "open", 0, true, &reader);
    run_until_count(fixture, &fixture->num_held, 1);
    uint8_t data[8192] = {0};
    for (int i = 0; i < 1000; i++) {
        send_log(fixture->held[0], i, data, sizeof data);
    }
    run_for(fixture, 300);
    assert_true(send_log(fixture->held[0], 1000, data, sizeof data) > 500);
    RpcError error = rpc_error(RPC_CODE_ABORTED, "READER_STUCK", "read");
    int64_t begin_ns = clock_now_ns();
    rpc_call_fail(fixture->held[0], &error);
    run_until_count(fixture, &fixture->num_closed, 1);
    int64_t waited_ms = (clock_now_ns() - begin_ns) / CLOCK_NS_PER_MS;
    assert_true(waited_ms > 2000 && waited_ms < 10000);
    assert_int_equal(reader.num_messages, 0);
    run_until(&other, &reader.is_over);
    assert_int_equal(reader.error.code, RPC_CODE_ABORTED);
    rpc_client_destroy(client);
    done_loop(&other);
}

/* ---------------------------------------------------------------- ends */
static void test_client_destroy(void **state)
{
    Fixture *fixture = *state;
    RpcClient *client = dial(fixture, rpc_server_port(fixture->server));
    Answer answer = {0};
    Reader reader = {0};
    ask(client, "hold and tell", TIMEOUT_MS, &answer);
    read_logs(client, "open", 1, true, &reader);
    run_until_count(fixture, &fixture->num_held, 2);
    rpc_client_destroy(client);
    assert_int_equal(answer.error.code, RPC_CODE_CANCELLED);
    assert_int_equal(reader.error.code, RPC_CODE_CANCELLED);
    run_until_count(fixture, &fixture->num_closed, 2);
    assert_int_equal(answer.num_calls, 1);
    assert_int_equal(reader.num_ends, 1);
}

static void test_client_destroy_in_callback(void **state)
{
    Fixture *fixture = *state;
    Reader reader = {.destroy_at_first = dial(fixture, rpc_server_port(fixture->server))};
    read_logs(reader.destroy_at_first, "open", 3, true, &reader);
    run_until(fixture, &reader.is_over);
    assert_int_equal(reader.num_messages, 1);
    assert_int_equal(reader.error.code, RPC_CODE_CANCELLED);
    run_until_count(fixture, &fixture->num_closed, 1);
    assert_int_equal(reader.num_ends, 1);
}

static void test_server_missing(void **state)
{
    Fixture *fixture = *state;
    int port = rpc_server_port(fixture->server);
    stop_server(fixture, 0);
    RpcClient *client = dial(fixture, port);
    Answer answer = {0};
    int64_t begin_ns = clock_now_ns();
    ask(client, "jobs/a", TIMEOUT_MS, &answer);
    run_until(fixture, &answer.is_over);
    assert_int_equal(answer.error.code, RPC_CODE_UNAVAILABLE);
    assert_true(clock_now_ns() - begin_ns < 5 * CLOCK_NS_PER_S);
    assert_string_not_equal(answer.error.message, "");
    rpc_client_destroy(client);
}

/* The same client finds the server that comes back at the same port. */
static void test_server_returns(void **state)
{
    Fixture *fixture = *state;
    char address[32];
    snprintf(address, sizeof address, "127.0.0.1:%d", rpc_server_port(fixture->server));
    get(fixture, "jobs/a", TIMEOUT_MS);
    stop_server(fixture, 0);
    Answer answer = get(fixture, "jobs/a", TIMEOUT_MS);
    assert_int_equal(answer.error.code, RPC_CODE_UNAVAILABLE);
    start_server(fixture, address);
    int64_t begin_ns = clock_now_ns();
    while (answer.error.code != RPC_CODE_OK) {
        answer = get(fixture, "jobs/a", TIMEOUT_MS);
    }
    assert_true(clock_now_ns() - begin_ns < 10 * CLOCK_NS_PER_S);
}

static void test_port_taken(void **state)
{
    Fixture *fixture = *state;
    char address[32];
    snprintf(address, sizeof address, "127.0.0.1:%d", rpc_server_port(fixture->server));
    RpcServerOptions options = {.address = address, .methods = METHODS, .num_methods = 1};
    RpcServer *server = NULL;
    assert_int_equal(rpc_server_create(fixture->rpc, &options, &server), STATUS_CONFLICT);
    assert_null(server);
    assert_non_null(strstr(status_message(), address));
    status_clear();
}

static void test_port_missing(void **state)
{
    Fixture *fixture = *state;
    RpcServerOptions options = {.address = "127.0.0.1", .methods = METHODS, .num_methods = 1};
    RpcServer *server = NULL;
    RpcClient *client = NULL;
    assert_int_equal(rpc_server_create(fixture->rpc, &options, &server), STATUS_INVALID);
    assert_int_equal(rpc_client_create(fixture->rpc, "localhost", &client), STATUS_INVALID);
    status_clear();
}

static void test_shutdown_streams(void **state)
{
    Fixture *fixture = *state;
    Reader readers[3] = {0};
    for (int i = 0; i < 3; i++) {
        read_logs(fixture->client, "open", 1, true, &readers[i]);
    }
    for (int i = 0; i < 3; i++) {
        run_until_count(fixture, &readers[i].num_messages, 1);
    }
    stop_server(fixture, 2000);
    assert_int_equal(fixture->num_closed, 3);
    for (int i = 0; i < 3; i++) {
        run_until(fixture, &readers[i].is_over);
        assert_int_equal(readers[i].error.code, RPC_CODE_UNAVAILABLE);
        assert_string_equal(readers[i].error.reason, "SHUTTING_DOWN");
    }
}

/* A unary call gets its answer within the grace time, and new calls are refused. */
static void test_shutdown_grace(void **state)
{
    Fixture *fixture = *state;
    Answer answer = {0};
    ask(fixture->client, "hold", TIMEOUT_MS, &answer);
    run_until_count(fixture, &fixture->num_held, 1);
    rpc_server_shutdown(fixture->server, TIMEOUT_MS, on_server_done, fixture);
    Answer refused = get(fixture, "jobs/a", TIMEOUT_MS);
    assert_int_equal(refused.error.code, RPC_CODE_UNAVAILABLE);
    assert_false(fixture->is_server_done);
    reply_job(fixture->held[0], "in time");
    run_until(fixture, &answer.is_over);
    assert_string_equal(answer.name, "in time");
    run_until(fixture, &fixture->is_server_done);
    fixture->server = NULL;
}

/* Calls that are never answered, with and without a closed callback, do not keep the server. */
static void test_shutdown_cancels(void **state)
{
    Fixture *fixture = *state;
    Answer answers[2] = {0};
    ask(fixture->client, "hold", TIMEOUT_MS, &answers[0]);
    ask(fixture->client, "hold and tell", TIMEOUT_MS, &answers[1]);
    run_until_count(fixture, &fixture->num_held, 2);
    stop_server(fixture, 100);
    assert_int_equal(fixture->num_closed, 1);
    run_until(fixture, &answers[0].is_over);
    run_until(fixture, &answers[1].is_over);
    assert_int_equal(answers[0].error.code, RPC_CODE_UNAVAILABLE);
    assert_int_equal(answers[1].error.code, RPC_CODE_UNAVAILABLE);
}

/* ---------------------------------------------------------------- other threads and processes */
enum {
    CALLS_PER_THREAD = 200,
    NUM_THREADS = 3
};

typedef struct OtherThread {
    uv_thread_t thread;
    uv_async_t finished; /* on the server's loop */
    int *num_finished;
    int port;
    int num_right;
} OtherThread;

static void run_client_thread(void *argument)
{
    OtherThread *other = argument;
    Fixture fixture;
    init_loop(&fixture);
    fixture.client = dial(&fixture, other->port);
    for (int i = 0; i < CALLS_PER_THREAD; i++) {
        char name[32];
        snprintf(name, sizeof name, "jobs/%d", i);
        Answer answer = get(&fixture, name, TIMEOUT_MS);
        other->num_right += answer.error.code == RPC_CODE_OK && strcmp(answer.name, name) == 0;
    }
    rpc_client_destroy(fixture.client);
    done_loop(&fixture);
    uv_async_send(&other->finished);
}

static void on_thread_finished(uv_async_t *async)
{
    OtherThread *other = async->data;
    uv_thread_join(&other->thread);
    uv_close((uv_handle_t *)async, NULL);
    ++*other->num_finished;
}

static void test_threads(void **state)
{
    Fixture *fixture = *state;
    OtherThread others[NUM_THREADS] = {0};
    int num_finished = 0;
    for (int i = 0; i < NUM_THREADS; i++) {
        others[i].port = rpc_server_port(fixture->server);
        others[i].num_finished = &num_finished;
        others[i].finished.data = &others[i];
        assert_int_equal(uv_async_init(&fixture->loop, &others[i].finished, on_thread_finished), 0);
        assert_int_equal(uv_thread_create(&others[i].thread, run_client_thread, &others[i]), 0);
    }
    run_until_count(fixture, &num_finished, NUM_THREADS);
    for (int i = 0; i < NUM_THREADS; i++) {
        assert_int_equal(others[i].num_right, CALLS_PER_THREAD);
    }
    /* The closed handles leave the loop before their memory goes. */
    uv_run(&fixture->loop, UV_RUN_NOWAIT);
}

/* Runs this program again; its descriptor 3 is the write end of a pipe whose other end is returned.
 */
static pid_t spawn_self(const char *mode, const char *argument, int *read_end_out)
{
    int ends[2];
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    posix_spawn_file_actions_t actions;
    assert_int_equal(posix_spawn_file_actions_init(&actions), 0);
    assert_int_equal(posix_spawn_file_actions_adddup2(&actions, ends[1], 3), 0);
    char *arguments[] = {(char *)"rpc_test", (char *)mode, (char *)argument, NULL};
    pid_t pid = 0;
    assert_int_equal(posix_spawn(&pid, "/proc/self/exe", &actions, NULL, arguments, environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    *read_end_out = ends[0];
    return pid;
}

/* A client in mid-stream that is killed, without a word to the server. */
static int die(const char *port)
{
    Fixture fixture;
    init_loop(&fixture);
    RpcClient *client = dial(&fixture, (int)strtol(port, NULL, 10));
    Reader reader = {.die_at = 100};
    read_logs(client, "open", 200, true, &reader);
    run_until(&fixture, &reader.is_over);
    return 1;
}

static void test_client_dies(void **state)
{
    Fixture *fixture = *state;
    char port[16];
    snprintf(port, sizeof port, "%d", rpc_server_port(fixture->server));
    int read_end;
    pid_t pid = spawn_self("die", port, &read_end);
    run_until_count(fixture, &fixture->num_closed, 1);
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    close(read_end);
    /* What the handler still sends to the dead call's successor arrives. */
    assert_string_equal(get(fixture, "still here", TIMEOUT_MS).name, "still here");
}

/* A server that tells its port on descriptor 3 and runs until it is killed. */
static int serve(void)
{
    Fixture fixture;
    init_loop(&fixture);
    start_server(&fixture, "127.0.0.1:0");
    int port = rpc_server_port(fixture.server);
    CHECK(write(3, &port, sizeof port) == (ssize_t)sizeof port);
    uv_run(&fixture.loop, UV_RUN_DEFAULT);
    return 1;
}

static void test_server_dies(void **state)
{
    Fixture *fixture = *state;
    int read_end;
    pid_t pid = spawn_self("serve", NULL, &read_end);
    struct pollfd wait_for_port = {.fd = read_end, .events = POLLIN};
    int port = 0;
    assert_int_equal(poll(&wait_for_port, 1, TIMEOUT_MS), 1);
    assert_int_equal(read(read_end, &port, sizeof port), sizeof port);
    RpcClient *client = dial(fixture, port);
    Answer answer = {0};
    Reader reader = {0};
    read_logs(client, "open", 3, true, &reader);
    ask(client, "hold", TIMEOUT_MS, &answer);
    run_until_count(fixture, &reader.num_messages, 3);
    kill(pid, SIGKILL);
    run_until(fixture, &reader.is_over);
    run_until(fixture, &answer.is_over);
    assert_int_equal(reader.error.code, RPC_CODE_UNAVAILABLE);
    assert_int_equal(answer.error.code, RPC_CODE_UNAVAILABLE);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    close(read_end);
    rpc_client_destroy(client);
}

/* An Rpc with nothing on it, twice in one process. */
static void test_bare(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        Fixture fixture;
        init_loop(&fixture);
        done_loop(&fixture);
    }
}

int main(int num_arguments, char **arguments)
{
    if (num_arguments == 3 && strcmp(arguments[1], "die") == 0) {
        return die(arguments[2]);
    }
    if (num_arguments == 2 && strcmp(arguments[1], "serve") == 0) {
        return serve();
    }
    if (num_arguments == 2) {
        cmocka_set_test_filter(arguments[1]);
    }
#define RPC_TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bare),
        cmocka_unit_test(test_error_text),
        RPC_TEST(test_unary),
        RPC_TEST(test_empty_message),
        RPC_TEST(test_peer),
        RPC_TEST(test_error_details),
        RPC_TEST(test_deadline),
        RPC_TEST(test_cancel),
        RPC_TEST(test_late_reply),
        RPC_TEST(test_held_reply),
        RPC_TEST(test_unimplemented),
        RPC_TEST(test_undecodable),
        RPC_TEST(test_oversize),
        RPC_TEST(test_concurrent),
        RPC_TEST(test_latency),
        RPC_TEST(test_stream),
        RPC_TEST(test_empty_stream),
        RPC_TEST(test_stream_cancel),
        RPC_TEST(test_stream_held),
        RPC_TEST(test_slow_reader),
        RPC_TEST(test_stuck_reader),
        RPC_TEST(test_client_destroy),
        RPC_TEST(test_client_destroy_in_callback),
        RPC_TEST(test_server_missing),
        RPC_TEST(test_server_returns),
        RPC_TEST(test_port_taken),
        RPC_TEST(test_port_missing),
        RPC_TEST(test_shutdown_streams),
        RPC_TEST(test_shutdown_grace),
        RPC_TEST(test_shutdown_cancels),
        RPC_TEST(test_threads),
        RPC_TEST(test_client_dies),
        RPC_TEST(test_server_dies),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
