#!/bin/sh
# Runs one benchmark and prints its ratios. Figures of this machine at other moments do not compare: only ratios within one run do.
# Usage: bench/run.sh step [seconds of measurement for each model, default 30]
set -eu
cd "$(dirname "$0")/.."
name=${1:-}
case "$name" in
step) ;;
*)
    sed -n '2,3s/^# //p' "$0" >&2
    exit 2
    ;;
esac
shift
./deploy/install_packages.sh build bench
mkdir -p build
if ! { cmake --preset release && cmake --build --preset release -j "$(nproc)" --target "bench_$name"; } >build/bench-build.log 2>&1; then
    tail -n 30 build/bench-build.log >&2
    exit 1
fi
# These two settings slow OpenBLAS down; a comparison with them would be unfair to PyTorch.
unset OPENBLAS_CORETYPE OPENBLAS_L2_SIZE || true
exec /usr/bin/python3 "bench/$name.py" "build/release/bench/bench_$name" "$@"
