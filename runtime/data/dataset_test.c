#include "base/memory.h"
#include "data/audio.h"
#include "data/dataset.h"
#include "data/image.h"
#include "data/testing.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

static char folder[] = "/tmp/dataset_test.XXXXXX";
static char shard_a[64];
static char shard_b[64];
static TestingFile png;
static TestingTar tar;

static int make_folder(void **state)
{
    (void)state;
    if (!mkdtemp(folder)) {
        return -1;
    }
    snprintf(shard_a, sizeof shard_a, "%s/a.tar", folder);
    snprintf(shard_b, sizeof shard_b, "%s/b.tar", folder);
    testing_png_rgb(&png, 12, 9);
    return 0;
}

static int remove_folder(void **state)
{
    (void)state;
    unlink(shard_a);
    unlink(shard_b);
    return rmdir(folder);
}

static void add_png(const char *name)
{
    testing_tar_add(&tar, name, png.bytes, png.size_bytes);
}

static DatasetOptions options_for(char **patterns, int num_patterns)
{
    return (DatasetOptions){.patterns = patterns,
                            .num_patterns = num_patterns,
                            .prompt = "<image>",
                            .rows_per_image = 4,
                            .image_size = 8,
                            .mels = 8,
                            .max_seconds = 1,
                            .max_tokens = 64};
}

static Status open_shards(int num_shards, Dataset **dataset_out)
{
    char *patterns[] = {shard_a, shard_b};
    DatasetOptions options = options_for(patterns, num_shards);
    return dataset_open(&options, dataset_out);
}

/* Opening must fail with this code, and the message hold all parts. */
static void expect_refused(int num_shards, Status code, const char *part, const char *part_2,
                           const char *part_3)
{
    Dataset *dataset = NULL;
    status_clear();
    Status status = open_shards(num_shards, &dataset);
    const char *message = status_message();
    if (status != code || !strstr(message, part) || !strstr(message, part_2) ||
        !strstr(message, part_3)) {
        fail_msg("got %s: \"%s\", expected %s with \"%s\", \"%s\", \"%s\"", status_name(status),
                 message, status_name(code), part, part_2, part_3);
    }
}

static void expect_tokens(const Dataset *dataset, int64_t sample, const char *expected)
{
    int32_t ids[64];
    int32_t labels[64];
    const SampleInfo *info = dataset_sample(dataset, sample);
    assert_int_equal(dataset_read_tokens(dataset, sample, ids, labels), STATUS_OK);
    /* As text: < bos, > eos, * image row, ~ row of sound; then labels, - for none. */
    char text[160] = "";
    size_t used = 0;
    int num_labels = 0;
    for (int t = 0; t < 2 * info->num_tokens; t++) {
        int32_t id = t < info->num_tokens ? ids[t] : labels[t - info->num_tokens];
        if (t == info->num_tokens) {
            text[used++] = '|';
        }
        num_labels += t >= info->num_tokens && id >= 0;
        text[used++] = (char)(id == TOKEN_BOS     ? '<'
                              : id == TOKEN_EOS   ? '>'
                              : id == TOKEN_IMAGE ? '*'
                              : id == TOKEN_AUDIO ? '~'
                              : id == -1          ? '-'
                                                  : id);
    }
    text[used] = '\0';
    assert_string_equal(text, expected);
    assert_int_equal(num_labels, info->num_labels);
}

static void test_samples(void **state)
{
    (void)state;
    testing_tar_open(&tar, shard_a);
    add_png("./d/one.PNG");
    testing_tar_text(&tar, "./d/one.txt", "cat\n");
    testing_tar_text(&tar, "./d/one.cls", "7");
    testing_tar_text(&tar, "README", "no sample");
    testing_tar_text(&tar, "._two.png", "no sample either");
    testing_tar_text(&tar, "two.txt", "say <image>");
    add_png("three.10.png");
    for (int i = 9; i >= 0; i--) { /* any order in the tar */
        char name[32];
        snprintf(name, sizeof name, "three.%d.jpg", i); /* PNG bytes under .jpg */
        testing_png_rgb(&png, 10 + i, 9);
        add_png(name);
    }
    testing_tar_text(&tar, "three.json", "{\"caption\": \"x\", \"extra\": [1]}");
    testing_tar_close(&tar);
    testing_tar_open(&tar, shard_b);
    add_png("four.0.png");
    add_png("four.1.png");
    testing_tar_text(&tar, "four.json",
                     "{\"prompt\": \"a<image>b<image>\", \"caption\": \"\\u00e9\"}");
    testing_tar_text(&tar, "five.json", "{\"prompt\": \"q: \"}");
    testing_tar_text(&tar, "five.txt", "yes");
    testing_tar_close(&tar);

    Dataset *dataset = NULL;
    char pattern[80];
    snprintf(pattern, sizeof pattern, "%s/[ab].tar", folder);
    char *patterns[] = {pattern};
    DatasetOptions options = options_for(patterns, 1);
    if (dataset_open(&options, &dataset) != STATUS_OK) {
        fail_msg("%s", status_message());
    }
    assert_int_equal(dataset_count(dataset), 5);
    assert_string_equal(dataset_sample(dataset, 0)->key, "d/one");
    assert_string_equal(dataset_sample(dataset, 4)->key, "five");
    assert_int_equal(dataset_sample(dataset, 2)->num_items, 11);
    expect_tokens(dataset, 0, "<****cat>|----cat>-");
    expect_tokens(dataset, 1, "<say <image>>|say <image>>-");
    expect_tokens(dataset, 3, "<a****b****\xc3\xa9>|----------\xc3\xa9>-");
    expect_tokens(dataset, 4, "<q: yes>|---yes>-");
    int32_t ids[64];
    int32_t count = 0;
    assert_int_equal(dataset_read_prompt(dataset, 3, ids, &count), STATUS_OK);
    assert_int_equal(count, 11);
    assert_int_equal(ids[0], TOKEN_BOS);
    assert_int_equal(ids[10], TOKEN_IMAGE);
    char *caption = NULL;
    assert_int_equal(dataset_read_caption(dataset, 0, &caption), STATUS_OK);
    assert_string_equal(caption, "cat");
    memory_free(caption);
    /* Images in the order of their numbers: each has its own width, so its own pixels. */
    uint8_t pixels[8 * 8 * 3];
    uint8_t expected[8 * 8 * 3];
    for (int i = 0; i < 10; i++) {
        testing_png_rgb(&png, 10 + i, 9);
        assert_int_equal(image_read_square(png.bytes, png.size_bytes, 8, expected), STATUS_OK);
        assert_int_equal(dataset_read_image(dataset, 2, i, pixels), STATUS_OK);
        assert_memory_equal(pixels, expected, sizeof pixels);
    }
    testing_png_rgb(&png, 12, 9);
    dataset_close(dataset);
}

static void test_hash(void **state)
{
    (void)state;
    static TestingFile clip;
    uint64_t hashes[7];
    for (int i = 0; i < 7; i++) {
        testing_tar_open(&tar, shard_a);
        testing_tar_text(&tar, i == 1 ? "b.txt" : "a.txt", i == 2 ? "y" : "x");
        testing_wav(&clip, i == 6 ? 8000 : 16000, 1, 1000); /* of one size, but more rows */
        if (i >= 5) {
            testing_tar_add(&tar, "a.wav", clip.bytes, clip.size_bytes);
        }
        testing_tar_close(&tar);
        char *patterns[] = {shard_a};
        DatasetOptions options = options_for(patterns, 1);
        options.prompt = "<image><audio>";
        options.image_size = i == 3 ? 9 : 8;
        options.mels = i == 4 ? 9 : 8;
        Dataset *dataset = NULL;
        assert_int_equal(dataset_open(&options, &dataset), STATUS_OK);
        hashes[i] = dataset_hash(dataset);
        dataset_close(dataset);
        for (int j = 0; j < i; j++) {
            assert_true(hashes[i] != hashes[j]);
        }
    }
}

typedef struct BadMember {
    const char *name;
    const char *text; /* NULL: a picture */
} BadMember;

typedef struct BadCase {
    BadMember members[4];
    Status code;
    const char *part;
    const char *part_2;
} BadCase;

static const BadCase bad_cases[] = {
    {{{"k.png", NULL}}, STATUS_INVALID, "sample k", "no caption"},
    {{{"k.png", NULL}, {"k.json", "{}"}}, STATUS_INVALID, "sample k", "no caption"},
    {{{"k.txt", "\n"}}, STATUS_INVALID, "sample k", "no caption"},
    {{{"k.json", "{\"caption\": 3}"}}, STATUS_INVALID, "member k.json", "not a text"},
    {{{"k.json", "{\"caption\": \"a"}}, STATUS_CORRUPT, "member k.json", "line 1"},
    {{{"k.json", "[1]"}}, STATUS_INVALID, "member k.json", "object"},
    {{{"k.txt", "a"}, {"k.txt", "b"}}, STATUS_INVALID, "sample k, member k.txt", "twice"},
    {{{"k.txt", "a"}, {"m.txt", "b"}, {"k.png", NULL}}, STATUS_INVALID, "member k.png", "apart"},
    {{{"k.v2.png", NULL}, {"k.txt", "b"}}, STATUS_INVALID, "member k.v2.png", "first dot"},
    {{{"a.b.txt", "c"}}, STATUS_INVALID, "member a.b.txt", "first dot"},
    {{{"k.webp", "x"}, {"k.txt", "b"}}, STATUS_UNSUPPORTED, "member k.webp", ".webp"},
    {{{"k.0.png", NULL}, {"k.2.png", NULL}, {"k.txt", "b"}}, STATUS_INVALID, "sample k", ".2.png"},
    {{{"k.0.png", NULL}, {"k.0.jpg", NULL}, {"k.txt", "b"}}, STATUS_INVALID, "sample k", "repeats"},
    {{{"k.png", NULL}, {"k.jpg", NULL}, {"k.txt", "b"}},
     STATUS_INVALID,
     "sample k",
     "expected one"},
    {{{"k.png", "<html>"}, {"k.txt", "b"}}, STATUS_CORRUPT, "sample k, member k.png", "<html>"},
    {{{"k.jpg", ""}, {"k.txt", "b"}}, STATUS_CORRUPT, "sample k, member k.jpg", "empty"},
    {{{"k.png", NULL}, {"k.json", "{\"prompt\": \"p\", \"caption\": \"c\"}"}},
     STATUS_INVALID,
     "sample k",
     "0 <image> marks for 1 images"},
    {{{"k.0.png", NULL},
      {"k.1.png", NULL},
      {"k.2.png", NULL},
      {"k.json", "{\"prompt\": \"<image><image>\", \"caption\": \"c\"}"}},
     STATUS_INVALID,
     "sample k",
     "2 <image> marks for 3 images"},
    {{{"k.png", NULL}, {"k.json", "{\"prompt\": \"<image><image>\", \"caption\": \"c\"}"}},
     STATUS_INVALID,
     "sample k",
     "2 <image> marks for 1 images"},
    {{{"k.txt", "more bytes than the limit of 64 tokens, but few enough to be read, yes?"}},
     STATUS_INVALID,
     "sample k",
     "64"},
    {{{"k.png", NULL}, {"k.txt", "59 bytes, which with 4 rows, bos and eos is one token more:"}},
     STATUS_INVALID,
     "sample k: 65 tokens (4 of them",
     "max_tokens"},
    {{{"k.mp3", "x"}, {"k.txt", "b"}}, STATUS_UNSUPPORTED, "member k.mp3", "sounds of type .mp3"},
    {{{"k.wav", "<html>"}, {"k.txt", "b"}}, STATUS_CORRUPT, "sample k, member k.wav", "<html>"},
};

static void test_bad_samples(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof bad_cases / sizeof *bad_cases; i++) {
        const BadCase *bad = &bad_cases[i];
        testing_tar_open(&tar, shard_a);
        testing_tar_text(&tar, "good.txt", "fine");
        for (int m = 0; m < 4 && bad->members[m].name; m++) {
            if (bad->members[m].text) {
                testing_tar_text(&tar, bad->members[m].name, bad->members[m].text);
            } else {
                add_png(bad->members[m].name);
            }
        }
        testing_tar_close(&tar);
        expect_refused(1, bad->code, bad->part, bad->part_2, shard_a);
    }
    testing_tar_open(&tar, shard_a);
    testing_tar_add(&tar, "zero.txt", "a\0b", 3);
    testing_tar_close(&tar);
    expect_refused(1, STATUS_CORRUPT, "sample zero, member zero.txt", "zero byte", shard_a);
    testing_png_begin(&png, 30000, 30000, 8, 2);
    testing_tar_open(&tar, shard_a);
    add_png("big.png");
    testing_tar_text(&tar, "big.txt", "x");
    testing_tar_close(&tar);
    testing_png_rgb(&png, 12, 9);
    expect_refused(1, STATUS_CORRUPT, "sample big, member big.png", "30000 x 30000", shard_a);
}

static void cut_file(const char *path, off_t size_bytes)
{
    assert_int_equal(truncate(path, size_bytes), 0);
}

static void test_bad_shards(void **state)
{
    (void)state;
    unlink(shard_a);
    expect_refused(1, STATUS_NOT_FOUND, "no file matches", shard_a, "");
    testing_tar_open(&tar, shard_a);
    testing_tar_text(&tar, "k.txt", "same");
    testing_tar_close(&tar);
    testing_tar_open(&tar, shard_b);
    testing_tar_text(&tar, "k.txt", "same");
    testing_tar_close(&tar);
    expect_refused(2, STATUS_INVALID, "sample k is in shard", shard_a, shard_b);
    /* Two members of 1024 bytes: header, content. Cut in a header, in a content, between members.
     * */
    static const off_t cuts[] = {300, 600, 1100, 1536, 2100, 2560};
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        static char content[1024];
        memset(content, 'x', sizeof content);
        testing_tar_open(&tar, shard_a);
        testing_tar_add(&tar, "m.cls", content, sizeof content);
        testing_tar_add(&tar, "m.npy", content, sizeof content);
        testing_tar_close(&tar);
        cut_file(shard_a, cuts[i]);
        expect_refused(1, STATUS_CORRUPT, shard_a, "", "");
    }
    cut_file(shard_a, 0);
    expect_refused(1, STATUS_CORRUPT, shard_a, "empty", "");
    testing_tar_open(&tar, shard_a); /* no member: fine beside others, not alone */
    testing_tar_close(&tar);
    expect_refused(1, STATUS_INVALID, "no sample", shard_a, "");
    Dataset *dataset = NULL;
    assert_int_equal(open_shards(2, &dataset), STATUS_OK);
    assert_int_equal(dataset_count(dataset), 1);
    dataset_close(dataset);
    /* Two tars in one file; a header byte that changed; a compressed one. */
    testing_tar_open(&tar, shard_a);
    testing_tar_text(&tar, "k.txt", "same");
    testing_tar_close(&tar);
    static char bytes[20480];
    int file = open(shard_a, O_RDWR);
    ssize_t length = pread(file, bytes, sizeof bytes, 0);
    assert_int_equal(pwrite(file, bytes, (size_t)length, length), length);
    expect_refused(1, STATUS_CORRUPT, shard_a, "two tars", "");
    bytes[3] ^= 1;
    assert_int_equal(pwrite(file, bytes, (size_t)length, 0), length);
    expect_refused(1, STATUS_CORRUPT, shard_a, "", "");
    assert_int_equal(pwrite(file, "\x1f\x8b\x08", 3, 0), 3);
    expect_refused(1, STATUS_UNSUPPORTED, shard_a, "compressed", "");
    close(file);
}

/* A picture whose header is good and whose pixels are not is named when it is decoded; so is a
 * shard that changed. */
static void test_bad_reads(void **state)
{
    (void)state;
    testing_png_rgb(&png, 40, 40);
    png.bytes[png.size_bytes - 12 - 8] ^= 0xff;
    testing_tar_open(&tar, shard_a);
    add_png("k.png");
    testing_tar_text(&tar, "k.txt", "caption");
    testing_tar_close(&tar);
    Dataset *dataset = NULL;
    assert_int_equal(open_shards(1, &dataset), STATUS_OK);
    uint8_t pixels[8 * 8 * 3];
    assert_int_equal(dataset_read_image(dataset, 0, 0, pixels), STATUS_CORRUPT);
    assert_non_null(strstr(status_message(), shard_a));
    assert_non_null(strstr(status_message(), "sample k, member k.png"));
    cut_file(shard_a, 700);
    assert_int_equal(dataset_read_image(dataset, 0, 0, pixels), STATUS_CORRUPT);
    assert_non_null(strstr(status_message(), "sample k, member k.png"));
    dataset_close(dataset);
    testing_png_rgb(&png, 12, 9);
}

/* A text too long to be kept in memory is read again, and must be the same then; a short one is kept. */
static void test_long_texts(void **state)
{
    (void)state;
    enum {
        LONG_BYTES = 20000
    };
    static char caption[LONG_BYTES + 1];
    static int32_t ids[2][LONG_BYTES + 2];
    static int32_t labels[LONG_BYTES + 2];
    memset(caption, 'c', LONG_BYTES);
    testing_tar_open(&tar, shard_a);
    testing_tar_text(&tar, "long.txt", caption);
    testing_tar_text(&tar, "short.json", "{\"prompt\": \"p\", \"caption\": \"kept\"}");
    testing_tar_close(&tar);
    char *patterns[] = {shard_a};
    DatasetOptions options = options_for(patterns, 1);
    options.max_tokens = LONG_BYTES + 2;
    Dataset *dataset = NULL;
    assert_int_equal(dataset_open(&options, &dataset), STATUS_OK);
    assert_int_equal(dataset_read_tokens(dataset, 0, ids[0], labels), STATUS_OK);
    assert_int_equal(ids[0][LONG_BYTES], 'c');
    int file = open(shard_a, O_RDWR);
    assert_int_equal(pwrite(file, "d", 1, 600), 1);
    close(file);
    assert_int_equal(dataset_read_tokens(dataset, 0, ids[1], labels), STATUS_CORRUPT);
    assert_non_null(strstr(status_message(), "sample long: its text changed"));
    cut_file(shard_a, 700);
    assert_int_equal(dataset_read_tokens(dataset, 0, ids[1], labels), STATUS_CORRUPT);
    assert_non_null(strstr(status_message(), "sample long, member long.txt"));
    expect_tokens(dataset, 1, "<pkept>|-kept>-");
    dataset_close(dataset);
}

/* Images and clips of one sample, in any order; a clip's rows are its length: 2 hops each. */
static void test_clips(void **state)
{
    (void)state;
    static TestingFile short_clip;
    static TestingFile long_clip;
    testing_wav(&short_clip, 16000, 1, 321);
    testing_wav(&long_clip, 8000, 2, 480);
    testing_tar_open(&tar, shard_a);
    testing_tar_add(&tar, "a.wav", short_clip.bytes, short_clip.size_bytes);
    add_png("a.png");
    testing_tar_text(&tar, "a.txt", "c");
    testing_tar_add(&tar, "b.1.wav", long_clip.bytes, long_clip.size_bytes);
    add_png("b.0.png");
    testing_tar_add(&tar, "b.0.wav", short_clip.bytes, short_clip.size_bytes);
    add_png("b.1.png");
    testing_tar_text(&tar, "b.json",
                     "{\"prompt\": \"<audio>,<image><audio>.\", \"caption\": \"c\"}");
    testing_tar_text(&tar, "c.txt", "<audio>");
    testing_tar_close(&tar);
    char *patterns[] = {shard_a};
    DatasetOptions options = options_for(patterns, 1);
    options.prompt = "<image>|<audio>";
    Dataset *dataset = NULL;
    if (dataset_open(&options, &dataset) != STATUS_OK) {
        fail_msg("%s", status_message());
    }
    expect_tokens(dataset, 0, "<****|~~c>|-------c>-");
    expect_tokens(dataset, 1, "<~~,********~~~.c>|---------------c>-");
    expect_tokens(dataset, 2, "<|<audio>>|-<audio>>-");
    static const SampleItem expected[] = {{SAMPLE_MEDIA_AUDIO, 0, 2, 1},
                                          {SAMPLE_MEDIA_IMAGE, 0, 4, 4},
                                          {SAMPLE_MEDIA_IMAGE, 1, 4, 8},
                                          {SAMPLE_MEDIA_AUDIO, 1, 3, 12}};
    const SampleInfo *info = dataset_sample(dataset, 1);
    assert_int_equal(info->num_items, 4);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(info->items[i].media, expected[i].media);
        assert_int_equal(info->items[i].index, expected[i].index);
        assert_int_equal(info->items[i].rows, expected[i].rows);
        assert_int_equal(info->items[i].first_token, expected[i].first_token);
    }
    float frames[2][6 * 8];
    assert_int_equal(dataset_read_audio(dataset, 1, 1, 3, frames[0]), STATUS_OK);
    assert_int_equal(audio_decode(long_clip.bytes, long_clip.size_bytes, 8, 3, frames[1]),
                     STATUS_OK);
    assert_memory_equal(frames[0], frames[1], sizeof frames[0]);
    dataset_close(dataset);
    /* As with images: a mark for all, or one each. */
    static const char *const prompts[] = {"<image>", "<audio><audio>"};
    for (int i = 0; i < 2; i++) {
        testing_tar_open(&tar, shard_a);
        testing_tar_add(&tar, "k.wav", short_clip.bytes, short_clip.size_bytes);
        testing_tar_text(&tar, "k.txt", "c");
        testing_tar_close(&tar);
        options.prompt = prompts[i];
        assert_int_equal(dataset_open(&options, &dataset), STATUS_INVALID);
        assert_non_null(strstr(status_message(), i == 0 ? "0 <audio> marks for 1 audio clips"
                                                        : "2 <audio> marks for 1 audio clips"));
    }
}

/* A job without an encoder for what the data holds says so. */
static void test_no_encoder(void **state)
{
    (void)state;
    static TestingFile clip;
    testing_wav(&clip, 16000, 1, 100);
    testing_tar_open(&tar, shard_a);
    add_png("a.png");
    testing_tar_add(&tar, "a.wav", clip.bytes, clip.size_bytes);
    testing_tar_text(&tar, "a.txt", "c");
    testing_tar_close(&tar);
    char *patterns[] = {shard_a};
    DatasetOptions options = options_for(patterns, 1);
    options.rows_per_image = 0;
    options.image_size = 0;
    Dataset *dataset = NULL;
    assert_int_equal(dataset_open(&options, &dataset), STATUS_INVALID);
    assert_non_null(strstr(status_message(), "member a.png: an image, and the job has no module "
                                             "\"vision\""));
    options = options_for(patterns, 1);
    options.mels = 0;
    assert_int_equal(dataset_open(&options, &dataset), STATUS_INVALID);
    assert_non_null(strstr(status_message(), "member a.wav: an audio clip, and the job has no "
                                             "module \"audio\""));
    options = options_for(patterns, 1);
    options.max_seconds = 0.006;
    assert_int_equal(dataset_open(&options, &dataset), STATUS_INVALID);
    assert_non_null(strstr(status_message(), "member a.wav: 0.006 seconds; model.audio"));
}

/* Offsets are right with pax and GNU headers before members too. */
static void test_tar_dialects(void **state)
{
    (void)state;
    static const int formats[] = {ARCHIVE_FORMAT_TAR_USTAR, ARCHIVE_FORMAT_TAR_PAX_INTERCHANGE,
                                  ARCHIVE_FORMAT_TAR_GNUTAR};
    char name[300];
    memset(name, 'n', sizeof name);
    for (size_t i = 0; i < 3; i++) {
        size_t length = formats[i] == ARCHIVE_FORMAT_TAR_USTAR ? 90 : 290;
        memcpy(name + length - 4, ".txt", 5);
        tar.archive = archive_write_new();
        assert_int_equal(archive_write_set_format(tar.archive, formats[i]), ARCHIVE_OK);
        assert_int_equal(archive_write_open_filename(tar.archive, shard_a), ARCHIVE_OK);
        testing_tar_text(&tar, "first.txt", "first caption");
        testing_tar_text(&tar, name, "the caption");
        testing_tar_close(&tar);
        name[length - 4] = 'n';
        Dataset *dataset = NULL;
        if (open_shards(1, &dataset) != STATUS_OK) {
            fail_msg("%s", status_message());
        }
        assert_int_equal(dataset_count(dataset), 2);
        assert_int_equal(strlen(dataset_sample(dataset, 1)->key), length - 4);
        char *caption = NULL;
        assert_int_equal(dataset_read_caption(dataset, 1, &caption), STATUS_OK);
        assert_string_equal(caption, "the caption");
        memory_free(caption);
        dataset_close(dataset);
        memset(name, 'n', sizeof name);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_samples),     cmocka_unit_test(test_hash),
        cmocka_unit_test(test_bad_samples), cmocka_unit_test(test_bad_shards),
        cmocka_unit_test(test_bad_reads),   cmocka_unit_test(test_tar_dialects),
        cmocka_unit_test(test_long_texts),  cmocka_unit_test(test_clips),
        cmocka_unit_test(test_no_encoder)};
    return cmocka_run_group_tests_name("dataset", tests, make_folder, remove_folder);
}
