"""The model that the demo works on, the tokens it is trained on, and how it writes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from tilesmith.cli.text import BytePairs
from tilesmith.cli.writing import sample
from tilesmith.models import optimize, report
from tilesmith.models.cache_argument import cache_parameter
from tilesmith.nn import DecoderConfig

PROMPT = "The following example shows how"
POSITIONS = 2048


@dataclass(frozen=True)
class Sizes:
    """Sizes of a Llama model. deviation: of the initial weights. experts: above 0, each layer's MLP is that many
    experts, `inter` wide, of which each token has `chosen`."""

    vocab: int
    hidden: int
    inter: int
    layers: int
    heads: int
    kv_heads: int
    deviation: float
    experts: int = 0
    chosen: int = 2


SMALL = Sizes(vocab=1024, hidden=128, inter=352, layers=4, heads=4, kv_heads=2, deviation=0.06)
LARGE = Sizes(vocab=8192, hidden=1024, inter=2816, layers=12, heads=16, kv_heads=8, deviation=0.02)


@dataclass(frozen=True)
class Written:
    """What a model wrote: all tokens, how many of them were given, seconds, and how far the cache changed a logit."""

    ids: list[int]
    prompt: int
    prefill: float
    decode: float
    distance: float


@dataclass(frozen=True)
class Subject:
    """A causal language model, how to optimise a copy of it, and its text as tokens [N], on the CPU.

    config, pairs: the sizes and the byte pairs of a model that `build` made.
    """

    name: str
    model: nn.Module
    optimise: Callable[[nn.Module], tuple[nn.Module, str]]
    tokens: Tensor
    vocab: int
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    new_tokens: int = 96
    config: DecoderConfig | None = None
    pairs: BytePairs | None = None

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(p.numel() for p in self.model.parameters())

    @torch.no_grad()
    def write(self, model: nn.Module, seed: int, progress: Callable[[int], None]) -> Written:
        """Sample on from the prompt (temperature 0.8, 40 likeliest tokens), one token a step with a KV cache."""
        device = next(model.parameters()).device
        draw = torch.Generator().manual_seed(seed)
        ids = self.encode(PROMPT)
        prompt = len(ids)
        cache = cache_parameter(model.forward)
        start = time.perf_counter()
        out = model(input_ids=torch.tensor([ids], device=device), use_cache=True)
        seen = [out.logits[0, -1].float().cpu()]
        prefill = time.perf_counter() - start
        for count in range(self.new_tokens):
            ids.append(sample(seen[-1], draw, temperature=0.8, top_k=40))
            progress(count + 1)
            if count + 1 < self.new_tokens:
                step = torch.tensor([ids[-1:]], device=device)
                out = model(input_ids=step, use_cache=True, **{cache: getattr(out, cache)})
                seen.append(out.logits[0, -1].float().cpu())
        decode = time.perf_counter() - start - prefill
        whole = model(input_ids=torch.tensor([ids[:-1]], device=device)).logits[0, prompt - 1 :].float().cpu()
        return Written(ids, prompt, prefill, decode, float((torch.stack(seen) - whole).abs().max()))


def build(
    text: str,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    progress: Callable[[int, int], None] = lambda size, wanted: None,
) -> Subject:
    """A new Llama model with random weights, sized for the device, and byte pairs learned from the text."""
    sizes = SMALL if device.type == "cpu" else LARGE
    pairs = BytePairs.train(text, sizes.vocab, lambda size: progress(size, sizes.vocab))
    tokens = torch.tensor(pairs.encode(text))
    torch.manual_seed(seed)
    config = _config(sizes)
    made = _hugging_face_llama(sizes) if find_spec("transformers") else _own_llama(config)
    name, model, optimise = made
    return Subject(
        name,
        model.to(device, dtype),
        optimise,
        tokens,
        sizes.vocab,
        pairs.encode,
        pairs.decode,
        config=config,
        pairs=pairs,
    )


def load(folder: Path, text: str, device: torch.device, dtype: torch.dtype) -> Subject:
    """A local Hugging Face checkpoint and its own tokenizer. Raises OSError or ValueError where there is none."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).to(device)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokens = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    vocab = model.config.get_text_config().vocab_size
    name = f"{folder.name} ({type(model).__name__})"
    return Subject(name, model, optimise_in_place, tokens, vocab, tokenizer.encode, tokenizer.decode)


def optimise_in_place(model: nn.Module) -> tuple[nn.Module, str]:
    """`tilesmith.optimize` on the model, and its report in short."""
    return model, str(report(optimize(model)))


def _hugging_face_llama(sizes: Sizes) -> tuple[str, nn.Module, Callable[[nn.Module], tuple[nn.Module, str]]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inter,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        initializer_range=sizes.deviation,
        vocab_size=sizes.vocab,
        max_position_embeddings=POSITIONS,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return "LlamaForCausalLM of Hugging Face transformers", LlamaForCausalLM(config), optimise_in_place


def _config(sizes: Sizes) -> DecoderConfig:
    """The same Llama as the library's own decoder: transformers' defaults are DecoderConfig's."""
    return DecoderConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inter,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        max_positions=POSITIONS,
        init_std=sizes.deviation,
    )


def _own_llama(config: DecoderConfig) -> tuple[str, nn.Module, Callable[[nn.Module], tuple[nn.Module, str]]]:
    from tilesmith.cli.own_decoder import OwnLlama

    def optimise(model: OwnLlama) -> tuple[nn.Module, str]:
        model.plain = False
        return model, "The decoder calls tilesmith.ops by itself; the original runs their references, plain PyTorch."

    return "the decoder of tilesmith.nn", OwnLlama(config, plain=True), optimise
