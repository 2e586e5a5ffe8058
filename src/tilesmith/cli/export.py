"""Writing a decoder to a folder that other programs read: Hugging Face's files, its byte pairs, and a reference."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from tilesmith.cli.text import BytePairs
from tilesmith.engine import ops, use
from tilesmith.engine.backends import REFERENCE
from tilesmith.nn import Decoder, DecoderConfig, generate

NEW_TOKENS = 32


def export(
    folder: Path, config: DecoderConfig, weights: Mapping[str, Tensor], pairs: BytePairs, prompt: str
) -> tuple[Path, ...]:
    """Write a Llama of `config` to `folder`, and return the files.

    weights: the state dict of a `Decoder`, or of what holds one as "model." or "decoder.". prompt: what the reference
    continues.

    config.json, model.safetensors: as Hugging Face writes them, in float32. byte_pairs.json: the merges, in order:
    token 256 + i is merges[i]. reference.json: what plain PyTorch makes of the prompt: its tokens, the logits after it
    in float64, the likeliest continuation, and `budget`: what a float32 implementation may be off by, twice (the error
    of PyTorch's own + one rounding of the largest logit).
    """
    weights = {_bare(name): w.detach().cpu().float() for name, w in weights.items()}
    folder.mkdir(parents=True, exist_ok=True)
    reference = _reference(config, weights, pairs.encode(prompt))
    pairs.save(folder / "byte_pairs.json")
    data = {
        "config.json": json.dumps(_hugging_face(config), indent=2).encode(),
        "model.safetensors": safetensors({f"model.{n}" if n != "lm_head.weight" else n: w for n, w in weights.items()}),
        "reference.json": json.dumps(reference).encode(),
    }
    for name, content in data.items():
        (folder / name).write_bytes(content)
    return tuple(folder / name for name in (*data, "byte_pairs.json"))


def safetensors(tensors: Mapping[str, Tensor]) -> bytes:
    """float32 tensors in the safetensors format: a length of eight bytes, a JSON header, the data in order."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, t in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(t.contiguous().numpy().astype("<f4", copy=False).tobytes() for t in tensors.values())
    return struct.pack("<Q", len(text)) + text + data


def _bare(name: str) -> str:
    return name.removeprefix("model.").removeprefix("decoder.")


def _hugging_face(config: DecoderConfig) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads or config.num_heads,
        "head_dim": config.head_dim or config.hidden_size // config.num_heads,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "float32",
    }


@torch.no_grad()
def _reference(config: DecoderConfig, weights: Mapping[str, Tensor], prompt: list[int]) -> dict:
    decoder, ids = Decoder(config), torch.tensor([prompt])
    decoder.load_state_dict(weights)
    with use(**dict.fromkeys(ops(), REFERENCE)):
        logits = decoder(ids)[0, -1].double()
        new = generate(decoder, ids, NEW_TOKENS)[0]
        exact = decoder.double()(ids)[0, -1]
    eps = torch.finfo(torch.float32).eps
    budget = 2 * ((logits - exact).abs().max() + eps * exact.abs().max())
    return {"prompt": prompt, "logits": exact.tolist(), "budget": float(budget), "continuation": new.tolist()}
