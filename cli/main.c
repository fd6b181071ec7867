/* viaduct: the command line. */
#include "cli/verbs.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>

typedef struct Verb {
    const char *name;
    ExitCode (*run)(int argc, const char *const *argv);
    const char *help;
} Verb;

static const Verb verbs[] = {
    {"train", train_verb, "run a job on this machine, from its beginning to its end"},
    {"plan", plan_verb, "show what a job's layout needs, run nothing"},
    {"verify", verify_verb, "compare a job's layout with one process, step by step"},
    {"submit", submit_verb, "give a job to a coordinator"},
    {"get", get_verb, "show jobs or workers"},
    {"watch", watch_verb, "follow a job to its end"},
    {"cancel", cancel_verb, "cancel a job"},
    {"version", version_verb, "show the version"},
};

static void print_help(FILE *file)
{
    fprintf(file, "Usage: viaduct VERB [arguments]\n\n"
                  "Trains multimodal models with a separate parallel layout for each module.\n\n"
                  "Verbs:\n");
    for (size_t i = 0; i < sizeof verbs / sizeof *verbs; i++) {
        fprintf(file, "  %-9s %s\n", verbs[i].name, verbs[i].help);
    }
    fprintf(file,
            "\n\"viaduct VERB --help\" tells more.\n"
            "Exit status: 0 done or SUCCEEDED, 1 the job FAILED, 2 wrong use or a wrong job,\n"
            "3 coordinator unavailable, 4 not found, 5 conflict, 6 timed out, 7 CANCELLED,\n"
            "130 interrupted.\n");
}

int main(int argc, char **argv)
{
    signal(SIGPIPE, SIG_IGN); /* a closed pipe is an error of the write */
    const char *name = argc > 1 ? argv[1] : "";
    for (size_t i = 0; i < sizeof verbs / sizeof *verbs; i++) {
        if (strcmp(name, verbs[i].name) == 0) {
            return verbs[i].run(argc - 1, (const char *const *)argv + 1);
        }
    }
    bool wants_help =
        strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0 || strcmp(name, "help") == 0;
    if (wants_help) {
        print_help(stdout);
        return EXIT_CODE_OK;
    }
    if (name[0]) {
        fprintf(stderr, "viaduct: there is no verb \"%s\"\n\n", name);
    }
    print_help(stderr);
    return EXIT_CODE_USAGE;
}
