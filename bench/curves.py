#!/usr/bin/env python3
"""The same job in five layouts: the loss of every step, drawn and compared.

Usage: curves.py path/to/bench_curves [steps, default 300] [SVG file, default out/curves.svg]
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile

JOB = pathlib.Path("examples/emoji/job.yaml")
# name: the modules, and whether they share one pool
LAYOUTS = {
    "one process": ({"vision": "", "llm": ""}, True),
    "vision dp 2, llm tp 2": ({"vision": "dp: 2", "llm": "tp: 2"}, False),
    "vision tp 2, llm pp 3": ({"vision": "tp: 2", "llm": "pp: 3"}, False),
    "vision dp 3, llm cp 2 dp 2": ({"vision": "dp: 3", "llm": "cp: 2, dp: 2"}, False),
    "shared: vision dp 4, llm tp 2 pp 2": (
        {"vision": "dp: 4", "llm": "tp: 2, pp: 2, sequence_parallel: true"}, True),
}
COLORS = ["#000000", "#d62728", "#1f77b4", "#2ca02c", "#9467bd"]
# AdamW turns rounding into steps where a gradient is nearly zero; a wrong scale anywhere is off by far more.
ALLOWED = 1e-3


def job_text(modules, shared):
    """The example's job with other modules and pools, without evaluation."""
    text = JOB.read_text()
    lines = ["modules:"]
    for name, axes in modules.items():
        pool = "llm" if shared or name == "llm" else "encoder"
        lines.append(f"  - {{name: {name}, pool: {pool}{', ' + axes if axes else ''}}}")
    lines += ["pools:", "  - {name: llm, role: llm}"]
    if not shared:
        lines.append("  - {name: encoder, role: encoder}")
    text = re.sub(r"^modules:.*?(?=^# ---- Training)", "\n".join(lines) + "\n\n", text, flags=re.S | re.M)
    text = re.sub(r"^  heldout:.*?\n    - .*?\n", "", text, flags=re.M)
    return re.sub(r"microbatches: \d+", "microbatches: 4", text)


def losses_of(bench, modules, shared, steps):
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(job_text(modules, shared))
        file.flush()
        run = subprocess.run([bench, file.name, str(steps)], check=True, capture_output=True, text=True,
                             env=dict(os.environ, OMP_NUM_THREADS="1"))
    losses = [float(line.split()[1]) for line in run.stdout.splitlines()]
    assert len(losses) == steps, run.stderr
    return losses


def draw(curves, path):
    """Lines over each other, thinner the later: where they agree all can be seen."""
    width, height, left, top = 900, 420, 60, 20
    steps = len(next(iter(curves.values())))
    highest = max(max(losses) for losses in curves.values())
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">',
             f'<rect width="{width}" height="{height}" fill="white"/>']
    plot_width, plot_height = width - left - 20, height - top - 50

    def place(step, loss):
        return f"{left + plot_width * step / (steps - 1):.1f},{top + plot_height * (1 - loss / highest):.1f}"

    for i in range(6):
        y = top + plot_height * i / 5
        parts.append(f'<line x1="{left}" x2="{left + plot_width}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{highest * (1 - i / 5):.1f}</text>')
    for i in range(0, 6):
        x = left + plot_width * i / 5
        parts.append(f'<text x="{x}" y="{top + plot_height + 18}" text-anchor="middle">{round(1 + (steps - 1) * i / 5)}</text>')
    parts.append(f'<text x="{left + plot_width / 2}" y="{height - 8}" text-anchor="middle">step</text>')
    parts.append(f'<text x="14" y="{top + plot_height / 2}" transform="rotate(-90 14 {top + plot_height / 2})" text-anchor="middle">loss, nats per label</text>')
    for i, (name, losses) in enumerate(curves.items()):
        line = 1 + 1.6 * (len(curves) - 1 - i)
        points = " ".join(place(step, loss) for step, loss in enumerate(losses))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLORS[i]}" stroke-width="{line}" stroke-opacity="0.85"/>')
        y = top + 24 + 20 * i
        parts.append(f'<line x1="{width - 300}" x2="{width - 270}" y1="{y - 4}" y2="{y - 4}" stroke="{COLORS[i]}" stroke-width="{line}"/>')
        parts.append(f'<text x="{width - 262}" y="{y}">{name}</text>')
    parts.append("</svg>\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(parts))


def main():
    bench = sys.argv[1]
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 300
    path = pathlib.Path(sys.argv[3] if len(sys.argv) > 3 else "out/curves.svg")
    curves = {}
    for name, (modules, shared) in LAYOUTS.items():
        curves[name] = losses_of(bench, modules, shared, steps)
        print(f"{name}: loss {curves[name][0]:.4f} at first, {curves[name][-1]:.4f} at last", flush=True)
    draw(curves, path)
    truth = curves["one process"]
    worst = 0.0
    print(f"\n{'LAYOUT':38} {'LARGEST DIFFERENCE':>20} {'FIRST 50 STEPS':>16}")
    for name, losses in list(curves.items())[1:]:
        differences = [abs(a - b) for a, b in zip(losses, truth)]
        worst = max(worst, max(differences))
        print(f"{name:38} {max(differences):20.2g} {max(differences[:50]):16.2g}")
    print(f"plot: {path}")
    return 0 if worst <= ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
