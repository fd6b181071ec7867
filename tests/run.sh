#!/bin/sh
# Installs what is missing, builds, and runs every test: release, then address and undefined-behaviour
# sanitizers, then the thread sanitizer where threads meet, then the static checks.
# The last line counts tests: "N passed, N failed". A second run rebuilds nothing it need not.
# Usage: tests/run.sh [release|asan|tsan|tidy ...]      (default: all of them)
set -u
cd "$(dirname "$0")/.."

stages="${*:-release asan tsan tidy}"
./deploy/install_packages.sh build test example || exit 1

cores=$(nproc)
logs=build/test-logs
mkdir -p "$logs"
passed=0
failed=0

# run_ctest NAME [ctest argument ...]: counts a stage's tests into passed and failed.
run_ctest() {
    name=$1
    shift
    if ! { cmake --preset "$name" && cmake --build --preset "$name" -j "$cores"; } >"$logs/$name-build.log" 2>&1; then
        grep -E 'error|FAILED|warning' "$logs/$name-build.log" | head -n 40
        echo "$name: the build failed; the whole log is $logs/$name-build.log"
        failed=$((failed + 1))
        return
    fi
    ctest --test-dir "build/$name" --output-on-failure -j "$cores" --no-tests=error "$@" >"$logs/$name.log" 2>&1
    status=$?
    summary=$(grep -E 'tests passed, .* tests failed out of' "$logs/$name.log" | tail -n 1)
    stage_failed=$(echo "$summary" | sed -n 's/.*passed, \([0-9]*\) tests failed.*/\1/p')
    stage_total=$(echo "$summary" | sed -n 's/.*out of \([0-9]*\).*/\1/p')
    if [ -z "$stage_total" ]; then
        tail -n 40 "$logs/$name.log"
        failed=$((failed + 1))
        return
    fi
    passed=$((passed + stage_total - stage_failed))
    failed=$((failed + stage_failed))
    if [ "$status" -ne 0 ]; then
        grep -vE '^ *[0-9]+/[0-9]+ Test +#.* Passed|^ +Start ' "$logs/$name.log" | head -n 300
    fi
    echo "$name: $((stage_total - stage_failed)) passed, $stage_failed failed ($logs/$name.log)"
}

for stage in $stages; do
    started=$(date +%s)
    case "$stage" in
    release) run_ctest release ;;
    asan)
        ASAN_OPTIONS=detect_leaks=1:detect_stack_use_after_return=1 UBSAN_OPTIONS=print_stacktrace=1 \
            run_ctest asan -E '^tidy$'
        ;;
    tsan)
        TSAN_OPTIONS="suppressions=$PWD/tests/tsan.supp:history_size=4" \
            run_ctest tsan -R '^(base|comm|coordinator|reshard|rpc|data_loader|train_worker_loop|parity)_'
        ;;
    tidy)
        if ./tests/tidy/clang_tidy.sh build/release >"$logs/clang-tidy.log" 2>&1; then
            passed=$((passed + 1))
        else
            grep -E 'error:|warning:|^unclean' "$logs/clang-tidy.log" | head -n 60
            failed=$((failed + 1))
        fi
        tail -n 1 "$logs/clang-tidy.log"
        ;;
    *)
        echo "tests/run.sh: unknown stage \"$stage\"; there are: release asan tsan tidy" >&2
        exit 2
        ;;
    esac
    echo "$stage took $(($(date +%s) - started)) s"
done

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
