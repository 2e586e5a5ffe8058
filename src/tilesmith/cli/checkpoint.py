"""A causal language model with its tokenizer: made new, read from a folder, written to one.

A `Decoder` of the library is written as a Hugging Face Llama, which it is: transformers reads the folder too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tilesmith.cli.own_decoder import OwnLlama
from tilesmith.cli.subject import Sizes
from tilesmith.cli.text import BytePairs
from tilesmith.nn import DecoderConfig

PAIRS = "byte_pairs.json"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
OWN = "tilesmith_decoder"


class Tokenizer(Protocol):
    """Text to tokens and back; the tokens are 0 to len - 1."""

    def __len__(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


@dataclass
class LanguageModel:
    """A model that takes `input_ids` and `labels` as Hugging Face's do, and its tokenizer.

    positions: how many tokens a row can have, None for any number. stop: tokens that end a text.
    """

    model: nn.Module
    tokenizer: Tokenizer
    positions: int | None
    stop: frozenset[int] = frozenset()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    @property
    def vocab(self) -> int:
        """How many tokens the model's output tells apart."""
        own = isinstance(self.model, OwnLlama)
        return self.model.decoder.config.vocab_size if own else self.model.config.get_text_config().vocab_size

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(p.numel() for p in self.model.parameters())

    def optimize(self) -> str:
        """Let the library's kernels serve the model; what that changed, in words."""
        if isinstance(self.model, OwnLlama):
            self.model.plain = False
            return "the decoder calls tilesmith.ops by itself"
        from tilesmith.models import optimize

        report = optimize(self.model).tilesmith_report
        return f"{len(report.replaced)} modules replaced, {len(report.skipped)} left alone"

    def prompt(self, text: str) -> list[int]:
        """The tokens of a text that is to be continued, with those that begin one."""
        return [*getattr(self.tokenizer, "beginning", ()), *self.tokenizer.encode(text)]

    def save(self, folder: Path) -> None:
        """Write weights, configuration and tokenizer into a folder."""
        if isinstance(self.model, OwnLlama):
            _save_own(self.model, folder)
        else:
            self.model.save_pretrained(folder)
        if isinstance(self.tokenizer, BytePairs):
            self.tokenizer.save(folder / PAIRS)
        else:
            self.tokenizer.save(folder)


class PretrainedTokens:
    """A Hugging Face tokenizer. beginning: the tokens that it puts before a text."""

    def __init__(self, folder: Path):
        from transformers import AutoTokenizer

        self.inner = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        ids, plain = self.inner("a")["input_ids"], self.encode("a")
        self.beginning = ids[: ids.index(plain[0])] if plain else []

    def __len__(self) -> int:
        return len(self.inner)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without any that begin or end it."""
        return self.inner(text, add_special_tokens=False, verbose=False)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        """The text of tokens; special ones are left out."""
        return self.inner.decode(ids, skip_special_tokens=True)

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files."""
        self.inner.save_pretrained(folder)


def new(sizes: Sizes, tokenizer: BytePairs, positions: int) -> LanguageModel:
    """A decoder of the library with random weights. Raises ValueError for sizes that do not fit together."""
    config = DecoderConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inter,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        max_positions=positions,
        init_std=sizes.deviation,
        num_experts=sizes.experts,
        experts_per_token=sizes.chosen,
    )
    return LanguageModel(OwnLlama(config, plain=True), tokenizer, positions)


def read(folder: Path, dtype: torch.dtype | None = None) -> LanguageModel:
    """The model of a folder that `save` or Hugging Face transformers wrote; dtype None: as its weights are.

    Raises OSError or ValueError, in words, for a folder that holds none.
    """
    config = configuration(folder)
    if OWN in config:
        return _read_own(folder, config[OWN], dtype)
    model = pretrained(folder, dtype)
    return _of_hugging_face(model, BytePairs.load(folder / PAIRS) if (folder / PAIRS).is_file() else None, folder)


def adopt(path: Path, dtype: torch.dtype, learn: Callable[[int], BytePairs]) -> LanguageModel:
    """A Hugging Face checkpoint to go on training or, where path is a config.json, a model with random weights.

    learn: makes a tokenizer of at most so many tokens, where none comes with the model. Raises as `read` does, and
    ValueError where the tokenizer has tokens that the model has not.
    """
    folder = path.parent if path.is_file() else path
    if OWN in configuration(folder) and path.is_dir():
        return read(folder, dtype)
    model = pretrained(path, dtype)
    if any(folder.glob("tokenizer*")) or any(folder.glob("*.model")):
        return _of_hugging_face(model, None, folder)
    return _of_hugging_face(model, learn(model.config.get_text_config().vocab_size), folder)


def configuration(folder: Path) -> Mapping[str, Any]:
    """The folder's config.json. Raises FileNotFoundError or ValueError where there is none."""
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no {CONFIG}, so it is not a checkpoint")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ValueError(f"{path} is not JSON: {problem}") from problem
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a configuration of a model")
    return found


def pretrained(path: Path, dtype: torch.dtype | None) -> nn.Module:
    """A causal language model of Hugging Face transformers: of a folder, or of a config.json, with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    if path.is_dir():
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype or "auto", local_files_only=True)
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    return AutoModelForCausalLM.from_config(config, dtype=dtype or torch.float32)


def fit(model: nn.Module, weights: Mapping[str, Tensor], where: str) -> None:
    """Load weights into a model. Raises ValueError naming the first that is missing, too many, or of another shape."""
    known = model.state_dict()
    for name in sorted(known.keys() | weights.keys()):
        if name not in weights or name not in known:
            raise ValueError(f"{where} does not fit: {name} is {'not in it' if name in known else 'not in the model'}")
        if known[name].shape != weights[name].shape:
            sizes = f"{list(weights[name].shape)}, the model's {list(known[name].shape)}"
            raise ValueError(f"{where} does not fit: {name} is {sizes}")
    model.load_state_dict(weights)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU. Raises OSError or ValueError where it is none."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as problem:
        raise ValueError(f"{path} is not a whole safetensors file: {problem}") from problem


def _of_hugging_face(model: nn.Module, pairs: BytePairs | None, folder: Path) -> LanguageModel:
    tokenizer = PretrainedTokens(folder) if pairs is None else pairs
    config = model.config.get_text_config()
    if len(tokenizer) > config.vocab_size:
        raise ValueError(f"its tokenizer has {len(tokenizer):,} tokens, its model only {config.vocab_size:,}")
    stop = getattr(model.generation_config, "eos_token_id", None) if pairs is None else None
    stops = stop if isinstance(stop, list) else [] if stop is None else [stop]
    return LanguageModel(model, tokenizer, getattr(config, "max_position_embeddings", None), frozenset(stops))


def _read_own(folder: Path, fields: Mapping[str, Any], dtype: torch.dtype | None) -> LanguageModel:
    try:
        config = DecoderConfig(**fields)
    except TypeError as problem:
        raise ValueError(f"{folder / CONFIG} is of another version: {problem}") from problem
    for name in (WEIGHTS, PAIRS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} holds no {name}")
    weights = {name.removeprefix("model."): value for name, value in load_tensors(folder / WEIGHTS).items()}
    model = OwnLlama(config, plain=True)
    model.to(dtype or next(iter(weights.values())).dtype)
    fit(model.decoder, weights, str(folder / WEIGHTS))
    return LanguageModel(model, BytePairs.load(folder / PAIRS), config.max_positions)


def _save_own(model: OwnLlama, folder: Path) -> None:
    from safetensors.torch import save_file

    config = model.decoder.config
    llama = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": model.decoder.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        OWN: asdict(config),
    }
    if config.num_experts:  # no model of transformers has these layers
        llama |= {"architectures": [], "model_type": "tilesmith"}
    (folder / CONFIG).write_text(json.dumps(llama, indent=1), encoding="utf-8")
    state = model.decoder.state_dict()
    named = {n if n.startswith("lm_head.") else f"model.{n}": v.cpu().contiguous() for n, v in state.items()}
    save_file(named, folder / WEIGHTS, metadata={"format": "pt"})
