"""What the arguments of the moe family must be, said before anything is computed."""

from torch import Tensor

from tilesmith.engine.argument_checks import INTEGERS, alike, floating, one_device
from tilesmith.ops.moe.reference import ACTIVATIONS, GATED
from tilesmith.ops.moe.route_reference import GROUP_SCORES, SCORES

LARGEST = 2**31 - 1


def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    interleaved: bool,
    limit: float,
    alpha: float,
    up_offset: float,
    gate_up_lora_a: Tensor | None,
    gate_up_lora_b: Tensor | None,
    down_lora_a: Tensor | None,
    down_lora_b: Tensor | None,
    gate_up_lora_scale: float,
    down_lora_scale: float,
) -> None:
    floating("experts", "x", x)
    if x.ndim == 0:
        raise ValueError("experts: x is a scalar; it must be [..., C]")
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"experts: activation is {activation!r}; it must be one of {', '.join(map(repr, ACTIVATIONS))}"
        )
    _options(activation, interleaved, limit, alpha, up_offset)
    _weights(x, gate_up, down, gate_up_bias, down_bias, activation)
    _adapter(x, "gate_up", gate_up, gate_up_lora_a, gate_up_lora_b, gate_up_lora_scale)
    _adapter(x, "down", down, down_lora_a, down_lora_b, down_lora_scale)
    check_choice("experts", x, indices)
    floating("experts", "weights", weights)
    if weights.shape != indices.shape:
        raise ValueError(
            f"experts: weights has shape {tuple(weights.shape)}; it must be that of indices, {tuple(indices.shape)}"
        )
    one_device("experts", "weights", weights, "x", x)
    countable("experts", indices)


def countable(op: str, indices: Tensor) -> None:
    """ValueError for more pairs than int32 counts."""
    pairs = indices.numel()
    # A comparison of a symbolic number would be a limit of the exported program, which torch.export refuses.
    if isinstance(pairs, int) and pairs > LARGEST:
        raise ValueError(f"{op}: indices has {pairs} elements; it must have fewer than 2**31: pass fewer tokens a call")


def route(
    logits: Tensor,
    top_k: int,
    bias: Tensor | None,
    scores: str,
    groups: int,
    kept_groups: int,
    group_score: str,
    normalise: bool,
    scale: float,
) -> None:
    _scored("route", logits, scores)
    experts = logits.shape[-1]
    if groups < 1 or experts % groups:
        raise ValueError(f"route: groups is {groups}; it must divide the {experts} experts of logits")
    if not 1 <= kept_groups <= groups:
        raise ValueError(f"route: kept_groups is {kept_groups}; it must be from 1 to groups, {groups}")
    most = experts // groups * kept_groups
    if not 1 <= top_k <= most:
        raise ValueError(f"route: top_k is {top_k}; it must be from 1 to {most}, the experts that can be chosen")
    if group_score not in GROUP_SCORES:
        raise ValueError(f"route: group_score is {group_score!r}; it must be 'top2' or 'max'")
    if bias is not None:
        floating("route", "bias", bias)
        if bias.shape != (experts,):
            raise ValueError(f"route: bias has shape {tuple(bias.shape)}; it must be [{experts}]")
        one_device("route", "bias", bias, "logits", logits)


def router_losses(logits: Tensor, indices: Tensor, scores: str) -> None:
    _scored("router_losses", logits, scores)
    check_choice("router_losses", logits, indices, "logits")


def _scored(op: str, logits: Tensor, scores: str) -> None:
    floating(op, "logits", logits)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"{op}: logits has shape {tuple(logits.shape)}; it must be [..., E] with E of at least 1")
    if scores not in SCORES:
        raise ValueError(f"{op}: scores is {scores!r}; it must be 'softmax' or 'sigmoid'")


def _options(activation: str, interleaved: bool, limit: float, alpha: float, up_offset: float) -> None:
    if not limit >= 0:
        raise ValueError(f"experts: limit is {limit}; it must be 0 (no clamp) or more")
    given = {"interleaved": interleaved, "limit": limit != 0, "up_offset": up_offset != 0}
    extra = [name for name, there in given.items() if there]
    if activation not in GATED and extra:
        raise ValueError(
            f"experts: {extra[0]} is given with activation {activation!r}, which has no gate; leave it out"
        )
    if activation != "swiglu" and alpha != 1:
        raise ValueError(f"experts: alpha is {alpha} with activation {activation!r}; only 'swiglu' has one")


def _weights(
    x: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None, down_bias: Tensor | None, activation: str
) -> None:
    hidden = x.shape[-1]
    if gate_up.ndim != 3 or gate_up.shape[2] != hidden:
        raise ValueError(
            f"experts: gate_up has shape {tuple(gate_up.shape)}; for x of shape {tuple(x.shape)} it must be "
            f"[E, N, {hidden}] (pass weights kept as [E, {hidden}, N] as gate_up.transpose(1, 2))"
        )
    experts, wide = gate_up.shape[:2]
    gated = activation in GATED
    if experts == 0:
        raise ValueError("experts: gate_up has no experts; it must be [E, N, C] with E of at least 1")
    if gated and wide % 2:
        raise ValueError(f"experts: gate_up has {wide} rows an expert; with {activation!r} they must be even")
    inner = wide // 2 if gated else wide
    if tuple(down.shape) != (experts, hidden, inner):
        raise ValueError(
            f"experts: down has shape {tuple(down.shape)}; for gate_up of shape {tuple(gate_up.shape)} and "
            f"{activation!r} it must be [{experts}, {hidden}, {inner}]"
        )
    biases = {"gate_up_bias": (gate_up_bias, wide), "down_bias": (down_bias, hidden)}
    for name, (bias, size) in biases.items():
        if bias is not None and tuple(bias.shape) != (experts, size):
            raise ValueError(f"experts: {name} has shape {tuple(bias.shape)}; it must be [{experts}, {size}]")
    tensors = {"gate_up": gate_up, "down": down, "gate_up_bias": gate_up_bias, "down_bias": down_bias}
    for name, tensor in tensors.items():
        if tensor is not None:
            alike("experts", "x", x, name, tensor)


def _adapter(x: Tensor, name: str, weight: Tensor, a: Tensor | None, b: Tensor | None, scale: float) -> None:
    """An adapter of a weight [E, outputs, features]: a [E, R, features] and b [E, outputs, R], or neither."""
    first, second = f"{name}_lora_a", f"{name}_lora_b"
    if a is None or b is None:
        given, other = (first, second) if b is None else (second, first)
        if a is not b:
            raise ValueError(f"experts: {given} is given and {other} is not; an adapter needs both")
        if scale != 1:
            raise ValueError(f"experts: {name}_lora_scale is {scale} without {first} and {second}; leave it out")
        return
    experts, outputs, features = weight.shape
    if a.ndim != 3 or a.shape[0] != experts or a.shape[1] == 0 or a.shape[2] != features:
        raise ValueError(
            f"experts: {first} has shape {tuple(a.shape)}; for {name} of shape {tuple(weight.shape)} it must be "
            f"[{experts}, R, {features}] with R of at least 1"
        )
    if tuple(b.shape) != (experts, outputs, a.shape[1]):
        raise ValueError(
            f"experts: {second} has shape {tuple(b.shape)}; for {first} of shape {tuple(a.shape)} it must be "
            f"[{experts}, {outputs}, {a.shape[1]}]"
        )
    for which, tensor in ((first, a), (second, b)):
        floating("experts", which, tensor)
        one_device("experts", which, tensor, "x", x)


def check_choice(op: str, x: Tensor, indices: Tensor, name: str = "x") -> None:
    if indices.dtype not in INTEGERS:
        raise TypeError(f"{op}: indices has dtype {indices.dtype}; it must be int64 or int32")
    if indices.ndim != x.ndim or indices.shape[:-1] != x.shape[:-1] or indices.shape[-1] == 0:
        lead = "".join(f"{n}, " for n in x.shape[:-1])
        raise ValueError(
            f"{op}: indices has shape {tuple(indices.shape)}; for {name} of shape {tuple(x.shape)} it must be "
            f"[{lead}K] with K of at least 1"
        )
    one_device(op, "indices", indices, name, x)
