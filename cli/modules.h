/* Modules: those that this program can run by itself, for `verify` and `plan`.
 * Threading: constant.
 */
#ifndef CLI_MODULES_H
#define CLI_MODULES_H

#include "train/module.h"

extern const ModuleOps *const cli_modules[];
extern const int cli_num_modules;

#endif
