"""Mask and Score: which keys a query sees and what is added to its scores, as data that lowers to tensors and numbers.

Legend: B batch, T query tokens, S key tokens, H query heads, G kv heads, N packed documents.
"""

import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilesmith.engine.argument_checks import flag, located, number, one_device, size, suggesting, tensor
from tilesmith.ops.attn import block_lists as lists
from tilesmith.ops.attn import checks, reference
from tilesmith.ops.attn.visibility import visibility


class Blocks(NamedTuple):
    """Block lists: which blocks of `block_k` keys each block of `block_q` queries sees, as compressed rows.

    offsets int32 [B|1, H|G|1, ceil(T / block_q) + 1] and indices int32: row r sees the key blocks
    indices[offsets[r] : offsets[r + 1]], ascending; rows lie one after another in (batch, head, block) order.
    offsets_t, indices_t: the same by key blocks, [B|1, H|G|1, ceil(S / block_k) + 1]; gradients make them where they
    are left out.
    """

    offsets: Tensor
    indices: Tensor
    block_q: int
    block_k: int
    offsets_t: Tensor | None = None
    indices_t: Tensor | None = None

    @classmethod
    def of(cls, dense: Tensor, block_q: int, block_k: int) -> "Blocks":
        """The lists of a bool table [B|1, H|G|1, ceil(T / block_q), ceil(S / block_k)], True where a block of queries
        sees a block of keys. The host waits for the device, to know how many there are. Raises TypeError for a table
        that is not bool, ValueError for one without four dims and for sizes below 1."""
        tensor("Blocks", "dense", dense, ("B", "heads", "query blocks", "key blocks"))
        if dense.dtype != torch.bool:
            raise TypeError(f"Blocks: dense must be bool, got {dense.dtype}; give scores > threshold, as a table")
        size("Blocks", "block_q", block_q)
        size("Blocks", "block_k", block_k)
        offsets, indices = lists.compressed(dense)
        return cls(offsets, indices, block_q, block_k, *lists.transposed(offsets, indices, dense.shape[3]))


@suggesting
@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys each query sees: those that all restrictions given here allow.

    Positions are aligned bottom right: the last query and the last valid key have the same position.

    causal: no key after the query is seen. window: (left, right) keys around the query, -1 unlimited; one number w
    means (w, w), or (w, 0) if causal. prefix: int32 [B], keys before it are seen whatever causal and window say.
    documents: int32 ids [B, T] for queries and keys alike, or a pair ([B, T], [B, S]); only equal ids see each other.
    dense: bool, broadcastable to [B, H, T, S], True may attend. blocks: block lists.
    """

    causal: bool = False
    window: int | tuple[int, int] | None = None
    prefix: Tensor | None = None
    documents: Tensor | tuple[Tensor, Tensor] | None = None
    dense: Tensor | None = None
    blocks: Blocks | None = None

    def __post_init__(self) -> None:
        flag("Mask", "causal", self.causal)
        if self.window is not None:
            self._sides(self.window)

    def lower(self) -> dict[str, Any]:
        """The same mask as arguments of the op; unrestricted fields are left out."""
        lowered: dict[str, Any] = {}
        if self.causal:
            lowered["causal"] = True
        if self.window is not None:
            lowered["window_left"], lowered["window_right"] = self._sides(self.window)
        if self.prefix is not None:
            tensor("Mask", "prefix", self.prefix)
            lowered["prefix_lengths"] = self.prefix
        if self.documents is not None:
            several = isinstance(self.documents, tuple | list)
            pair = self.documents if several else (self.documents, self.documents)
            if len(pair) != 2:
                raise ValueError(f"Mask: documents must be one tensor or a pair of them, got {len(pair)}")
            for documents in pair:
                tensor("Mask", "documents", documents)
            lowered["q_documents"], lowered["k_documents"] = pair
        if self.dense is not None:
            lowered["mask"] = _four_dims("Mask", "dense", self.dense)
        if self.blocks is not None:
            blocks = self.blocks
            if not isinstance(blocks, Blocks):
                raise TypeError(f"Mask: blocks must be Blocks, got {type(blocks).__name__}")
            size("Blocks", "block_q", blocks.block_q)
            size("Blocks", "block_k", blocks.block_k)
            lowered |= {"block_offsets": blocks.offsets, "block_indices": blocks.indices}
            lowered |= {"block_offsets_t": blocks.offsets_t, "block_indices_t": blocks.indices_t}
            lowered |= {"block_q": blocks.block_q, "block_k": blocks.block_k}
        return lowered

    def _sides(self, window: int | tuple[int, int]) -> tuple[int, int]:
        """Keys to the left and to the right of a query."""
        sides = (window, 0 if self.causal else window) if isinstance(window, int) else window
        numbers = isinstance(sides, tuple | list) and all(isinstance(w, int) and not isinstance(w, bool) for w in sides)
        if not numbers or len(sides) != 2:
            raise TypeError(
                f"Mask: window must be an int or a pair of ints (left, right), -1 unlimited, got {window!r}"
            )
        return sides[0], sides[1]

    def materialize(
        self,
        tokens: int,
        keys: int,
        *,
        batch: int = 1,
        heads: int = 1,
        device: torch.device | str | None = None,
        kv_lengths: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
    ) -> Tensor:
        """The mask as a bool tensor [B, H|1, T, S]; `batch` and `heads` must be given where a tensor here has them.

        device: where to make it if no field is a tensor; "cpu" if None. The other arguments and the errors are those of
        `attention`.
        """
        lowered = {"kv_lengths": kv_lengths, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, **self.lower()}
        given = [x for x in lowered.values() if isinstance(x, Tensor)]
        device = given[0].device if given else located("Mask.materialize", "device", device or "cpu")
        if not torch.compiler.is_compiling():
            _check_mask(batch, heads, tokens, keys, device, lowered)
        for name in ("block_offsets_t", "block_indices_t"):
            lowered.pop(name, None)
        return visibility(batch, heads, tokens, keys, device, **lowered)[2]


@suggesting
@dataclass(frozen=True, eq=False)
class Score:
    """How scores are made from q . k.

    scale: factor, 1/sqrt(head dim) if None. softcap: c > 0 bends a scaled score s to c * tanh(s / c). alibi: slopes [H]
    or [B, H], of N packed documents [N, H], fp32; slope * |distance| is subtracted. bias: added, broadcastable to
    [B, H, T, S]; it gets a gradient.
    """

    scale: float | None = None
    softcap: float = 0.0
    alibi: Tensor | None = None
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        if self.scale is not None:
            number("Score", "scale", self.scale)
        number("Score", "softcap", self.softcap, 0.0)

    def lower(self) -> dict[str, Any]:
        """The same score as arguments of the op; unused fields are left out."""
        lowered: dict[str, Any] = {}
        if self.scale is not None:
            lowered["scale"] = float(self.scale)
        if self.softcap != 0:
            lowered["softcap"] = float(self.softcap)
        if self.alibi is not None:
            tensor("Score", "alibi", self.alibi)
            lowered["alibi"] = self.alibi
        if self.bias is not None:
            lowered["bias"] = _four_dims("Score", "bias", self.bias)
        return lowered

    def materialize(self, tokens: int, keys: int, *, device: torch.device | str | None = None) -> Tensor:
        """What is added to the scaled and capped scores, fp32 [B|1, H|1, T, S]: ALiBi and bias, zeros without them.

        Raises ValueError or TypeError, naming the argument, for what does not fit.
        """
        of = "Score.materialize"
        for name, value in (("tokens", tokens), ("keys", keys)):
            size(of, name, value, 0)
        self.lower()
        given = self.bias if self.alibi is None else self.alibi
        device = located(of, "device", device or "cpu") if given is None else given.device
        if self.alibi is not None and self.alibi.ndim not in (1, 2):
            raise ValueError(f"{of}: alibi must be [H] or [B, H], got {list(self.alibi.shape)}")
        term = torch.zeros(1, 1, tokens, keys, dtype=torch.float32, device=device)
        if self.alibi is not None:
            query, key = torch.arange(tokens, device=device), torch.arange(keys, device=device)
            distance = (query[:, None] + (keys - tokens) - key).abs()
            slopes = self.alibi if self.alibi.ndim == 2 else self.alibi.unsqueeze(0)
            term = term - slopes.float()[:, :, None, None] * distance
        if self.bias is not None:
            bias = _four_dims("Score", "bias", self.bias)
            one_device(of, "bias", bias, "alibi", term)
            batch, heads = (n if n > 1 else m for n, m in zip(term.shape[:2], bias.shape[:2]))
            if bias.ndim != 4 or any(n not in (1, m) for n, m in zip(bias.shape, (batch, heads, tokens, keys))):
                wanted = [batch, heads, tokens, keys]
                raise ValueError(f"{of}: bias must be {wanted}, where any dim may be 1, got {list(self.bias.shape)}")
            term = term + bias.float()
        return term


def _check_mask(batch: int, heads: int, tokens: int, keys: int, device: torch.device, lowered: dict[str, Any]) -> None:
    """Raise what `attention` does where a mask does not fit queries and keys of these sizes."""
    of = "Mask.materialize"
    for name, value in (("tokens", tokens), ("keys", keys), ("batch", batch), ("heads", heads)):
        size(of, name, value, 0)
    for name, x in lowered.items():
        if x is not None and not isinstance(x, int):
            tensor(of, name, x)
    offsets = lowered.get("block_offsets")
    lists_of = offsets.shape[1] if offsets is not None and offsets.ndim == 3 else 1
    q = torch.empty(1, device=device).expand(batch, heads, tokens, 1)
    k = torch.empty(1, device=device).expand(batch, lists_of if lists_of and heads % lists_of == 0 else 1, keys, 1)
    call = inspect.signature(reference.attention).bind(q, k, k, **lowered)
    call.apply_defaults()
    try:
        checks.check_attention(*call.args)
        reference.check_lengths(q, k, lowered["cu_seqlens_q"], lowered["cu_seqlens_k"], 0, 0)
        named = ("block_offsets", "block_indices", "block_offsets_t", "block_indices_t", "block_q", "block_k")
        lists.check_lists((tokens, keys), *(call.arguments[name] for name in named))
    except (TypeError, ValueError) as problem:
        raise type(problem)(str(problem).replace("attention:", f"{of}:", 1)) from problem


def _four_dims(of: str, name: str, x: Tensor) -> Tensor:
    """x with dims of size 1 in front, so that it has four."""
    tensor(of, name, x)
    return x.reshape((1,) * (4 - x.ndim) + tuple(x.shape)) if x.ndim < 4 else x
