/* Reductions and norms over tp, a tied pair of stages and replicas, whole and sharded, on ranks as
 * threads, against sums over plain lists. Gradients are small whole numbers, so every order gives
 * the same sums. */
#include "base/hash.h"
#include "comm/comm_local.h"
#include "train/gradients.h"

#include <math.h>
#include <pthread.h>
#include <string.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

enum {
    RANKS_MAX = 24,
    TIMEOUT_MS = 60 * 1000,
    STAGES_MAX = 2,
};

typedef struct Declared {
    ParamSpec spec;
    int stage; /* -1: on the first and the last */
} Declared;

static const Declared declared[] = {
    {{.name = "table", .num_dims = 2, .dims = {7, 3}, .shard_dim = 0, .is_tied = true}, -1},
    {{.name = "norm.0", .num_dims = 1, .dims = {5}, .shard_dim = -1, .grad_is_partial = true}, 0},
    {{.name = "frozen.0", .num_dims = 2, .dims = {4, 4}, .shard_dim = 0}, 0},
    {{.name = "matrix.0", .num_dims = 2, .dims = {5, 6}, .shard_dim = 1}, 0},
    {{.name = "plain.0", .num_dims = 1, .dims = {9}, .shard_dim = -1}, 0},
    {{.name = "frozen.1", .num_dims = 1, .dims = {8}, .shard_dim = -1, .grad_is_partial = true}, 1},
    {{.name = "partial.1", .num_dims = 2, .dims = {3, 2}, .shard_dim = -1, .grad_is_partial = true},
     1},
    {{.name = "matrix.1", .num_dims = 3, .dims = {2, 5, 3}, .shard_dim = 1}, 1},
    {{.name = "tiny.1", .num_dims = 1, .dims = {1}, .shard_dim = 0}, 1},
    {{.name = "last.1", .num_dims = 1, .dims = {3}, .shard_dim = -1, .grad_is_partial = true}, 1},
};

enum {
    NUM_DECLARED = sizeof declared / sizeof *declared,
};

typedef struct Layout {
    int stages;
    int data;
    int tp;
    bool is_sharded;
    bool is_frozen; /* all of it */
} Layout;

typedef struct Rank {
    Layout layout;
    int stage, d, t;
    Status status;
    Comm *world;
    pthread_t thread;
    int64_t wrong;
    int64_t checked;
    double square;
} Rank;

static bool is_frozen(const Layout *layout, const Declared *param)
{
    return layout->is_frozen || strncmp(param->spec.name, "frozen", 6) == 0;
}

static bool is_on(const Layout *layout, const Declared *param, int stage)
{
    return layout->stages == 1 || param->stage < 0 || param->stage == stage;
}

/* A whole number in [-8, 8]: what one rank's backward pass leaves for an element of the whole
 * tensor. tp ranks that hold the same whole gradient agree. */
static double contribution(const Declared *param, int stage, int d, int t, int64_t element)
{
    uint64_t hash = hash_text(param->spec.name);
    hash = hash_u64(hash, (uint64_t)(param->stage < 0 ? stage : 0));
    hash = hash_u64(hash, (uint64_t)d);
    hash = hash_u64(hash, (uint64_t)(param->spec.grad_is_partial ? t : 0));
    return (double)(hash_u64(hash, (uint64_t)element) % 17) - 8;
}

static double expected_sum(const Layout *layout, const Declared *param, int64_t element)
{
    double sum = 0;
    int stages = param->stage < 0 ? layout->stages : 1;
    int parts = param->spec.grad_is_partial ? layout->tp : 1;
    for (int s = 0; s < stages; s++) {
        for (int d = 0; d < layout->data; d++) {
            for (int t = 0; t < parts; t++) {
                sum += contribution(param, s, d, t, element);
            }
        }
    }
    return sum;
}

static int64_t global_element(const Param *param, int64_t local)
{
    int64_t element = 0;
    int64_t stride = 1;
    for (int i = param->spec.num_dims - 1; i >= 0; i--) {
        int64_t at = local % param->value.dims[i];
        local /= param->value.dims[i];
        at += i == param->spec.shard_dim ? param->spec.shard.begin : 0;
        element += at * stride;
        stride *= param->spec.dims[i];
    }
    return element;
}

static Status split_stride(Rank *rank, int first, int stride, int size, Comm **comm_out)
{
    int ranks[RANKS_MAX];
    for (int i = 0; i < size; i++) {
        ranks[i] = first + i * stride;
    }
    return comm_split(rank->world, ranks, size, "group", comm_out);
}

/* World rank (stage * data + d) * tp + t. */
static Status make_groups(Rank *rank, GradientGroups *groups)
{
    const Layout *layout = &rank->layout;
    int in_stage = rank->d * layout->tp + rank->t;
    int stage = rank->stage * layout->data * layout->tp;
    TRY(split_stride(rank, stage + rank->d * layout->tp, 1, layout->tp, &groups->tp));
    TRY(split_stride(rank, stage + rank->t, layout->tp, layout->data, &groups->data));
    if (layout->stages > 1) {
        TRY(split_stride(rank, in_stage, layout->data * layout->tp, 2, &groups->tied));
    }
    return STATUS_OK;
}

static Status declare(const Rank *rank, ParamSet *set)
{
    for (int i = 0; i < NUM_DECLARED; i++) {
        if (!is_on(&rank->layout, &declared[i], rank->stage)) {
            continue;
        }
        ParamSpec spec = declared[i].spec;
        if (spec.shard_dim >= 0) {
            spec.shard = range_part(spec.dims[spec.shard_dim], rank->layout.tp, rank->t);
        }
        bool counts =
            (spec.shard_dim >= 0 || rank->t == 0) && (declared[i].stage >= 0 || rank->stage == 0);
        int index = 0;
        TRY(param_set_add(set, &spec, counts, &index));
    }
    return param_set_allocate(set);
}

static const Declared *find_declared(const Param *param)
{
    for (int i = 0; i < NUM_DECLARED; i++) {
        if (strcmp(declared[i].spec.name, param->spec.name) == 0) {
            return &declared[i];
        }
    }
    return NULL;
}

/* Fills the gradients, or compares what lies in `valid`. */
static void visit(Rank *rank, ParamSet *set, Range valid, bool fill)
{
    for (int i = 0; i < set->num_params; i++) {
        const Param *param = &set->params[i];
        const Declared *from = find_declared(param);
        int64_t count = is_frozen(&rank->layout, from) ? 0 : tensor_count(&param->value);
        for (int64_t e = 0; e < count; e++) {
            int64_t element = global_element(param, e);
            int64_t at = param->offset + e;
            if (fill) {
                set->grads[at] = (float)contribution(from, rank->stage, rank->d, rank->t, element);
            } else if (valid.begin <= at && at < valid.end) {
                double expected = expected_sum(&rank->layout, from, element);
                rank->wrong += (double)set->grads[at] != expected;
                rank->checked++;
            }
        }
    }
}

static Status reduce(Rank *rank, ParamSet *set, const GradientGroups *groups, Stream *stream)
{
    Gradients gradients;
    TRY(gradients_init(&gradients, set, groups, rank->layout.is_sharded));
    Range valid = {0, set->trained_count};
    if (rank->layout.is_sharded) {
        valid = state_shard_range(&gradients.shard);
    }
    /* Twice: what a step leaves is gone in the next. */
    for (int step = 0; step < 2; step++) {
        TRY(gradients_zero(&gradients, stream));
        visit(rank, set, valid, true);
        TRY(gradients_reduce(&gradients, stream));
        visit(rank, set, valid, false);
    }
    TRY(gradients_add_square(&gradients, kernels_for(set->device), &rank->square, stream));
    gradients_done(&gradients);
    return STATUS_OK;
}

static Status run_rank(Rank *rank, Device *device, Stream *stream)
{
    char some[] = "frozen.*";
    char all[] = "*";
    char *const patterns[] = {rank->layout.is_frozen ? all : some};
    ParamSet set;
    param_set_init(&set, device);
    param_set_freeze(&set, patterns, 1);
    GradientGroups groups = {0};
    TRY(declare(rank, &set));
    TRY(make_groups(rank, &groups));
    TRY(reduce(rank, &set, &groups, stream));
    comm_destroy(groups.tied);
    comm_destroy(groups.data);
    comm_destroy(groups.tp);
    param_set_done(&set);
    return STATUS_OK;
}

static void *work(void *argument)
{
    Rank *rank = argument;
    Device *device = NULL;
    Stream *stream = NULL;
    CHECK(device_open("cpu", 0, &device) == STATUS_OK);
    CHECK(stream_create(device, &stream) == STATUS_OK);
    rank->status = run_rank(rank, device, stream);
    if (rank->status != STATUS_OK) {
        print_message("%s\n", status_message());
    }
    stream_destroy(stream);
    device_close(device);
    comm_destroy(rank->world);
    return NULL;
}

/* Every trained element of the module once. */
static double expected_square(const Layout *layout)
{
    double square = 0;
    for (int i = 0; i < NUM_DECLARED; i++) {
        int64_t count = 1;
        for (int d = 0; d < declared[i].spec.num_dims; d++) {
            count *= declared[i].spec.dims[d];
        }
        for (int64_t e = 0; !is_frozen(layout, &declared[i]) && e < count; e++) {
            double sum = expected_sum(layout, &declared[i], e);
            square += sum * sum;
        }
    }
    return square;
}

static void run_layout(Layout layout)
{
    int size = layout.stages * layout.data * layout.tp;
    assert_in_range(size, 1, RANKS_MAX);
    static Rank ranks[RANKS_MAX];
    Comm *comms[RANKS_MAX];
    assert_int_equal(comm_local_create(size, TIMEOUT_MS, comms), STATUS_OK);
    for (int r = 0; r < size; r++) {
        ranks[r] = (Rank){.layout = layout,
                          .stage = r / layout.tp / layout.data,
                          .d = r / layout.tp % layout.data,
                          .t = r % layout.tp,
                          .world = comms[r]};
        assert_int_equal(pthread_create(&ranks[r].thread, NULL, work, &ranks[r]), 0);
    }
    double square = 0;
    int64_t checked = 0;
    for (int r = 0; r < size; r++) {
        assert_int_equal(pthread_join(ranks[r].thread, NULL), 0);
        square += ranks[r].square;
        checked += ranks[r].checked;
    }
    for (int r = 0; r < size; r++) {
        assert_int_equal(ranks[r].status, STATUS_OK);
        assert_int_equal(ranks[r].wrong, 0);
    }
    assert_true(layout.is_frozen || checked > 0);
    assert_true(square == expected_square(&layout));
}

static void test_layouts(void **state)
{
    (void)state;
    for (int stages = 1; stages <= STAGES_MAX; stages++) {
        for (int data = 1; data <= 4; data++) {
            for (int tp = 1; tp <= 3; tp++) {
                run_layout((Layout){stages, data, tp, false, false});
                run_layout((Layout){stages, data, tp, true, false});
            }
        }
    }
}

static void test_all_frozen(void **state)
{
    (void)state;
    run_layout((Layout){2, 2, 2, false, true});
    run_layout((Layout){1, 3, 1, true, true});
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layouts),
        cmocka_unit_test(test_all_frozen),
    };
    return cmocka_run_group_tests_name("gradients", tests, NULL, NULL);
}
