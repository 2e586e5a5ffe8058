"""The layers of a static cache of transformers while one token is made: they write it where the device says.

Legend: B batch, G kv heads, S slots, D head dim.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tilesmith import ops
from tilesmith.models.reach import reaches


class StaticLayers:
    """The layers of one cache. Those that keep a window count their tokens on the host too, and what they do depends on
    that number only through whether the window has filled (`filled`)."""

    def __init__(self, cache: Any):
        self._cache = cache
        self._windows = [layer for layer in cache.layers if layer.is_sliding]
        self._lengths: Tensor | None = None  # int64 [layers]: what each layer has as its `cumulative_length`

    @property
    def windows(self) -> set[int]:
        """The sizes of windows."""
        return {layer.max_cache_len for layer in self._windows}

    def filled(self) -> tuple[bool, ...]:
        """Which windows have no slot left, by layer that has one."""
        return tuple(layer.cumulative_length_int >= layer.max_cache_len for layer in self._windows)

    def counts(self) -> list[int]:
        """How many tokens each window has seen."""
        return [layer.cumulative_length_int for layer in self._windows]

    def count(self, numbers: Sequence[int]) -> None:
        """Put `counts` back, or what a replay makes of them."""
        for layer, number in zip(self._windows, numbers, strict=True):
            layer.cumulative_length_int = number

    @contextlib.contextmanager
    def prompt(self, whole: bool) -> Iterator[None]:
        """Empties the cache for a prompt. Inside, a cache that was used before says that it is empty as a new one does,
        by a number: masks are made by it. whole: the prompt comes in one piece."""
        self._cache.reset()
        with _replaced(self._cache.layers if whole else [], "get_seq_length", lambda layer: lambda: 0):
            yield
        if self._lengths is None and all(layer.is_initialized for layer in self._cache.layers):
            self._lengths = torch.stack([layer.cumulative_length for layer in self._cache.layers])
            for layer, length in zip(self._cache.layers, self._lengths.unbind()):
                layer.cumulative_length = length

    @contextlib.contextmanager
    def one_token(self, windows_at: int) -> Iterator[None]:
        """Inside, layers with a slot left give their length as a tensor, so that a mask made of it holds for any
        length, and write one token by one launch; all lengths grow by one behind it. Windows that have filled say that
        their slots begin at `windows_at`, wherever they are."""
        full = [layer for layer, filled in zip(self._windows, self.filled()) if filled]
        left = [layer for layer in self._cache.layers if not any(layer is other for other in full)]
        windows = [layer for layer in left if layer.is_sliding]
        places: list[Tensor] = []
        with (
            _replaced(windows, "get_seq_length", lambda layer: lambda: layer.cumulative_length),
            _replaced(full, "get_seq_length", lambda layer: lambda: windows_at + layer.max_cache_len - 1),
            _replaced(full, "get_mask_sizes", lambda layer: lambda tokens: (layer.max_cache_len, windows_at)),
            _replaced(full, "update", _shifter),
            _replaced(left if self._lengths is not None else [], "update", lambda layer: _writer(layer, places)),
        ):
            yield
        if self._lengths is not None:  # else some layer has not been given any token, and each counts by itself
            self._lengths.add_(1)


def _writer(layer: Any, places: list[Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """What stands for a layer's `update` with keys and values [B, G, 1, D]. places: the slot of each row, int64 [B],
    once some layer has asked for it; it is the same in all."""

    def update(keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not places:
            places.append(layer.cumulative_length.expand(keys.shape[0]).contiguous())
        known = keys.shape[:3] == values.shape[:3] and keys.dtype is not torch.float64
        if known and reaches("kv_cache_append", keys):
            ops.kv_cache_append(layer.keys, layer.values, keys, values, places[0])
        else:
            layer.keys.index_copy_(2, places[0][:1], keys)
            layer.values.index_copy_(2, places[0][:1], values)
        if layer.is_sliding:
            layer.cumulative_length_int += 1
        return layer.keys, layer.values

    return update


def _shifter(layer: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """What stands for the `update` of a window that has filled, where the oldest token goes: the layer's own makes a
    tensor on the host."""

    def update(keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        for held, new in ((layer.keys, keys), (layer.values, values)):
            held.copy_(torch.cat((held[:, :, 1:], new), dim=2))
        layer.cumulative_length_int += 1
        return layer.keys, layer.values

    return update


@contextlib.contextmanager
def _replaced(layers: Sequence[Any], name: str, instead: Callable[[Any], Callable[..., Any]]) -> Iterator[None]:
    """Methods of layers replaced on the instances, and put back."""
    try:
        for layer in layers:
            setattr(layer, name, instead(layer))
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop(name, None)
