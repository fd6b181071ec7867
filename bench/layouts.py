#!/usr/bin/env python3
"""The same ranks, model and data: one layout forced on all modules against a layout for each, over shared memory and over a network.

Colocated: 4 workers that serve both modules. Disaggregated: 2 encoder workers and 2 LLM workers. In "network" each worker is in a
network namespace of its own, joined by veth to a bridge, and its link is held to 1 Gbit/s each way by tbf; that needs root.

Usage: layouts.py FOLDER_OF_PROGRAMS [-o json] [steps, default 14]
"""
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time

WARM_STEPS = 4
RATE = "1gbit"
BRIDGE, ADDRESS = "vdbench", "10.77.0"
DATA = pathlib.Path("out/emoji/data/train-*.tar").resolve()

# An encoder with about two thirds of the work, whose matrices are narrow for tp 4. On pools of their own the slower pool decides:
# there the decoder has fewer layers, so that it is the encoder.
LLM_LAYERS = {"colocated": 4, "disaggregated": 2}
JOB = """\
model:
  vision: {image_size: 64, patch_size: 8, width: 256, layers: 6, heads: 8, mlp_width: 1024}
  llm: {width: 256, layers: %(llm_layers)d, heads: 8, kv_heads: 8, mlp_width: 768, max_tokens: 192}
data: {train: ["%(data)s"]}
modules:
  - {name: vision, pool: %(pool)s, %(vision)s}
  - {name: llm, pool: llm, %(llm)s}
pools:
%(pools)s
training: {steps: %(steps)d, global_batch: 32, microbatches: 2, encoder_window: 2}
optimizer: {learning_rate: 0.001, warmup_steps: 2, max_grad_norm: 1.0}
"""
# place: [(name, vision, llm)], the first is the one layout for all
CASES = {
    "colocated": [("one for all", "tp: 4", "tp: 4"), ("each its own", "dp: 4", "tp: 4"), ("each its own", "dp: 4", "tp: 2, dp: 2")],
    "disaggregated": [("one for all", "tp: 2", "tp: 2"), ("each its own", "dp: 2", "tp: 2")],
}


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Network:
    """Namespaces vdbench0.. with addresses 10.77.0.10.., or none of it."""

    def __init__(self, workers):
        self.names = [f"vdbench{i}" for i in range(workers)]
        self.remove()
        run("ip", "link", "add", BRIDGE, "type", "bridge")
        run("ip", "address", "add", f"{ADDRESS}.1/24", "dev", BRIDGE)
        run("ip", "link", "set", BRIDGE, "up")
        for i, name in enumerate(self.names):
            outer = f"vdb{i}"
            run("ip", "netns", "add", name)
            run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "link", "set", outer, "master", BRIDGE, "up")
            run("ip", "-n", name, "address", "add", f"{ADDRESS}.{10 + i}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            for where in ([], ["-n", name]):
                device = "eth0" if where else outer
                run("tc", *where, "qdisc", "add", "dev", device, "root", "tbf", "rate", RATE, "burst", "256k", "latency", "50ms")

    def remove(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "delete", BRIDGE], capture_output=True, check=False)

    def sent_bytes(self, i):
        for line in run("ip", "netns", "exec", self.names[i], "cat", "/proc/net/dev").splitlines():
            if line.strip().startswith("eth0:"):
                return int(line.split(":")[1].split()[8])
        return 0


class Cluster:
    """A coordinator and workers of one case."""

    def __init__(self, programs, roles, network, folder):
        self.programs, self.network = programs, network
        self.children, self.workers = [], []
        host = f"{ADDRESS}.1" if network else "127.0.0.1"
        self.coordinator = f"{host}:17170"
        self.start("viaduct-coordinator", ["--listen", self.coordinator], folder / "coordinator.log")
        for i, role in enumerate(roles):
            listen = f"{ADDRESS}.{10 + i}:0" if network else "127.0.0.1:0"
            prefix = ["ip", "netns", "exec", network.names[i]] if network else []
            arguments = ["--coordinator", self.coordinator, "--name", f"{role}-{i}", "--listen", listen]
            self.workers.append(self.start(f"viaduct-{role}-worker", arguments, folder / f"{role}-{i}.log", prefix))

    def start(self, program, arguments, log, prefix=()):
        with open(log, "w") as file:
            child = subprocess.Popen([*prefix, str(self.programs / program), *arguments], stdout=file, stderr=file,
                                     env=dict(os.environ, OMP_NUM_THREADS="1"))
        self.children.append(child)
        return child

    def status(self, job):
        out = run(str(self.programs / "viaduct"), "get", "jobs", job, "--coordinator", self.coordinator, "-o", "json")
        return json.loads(out)["status"]

    def peaks(self):
        """The most resident memory of each worker, MiB."""
        peaks = []
        for child in self.workers:
            for line in pathlib.Path(f"/proc/{child.pid}/status").read_text().splitlines():
                if line.startswith("VmHWM"):
                    peaks.append(int(line.split()[1]) / 1024)
        return peaks

    def stop(self):
        for child in self.children:
            child.send_signal(signal.SIGTERM)
        for child in self.children:
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def number(totals, name):
    return float(totals.get(name, 0))


def measure(programs, place, vision, llm, network, steps):
    """One job from a fresh start; figures of the steps after the warm ones."""
    colocated = place == "colocated"
    roles = ["llm"] * 4 if colocated else ["encoder", "encoder", "llm", "llm"]
    pools = "  - {name: llm, role: llm}" + ("" if colocated else "\n  - {name: encoder, role: encoder}")
    text = JOB % {"data": DATA, "pool": "llm" if colocated else "encoder", "vision": vision, "llm": llm, "pools": pools, "steps": steps,
                  "llm_layers": LLM_LAYERS[place]}
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "job.yaml").write_text(text)
        cluster = Cluster(programs, roles, network, folder)
        try:
            time.sleep(1)
            job = run(str(programs / "viaduct"), "submit", "-f", str(folder / "job.yaml"), "--coordinator", cluster.coordinator, "--id", "bench").strip()
            begin = follow(cluster, job, WARM_STEPS)
            sent = [network.sent_bytes(i) for i in range(len(roles))] if network else None
            end = follow(cluster, job, steps)
            links = [(network.sent_bytes(i) - sent[i]) for i in range(len(roles))] if network else None
            peaks = cluster.peaks()
        except Exception:
            for log in sorted(folder.glob("*.log")):
                print(f"--- {log.name}\n{log.read_text()[-600:]}", file=sys.stderr)
            raise
        finally:
            cluster.stop()
    done = int(end["committed_step"]) - int(begin["committed_step"])

    def rate(name):
        return (number(end["totals"], name) - number(begin["totals"], name)) / done

    step = rate("step_seconds")
    return {"place": place, "vision": vision, "llm": llm, "transport": "network" if network else "shared memory", "step_ms": 1e3 * step,
            "encoder_wait": rate("encoder_wait_seconds") / step, "llm_wait": rate("llm_wait_seconds") / step,
            "boundary_bytes": rate("boundary_bytes"), "link_mb": [b / done / 1e6 for b in links] if links else None, "peak_mib": max(peaks)}


def follow(cluster, job, step):
    """The job's status once it has done so many steps."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        status = cluster.status(job)
        if status["state"] == "FAILED":
            raise RuntimeError(status.get("message", "the job failed"))
        if int(status.get("committed_step", 0)) >= step:
            return status
        time.sleep(0.05)
    raise TimeoutError(f"{job} is not at step {step}")


def main():
    arguments = [a for a in sys.argv[1:] if a not in ("-o", "json")]
    programs = pathlib.Path(arguments[0]).resolve()
    steps = int(arguments[1]) if len(arguments) > 1 else 14
    networks = [None]
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # leaves nothing behind
    if os.geteuid() == 0:
        networks.append(Network(4))
    else:
        print("not root: without the network of namespaces", file=sys.stderr)
    results = []
    try:
        for network in networks:
            for place, cases in CASES.items():
                for name, vision, llm in cases:
                    result = measure(programs, place, vision, llm, network, steps)
                    result["layout"] = name
                    results.append(result)
                    base = next(r for r in results if (r["place"], r["transport"]) == (place, result["transport"]))
                    result["gain"] = base["step_ms"] / result["step_ms"] - 1
                    show(result, len(results) == 1)
    finally:
        if networks[-1]:
            networks[-1].remove()
    if "json" in sys.argv:
        print(json.dumps(results, indent=2))
    return 0


def show(result, with_head):
    columns = f"{{:14}} {{:14}} {{:13}} {{:12}} {{:13}} {{:>8}} {{:>9}} {{:>9}} {{:>13}} {{:>9}} {{:>7}}"
    out = sys.stderr if "json" in sys.argv else sys.stdout
    if with_head:
        print(columns.format("TRANSPORT", "PLACE", "LAYOUT", "VISION", "LLM", "STEP ms", "ENC WAIT", "LLM WAIT", "LINK MB/STEP", "PEAK MiB", "GAIN"), file=out)
    links = f"{statistics.mean(result['link_mb']):.1f}" if result["link_mb"] else "-"
    print(columns.format(result["transport"], result["place"], result["layout"], result["vision"], result["llm"], f"{result['step_ms']:.0f}",
                         f"{100 * result['encoder_wait']:.0f} %", f"{100 * result['llm_wait']:.0f} %", links, f"{result['peak_mib']:.0f}",
                         f"{100 * result['gain']:+.1f} %"), file=out, flush=True)


if __name__ == "__main__":
    sys.exit(main())
