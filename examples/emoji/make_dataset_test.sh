#!/bin/sh
# Two runs make the same bytes; what is held out is not trained on, and each skin tone held out has its toneless picture in training.
# Usage: make_dataset_test.sh EMOJI_DATASET_PROGRAM       exits 77 when the pictures or names are not installed
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
done | sed -n 's/\.png$//p' | sort >"$folder/train"
tar tf "$folder/a/heldout-0000.tar" | sed -n 's/\.png$//p' | sort >"$folder/heldout"
[ -z "$(comm -12 "$folder/train" "$folder/heldout")" ]
train=$(wc -l <"$folder/train")
heldout=$(wc -l <"$folder/heldout")
[ "$heldout" -eq $(((train + heldout) / 10)) ]

grep -E '1f3f[b-f]' "$folder/heldout" | sed -E 's/_1f3f[b-f]//' | sort -u >"$folder/bases"
[ "$(wc -l <"$folder/bases")" -gt 0 ]
[ -z "$(comm -23 "$folder/bases" "$folder/train")" ]

# Errors name what is missing.
if "$program" --pictures "$folder/none" --output "$folder/c" 2>"$folder/error" >/dev/null; then
    echo "a missing folder of pictures went unseen"
    exit 1
fi
grep -q "$folder/none" "$folder/error"
if "$program" --output /proc/none 2>"$folder/error" >/dev/null; then
    echo "an output folder that cannot be made went unseen"
    exit 1
fi
grep -q /proc/none "$folder/error"
echo "$train train, $heldout held out"
