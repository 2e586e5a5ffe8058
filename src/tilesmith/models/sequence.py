"""`shard_sequence`: a transformers model whose sequences the ranks of a mesh share."""

from __future__ import annotations

import copy
import inspect
import weakref
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tilesmith import ops
from tilesmith.distributed import Layout, Ring, context_parallel_attention, ring_of
from tilesmith.distributed.attention import degree_of
from tilesmith.distributed.comparison import refusals_told
from tilesmith.distributed.layout import boundaries
from tilesmith.distributed.prepared import MODES
from tilesmith.models.attention.chosen import ChosenForm, take_back
from tilesmith.models.attention.interface import needs_transformers
from tilesmith.models.attention.masks import KeyMask, _rule
from tilesmith.models.attention.modules import computes_mask, uses_interface
from tilesmith.models.cache_argument import CACHE_NAMES
from tilesmith.models.sequence_probe import Habits, habits, takes_shift_labels
from tilesmith.rewrite import forms, original_class

NAME = "tilesmith_sequence"  # among transformers' attention functions
_BATCH = "tilesmith_batch"  # the argument that models hand through to their attention
_GRADIENTS = ("mean", "sum")
_SERVED_LAYERS = {"full_attention", "sliding_attention"}
_LENGTH_DEPENDENT = {"dynamic", "longrope"}  # their angles depend on the longest position that a rank sees
_NO_LABEL = -100
_MIX = 0x1E3779B97F4A7C15  # odd: spreads what differs over the bits of a checksum
_BY_TOKEN = ("input_ids", "inputs_embeds", "position_ids", "attention_mask", "labels", "shift_labels")
_OF_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


@dataclass(frozen=True, eq=False)
class Batch:
    """How the ranks hold one batch. starts: boundaries of packed documents; ids: of queries and keys otherwise."""

    layout: Layout
    starts: tuple[int, ...] | None = None
    ids: tuple[Tensor, Tensor] | None = None


class Sharding:
    """What a sharded model remembers; `remove` makes it the model that it was."""

    def __init__(self, model: nn.Module, ring: Ring, mode: str, degree: int | None, gradients: str):
        self.model, self.ring, self.mode, self.gradients = weakref.ref(model), ring, mode, gradients
        self.degree = degree
        self.batch: Batch | None = None
        self.habits: Habits | None = None
        self.seen: list[tuple[Tensor, Tensor]] | None = None  # what attention records while the model is looked at
        configs = {id(m.config): m.config for m in model.modules() if _has_config(m)}.values()
        self.implementations = [(config, config._attn_implementation) for config in configs]
        self.before_ours = _before_ours(model)

    def __deepcopy__(self, memo: dict) -> Sharding:
        """That of a copied model, which lives on the same ranks: process groups cannot be copied."""
        model = memo.get(id(self.model()))
        if model is None:  # a part of it is copied
            return self
        made = object.__new__(Sharding)
        vars(made).update(vars(self), model=weakref.ref(model))
        for name in ("implementations", "before_ours"):
            setattr(made, name, [(copy.deepcopy(config, memo), asked) for config, asked in getattr(self, name)])
        return made

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "shard_sequence: a sharded model cannot be pickled, as its process group exists in this process only; save "
            "model.state_dict(), or call model_sharding(model).remove() first and shard_sequence again afterwards"
        )

    def watch(self) -> list[tuple[Tensor, Tensor]]:
        """Record the queries and keys that attention gets, in a new list."""
        self.seen = []
        return self.seen

    def remove(self) -> None:
        """Take the hooks off and give the model its attention back; nothing where the model is gone."""
        model = self.model()
        if model is None:
            return
        for module in model.modules():
            if module.__dict__.get("_tilesmith_sharding") is self:
                del module.__dict__["_tilesmith_sharding"]
        for config, implementation in self.implementations:
            config._attn_implementation_internal = implementation
        if not _before_ours(model):  # `undo` came first, and could not take back what was not asked for then
            take_back(self.before_ours)
        for kind, ours in (("_forward_pre_hooks", _before), ("_forward_hooks", _after)):
            for key in [key for key, hook in getattr(model, kind).items() if hook is ours]:
                del getattr(model, kind)[key]
                getattr(model, f"{kind}_with_kwargs").pop(key, None)


def shard_sequence(
    model: nn.Module, mesh: DeviceMesh | dist.ProcessGroup | Ring, *, mode: str = "auto", gradients: str = "mean"
) -> nn.Module:
    """Shard each sequence of a transformers model over the ranks of `mesh`, in place; returns the model.

        tilesmith.shard_sequence(model, mesh["cp"])
        loss = model(input_ids=ids, labels=labels).loss  # the same whole batch on every rank of the mesh

    Every rank passes whole batches; the model computes this rank's tokens: `input_ids` or `inputs_embeds`,
    `position_ids`, `labels` and `attention_mask` [B, S] are sharded before its first layer, and its attention becomes
    `context_parallel_attention` (`mode` is that function's; "hybrid" needs a mesh of two dims). Tokens are laid out in
    zigzag order; those of packed documents are balanced by work. A row counts as packed if `cu_seq_lens_q` says so or
    its `position_ids` start again. Causality, windows, soft caps and sinks are the model's own; padding is not
    attended.

    The loss is the mean over the labels of the whole batch, the same number on all ranks; `logits` and hidden states
    are of this rank's tokens (`model_sharding(model).batch.layout`), outputs of poolers are None. gradients: "mean":
    the mean over the ranks of each parameter's gradient is the whole gradient, as data parallel wrappers (FSDP2, DDP)
    take it; "sum": their sum.
    Other terms that a model adds to its loss, such as a router's losses, are the mean of what the ranks compute.
    A sharded model can be copied, and is saved by its `state_dict`; it cannot be pickled.

    The model is run on a few tokens to check that it uses positions and shifted labels as given. A model that numbers
    positions in its own way (RoBERTa; OPT after padding) needs `position_ids`.

    Raises ValueError for models whose layers mix tokens other than through attention (linear attention, convolutions),
    whose angles depend on the length, whose attention does not use transformers' interface, which take no positions, or
    which have no weights yet; at a call for caches, dense masks, labels of a loss that does not accept shifted ones,
    tensors that are not sharded (`token_type_ids`, images), `logits_to_keep`, and where all outputs are pooled. A call
    that is refused on one rank, or has other arguments, shapes or values of integers there, is refused on all.
    """
    transformers = _transformers()
    if not isinstance(model, transformers.PreTrainedModel):
        raise TypeError(
            f"shard_sequence: model must be a transformers model, got {type(model).__name__}; of a wrapper, such as "
            "PEFT's or torch.compile's, pass the model that it wraps"
        )
    if mode not in MODES:
        raise ValueError(f"shard_sequence: mode must be one of {', '.join(MODES)}, got {mode!r}")
    if gradients not in _GRADIENTS:
        raise ValueError(f"shard_sequence: gradients must be 'mean' or 'sum', got {gradients!r}")
    if model_sharding(model) is not None:
        raise ValueError("shard_sequence: the model is sharded already; model_sharding(model).remove() undoes it")
    _refuse_model(model)
    ring = ring_of(mesh)
    if len(ring.ranks) != 1:
        raise ValueError("shard_sequence: mesh must have one rank in this process; a LocalRing has all of them")
    sharding = Sharding(model, ring, mode, degree_of("shard_sequence", mode, mesh), gradients)
    transformers.AttentionInterface.register(NAME, attention_forward)
    transformers.AttentionMaskInterface.register(NAME, _mask)
    model.set_attn_implementation(NAME)
    for module in model.modules():
        if module is model or uses_interface(module):
            module.__dict__["_tilesmith_sharding"] = sharding
    try:
        sharding.habits = habits(model, sharding.watch)
    except Exception:
        sharding.remove()
        raise
    sharding.seen = None
    model.register_forward_pre_hook(_before, with_kwargs=True)
    model.register_forward_hook(_after, with_kwargs=True)
    return model


def model_sharding(model: nn.Module) -> Sharding | None:
    """The sharding that `shard_sequence` gave a model; None if it was not sharded."""
    return model.__dict__.get("_tilesmith_sharding")


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: KeyMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, over the tokens of all ranks; query, key and value are those of a rank."""
    if position_bias is not None or not (attention_mask is None or isinstance(attention_mask, KeyMask)):
        raise ValueError(f"shard_sequence: {type(module).__name__} gives its attention biases or masks of its own")
    sharding = module.__dict__["_tilesmith_sharding"]
    if sharding.seen is not None:
        sharding.seen.append((query, key))
    if sharding.seen is not None or not _has_values(query):
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None
    batch = kwargs.get(_BATCH) or sharding.batch
    if attention_mask is None:
        causal, window = getattr(module, "is_causal", True) if is_causal is None else is_causal, None
    else:
        causal, window = attention_mask.causal, attention_mask.window
    out, _ = context_parallel_attention(
        query,
        key,
        value,
        sharding.ring,
        ops.Mask(causal=causal, window=window, documents=batch.ids),
        ops.Score(scale=scaling, softcap=softcap or 0.0),
        mode=sharding.mode,
        degree=sharding.degree,
        layout=batch.layout,
        cu_seqlens=batch.starts,
        sinks=s_aux,
        dropout_p=dropout,
    )
    return out.transpose(1, 2).contiguous(), None


@torch.compiler.disable(reason="reads the model's mask function")
def _mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: Any = None, device: Any = "cpu", **given: Any
) -> KeyMask:
    """The mask function of transformers: what a layer sees of the whole sequence. What it makes of a rank's positions,
    which jump, is not listened to: documents come with the batch."""
    from transformers.masking_utils import causal_mask_function

    rule = _rule(mask_function or causal_mask_function)
    if rule is None or q_length != kv_length:
        raise ValueError("shard_sequence: the model makes a mask other than causality, a window, padding or documents")
    shape = batch_size, 1, q_length, kv_length
    return KeyMask(shape, torch.device(device), rule.causal, rule.window)


@torch.compiler.disable(reason="ranks compare their batches")
def _before(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Shard a batch: what the model is called with. Ranks whose batches are not alike hear of it here: a rank that has
    labels would wait for the loss of one that has none."""
    ring = model_sharding(model).ring
    given = dict(zip(_parameters(type(model)), args)) | kwargs
    if not all(_has_values(x) for x in given.values() if isinstance(x, Tensor)):
        return args, kwargs
    with refusals_told(ring, "shard_sequence"):
        found = _sharded(model, dict(given))
    if ring.size > 1:
        _compare(ring, found, given)
    return (), found


def _compare(ring: Ring, sharded: dict[str, Any], given: dict[str, Any]) -> None:
    """Raise ValueError on all ranks where a rank was given another batch, as loaders of data parallel training do."""
    shapes = {name: list(x.shape) for name, x in sorted(sharded.items()) if isinstance(x, Tensor)}
    told = {"pass": "shard_sequence", "arguments": list(shapes), **shapes, **_checksums(given)}
    ring.agree({ring.ranks[0]: told}, "shard_sequence")


def _checksums(given: dict[str, Any]) -> dict[str, str]:
    """Of each tensor of integers, and of the number of labels, what differs where a value does. Asks a device once."""
    count = given.get("num_items_in_batch")
    found = {} if count is None or isinstance(count, Tensor) else {"num_items_in_batch": str(count)}
    integers = {n: x for n, x in sorted(given.items()) if isinstance(x, Tensor) and not x.is_floating_point()}
    if integers:
        sums = [_checksum(x) for x in integers.values()]
        values = torch.stack([x.to(sums[0].device) for x in sums]).tolist()
        found |= {f"the values of {name}": f"checksum {value}" for name, value in zip(integers, values)}
    return found


def _checksum(x: Tensor) -> Tensor:
    """A number of 64 bits of a tensor of integers, also of their order."""
    mixed = (x.reshape(-1).long() + torch.arange(x.numel(), device=x.device) * _MIX) * _MIX
    return (mixed ^ (mixed >> 29)).sum()


def _sharded(model: nn.Module, named: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a rank."""
    sharding = model_sharding(model)
    ring = sharding.ring
    name = next((n for n in ("input_ids", "inputs_embeds") if named.get(n) is not None), None)
    if name is None:
        raise ValueError("shard_sequence: give input_ids or inputs_embeds by name or in the model's order")
    _refuse_call(model, named)
    tokens = named[name]
    rows, length = tokens.shape[:2]
    _refuse_mask(named.get("attention_mask"), rows, length)
    positions = _positions(named, rows, length, tokens.device, model)
    batch = _batch(named, positions, rows, length, ring.size, model)
    rank = ring.ranks[0]
    shard = lambda x, fill=0: batch.layout.shard(x, rank, 1, fill)  # noqa: E731
    ids = None if batch.ids is None else tuple(shard(x, -1) for x in batch.ids)
    sharding.batch = batch = Batch(batch.layout, batch.starts, ids)
    named |= {name: shard(tokens), "position_ids": shard(positions), "use_cache": False, _BATCH: batch}
    for given in ("attention_mask", *_OF_PACKING):
        named.pop(given, None)
    if named.get("labels") is not None or named.get("shift_labels") is not None:
        named |= _labels(named, rows, length, shard, model)
    return named


@torch.compiler.disable(reason="ranks sum their losses")
def _after(model: nn.Module, args: tuple, kwargs: dict[str, Any], out: Any) -> Any:
    """The loss of the whole batch: its value from all ranks, of whose losses it is the mean (`_labels`), its gradient
    from this one's tokens."""
    sharding, loss = model_sharding(model), getattr(out, "loss", None)
    if _BATCH not in kwargs:  # `_before` left it as it was
        return out
    _without_pooled(type(model).__name__, out, sharding.batch.layout.local)
    if loss is None or kwargs.get("labels") is None:
        return out
    ring = sharding.ring
    total = loss.detach() / ring.size
    if ring.size > 1:
        dist.all_reduce(total, group=ring.group)
    mine = loss if sharding.gradients == "mean" else loss / ring.size
    out.loss = mine + (total - mine.detach())
    return out


def _has_values(x: Tensor) -> bool:
    """Whether this is a run that ranks make together. Those on tensors without values are looks of one process at a
    model, as `optimize` takes: nothing may be told to other ranks, which would take it for a call."""
    return x.device.type != "meta" and not isinstance(x, torch._subclasses.FakeTensor)


def _refuse_call(model: nn.Module, named: dict[str, Any]) -> None:
    """Raise for arguments that a rank would take for those of its own tokens, or that no rank can serve."""
    cache = next((n for n in CACHE_NAMES if named.get(n) is not None), None)
    if cache is not None:
        raise ValueError(f"shard_sequence: {cache} is given; sharded models compute whole sequences")
    known = (*_BY_TOKEN, *_OF_PACKING, "num_items_in_batch")
    other = next((n for n, x in named.items() if isinstance(x, Tensor) and n not in known), None)
    if other is not None:
        raise ValueError(f"shard_sequence: {other} is given; of tensors only {', '.join(known)} are supported")
    if named.get("logits_to_keep"):
        raise ValueError("shard_sequence: logits_to_keep would be of each rank's own last tokens; leave it out")
    if named.get("return_dict", getattr(model.config, "return_dict", True)) is False:
        raise ValueError(
            "shard_sequence: return_dict, of the call or the model's config, must not be False; outputs are found by "
            "their names"
        )


def _refuse_mask(mask: Tensor | None, rows: int, length: int) -> None:
    if mask is not None and mask.ndim != 2:
        raise ValueError(
            f"shard_sequence: attention_mask must be [batch, tokens], got {list(mask.shape)}; dense masks are not "
            "sharded"
        )
    if mask is not None and tuple(mask.shape) != (rows, length):
        raise ValueError(f"shard_sequence: attention_mask must be [{rows}, {length}], got {list(mask.shape)}")


def _positions(named: dict[str, Any], rows: int, length: int, device: torch.device, model: nn.Module) -> Tensor:
    """The positions of whole rows, [1 or rows, length]."""
    given, mask = named.get("position_ids"), named.get("attention_mask")
    if given is not None:
        if given.ndim != 2 or given.shape[0] not in (1, rows) or given.shape[1] != length:
            raise ValueError(
                f"shard_sequence: position_ids must be [1 or {rows}, {length}], got {list(given.shape)}; positions of "
                "several dims, as of images, are not sharded"
            )
        return given
    seen, name = model_sharding(model).habits, type(model).__name__
    if not seen.counts:
        raise ValueError(f"shard_sequence: {name} numbers positions in its own way; give its position_ids")
    kept = None if seen.counts_padding or mask is None else mask.bool()
    if kept is not None and bool((kept[:, 1:] & ~kept[:, :-1]).any()):
        raise ValueError(
            f"shard_sequence: {name} numbers positions by attention_mask, which hides tokens before others; give its "
            "position_ids, of which those of padding do not matter"
        )
    return torch.arange(length, device=device)[None]


def _without_pooled(name: str, out: Any, local: int) -> None:
    """Take outputs away that are not of this rank's tokens, such as those of poolers: they look at tokens that the rank
    may not have. Raise where nothing else is left."""
    fields = {field: x for field, x in getattr(out, "items", dict)() if isinstance(x, Tensor) and x.ndim}
    pooled = [field for field, x in fields.items() if x.ndim < 3 or x.shape[1] != local]
    if pooled and len(pooled) == len(fields):
        raise ValueError(
            f"shard_sequence: {pooled[0]} of {name} is {list(fields[pooled[0]].shape)}, not of a rank's {local} "
            "tokens; take the model without that head and pool the hidden states of all ranks"
        )
    for field in pooled:
        out[field] = None


def _batch(named: dict[str, Any], positions: Tensor, rows: int, length: int, size: int, model: nn.Module) -> Batch:
    padding = named.get("attention_mask")
    padding = None if padding is None or bool(padding.bool().all()) else padding.bool()
    given = named.get("cu_seq_lens_q")
    if given is not None and padding is not None:
        raise ValueError(
            "shard_sequence: cu_seq_lens_q is given beside an attention_mask that hides tokens, which is of rows that "
            "are not packed; leave one of them out"
        )
    begins = positions[:, 1:] != positions[:, :-1] + 1
    if padding is None and (given is not None or (positions.shape[0] == 1 and rows == 1)):
        if given is None:
            places = (begins[0].nonzero().flatten() + 1).tolist()
            starts = (0, *places, length) if places else None
        else:
            starts = boundaries(given)
        if starts is not None:
            return Batch(Layout.balanced(starts, size, length), starts)
        begins = begins[:, :0]
    causal = getattr(model.config, "is_causal", True) and not getattr(model.config, "is_encoder_decoder", False)
    layout = (Layout.zigzag if causal else Layout.contiguous)(length, size)
    if padding is None and not bool(begins.any()):
        return Batch(layout)
    # documents or padding of several rows: ids, as padding in the middle of a row cannot be cut out
    changes = nn.functional.pad(begins if padding is None else torch.zeros_like(begins), (1, 0))
    queries = changes.cumsum(1).int().expand(rows, length)
    keys = queries if padding is None else torch.where(padding, queries, -1)
    return Batch(layout, None, (queries.contiguous(), keys.contiguous()))


def _labels(named: dict[str, Any], rows: int, length: int, shard: Any, model: nn.Module) -> dict[str, Any]:
    """Labels shifted before they are sharded, since a rank's last token predicts another rank's."""
    if not takes_shift_labels(model) or model_sharding(model).habits.takes_shifted is False:
        raise ValueError(
            f"shard_sequence: the loss of {type(model).__name__} takes no shift_labels; it is not that of a causal "
            "language model. Leave labels out and compute it from the logits of each rank"
        )
    shifted, ignored = named.get("shift_labels"), named.get("ignore_index", _NO_LABEL)
    if shifted is None:
        shifted = nn.functional.pad(named["labels"][..., 1:], (0, 1), value=ignored)
    if tuple(shifted.shape) != (rows, length):
        raise ValueError(f"shard_sequence: labels must be [{rows}, {length}], got {list(shifted.shape)}")
    count, ranks = named.get("num_items_in_batch"), model_sharding(model).ring.size
    count = (shifted != ignored).sum() if count is None else count
    mine = shard(shifted, ignored)
    # a rank's share: the whole loss is the mean of the ranks', also of what a model adds beside the labels'
    return {"labels": mine, "shift_labels": mine, "num_items_in_batch": count / ranks}


def _parameters(kind: type) -> list[str]:
    return list(inspect.signature(original_class(kind).forward).parameters)[1:]


def _has_config(module: nn.Module) -> bool:
    return hasattr(module.__dict__.get("config"), "_attn_implementation")


def _before_ours(model: nn.Module) -> list[tuple[Any, str | None]]:
    """The configurations that `optimize` has ask for its attention, and what they asked for before."""
    chosen = [(form, module) for module in model.modules() for form in forms(module) if isinstance(form, ChosenForm)]
    return [pair for form, module in chosen for pair in form.ours(module)]


def _refuse_model(model: nn.Module) -> None:
    missing = next((n for n in ("input_ids", "position_ids") if n not in _parameters(type(model))), None)
    if missing is not None:
        raise ValueError(f"shard_sequence: {type(model).__name__}.forward takes no {missing}")
    sites = [m for m in model.modules() if uses_interface(m)]
    if not sites:
        raise ValueError(f"shard_sequence: no module of {type(model).__name__} uses transformers' attention interface")
    own = next((original_class(type(m)).__name__ for m in sites if computes_mask(original_class(type(m)))), None)
    if own is not None:
        raise ValueError(f"shard_sequence: {own} edits its masks, which are not whole on a rank")
    config = model.config.get_text_config()
    others = set(getattr(config, "layer_types", None) or ()) - _SERVED_LAYERS
    if others:
        raise ValueError(f"shard_sequence: layers of kind {', '.join(sorted(others))} are not sharded by tokens")
    convolution = next((n for n, m in model.named_modules() if isinstance(m, nn.Conv1d)), None)
    if convolution is not None:
        raise ValueError(f"shard_sequence: {convolution} is a convolution over tokens, which is not sharded")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError("shard_sequence: encoder-decoder models are not supported")
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type")} | {each.get("rope_type") for each in rope.values() if isinstance(each, dict)}
    if kinds & _LENGTH_DEPENDENT:
        kind = (kinds & _LENGTH_DEPENDENT).pop()
        raise ValueError(f"shard_sequence: rope_type {kind!r} depends on the longest position, which ranks see apart")


def _transformers() -> Any:
    try:
        import transformers

        _ = transformers.AttentionMaskInterface
    except (ImportError, AttributeError) as problem:
        raise ImportError(needs_transformers("shard_sequence")) from problem
    return transformers
