"""Writes the demo page to a folder that any web server can serve: the page, its kernels as WGSL, a model's weights.

    python examples/webgpu/build.py OUT [--model FOLDER]

FOLDER is what `tilesmith demo --export FOLDER` writes, or another Llama of the same files; without one the page has no
decoder. PyTorch is not needed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import kernels

from tilesmith.codegen import KernelIR, wgsl
from tilesmith.hardware import limits_of
from tilesmith.kernels import KERNELS, fused_ops
from tilesmith.kernels.flash_attention import FlashAttentionConfig, create_flash_attention_kernel

PAGE = Path(__file__).parent / "page"
MODEL_FILES = ("config.json", "model.safetensors", "byte_pairs.json")
REFERENCE = "reference.json"
"""What the page compares the decoder with, if the folder has it."""

ATTENTION = {"heads": 4, "head_dim": 64, "block_size_q": 16, "block_size_kv": 32}
COLUMNS, HEAD_DIM, POSITIONS, DROPOUT = 512, 64, 2048, 0.1
ROWS = (50, 256, 8192)
"""Rows of the fused ops' checks, and of their timings on a processor and on a GPU."""

CONTEXT = 512
"""Tokens that the decoder's cache holds."""


class Site:
    """A folder of kernels; `add` writes one and returns what the page must know to launch it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "kernels").mkdir(parents=True, exist_ok=True)

    def add(self, name: str, ir: KernelIR) -> dict:
        """Write kernels/<name>.wgsl. Raises KernelError beyond what every WebGPU device grants."""
        path = f"kernels/{name}.wgsl"
        (self.folder / path).write_text(wgsl.generate(ir, limits_of("webgpu")), encoding="utf-8")
        return {
            "file": path,
            "entry": ir.name,
            "threads": ir.threads,
            "shared_bytes": ir.shared_bytes,
            "buffers": [{"name": b.name, "type": str(b.type), "access": b.access} for b in ir.buffers],
            "scalars": [{"name": s.name, "type": str(s.type)} for s in ir.scalars],
        }


def attention(site: Site) -> dict:
    """Attention with every key seen, and causal; and the weights that it never stores."""
    heads, head_dim, q, kv = ATTENTION.values()
    made = dict(ATTENTION)
    for name, causal in (("full", False), ("causal", True)):
        config = FlashAttentionConfig(q, kv, head_dim, causal=causal, return_lse=True)
        made[name] = site.add(f"flash_attention_{name}", create_flash_attention_kernel(config))
    made["weights"] = site.add("attention_weights", kernels.attention_weights(heads, heads, head_dim))
    return made


def fused(site: Site) -> dict:
    """The library's fused ops, by the name of what a check compares them with."""
    configs = {
        "swiglu": fused_ops.SwiGLUConfig(COLUMNS),
        "geglu": fused_ops.GeGLUConfig(COLUMNS, approximate="none"),
        "geglu_tanh": fused_ops.GeGLUConfig(COLUMNS),
        "residual_layer_norm_pre": fused_ops.ResidualLayerNormConfig(COLUMNS),
        "residual_layer_norm_post": fused_ops.ResidualLayerNormConfig(COLUMNS, placement="post"),
        "rms_norm_rope": fused_ops.RMSNormRoPEConfig(COLUMNS, HEAD_DIM, POSITIONS),
        "softmax": fused_ops.SoftmaxDropoutConfig(COLUMNS, causal=True),
        "softmax_dropout": fused_ops.SoftmaxDropoutConfig(COLUMNS, dropout=DROPOUT),
        "layer_norm_linear": fused_ops.LayerNormLinearConfig(COLUMNS),
    }
    create = {entry.config: entry.create for entry in KERNELS.values()}
    made = {}
    for name, config in configs.items():
        ir = create[type(config)](config)
        made[name] = site.add(name, ir) | {"grids": {rows: config.grid(rows) for rows in ROWS}}
    return {
        "columns": COLUMNS,
        "head_dim": HEAD_DIM,
        "positions": POSITIONS,
        "dropout": DROPOUT,
        "rows": ROWS,
        "ops": made,
    }


def decoder(site: Site, model: Path) -> dict:
    """The kernels of a decoder with the sizes in config.json. Raises ValueError for what they cannot run."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    plain = config.get("hidden_act", "silu") == "silu" and not config.get("rope_scaling")
    if config["model_type"] != "llama" or not plain:
        raise ValueError(f"{model} is no Llama with SwiGLU and plain rotary embedding")
    for name in ("hidden_size", "intermediate_size", "head_dim"):
        if config[name] % 4:
            raise ValueError(f"{name} of {model} is {config[name]}; the kernels read four numbers at a time")
    hidden, inter, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    slots, swiglu = min(CONTEXT, config["max_position_embeddings"]), fused_ops.SwiGLUConfig(inter, workgroup_size=64)
    made = {
        "embedding": kernels.embedding(hidden),
        "rms_norm": kernels.rms_norm(hidden),
        "linear": kernels.linear(),
        "linear_added": kernels.linear(accumulate=True),
        "linear_row": kernels.linear_row(),
        "linear_row_added": kernels.linear_row(accumulate=True),
        "rope_append": kernels.rope_append(heads, kv_heads, head_dim, slots),
        "attention": kernels.cached_attention(heads, kv_heads, head_dim, slots),
        "weights": kernels.attention_weights(heads, kv_heads, head_dim),
        "swiglu": fused_ops.create_swiglu_kernel(swiglu),
    }
    return {
        "slots": slots,
        "reference": (model / REFERENCE).exists(),
        "threads": kernels.THREADS,
        "rows": kernels.ROWS,
        "outputs": kernels.OUTPUTS,
        "row_outputs": kernels.ROW_OUTPUTS,
        "swiglu_grids": [swiglu.grid(rows) for rows in range(slots + 1)],
        "kernels": {name: site.add(f"decoder_{name}", ir) for name, ir in made.items()},
    }


def build(out: Path, model: Path | None = None) -> None:
    """Write the page to `out`. Raises FileNotFoundError where `model` lacks a file, ValueError for another model."""
    shutil.copytree(PAGE, out, dirs_exist_ok=True)
    site = Site(out)
    manifest = {"attention": attention(site), "fused": fused(site), "decoder": None}
    if model is not None:
        (out / "model").mkdir(exist_ok=True)
        manifest["decoder"] = decoder(site, model)
        for name in (*MODEL_FILES, *[REFERENCE] * manifest["decoder"]["reference"]):
            shutil.copyfile(model / name, out / "model" / name)
    (out / "kernels.json").write_text(json.dumps(manifest), encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="a folder to serve")
    parser.add_argument("--model", type=Path, help="what `tilesmith demo --export` wrote")
    args = parser.parse_args()
    try:
        build(args.out, args.model)
    except FileNotFoundError as problem:
        sys.exit(f"{problem.filename} is missing; write a model with: tilesmith demo --export {args.model}")
    except ValueError as problem:
        sys.exit(str(problem))
    print(f"python -m http.server --directory {args.out}")


if __name__ == "__main__":
    main()
