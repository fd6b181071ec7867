#include "base/config.h"
#include "base/memory.h"
#include "cli/layout_text.h"
#include "cli/session.h"
#include "job/message.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

typedef enum GetFormat {
    GET_FORMAT_TABLE,
    GET_FORMAT_WIDE,
    GET_FORMAT_JSON,
    GET_FORMAT_YAML,
    GET_FORMAT_NAME,
} GetFormat;

enum {
    COLUMNS_MAX = 10,
    CELL_BYTES = 80,
    PAGE_SIZE = 500
};

/* A table is laid out when all its rows are known. */
typedef struct Table {
    const char *const *titles; /* [num_columns] */
    int num_columns;
    char (*cells)[CELL_BYTES]; /* [rows * num_columns] */
    size_t capacity;
    size_t count; /* cells */
} Table;

static Status add_cell(Table *table, const char *text)
{
    void *cells = table->cells;
    Status status = memory_grow(&cells, &table->capacity, table->count + 1, sizeof *table->cells);
    table->cells = cells;
    TRY(status);
    char *cell = table->cells[table->count++];
    snprintf(cell, CELL_BYTES, "%s", text[0] ? text : "-");
    for (char *c = cell; *c; c++) {
        if ((unsigned char)*c < ' ') {
            *c = ' ';
        }
    }
    return STATUS_OK;
}

static void print_table(const Table *table)
{
    int widths[COLUMNS_MAX] = {0};
    for (int c = 0; c < table->num_columns; c++) {
        widths[c] = (int)strlen(table->titles[c]);
    }
    for (size_t i = 0; i < table->count; i++) {
        int width = (int)strlen(table->cells[i]);
        int column = (int)(i % (size_t)table->num_columns);
        widths[column] = width > widths[column] ? width : widths[column];
    }
    int last = table->num_columns - 1;
    for (int c = 0; c < table->num_columns; c++) {
        printf("%-*s%s", c < last ? widths[c] : 0, table->titles[c], c < last ? "  " : "\n");
    }
    for (size_t i = 0; i < table->count; i++) {
        int column = (int)(i % (size_t)table->num_columns);
        printf("%-*s%s", column < last ? widths[column] : 0, table->cells[i],
               column < last ? "  " : "\n");
    }
}

/* "12s", "3m", "5h", "2d" since then. */
static void format_age(const Google__Protobuf__Timestamp *stamp, char *text, size_t size)
{
    if (!stamp) {
        snprintf(text, size, "-");
        return;
    }
    int64_t seconds = (int64_t)time(NULL) - stamp->seconds;
    seconds = seconds < 0 ? 0 : seconds;
    if (seconds < 120) {
        snprintf(text, size, "%" PRId64 "s", seconds);
    } else if (seconds < 7200) {
        snprintf(text, size, "%" PRId64 "m", seconds / 60);
    } else if (seconds < INT64_C(48) * 3600) {
        snprintf(text, size, "%" PRId64 "h", seconds / 3600);
    } else {
        snprintf(text, size, "%" PRId64 "d", seconds / 86400);
    }
}

static const char *after_slash(const char *name)
{
    const char *slash = strchr(name, '/');
    return slash ? slash + 1 : name;
}

static Status add_job(Table *table, const Viaduct__V1__Job *job, bool is_wide)
{
    const Viaduct__V1__JobStatus *status = job->status;
    char text[CELL_BYTES];
    TRY(add_cell(table, after_slash(job->name)));
    TRY(add_cell(
        table, message_enum_name(&viaduct__v1__job_status__state__descriptor, (int)status->state)));
    snprintf(text, sizeof text, "%" PRId64 "/%" PRId64, status->committed_step,
             job->spec && job->spec->training ? job->spec->training->steps : 0);
    TRY(add_cell(table, text));
    text[0] = '\0';
    if (status->latest_metrics) {
        snprintf(text, sizeof text, "%.4f", status->latest_metrics->loss);
    }
    TRY(add_cell(table, text));
    format_age(job->create_time, text, sizeof text);
    TRY(add_cell(table, text));
    TRY(add_cell(table, status->reason));
    if (is_wide) {
        snprintf(text, sizeof text, "%" PRId64, status->epoch);
        TRY(add_cell(table, text));
        text[0] = '\0';
        if (job->spec) {
            layout_text_describe(job->spec, text, sizeof text);
        }
        TRY(add_cell(table, text));
        TRY(add_cell(table, status->checkpoint));
        TRY(add_cell(table, status->message));
    }
    return STATUS_OK;
}

static Status add_worker(Table *table, const Viaduct__V1__Worker *worker, bool is_wide)
{
    char text[CELL_BYTES];
    TRY(add_cell(table, after_slash(worker->name)));
    TRY(add_cell(table, worker->role));
    TRY(add_cell(table,
                 message_enum_name(&viaduct__v1__worker__state__descriptor, (int)worker->state)));
    TRY(add_cell(table, after_slash(worker->job)));
    format_age(worker->last_heartbeat_time, text, sizeof text);
    TRY(add_cell(table, text));
    if (is_wide) {
        TRY(add_cell(table, worker->data_address));
        TRY(add_cell(table, worker->software_version));
        TRY(add_cell(table, worker->incarnation));
    }
    return STATUS_OK;
}

static const char *name_of(const ProtobufCMessage *message)
{
    if (message->descriptor == &viaduct__v1__job__descriptor) {
        return ((const Viaduct__V1__Job *)message)->name;
    }
    return ((const Viaduct__V1__Worker *)message)->name;
}

static Status print_as_table(const ProtobufCMessage *const *items, size_t count, bool of_jobs,
                             bool is_wide)
{
    static const char *const job_titles[] = {"NAME",       "STATE",  "STEP",  "LOSS",
                                             "AGE",        "REASON", "EPOCH", "TP/CP/PP/DP POOL",
                                             "CHECKPOINT", "MESSAGE"};
    static const char *const worker_titles[] = {"NAME",      "ROLE",    "STATE",   "JOB",
                                                "HEARTBEAT", "ADDRESS", "VERSION", "INCARNATION"};
    Table table = {.titles = of_jobs ? job_titles : worker_titles,
                   .num_columns = of_jobs ? (is_wide ? 10 : 6) : (is_wide ? 8 : 5)};
    Status status = STATUS_OK;
    for (size_t i = 0; i < count && status == STATUS_OK; i++) {
        status = of_jobs ? add_job(&table, (const Viaduct__V1__Job *)items[i], is_wide)
                         : add_worker(&table, (const Viaduct__V1__Worker *)items[i], is_wide);
    }
    if (status == STATUS_OK) {
        print_table(&table);
    }
    memory_free(table.cells);
    return status;
}

static Status print_items(const ProtobufCMessage *const *items, size_t count, bool of_jobs,
                          bool is_single, GetFormat format)
{
    MessageFormat text = format == GET_FORMAT_YAML ? MESSAGE_FORMAT_YAML : MESSAGE_FORMAT_JSON;
    switch (format) {
    case GET_FORMAT_TABLE:
    case GET_FORMAT_WIDE:
        return print_as_table(items, count, of_jobs, format == GET_FORMAT_WIDE);
    case GET_FORMAT_NAME:
        for (size_t i = 0; i < count; i++) {
            printf("%s\n", name_of(items[i]));
        }
        return STATUS_OK;
    default:
        if (is_single) {
            message_print(stdout, items[0], text);
        } else {
            message_print_list(stdout, items, count, text);
        }
        return STATUS_OK;
    }
}

static ExitCode get_one(Session *session, bool of_jobs, const char *name, GetFormat format)
{
    Viaduct__V1__GetJobRequest job = VIADUCT__V1__GET_JOB_REQUEST__INIT;
    Viaduct__V1__GetWorkerRequest worker = VIADUCT__V1__GET_WORKER_REQUEST__INIT;
    job.name = (char *)name;
    worker.name = (char *)name;
    ProtobufCMessage *response = NULL;
    RpcError error =
        of_jobs ? session_call(session, SESSION_JOBS, "GetJob", &job.base, &response)
                : session_call(session, SESSION_WORKERS, "GetWorker", &worker.base, &response);
    if (error.code != RPC_CODE_OK) {
        return verbs_fail_call(session->coordinator, &error);
    }
    const ProtobufCMessage *items[] = {response};
    Status status = print_items(items, 1, of_jobs, true, format);
    protobuf_c_message_free_unpacked(response, NULL);
    return status == STATUS_OK ? EXIT_CODE_OK : verbs_fail_status(status);
}

/* All pages, kept until the last has come. */
typedef struct Listing {
    ProtobufCMessage **pages;
    size_t pages_capacity, num_pages;
    const ProtobufCMessage **items; /* of the pages */
    size_t items_capacity, num_items;
    const char *token; /* of the last page */
} Listing;

static Status keep_page(Listing *listing, ProtobufCMessage *page, bool of_jobs)
{
    void *pages = listing->pages;
    Status status =
        memory_grow(&pages, &listing->pages_capacity, listing->num_pages + 1, sizeof(void *));
    listing->pages = pages;
    if (status != STATUS_OK) {
        protobuf_c_message_free_unpacked(page, NULL);
        return status;
    }
    listing->pages[listing->num_pages++] = page;
    const Viaduct__V1__ListJobsResponse *jobs = (const Viaduct__V1__ListJobsResponse *)page;
    const Viaduct__V1__ListWorkersResponse *workers =
        (const Viaduct__V1__ListWorkersResponse *)page;
    size_t count = of_jobs ? jobs->n_jobs : workers->n_workers;
    void *items = listing->items;
    status =
        memory_grow(&items, &listing->items_capacity, listing->num_items + count, sizeof(void *));
    listing->items = items;
    TRY(status);
    for (size_t i = 0; i < count; i++) {
        listing->items[listing->num_items++] =
            of_jobs ? &jobs->jobs[i]->base : &workers->workers[i]->base;
    }
    listing->token = of_jobs ? jobs->next_page_token : workers->next_page_token;
    return STATUS_OK;
}

static RpcError call_list(Session *session, bool of_jobs, const char *token,
                          ProtobufCMessage **page_out)
{
    Viaduct__V1__ListJobsRequest jobs = VIADUCT__V1__LIST_JOBS_REQUEST__INIT;
    Viaduct__V1__ListWorkersRequest workers = VIADUCT__V1__LIST_WORKERS_REQUEST__INIT;
    jobs.page_size = PAGE_SIZE;
    jobs.page_token = (char *)token;
    workers.page_size = PAGE_SIZE;
    workers.page_token = (char *)token;
    return of_jobs ? session_call(session, SESSION_JOBS, "ListJobs", &jobs.base, page_out)
                   : session_call(session, SESSION_WORKERS, "ListWorkers", &workers.base, page_out);
}

static ExitCode get_all(Session *session, bool of_jobs, GetFormat format)
{
    Listing listing = {.token = ""};
    ExitCode code = EXIT_CODE_OK;
    do {
        ProtobufCMessage *page = NULL;
        RpcError error = call_list(session, of_jobs, listing.token, &page);
        if (error.code != RPC_CODE_OK) {
            code = verbs_fail_call(session->coordinator, &error);
        } else if (keep_page(&listing, page, of_jobs) != STATUS_OK) {
            code = verbs_fail_status(STATUS_NO_MEMORY);
        }
    } while (code == EXIT_CODE_OK && listing.token[0]);
    if (code == EXIT_CODE_OK &&
        print_items(listing.items, listing.num_items, of_jobs, false, format) != STATUS_OK) {
        code = verbs_fail_status(STATUS_NO_MEMORY);
    }
    for (size_t i = 0; i < listing.num_pages; i++) {
        protobuf_c_message_free_unpacked(listing.pages[i], NULL);
    }
    memory_free(listing.pages);
    memory_free((void *)listing.items);
    return code;
}

static Status parse_format(const char *text, GetFormat *format_out)
{
    static const char *const names[] = {"table", "wide", "json", "yaml", "name"};
    for (int i = 0; i < (int)(sizeof names / sizeof *names); i++) {
        if (strcmp(text, names[i]) == 0) {
            *format_out = (GetFormat)i;
            return STATUS_OK;
        }
    }
    return fail(STATUS_INVALID, "-o %s: expected table, wide, json, yaml or name", text);
}

static Status parse_kind(const char *text, bool *of_jobs_out)
{
    *of_jobs_out = strcmp(text, "jobs") == 0 || strcmp(text, "job") == 0;
    if (!*of_jobs_out && strcmp(text, "workers") != 0 && strcmp(text, "worker") != 0) {
        return fail(STATUS_INVALID, "cannot get \"%s\": expected jobs or workers", text);
    }
    return STATUS_OK;
}

ExitCode get_verb(int argc, const char *const *argv)
{
    const char *coordinator = SESSION_DEFAULT;
    const char *output = "table";
    const ConfigFlag flags[] = {
        SESSION_FLAG(&coordinator),
        {"output", 'o', CONFIG_KIND_TEXT, &output, "FORMAT", NULL,
         "table, wide, json, yaml or name (default table)"},
    };
    const ConfigCommand command = {"viaduct get [jobs|workers] [NAME] [flags]",
                                   "Shows jobs (the default) or workers, all or one.",
                                   flags,
                                   sizeof flags / sizeof *flags,
                                   0,
                                   2};
    ConfigList rest;
    bool help = false;
    bool of_jobs = true;
    GetFormat format = GET_FORMAT_TABLE;
    Status status = config_parse(&command, argc, argv, &rest, &help);
    if (status == STATUS_OK) {
        status = parse_format(output, &format);
    }
    if (status == STATUS_OK && rest.count > 0) {
        status = parse_kind(rest.items[0], &of_jobs);
    }
    if (status != STATUS_OK) {
        return verbs_fail_status(status);
    }
    if (help) {
        config_print_help(&command, stdout);
        return EXIT_CODE_OK;
    }
    Session session;
    session_init(&session);
    ExitCode code = EXIT_CODE_OK;
    status = session_connect(&session, coordinator);
    if (status != STATUS_OK) {
        code = verbs_fail_status(status);
    } else if (rest.count == 2) {
        code = get_one(&session, of_jobs, rest.items[1], format);
    } else {
        code = get_all(&session, of_jobs, format);
    }
    session_close(&session);
    return code;
}
