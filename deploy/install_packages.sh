#!/bin/sh
# Installs the Debian 12 packages that Viaduct needs, and only those that are missing.
# Usage: deploy/install_packages.sh build|test|example|speech|bench ...
set -eu

# To build: compiler, build tools, libraries with their headers.
build="gcc libc6-dev cmake ninja-build pkg-config protobuf-c-compiler libprotobuf-c-dev libprotobuf-dev
    libgrpc-dev libuv1-dev libdnnl-dev libarchive-dev libturbojpeg0-dev libpng-dev
    libsndfile1-dev libkissfft-dev libyaml-dev libjansson-dev zlib1g-dev libcmocka-dev"
# For the examples' data.
example="ruby-tanuki-emoji unicode-data"
speech="asterisk-core-sounds-en-wav asterisk-core-sounds-en"
# For the tests: foreign clients and readers, format and static checks.
test="python3 python3-grpcio python3-protobuf python3-numpy clang-format-14 clang-tidy-14 libomp-14-dev iproute2 procps"
# For the comparison with PyTorch and for making golden vectors anew.
bench="python3 python3-torch libopenblas0-openmp"

if [ $# -eq 0 ]; then
    sed -n '2,3s/^# //p' "$0" >&2
    exit 2
fi
wanted=""
for set in "$@"; do
    case "$set" in
    build) wanted="$wanted $build" ;;
    example) wanted="$wanted $example" ;;
    speech) wanted="$wanted $speech" ;;
    test) wanted="$wanted $test" ;;
    bench) wanted="$wanted $bench" ;;
    *)
        echo "$0: unknown set \"$set\"; there are: build, example, speech, test, bench" >&2
        exit 2
        ;;
    esac
done

missing=""
for package in $wanted; do
    state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$state" = installed ] || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

as_root=""
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || {
        echo "$0: run as root, or install these first:$missing" >&2
        exit 1
    }
    as_root=sudo
fi
echo "installing:$missing"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
if ! { $as_root apt-get -q update && $as_root apt-get -q install -y --no-install-recommends $missing; } >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    echo "$0: apt-get failed; the whole log is $log" >&2
    exit 1
fi
rm -f "$log"
