"""Masks of transformers models as arguments of attention: padding, windows and caches, not a dense [T, S] mask."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tilesmith import ops
from tilesmith.engine.torch_private import constant_in_graphs
from tilesmith.models.reach import reaches_device


class KeyMask(BlockMask):
    """Which keys the queries of a batch see, as what `attention` takes; a bool mask [B, 1, T, S] for all others.

    causal, window (keys to the left and right, -1 unlimited): as in `ops.Mask`. lengths int32 [B]: filled slots of a
    cache. documents int32 [B, T] and [B, S]: ids of queries and keys, -1 for a key that is padding.

    It is a BlockMask only in name: transformers hands masks that are tensors or BlockMasks of four dims through.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        device: torch.device,
        causal: bool,
        window: tuple[int, int] | None = None,
        lengths: Tensor | None = None,
        documents: tuple[Tensor, Tensor] | None = None,
    ):
        self.sizes, self.where, self.causal, self.window = shape, device, causal, window
        self.lengths, self.documents = lengths, documents
        self.dense: Tensor | None = None

    def mask(self) -> ops.Mask:
        """All of it but `lengths`."""
        return ops.Mask(causal=self.causal, window=self.window, documents=self.documents)

    def tensor(self) -> Tensor:
        """The same as a bool tensor [B, 1, T, S]: True may attend."""
        if self.dense is not None:
            return self.dense
        batch, _, tokens, keys = self.sizes
        named = {"batch": batch, "device": self.where, "kv_lengths": self.lengths}
        dense = self.mask().materialize(tokens, keys, **named)
        if not torch.compiler.is_compiling():
            self.dense = dense
        return dense

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.sizes

    @property
    def device(self) -> torch.device:
        return self.where

    @property
    def ndim(self) -> int:
        return 4

    @property
    def dtype(self) -> torch.dtype:
        return torch.bool

    def to(self, *where: Any, **named: Any) -> KeyMask | Tensor:
        """As `Tensor.to`; a dense mask where more than the device changes."""
        given = [*where, *(value for name, value in named.items() if name != "non_blocking")]
        if len(given) != 1 or not isinstance(given[0], (str, int, torch.device)):
            return self.tensor().to(*where, **named)
        device = torch.empty(0, device=given[0]).device
        lengths = None if self.lengths is None else self.lengths.to(*where, **named)
        documents = None if self.documents is None else tuple(x.to(*where, **named) for x in self.documents)
        return KeyMask(self.sizes, device, self.causal, self.window, lengths, documents)

    def contiguous(self, **named: Any) -> KeyMask:
        """Itself: `generate` asks it of masks of static caches, and a dense one would cover slots that are empty."""
        return self

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*map(_real, args), **{name: _real(value) for name, value in (kwargs or {}).items()})

    def __repr__(self) -> str:
        parts = ["causal"] * self.causal + [f"window {self.window}"] * (self.window is not None)
        parts += [name for name in ("lengths", "documents") if getattr(self, name) is not None]
        return f"KeyMask({list(self.sizes)}, {', '.join(parts) or 'all'})"

    __str__ = __repr__


def _through(name: str) -> Callable[..., Any]:
    return lambda self, *others: getattr(self.tensor(), name)(*map(_real, others))


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "and", "or", "invert", "eq", "ne"):
    setattr(KeyMask, f"__{_name}__", _through(f"__{_name}__"))
KeyMask.__hash__ = object.__hash__


def _real(value: Any) -> Any:
    if isinstance(value, KeyMask):
        return value.tensor()
    return type(value)(map(_real, value)) if type(value) in (list, tuple) else value


def key_mask(**given: Any) -> KeyMask | Tensor | None:
    """The mask function that transformers calls before the layers, for attention by `attention_forward`.

    Its arguments are those of transformers' `sdpa_mask`. Returns None where causality, or nothing, says it all; a
    KeyMask where causality, a window, padding, packed documents and a cache's lengths do; else, and where no kernel of
    ours is, what `sdpa_mask` returns. While gradients are recorded, padding behind all tokens needs no mask under
    causality: only padding sees it, so what comes out for padding differs from what other implementations give there.
    Otherwise it may be asked for: behind right padding `generate` makes its first token from padding.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    # the first versions of transformers 5 pass cache_position in place of q_length
    if "q_length" in given and reaches_device("attention", torch.device(given.get("device", "cpu")).type):
        function = given.get("mask_function", causal_mask_function)
        rule = _rule(function)
        if rule is not None and rule.documents is not None and TOLD.known and TOLD.positions is None:
            rule = rule._replace(documents=None)
            given["allow_is_causal_skip"] = True  # as below
        if rule is None and torch.compiler.is_compiling() and _is_joined(function):
            rule = _compiled_rule(**given)
            if rule is not None:
                given["allow_is_causal_skip"] = True  # what forbade it was packing, which the rule tells
        if rule is not None and _fits(rule, **given):
            return _as_arguments(rule, **given)
    return sdpa_mask(**given)


def _fits(
    rule: _Rule,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    **others: Any,
) -> bool:
    """Whether positions are what `attention` takes them for: the last query stands at the last filled slot."""
    if attention_mask is not None and attention_mask.ndim != 2:
        return False
    if isinstance(q_offset, Tensor):
        reaches_all = rule.window is None or (rule.causal and kv_length <= rule.window[0] + 1)
        return kv_offset == 0 and reaches_all
    return rule.causal or rule.window is None or q_offset + q_length == kv_offset + kv_length


def _as_arguments(
    rule: _Rule,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **kwargs: Any,
) -> KeyMask | None:
    window, causal, documents, lengths = rule.window, rule.causal, rule.documents, None
    if window is not None and kv_length <= (window[0] if causal else min(window)) + 1:
        window = None
    if attention_mask is not None:
        padding = _slots(attention_mask, kv_length, kv_offset)
        full, behind = _LOOKED_AT.known(attention_mask, (kv_length, kv_offset))
        if not full and behind and not causal and window is None and documents is None:
            lengths = padding.sum(1, dtype=torch.int32)
        elif not full and (not (behind and causal and torch.is_grad_enabled()) or causal_by_mask(config)):
            documents = torch.where(padding, 0 if documents is None else documents, -1)
    if documents is not None:
        documents = documents.int()
        # queries that are padding themselves see what transformers lets them see
        whole = q_length == kv_length
        documents = documents.clamp(min=0) if whole else documents.new_zeros(batch_size, q_length), documents
    here = torch.device(device)
    empty = aligned = False
    if not isinstance(q_offset, Tensor):
        empty = q_offset == kv_offset == 0 and q_length > 1
        aligned = q_offset + q_length == kv_offset + kv_length
    if causal and not aligned:
        filled = torch.as_tensor(q_offset + q_length - kv_offset, dtype=torch.int32, device=here)
        lengths = filled.reshape(-1).expand(batch_size).contiguous()
    if window is None and documents is None:
        if causal and allow_is_causal_skip and (empty or (aligned and q_length in (1, kv_length))):
            return None
        if not causal and allow_is_bidirectional_skip and lengths is None:
            return None
    return KeyMask((batch_size, 1, q_length, kv_length), here, causal, window, lengths, documents)


def causal_by_mask(config: Any) -> bool:
    """Whether the attention modules of a configuration take no mask for all keys, while their model makes causal masks:
    Gemma within PaliGemma, which lets a prefix see itself."""
    return bool(getattr(config, "use_bidirectional_attention", False))


def _slots(attention_mask: Tensor, kv_length: int, kv_offset: int) -> Tensor:
    """The slots of a cache out of a mask [B, seen tokens]; slots that no token has reached are False."""
    missing = max(0, kv_length + kv_offset - attention_mask.shape[-1])
    padded = torch.nn.functional.pad(attention_mask, (0, missing)) if missing else attention_mask
    return padded[:, kv_offset : kv_offset + kv_length].bool()


def _read(padding: Tensor) -> tuple[bool, bool]:
    """Whether all tokens are real, and whether padding is only behind them: one transfer for both."""
    full, behind = torch.stack((padding.all(), (padding[:, 1:] <= padding[:, :-1]).all())).tolist()
    return full, behind and not full


class Padding(NamedTuple):
    """Of a mask [B, T] of tokens: whether all are real, and whether padding is only behind them."""

    shape: torch.Size
    full: bool
    behind: bool


class _LookedAt(threading.local):
    """The mask whose values were read last: reading waits for the GPU, and models ask for one mask per kind of layer
    and step. A bool mask on the model's device comes as the tensor that the caller gave; of others transformers makes
    a bool one each time, which is looked at again."""

    last: tuple[weakref.ref[Tensor], tuple[int, ...], tuple[bool, bool]] | None = None
    unread = False  # whether values are not to be looked at, as if this were recorded
    told: Padding | None = None  # what was read before of the model's one mask, where it is not looked at

    def known(self, mask: Tensor, slots: tuple[int, int]) -> tuple[bool, bool]:
        """Whether all tokens in these slots of a mask are real, and whether padding is only behind them; False where
        values cannot be read now."""
        from transformers.utils.import_utils import is_tracing

        if self.unread or is_tracing(mask):
            told = self.told
            whole = told is not None and mask.shape == told.shape and slots == (mask.shape[-1], 0)
            return (told.full, told.behind) if whole else (False, False)
        key = (-1 if mask.is_inference() else mask._version, *slots)
        last = self.last
        if last is None or last[0]() is not mask or last[1] != key or mask.is_inference():  # which has no version
            last = self.last = weakref.ref(mask), key, _read(_slots(mask, *slots))
        return last[2]


_LOOKED_AT = _LookedAt()


@contextlib.contextmanager
def unread_masks(told: Padding | None = None) -> Iterator[None]:
    """Inside, no value of a mask is read, so a mask comes out as it does while CUDA records. told: what is known of the
    one mask that the model is given."""
    before, _LOOKED_AT.unread, _LOOKED_AT.told = (_LOOKED_AT.unread, _LOOKED_AT.told), True, told
    try:
        yield
    finally:
        _LOOKED_AT.unread, _LOOKED_AT.told = before


def padding(mask: Tensor) -> Padding:
    """What is read of a mask [B, T] of tokens; waits for the device."""
    return Padding(mask.shape, *_LOOKED_AT.known(mask, (mask.shape[-1], 0)))


def are_packed(positions: Tensor) -> bool:
    """Whether transformers takes positions [B, T] for those of packed sequences; waits for the device."""
    from transformers.masking_utils import find_packed_sequence_indices

    return find_packed_sequence_indices(positions) is not None


class _Rule(NamedTuple):
    """What a mask function of transformers means."""

    causal: bool = False
    window: tuple[int, int] | None = None
    documents: Tensor | None = None


_CAUSAL, _ALL = _Rule(causal=True), _Rule()


def _rule(function: Callable) -> _Rule | None:
    """Recognise a mask function by its code, since its result could only be tried out on some pairs. None: unknown."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if function is causal_mask_function:
        return _CAUSAL
    if function is bidirectional_mask_function:
        return _ALL
    code = getattr(function, "__code__", None)
    # a compiler cannot look into closures
    kind = None if code is None or torch.compiler.is_compiling() else _made().get(code)
    if kind is None:
        return None
    held = dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__ or ())))
    return kind(held)


class _Told(threading.local):
    """What a model's caller gave it, of the call that torch.compile traces or CUDA records.

    Each thread has attributes of its own from the start: where a graph breaks within a call, Dynamo would guard on
    there being none, and find those that the call had set.
    """

    def __init__(self) -> None:
        self.positions: Tensor | None = None
        self.known = False


TOLD = _Told()


@contextlib.contextmanager
def unpacked_positions() -> Iterator[None]:
    """Inside, no mask is of packed sequences: transformers, which reads positions to know, takes all of them for packed
    while CUDA records."""
    before, TOLD.known, TOLD.positions = (TOLD.known, TOLD.positions), True, None
    try:
        yield
    finally:
        TOLD.known, TOLD.positions = before


@constant_in_graphs
def _joined() -> Any:
    """The code of what transformers' `and_masks` makes."""
    from transformers.masking_utils import and_masks

    return and_masks().__code__


def _is_joined(function: Callable) -> bool:
    try:  # a compiler does not know of each kind of callable that it has no code
        return function.__code__ is _joined()
    except AttributeError:
        return False


def _compiled_rule(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    config: Any = None,
    use_vmap: bool = True,
    **given: Any,
) -> _Rule | None:
    """The rule of a function by `and_masks`, into which a compiler does not look, by what it is passed with.

    use_vmap is set where somebody's own function is in it. Else it is causal, and may have a window, by the
    configuration; what is left is packing, which transformers takes all positions for that it sees when compiling,
    since it would have to look at their values. Where the model's caller gave none, there is none.
    """
    from transformers.masking_utils import find_packed_sequence_indices

    if use_vmap or "allow_is_bidirectional_skip" in given:
        return None
    window = None
    if local_size is not None:
        chunked = getattr(config, "attention_chunk_size", None) is not None
        if chunked or getattr(config, "sliding_window", None) != local_size:
            return None
        window = (local_size - 1, -1)
    if allow_is_causal_skip:
        return None if window is None else _Rule(True, window)
    if attention_mask is not None or not TOLD.known or q_length != kv_length or isinstance(q_offset, Tensor):
        return None
    if TOLD.positions is None:
        return _Rule(True, window)
    positions = TOLD.positions
    if window is not None or positions.ndim != 2 or positions.shape[1] != q_length:
        return None
    return _Rule(True, documents=find_packed_sequence_indices(positions).expand(batch_size, -1))


@functools.cache
def _made() -> dict[Any, Callable[[dict[str, Any]], _Rule | None]]:
    """What transformers' makers of mask functions make, by code object: from what a closure holds to its rule."""
    from transformers import masking_utils

    meanings: list[tuple[str, tuple, Callable[[dict[str, Any]], _Rule | None]]] = [
        ("and_masks", (masking_utils.causal_mask_function,), lambda held: _all(held["mask_functions"])),
        ("sliding_window_overlay", (1,), lambda held: _Rule(window=(held["sliding_window"] - 1, -1))),
        ("sliding_window_bidirectional_overlay", (1,), lambda held: _Rule(window=(held["sliding_window"],) * 2)),
        ("packed_sequence_mask_function", (None,), lambda held: _Rule(documents=held["packed_sequence_mask"])),
        # positions within documents that `packed_sequence_mask_function` beside it keeps apart
        ("remap_positions_for_packed_sequence", (None, None), lambda held: _rule(held["mask_function"])),
    ]
    makers = ((getattr(masking_utils, name, None), arguments, meaning) for name, arguments, meaning in meanings)
    return {maker(*arguments).__code__: meaning for maker, arguments, meaning in makers if maker is not None}


def _all(functions: tuple[Callable, ...]) -> _Rule | None:
    """The rule that says what all of them say; None where one is unknown or two say different things of one kind."""
    rules = [_rule(function) for function in functions]
    windows = [rule.window for rule in rules if rule is not None and rule.window is not None]
    documents = [rule.documents for rule in rules if rule is not None and rule.documents is not None]
    if None in rules or len(windows) > 1 or len(documents) > 1:
        return None
    return _Rule(any(rule.causal for rule in rules), *((found or [None])[0] for found in (windows, documents)))
