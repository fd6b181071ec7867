#include "data/prompt.h"

#include <string.h>

typedef struct Mark {
    const char *text;
    const char *items; /* what it stands for, in words */
    int32_t token;
} Mark;

static const Mark marks[SAMPLE_MEDIA_COUNT] = {
    [SAMPLE_MEDIA_IMAGE] = {"<image>", "images", TOKEN_IMAGE},
    [SAMPLE_MEDIA_AUDIO] = {"<audio>", "audio clips", TOKEN_AUDIO},
};

/* The media whose mark stands at `at`, or SAMPLE_MEDIA_COUNT. */
static int mark_at(const char *at)
{
    int media = 0;
    while (media < SAMPLE_MEDIA_COUNT &&
           strncmp(at, marks[media].text, strlen(marks[media].text)) != 0) {
        media++;
    }
    return media;
}

/* Past the mark or the byte at `at`. */
static const char *step_over(const char *at, int media)
{
    return at + (media < SAMPLE_MEDIA_COUNT ? strlen(marks[media].text) : 1);
}

static Status check_marks(const int32_t *num_marks, const int32_t *num_items)
{
    for (int media = 0; media < SAMPLE_MEDIA_COUNT; media++) {
        if ((num_marks[media] == 0 && num_items[media] > 0) ||
            (num_marks[media] > 1 && num_marks[media] != num_items[media])) {
            return fail(STATUS_INVALID,
                        "the prompt has %d %s marks for %d %s; it needs one for all of them, or "
                        "one each",
                        num_marks[media], marks[media].text, num_items[media], marks[media].items);
        }
    }
    return STATUS_OK;
}

/* The items of a mark, one after another; returns the token after them. */
static int64_t place(SampleItem *items, int32_t num_items, int64_t token)
{
    for (int32_t i = 0; i < num_items; i++) {
        items[i].first_token = token > INT32_MAX ? INT32_MAX : (int32_t)token;
        token += items[i].rows;
    }
    return token;
}

/* Those of one media are in order already, and lists are short. */
static void sort_items(SampleItem *items, int32_t num_items)
{
    for (int32_t i = 1; i < num_items; i++) {
        SampleItem item = items[i];
        int32_t at = i;
        while (at > 0 && items[at - 1].first_token > item.first_token) {
            items[at] = items[at - 1];
            at--;
        }
        items[at] = item;
    }
}

Status prompt_place_items(const char *prompt, SampleItem *items, int32_t num_items,
                          int64_t *tokens_out)
{
    int32_t num_marks[SAMPLE_MEDIA_COUNT + 1] = {0};
    int32_t counts[SAMPLE_MEDIA_COUNT] = {0};
    SampleItem *next[SAMPLE_MEDIA_COUNT] = {0}; /* of each media: the first that has no place yet */
    for (const char *at = prompt; *at; at = step_over(at, mark_at(at))) {
        num_marks[mark_at(at)]++;
    }
    for (int32_t i = num_items - 1; i >= 0; i--) {
        CHECK(items[i].rows > 0);
        CHECK(i == 0 || items[i - 1].media <= items[i].media);
        counts[items[i].media]++;
        next[items[i].media] = &items[i];
    }
    TRY(check_marks(num_marks, counts));
    int64_t token = 1; /* after bos */
    for (const char *at = prompt; *at; at = step_over(at, mark_at(at))) {
        int media = mark_at(at);
        if (media == SAMPLE_MEDIA_COUNT) {
            token++;
        } else if (counts[media] > 0) {
            int32_t count = num_marks[media] == 1 ? counts[media] : 1;
            token = place(next[media], count, token);
            next[media] += count;
        }
    }
    if (token > INT32_MAX) {
        return fail(STATUS_INVALID, "the prompt and its rows make %lld tokens; at most %d fit",
                    (long long)token, INT32_MAX);
    }
    sort_items(items, num_items);
    *tokens_out = token;
    return STATUS_OK;
}

int32_t *prompt_write_tokens(const char *prompt, const SampleItem *items, int32_t num_items,
                             int32_t *ids_out)
{
    int32_t *end = ids_out;
    int32_t item = 0;
    const char *at = prompt;
    *end++ = TOKEN_BOS;
    for (;;) {
        while (item < num_items && items[item].first_token == end - ids_out) {
            for (int32_t row = 0; row < items[item].rows; row++) {
                *end++ = marks[items[item].media].token;
            }
            item++;
        }
        if (!*at) {
            break;
        }
        int media = mark_at(at);
        if (media == SAMPLE_MEDIA_COUNT) {
            *end++ = (uint8_t)*at;
        }
        at = step_over(at, media);
    }
    CHECK(item == num_items);
    return end;
}
