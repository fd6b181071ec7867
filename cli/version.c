#include "cli/verbs.h"

#include <stdio.h>

ExitCode version_verb(int argc, const char *const *argv)
{
    (void)argc;
    (void)argv;
    printf("viaduct %s\n", VIADUCT_VERSION);
    return EXIT_CODE_OK;
}
