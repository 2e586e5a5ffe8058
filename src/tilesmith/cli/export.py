"""Writing a decoder to a folder that other programs read, with what plain PyTorch makes of a prompt beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from tilesmith.cli.checkpoint import LanguageModel
from tilesmith.cli.own_decoder import OwnLlama
from tilesmith.cli.text import BytePairs
from tilesmith.engine import ops, use
from tilesmith.engine.backends import REFERENCE
from tilesmith.nn import Decoder, DecoderConfig, generate

NEW_TOKENS = 32


def export(
    folder: Path, config: DecoderConfig, weights: Mapping[str, Tensor], pairs: BytePairs, prompt: str
) -> tuple[Path, ...]:
    """Write a Llama of `config` to `folder`, in float32 and as `LanguageModel.save` does, and return the files.

    weights: the state dict of a `Decoder`, or of what holds one as "model." or "decoder.". prompt: what the reference
    continues.

    reference.json beside the model: what plain PyTorch makes of the prompt: its tokens, the logits after it in float64,
    the likeliest continuation, and `budget`: what a float32 implementation may be off by, twice (the error of PyTorch's
    own + one rounding of the largest logit).
    """
    model = OwnLlama(config, plain=True)
    model.decoder.load_state_dict({_bare(name): w.detach().cpu().float() for name, w in weights.items()})
    folder.mkdir(parents=True, exist_ok=True)
    LanguageModel(model, pairs, config.max_positions).save(folder)
    reference = _reference(model.decoder, pairs.encode(prompt))
    (folder / "reference.json").write_text(json.dumps(reference), encoding="utf-8")
    return tuple(folder / name for name in ("config.json", "model.safetensors", "byte_pairs.json", "reference.json"))


def _bare(name: str) -> str:
    return name.removeprefix("model.").removeprefix("decoder.")


@torch.no_grad()
def _reference(decoder: Decoder, prompt: list[int]) -> dict:
    ids = torch.tensor([prompt])
    with use(**dict.fromkeys(ops(), REFERENCE)):
        logits = decoder(ids)[0, -1].double()
        new = generate(decoder, ids, NEW_TOKENS)[0]
        exact = decoder.double()(ids)[0, -1]
    eps = torch.finfo(torch.float32).eps
    budget = 2 * ((logits - exact).abs().max() + eps * exact.abs().max())
    return {"prompt": prompt, "logits": exact.tolist(), "budget": float(budget), "continuation": new.tolist()}
