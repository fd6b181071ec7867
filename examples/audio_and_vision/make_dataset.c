/* Makes the sound half of the example's data set from the recordings of a telephone system (Debian
 * package asterisk-core-sounds-en-wav) and what is said in them (asterisk-core-sounds-en), in
 * WebDataset tar shards: train-0000.tar ..., heldout-0000.tar; members "phrase-vm-deleted.wav" and
 * ".txt". The same bytes on every run.
 *
 *   phrases    each recording of at most PHRASE_SECONDS_MAX, with its text; all to train on
 *   numbers    each of the 1000 strings of three digits, put together from the recordings of the ten
 *              digits: silence cut off, and pauses between them that depend on the string
 *
 * What is held out is a tenth of the numbers: as with the pictures it asks for known parts put together
 * anew. A phrase that was held out would ask for words never heard.
 */
#include "base/config.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/memory.h"

#include <archive.h>
#include <archive_entry.h>
#include <errno.h>
#include <limits.h>
#include <sndfile.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#define SOUNDS_DEFAULT "/usr/share/asterisk/sounds/en_US_f_Allison"
#define TEXTS_DEFAULT  "/usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz"

enum {
    RATE = 8000, /* of the recordings */
    PHRASE_SECONDS_MAX = 5,
    SAMPLES_MAX = PHRASE_SECONDS_MAX * RATE,
    NUM_DIGITS = 10,
    NUMBER_DIGITS = 3,
    NUM_NUMBERS = 1000,
    QUIET = 250,           /* of 32768: below it a digit's recording has not begun, or is over */
    PAUSE_MAX = RATE / 10, /* samples */
    HELDOUT_SHARE = 10,    /* one of so many numbers */
    TRAIN_SHARDS = 4,
    WAV_HEADER_BYTES = 44,
    LINE_BYTES = 2048,
    NAME_BYTES = 96,
};

typedef struct Clip {
    int16_t samples[SAMPLES_MAX];
    int count;
} Clip;

typedef struct Phrase {
    char name[NAME_BYTES]; /* of the recording, "digits/7" */
    char text[LINE_BYTES];
} Phrase;

typedef struct Writer {
    struct archive *shards[TRAIN_SHARDS];
    struct archive *heldout;
    uint8_t wav[WAV_HEADER_BYTES + 2 * SAMPLES_MAX];
    int num_train;
    int num_heldout;
} Writer;

/* *found_out is false where there is no such file, and for one that is longer than wanted. */
static Status read_clip(const char *folder, const char *name, Clip *clip_out, bool *found_out)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s.wav", folder, name);
    SF_INFO info = {0};
    SNDFILE *sound = sf_open(path, SFM_READ, &info);
    *found_out = sound != NULL && info.frames <= SAMPLES_MAX;
    if (!sound) {
        return STATUS_OK;
    }
    Status status = STATUS_OK;
    if (info.samplerate != RATE || info.channels != 1) {
        status = fail(STATUS_UNSUPPORTED, "%s: %d Hz and %d channels, expected %d Hz and one", path,
                      info.samplerate, info.channels, RATE);
    } else if (*found_out) {
        clip_out->count = (int)sf_readf_short(sound, clip_out->samples, info.frames);
        if (clip_out->count != info.frames) {
            status = fail(STATUS_CORRUPT, "%s: it ends after %d of %lld samples", path,
                          clip_out->count, (long long)info.frames);
        }
    }
    sf_close(sound);
    TRY(status);
    return STATUS_OK;
}

static void trim(Clip *clip)
{
    int begin = 0;
    int end = clip->count;
    while (begin < end && abs(clip->samples[begin]) < QUIET) {
        begin++;
    }
    while (end > begin && abs(clip->samples[end - 1]) < QUIET) {
        end--;
    }
    clip->count = end - begin;
    memmove(clip->samples, clip->samples + begin, (size_t)clip->count * sizeof *clip->samples);
}

static void store(uint8_t *to, uint32_t value, int size_bytes)
{
    for (int i = 0; i < size_bytes; i++) {
        to[i] = (uint8_t)(value >> 8 * i);
    }
}

/* A WAV file of 16-bit PCM; returns its size. */
static size_t make_wav(const Clip *clip, uint8_t *wav)
{
    static const uint8_t head[16] = "RIFF....WAVEfmt ";
    static const uint8_t data[4] = "data";
    uint32_t data_bytes = (uint32_t)clip->count * 2;
    memcpy(wav, head, sizeof head);
    store(wav + 4, 36 + data_bytes, 4);
    store(wav + 16, 16, 4);
    store(wav + 20, 1, 2); /* PCM */
    store(wav + 22, 1, 2); /* channels */
    store(wav + 24, RATE, 4);
    store(wav + 28, RATE * 2, 4);
    store(wav + 32, 2, 2);  /* bytes a sample */
    store(wav + 34, 16, 2); /* bits */
    memcpy(wav + 36, data, sizeof data);
    store(wav + 40, data_bytes, 4);
    for (int i = 0; i < clip->count; i++) {
        store(wav + WAV_HEADER_BYTES + (size_t)i * 2, (uint16_t)clip->samples[i], 2);
    }
    return WAV_HEADER_BYTES + data_bytes;
}

/* POSIX ustar; owner 0, no time, mode 0644, so that the same sounds give the same bytes. */
static Status add_member(struct archive *shard, const char *name, const void *bytes,
                         size_t size_bytes)
{
    struct archive_entry *entry = archive_entry_new();
    if (!entry) {
        return fail(STATUS_NO_MEMORY, "no memory for a tar member");
    }
    archive_entry_set_pathname(entry, name);
    archive_entry_set_filetype(entry, AE_IFREG);
    archive_entry_set_perm(entry, 0644);
    archive_entry_set_mtime(entry, 0, 0);
    archive_entry_set_size(entry, (int64_t)size_bytes);
    bool is_written = archive_write_header(shard, entry) == ARCHIVE_OK &&
                      archive_write_data(shard, bytes, size_bytes) == (la_ssize_t)size_bytes;
    archive_entry_free(entry);
    if (!is_written) {
        return fail(STATUS_IO, "cannot write %s: %s", name, archive_error_string(shard));
    }
    return STATUS_OK;
}

static Status add_sample(Writer *writer, const char *key, const Clip *clip, const char *text,
                         bool is_heldout)
{
    struct archive *shard =
        is_heldout ? writer->heldout : writer->shards[writer->num_train % TRAIN_SHARDS];
    char name[NAME_BYTES + 8];
    snprintf(name, sizeof name, "%s.wav", key);
    TRY(add_member(shard, name, writer->wav, make_wav(clip, writer->wav)));
    snprintf(name, sizeof name, "%s.txt", key);
    TRY(add_member(shard, name, text, strlen(text)));
    writer->num_train += !is_heldout;
    writer->num_heldout += is_heldout;
    return STATUS_OK;
}

/* "digits/at: at [@]" -> "digits/at", "at"; false for comments and empty lines. */
static bool parse_line(char *line, Phrase *phrase_out)
{
    line[strcspn(line, "\r\n")] = '\0';
    char *colon = strchr(line, ':');
    if (line[0] == ';' || !colon || colon == line || colon - line >= NAME_BYTES) {
        return false;
    }
    *colon = '\0';
    char *text = colon + 1 + strspn(colon + 1, " ");
    char *note = strstr(text, " [");
    if (note) {
        *note = '\0';
    }
    memcpy(phrase_out->name, line, strlen(line) + 1);
    memcpy(phrase_out->text, text, strlen(text) + 1);
    return text[0] != '\0';
}

/* A key is a member's name up to its first dot, and slashes would be folders: others become dashes. */
static void make_key(const char *name, char *key_out, size_t size_bytes)
{
    int length = snprintf(key_out, size_bytes, "phrase-%s", name);
    CHECK(length > 0 && (size_t)length < size_bytes);
    for (char *at = key_out; *at; at++) {
        *at = (char)(*at == '/' || *at == '.' ? '-' : *at);
    }
}

static Status add_phrases(Writer *writer, const char *sounds, const char *texts, Clip *clip,
                          int *num_skipped_out)
{
    gzFile file = gzopen(texts, "re");
    if (!file) {
        return fail(STATUS_NOT_FOUND,
                    "cannot open the list of texts %s: %s; install asterisk-core-sounds-en or give "
                    "--texts",
                    texts, strerror(errno));
    }
    char line[LINE_BYTES];
    Status status = STATUS_OK;
    *num_skipped_out = 0;
    while (status == STATUS_OK && gzgets(file, line, sizeof line)) {
        Phrase phrase;
        if (!parse_line(line, &phrase)) {
            continue;
        }
        bool found = false;
        char key[NAME_BYTES + 16];
        make_key(phrase.name, key, sizeof key);
        status = read_clip(sounds, phrase.name, clip, &found);
        if (status == STATUS_OK && found) {
            status = add_sample(writer, key, clip, phrase.text, false);
        }
        *num_skipped_out += !found;
    }
    gzclose(file);
    TRY(status);
    return STATUS_OK;
}

static Status append(Clip *clip, const int16_t *samples, int count)
{
    if (count > SAMPLES_MAX - clip->count) {
        return fail(STATUS_UNSUPPORTED,
                    "recordings of digits so long that three of them take more "
                    "than %d seconds",
                    PHRASE_SECONDS_MAX);
    }
    memcpy(clip->samples + clip->count, samples, (size_t)count * sizeof *samples);
    clip->count += count;
    return STATUS_OK;
}

static Status add_number(Writer *writer, const Clip *digits, int number, bool is_heldout,
                         Clip *clip)
{
    static const char *const words[NUM_DIGITS] = {"zero", "one", "two",   "three", "four",
                                                  "five", "six", "seven", "eight", "nine"};
    static const int16_t silence[PAUSE_MAX];
    char key[32];
    char text[64] = "";
    snprintf(key, sizeof key, "number-%03d", number);
    uint64_t hash = hash_text(key);
    clip->count = 0;
    for (int i = 0; i < NUMBER_DIGITS; i++) {
        int digit = key[7 + i] - '0';
        TRY(append(clip, silence, (int)((hash >> 16 * i) % PAUSE_MAX)));
        TRY(append(clip, digits[digit].samples, digits[digit].count));
        size_t used = strlen(text);
        snprintf(text + used, sizeof text - used, "%s%s", i > 0 ? " " : "", words[digit]);
    }
    TRY(add_sample(writer, key, clip, text, is_heldout));
    return STATUS_OK;
}

/* Numbers in the order of their hashes: the first tenth is held out. */
typedef struct Rank {
    uint64_t hash;
    int number;
} Rank;

static int compare_ranks(const void *a, const void *b)
{
    const Rank *left = a;
    const Rank *right = b;
    if (left->hash != right->hash) {
        return left->hash < right->hash ? -1 : 1;
    }
    return left->number - right->number;
}

static Status add_numbers(Writer *writer, const char *sounds, Clip *digits, Clip *clip)
{
    Rank ranks[NUM_NUMBERS];
    for (int digit = 0; digit < NUM_DIGITS; digit++) {
        char name[32];
        bool found = false;
        snprintf(name, sizeof name, "digits/%d", digit);
        TRY(read_clip(sounds, name, &digits[digit], &found));
        if (!found) {
            return fail(STATUS_NOT_FOUND,
                        "no recording %s/%s.wav; install asterisk-core-sounds-en-wav or give "
                        "--sounds",
                        sounds, name);
        }
        trim(&digits[digit]);
    }
    for (int number = 0; number < NUM_NUMBERS; number++) {
        ranks[number] = (Rank){.hash = hash_u64(HASH_SEED, (uint64_t)number), .number = number};
    }
    qsort(ranks, NUM_NUMBERS, sizeof *ranks, compare_ranks);
    for (int i = 0; i < NUM_NUMBERS; i++) {
        bool is_heldout = i < NUM_NUMBERS / HELDOUT_SHARE;
        TRY(add_number(writer, digits, ranks[i].number, is_heldout, clip));
    }
    return STATUS_OK;
}

static Status open_shard(const char *folder, const char *name, struct archive **shard_out)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    *shard_out = archive_write_new();
    if (!*shard_out) {
        return fail(STATUS_NO_MEMORY, "no memory for a tar");
    }
    if (archive_write_set_format_ustar(*shard_out) != ARCHIVE_OK ||
        archive_write_open_filename(*shard_out, path) != ARCHIVE_OK) {
        return fail(STATUS_IO, "cannot create %s: %s", path, archive_error_string(*shard_out));
    }
    return STATUS_OK;
}

static Status open_shards(Writer *writer, const char *folder)
{
    TRY(file_make_folder(folder));
    for (int i = 0; i < TRAIN_SHARDS; i++) {
        char name[32];
        snprintf(name, sizeof name, "train-%04d.tar", i);
        TRY(open_shard(folder, name, &writer->shards[i]));
    }
    TRY(open_shard(folder, "heldout-0000.tar", &writer->heldout));
    return STATUS_OK;
}

/* Writes the ends when all went well so far. */
static Status close_shards(Writer *writer, Status status)
{
    for (int i = 0; i <= TRAIN_SHARDS; i++) {
        struct archive *shard = i < TRAIN_SHARDS ? writer->shards[i] : writer->heldout;
        if (shard && archive_write_close(shard) != ARCHIVE_OK && status == STATUS_OK) {
            status = fail(STATUS_IO, "cannot finish a shard: %s", archive_error_string(shard));
        }
        archive_write_free(shard); /* NULL is fine */
    }
    TRY(status);
    return STATUS_OK;
}

static Status make_dataset(const char *sounds, const char *texts, const char *output)
{
    Writer *writer = NULL;
    Clip *clips = NULL; /* the digits, and the one at hand */
    int num_skipped = 0;
    TRY(MEMORY_NEW(&writer, 1));
    Status status = MEMORY_NEW(&clips, NUM_DIGITS + 1);
    if (status == STATUS_OK) {
        status = open_shards(writer, output);
    }
    if (status == STATUS_OK) {
        status = add_numbers(writer, sounds, clips, &clips[NUM_DIGITS]);
    }
    if (status == STATUS_OK) {
        status = add_phrases(writer, sounds, texts, &clips[NUM_DIGITS], &num_skipped);
    }
    status = close_shards(writer, status);
    if (status == STATUS_OK) {
        printf("%d clips to train on (%d numbers, %d phrases; %d phrases without a recording or "
               "longer than %d s left out), %d numbers held out, in %s\n",
               writer->num_train, NUM_NUMBERS - writer->num_heldout,
               writer->num_train - (NUM_NUMBERS - writer->num_heldout), num_skipped,
               PHRASE_SECONDS_MAX, writer->num_heldout, output);
    }
    memory_free(clips);
    memory_free(writer);
    TRY(status);
    return STATUS_OK;
}

int main(int argc, char **argv)
{
    const char *sounds = SOUNDS_DEFAULT;
    const char *texts = TEXTS_DEFAULT;
    const char *output = "out/audio_and_vision/data";
    const ConfigFlag flags[] = {
        {"output", 'o', CONFIG_KIND_TEXT, &output, "FOLDER", NULL,
         "where the shards go (default out/audio_and_vision/data)"},
        {"sounds", 0, CONFIG_KIND_TEXT, &sounds, "FOLDER", NULL,
         "WAV files (default: those of the package asterisk-core-sounds-en-wav)"},
        {"texts", 0, CONFIG_KIND_TEXT, &texts, "FILE", NULL,
         "what is said in them (default: that of the package asterisk-core-sounds-en)"}};
    const ConfigCommand command = {
        .usage = "speech_dataset [--output FOLDER]",
        .about =
            "Makes WebDataset shards of telephone prompts and spoken numbers with their texts; "
            "a tenth of the numbers is held out.",
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
    if (status == STATUS_OK) {
        usage_code = 1;
        status = make_dataset(sounds, texts, output);
    }
    if (status != STATUS_OK) {
        fprintf(stderr, "speech_dataset: %s\n", status_message());
        return usage_code;
    }
    return 0;
}
