"""Scales that are kept between steps: largest values seen, their history, and the casts of weights."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from tilesmith.engine.tracing import kept
from tilesmith.ops.quant.reference import GREATEST
from tilesmith.precision.weight_casts import CastsWeights

# A value of earlier steps that is this many times both the newest and the median of a history is left out of the bound:
# by a bound so far above it, a tensor would lose its smaller numbers. E5M2 has as much more range.
FAR = {"e4m3": 2.0**8, "e5m2": 2.0**16}

_IGNORED = "_ddp_params_and_buffers_to_ignore"  # what DDP reads off the module that it is given
_COMPILED = "_orig_mod."  # before the names in what torch.compile returns

_Kind = TypeVar("_Kind", bound=nn.Module)
_roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_hook: list = []


class Scaling(nn.Module):
    """The scale of one tensor. Its buffers are no part of a state dict: a run that goes on takes its first step with
    scales of its own tensors, as the first step of any run does.

    amax: the largest absolute value since the last `roll`. bound: what the next values are expected to stay below.
    history: of the last steps. overflows: how often amax was not finite or, where casts go by the bound (delayed),
    above its range. spikes: how often an amax was left out of the bound once it had passed. warm: whether bound is
    known, which `roll` finds out; rolls: how often it did not know.
    """

    def __init__(self, format: str, history: int, device: torch.device, delayed: bool):
        super().__init__()
        self.format, self.delayed, self.warm, self.rolls = format, delayed, False, 0
        for name, size in (("amax", 1), ("bound", 1), ("history", history), ("overflows", 1), ("spikes", 1)):
            self.register_buffer(name, torch.zeros(size, device=device), persistent=False)

    def known(self, delayed: bool) -> Tensor | None:
        """The bound, where a step may go by it."""
        return self.bound if delayed and self.warm else None

    def noted(self, training: bool) -> Tensor | None:
        """Where the largest value of a call is noted; None outside training, which scales of the next steps are for."""
        return self.amax if training else None

    def _apply(self, fn, recurse: bool = True) -> Scaling:
        """`fn` says where the buffers go, not what they hold: a model that goes to bf16 does not take its scales along,
        and `to_empty` must not leave them unset, since no checkpoint fills them."""
        for name, buffer in self._buffers.items():
            device = fn(buffer).device
            with torch.inference_mode(False):
                if buffer.device.type == "meta" and device.type != "meta":
                    self._buffers[name] = torch.zeros_like(buffer, device=device)
                    self.warm, self.rolls = False, 0
                else:
                    self._buffers[name] = buffer.to(device)
        return self

    def extra_repr(self) -> str:
        return f"{self.format}, {'known' if self.warm else 'not known yet'}"


def roll(*roots: nn.Module) -> None:
    """Take what was seen since the last time into the histories, and the bounds from these.

    A value that was too large raises the bound at once, since it is in the history. Once it has passed, it is left out
    if it is `FAR` from the others, so that one spike does not make the casts of a whole history underflow. What is not
    finite says nothing of the next step and is not taken in. A tensor that was not cast, or of which only zeros were
    seen, keeps its bound. Where no tensor at all was cast, nothing changes: the second of two optimizers steps without
    a forward since the first.

    All scales in a few launches, none of which waits for the device. It is asked which scales are known after 1, 2, 4,
    8, ... rolls without one: a scale that is never used, as that of a norm whose kernel does not cast, must not end
    every step by a wait.
    """
    by_device: dict[tuple, list[Scaling]] = {}
    for scaling in _modules_of(roots, Scaling):
        by_device.setdefault((scaling.amax.device, scaling.history.numel()), []).append(scaling)
    for scalings in by_device.values():
        _roll(scalings)


@torch.no_grad()
def _roll(scalings: list[Scaling]) -> None:
    amax = torch.cat([s.amax for s in scalings])
    bound = torch.cat([s.bound for s in scalings])
    history = torch.stack([s.history for s in scalings])
    limit, far, delayed = _constants(tuple((s.format, s.delayed) for s in scalings), amax.device)
    # a power of two above bound / limit: what is beyond limit times it was cut off
    reach = limit * torch.exp2(torch.ceil(torch.log2(bound / limit)))
    finite = amax.isfinite()
    over = ((amax > reach) & (bound > 0) & (delayed > 0)) | ~finite
    taken = finite & (amax != 0).any()
    history = torch.where(taken[:, None], torch.cat((amax[:, None], history[:, :-1]), 1), history)
    spikes = history > (far * torch.maximum(history[:, 0], _median(history)))[:, None]
    history = torch.where(spikes, 0.0, history)
    greatest = history.amax(1)
    bound = torch.where(greatest > 0, greatest, bound)
    torch._foreach_copy_([s.history for s in scalings], list(history.unbind()))
    torch._foreach_copy_([s.bound for s in scalings], list(bound[:, None].unbind()))
    torch._foreach_add_([s.overflows for s in scalings], list(over.to(amax.dtype)[:, None].unbind()))
    torch._foreach_add_([s.spikes for s in scalings], list((spikes.sum(1) * delayed)[:, None].unbind()))
    torch._foreach_zero_([s.amax for s in scalings])
    cold = [s for s in scalings if not s.warm]
    for scaling in cold:
        scaling.rolls += 1
    if any(s.rolls & (s.rolls - 1) == 0 for s in cold):
        for scaling, known in zip(scalings, (bound > 0).tolist()):
            scaling.warm = scaling.warm or known


@kept(32)
def _constants(kinds: tuple[tuple[str, bool], ...], device: torch.device) -> tuple[Tensor, ...]:
    """The largest number, `FAR` and whether casts go by the bound, of each scale. Kept, since a copy to the device
    waits for all that is queued there."""
    return torch.tensor([(GREATEST[f], FAR[f], delayed) for f, delayed in kinds], device=device).unbind(1)


def _median(history: Tensor) -> Tensor:
    """The median of what is not 0 in each row, the lesser one of two; 0 for rows of zeros. `torch.median` is not
    deterministic on a GPU."""
    ordered = history.sort(1).values
    count = (ordered > 0).sum(1)
    place = history.shape[1] - count + (count - 1).clamp(min=0) // 2
    return ordered.gather(1, place.clamp(max=history.shape[1] - 1)[:, None])[:, 0]


def refresh_fp8(model: nn.Module) -> None:
    """Cast the weights of a converted model again. Needed if casts are cached (in training mode, and in eval mode with
    `cache_weights_in_eval`) and weights were changed other than by an optimizer's step, `load_state_dict` or, outside
    torch.compile, an in-place write that PyTorch counts."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"refresh_fp8: model must be a torch.nn.Module, got {type(model).__name__}; give the model that "
            "convert_model_to_fp8 returned"
        )
    for module in _modules_of((model,), CastsWeights):
        module.refresh()


def follow(root: nn.Module) -> None:
    """From now on, a step of an optimizer that holds parameters of `root` casts its weights anew and rolls its
    scales."""
    _roots.add(root)
    if not _hook:
        _hook.append(register_optimizer_step_post_hook(_stepped))


def unfollow(root: nn.Module) -> None:
    _roots.discard(root)


def keep_from_broadcasts(root: nn.Module) -> None:
    """Have DDP around `root`, compiled or not, leave scales alone. It would overwrite those of each rank by rank 0's in
    every forward: what only other ranks cast, as tokens of an expert, would get a bound of 0, and underflow."""
    names = _names_of_scales(root)
    others = [name for name in getattr(root, _IGNORED, ()) if name not in names]
    setattr(root, _IGNORED, [*others, *names])


def leave_to_broadcasts(root: nn.Module) -> None:
    """Take back what `keep_from_broadcasts` did to `root` or a module in it. Called while the scales are there."""
    for module in root.modules():
        if _IGNORED in module.__dict__:
            names = _names_of_scales(module)
            setattr(module, _IGNORED, [name for name in getattr(module, _IGNORED) if name not in names])
            if not getattr(module, _IGNORED):
                delattr(module, _IGNORED)


def _names_of_scales(root: nn.Module) -> dict[str, None]:
    scalings = ((name, m) for name, m in root.named_modules() if isinstance(m, Scaling))
    names = [f"{name}.{key}".lstrip(".") for name, m in scalings for key in m._buffers]
    return dict.fromkeys(prefix + name for prefix in ("", _COMPILED) for name in names)


def _stepped(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    if not len(_roots):
        return
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    stepped = [root for root in list(_roots) if _any_in(root.parameters(), held)]
    for module in _modules_of(stepped, CastsWeights):
        module.refresh()
    roll(*stepped)


def _modules_of(roots: Iterable[nn.Module], kind: type[_Kind]) -> list[_Kind]:
    """The modules of a kind, each once: one root may hold another, as an engine's model may a converted one."""
    return [m for m in dict.fromkeys(m for root in roots for m in root.modules()) if isinstance(m, kind)]


def _any_in(parameters: Iterable[Tensor], held: set[int]) -> bool:
    return any(id(p) in held for p in parameters)
