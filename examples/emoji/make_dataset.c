/* Makes the emoji data set: pictures of Noto emoji (Debian package ruby-tanuki-emoji) with their
 * names (unicode-data) as captions, in WebDataset tar shards: train-0000.tar ..., heldout-0000.tar;
 * members "1f385_1f3fb.png" and "1f385_1f3fb.txt". The same bytes on every run.
 *
 * What is held out, a tenth, can be guessed from what is learnt: it asks for known parts put
 * together anew, not for names never heard.
 *   A family is a picture and its five skin tones, all six there. Families and pictures are ranked
 *   by the hash of their code points.
 *   - A tenth of the held-out pictures are the toneless pictures of the first families; their five
 *     tones are all in training.
 *   - The others are tones of the remaining families, in order of rank, at most three of a family;
 *     the toneless picture and two other tones, at least, are in training.
 */
#include "base/config.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/memory.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PICTURES_DEFAULT \
    "/usr/share/rubygems-integration/all/gems/tanuki_emoji-0.6.0/app/assets/images/tanuki_emoji"
#define NAMES_DEFAULT "/usr/share/unicode/emoji/emoji-test.txt"

enum {
    POINTS_MAX = 12, /* code points of one emoji */
    NAME_BYTES = 128,
    KEY_BYTES = 80,
    TRAIN_SHARDS = 4,
    PICTURE_BYTES_MAX = 1 << 20,
    TAR_BLOCK_BYTES = 512,
    TAR_RECORD_BYTES = 20 * TAR_BLOCK_BYTES,
    TONE_FIRST = 0x1f3fb,
    TONE_LAST = 0x1f3ff,
    NUM_TONES = TONE_LAST - TONE_FIRST + 1,
    VARIATION_SELECTOR = 0xfe0f, /* "as a picture": pictures' names leave it out */
    FLAG_FIRST = 0x1f1e6,        /* regional indicator A: AC.png is the flag of AC */
    HELDOUT_SHARE = 10,          /* one of so many */
    TONELESS_SHARE = 10,         /* of the held-out ones, one of so many */
    FAMILY_HELDOUT_MAX = 3,
};

typedef struct Emoji {
    uint32_t points[POINTS_MAX];
    int num_points;
    char name[NAME_BYTES];
    char key[KEY_BYTES]; /* code points, "1f385_1f3fb" */
    char *file;          /* of the picture, owned; NULL while only the name is known */
    int64_t base;        /* of a toned picture: its toneless one; -1: none */
    int num_tones;       /* of a toneless picture: how many toned ones it has */
    int num_heldout;     /* of a toneless picture: tones of it that are held out */
    bool is_heldout;
} Emoji;

typedef struct EmojiList {
    Emoji *items;
    size_t count;
    size_t capacity;
} EmojiList;

typedef struct Tar {
    FILE *file;
    char path[PATH_MAX];
    int64_t size_bytes;
} Tar;

static int compare_points(const void *a, const void *b)
{
    const Emoji *left = a;
    const Emoji *right = b;
    for (int i = 0; i < left->num_points && i < right->num_points; i++) {
        if (left->points[i] != right->points[i]) {
            return left->points[i] < right->points[i] ? -1 : 1;
        }
    }
    return left->num_points - right->num_points;
}

static bool is_tone(uint32_t point)
{
    return point >= TONE_FIRST && point <= TONE_LAST;
}

static Emoji *find_emoji(const EmojiList *list, const Emoji *key)
{
    CHECK(list->items != NULL);
    return bsearch(key, list->items, list->count, sizeof *list->items, compare_points);
}

/* Code points in hexadecimal with one of `separators` between them, up to anything else; returns
 * where it stopped. */
static const char *parse_points(const char *text, char separator, Emoji *emoji_out)
{
    emoji_out->num_points = 0;
    char *end = NULL;
    unsigned long point = strtoul(text, &end, 16);
    while (end != text && point <= 0x10ffff && emoji_out->num_points < POINTS_MAX) {
        if (point != VARIATION_SELECTOR) {
            emoji_out->points[emoji_out->num_points++] = (uint32_t)point;
        }
        text = end;
        if (*text != separator) {
            break;
        }
        point = strtoul(text + 1, &end, 16);
        if (end == text + 1) {
            break;
        }
    }
    return text;
}

/* "1F600 ; fully-qualified # <the emoji> E1.0 grinning face": *found_out is false for other lines.
 * */
static bool parse_name_line(char *line, Emoji *emoji_out)
{
    line[strcspn(line, "\n")] = '\0';
    const char *rest = parse_points(line, ' ', emoji_out);
    const char *semicolon = strchr(rest, ';');
    if (emoji_out->num_points == 0 || !semicolon) {
        return false;
    }
    const char *kind = semicolon + 1 + strspn(semicolon + 1, " ");
    bool is_used = strncmp(kind, "fully-qualified", 15) == 0 || strncmp(kind, "component", 9) == 0;
    const char *version = strstr(kind, " E");
    const char *name = version ? strchr(version + 2, ' ') : NULL;
    if (!is_used || !name) {
        return false;
    }
    snprintf(emoji_out->name, sizeof emoji_out->name, "%s", name + 1);
    return true;
}

static Status read_names(const char *path, EmojiList *list)
{
    FILE *file = fopen(path, "re");
    if (!file) {
        return fail(STATUS_NOT_FOUND,
                    "cannot open the list of names %s: %s; install unicode-data or give --names",
                    path, strerror(errno));
    }
    char line[1024];
    Status status = STATUS_OK;
    while (status == STATUS_OK && fgets(line, sizeof line, file)) {
        Emoji emoji = {.base = -1};
        if (parse_name_line(line, &emoji)) {
            status = memory_grow((void **)&list->items, &list->capacity, list->count + 1,
                                 sizeof *list->items);
            if (status == STATUS_OK) {
                list->items[list->count++] = emoji;
            }
        }
    }
    fclose(file);
    TRY(status);
    if (list->count == 0) {
        return fail(STATUS_CORRUPT, "no name in %s: expected the form of emoji-test.txt", path);
    }
    qsort(list->items, list->count, sizeof *list->items, compare_points);
    return STATUS_OK;
}

/* "emoji_u1f385_1f3fb.png" or a flag, "AC.png". */
static bool parse_picture_name(const char *name, Emoji *emoji_out)
{
    size_t length = strlen(name);
    if (length < 5 || strcmp(name + length - 4, ".png") != 0) {
        return false;
    }
    if (strncmp(name, "emoji_u", 7) == 0) {
        return strcmp(parse_points(name + 7, '_', emoji_out), ".png") == 0;
    }
    bool is_flag =
        length == 6 && name[0] >= 'A' && name[0] <= 'Z' && name[1] >= 'A' && name[1] <= 'Z';
    if (is_flag) {
        emoji_out->num_points = 2;
        emoji_out->points[0] = FLAG_FIRST + (uint32_t)(name[0] - 'A');
        emoji_out->points[1] = FLAG_FIRST + (uint32_t)(name[1] - 'A');
    }
    return is_flag;
}

static void set_key(Emoji *emoji)
{
    size_t used = 0;
    for (int i = 0; i < emoji->num_points; i++) {
        int written = snprintf(emoji->key + used, sizeof emoji->key - used, "%s%x",
                               i > 0 ? "_" : "", emoji->points[i]);
        used += (size_t)written;
        CHECK(used < sizeof emoji->key); /* 12 points of at most 6 digits */
    }
}

/* Gives names their pictures. */
static Status read_pictures(const char *path, EmojiList *list, int *num_unnamed_out)
{
    DIR *folder = opendir(path);
    if (!folder) {
        return fail(STATUS_NOT_FOUND,
                    "cannot open the pictures' folder %s: %s; install ruby-tanuki-emoji or give "
                    "--pictures",
                    path, strerror(errno));
    }
    Status status = STATUS_OK;
    *num_unnamed_out = 0;
    struct dirent *entry = readdir(folder);
    while (entry && status == STATUS_OK) {
        Emoji key = {0};
        if (parse_picture_name(entry->d_name, &key)) {
            Emoji *emoji = find_emoji(list, &key);
            *num_unnamed_out += emoji == NULL;
            if (emoji && !emoji->file) {
                status = memory_format(&emoji->file, "%s/%s", path, entry->d_name);
                set_key(emoji);
            }
        }
        entry = readdir(folder);
    }
    closedir(folder);
    TRY(status);
    return STATUS_OK;
}

/* Leaves only the names that have pictures, in the order of their code points. */
static void drop_unseen(EmojiList *list)
{
    size_t kept = 0;
    for (size_t i = 0; i < list->count; i++) {
        if (list->items[i].file) {
            list->items[kept++] = list->items[i];
        }
    }
    list->count = kept;
}

static void find_families(EmojiList *list)
{
    for (size_t i = 0; i < list->count; i++) {
        Emoji *emoji = &list->items[i];
        Emoji base = {0};
        for (int p = 0; p < emoji->num_points; p++) {
            if (!is_tone(emoji->points[p])) {
                base.points[base.num_points++] = emoji->points[p];
            }
        }
        if (base.num_points == emoji->num_points || base.num_points == 0) {
            continue;
        }
        Emoji *found = find_emoji(list, &base);
        if (found) {
            emoji->base = found - list->items;
            found->num_tones++;
        }
    }
}

/* An emoji's place in the order of hashes. */
typedef struct Rank {
    uint64_t hash;
    Emoji *emoji;
} Rank;

static int compare_ranks(const void *a, const void *b)
{
    const Rank *left = a;
    const Rank *right = b;
    if (left->hash != right->hash) {
        return left->hash < right->hash ? -1 : 1;
    }
    return strcmp(left->emoji->key, right->emoji->key);
}

/* Marks what is held out, by the rule at the head of this file. */
static Status hold_out(EmojiList *list, int *num_toneless_out, int *num_toned_out)
{
    Rank *ranks = NULL;
    TRY(MEMORY_NEW(&ranks, list->count));
    for (size_t i = 0; i < list->count; i++) {
        ranks[i] = (Rank){.hash = hash_text(list->items[i].key), .emoji = &list->items[i]};
    }
    qsort(ranks, list->count, sizeof *ranks, compare_ranks);
    int wanted = (int)list->count / HELDOUT_SHARE;
    int toneless_wanted = wanted / TONELESS_SHARE;
    int toneless = 0;
    int toned = 0;
    for (size_t i = 0; i < list->count && toneless < toneless_wanted; i++) {
        Emoji *emoji = ranks[i].emoji;
        emoji->is_heldout = emoji->num_tones == NUM_TONES;
        toneless += emoji->is_heldout;
    }
    for (size_t i = 0; i < list->count && toned < wanted - toneless; i++) {
        Emoji *emoji = ranks[i].emoji;
        Emoji *base = emoji->base >= 0 ? &list->items[emoji->base] : NULL;
        if (base && !base->is_heldout && base->num_tones == NUM_TONES &&
            base->num_heldout < FAMILY_HELDOUT_MAX) {
            emoji->is_heldout = true;
            base->num_heldout++;
            toned++;
        }
    }
    memory_free(ranks);
    *num_toneless_out = toneless;
    *num_toned_out = toned;
    return STATUS_OK;
}

static Status tar_write(Tar *tar, const void *bytes, size_t size_bytes)
{
    if (fwrite(bytes, 1, size_bytes, tar->file) != size_bytes) {
        return fail(STATUS_IO, "cannot write %s: %s", tar->path, strerror(errno));
    }
    tar->size_bytes += (int64_t)size_bytes;
    return STATUS_OK;
}

/* Under its last name only when it is whole. */
static Status tar_open(Tar *tar, const char *folder, const char *name)
{
    snprintf(tar->path, sizeof tar->path, "%s/%s.partial", folder, name);
    tar->size_bytes = 0;
    tar->file = fopen(tar->path, "we");
    if (!tar->file) {
        return fail(STATUS_IO, "cannot create %s: %s", tar->path, strerror(errno));
    }
    return STATUS_OK;
}

static Status tar_pad(Tar *tar, int64_t to_multiple_of)
{
    static const uint8_t zeros[TAR_BLOCK_BYTES];
    while (tar->size_bytes % to_multiple_of != 0) {
        int64_t left = to_multiple_of - tar->size_bytes % to_multiple_of;
        TRY(tar_write(tar, zeros, left < TAR_BLOCK_BYTES ? (size_t)left : TAR_BLOCK_BYTES));
    }
    return STATUS_OK;
}

/* POSIX ustar: owner 0, no time, mode 0644, so that the same pictures give the same bytes. */
static Status tar_add(Tar *tar, const char *name, const void *bytes, size_t size_bytes)
{
    char header[TAR_BLOCK_BYTES] = {0};
    CHECK(strlen(name) <= 100);
    snprintf(header, 101, "%s", name);
    snprintf(header + 100, 8, "%07o", 0644);
    snprintf(header + 108, 8, "%07o", 0);
    snprintf(header + 116, 8, "%07o", 0);
    snprintf(header + 124, 12, "%011zo", size_bytes);
    snprintf(header + 136, 12, "%011o", 0);
    memset(header + 148, ' ', 8); /* the checksum counts itself as spaces */
    header[156] = '0';
    snprintf(header + 257, 6, "ustar");
    header[263] = '0'; /* version 00 */
    header[264] = '0';
    unsigned sum = 0;
    for (int i = 0; i < TAR_BLOCK_BYTES; i++) {
        sum += (uint8_t)header[i];
    }
    snprintf(header + 148, 8, "%06o", sum);
    header[155] = ' ';
    TRY(tar_write(tar, header, sizeof header));
    TRY(tar_write(tar, bytes, size_bytes));
    TRY(tar_pad(tar, TAR_BLOCK_BYTES));
    return STATUS_OK;
}

static Status tar_close(Tar *tar)
{
    static const uint8_t end_mark[2 * TAR_BLOCK_BYTES];
    TRY(tar_write(tar, end_mark, sizeof end_mark));
    TRY(tar_pad(tar, TAR_RECORD_BYTES));
    int result = fclose(tar->file);
    tar->file = NULL;
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%.*s", (int)(strlen(tar->path) - strlen(".partial")), tar->path);
    if (result != 0 || rename(tar->path, path) != 0) {
        return fail(STATUS_IO, "cannot finish %s: %s", path, strerror(errno));
    }
    return STATUS_OK;
}

static Status add_emoji(Tar *tar, const Emoji *emoji, uint8_t *buffer)
{
    FILE *file = fopen(emoji->file, "re");
    if (!file) {
        return fail(STATUS_IO, "cannot open the picture %s: %s", emoji->file, strerror(errno));
    }
    size_t size_bytes = fread(buffer, 1, PICTURE_BYTES_MAX, file);
    bool is_bad = ferror(file) || size_bytes == PICTURE_BYTES_MAX || size_bytes == 0;
    fclose(file);
    if (is_bad) {
        return fail(STATUS_IO, "cannot read the picture %s, or it is empty or too large",
                    emoji->file);
    }
    char name[KEY_BYTES + 8];
    snprintf(name, sizeof name, "%s.png", emoji->key);
    TRY(tar_add(tar, name, buffer, size_bytes));
    snprintf(name, sizeof name, "%s.txt", emoji->key);
    TRY(tar_add(tar, name, emoji->name, strlen(emoji->name)));
    return STATUS_OK;
}

/* Every `stride`-th picture of one half of the split, from `first` on. */
static Status write_shard(const EmojiList *list, const char *folder, const char *name,
                          bool is_heldout, size_t first, size_t stride)
{
    Tar tar = {0};
    uint8_t *buffer = NULL;
    TRY(tar_open(&tar, folder, name));
    Status status = MEMORY_NEW(&buffer, PICTURE_BYTES_MAX);
    size_t index = 0;
    size_t written = 0;
    for (size_t i = 0; i < list->count && status == STATUS_OK; i++) {
        if (list->items[i].is_heldout != is_heldout) {
            continue;
        }
        if (index++ % stride == first) {
            status = add_emoji(&tar, &list->items[i], buffer);
            written++;
        }
    }
    memory_free(buffer);
    if (status == STATUS_OK) {
        status = tar_close(&tar);
    }
    if (status != STATUS_OK && tar.file) {
        fclose(tar.file);
    }
    TRY(status);
    printf("wrote %s/%s: %zu pairs, %.1f MB\n", folder, name, written,
           (double)tar.size_bytes / 1e6);
    return STATUS_OK;
}

static Status write_shards(const EmojiList *list, const char *folder)
{
    TRY(file_make_folder(folder));
    char name[32];
    for (size_t i = 0; i < TRAIN_SHARDS; i++) {
        snprintf(name, sizeof name, "train-%04zu.tar", i);
        TRY(write_shard(list, folder, name, false, i, TRAIN_SHARDS));
    }
    TRY(write_shard(list, folder, "heldout-0000.tar", true, 0, 1));
    return STATUS_OK;
}

static Status make_dataset(const char *pictures, const char *names, const char *output,
                           EmojiList *list)
{
    int num_unnamed = 0;
    int num_toneless = 0;
    int num_toned = 0;
    TRY(read_names(names, list));
    TRY(read_pictures(pictures, list, &num_unnamed));
    drop_unseen(list);
    if (list->count == 0) {
        return fail(STATUS_INVALID,
                    "no picture with a name in %s: expected files such as emoji_u1f600.png",
                    pictures);
    }
    find_families(list);
    TRY(hold_out(list, &num_toneless, &num_toned));
    int num_heldout = num_toneless + num_toned;
    printf("%zu pairs (%d pictures without a name left out): %zu to train, %d held out\n",
           list->count, num_unnamed, list->count - (size_t)num_heldout, num_heldout);
    printf("held out: %d skin tones whose toneless picture and two other tones are in training, "
           "%d toneless pictures whose five tones are\n",
           num_toned, num_toneless);
    TRY(write_shards(list, output));
    return STATUS_OK;
}

int main(int argc, char **argv)
{
    const char *pictures = PICTURES_DEFAULT;
    const char *names = NAMES_DEFAULT;
    const char *output = "out/emoji/data";
    const ConfigFlag flags[] = {
        {"output", 'o', CONFIG_KIND_TEXT, &output, "FOLDER", NULL,
         "where the shards go (default out/emoji/data)"},
        {"pictures", 0, CONFIG_KIND_TEXT, &pictures, "FOLDER", NULL,
         "emoji_uXXXX.png files (default: those of the package ruby-tanuki-emoji)"},
        {"names", 0, CONFIG_KIND_TEXT, &names, "FILE", NULL,
         "emoji-test.txt (default: that of the package unicode-data)"}};
    const ConfigCommand command = {
        .usage = "emoji_dataset [--output FOLDER]",
        .about = "Makes WebDataset shards of emoji pictures and their names: a tenth is held out.",
        .flags = flags,
        .num_flags = (int)(sizeof flags / sizeof *flags)};
    ConfigList positional;
    bool wants_help = false;
    Status status =
        config_parse(&command, argc, (const char *const *)argv, &positional, &wants_help);
    if (status == STATUS_OK && wants_help) {
        config_print_help(&command, stdout);
        return 0;
    }
    int usage_code = 2;
    EmojiList list = {0};
    if (status == STATUS_OK) {
        usage_code = 1;
        status = make_dataset(pictures, names, output, &list);
    }
    for (size_t i = 0; i < list.count; i++) {
        memory_free(list.items[i].file);
    }
    memory_free(list.items);
    if (status != STATUS_OK) {
        fprintf(stderr, "emoji_dataset: %s\n", status_message());
        return usage_code;
    }
    return 0;
}
