#!/usr/bin/env python3
"""Makes the golden vectors: what PyTorch computes in float64 for two tiny models of LLaVA's shape.

Needs Debian's python3-torch (1.13 was used). Run it in this folder: ./generate.py
For each case it writes
    <case>.txt    one line a tensor: name, F32 | I32 | U8, number of dims, dims, first byte in the .bin; and "config" lines
    <case>.bin    the tensors, little endian, one after another
Tensors: "weight/<name>", "grad/<name>", "step<k>/<name>" (weights after k AdamW steps on the same batch), inputs, "log_probs", "rows", "rows_grad",
"loss" (nats per label before each of the steps).

The model is written from the papers and from the meaning of the parameters, one sample and one head at a time, on purpose unlike the C code:
no packing, no blocks, no fused products.
"""
import dataclasses
import math

import torch
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)

IMAGE_ID = 35  # placeholder; in a vocabulary of 37
PIXEL_MEAN = [0.48145466, 0.4578275, 0.40821073]
PIXEL_STD = [0.26862954, 0.26130258, 0.27577711]
LEARNING_RATE, BETA1, BETA2, EPSILON, WEIGHT_DECAY, STEPS = 1e-3, 0.9, 0.95, 1e-6, 0.1, 3


@dataclasses.dataclass
class Config:
    name: str
    seed: int
    image_size: int = 8
    patch_size: int = 4
    vision_width: int = 12
    vision_layers: int = 2
    vision_heads: int = 3
    vision_mlp_width: int = 20
    quick_gelu: int = 0
    class_token: int = 0
    feature_layer: int = -1
    vision_norm_epsilon: float = 1e-5
    projector_width: int = 18
    vocabulary: int = 37
    width: int = 16
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_width: int = 6
    mlp_width: int = 23
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-5
    tied_head: int = 0

    @property
    def blocks(self):
        return self.vision_layers + 1 + self.feature_layer if self.feature_layer < 0 else self.feature_layer


CASES = [
    Config("grouped_query", seed=1),
    Config("class_token", seed=2, vision_layers=3, vision_heads=2, quick_gelu=1, class_token=1, feature_layer=-2, vision_norm_epsilon=1e-6,
           heads=3, kv_heads=3, head_width=4, mlp_width=20, rope_theta=500.0, norm_epsilon=1e-6, tied_head=1),
]


# ---------------------------------------------------------------- weights
def make_weights(config, rng):
    weights = {}

    def matrix(name, *dims):
        fan_in = math.prod(dims[1:])
        weights[name] = torch.randn(*dims, generator=rng) * (0.8 / math.sqrt(fan_in))

    def vector(name, width, middle=0.0):
        weights[name] = middle + 0.2 * torch.randn(width, generator=rng)

    def linear(name, outs, ins, bias):
        matrix(name + ".weight", outs, ins)
        if bias:
            vector(name + ".bias", outs)

    def norm(name, width, bias):
        vector(name + ".weight", width, 1.0)
        if bias:
            vector(name + ".bias", width)

    c, d = config, config.vision_width
    tower = "vision_tower.vision_model."
    if c.class_token:
        vector(tower + "embeddings.class_embedding", d)
    matrix(tower + "embeddings.patch_embedding.weight", d, 3, c.patch_size, c.patch_size)
    positions = (c.image_size // c.patch_size) ** 2 + c.class_token
    weights[tower + "embeddings.position_embedding.weight"] = 0.3 * torch.randn(positions, d, generator=rng)
    norm(tower + "pre_layrnorm", d, True)
    for i in range(c.blocks):
        layer = f"{tower}encoder.layers.{i}."
        for name in "q_proj", "k_proj", "v_proj", "out_proj":
            linear(layer + "self_attn." + name, d, d, True)
        norm(layer + "layer_norm1", d, True)
        linear(layer + "mlp.fc1", c.vision_mlp_width, d, True)
        linear(layer + "mlp.fc2", d, c.vision_mlp_width, True)
        norm(layer + "layer_norm2", d, True)
    linear("multi_modal_projector.linear_1", c.projector_width, d, True)
    linear("multi_modal_projector.linear_2", c.width, c.projector_width, True)
    decoder = "language_model.model."
    weights[decoder + "embed_tokens.weight"] = 0.5 * torch.randn(c.vocabulary, c.width, generator=rng)
    for i in range(c.layers):
        layer = f"{decoder}layers.{i}."
        linear(layer + "self_attn.q_proj", c.heads * c.head_width, c.width, False)
        linear(layer + "self_attn.k_proj", c.kv_heads * c.head_width, c.width, False)
        linear(layer + "self_attn.v_proj", c.kv_heads * c.head_width, c.width, False)
        linear(layer + "self_attn.o_proj", c.width, c.heads * c.head_width, False)
        linear(layer + "mlp.gate_proj", c.mlp_width, c.width, False)
        linear(layer + "mlp.up_proj", c.mlp_width, c.width, False)
        linear(layer + "mlp.down_proj", c.width, c.mlp_width, False)
        norm(layer + "input_layernorm", c.width, False)
        norm(layer + "post_attention_layernorm", c.width, False)
    norm(decoder + "norm", c.width, False)
    if not c.tied_head:
        matrix("language_model.lm_head.weight", c.vocabulary, c.width)
    # What the C program starts from is float32; so is what PyTorch starts from.
    return {name: w.float().double().requires_grad_() for name, w in weights.items()}


def has_decay(name):
    return name.endswith("weight") and "norm" not in name and "layrnorm" not in name and "position" not in name


# ---------------------------------------------------------------- model
class Model:
    def __init__(self, config, weights):
        self.c, self.w = config, weights

    def linear(self, name, x):
        return F.linear(x, self.w[name + ".weight"], self.w.get(name + ".bias"))

    def layer_norm(self, name, x):
        return F.layer_norm(x, x.shape[-1:], self.w[name + ".weight"], self.w[name + ".bias"], self.c.vision_norm_epsilon)

    def rms_norm(self, name, x):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.c.norm_epsilon) * self.w[name + ".weight"]

    def vision_layer(self, layer, x):  # [T, D]
        c = self.c
        head = c.vision_width // c.vision_heads
        normed = self.layer_norm(layer + "layer_norm1", x)
        q, k, v = (self.linear(f"{layer}self_attn.{n}_proj", normed) for n in "qkv")
        outs = []
        for h in range(c.vision_heads):
            part = slice(h * head, (h + 1) * head)
            scores = q[:, part] @ k[:, part].T / math.sqrt(head)
            outs.append(torch.softmax(scores, -1) @ v[:, part])
        x = x + self.linear(layer + "self_attn.out_proj", torch.cat(outs, -1))
        inner = self.linear(layer + "mlp.fc1", self.layer_norm(layer + "layer_norm2", x))
        inner = inner * torch.sigmoid(1.702 * inner) if c.quick_gelu else F.gelu(inner)
        return x + self.linear(layer + "mlp.fc2", inner)

    def image_rows(self, pixels):  # u8 [S, S, 3] -> [P, width of the decoder]
        c, tower = self.c, "vision_tower.vision_model."
        x = (pixels.double() / 255 - torch.tensor(PIXEL_MEAN)) / torch.tensor(PIXEL_STD)
        x = F.conv2d(x.permute(2, 0, 1)[None], self.w[tower + "embeddings.patch_embedding.weight"], stride=c.patch_size)
        x = x[0].flatten(1).T
        if c.class_token:
            x = torch.cat([self.w[tower + "embeddings.class_embedding"][None], x])
        x = self.layer_norm(tower + "pre_layrnorm", x + self.w[tower + "embeddings.position_embedding.weight"])
        for i in range(c.blocks):
            x = self.vision_layer(f"{tower}encoder.layers.{i}.", x)
        x = x[c.class_token:]
        x = F.gelu(self.linear("multi_modal_projector.linear_1", x))
        return self.linear("multi_modal_projector.linear_2", x)

    def rotate(self, x):  # [T, W] at positions 0 .. T - 1
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[0])[:, None] * self.c.rope_theta ** (-2 * torch.arange(half) / x.shape[-1])
        a, b = x[:, :half], x[:, half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    def decoder_layer(self, layer, x):  # [T, D]
        c, w = self.c, self.c.head_width
        normed = self.rms_norm(layer + "input_layernorm", x)
        q, k, v = (self.linear(f"{layer}self_attn.{n}_proj", normed) for n in "qkv")
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        outs = []
        for h in range(c.heads):
            g = h // (c.heads // c.kv_heads)
            query, key = self.rotate(q[:, h * w:(h + 1) * w]), self.rotate(k[:, g * w:(g + 1) * w])
            scores = (query @ key.T / math.sqrt(w)).masked_fill(later, -math.inf)
            outs.append(torch.softmax(scores, -1) @ v[:, g * w:(g + 1) * w])
        x = x + self.linear(layer + "self_attn.o_proj", torch.cat(outs, -1))
        normed = self.rms_norm(layer + "post_attention_layernorm", x)
        inner = F.silu(self.linear(layer + "mlp.gate_proj", normed)) * self.linear(layer + "mlp.up_proj", normed)
        return x + self.linear(layer + "mlp.down_proj", inner)

    def log_probs(self, ids, rows):  # [T], [rows of the sample, D] -> [T, V]
        decoder = "language_model.model."
        table = self.w[decoder + "embed_tokens.weight"]
        left = iter(rows)
        x = torch.stack([next(left) if i == IMAGE_ID else table[i] for i in ids.tolist()])
        for i in range(self.c.layers):
            x = self.decoder_layer(f"{decoder}layers.{i}.", x)
        head = table if self.c.tied_head else self.w["language_model.lm_head.weight"]
        return F.log_softmax(self.rms_norm(decoder + "norm", x) @ head.T, -1)


# ---------------------------------------------------------------- data
def make_samples(config, rng):
    """One image, then two, then none: (ids, labels, images)."""
    rows = (config.image_size // config.patch_size) ** 2

    def text(count):
        return torch.randint(0, IMAGE_ID, (count,), generator=rng).tolist()

    image = [IMAGE_ID] * rows
    samples = []
    for prompt, caption, images in ((text(2) + image + text(1), text(4), 1),
                                    (text(1) + image + text(2) + image, text(5), 2),
                                    (text(3), text(3), 0)):
        ids = prompt + caption
        labels = [-1] * (len(prompt) - 1) + caption + [-1]
        samples.append((torch.tensor(ids), torch.tensor(labels), images))
    num_images = sum(images for _, _, images in samples)
    pixels = torch.randint(0, 256, (num_images, config.image_size, config.image_size, 3), generator=rng)
    return samples, pixels.to(torch.uint8)


def run(model, samples, pixels):
    """Loss per label, rows [R, D] (a leaf's stand-in: its gradient is kept), log probabilities of all samples in a row."""
    rows = torch.cat([model.image_rows(p) for p in pixels])
    rows.retain_grad()
    per_image, first, log_probs, loss, labels_counted = len(rows) // len(pixels), 0, [], 0.0, 0
    for ids, labels, images in samples:
        part = model.log_probs(ids, rows[first:first + images * per_image])
        first += images * per_image
        counted = labels >= 0
        loss = loss - part[counted, labels[counted]].sum()
        labels_counted += int(counted.sum())
        log_probs.append(part)
    return loss / labels_counted, rows, torch.cat(log_probs)


# ---------------------------------------------------------------- files
class Writer:
    KINDS = {torch.float64: ("F32", torch.float32), torch.int64: ("I32", torch.int32), torch.uint8: ("U8", torch.uint8)}

    def __init__(self, config):
        self.name, self.data = config.name, bytearray()
        self.lines = [f"config {k} {v}" for k, v in dataclasses.asdict(config).items() if k not in ("name", "seed")]
        for k, v in (("learning_rate", LEARNING_RATE), ("beta1", BETA1), ("beta2", BETA2), ("epsilon", EPSILON),
                     ("weight_decay", WEIGHT_DECAY), ("steps", STEPS)):
            self.lines.append(f"config {k} {v}")

    def add(self, name, tensor):
        kind, dtype = self.KINDS[tensor.dtype]
        dims = " ".join(str(d) for d in tensor.shape)
        self.lines.append(f"tensor {name} {kind} {tensor.dim()} {dims} {len(self.data)}")
        self.data += tensor.detach().to(dtype).contiguous().numpy().tobytes()
        self.data += bytes(-len(self.data) % 4)

    def close(self):
        with open(self.name + ".txt", "w", encoding="ascii") as file:
            file.write("\n".join(self.lines) + "\n")
        with open(self.name + ".bin", "wb") as file:
            file.write(self.data)
        print(f"{self.name}: {len(self.data)} bytes")


def generate(config):
    rng = torch.Generator().manual_seed(config.seed)
    weights = make_weights(config, rng)
    samples, pixels = make_samples(config, rng)
    writer = Writer(config)
    writer.add("pixels", pixels)
    writer.add("ids", torch.cat([ids for ids, _, _ in samples]))
    writer.add("labels", torch.cat([labels for _, labels, _ in samples]))
    writer.add("lengths", torch.tensor([len(ids) for ids, _, _ in samples]))
    for name, value in weights.items():
        writer.add("weight/" + name, value)

    groups = [{"params": [w for n, w in weights.items() if has_decay(n)], "weight_decay": WEIGHT_DECAY},
              {"params": [w for n, w in weights.items() if not has_decay(n)], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(BETA1, BETA2), eps=EPSILON)
    model, losses = Model(config, weights), []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss, rows, log_probs = run(model, samples, pixels)
        loss.backward()
        losses.append(loss.item())
        if step == 1:
            writer.add("log_probs", log_probs)
            writer.add("rows", rows)
            writer.add("rows_grad", rows.grad)
            for name, value in weights.items():
                writer.add("grad/" + name, value.grad)
        optimizer.step()
        for name, value in weights.items():
            writer.add(f"step{step}/{name}", value)
    writer.add("loss", torch.tensor(losses))
    writer.close()
    print("  losses:", losses)


if __name__ == "__main__":
    for case in CASES:
        generate(case)
