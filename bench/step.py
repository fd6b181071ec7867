#!/usr/bin/env python3
"""One training step (forward, backward, AdamW) of a ViT and of a decoder: Viaduct's modules against PyTorch.

Both are long-lived processes that take turns on the same cores: ours, PyTorch, ours, ... Each turn runs a fixed number of
steps; what is printed is the median over turns and the median of the ratio of neighbouring turns.

Usage: step.py path/to/bench_step [seconds for each model, default 30]
"""
import os
import statistics
import subprocess
import sys
import time

MODELS = {
    "vit": "ViT: width 384, 12 layers, 6 heads, 197 tokens, batch 8",
    "decoder": "decoder: width 384, 4 layers, 6 heads, 256 tokens, batch 4, vocabulary 4096",
}
TURN_STEPS = 2


# Floating-point operations of the matrix products of one step (forward + twice that for backward), attention included.
def step_flops(model):
    if model == "vit":
        width, layers, inner, tokens, batch = 384, 12, 1536, 197, 8
        per_token = layers * (2 * (4 * width * width + 2 * width * inner) + 4 * tokens * width)
        patches = 2 * 3 * 16 * 16 * width * 196 * batch
        return 3 * (batch * tokens * per_token) + 2 * patches
    width, layers, inner, tokens, batch, vocabulary = 384, 4, 1024, 256, 4, 4096
    # a causal token looks at half of the tokens on average
    per_token = layers * (2 * (4 * width * width + 3 * width * inner) + 2 * tokens * width) + 2 * width * vocabulary
    return 3 * batch * tokens * per_token


class Runner:
    """A child that answers "run N" with the seconds that N steps took."""

    def __init__(self, command, threads):
        # The default wait policy: threads of the child that waits for its turn sleep, and do not spin on the cores.
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads))
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                      env=environment)

    def run(self, steps):
        self.child.stdin.write(f"run {steps}\n")
        self.child.stdin.flush()
        return float(self.child.stdout.readline())

    def close(self):
        self.child.stdin.close()
        self.child.wait(timeout=60)


def core_peak_gflops(bench):
    """Float32 rate of one core on a large matrix product, measured now."""
    return float(subprocess.run([bench, "peak"], capture_output=True, text=True, check=True,
                                env=dict(os.environ, OMP_NUM_THREADS="1")).stdout)


def best_threads(model, cores):
    """PyTorch's own best thread count, tried first."""
    times = {}
    for threads in range(1, cores + 1):
        runner = Runner([sys.executable, __file__, "--torch", model], threads)
        runner.run(1)
        times[threads] = min(runner.run(1) for _ in range(3))
        runner.close()
    return min(times, key=times.get)


def compare(bench, model, seconds, cores, peak):
    threads = best_threads(model, cores)
    ours = Runner([bench, model], cores)
    torch = Runner([sys.executable, __file__, "--torch", model], threads)
    ours.run(2)
    torch.run(2)
    rows = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(rows) < 5:
        rows.append((ours.run(TURN_STEPS) / TURN_STEPS, torch.run(TURN_STEPS) / TURN_STEPS))
    ours.close()
    torch.close()
    our_time = statistics.median(row[0] for row in rows)
    torch_time = statistics.median(row[1] for row in rows)
    ratios = sorted(row[1] / row[0] for row in rows)
    flops = step_flops(model)
    print(MODELS[model])
    print(f"  viaduct  {our_time * 1e3:8.1f} ms/step  {flops / our_time / 1e9:7.0f} GFLOP/s  "
          f"{flops / our_time / 1e9 / (peak * cores):5.1%} of {cores} cores' measured peak of {peak:.0f} GFLOP/s each")
    print(f"  pytorch  {torch_time * 1e3:8.1f} ms/step  {flops / torch_time / 1e9:7.0f} GFLOP/s  (best with {threads} threads)")
    print(f"  ratio    {statistics.median(ratios):8.2f}  (pytorch / viaduct, {len(rows)} pairs, "
          f"from {ratios[0]:.2f} to {ratios[-1]:.2f})", flush=True)


# ---------------------------------------------------------------- PyTorch's side
def torch_model(model):
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.manual_seed(1)

    class Attention(nn.Module):
        def __init__(self, width, heads, causal, tokens, bias):
            super().__init__()
            self.heads, self.causal = heads, causal
            self.qkv = nn.Linear(width, 3 * width, bias=bias)
            self.out = nn.Linear(width, width, bias=bias)
            self.scale = (width // heads) ** -0.5
            if causal:
                self.register_buffer("mask", torch.full((tokens, tokens), float("-inf")).triu(1))
                half = width // heads // 2
                angles = torch.arange(tokens)[:, None] * 10000.0 ** (-torch.arange(half) / half)
                self.register_buffer("cos", torch.cos(angles))
                self.register_buffer("sin", torch.sin(angles))

        def rotate(self, x):
            a, b = x.chunk(2, -1)
            return torch.cat((a * self.cos - b * self.sin, b * self.cos + a * self.sin), -1)

        def forward(self, x):
            batch, tokens, width = x.shape
            q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            if self.causal:
                q, k = self.rotate(q), self.rotate(k)
            scores = (q * self.scale) @ k.transpose(-2, -1)
            if self.causal:
                scores = scores + self.mask
            return self.out((F.softmax(scores, -1) @ v).transpose(1, 2).reshape(batch, tokens, width))

    class RmsNorm(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight

    class SwiGlu(nn.Module):
        def __init__(self, width, inner):
            super().__init__()
            self.gate = nn.Linear(width, inner, bias=False)
            self.up = nn.Linear(width, inner, bias=False)
            self.down = nn.Linear(inner, width, bias=False)

        def forward(self, x):
            return self.down(F.silu(self.gate(x)) * self.up(x))

    class Block(nn.Module):
        def __init__(self, attention, mlp, norm, width):
            super().__init__()
            self.norm1, self.norm2 = norm(width), norm(width)
            self.attention, self.mlp = attention, mlp

        def forward(self, x):
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))

    width, heads = 384, 6
    if model == "vit":
        class Vit(nn.Module):
            def __init__(self):
                super().__init__()
                self.patch = nn.Conv2d(3, width, 16, 16, bias=False)
                self.class_token = nn.Parameter(torch.zeros(1, 1, width))
                self.position = nn.Parameter(torch.randn(1, 197, width) * 0.02)
                self.pre = nn.LayerNorm(width)
                self.blocks = nn.Sequential(*[
                    Block(Attention(width, heads, False, 197, True),
                          nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
                          nn.LayerNorm, width) for _ in range(12)])

            def forward(self, images):
                x = self.patch(images).flatten(2).transpose(1, 2)
                x = torch.cat((self.class_token.expand(x.shape[0], -1, -1), x), 1) + self.position
                return self.blocks(self.pre(x))

        net = Vit()
        images = torch.rand(8, 3, 224, 224)
        return net, lambda: net(images).sum()
    tokens, vocabulary = 256, 4096

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(vocabulary, width)
            self.blocks = nn.Sequential(*[
                Block(Attention(width, heads, True, tokens, False), SwiGlu(width, 1024), RmsNorm, width)
                for _ in range(4)])
            self.norm = RmsNorm(width)
            self.head = nn.Linear(width, vocabulary, bias=False)

        def forward(self, ids):
            return self.head(self.norm(self.blocks(self.embed(ids))))

    net = Decoder()
    ids = torch.randint(0, vocabulary, (4, tokens))
    labels = torch.randint(0, vocabulary, (4, tokens))
    return net, lambda: F.cross_entropy(net(ids).view(-1, vocabulary), labels.view(-1))


def torch_child(model):
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    net, loss_of = torch_model(model)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, foreach=True)
    for line in sys.stdin:
        steps = int(line.split()[1])
        begin = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            loss_of().backward()
            optimizer.step()
        print(time.perf_counter() - begin, flush=True)


def main():
    if len(sys.argv) == 3 and sys.argv[1] == "--torch":
        torch_child(sys.argv[2])
        return
    bench = sys.argv[1]
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 30.0
    cores = len(os.sched_getaffinity(0))
    peak = core_peak_gflops(bench)
    for model in MODELS:
        compare(bench, model, seconds, cores, peak)


if __name__ == "__main__":
    main()
