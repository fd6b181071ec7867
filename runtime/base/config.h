/* Config: what a program is told: command-line flags and environment variables. The only reader of
 * the environment.
 *
 * A command is a table of flags; the same table parses the arguments and makes --help.
 * Threading: main thread, at start.
 */
#ifndef BASE_CONFIG_H
#define BASE_CONFIG_H

#include "base/status.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

enum {
    CONFIG_LIST_MAX = 64
}; /* values of one flag that may be repeated */

typedef struct ConfigList {
    const char *items[CONFIG_LIST_MAX]; /* borrowed from argv */
    int count;
} ConfigList;

typedef enum ConfigKind {
    CONFIG_KIND_TEXT,    /* const char * */
    CONFIG_KIND_INTEGER, /* int64_t */
    CONFIG_KIND_SWITCH,  /* bool; takes no value */
    CONFIG_KIND_LIST,    /* ConfigList; may be repeated */
} ConfigKind;

typedef struct ConfigFlag {
    const char *name; /* "coordinator": --coordinator VALUE or --coordinator=VALUE */
    char letter;      /* 'f': -f VALUE; 0: none */
    ConfigKind kind;
    void *value_out;         /* holds the default before; left alone when the flag is absent */
    const char *placeholder; /* "HOST:PORT", for --help; NULL for switches */
    const char *environment; /* the variable that stands in for an absent flag, or NULL */
    const char *help;        /* one line */
} ConfigFlag;

typedef struct ConfigCommand {
    const char *usage; /* "viaduct get [jobs|workers] [NAME]" */
    const char *about; /* a few lines */
    const ConfigFlag *flags;
    int num_flags;
    int positional_min;
    int positional_max; /* at most CONFIG_LIST_MAX */
} ConfigCommand;

/* Reads argv[1..]. Flags and other arguments may be mixed; "--" ends the flags. *help_out: --help
 * or -h was given (nothing else is then checked). STATUS_INVALID: unknown flag (the nearest name is
 * told), missing or wrong value, too few or too many arguments. */
Status config_parse(const ConfigCommand *command, int argc, const char *const *argv,
                    ConfigList *positional_out, bool *help_out) STATUS_CHECKED;

void config_print_help(const ConfigCommand *command, FILE *file);

/* The environment variable, NULL when unset or empty. */
const char *config_environment(const char *name);

/* This process' environment with `name=value` added unless `name` is set already: a NULL-terminated
 * array for execve(). Owned by the caller: one memory_free frees it all. */
Status config_environment_with(const char *name, const char *value,
                               char ***environment_out) STATUS_CHECKED;

/* How many single-byte edits turn `a` into `b`, looking at the first 47 bytes of each: for "did you
 * mean". */
int config_edit_distance(const char *a, const char *b);

#endif
