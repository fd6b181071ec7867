"""Asks a server for its health with gRPC's own Python library, and looks at how errors arrive.

    /usr/bin/python3 rpc_health.py HOST:PORT

The server knows "" (serving) and "down" (not serving), no other service. Messages are encoded by
hand, so nothing must be generated. Exit: 0 all right, 1 a check failed (said on standard error), 77
the library is not installed.
"""

import sys

try:
    import grpc
except ImportError:
    print("skipped: python3-grpcio is not installed", file=sys.stderr)
    sys.exit(77)

TIMEOUT_S = 10
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3


def varint(value):
    """A protobuf varint."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def text(field, value):
    """A string field; nothing when empty, as proto3 has it."""
    data = value.encode()
    return varint(field << 3 | 2) + varint(len(data)) + data if data else b""


def fields(data):
    """Yields (field number, int or bytes) of a message of varints and length-delimited fields."""
    at = 0

    def read_varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        tag = read_varint()
        value = read_varint()
        if tag & 7 == 2:
            value, at = data[at : at + value], at + value
        else:
            assert tag & 7 == 0, f"wire type {tag & 7}"
        yield tag >> 3, value


def status_of(response):
    """HealthCheckResponse.status."""
    return dict(fields(response)).get(1, 0)


def details_of(error):
    """{type: message bytes} of grpc-status-details-bin, which must agree with code and message."""
    values = [v for k, v in error.trailing_metadata() if k == "grpc-status-details-bin"]
    assert len(values) == 1, f"{len(values)} grpc-status-details-bin"
    status = list(fields(values[0]))
    assert dict(status)[1] == error.code().value[0]
    assert dict(status)[2].decode() == error.details()
    found = {}
    for number, value in status:
        if number == 3:
            detail = dict(fields(value))
            found[detail[1].decode()] = detail.get(2, b"")
    return found


def fails(call, code):
    """The error of a call that must fail with `code`."""
    try:
        call()
    except grpc.RpcError as error:
        assert error.code() == code, f"{error.code()} {error.details()}, expected {code}"
        return error
    raise AssertionError(f"no error, expected {code}")


def check_unary(channel):
    """Check: states, an unknown service, bytes that are no request, a method that is not there."""
    check = channel.unary_unary("/grpc.health.v1.Health/Check")
    assert status_of(check(b"", timeout=TIMEOUT_S)) == SERVING
    assert status_of(check(text(1, "down"), timeout=TIMEOUT_S)) == NOT_SERVING

    error = fails(lambda: check(text(1, "nobody ü"), timeout=TIMEOUT_S), grpc.StatusCode.NOT_FOUND)
    assert error.details() == 'this server has no service "nobody ü"', error.details()
    details = details_of(error)
    assert list(details) == ["type.googleapis.com/google.rpc.ErrorInfo"], details
    info = dict(fields(details["type.googleapis.com/google.rpc.ErrorInfo"]))
    assert info == {1: b"SERVICE_UNKNOWN", 2: b"viaduct.dev"}, info

    for junk in (b"\x0a\x05ab", b"\xff" * 11, b"\x0a\x02\xc3\x28", b"\x0a\x03a\x00b"):
        error = fails(lambda: check(junk, timeout=TIMEOUT_S), grpc.StatusCode.INVALID_ARGUMENT)
        info = dict(fields(details_of(error)["type.googleapis.com/google.rpc.ErrorInfo"]))
        assert info[1] == b"REQUEST_UNDECODABLE", info

    nothing = channel.unary_unary("/grpc.health.v1.Health/Nothing")
    fails(lambda: nothing(b"", timeout=TIMEOUT_S), grpc.StatusCode.UNIMPLEMENTED)
    big = text(1, "x" * (5 << 20))
    fails(lambda: check(big, timeout=TIMEOUT_S), grpc.StatusCode.RESOURCE_EXHAUSTED)
    # Compressed requests are refused as a whole: they could grow without bound.
    fails(
        lambda: check(text(1, "x" * 4096), timeout=TIMEOUT_S, compression=grpc.Compression.Gzip),
        grpc.StatusCode.UNIMPLEMENTED,
    )
    # A client stream without a message, against a unary method.
    empty = channel.stream_unary("/grpc.health.v1.Health/Check")
    fails(lambda: empty(iter(()), timeout=TIMEOUT_S), grpc.StatusCode.INVALID_ARGUMENT)


def check_watch(channel):
    """Watch: the state now; the stream stays open until it is cancelled or its deadline."""
    watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
    stream = watch(b"", timeout=TIMEOUT_S)
    assert status_of(next(stream)) == SERVING
    stream.cancel()
    stream = watch(text(1, "nobody"), timeout=0.5)
    assert status_of(next(stream)) == SERVICE_UNKNOWN
    fails(lambda: next(stream), grpc.StatusCode.DEADLINE_EXCEEDED)


def main():
    """Runs the checks against the server named on the command line."""
    with grpc.insecure_channel(sys.argv[1], options=[("grpc.enable_http_proxy", 0)]) as channel:
        grpc.channel_ready_future(channel).result(timeout=TIMEOUT_S)
        check_unary(channel)
        check_watch(channel)


if __name__ == "__main__":
    main()
