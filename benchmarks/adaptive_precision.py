"""Adaptive precision: what a small language model loses at equal bytes, adaptive beside uniform widths, and the time of a
product with one packed weight.

    python benchmarks/adaptive_precision.py results.json [--cpu] [--seeds 3]

Trains a byte-level model on the sources of Python's standard library for each seed, then packs it at 2.5, 3, 3.5 and 4
bits a weight. Uniform widths pass through the same quantiser and the same groups; their bytes leave out the tables of
tiles, which they do not need, and at 2.5 and 3.5 bits their loss is interpolated, in its logarithm, between whole bits. On
a GPU also the time of y = x W^T at one row, 4096 x 14336, beside bf16 and torchao's int4 where that can be imported.
"""

import argparse
import json
import math
import statistics
import sys
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, inner = heads, width * 8 // 3 // 64 * 64
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class ByteModel(nn.Module):
    """A decoder over bytes with learned positions."""

    def __init__(self, width: int, layers: int, heads: int, length: int):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 if "blocks" not in name else width**-0.5 / (math.sqrt(2 * layers) if last else 1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def corpus() -> Tensor:
    """The bytes of the standard library's modules, file by file in a fixed random order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [p for p in sorted(root.rglob("*.py")) if "site-packages" not in p.parts]
    order = torch.randperm(len(paths), generator=torch.Generator().manual_seed(0)).tolist()
    return torch.frombuffer(bytearray(b"\n".join(paths[i].read_bytes() for i in order)), dtype=torch.uint8)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """The mean cross-entropy of a batch of bytes [B, T + 1]."""
    return F.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())


def windows(data: Tensor, length: int, count: int, seed: int, device: torch.device) -> Tensor:
    """`count` stretches of length + 1 bytes from anywhere in data."""
    start = torch.randint(len(data) - length - 1, (count, 1), generator=torch.Generator().manual_seed(seed))
    return data[start + torch.arange(length + 1)].long().to(device)


def trained(seed: int, data: Tensor, size: dict, device: torch.device) -> ByteModel:
    """A model after `size["steps"]` steps of AdamW."""
    torch.manual_seed(seed)
    model = ByteModel(size["width"], size["layers"], size["heads"], size["length"]).to(device)
    decayed = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=size["lr"], betas=(0.9, 0.95), fused=device.type == "cuda")
    steps = size["steps"]
    for step in range(steps):
        share = min(1.0, (step + 1) / 100) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = size["lr"] * share
        batch = windows(data, size["length"], size["batch"], seed * 10_000_000 + step, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()
