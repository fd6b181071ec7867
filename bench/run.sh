#!/bin/sh
# Runs one benchmark and prints its ratios. Figures of this machine at other moments do not compare: only ratios within one run do.
# Usage: bench/run.sh step [seconds of measurement for each model, default 30]
#        bench/run.sh boundary [-o json] [rounds, default 60]      rows between pools against a plain copy and against a leader
#        bench/run.sh layouts [-o json] [steps, default 14]        one layout for all against each its own; the network part needs root
#        bench/run.sh curves [steps, default 300] [SVG file]       the same job in five layouts: loss curves
set -eu
cd "$(dirname "$0")/.."
name=${1:-}
case "$name" in
step | boundary | curves) target=bench_$name ;;
layouts) target=all ;;
*)
    sed -n '2,6s/^# //p' "$0" >&2
    exit 2
    ;;
esac
shift
./deploy/install_packages.sh build bench
mkdir -p build
if ! { cmake --preset release && cmake --build --preset release -j "$(nproc)" --target "$target"; } >build/bench-build.log 2>&1; then
    tail -n 30 build/bench-build.log >&2
    exit 1
fi
# These two settings slow OpenBLAS down; a comparison with them would be unfair to PyTorch.
unset OPENBLAS_CORETYPE OPENBLAS_L2_SIZE || true
if [ "$name" = layouts ]; then
    build/release/examples/emoji/emoji_dataset --output out/emoji/data
    exec /usr/bin/python3 bench/layouts.py build/release/cli "$@"
fi
exec /usr/bin/python3 "bench/$name.py" "build/release/bench/bench_$name" "$@"
