#include "base/clock.h"
#include "base/memory.h"
#include "base/rng.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/manifest.h"
#include "checkpoint/safetensors.h"
#include "comm/comm_local.h"

#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

enum {
    RANKS_MAX = 13,
    TIMEOUT_MS = 60 * 1000,
    NUM_PARAMS = 6,
    NUM_ARRAYS = 3, /* values, m, v */
    NUM_MODULES = 2,
};

static const char *const module_names[NUM_MODULES] = {"vision", "llm"};

/* How a module lies on its ranks: rank (stage * data + d) * tp + t. */
typedef struct Spread {
    int stages; /* 0: the job has no such module */
    int data;
    int tp;
    bool is_sharded; /* each of the replicas has a part of the state */
} Spread;

static int spread_size(Spread spread)
{
    return spread.stages * spread.data * spread.tp;
}

/* Ranks of the vision, ranks of the llm, ranks of nothing; or, shared, both from rank 0 on. */
typedef struct World {
    Spread spreads[NUM_MODULES];
    int64_t step;
    const char *frozen; /* pattern; NULL: nothing */
    const char *path;   /* to load; NULL: save */
    int idle;
    int keep;
    bool is_shared;
    bool has_optimizer;
    bool forgets_writer; /* no llm rank says that it writes */
    bool other_shape;    /* the llm declares its last tensor in another shape */
    bool fewer;          /* the llm lacks its last tensor */
    bool check;          /* before the load */
} World;

/* One module of a rank. */
typedef struct Served {
    int module;
    Spread spread;
    int stage, d, t;
    ParamSet set;
    Range state;
    float *moments[2]; /* [elements of state] */
} Served;

typedef struct Rank {
    World world;
    Comm *comm;
    pthread_t thread;
    int index;
    Status status;
    char message[1024];
    char path[256];
    CheckpointState state;
    int64_t wrong; /* elements that are not what they should be after a load */
    Served served[NUM_MODULES];
    int num_served;
} Rank;

static char folder[] = "/tmp/checkpoint_test.XXXXXX";

/* Element `global` of array 0, 1, 2 of a parameter, any bits but a NaN. */
static float expected_value(int module, int param, int array, int64_t global)
{
    uint64_t x =
        (uint64_t)global * 0x9E3779B97F4A7C15u + (uint64_t)(module * 64 + param * 8 + array);
    x = (x ^ (x >> 31)) * 0xBF58476D1CE4E5B9u;
    return (float)(int32_t)(x >> 32) * 0x1p-31F;
}

/* Of several stages the first parameter is on the first and the last, the others are dealt out in order. */
static const struct {
    const char *name;
    int64_t dims[4];
    int num_dims;
    int shard_dim;
} declared[NUM_PARAMS] = {
    {"language_model.model.embed_tokens.weight", {7, 5}, 2, 0},
    {"model.layers.10.self_attn.o_proj.weight", {6, 11}, 2, 1},
    {"model.layers.9.norm.weight", {5}, 1, -1},
    {"patch.weight", {3, 2, 4, 5}, 4, 1}, /* with tp 3 a rank has nothing of it */
    {"large.weight", {521, 511}, 2, 1},   /* more than a chunk */
    {"tiny.bias", {2}, 1, 0},
};

static bool is_on_stage(int param, int stage, int stages)
{
    bool is_end = stage == 0 || stage == stages - 1;
    return param == 0 ? is_end : param * stages / NUM_PARAMS == stage;
}

static Status declare(Served *served, const World *world)
{
    Spread spread = served->spread;
    bool is_llm = served->module == 1;
    for (int i = 0; i < NUM_PARAMS - (is_llm && world->fewer); i++) {
        if (!is_on_stage(i, served->stage, spread.stages)) {
            continue;
        }
        ParamSpec spec = {.num_dims = declared[i].num_dims, .shard_dim = declared[i].shard_dim};
        snprintf(spec.name, sizeof spec.name, "%s.%s", module_names[served->module],
                 declared[i].name);
        memcpy(spec.dims, declared[i].dims, sizeof declared[i].dims);
        if (is_llm && world->other_shape && i == NUM_PARAMS - 1) {
            spec.dims[0]++;
        }
        if (spec.shard_dim >= 0) {
            spec.shard = range_part(spec.dims[spec.shard_dim], spread.tp, served->t);
        }
        spec.is_tied = i == 0 && spread.stages > 1;
        bool counts =
            (spec.shard_dim >= 0 || served->t == 0) && !(spec.is_tied && served->stage > 0);
        int index = 0;
        TRY(param_set_add(&served->set, &spec, counts, &index));
    }
    return param_set_allocate(&served->set);
}

/* A place between two rows of trained parameters: the one after `share` of all rows. */
static int64_t row_cut(const ParamSet *set, double share)
{
    int64_t rows = 0;
    for (int i = 0; i < set->num_params; i++) {
        rows += set->params[i].is_trained ? set->params[i].value.dims[0] : 0;
    }
    int64_t left = (int64_t)(share * (double)rows);
    int64_t at = 0;
    for (int i = 0; i < set->num_params && left > 0; i++) {
        const Tensor *value = &set->params[i].value;
        int64_t num = !set->params[i].is_trained ? 0
                      : left < value->dims[0]    ? left
                                                 : value->dims[0];
        at += num > 0 ? num * (tensor_count(value) / value->dims[0]) : 0;
        left -= num;
    }
    return at;
}

static int64_t global_index(const Param *param, int64_t local)
{
    if (param->spec.shard_dim < 0) {
        return local;
    }
    int64_t global = 0;
    int64_t stride = 1;
    for (int i = param->spec.num_dims - 1; i >= 0; i--) {
        int64_t at = local % param->value.dims[i];
        local /= param->value.dims[i];
        at += i == param->spec.shard_dim ? param->spec.shard.begin : 0;
        global += at * stride;
        stride *= param->spec.dims[i];
    }
    return global;
}

static int declared_index(const char *name)
{
    for (int i = 0; i < NUM_PARAMS; i++) {
        if (strcmp(strchr(name, '.') + 1, declared[i].name) == 0) {
            return i;
        }
    }
    return -1;
}

static uint32_t bits_of(float value)
{
    uint32_t bits = 0;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Fills an array that holds `range` of the flat buffer, or counts what differs, bit for bit. */
static int64_t visit(const Served *served, int array, float *elements, Range range, bool fill)
{
    int64_t wrong = 0;
    for (int i = 0; i < served->set.num_params; i++) {
        const Param *param = &served->set.params[i];
        int number = declared_index(param->spec.name);
        Range part = range_intersect(
            range, (Range){param->offset, param->offset + tensor_count(&param->value)});
        for (int64_t at = part.begin; at < part.end; at++) {
            float expected = expected_value(served->module, number, array,
                                            global_index(param, at - param->offset));
            if (fill) {
                elements[at - range.begin] = expected;
            }
            wrong += bits_of(elements[at - range.begin]) != bits_of(expected);
        }
    }
    return wrong;
}

static int64_t visit_all(Served *served, bool fill)
{
    int64_t wrong = visit(served, 0, served->set.values, (Range){0, served->set.count}, fill);
    for (int a = 0; a < 2 && served->moments[a]; a++) {
        wrong += visit(served, 1 + a, served->moments[a], served->state, fill);
    }
    return wrong;
}

/* The modules that the rank serves. */
static Status serve(Rank *rank, Device *device)
{
    const World *world = &rank->world;
    static char *const nothing[1];
    char *const frozen[] = {(char *)(uintptr_t)world->frozen};
    int first = 0;
    for (int m = 0; m < NUM_MODULES; m++) {
        Spread spread = world->spreads[m];
        int index = rank->index - first;
        first += world->is_shared ? 0 : spread_size(spread);
        if (index < 0 || index >= spread_size(spread)) {
            continue;
        }
        Served *served = &rank->served[rank->num_served++];
        *served = (Served){.module = m,
                           .spread = spread,
                           .stage = index / spread.tp / spread.data,
                           .d = index / spread.tp % spread.data,
                           .t = index % spread.tp};
        param_set_init(&served->set, device);
        param_set_freeze(&served->set, world->frozen ? frozen : nothing, world->frozen != NULL);
        TRY(declare(served, world));
        served->state = (Range){0, served->set.trained_count};
        if (spread.is_sharded) {
            served->state.begin = row_cut(&served->set, (double)served->d / spread.data);
            served->state.end = row_cut(&served->set, (served->d + 1.0) / spread.data);
        }
        for (int a = 0; a < 2 && world->has_optimizer && served->set.trained_count > 0; a++) {
            TRY(MEMORY_NEW(&served->moments[a], range_count(served->state) + 1));
        }
    }
    return STATUS_OK;
}

static Status work_with(Rank *rank, Device *device, Stream *stream)
{
    const World *world = &rank->world;
    TRY(serve(rank, device));
    CheckpointPart parts[NUM_MODULES];
    for (int i = 0; i < rank->num_served; i++) {
        Served *served = &rank->served[i];
        bool is_first = served->d == 0;
        parts[i] = (CheckpointPart){.module = module_names[served->module],
                                    .params = &served->set,
                                    .state = served->state,
                                    .m = served->moments[0],
                                    .v = served->moments[1],
                                    .writes_weights =
                                        is_first && !(served->module == 1 && world->forgets_writer),
                                    .writes_state = is_first || served->spread.is_sharded};
        visit_all(served, !world->path);
    }
    if (world->path) {
        if (world->check) {
            TRY(checkpoint_check(world->path, parts, rank->num_served, rank->comm, stream));
        }
        TRY(checkpoint_load(world->path, parts, rank->num_served, &rank->state, stream));
        for (int i = 0; i < rank->num_served; i++) {
            rank->wrong += visit_all(&rank->served[i], false);
        }
        return STATUS_OK;
    }
    CheckpointState state = {.step = world->step,
                             .seed = UINT64_MAX - 1,
                             .data_hash = 0x8000000000000001u,
                             .samples = 32 * world->step};
    TRY(checkpoint_save(folder, world->keep, parts, rank->num_served, &state, rank->comm, stream,
                        rank->path, sizeof rank->path));
    return STATUS_OK;
}

static void *work(void *argument)
{
    Rank *rank = argument;
    Device *device = NULL;
    Stream *stream = NULL;
    CHECK(device_open("cpu", 0, &device) == STATUS_OK);
    CHECK(stream_create(device, &stream) == STATUS_OK);
    rank->status = work_with(rank, device, stream);
    if (rank->status != STATUS_OK) {
        snprintf(rank->message, sizeof rank->message, "%s", status_message());
    }
    for (int i = 0; i < rank->num_served; i++) {
        param_set_done(&rank->served[i].set);
        memory_free(rank->served[i].moments[0]);
        memory_free(rank->served[i].moments[1]);
    }
    stream_destroy(stream);
    device_close(device);
    comm_destroy(rank->comm);
    return NULL;
}

/* Runs all ranks of a world; returns rank 0's status, which must be all ranks'. The first error's
 * text is kept. */
static char first_message[1024];
static char saved_path[256];
static CheckpointState loaded_state;

static int world_size(const World *world)
{
    int vision = spread_size(world->spreads[0]);
    int llm = spread_size(world->spreads[1]);
    return (world->is_shared ? (vision > llm ? vision : llm) : vision + llm) + world->idle;
}

static Status run_world(World world)
{
    int size = world_size(&world);
    CHECK(size <= RANKS_MAX);
    static Rank ranks[RANKS_MAX];
    Comm *comms[RANKS_MAX];
    memset(ranks, 0, sizeof ranks);
    CHECK(comm_local_create(size, TIMEOUT_MS, comms) == STATUS_OK);
    for (int r = 0; r < size; r++) {
        ranks[r].world = world;
        ranks[r].index = r;
        ranks[r].comm = comms[r];
        CHECK(pthread_create(&ranks[r].thread, NULL, work, &ranks[r]) == 0);
    }
    for (int r = 0; r < size; r++) {
        CHECK(pthread_join(ranks[r].thread, NULL) == 0);
    }
    first_message[0] = '\0';
    Status status = STATUS_OK;
    for (int r = 0; r < size; r++) {
        assert_true(world.path || ranks[r].status == ranks[0].status);
        if (ranks[r].status != STATUS_OK && status == STATUS_OK) {
            status = ranks[r].status;
            snprintf(first_message, sizeof first_message, "%s", ranks[r].message);
        }
        assert_int_equal(ranks[r].wrong, 0);
        assert_string_equal(ranks[r].path, ranks[0].path);
    }
    loaded_state = ranks[0].state;
    snprintf(saved_path, sizeof saved_path, "%s", ranks[0].path);
    return status;
}

/* Separate pools: vision replicas, an llm of dp replicas of tp ranks. */
static World make_world(int vision_dp, int llm_tp, int llm_dp)
{
    return (World){.spreads = {{.stages = 1, .data = vision_dp, .tp = 1},
                               {.stages = 1, .data = llm_dp, .tp = llm_tp}},
                   .has_optimizer = true,
                   .step = 1500,
                   .keep = 2,
                   .check = true};
}

static void expect_world_ok(World world)
{
    if (run_world(world) != STATUS_OK) {
        fail_msg("%s", first_message);
    }
}

static void expect_load_fails(World world, const char *path, Status code, const char *part,
                              const char *part_2)
{
    world.path = path;
    Status status = run_world(world);
    if (status != code || !strstr(first_message, part) || !strstr(first_message, part_2)) {
        fail_msg("got %s: \"%s\", expected %s with \"%s\", \"%s\"", status_name(status),
                 first_message, status_name(code), part, part_2);
    }
}

static int remove_entry(const char *path, const struct stat *info, int kind, struct FTW *place)
{
    (void)info;
    (void)kind;
    return place->level > 0 ? remove(path) : 0;
}

static int make_folder(void **state)
{
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static int clear_folder(void **state)
{
    (void)state;
    return nftw(folder, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
}

static int remove_folder(void **state)
{
    clear_folder(state);
    return rmdir(folder);
}

static void save_copy(World world, char *path_out, size_t path_bytes)
{
    expect_world_ok(world);
    snprintf(path_out, path_bytes, "%s", saved_path);
}

/* Loads the same bits and the same state into `world`. */
static void expect_loads(World world, const char *path)
{
    world.path = path;
    expect_world_ok(world);
    assert_int_equal(loaded_state.step, 1500);
    assert_int_equal(loaded_state.samples, 48000);
    assert_true(loaded_state.seed == UINT64_MAX - 1);
    assert_true(loaded_state.data_hash == 0x8000000000000001u);
}

/* Whatever layout wrote a checkpoint, every other reads the same bits. */
static void test_layouts(void **state)
{
    (void)state;
    static const int layouts[][3] = {{1, 1, 1}, {2, 2, 1}, {1, 3, 1}, {2, 2, 2}, {3, 1, 2}};
    int count = (int)(sizeof layouts / sizeof *layouts);
    for (int from = 0; from < count; from++) {
        char path[256];
        save_copy(make_world(layouts[from][0], layouts[from][1], layouts[from][2]), path,
                  sizeof path);
        for (int other = 1; other <= 2; other++) {
            int to = (from + other) % count;
            expect_loads(make_world(layouts[to][0], layouts[to][1], layouts[to][2]), path);
        }
    }
}

typedef struct Random {
    Rng rng;
    uint64_t index;
} Random;

static int pick(Random *random, int low, int high)
{
    return low + (int)rng_below(random->rng, random->index++, (uint64_t)high - (uint64_t)low + 1);
}

/* Any layout that the threads of a test can be: pipelines, replicas with a part of the state each, pools
 * apart or one for both, ranks that serve nothing. */
static World random_world(Random *random)
{
    World world = make_world(1, 1, 1);
    world.is_shared = pick(random, 0, 1);
    world.idle = pick(random, 0, 1);
    for (int m = 0; m < NUM_MODULES; m++) {
        Spread *spread = &world.spreads[m];
        do {
            *spread = (Spread){.stages = pick(random, 1, 4),
                               .data = pick(random, 1, 4),
                               .tp = pick(random, 1, 3),
                               .is_sharded = pick(random, 0, 1)};
        } while (spread_size(*spread) > (world.is_shared ? 12 : 6));
    }
    return world;
}

static void print_world(const World *world)
{
    for (int m = 0; m < NUM_MODULES; m++) {
        const Spread *spread = &world->spreads[m];
        print_message("%s pp %d dp %d tp %d%s; ", module_names[m], spread->stages, spread->data,
                      spread->tp, spread->is_sharded ? " sharded" : "");
    }
    print_message("%s, %d idle\n", world->is_shared ? "shared" : "apart", world->idle);
}

enum {
    RANDOM_ROUNDS = 16,
    SEED = 5150,
};

static void test_random_layouts(void **state)
{
    (void)state;
    print_message("seed %d\n", SEED);
    Random random = {.rng = {.seed = SEED, .stream = 1}};
    for (int round = 0; round < RANDOM_ROUNDS; round++) {
        World from = random_world(&random);
        World to = random_world(&random);
        const char *const frozen[] = {NULL, "vision.*", "*.model.*", "*"};
        from.frozen = frozen[round % 4];
        to.frozen = from.frozen;
        from.has_optimizer = to.has_optimizer = round % 8 != 7;
        char path[256];
        print_world(&from);
        save_copy(from, path, sizeof path);
        print_world(&to);
        expect_loads(to, path);
    }
}

static const char *const saved_files[] = {
    "model-llm.safetensors",        "model-vision.safetensors",     "optimizer-llm.safetensors",
    "optimizer-vision.safetensors", "model.safetensors.index.json", "viaduct.json"};

enum {
    NUM_SAVED_FILES = sizeof saved_files / sizeof *saved_files,
    FILE_BYTES_MAX = 4 << 20,
};

static size_t read_saved(const char *name, char *bytes)
{
    char path[300];
    snprintf(path, sizeof path, "%s/%s", saved_path, name);
    int file = open(path, O_RDONLY);
    ssize_t length = read(file, bytes, FILE_BYTES_MAX);
    close(file);
    assert_in_range(length, 1, FILE_BYTES_MAX - 1);
    return (size_t)length;
}

/* All layouts write the same bytes. */
static void test_same_bytes(void **state)
{
    (void)state;
    static char first[NUM_SAVED_FILES][FILE_BYTES_MAX];
    static char second[FILE_BYTES_MAX];
    size_t lengths[NUM_SAVED_FILES];
    World worlds[] = {make_world(1, 1, 1), make_world(2, 2, 1), make_world(1, 1, 1),
                      make_world(1, 1, 1)};
    worlds[2].spreads[1] = (Spread){.stages = 3, .data = 2, .tp = 2, .is_sharded = true};
    worlds[2].is_shared = true;
    worlds[3].spreads[0] = (Spread){.stages = 2, .data = 3, .tp = 1, .is_sharded = true};
    worlds[3].spreads[1] = (Spread){.stages = 4, .data = 1, .tp = 1};
    worlds[3].idle = 1;
    for (size_t w = 0; w < sizeof worlds / sizeof *worlds; w++) {
        expect_world_ok(worlds[w]);
        for (int f = 0; f < NUM_SAVED_FILES; f++) {
            size_t length = read_saved(saved_files[f], w == 0 ? first[f] : second);
            if (w == 0) {
                lengths[f] = length;
                continue;
            }
            assert_int_equal(length, lengths[f]);
            assert_memory_equal(first[f], second, length);
        }
    }
}

/* A file with the same tensors in another order, and a manifest to it: as checkpoints were once written. */
static void reverse_tensors(const char *name)
{
    static char bytes[FILE_BYTES_MAX];
    size_t length = read_saved(name, bytes);
    Safetensors old;
    Safetensors reversed = {0};
    char *header = NULL;
    size_t header_bytes = 0;
    assert_int_equal(safetensors_parse((uint8_t *)bytes, length, (int64_t)length, &old), STATUS_OK);
    for (int i = old.num_tensors - 1; i >= 0; i--) {
        const SafetensorsTensor *tensor = &old.tensors[i];
        assert_int_equal(safetensors_add(&reversed, tensor->name, tensor->num_dims, tensor->dims),
                         STATUS_OK);
    }
    assert_int_equal(safetensors_make_header(&reversed, &header, &header_bytes), STATUS_OK);
    char path[300];
    snprintf(path, sizeof path, "%s/%s", saved_path, name);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    fwrite(header, 1, header_bytes, file);
    for (int i = old.num_tensors - 1; i >= 0; i--) {
        fwrite(bytes + old.data_begin + old.tensors[i].begin, 1,
               (size_t)(old.tensors[i].end - old.tensors[i].begin), file);
    }
    assert_int_equal(fclose(file), 0);
    memory_free(header);
    safetensors_done(&old);
    safetensors_done(&reversed);
}

static void test_other_order(void **state)
{
    (void)state;
    World world = make_world(1, 2, 1);
    char path[256];
    save_copy(world, path, sizeof path);
    Manifest manifest;
    Manifest reversed = {0};
    assert_int_equal(manifest_read(path, &manifest), STATUS_OK);
    reversed.state = manifest.state;
    for (int f = 0; f < 4; f++) {
        reverse_tensors(saved_files[f]);
        assert_int_equal(manifest_add_tensors(&reversed, path, saved_files[f]), STATUS_OK);
    }
    assert_int_equal(manifest_write(&reversed, path), STATUS_OK);
    manifest_done(&manifest);
    manifest_done(&reversed);
    expect_loads(world, path);
    world.spreads[1] = (Spread){.stages = 2, .data = 2, .tp = 1, .is_sharded = true};
    expect_loads(world, path);
}

/* What is frozen now and was not: its state is left alone. The other way round there is none to load. */
static void test_frozen(void **state)
{
    (void)state;
    World trained = make_world(1, 2, 1);
    World frozen = trained;
    frozen.frozen = "llm.large.*";
    World all_frozen = trained;
    all_frozen.frozen = "llm.*";
    char path[256];
    save_copy(trained, path, sizeof path);
    expect_loads(frozen, path);
    expect_loads(all_frozen, path);
    save_copy(frozen, path, sizeof path);
    expect_loads(frozen, path);
    expect_load_fails(trained, path, STATUS_INVALID, "tensor m.llm.large.weight", "was frozen");
    save_copy(all_frozen, path, sizeof path);
    char optimizer[300];
    snprintf(optimizer, sizeof optimizer, "%s/optimizer-llm.safetensors", path);
    expect_loads(all_frozen, path);
    expect_load_fails(trained, path, STATUS_INVALID, "no state of tensor llm.",
                      "all of module llm frozen");
}

static void test_keep(void **state)
{
    (void)state;
    World world = make_world(1, 1, 1);
    char path[256];
    assert_int_equal(checkpoint_newest(folder, path, sizeof path), STATUS_NOT_FOUND);
    assert_int_equal(checkpoint_newest("/nonexistent", path, sizeof path), STATUS_NOT_FOUND);
    char leftover[256];
    snprintf(leftover, sizeof leftover, "%s/step-00000099", folder);
    assert_int_equal(mkdir(leftover, 0777), 0); /* of a save that never ended */
    for (world.step = 100; world.step <= 500; world.step += 100) {
        expect_world_ok(world);
        assert_int_equal(checkpoint_newest(folder, path, sizeof path), STATUS_OK);
        assert_string_equal(path, saved_path);
    }
    assert_non_null(strstr(saved_path, "/step-00000500"));
    int kept = 0;
    DIR *open_folder = opendir(folder);
    struct dirent *entry = readdir(open_folder);
    while (entry) {
        kept += entry->d_name[0] != '.';
        entry = readdir(open_folder);
    }
    closedir(open_folder);
    assert_int_equal(kept, 2);
    /* Without its manifest the newest is none; saving the same step again makes it one. */
    char manifest[300];
    snprintf(manifest, sizeof manifest, "%s/viaduct.json", saved_path);
    assert_int_equal(unlink(manifest), 0);
    assert_int_equal(checkpoint_newest(folder, path, sizeof path), STATUS_OK);
    assert_non_null(strstr(path, "/step-00000400"));
    world.step = 500;
    expect_world_ok(world);
    expect_world_ok(world);
    assert_int_equal(checkpoint_newest(folder, path, sizeof path), STATUS_OK);
    assert_non_null(strstr(path, "/step-00000500"));
}

static void change_file(const char *name, off_t at, const char *from_end_or_null)
{
    char path[400];
    snprintf(path, sizeof path, "%s/%s", saved_path, name);
    int file = open(path, O_RDWR);
    assert_true(file >= 0);
    if (from_end_or_null) {
        assert_int_equal(truncate(path, at), 0);
    } else {
        char byte = 0;
        assert_int_equal(pread(file, &byte, 1, at), 1);
        byte ^= 1;
        assert_int_equal(pwrite(file, &byte, 1, at), 1);
    }
    close(file);
}

static void test_damage(void **state)
{
    (void)state;
    World world = make_world(1, 2, 1);
    char path[256];
    const struct {
        const char *name;
        off_t at;
        const char *cut;
        const char *part;
        const char *part_2;
    } cases[] = {
        {"model-llm.safetensors", 100000, NULL, "model-llm.safetensors: tensor llm.large.weight",
         "checksum"},
        {"model-vision.safetensors", 20, NULL, "model-vision.safetensors", ""},
        {"optimizer-llm.safetensors", 2000000, NULL,
         "optimizer-llm.safetensors: tensor v.llm.large.weight", "checksum"},
        {"model-llm.safetensors", 100000, "cut", "model-llm.safetensors", "100000 bytes"},
        {"model-llm.safetensors", 0, "cut", "model-llm.safetensors", "0 bytes"},
        {"viaduct.json", 5, NULL, "viaduct.json", ""},
        {"viaduct.json", 300, "cut", "viaduct.json", "line"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        expect_world_ok(world);
        snprintf(path, sizeof path, "%s", saved_path);
        change_file(cases[i].name, cases[i].at, cases[i].cut);
        expect_load_fails(world, path, STATUS_CORRUPT, cases[i].part, cases[i].part_2);
    }
}

static void test_other_model(void **state)
{
    (void)state;
    World world = make_world(1, 1, 1);
    char path[256];
    expect_world_ok(world);
    snprintf(path, sizeof path, "%s", saved_path);
    world.other_shape = true;
    expect_load_fails(world, path, STATUS_INVALID, "tensor llm.tiny.bias", "[2]");
    world = make_world(1, 1, 1);
    world.fewer = true;
    expect_load_fails(world, path, STATUS_INVALID, "tensor llm.tiny.bias", "the model has not");
    world.check = false;
    expect_loads(world, path); /* a rank alone cannot know */
    world.check = true;
    world.path = NULL;
    expect_world_ok(world);
    expect_load_fails(make_world(1, 1, 1), path, STATUS_INVALID, "tensor llm.tiny.bias",
                      "the file has not");
    world = make_world(1, 1, 1);
    world.spreads[1] = (Spread){0};
    expect_world_ok(world);
    expect_load_fails(make_world(1, 1, 1), path, STATUS_INVALID, "without module llm", path);
    world = make_world(1, 1, 1);
    world.has_optimizer = false;
    world.path = path;
    world.spreads[1] = (Spread){0};
    expect_world_ok(world); /* weights alone */
    world.spreads[1] = make_world(1, 1, 1).spreads[1];
    world.path = NULL;
    expect_world_ok(world);
    world = make_world(1, 1, 1);
    expect_load_fails(world, path, STATUS_INVALID, "optimizer-", "without this optimizer");
    expect_load_fails(world, folder, STATUS_NOT_FOUND, "not a complete checkpoint", folder);
}

/* All ranks learn why one could not, and none waits for ever. */
static void test_save_fails(void **state)
{
    (void)state;
    World world = make_world(2, 2, 1);
    world.forgets_writer = true;
    assert_int_equal(run_world(world), STATUS_INTERNAL);
    assert_non_null(strstr(first_message, "no rank writes module llm"));
    world = make_world(2, 2, 1);
    char blocker[256];
    snprintf(blocker, sizeof blocker, "%s/step-00001500/model-llm.safetensors", folder);
    expect_world_ok(world);
    assert_int_equal(unlink(blocker), 0);
    assert_int_equal(mkdir(blocker, 0777), 0);
    assert_int_equal(run_world(world), STATUS_IO);
    assert_non_null(strstr(first_message, "on rank 2 (llm)"));
    assert_non_null(strstr(first_message, "model-llm.safetensors"));
    char path[256];
    assert_int_equal(checkpoint_newest(folder, path, sizeof path), STATUS_NOT_FOUND);
    assert_int_equal(rmdir(blocker), 0);
}

/* A reader of the format that shares nothing with ours. */
static const char python_reader[] =
    "import json, re, sys\n"
    "try:\n"
    "    import numpy\n"
    "except ImportError:\n"
    "    sys.exit(77)\n"
    "folder = sys.argv[1]\n"
    "import zlib\n"
    "manifest = json.load(open(folder + '/viaduct.json'))\n"
    "index = json.load(open(folder + '/model.safetensors.index.json'))\n"
    "total = 0\n"
    "declared = ['embed_tokens.weight', 'o_proj.weight', '9.norm.weight', 'patch.weight',\n"
    "            'large.weight', 'tiny.bias']\n"
    "numbers = lambda t: [int(w) if w.isdigit() else w for w in re.split(r'([0-9]+)', t)]\n"
    "def value(module, param, array, count):\n"
    "    with numpy.errstate(over='ignore'):\n"
    "        x = numpy.arange(count, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15)\n"
    "        x = x + numpy.uint64(module * 64 + param * 8 + array)\n"
    "        x = (x ^ (x >> numpy.uint64(31))) * numpy.uint64(0xBF58476D1CE4E5B9)\n"
    "    bits = (x >> numpy.uint64(32)).astype(numpy.uint32).view(numpy.int32)\n"
    "    return bits.astype(numpy.float32) * numpy.float32(2.0 ** -31)\n"
    "for name, told in manifest['files'].items():\n"
    "    raw = open(folder + '/' + name, 'rb').read()\n"
    "    assert len(raw) == told['size_bytes'], name\n"
    "    assert '%08x' % zlib.crc32(raw) == told['crc32'], name\n"
    "    if not name.endswith('.safetensors'):\n"
    "        continue\n"
    "    length = int.from_bytes(raw[:8], 'little')\n"
    "    assert length % 8 == 0\n"
    "    header = json.loads(raw[8:8 + length])\n"
    "    assert header.pop('__metadata__') == {'format': 'pt'}\n"
    "    assert list(header) == sorted(header, key=numbers)\n"
    "    end = 0\n"
    "    for i, (tensor, entry) in enumerate(header.items()):\n"
    "        first, last = entry['data_offsets']\n"
    "        assert first == end and entry['dtype'] == 'F32', tensor\n"
    "        end = last\n"
    "        data = numpy.frombuffer(raw[8 + length + first:8 + length + last], '<f4')\n"
    "        data = data.reshape(entry['shape'])\n"
    "        array = 0 if name.startswith('model') else 1 + i // 6\n"
    "        param = [p for p in range(6) if tensor.endswith(declared[p])][0]\n"
    "        expected = value('llm' in name, param, array, data.size).reshape(data.shape)\n"
    "        assert (data.view(numpy.uint32) == expected.view(numpy.uint32)).all(), tensor\n"
    "        if array == 0:\n"
    "            assert index['weight_map'][tensor] == name\n"
    "            total += last - first\n"
    "        else:\n"
    "            assert tensor.startswith('mv'[array - 1] + '.'), tensor\n"
    "    assert 8 + length + end == len(raw)\n"
    "assert index['metadata']['total_size'] == total\n"
    "assert len(index['weight_map']) == 12\n";

static void test_foreign_reader(void **state)
{
    (void)state;
    expect_world_ok(make_world(2, 3, 1));
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        /* Debian's numpy belongs to Debian's Python, which need not be the first on the path. */
        execl("/usr/bin/python3", "python3", "-c", python_reader, saved_path, (char *)NULL);
        execlp("python3", "python3", "-c", python_reader, saved_path, (char *)NULL);
        _exit(77);
    }
    int result = 0;
    assert_int_equal(waitpid(child, &result, 0), child);
    if (WIFEXITED(result) && WEXITSTATUS(result) == 77) {
        print_message("skipped: python3 with numpy is not installed\n");
        skip();
    }
    assert_true(WIFEXITED(result));
    assert_int_equal(WEXITSTATUS(result), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_layouts, clear_folder),
        cmocka_unit_test_teardown(test_random_layouts, clear_folder),
        cmocka_unit_test_teardown(test_same_bytes, clear_folder),
        cmocka_unit_test_teardown(test_other_order, clear_folder),
        cmocka_unit_test_teardown(test_frozen, clear_folder),
        cmocka_unit_test_teardown(test_keep, clear_folder),
        cmocka_unit_test_teardown(test_damage, clear_folder),
        cmocka_unit_test_teardown(test_other_model, clear_folder),
        cmocka_unit_test_teardown(test_save_fails, clear_folder),
        cmocka_unit_test_teardown(test_foreign_reader, clear_folder)};
    return cmocka_run_group_tests_name("checkpoint", tests, make_folder, remove_folder);
}
