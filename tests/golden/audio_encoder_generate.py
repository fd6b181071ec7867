#!/usr/bin/env python3
"""Makes audio_encoder.txt and .bin: what PyTorch computes in float64 for a tiny audio encoder with its projector.

Needs Debian's python3-torch (1.13 was used). Run it in this folder: ./audio_encoder_generate.py
The files have the form of generate.py's. Tensors: "frames" [T, mels] of all clips, "lengths" (frames of each), "rows", "rows_grad" (what the
gradient of the rows is), "weight/<name>", "grad/<name>".

Written from the paper (Radford et al. 2022) and the meaning of the parameters, one clip and one head at a time, on purpose unlike the C code.
"""
import dataclasses
import math

import torch
import torch.nn.functional as F

from generate import Writer

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)


@dataclasses.dataclass
class Config:
    name: str = "audio_encoder"
    seed: int = 3
    mels: int = 5
    audio_width: int = 12
    audio_layers: int = 3
    audio_heads: int = 3
    audio_mlp_width: int = 20
    norm_epsilon: float = 1e-5
    projector_width: int = 18
    width: int = 16


LENGTHS = [8, 1, 14, 7, 2]


def make_weights(c, rng):
    weights = {}

    def linear(name, *dims):
        weights[name + ".weight"] = torch.randn(*dims, generator=rng) * (0.8 / math.sqrt(math.prod(dims[1:])))
        weights[name + ".bias"] = 0.2 * torch.randn(dims[0], generator=rng)

    def norm(name, width):
        weights[name + ".weight"] = 1 + 0.2 * torch.randn(width, generator=rng)
        weights[name + ".bias"] = 0.2 * torch.randn(width, generator=rng)

    d = c.audio_width
    linear("audio_tower.conv1", d, c.mels, 3)
    linear("audio_tower.conv2", d, d, 3)
    for i in range(c.audio_layers):
        layer = f"audio_tower.layers.{i}."
        norm(layer + "self_attn_layer_norm", d)
        for name in "q_proj", "k_proj", "v_proj", "out_proj":
            linear(layer + "self_attn." + name, d, d)
        norm(layer + "final_layer_norm", d)
        linear(layer + "fc1", c.audio_mlp_width, d)
        linear(layer + "fc2", d, c.audio_mlp_width)
    norm("audio_tower.layer_norm", d)
    linear("audio_projector.linear_1", c.projector_width, d)
    linear("audio_projector.linear_2", c.width, c.projector_width)
    # What the C program starts from is float32; so is what PyTorch starts from.
    return {name: w.float().double().requires_grad_() for name, w in weights.items()}


def clip_rows(c, w, frames):  # [T, mels] -> [ceil(T / 2), width of the decoder]
    def linear(name, x):
        return F.linear(x, w[name + ".weight"], w[name + ".bias"])

    def norm(name, x):
        return F.layer_norm(x, x.shape[-1:], w[name + ".weight"], w[name + ".bias"], c.norm_epsilon)

    def conv(name, x, stride):
        return F.gelu(F.conv1d(x, w[name + ".weight"], w[name + ".bias"], stride=stride, padding=1))

    x = conv("audio_tower.conv2", conv("audio_tower.conv1", frames.T[None], 1), 2)[0].T
    half = c.audio_width // 2
    rates = torch.tensor([10000 ** (-i / (half - 1)) for i in range(half)])
    angles = torch.arange(len(x))[:, None] * rates
    x = x + torch.cat([angles.sin(), angles.cos()], 1)
    head = c.audio_width // c.audio_heads
    for i in range(c.audio_layers):
        layer = f"audio_tower.layers.{i}."
        normed = norm(layer + "self_attn_layer_norm", x)
        q, k, v = (linear(f"{layer}self_attn.{n}_proj", normed) for n in "qkv")
        outs = []
        for h in range(c.audio_heads):
            part = slice(h * head, (h + 1) * head)
            outs.append(torch.softmax(q[:, part] @ k[:, part].T / math.sqrt(head), -1) @ v[:, part])
        x = x + linear(layer + "self_attn.out_proj", torch.cat(outs, -1))
        x = x + linear(layer + "fc2", F.gelu(linear(layer + "fc1", norm(layer + "final_layer_norm", x))))
    x = norm("audio_tower.layer_norm", x)
    return linear("audio_projector.linear_2", F.gelu(linear("audio_projector.linear_1", x)))


def main():
    config = Config()
    rng = torch.Generator().manual_seed(config.seed)
    weights = make_weights(config, rng)
    frames = torch.randn(sum(LENGTHS), config.mels, generator=rng).float().double()
    rows = torch.cat([clip_rows(config, weights, clip) for clip in frames.split(LENGTHS)])
    rows_grad = torch.randn(*rows.shape, generator=rng).float().double()
    rows.backward(rows_grad)
    writer = Writer(config)
    writer.add("frames", frames)
    writer.add("lengths", torch.tensor(LENGTHS))
    writer.add("rows", rows)
    writer.add("rows_grad", rows_grad)
    for name, value in weights.items():
        writer.add("weight/" + name, value)
        writer.add("grad/" + name, value.grad)
    writer.close()


if __name__ == "__main__":
    main()
