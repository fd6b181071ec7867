#!/usr/bin/env python3
"""Rows of a microbatch from two encoder ranks to a decoder replica with tp 1, 2 and 4, between processes over shared memory.

Usage: boundary.py path/to/bench_boundary [-o json] [rounds, default 60]
"""
import json
import subprocess
import sys

FIELDS = ["senders", "receivers", "bytes", "ours_s", "copy_s", "leader_s", "bytes_over_minimum", "copy_speed", "leader_speed"]


def size_text(size):
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def main():
    arguments = [a for a in sys.argv[1:] if a not in ("-o", "json")]
    rounds = arguments[1] if len(arguments) > 1 else "60"
    as_json = "json" in sys.argv
    rows = []
    out = subprocess.Popen([arguments[0], rounds], stdout=subprocess.PIPE, text=True)
    if not as_json:
        print(f"{'RECEIVERS':9} {'ROWS':>8} {'OURS us':>10} {'COPY us':>10} {'LEADER us':>10} {'BYTES/MIN':>10} {'OF COPY':>8} {'OVER LEADER':>12}")
    for line in out.stdout:
        row = dict(zip(FIELDS, map(float, line.split())))
        rows.append(row)
        if not as_json:
            print(f"tp {int(row['receivers']):<6} {size_text(int(row['bytes'])):>8} {1e6 * row['ours_s']:10.1f} {1e6 * row['copy_s']:10.1f} "
                  f"{1e6 * row['leader_s']:10.1f} {row['bytes_over_minimum']:10.2f} {row['copy_speed']:8.2f} {row['leader_speed']:12.2f}", flush=True)
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        print("\nOURS: all receivers have all rows. COPY: each needed byte once, from pool to pool, and no more (with tp above 1 nobody has all rows then).\n"
              "LEADER: one receiver gets all, then broadcasts. OF COPY, OVER LEADER: their time over ours, medians of neighbouring turns.")
    return out.wait()


if __name__ == "__main__":
    sys.exit(main())
