#!/bin/sh
# Runs clang-tidy over every C file of the project; a file whose text, headers and settings have not changed since it was last
# found clean is left out.
# Usage: clang_tidy.sh BUILD_FOLDER       (the folder with compile_commands.json)
set -u
build=$(cd "$1" && pwd)
cd "$(dirname "$0")/../.."
command -v clang-tidy-14 >/dev/null && tidy=clang-tidy-14 || tidy=clang-tidy
stamps=$build/clang-tidy
mkdir -p "$stamps"

# Headers are few and small: a change in any of them checks all files again.
common=$(find proto runtime coordinator encoder_worker llm_worker cli tests bench examples -name '*.h' -o -name '*.proto' |
    sort | xargs cat .clang-tidy | sha256sum | cut -c1-16)
export build stamps common tidy

check() {
    file=$1
    stamp="$stamps/$(echo "$file" | tr / _).$(cat "$file" | sha256sum | cut -c1-16).$common"
    [ -e "$stamp" ] && return 0
    if "$tidy" --quiet -p "$build" "$file"; then
        rm -f "$stamps/$(echo "$file" | tr / _)".*
        touch "$stamp"
    else
        echo "unclean: $file"
        return 1
    fi
}

if [ "${2:-}" = --one ]; then
    check "$3"
    exit
fi
files=$(grep -o '"file": "[^"]*"' "$build/compile_commands.json" | cut -d'"' -f4 | sed "s|^$PWD/||" |
    grep -E '^(runtime|coordinator|encoder_worker|llm_worker|cli|tests|bench|examples)/' | sort -u)
echo "$files" | xargs -n 1 -P "$(nproc)" "$0" "$build" --one
status=$?
count=$(echo "$files" | wc -l)
if [ "$status" -eq 0 ]; then
    echo "clang-tidy: $count files clean"
else
    echo "clang-tidy: there are findings in some of $count files"
fi
exit "$status"
