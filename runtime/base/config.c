#include "base/config.h"

#include "base/memory.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    DISTANCE_CHARS = 48,
    HELP_COLUMN = 30
};

const char *config_environment(const char *name)
{
    const char *value = getenv(name);
    return value && value[0] ? value : NULL;
}

Status config_environment_with(const char *name, const char *value, char ***environment_out)
{
    size_t count = 0;
    while (environ[count]) {
        count++;
    }
    size_t addition_bytes = strlen(name) + strlen(value) + 2;
    size_t table_bytes = (count + 2) * sizeof(char *);
    char *block = NULL;
    TRY(MEMORY_NEW(&block, table_bytes + addition_bytes));
    char **table = (char **)(void *)block;
    memcpy(table, environ, count * sizeof(char *));
    if (!config_environment(name)) {
        char *addition = block + table_bytes;
        snprintf(addition, addition_bytes, "%s=%s", name, value);
        table[count] = addition;
    }
    *environment_out = table;
    return STATUS_OK;
}

static int smaller(int a, int b)
{
    return a < b ? a : b;
}

int config_edit_distance(const char *a, const char *b)
{
    int row[DISTANCE_CHARS];
    int columns = (int)strnlen(b, DISTANCE_CHARS - 1);
    int rows = (int)strnlen(a, DISTANCE_CHARS - 1);
    for (int j = 0; j <= columns; j++) {
        row[j] = j;
    }
    for (int i = 1; i <= rows; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= columns; j++) {
            int above = row[j];
            int replace = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
            row[j] = smaller(replace, smaller(above, row[j - 1]) + 1);
            diagonal = above;
        }
    }
    return row[columns];
}

static const ConfigFlag *find_flag(const ConfigCommand *command, const char *name, size_t length)
{
    for (int i = 0; i < command->num_flags; i++) {
        const ConfigFlag *flag = &command->flags[i];
        if (strlen(flag->name) == length && memcmp(flag->name, name, length) == 0) {
            return flag;
        }
    }
    return NULL;
}

static const ConfigFlag *find_letter(const ConfigCommand *command, char letter)
{
    for (int i = 0; i < command->num_flags; i++) {
        if (command->flags[i].letter == letter) {
            return &command->flags[i];
        }
    }
    return NULL;
}

static Status fail_unknown(const ConfigCommand *command, const char *argument)
{
    const char *nearest = NULL;
    int nearest_distance = 4; /* farther names are no help */
    for (int i = 0; i < command->num_flags && argument[1] == '-'; i++) {
        int distance = config_edit_distance(argument + 2, command->flags[i].name);
        if (distance < nearest_distance) {
            nearest_distance = distance;
            nearest = command->flags[i].name;
        }
    }
    if (nearest) {
        return fail(STATUS_INVALID, "unknown flag %s; did you mean --%s?", argument, nearest);
    }
    return fail(STATUS_INVALID, "unknown flag %s; --help lists the flags", argument);
}

static Status parse_integer(const char *what, const char *text, int64_t *value_out)
{
    char *end = NULL;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (end == text || *end || errno) {
        return fail(STATUS_INVALID, "%s: expected a whole number, got \"%s\"", what, text);
    }
    *value_out = value;
    return STATUS_OK;
}

static Status store_value(const ConfigFlag *flag, const char *what, const char *text)
{
    switch (flag->kind) {
    case CONFIG_KIND_TEXT:
        *(const char **)flag->value_out = text;
        return STATUS_OK;
    case CONFIG_KIND_INTEGER:
        return parse_integer(what, text, flag->value_out);
    case CONFIG_KIND_LIST: {
        ConfigList *list = flag->value_out;
        if (list->count == CONFIG_LIST_MAX) {
            return fail(STATUS_INVALID, "%s: given more than %d times", what, CONFIG_LIST_MAX);
        }
        list->items[list->count++] = text;
        return STATUS_OK;
    }
    case CONFIG_KIND_SWITCH:
        break;
    }
    *(bool *)flag->value_out = true;
    return STATUS_OK;
}

/* One flag at argv[*index]; moves *index over a value that stands apart. */
static Status parse_flag(const ConfigCommand *command, int argc, const char *const *argv,
                         int *index, bool *help_out)
{
    const char *argument = argv[*index];
    bool is_long = argument[1] == '-';
    const char *equals = is_long ? strchr(argument, '=') : NULL;
    size_t length = equals ? (size_t)(equals - argument - 2) : strlen(argument + 1 + is_long);
    if (strcmp(argument, "--help") == 0 || strcmp(argument, "-h") == 0) {
        *help_out = true;
        return STATUS_OK;
    }
    const ConfigFlag *flag =
        is_long ? find_flag(command, argument + 2, length) : find_letter(command, argument[1]);
    if (!flag) {
        return fail_unknown(command, argument);
    }
    const char *value = equals ? equals + 1 : NULL;
    if (!is_long && argument[2]) {
        value = argument + 2;
    }
    if (flag->kind == CONFIG_KIND_SWITCH) {
        if (value) {
            return fail(STATUS_INVALID, "%s: --%s takes no value", argument, flag->name);
        }
        return store_value(flag, argument, NULL);
    }
    if (!value) {
        if (*index + 1 >= argc) {
            return fail(STATUS_INVALID, "%s: expected a value (%s) after it", argument,
                        flag->placeholder);
        }
        value = argv[++*index];
    }
    char what[64];
    snprintf(what, sizeof what, "--%s", flag->name);
    return store_value(flag, what, value);
}

static Status parse_environment(const ConfigCommand *command)
{
    for (int i = 0; i < command->num_flags; i++) {
        const ConfigFlag *flag = &command->flags[i];
        const char *value = flag->environment ? config_environment(flag->environment) : NULL;
        if (value) {
            TRY(store_value(flag, flag->environment, value));
        }
    }
    return STATUS_OK;
}

Status config_parse(const ConfigCommand *command, int argc, const char *const *argv,
                    ConfigList *positional_out, bool *help_out)
{
    *help_out = false;
    positional_out->count = 0;
    TRY(parse_environment(command));
    bool flags_ended = false;
    for (int i = 1; i < argc && !*help_out; i++) {
        const char *argument = argv[i];
        if (!flags_ended && strcmp(argument, "--") == 0) {
            flags_ended = true;
        } else if (!flags_ended && argument[0] == '-' && argument[1]) {
            TRY(parse_flag(command, argc, argv, &i, help_out));
        } else if (positional_out->count == command->positional_max) {
            return fail(STATUS_INVALID, "unexpected argument \"%s\"; usage: %s", argument,
                        command->usage);
        } else {
            positional_out->items[positional_out->count++] = argument;
        }
    }
    if (!*help_out && positional_out->count < command->positional_min) {
        return fail(STATUS_INVALID, "an argument is missing; usage: %s", command->usage);
    }
    return STATUS_OK;
}

void config_print_help(const ConfigCommand *command, FILE *file)
{
    fprintf(file, "Usage: %s\n\n%s\n\nFlags:\n", command->usage, command->about);
    for (int i = 0; i < command->num_flags; i++) {
        const ConfigFlag *flag = &command->flags[i];
        char left[128];
        char letter[8] = "    ";
        if (flag->letter) {
            snprintf(letter, sizeof letter, "-%c, ", flag->letter);
        }
        snprintf(left, sizeof left, "  %s--%s%s%s", letter, flag->name,
                 flag->placeholder ? " " : "", flag->placeholder ? flag->placeholder : "");
        fprintf(file, "%-*s %s", HELP_COLUMN, left, flag->help);
        if (flag->environment) {
            fprintf(file, " [or the variable %s]", flag->environment);
        }
        fputc('\n', file);
    }
    fprintf(file, "%-*s %s\n", HELP_COLUMN, "  -h, --help", "show this text");
}
