#include "base/clock.h"
#include "base/memory.h"
#include "checkpoint/checkpoint.h"
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
    RANKS_MAX = 6,
    TIMEOUT_MS = 60 * 1000,
    NUM_PARAMS = 6,
    NUM_ARRAYS = 3, /* values, m, v */
};

/* A world: `vision` ranks first (tp 1, replicas), then `llm` ranks (dp replicas of tp ranks). */
typedef struct World {
    int vision_dp;
    int llm_tp;
    int llm_dp;
    bool has_optimizer;
    bool forgets_writer; /* no llm rank says that it writes */
    bool other_shape;    /* the llm declares its last tensor in another shape */
    int64_t step;
    int keep;
    const char *path; /* to load; NULL: save */
} World;

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

static const struct {
    const char *name;
    int64_t dims[4];
    int num_dims;
    int shard_dim;
} declared[NUM_PARAMS] = {
    {"language_model.model.embed_tokens.weight", {7, 5}, 2, 0},
    {"model.layers.0.self_attn.o_proj.weight", {6, 11}, 2, 1},
    {"model.norm.weight", {5}, 1, -1},
    {"patch.weight", {3, 2, 4, 5}, 4, 1}, /* with tp 3 a rank has nothing of it */
    {"large.weight", {601, 701}, 2, 1},   /* more than a chunk */
    {"tiny.bias", {2}, 1, 0},
};

static Status declare(ParamSet *set, int module, int tp, int tp_rank, bool other_shape)
{
    for (int i = 0; i < NUM_PARAMS; i++) {
        ParamSpec spec = {.num_dims = declared[i].num_dims, .shard_dim = declared[i].shard_dim};
        snprintf(spec.name, sizeof spec.name, "%s.%s", module ? "llm" : "vision", declared[i].name);
        memcpy(spec.dims, declared[i].dims, sizeof declared[i].dims);
        if (other_shape && i == NUM_PARAMS - 1) {
            spec.dims[0]++;
        }
        if (spec.shard_dim >= 0) {
            spec.shard = range_part(spec.dims[spec.shard_dim], tp, tp_rank);
        }
        int index = 0;
        TRY(param_set_add(set, &spec, spec.shard_dim >= 0 || tp_rank == 0, &index));
    }
    TRY(param_set_allocate(set));
    return STATUS_OK;
}

static int64_t global_index(const Param *param, int64_t local)
{
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

static uint32_t bits_of(float value)
{
    uint32_t bits = 0;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Fills the arrays, or counts what differs, bit for bit. */
static int64_t visit(const ParamSet *set, int module, float *const *arrays, bool fill)
{
    int64_t wrong = 0;
    for (int a = 0; a < NUM_ARRAYS && arrays[a]; a++) {
        for (int i = 0; i < NUM_PARAMS; i++) {
            const Param *param = &set->params[i];
            for (int64_t at = 0; at < tensor_count(&param->value); at++) {
                float expected = expected_value(module, i, a, global_index(param, at));
                float *element = arrays[a] + param->offset + at;
                if (fill) {
                    *element = expected;
                }
                wrong += bits_of(*element) != bits_of(expected);
            }
        }
    }
    return wrong;
}

static Status work_with(Rank *rank, Device *device, Stream *stream, ParamSet *set, float *moments)
{
    const World *world = &rank->world;
    int module = rank->index >= world->vision_dp;
    int in_module = rank->index - (module ? world->vision_dp : 0);
    int tp = module ? world->llm_tp : 1;
    TRY(declare(set, module, tp, in_module % tp, module && world->other_shape));
    (void)device;
    float *arrays[NUM_ARRAYS] = {set->values, NULL, NULL};
    if (world->has_optimizer) {
        arrays[1] = moments;
        arrays[2] = moments + set->count;
    }
    CheckpointPart part = {.module = module ? "llm" : "vision",
                           .params = set,
                           .m = arrays[1],
                           .v = arrays[2],
                           .writes = in_module / tp == 0 && !(module && world->forgets_writer)};
    if (world->path) {
        TRY(checkpoint_load(world->path, &part, &rank->state, stream));
        rank->wrong = visit(set, module, arrays, false);
        return STATUS_OK;
    }
    visit(set, module, arrays, true);
    CheckpointState state = {.step = world->step,
                             .seed = UINT64_MAX - 1,
                             .data_hash = 0x8000000000000001u,
                             .samples = 32 * world->step};
    TRY(checkpoint_save(folder, world->keep, &part, &state, rank->comm, stream, rank->path,
                        sizeof rank->path));
    return STATUS_OK;
}

static void *work(void *argument)
{
    Rank *rank = argument;
    Device *device = NULL;
    Stream *stream = NULL;
    ParamSet set;
    float *moments = NULL;
    CHECK(device_open("cpu", 0, &device) == STATUS_OK);
    CHECK(stream_create(device, &stream) == STATUS_OK);
    CHECK(MEMORY_NEW(&moments, 2000000) == STATUS_OK);
    param_set_init(&set, device);
    rank->status = work_with(rank, device, stream, &set, moments);
    if (rank->status != STATUS_OK) {
        snprintf(rank->message, sizeof rank->message, "%s", status_message());
    }
    param_set_done(&set);
    memory_free(moments);
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

static Status run_world(World world)
{
    int size = world.vision_dp + world.llm_tp * world.llm_dp;
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

static World make_world(int vision_dp, int llm_tp, int llm_dp)
{
    return (World){.vision_dp = vision_dp,
                   .llm_tp = llm_tp,
                   .llm_dp = llm_dp,
                   .has_optimizer = true,
                   .step = 1500,
                   .keep = 2};
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

/* Whatever layout wrote a checkpoint, every other reads the same bits. */
static void test_layouts(void **state)
{
    (void)state;
    static const int layouts[][3] = {{1, 1, 1}, {2, 2, 1}, {1, 3, 1}, {2, 2, 2}, {3, 1, 2}};
    int count = (int)(sizeof layouts / sizeof *layouts);
    for (int from = 0; from < count; from++) {
        expect_world_ok(make_world(layouts[from][0], layouts[from][1], layouts[from][2]));
        char path[256];
        snprintf(path, sizeof path, "%s", saved_path);
        for (int to = 0; to < count; to++) {
            World world = make_world(layouts[to][0], layouts[to][1], layouts[to][2]);
            world.path = path;
            expect_world_ok(world);
            assert_int_equal(loaded_state.step, 1500);
            assert_int_equal(loaded_state.samples, 48000);
            assert_true(loaded_state.seed == UINT64_MAX - 1);
            assert_true(loaded_state.data_hash == 0x8000000000000001u);
        }
    }
}

/* Two layouts write the same bytes. */
static void test_same_bytes(void **state)
{
    (void)state;
    static char first[8 << 20];
    static char second[8 << 20];
    char path[300];
    snprintf(path, sizeof path, "%s/step-00001500/model-llm.safetensors", folder);
    expect_world_ok(make_world(1, 1, 1));
    int file = open(path, O_RDONLY);
    ssize_t length = read(file, first, sizeof first);
    close(file);
    expect_world_ok(make_world(2, 2, 1));
    file = open(path, O_RDONLY);
    assert_int_equal(read(file, second, sizeof second), length);
    close(file);
    assert_memory_equal(first, second, (size_t)length);
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
        {"optimizer-llm.safetensors", 3000000, NULL,
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
    world.has_optimizer = false;
    world.path = path;
    expect_world_ok(world); /* weights alone */
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
    "import json, sys\n"
    "try:\n"
    "    import numpy\n"
    "except ImportError:\n"
    "    sys.exit(77)\n"
    "folder = sys.argv[1]\n"
    "import zlib\n"
    "manifest = json.load(open(folder + '/viaduct.json'))\n"
    "index = json.load(open(folder + '/model.safetensors.index.json'))\n"
    "total = 0\n"
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
    "    end = 0\n"
    "    for i, (tensor, entry) in enumerate(header.items()):\n"
    "        first, last = entry['data_offsets']\n"
    "        assert first == end and entry['dtype'] == 'F32', tensor\n"
    "        end = last\n"
    "        data = numpy.frombuffer(raw[8 + length + first:8 + length + last], '<f4')\n"
    "        data = data.reshape(entry['shape'])\n"
    "        array = 0 if name.startswith('model') else 1 + i // 6\n"
    "        expected = value('llm' in name, i % 6, array, data.size).reshape(data.shape)\n"
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
        cmocka_unit_test_teardown(test_same_bytes, clear_folder),
        cmocka_unit_test_teardown(test_keep, clear_folder),
        cmocka_unit_test_teardown(test_damage, clear_folder),
        cmocka_unit_test_teardown(test_other_model, clear_folder),
        cmocka_unit_test_teardown(test_save_fails, clear_folder),
        cmocka_unit_test_teardown(test_foreign_reader, clear_folder)};
    return cmocka_run_group_tests_name("checkpoint", tests, make_folder, remove_folder);
}
