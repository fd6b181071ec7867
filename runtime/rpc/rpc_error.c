#include "base/memory.h"
#include "google/rpc/error_details.pb-c.h"
#include "google/rpc/status.pb-c.h"
#include "rpc/rpc_internal.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const char rpc_error_details_key[] = "grpc-status-details-bin";

static const char DOMAIN[] = "viaduct.dev";
static const char ERROR_INFO_TYPE[] = "type.googleapis.com/google.rpc.ErrorInfo";
static const char RETRY_INFO_TYPE[] = "type.googleapis.com/google.rpc.RetryInfo";

/* An ErrorInfo holds a reason of at most 63 bytes and the domain, a RetryInfo one duration. */
enum {
    DETAIL_BYTES_MAX = 128,
    MS_PER_S = 1000,
    NS_PER_MS = 1000000
};

/* Longer waits than this are nobody's intention; the bound keeps the arithmetic safe. */
static const int64_t RETRY_S_MAX = INT64_C(1000000000);

static const char *const CODE_NAMES[] = {
    [RPC_CODE_OK] = "OK",
    [RPC_CODE_CANCELLED] = "CANCELLED",
    [RPC_CODE_UNKNOWN] = "UNKNOWN",
    [RPC_CODE_INVALID_ARGUMENT] = "INVALID_ARGUMENT",
    [RPC_CODE_DEADLINE_EXCEEDED] = "DEADLINE_EXCEEDED",
    [RPC_CODE_NOT_FOUND] = "NOT_FOUND",
    [RPC_CODE_ALREADY_EXISTS] = "ALREADY_EXISTS",
    [RPC_CODE_PERMISSION_DENIED] = "PERMISSION_DENIED",
    [RPC_CODE_RESOURCE_EXHAUSTED] = "RESOURCE_EXHAUSTED",
    [RPC_CODE_FAILED_PRECONDITION] = "FAILED_PRECONDITION",
    [RPC_CODE_ABORTED] = "ABORTED",
    [RPC_CODE_OUT_OF_RANGE] = "OUT_OF_RANGE",
    [RPC_CODE_UNIMPLEMENTED] = "UNIMPLEMENTED",
    [RPC_CODE_INTERNAL] = "INTERNAL",
    [RPC_CODE_UNAVAILABLE] = "UNAVAILABLE",
    [RPC_CODE_DATA_LOSS] = "DATA_LOSS",
    [RPC_CODE_UNAUTHENTICATED] = "UNAUTHENTICATED",
};
enum {
    NUM_CODES = sizeof CODE_NAMES / sizeof CODE_NAMES[0]
};

_Static_assert((int)RPC_CODE_UNAUTHENTICATED == (int)GRPC_STATUS_UNAUTHENTICATED,
               "our codes are gRPC's");

const char *rpc_code_name(RpcCode code)
{
    return (int)code >= 0 && (int)code < NUM_CODES ? CODE_NAMES[code] : "UNKNOWN";
}

/* Text may quote what a peer sent; the wire takes UTF-8 only. A cut may also have split the last
 * character. */
static void make_utf8(char *text)
{
    size_t num_bytes = strlen(text);
    size_t done = 0;
    while (done < num_bytes) {
        done += rpc_message_utf8_prefix((const uint8_t *)text + done, num_bytes - done);
        if (done < num_bytes) {
            text[done++] = '?';
        }
    }
}

RpcError rpc_error(RpcCode code, const char *reason, const char *format, ...)
{
    RpcError error = {.code = code};
    snprintf(error.reason, sizeof error.reason, "%s", reason);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error.message, sizeof error.message, format, arguments);
    va_end(arguments);
    make_utf8(error.reason);
    make_utf8(error.message);
    return error;
}

static Google__Protobuf__Any pack_detail(const char *type, const ProtobufCMessage *detail,
                                         uint8_t bytes[DETAIL_BYTES_MAX])
{
    Google__Protobuf__Any any = GOOGLE__PROTOBUF__ANY__INIT;
    CHECK(protobuf_c_message_get_packed_size(detail) <= DETAIL_BYTES_MAX);
    any.type_url = (char *)type;
    any.value.len = protobuf_c_message_pack(detail, bytes);
    any.value.data = bytes;
    return any;
}

grpc_slice rpc_error_encode(const RpcError *error)
{
    /* Every error names a reason; where the caller had none, the code's own name is one. */
    Google__Rpc__ErrorInfo info = GOOGLE__RPC__ERROR_INFO__INIT;
    info.reason = (char *)(error->reason[0] != '\0' ? error->reason : rpc_code_name(error->code));
    info.domain = (char *)DOMAIN;
    uint8_t info_bytes[DETAIL_BYTES_MAX];
    Google__Protobuf__Any info_any = pack_detail(ERROR_INFO_TYPE, &info.base, info_bytes);

    Google__Protobuf__Duration delay = GOOGLE__PROTOBUF__DURATION__INIT;
    delay.seconds = error->retry_after_ms / MS_PER_S;
    delay.nanos = (int32_t)(error->retry_after_ms % MS_PER_S) * NS_PER_MS;
    Google__Rpc__RetryInfo retry = GOOGLE__RPC__RETRY_INFO__INIT;
    retry.retry_delay = &delay;
    uint8_t retry_bytes[DETAIL_BYTES_MAX];
    Google__Protobuf__Any retry_any = pack_detail(RETRY_INFO_TYPE, &retry.base, retry_bytes);

    Google__Protobuf__Any *details[] = {&info_any, &retry_any};
    Google__Rpc__Status status = GOOGLE__RPC__STATUS__INIT;
    status.code = (int32_t)error->code;
    status.message = (char *)error->message;
    status.details = details;
    status.n_details = error->retry_after_ms > 0 ? 2 : 1;
    grpc_slice slice = grpc_slice_malloc(google__rpc__status__get_packed_size(&status));
    google__rpc__status__pack(&status, GRPC_SLICE_START_PTR(slice));
    return slice;
}

static void read_error_info(const ProtobufCBinaryData *bytes, RpcError *error)
{
    Google__Rpc__ErrorInfo *info = google__rpc__error_info__unpack(NULL, bytes->len, bytes->data);
    if (info != NULL) {
        snprintf(error->reason, sizeof error->reason, "%s", info->reason);
        make_utf8(error->reason);
        google__rpc__error_info__free_unpacked(info, NULL);
    }
}

static void read_retry_info(const ProtobufCBinaryData *bytes, RpcError *error)
{
    Google__Rpc__RetryInfo *retry = google__rpc__retry_info__unpack(NULL, bytes->len, bytes->data);
    if (retry == NULL) {
        return;
    }
    const Google__Protobuf__Duration *delay = retry->retry_delay;
    if (delay != NULL && delay->seconds >= 0 && delay->seconds <= RETRY_S_MAX &&
        delay->nanos >= 0 && delay->nanos < MS_PER_S * NS_PER_MS) {
        error->retry_after_ms = delay->seconds * MS_PER_S + delay->nanos / NS_PER_MS;
    }
    google__rpc__retry_info__free_unpacked(retry, NULL);
}

/* Details that do not decode are left out: code and message stand without them. */
static void read_details(grpc_slice value, RpcError *error)
{
    Google__Rpc__Status *status =
        google__rpc__status__unpack(NULL, GRPC_SLICE_LENGTH(value), GRPC_SLICE_START_PTR(value));
    if (status == NULL) {
        return;
    }
    for (size_t i = 0; i < status->n_details; i++) {
        const Google__Protobuf__Any *detail = status->details[i];
        if (strcmp(detail->type_url, ERROR_INFO_TYPE) == 0) {
            read_error_info(&detail->value, error);
        } else if (strcmp(detail->type_url, RETRY_INFO_TYPE) == 0) {
            read_retry_info(&detail->value, error);
        }
    }
    google__rpc__status__free_unpacked(status, NULL);
}

void rpc_error_decode(grpc_status_code code, grpc_slice message,
                      const grpc_metadata_array *trailers, RpcError *error_out)
{
    *error_out = (RpcError){.code = RPC_CODE_UNKNOWN};
    if ((int)code >= 0 && (int)code < NUM_CODES) {
        error_out->code = (RpcCode)code;
    }
    if (error_out->code == RPC_CODE_OK) {
        return;
    }
    snprintf(error_out->message, sizeof error_out->message, "%.*s",
             (int)(GRPC_SLICE_LENGTH(message) < sizeof error_out->message
                       ? GRPC_SLICE_LENGTH(message)
                       : sizeof error_out->message),
             (const char *)GRPC_SLICE_START_PTR(message));
    make_utf8(error_out->message);
    for (size_t i = 0; i < trailers->count; i++) {
        if (grpc_slice_str_cmp(trailers->metadata[i].key, rpc_error_details_key) == 0) {
            read_details(trailers->metadata[i].value, error_out);
        }
    }
}
