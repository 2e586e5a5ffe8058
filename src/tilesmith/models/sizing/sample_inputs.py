"""Inputs for a whole model: made from its configuration, or a caller's sample brought to any batch size."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilesmith.engine.argument_checks import size
from tilesmith.nn import AttentionLayer, Decoder
from tilesmith.rewrite import original_class


@dataclass(frozen=True)
class Sample:
    """The inputs of one call; `dims` are the batch dimensions, in order, of the tensors of args and kwargs that have
    one, and -1 for the others."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dims: tuple[int, ...]

    def batched(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """args and kwargs for so many rows; rows are repeated or cut."""
        dims = iter(self.dims)
        return (
            tuple(_sized(value, next(dims), batch) for value in self.args),
            {name: _sized(value, next(dims), batch) for name, value in self.kwargs.items()},
        )

    def step(self, model: nn.Module, batch: int, *, backward: bool = True) -> None:
        """A forward of so many rows and, if asked for, a backward from its loss; without one no gradients are kept."""
        args, kwargs = self.batched(batch)
        with torch.set_grad_enabled(backward):
            loss = loss_of(model(*args, **kwargs)) if backward else model(*args, **kwargs)
        if backward:
            loss.backward()

    def on(self, device: torch.device) -> Sample:
        """The same inputs on a device, apart from the caller's graph: a backward leaves theirs without gradients."""
        moved = [_apart(value.to(device)) if isinstance(value, Tensor) else value for value in _values(self)]
        count = len(self.args)
        return Sample(tuple(moved[:count]), dict(zip(self.kwargs, moved[count:])), self.dims)


def _values(sample: Sample) -> Iterator[Any]:
    yield from sample.args
    yield from sample.kwargs.values()


def _apart(x: Tensor) -> Tensor:
    return x.detach().requires_grad_() if x.requires_grad else x


def _sized(value: Any, dim: int, batch: int) -> Any:
    if dim < 0:
        return value
    rows = torch.arange(batch, device=value.device) % value.shape[dim]
    return value.index_select(dim, rows)


def loss_of(out: Any) -> Tensor:
    """What to differentiate: the loss that a model returns, else the sum of its first floating output.

    Raises ValueError where the outputs have no gradient.
    """
    loss = getattr(out, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    for value in _tensors(out):
        if value.is_floating_point() and value.requires_grad:
            return value if value.ndim == 0 else value.sum()
    raise ValueError("the model returns no floating tensor with a gradient; are all of its parameters frozen?")


def _tensors(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, Mapping):
        for value in out.values():
            yield from _tensors(value)
    elif isinstance(out, (tuple, list)):
        for value in out:
            yield from _tensors(value)


def most_tokens(model: nn.Module) -> int | None:
    """The positions that a model has, where its configuration says so."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in ("max_position_embeddings", "n_positions", "max_target_positions", "max_positions"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def sample_of(model: nn.Module, sample: Any = None, *, tokens: int = 512) -> Sample:
    """The inputs of a model: the caller's, or made from what the model says of itself.

    sample: a tensor, a tuple of arguments, or a dict of keyword arguments, of one batch; every tensor whose first
    dimension is that of the first tensor is taken to have a row for each sequence. tokens: the length to make, no more
    than the model has positions for. Known are models of transformers on ids, pixels or mel features, wrapped by PEFT
    or not, `nn.Decoder`, torch's transformer layers and stacks, and an `nn.Sequential` that begins with a Linear or an
    Embedding.

    Raises ValueError where the inputs of a model cannot be told, TypeError for a sample of another kind.
    """
    size("sample_of", "tokens", tokens)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if sample is not None:
        return _given(sample).on(device)
    limit = most_tokens(model)
    tokens = tokens if limit is None else min(tokens, limit)
    found = _of_transformers(model, tokens) or _of_modules(model, tokens)
    if found is None:
        raise ValueError(
            f"the inputs of {original_class(type(model)).__name__} cannot be inferred from the model; give sample=, a "
            "tensor, a tuple or a dict of one batch"
        )
    return found.on(device)


def _given(sample: Any) -> Sample:
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(sample, Tensor):
        args = (sample,)
    elif isinstance(sample, (tuple, list)):
        args = tuple(sample)
    elif isinstance(sample, Mapping):
        kwargs = dict(sample)
    else:
        raise TypeError(f"sample must be a tensor, a tuple or a dict, got {type(sample).__name__}")
    values = [*args, *kwargs.values()]
    rows = next((value.shape[0] for value in values if isinstance(value, Tensor) and value.ndim), None)
    if not rows:
        raise ValueError("sample has no tensor with a first dimension of at least 1, which is taken for the batch")
    dims = tuple(0 if isinstance(v, Tensor) and v.ndim and v.shape[0] == rows else -1 for v in values)
    return Sample(args, kwargs, dims)


def _ids(tokens: int, classes: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    low = min(4, classes - 1)  # past the special tokens of most vocabularies
    return torch.randint(low, classes, (1, tokens), generator=generator)


def _floats(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _named(**kwargs: Tensor) -> Sample:
    return Sample((), kwargs, (0,) * len(kwargs))


def _of_transformers(model: nn.Module, tokens: int) -> Sample | None:
    transformers = sys.modules.get("transformers")
    wrapped = getattr(model, "get_base_model", None)  # of PEFT, whose forward has the arguments of the base's
    model = wrapped() if callable(wrapped) else model
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return None
    config, given, dtype = model.config, model.main_input_name, _dtype(model)
    text = config.get_text_config()
    if given == "input_ids":
        ids = _ids(tokens, text.vocab_size)
        inputs = {"input_ids": ids, **_labels(model, ids)}
        if getattr(config, "is_encoder_decoder", False) and "labels" not in inputs:
            inputs["decoder_input_ids"] = ids.clone()
        return _named(**inputs)
    if given == "pixel_values" and isinstance(getattr(config, "image_size", None), (int, list, tuple)):
        side = config.image_size
        height, width = (side, side) if isinstance(side, int) else side
        pixels = _floats(1, getattr(config, "num_channels", 3), height, width, dtype=dtype)
        return _named(pixel_values=pixels, **_labels(model, pixels))
    if given == "input_features" and hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        frames = _floats(1, config.num_mel_bins, 2 * config.max_source_positions, dtype=dtype)
        return _named(input_features=frames, **_labels(model, _ids(tokens, text.vocab_size)))
    return None


def _labels(model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    cls = original_class(type(model))
    if "labels" not in inspect.signature(cls.forward).parameters:
        return {}
    if "SequenceClassification" in cls.__name__ or "ImageClassification" in cls.__name__:
        kind = torch.float32 if model.config.num_labels == 1 else torch.int64
        return {"labels": torch.zeros(1, dtype=kind)}
    if "TokenClassification" in cls.__name__:
        return {"labels": torch.zeros_like(inputs)}
    try:
        head = model.get_output_embeddings()
    except NotImplementedError:
        head = None
    return {"labels": inputs.clone()} if head is not None and not inputs.is_floating_point() else {}


def _of_modules(model: nn.Module, tokens: int) -> Sample | None:
    dtype = _dtype(model)
    if isinstance(model, Decoder):
        ids = _ids(tokens, model.config.vocab_size)
        return Sample((ids, ids.clone()), {}, (0, 0))
    if isinstance(model, AttentionLayer):
        return Sample((_floats(1, tokens, model.d_model, dtype=dtype),), {}, (0,))
    layer = model.layers[0] if isinstance(model, (nn.TransformerEncoder, nn.TransformerDecoder)) else model
    if isinstance(layer, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        attention = layer.self_attn
        shape = (1, tokens) if attention.batch_first else (tokens, 1)
        x, dim = _floats(*shape, attention.embed_dim, dtype=dtype), 0 if attention.batch_first else 1
        pair = isinstance(layer, nn.TransformerDecoderLayer)
        return Sample((x, x.clone()) if pair else (x,), {}, (dim,) * (2 if pair else 1))
    while isinstance(layer, nn.Sequential) and len(layer):
        layer = layer[0]
    if isinstance(layer, nn.Embedding):
        return Sample((_ids(tokens, layer.num_embeddings),), {}, (0,))
    if isinstance(layer, nn.Linear) and layer is not model:
        return Sample((_floats(1, layer.in_features, dtype=dtype),), {}, (0,))
    return None
