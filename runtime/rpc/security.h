/* Security: who is on the other side of a connection: TLS in both directions, and bearer tokens.
 *
 * Certificates, keys and tokens are files; they are read again when they change, so that they can be
 * renewed while programs run. A token is sent only over TLS, or to a loopback address.
 * Threading: the loop thread.
 */
#ifndef RPC_SECURITY_H
#define RPC_SECURITY_H

#include "base/config.h"
#include "rpc/rpc.h"

/* How a client reaches a server. Texts are borrowed for the client's life; "" is none. */
typedef struct RpcClientSecurity {
    const char *ca_file; /* PEM: who may have signed the server's certificate; "": plaintext */
    const char *certificate_file; /* PEM chain of its own, for servers that ask; needs key_file */
    const char *key_file;
    const char *server_name; /* what the server's certificate must say, when not the dialled name */
    const char *token_file;  /* holds one bearer token; white space around it does not count */
} RpcClientSecurity;

#define RPC_CLIENT_SECURITY_NONE \
    {                            \
        "", "", "", "", ""       \
    }

/* The flags of every program that dials a server, for its table of ConfigFlag. */
/* clang-format off */
#define RPC_CLIENT_SECURITY_FLAGS(security)                                                        \
    {"tls-ca", 0, CONFIG_KIND_TEXT, &(security).ca_file, "FILE", "VIADUCT_TLS_CA",                 \
     "use TLS; who must have signed the coordinator's certificate (PEM)"},                         \
    {"tls-cert", 0, CONFIG_KIND_TEXT, &(security).certificate_file, "FILE", "VIADUCT_TLS_CERT",    \
     "the certificate to show to the coordinator (PEM)"},                                          \
    {"tls-key", 0, CONFIG_KIND_TEXT, &(security).key_file, "FILE", "VIADUCT_TLS_KEY",              \
     "the key of --tls-cert (PEM)"},                                                               \
    {"tls-server-name", 0, CONFIG_KIND_TEXT, &(security).server_name, "NAME",                      \
     "VIADUCT_TLS_SERVER_NAME", "the name in the coordinator's certificate, if not the host's"},   \
    {"token-file", 0, CONFIG_KIND_TEXT, &(security).token_file, "FILE", "VIADUCT_TOKEN_FILE",      \
     "a file with the bearer token to send"}
/* clang-format on */

/* As rpc_client_create, with security. STATUS_INVALID: files that are missing, unreadable or do not
 * fit together; says which and why. */
Status rpc_client_create_secure(Rpc *rpc, const char *target, const RpcClientSecurity *security,
                                RpcClient **client_out) STATUS_CHECKED;

#endif
