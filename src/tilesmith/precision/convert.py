"""convert_model_to_fp8: the linear layers of a model in 8 bits, in place or in a copy, and back."""

from __future__ import annotations

import copy
import inspect
import logging
import weakref
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cache

import torch
from torch import nn

from tilesmith import ops
from tilesmith.engine.argument_checks import flag
from tilesmith.engine.backends import REFERENCE
from tilesmith.nn import GatedMLP, RMSNorm
from tilesmith.nn.norm import CASTER
from tilesmith.ops.quant.reference import BLOCK
from tilesmith.precision import experts
from tilesmith.precision.config import TENSORWISE, FP8Config
from tilesmith.precision.experts import FP8Experts
from tilesmith.precision.fused import FP8GatedMLP, FP8Norm
from tilesmith.precision.linear import FP8LinearLayer, Relay, misfit_of
from tilesmith.precision.scaling import follow, keep_from_broadcasts, leave_to_broadcasts, unfollow
from tilesmith.precision.siblings import TOGETHER, FP8Siblings
from tilesmith.rewrite import Report, Row, forms, original_class, swap, unswap
from tilesmith.rewrite.siblings import packable

log = logging.getLogger(__name__)

HEADS = frozenset({"lm_head", "output", "embed_out", "score", "classifier", "head"})
ROUTERS = frozenset({"router", "gate", "gating", "w_router"})


@torch.inference_mode(False)  # scales that are made in it could not be raised outside
def convert_model_to_fp8(model: nn.Module, fp8_config: FP8Config | None = None, inplace: bool = True) -> nn.Module:
    """Convert the linear layers of `model` to `FP8LinearLayer`s, which multiply 8-bit numbers; stacked experts too.

    Args:
        model: any module, before or after `optimize`, `fully_shard` or PEFT; not compiled yet. Layers keep their
            parameters, so an existing optimizer keeps working, and state dicts load either way. Norms and gated MLPs
            cast their outputs, and experts of transformers models are converted, only if `optimize` was called before.
        fp8_config: see `FP8Config`; None: the delayed recipe.
        inplace: convert `model` itself, else a deep copy.

    Under torch.compile a model must not write in place into a tensor between two converted layers that read it: the
    second would use the cast of the old values, since a graph has no version numbers. In eager mode such a write is
    detected.

    Scales are each rank's own. `DistributedDataParallel` leaves them alone if it is given the converted model; around a
    module that holds it, pass ``broadcast_buffers=False``.

    Returns:
        The converted model. ``model.fp8_report`` says which layers were converted, why others were not, and where
        products are emulated in fp32 because the device, or PyTorch on it, cannot multiply 8-bit floats.

    Raises:
        TypeError: `model` is not a module, `fp8_config` is not an FP8Config, or `inplace` is not a bool. ValueError: no
        layer is eligible, or the model is converted already. RuntimeError: a layer's device has no 8-bit floats. The
        model is then as it was.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert_model_to_fp8: model must be a torch.nn.Module, got {type(model).__name__}")
    if fp8_config is not None and not isinstance(fp8_config, FP8Config):
        raise TypeError(f"convert_model_to_fp8: fp8_config must be an FP8Config, got {type(fp8_config).__name__}")
    flag("convert_model_to_fp8", "inplace", inplace)
    config = fp8_config or FP8Config()
    if converted(model):
        raise ValueError("convert_model_to_fp8: the model is converted already; revert_model_from_fp8 takes it back")
    if not inplace:
        model = copy.deepcopy(model)
    chosen, rows = _choose(model, config)
    stacks, more = _choose_experts(model, config)
    config = replace(config, module_filter_fn=None)  # layers keep it, and a function may not be one to be pickled
    rows += more
    if not chosen and not stacks:
        reasons = "; ".join(f"{row.fqn or 'the model'}: {row.reason}" for row in rows[:5]) or "it has none"
        raise ValueError(
            f"convert_model_to_fp8: no linear layer is eligible ({reasons}); pass another FP8Config, to "
            "convert_model_to_fp8 or to FP8TrainingEngine, with min_features or module_filter_fn"
        )
    devices = {layer.weight.device for layer in chosen.values()} | {m.down_proj.device for m in stacks.values()}
    _check_devices(devices)
    relay = Relay()
    rows += _enter(model, list(chosen.values()), list(stacks.values()), config, relay)
    model.register_forward_hook(_Clear(relay, model))
    keep_from_broadcasts(model)
    model.fp8_report = Report(tuple(rows))
    _log(config, rows, chosen, stacks)
    return model


def _log(config: FP8Config, rows: list[Row], chosen: dict[str, nn.Linear], stacks: dict[str, nn.Module]) -> None:
    left = _left_alone(rows)
    count = sum(map(len, left.values()))
    log.info("fp8 (%s): %d layers converted, %d left alone", config.recipe, len(chosen) + len(stacks), count)
    for reason, names in left.items():
        shown = ", ".join(name or "the model" for name in names[:3])
        more = f" and {len(names) - 3} others" if len(names) > 3 else ""
        log.info("fp8: %s%s left alone: %s", shown, more, reason)
    for told in {emulation(config.recipe, layer.weight.device) for layer in chosen.values()} - {""}:
        log.warning("fp8 (%s): in each layer, %s", config.recipe, told)
    for told in {emulation_of_experts(module.down_proj.device) for module in stacks.values()} - {""}:
        log.warning("fp8: in stacked experts, %s", told)


def _left_alone(rows: list[Row]) -> dict[str, list[str]]:
    """The names of what was not converted, by the reason."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.action == "skipped":
            found.setdefault(row.reason, []).append(row.fqn)
    return found


def converted(model: nn.Module) -> bool:
    """Whether `convert_model_to_fp8` converted any layer of a model."""
    return any(isinstance(module, FP8LinearLayer | FP8Experts) for module in model.modules())


def revert_model_from_fp8(model: nn.Module) -> nn.Module:
    """Turn `FP8LinearLayer`s back into `nn.Linear`s with the same parameters, and experts into what they were. Returns
    `model`.

    Raises TypeError if `model` is not a module; ValueError if a layer was parametrized since (weight norm, spectral
    norm), which changed its class. The model is then as it was.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"revert_model_from_fp8: model must be a torch.nn.Module, got {type(model).__name__}")
    for fqn, module in model.named_modules():
        if isinstance(module, FP8LinearLayer) and hasattr(module, "parametrizations"):
            raise ValueError(
                f"revert_model_from_fp8: {fqn or 'the model'} was parametrized after it was converted; call "
                "torch.nn.utils.parametrize.remove_parametrizations on it first"
            )
    leave_to_broadcasts(model)
    _take_back(model, [module for module in model.modules() if isinstance(module, FP8LinearLayer)])
    for module in model.modules():
        module.__dict__.pop("fp8_report", None)
        for key in [key for key, hook in module._forward_hooks.items() if isinstance(hook, _Clear)]:
            del module._forward_hooks[key]
        unfollow(module)
    return model


class _Clear:
    """A forward hook of a converted model: nobody keeps the last activation once the model is through.

    It goes along with a copy of the model, pickled or not, so it is also what has optimizers' steps followed.
    """

    def __init__(self, relay: Relay, model: nn.Module):
        self.__setstate__({"relay": relay, "model": model})

    def __call__(self, module: nn.Module, args: tuple, out: object) -> None:
        self.relay.clear()

    def __getstate__(self) -> dict:
        return {"relay": self.relay, "model": self.model()}

    def __setstate__(self, state: dict) -> None:
        self.relay, self.model = state["relay"], weakref.ref(state["model"])  # the model holds the hook
        follow(state["model"])


def _choose(model: nn.Module, config: FP8Config) -> tuple[dict[str, nn.Linear], list[Row]]:
    """The layers to convert by name, and a row for each linear layer."""
    heads = {id(head) for head in _heads(model)}
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    together = _outputs_together(model) if config.fuse and config.recipe in TENSORWISE else {}
    chosen: dict[str, nn.Linear] = {}
    rows = []
    for fqn, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        head = id(module) in heads or id(module.weight) in embeddings
        reason = _reason(fqn, module, config, head, together.get(id(module), module.out_features))
        action = "skipped" if reason else "replaced"
        if not reason:
            chosen[fqn] = module
        reason = reason or emulation(config.recipe, module.weight.device)
        rows.append(Row(fqn, type(module).__name__, "fp8", action, ("scaled_matmul",) if fqn in chosen else (), reason))
    return chosen, rows


def _choose_experts(model: nn.Module, config: FP8Config) -> tuple[dict[str, nn.Module], list[Row]]:
    """The modules of stacked experts to convert by name, and a row for each such module."""
    chosen: dict[str, nn.Module] = {}
    rows = []
    for fqn, module in model.named_modules():
        if not experts.stacked(module):
            continue
        reason = _reason_of_experts(module, config)
        if reason:
            rows.append(Row(fqn, type(module).__name__, "fp8", "skipped", (), reason))
            continue
        chosen[fqn] = module
        told = emulation_of_experts(module.down_proj.device) or "tokens by rows, weights by experts, in any recipe"
        told += _told_of_adapters(model, fqn)
        rows.append(Row(fqn, type(module).__name__, "fp8", "replaced", ("experts_fp8",), told))
    return chosen, rows


def _told_of_adapters(model: nn.Module, fqn: str) -> str:
    """What to say of experts within PEFT's wrappers that `optimize` serves; "" of others."""
    while fqn:
        fqn = fqn.rpartition(".")[0]
        holder = model.get_submodule(fqn)
        if not isinstance(getattr(holder, "parameter_name", None), str):
            return ""
        if original_class(type(holder)) is not type(holder):
            return "; with adapters optimize computes them in the weights' dtype, where a kernel serves the device"
    return ""


def _reason_of_experts(module: nn.Module, config: FP8Config) -> str | None:
    """Why a module of stacked experts is left alone."""
    if not config.convert_experts:
        return "convert_experts is False"
    misfit = experts.misfit_of(module)
    if misfit:
        return misfit
    _, wide, hidden = module.gate_up_proj.shape
    if min(wide, hidden) < config.min_features:
        return f"gate_up_proj has {hidden} x {wide} an expert, a side below min_features, {config.min_features}"
    return None


def _reason(fqn: str, module: nn.Linear, config: FP8Config, head: bool, outputs: int) -> str | None:
    """Why a layer is left alone. outputs: of the product that it would be a part of."""
    if original_class(type(module)) is not nn.Linear:
        return f"it is a {type(module).__module__}.{type(module).__name__}, not nn.Linear itself"
    if "forward" in module.__dict__ or getattr(module, "parametrizations", None) is not None:
        return "its forward or its weight was replaced on the instance"
    misfit = misfit_of(module)
    if misfit:
        return misfit
    if config.module_filter_fn is not None:
        return None if config.module_filter_fn(module, fqn) else "module_filter_fn left it out"
    name = fqn.rpartition(".")[2]
    if head or name in HEADS:
        return "it is an output projection, whose errors reach the loss undamped"
    if name in ROUTERS:
        return "it is a router, whose errors change which experts are asked"
    if min(module.in_features, outputs) < config.min_features:
        return f"{module.in_features} x {module.out_features} has a side below min_features, {config.min_features}"
    return None


@cache
def emulation(recipe: str, device: torch.device) -> str:
    """Why products of a recipe are emulated in fp32 on a device; "" where they are of 8 bits."""
    if device.type == "meta":
        return ""
    a = torch.empty(BLOCK, 2 * BLOCK, dtype=torch.float8_e4m3fn, device=device)
    shapes = {"rowwise": ((BLOCK, 1), (BLOCK, 1)), "blockwise": ((BLOCK, 2), (1, 2))}.get(recipe, ((1,), (1,)))
    choice = ops.scaled_matmul.explain(a, a, *(torch.empty(shape, device=device) for shape in shapes))
    if choice.kernel.backend != REFERENCE:
        return ""
    return "products are emulated in fp32: " + "; ".join(r for _, reasons in choice.rejected for r in reasons)


@cache
def emulation_of_experts(device: torch.device) -> str:
    """The same of experts, which have kernels of the library only."""
    if device.type == "meta":
        return ""
    x, up, down = (
        torch.empty(shape, dtype=torch.float8_e4m3fn, device=device) for shape in ((1, 16), (1, 32, 16), (1, 16, 16))
    )
    one, indices = torch.ones(1, device=device), torch.zeros(1, 1, dtype=torch.int64, device=device)
    choice = ops.experts_fp8.explain(x, one.view(1, 1), up, one, down, one, indices, one.view(1, 1))
    if choice.kernel.backend != REFERENCE:
        return ""
    return "products are emulated in fp32: " + "; ".join(r for _, reasons in choice.rejected for r in reasons)


def _heads(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        getter = getattr(module, "get_output_embeddings", None)
        if callable(getter):
            try:
                head = getter()
            except (AttributeError, NotImplementedError):  # of a model without one
                continue
            if isinstance(head, nn.Module):
                yield head


def _check_devices(devices: set[torch.device]) -> None:
    for device in devices:
        if device.type == "meta":
            continue
        try:
            torch.zeros(1, device=device).to(torch.float8_e4m3fn)
        except (RuntimeError, TypeError, NotImplementedError) as problem:
            raise RuntimeError(f"convert_model_to_fp8: {device} has no 8-bit floats in PyTorch: {problem}") from problem


def _fuse(model: nn.Module, config: FP8Config, relay: Relay) -> list[Row]:
    """Give norms and gated MLPs the child that casts for them."""
    rows = []
    if config.recipe == "delayed":
        for fqn, norm in _feeding_norms(model):
            _attach(norm, FP8Norm(config, relay, norm.weight.device))
            rows.append(Row(fqn, type(norm).__name__, "fp8", "replaced", ("rms_norm_fp8",), "casts what it returns"))
    for fqn, module in model.named_modules():
        layers = _gated_layers(module)
        if layers is not None:
            _attach(module, FP8GatedMLP(config, layers))
            rows.append(Row(fqn, type(module).__name__, "fp8", "replaced", ("swiglu_fp8",), "gate and up as one"))
    for fqn, module in list(model.named_modules()):
        layers = _siblings(module)
        if layers:
            together = FP8Siblings(config, list(layers.values()), _rotates(module, layers))
            module.add_module(TOGETHER, together.train(module.training))
            told = f"{', '.join(layers)} as one product, in eager training"
            rows.append(Row(fqn, type(module).__name__, "fp8", "replaced", ("scaled_matmul",), told))
    return rows


def _siblings(module: nn.Module) -> dict[str, nn.Linear]:
    """The converted layers of a module that read one tensor and may be computed together, by name."""
    layers = _of_one_input(module, FP8LinearLayer)
    kinds = {(x.in_features, x.weight.dtype, x.weight.device, x.bias is None) for x in layers.values()}
    return layers if len(kinds) == 1 and not any(layer.fused for layer in layers.values()) else {}


def _rotates(module: nn.Module, layers: Collection[str]) -> bool:
    """Whether the module is an attention that makes other tensors of q and k and does not read these in its backward:
    transformers' rotary ones, but not those with norms of q and k."""
    rotary = "position_embeddings" in inspect.signature(original_class(type(module)).forward).parameters
    return rotary and len(layers) == 3 and not any("norm" in name for name, _ in module.named_children())


def _outputs_together(model: nn.Module) -> dict[int, int]:
    """By the id of a linear layer that reads one tensor with others of its module, the outputs of all of them."""
    found = {}
    for module in model.modules():
        layers = _of_one_input(module, nn.Linear).values()
        found.update(dict.fromkeys(map(id, layers), sum(layer.out_features for layer in layers)))
    return found


def _of_one_input(module: nn.Module, kind: type[nn.Linear]) -> dict[str, nn.Linear]:
    """The children of one kind that a module gives the same tensor, by name, in the order of the calls."""
    linears = {name: child for name, child in module.named_children() if isinstance(child, kind)}
    return {name: linears[name] for name in packable(original_class(type(module)), tuple(linears))}


def _feeding_norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """RMSNorms that may feed a converted layer: those that stand beside it, or beside what holds it, and are as wide as
    its input. Whether one does shows when the model runs: the layer is given the very tensor that the norm returned."""
    modules = dict(model.named_modules())
    found: dict[str, nn.Module] = {}
    for fqn, layer in modules.items():
        if not isinstance(layer, FP8LinearLayer):
            continue
        path = fqn
        while path:
            path = path.rpartition(".")[0]
            norms = {
                f"{path}.{name}".lstrip("."): child
                for name, child in modules[path].named_children()
                if _is_rms_norm(child) and child.weight.shape[0] == layer.in_features
            }
            found.update(norms)
            if norms:
                break
    return iter(found.items())


def _is_rms_norm(module: nn.Module) -> bool:
    if getattr(module, "weight", None) is None or module.weight.ndim != 1:
        return False
    known = getattr(type(module), "_tilesmith_norm", None)  # what `optimize` made of a norm
    if known is None:
        return isinstance(module, RMSNorm) and module.casting != "none"
    return not known.centred and known.casting != "none"


def _gated_layers(module: nn.Module) -> tuple[FP8LinearLayer, FP8LinearLayer, FP8LinearLayer] | None:
    """(gate, up, down) of a module that computes down(silu(gate(x)) * up(x)) by converted layers without biases."""
    known = getattr(type(module), "_tilesmith_gated_mlp", None)  # what `optimize` made of an MLP
    if known is not None:
        if known.activation != "silu" or known.up is None or known.inner_dropout or known.outer_dropout:
            return None
        names = known.gate, known.up, known.down
    elif isinstance(module, GatedMLP) and module.activation == "swiglu":
        names = "gate_proj", "up_proj", "down_proj"
    else:
        return None
    layers = tuple(module._modules.get(name) for name in names)
    served = all(type(layer) is FP8LinearLayer and layer.bias is None for layer in layers)
    return layers if served and layers[0].weight.dtype == layers[1].weight.dtype else None


def _enter(
    model: nn.Module, layers: list[nn.Linear], stacks: list[nn.Module], config: FP8Config, relay: Relay
) -> list[Row]:
    """Have layers and stacked experts computed in 8 bits, all or, where one fails, none. Returns rows of what else
    casts."""
    had = {layer: forms(layer) for layer in layers}
    done: list[nn.Linear] = []
    try:
        for layer in layers:
            done.append(layer)
            while unswap(layer):  # what `optimize` made of it computes another product
                pass
            object.__setattr__(layer, "__class__", FP8LinearLayer)
            layer.enter(config, relay)
        for module in stacks:
            _attach(module, FP8Experts(config, module, experts.activation_of(module)))
        return _fuse(model, config, relay) if config.fuse and config.recipe in TENSORWISE else []
    except BaseException:
        _take_back(model, done)
        for layer in done:
            for form in reversed(had[layer]):
                swap(layer, form)
        raise


def _attach(module: nn.Module, child: nn.Module) -> None:
    """Have `module` ask `child`, which is in its mode."""
    module.add_module(CASTER, child.train(module.training))


def _take_back(model: nn.Module, layers: list[nn.Module]) -> None:
    for module in model.modules():
        module._modules.pop(TOGETHER, None)
        if isinstance(module._modules.get(CASTER), FP8Norm | FP8GatedMLP | FP8Experts):
            del module._modules[CASTER]
    for layer in layers:
        if type(layer) is FP8LinearLayer:
            layer.leave()
            object.__setattr__(layer, "__class__", nn.Linear)
