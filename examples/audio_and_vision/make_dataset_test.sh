#!/bin/sh
# Two runs make the same bytes; what is held out is not trained on, and every digit of it is, in every place.
# Usage: make_dataset_test.sh SPEECH_DATASET_PROGRAM       exits 77 when the recordings or texts are not installed
set -eu
program=$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

if ! "$program" --output "$folder/a" >"$folder/log" 2>&1; then
    cat "$folder/log"
    grep -q install "$folder/log" && exit 77
    exit 1
fi
"$program" --output "$folder/b" >/dev/null
diff -r "$folder/a" "$folder/b"

for shard in "$folder"/a/train-*.tar; do
    tar tf "$shard"
done | sed -n 's/\.wav$//p' | sort >"$folder/train"
tar tf "$folder/a/heldout-0000.tar" | sed -n 's/\.wav$//p' | sort >"$folder/heldout"
[ -z "$(comm -12 "$folder/train" "$folder/heldout")" ]
[ "$(wc -l <"$folder/heldout")" -eq 100 ]
[ "$(grep -c '^number-[0-9][0-9][0-9]$' "$folder/train")" -eq 900 ]
[ "$(grep -c '^phrase-' "$folder/train")" -gt 400 ]
for digit in 0 1 2 3 4 5 6 7 8 9; do
    grep -q "^number-$digit" "$folder/train"
    grep -q "^number-.$digit" "$folder/train"
    grep -q "^number-..$digit" "$folder/train"
done

# A number's text says its digits; its sound is a WAV file of a plausible length.
number=$(head -n 1 "$folder/heldout")
tar xf "$folder/a/heldout-0000.tar" -C "$folder" "$number.txt" "$number.wav"
grep -qE '^[a-z]+ [a-z]+ [a-z]+$' "$folder/$number.txt"
size=$(wc -c <"$folder/$number.wav")
[ "$size" -gt 16000 ] && [ "$size" -lt 64000 ]

# Errors name what is missing.
if "$program" --sounds "$folder/none" --output "$folder/c" 2>"$folder/error" >/dev/null; then
    echo "a missing folder of recordings went unseen"
    exit 1
fi
grep -q "$folder/none" "$folder/error"
if "$program" --output /proc/none 2>"$folder/error" >/dev/null; then
    echo "an output folder that cannot be made went unseen"
    exit 1
fi
grep -q /proc/none "$folder/error"
echo "$(wc -l <"$folder/train") train, $(wc -l <"$folder/heldout") held out"
