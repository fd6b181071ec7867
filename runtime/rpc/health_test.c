/* The health service, asked by our own client; foreign_client_test asks it with another's. */
#include "base/memory.h"
#include "grpc/health/v1/health.pb-c.h"
#include "rpc/health.h"

#include <stdio.h>
#include <string.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

#define HEALTH (&grpc__health__v1__health__descriptor)

enum {
    TIMEOUT_MS = 20000,
    STATES_MAX = 16
};

/* The numbers of the protocol, not our generated names. */
enum {
    UNKNOWN = 0,
    SERVING = 1,
    NOT_SERVING = 2,
    SERVICE_UNKNOWN = 3
};

typedef struct Fixture {
    uv_loop_t loop;
    uv_timer_t watchdog;
    Rpc *rpc;
    Health *health;
    RpcServer *server;
    RpcClient *client;
    bool is_server_done;
} Fixture;

typedef struct Watch {
    int states[STATES_MAX];
    int num_states;
    bool is_over;
    RpcError error;
} Watch;

static void on_watchdog(uv_timer_t *timer)
{
    (void)timer;
    fprintf(stderr, "health_test: nothing happened for %d ms\n", TIMEOUT_MS);
    abort();
}

static void run_until_count(Fixture *fixture, const volatile int *count, int wanted)
{
    while (*count < wanted) {
        uv_run(&fixture->loop, UV_RUN_ONCE);
    }
}

static void run_until(Fixture *fixture, const volatile bool *flag)
{
    while (!*flag) {
        uv_run(&fixture->loop, UV_RUN_ONCE);
    }
}

static int setup(void **state)
{
    Fixture *fixture = NULL;
    assert_int_equal(MEMORY_NEW(&fixture, 1), STATUS_OK);
    assert_int_equal(uv_loop_init(&fixture->loop), 0);
    uv_timer_init(&fixture->loop, &fixture->watchdog);
    uv_timer_start(&fixture->watchdog, on_watchdog, TIMEOUT_MS, 0);
    assert_int_equal(rpc_create(&fixture->loop, &fixture->rpc), STATUS_OK);
    assert_int_equal(health_create(&fixture->health), STATUS_OK);
    RpcService service = health_service(fixture->health);
    RpcServerOptions options = {.address = "127.0.0.1:0", .services = &service, .num_services = 1};
    assert_int_equal(rpc_server_create(fixture->rpc, &options, &fixture->server), STATUS_OK);
    char target[32];
    snprintf(target, sizeof target, "127.0.0.1:%d", rpc_server_port(fixture->server));
    assert_int_equal(rpc_client_create(fixture->rpc, target, &fixture->client), STATUS_OK);
    *state = fixture;
    return 0;
}

static void on_server_done(void *context)
{
    *(bool *)context = true;
}

static int teardown(void **state)
{
    Fixture *fixture = *state;
    rpc_client_destroy(fixture->client);
    if (!fixture->is_server_done) {
        rpc_server_shutdown(fixture->server, 0, on_server_done, &fixture->is_server_done);
        run_until(fixture, &fixture->is_server_done);
    }
    health_destroy(fixture->health);
    rpc_destroy(fixture->rpc);
    uv_close((uv_handle_t *)&fixture->watchdog, NULL);
    uv_run(&fixture->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&fixture->loop), 0);
    memory_free(fixture);
    return 0;
}

static void note_state(Watch *watch, const ProtobufCMessage *message)
{
    assert_true(watch->num_states < STATES_MAX);
    watch->states[watch->num_states++] =
        (int)((const Grpc__Health__V1__HealthCheckResponse *)message)->status;
}

static void on_checked(void *context, const ProtobufCMessage *response, const RpcError *error)
{
    Watch *watch = context;
    watch->error = *error;
    watch->is_over = true;
    if (response != NULL) {
        note_state(watch, response);
    }
}

static void on_state(void *context, const ProtobufCMessage *message)
{
    note_state(context, message);
}

static void on_ended(void *context, const RpcError *error)
{
    Watch *watch = context;
    watch->error = *error;
    watch->is_over = true;
}

/* The status number, or minus the error's code. */
static int check(Fixture *fixture, const char *service)
{
    Watch watch = {0};
    Grpc__Health__V1__HealthCheckRequest request = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    request.service = (char *)service;
    assert_int_equal(rpc_client_call(fixture->client, HEALTH, "Check", &request.base, TIMEOUT_MS,
                                     on_checked, &watch, NULL),
                     STATUS_OK);
    run_until(fixture, &watch.is_over);
    return watch.error.code == RPC_CODE_OK ? watch.states[0] : -(int)watch.error.code;
}

static RpcRequest *start_watch(Fixture *fixture, const char *service, Watch *watch)
{
    RpcRequest *handle = NULL;
    Grpc__Health__V1__HealthCheckRequest request = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    request.service = (char *)service;
    assert_int_equal(rpc_client_stream(fixture->client, HEALTH, "Watch", &request.base, on_state,
                                       on_ended, watch, &handle),
                     STATUS_OK);
    return handle;
}

static void set(Fixture *fixture, const char *service, bool is_serving)
{
    assert_int_equal(health_set(fixture->health, service, is_serving), STATUS_OK);
}

static void test_check(void **state)
{
    Fixture *fixture = *state;
    assert_int_equal(check(fixture, ""), NOT_SERVING);
    set(fixture, "", true);
    assert_int_equal(check(fixture, ""), SERVING);
    assert_int_equal(check(fixture, "viaduct.v1.JobService"), -(int)RPC_CODE_NOT_FOUND);
    set(fixture, "viaduct.v1.JobService", false);
    assert_int_equal(check(fixture, "viaduct.v1.JobService"), NOT_SERVING);
    set(fixture, "viaduct.v1.JobService", true);
    assert_int_equal(check(fixture, "viaduct.v1.JobService"), SERVING);
    assert_int_equal(check(fixture, ""), SERVING);
}

static void test_watch(void **state)
{
    Fixture *fixture = *state;
    Watch all = {0};
    Watch later = {0};
    RpcRequest *handle = start_watch(fixture, "", &all);
    start_watch(fixture, "later", &later);
    run_until_count(fixture, &all.num_states, 1);
    run_until_count(fixture, &later.num_states, 1);
    set(fixture, "", true);
    set(fixture, "", true); /* no change, no message */
    set(fixture, "later", true);
    run_until_count(fixture, &all.num_states, 2);
    run_until_count(fixture, &later.num_states, 2);
    set(fixture, "", false);
    run_until_count(fixture, &all.num_states, 3);
    rpc_request_cancel(handle);
    run_until(fixture, &all.is_over);
    set(fixture, "", true);
    set(fixture, "later", false);
    run_until_count(fixture, &later.num_states, 3);
    const int all_wanted[] = {NOT_SERVING, SERVING, NOT_SERVING};
    const int later_wanted[] = {SERVICE_UNKNOWN, SERVING, NOT_SERVING};
    assert_int_equal(all.num_states, 3);
    assert_memory_equal(all.states, all_wanted, sizeof all_wanted);
    assert_int_equal(later.num_states, 3);
    assert_memory_equal(later.states, later_wanted, sizeof later_wanted);
    /* The last watcher ends with the server. */
    rpc_server_shutdown(fixture->server, TIMEOUT_MS, on_server_done, &fixture->is_server_done);
    run_until(fixture, &fixture->is_server_done);
    run_until(fixture, &later.is_over);
    assert_int_equal(later.error.code, RPC_CODE_UNAVAILABLE);
}

/* On one loop the watcher cannot read between the changes. */
static void test_slow_watcher(void **state)
{
    Fixture *fixture = *state;
    Watch watch = {0};
    start_watch(fixture, "", &watch);
    run_until_count(fixture, &watch.num_states, 1);
    for (int i = 0; i < 100; i++) {
        set(fixture, "", i % 2 == 0);
    }
    run_until(fixture, &watch.is_over);
    assert_int_equal(watch.error.code, RPC_CODE_RESOURCE_EXHAUSTED);
    assert_string_equal(watch.error.reason, "WATCHER_TOO_SLOW");
}

static void test_long_name(void **state)
{
    Fixture *fixture = *state;
    char name[300];
    memset(name, 'x', sizeof name);
    name[sizeof name - 1] = '\0';
    Watch watch = {0};
    start_watch(fixture, name, &watch);
    run_until(fixture, &watch.is_over);
    assert_int_equal(watch.error.code, RPC_CODE_INVALID_ARGUMENT);
    assert_int_equal(check(fixture, name), -(int)RPC_CODE_NOT_FOUND);
}

int main(void)
{
#define HEALTH_TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        HEALTH_TEST(test_check),
        HEALTH_TEST(test_watch),
        HEALTH_TEST(test_slow_watcher),
        HEALTH_TEST(test_long_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
