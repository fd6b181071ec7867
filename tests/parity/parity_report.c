#include "tests/parity/parity_report.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void parity_report_fail(ParityReport *report, const char *format, ...)
{
    char text[sizeof report->first];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (report->failures++ == 0) {
        memcpy(report->first, text, sizeof text);
    }
}
