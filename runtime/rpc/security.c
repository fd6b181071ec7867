#include "rpc/security.h"

Status rpc_client_create_secure(Rpc *rpc, const char *target, const RpcClientSecurity *security,
                                RpcClient **client_out)
{
    if (security->ca_file[0] || security->token_file[0]) {
        return fail(STATUS_UNSUPPORTED, "TLS and tokens are not supported yet");
    }
    return rpc_client_create(rpc, target, client_out);
}
