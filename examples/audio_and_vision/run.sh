#!/bin/sh
# From a bare Debian 12 to a trained model that reads pictures and hears speech: installs what is missing, builds a
# release, makes the data sets, trains across two encoder pools and an LLM pool, and shows what was learnt.
# Usage: examples/audio_and_vision/run.sh [argument of "viaduct train" ...]      e.g. --set training.steps=100
set -eu
cd "$(dirname "$0")/../.."

./deploy/install_packages.sh build example speech

log=build/release-build.log
mkdir -p build
echo "building (log: $log)"
if ! { cmake --preset release && cmake --build --preset release -j "$(nproc)"; } >"$log" 2>&1; then
    tail -n 30 "$log" >&2
    exit 1
fi

build/release/examples/emoji/emoji_dataset --output out/emoji/data
build/release/examples/audio_and_vision/speech_dataset --output out/audio_and_vision/data
exec build/release/cli/viaduct train examples/audio_and_vision/job.yaml "$@"
