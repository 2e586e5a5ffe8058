"""FP8TrainingEngine: the steps of a training run in 8 bits, with what may go wrong in one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tilesmith.engine.argument_checks import present
from tilesmith.ops.quant.reference import factor_of
from tilesmith.precision.config import FP8Config, FP8Format
from tilesmith.precision.convert import convert_model_to_fp8, converted
from tilesmith.precision.engine_state import check_state, load_scalings, state_of_scalings
from tilesmith.precision.scaling import Scaling, follow, keep_from_broadcasts, roll
from tilesmith.precision.weight_casts import CastsWeights

_RECIPE = ("recipe", "forward_format", "backward_format", "amax_history_length")
_CHOICES = ("min_features", "min_tokens", "fuse", "cache_weights", "convert_experts", "cache_weights_in_eval")
LEAST = 2.0**-16  # of the loss's first factor: batches that are not finite whatever it is must not bring it to 0


def create_fp8_trainer(
    model: nn.Module,
    forward_format: FP8Format = FP8Format.E4M3,
    backward_format: FP8Format = FP8Format.E5M2,
    device: torch.device | None = None,
) -> FP8TrainingEngine:
    """An engine that trains `model` in FP8 with the delayed recipe. By default layers with fewer than 1,024 inputs or
    outputs are not converted. For other recipes and limits pass an `FP8Config` to `FP8TrainingEngine`.

    forward_format: of activations and weights. backward_format: of gradients. device: where to move the model first;
    None: it stays. Raises ValueError for a device that is not available, and otherwise as `FP8Config` and
    `FP8TrainingEngine` do.
    """
    config = FP8Config(forward_format=forward_format, backward_format=backward_format)
    if not isinstance(model, nn.Module):
        raise TypeError(f"create_fp8_trainer: model must be a torch.nn.Module, got {type(model).__name__}")
    if device is not None:
        model.to(present("create_fp8_trainer", "device", device, meta=True))
    return FP8TrainingEngine(model, config)


class FP8TrainingEngine:
    """Converts a model to FP8 and runs its training steps.

    A step is skipped on all ranks if a gradient is not finite on any of them. The loss scale is then halved, down to
    2^-16 of its initial value, and doubled again after `loss_scale_growth_interval` steps that were not skipped, up to
    that value.

    Args:
        model: any module; converted in place by `setup_fp8_training`, also if it is compiled or wrapped already in
            modules that keep the layers. A model that is already converted is used as it is.
        config: see `FP8Config`. None: the delayed recipe, or that of a model which is converted already.
        process_group: the ranks that skip steps together; None: all ranks, if torch.distributed is initialised.

    As a context manager it converts on entry; on leaving, the model stays converted.
    """

    def __init__(
        self,
        model: nn.Module,
        config: FP8Config | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
    ):
        if not isinstance(model, nn.Module):
            raise TypeError(f"FP8TrainingEngine: model must be a torch.nn.Module, got {type(model).__name__}")
        if config is not None and not isinstance(config, FP8Config):
            raise TypeError(f"FP8TrainingEngine: config must be an FP8Config, got {type(config).__name__}")
        self.model, self.config, self.process_group = model, config or FP8Config(), process_group
        self._asked = config is not None
        self.loss_scale = float(self.config.loss_scale)
        self._scaled_by = 1.0  # what the newest gradients were multiplied by: 1.0 until training_step makes some
        self._ready = False
        # optimizers whose gradients `unscale` divided, by id, and whether one was not finite
        self._found: dict[int, tuple[weakref.ref[torch.optim.Optimizer], bool]] = {}
        self._steps = self._skipped = self._good = 0

    def __enter__(self) -> FP8TrainingEngine:
        self.setup_fp8_training()
        return self

    def __exit__(self, *_: Any) -> None:
        """The model stays converted."""

    def setup_fp8_training(self) -> None:
        """Convert the model, once. Raises as `convert_model_to_fp8` does, and ValueError if the model is already
        converted with another recipe than the config's, or lacks layers or casts of weights that the config asks
        for."""
        if self._ready:
            return
        if converted(self.model):
            if self._asked:
                _check_recipe(self.model, self.config)
            follow(self.model)
            keep_from_broadcasts(self.model)
        else:
            convert_model_to_fp8(self.model, self.config)
        self._ready = True

    def training_step(
        self, inputs: Any, targets: Tensor | None = None, loss_fn: Callable[[Any, Tensor], Tensor] | None = None
    ) -> Tensor:
        """Forward and backward of one batch; gradients add up until `optimizer_step`. Returns the loss, detached.

        inputs: passed to the model; a mapping by keyword, a tuple by position. targets: the loss is
        ``loss_fn(output, targets)``; without a loss_fn it is the cross-entropy of outputs [..., classes] and integer
        targets [...], or the mean squared error of floating targets of the output's shape. targets None: the loss is
        the model's output or its `loss`, and there is no loss_fn.

        Raises RuntimeError before `setup_fp8_training` and between `unscale` and `optimizer_step`, ValueError where no
        loss can be made, TypeError for targets and loss functions of another kind.
        """
        self._check_between_steps("training_step")
        _check_targets(targets, loss_fn)
        if isinstance(inputs, Mapping):
            out = self.model(**inputs)
        else:
            out = self.model(*inputs) if isinstance(inputs, tuple) else self.model(inputs)
        loss = _loss(out, targets, loss_fn)
        self._scaled_by = self.loss_scale
        (loss * self.loss_scale if self.loss_scale != 1.0 else loss).backward()
        return loss.detach()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of `optimizer` by the loss's factor now, so that they can be clipped before
        `optimizer_step`, which otherwise does so. Waits for the device.

        Raises RuntimeError before `setup_fp8_training` and if it was already called since the last `optimizer_step`.
        """
        self._check_optimizer("unscale", optimizer)
        if id(optimizer) in self._divided():
            raise RuntimeError("unscale: the gradients of this optimizer were divided before; call optimizer_step")
        grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        self._found[id(optimizer)] = weakref.ref(optimizer), self._unscale(grads)

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step `optimizer` unless a gradient of it is not finite on any rank, then clear the gradients. Returns whether
        it stepped."""
        self._check_optimizer("optimizer_step", optimizer)
        if id(optimizer) not in self._divided():
            self.unscale(optimizer)
        _, found = self._found.pop(id(optimizer))
        if found:
            self._skipped, self._good = self._skipped + 1, 0
            self.loss_scale = max(self.loss_scale * 0.5, float(self.config.loss_scale) * LEAST)
            roll(self.model)
        else:
            optimizer.step()  # the hook of `scaling` does the rest
            self._steps, self._good = self._steps + 1, self._good + 1
            if self._good % self.config.loss_scale_growth_interval == 0:
                self.loss_scale = min(self.loss_scale * 2, float(self.config.loss_scale))
        optimizer.zero_grad(set_to_none=True)
        return not found

    def get_training_statistics(self) -> dict[str, Any]:
        """steps, skipped: calls of `optimizer_step` that stepped and that did not. overflows: how often, one for each
        tensor and step, the largest value was not finite or, by the recipe "delayed", beyond its scale's range. spikes:
        how often such a value was so far above those of other steps that its scale ignored it in later steps; in the
        step right after it, smaller numbers may have become 0. loss_scale. scales: by name of each tensor that has one
        and was cast in a step, the power of two by which it is divided before a cast; by the recipe "current", whose
        casts go by their own tensor, that of the largest value in the history. amax_histories: by the same names, the
        largest values of the last steps, the newest first. Finer recipes than one scale a tensor keep no scales and no
        histories, and count 0 overflows and spikes. Asks the device."""
        scalings = {name: m for name, m in self.model.named_modules() if isinstance(m, Scaling)}
        known = {name: m for name, m in scalings.items() if m.bound.item() > 0}
        return {
            "steps": self._steps,
            "skipped": self._skipped,
            "overflows": int(sum(s.overflows.item() for s in scalings.values())),
            "spikes": int(sum(s.spikes.item() for s in scalings.values())),
            "loss_scale": self.loss_scale,
            "scales": {name: factor_of(s.bound, s.format).item() for name, s in known.items()},
            "amax_histories": {name: s.history.tolist() for name, s in known.items()},
        }

    def state_dict(self) -> dict[str, Any]:
        """The state of the engine and of the model's scales, to be saved with the state dicts of model and optimizer.

        loss_scale, float. steps, skipped, and good_steps, those since the last that was skipped: ints. scalings: of
        each tensor that has a scale of its own, by name, a dictionary of format ("e4m3", "e5m2"), warm (whether its
        bound is known) and float32 tensors, copies on the device of the scale: amax [1], bound [1], history
        [amax_history_length], overflows [1], spikes [1]. Scales are those of this rank.

        A run that loads all three continues as if it had not been interrupted. `torch.load` reads it with
        ``weights_only``. It does not contain gradients: call it between steps.

        Raises RuntimeError before `setup_fp8_training` and between `unscale` and `optimizer_step`.
        """
        self._check_between_steps("state_dict")
        return {
            "loss_scale": self.loss_scale,
            "steps": self._steps,
            "skipped": self._skipped,
            "good_steps": self._good,
            "scalings": state_of_scalings(self.model),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, with tensors on any device. Model and optimizer load theirs by their own
        methods, before or after.

        Raises TypeError if `state_dict` is not a dictionary. ValueError: it is not from an engine, or from another
        model or FP8Config; values are looked at where its tensors are on a CPU. RuntimeError before
        `setup_fp8_training` and between `unscale` and `optimizer_step`. Nothing is changed then.
        """
        self._check_between_steps("load_state_dict")
        check_state(self.model, state_dict)
        load_scalings(self.model, state_dict["scalings"])
        self.loss_scale = state_dict["loss_scale"]
        self._steps, self._skipped = state_dict["steps"], state_dict["skipped"]
        self._good = state_dict["good_steps"]

    def _check_between_steps(self, method: str) -> None:
        self._check_ready()
        if self._divided():
            raise RuntimeError(f"{method}: the gradients were divided by unscale; call optimizer_step first")

    def _divided(self) -> dict[int, tuple[weakref.ref[torch.optim.Optimizer], bool]]:
        """Those of `_found` that are still there: an exception may have kept an optimizer from its step for good."""
        self._found = {key: one for key, one in self._found.items() if one[0]() is not None}
        return self._found

    def _check_ready(self) -> None:
        if not self._ready:
            raise RuntimeError("FP8TrainingEngine: call setup_fp8_training() or enter the engine first")

    def _check_optimizer(self, method: str, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"{method}: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        self._check_ready()

    def _unscale(self, grads: list[Tensor]) -> bool:
        """Divide gradients by the loss's factor; whether one is not finite anywhere."""
        by_kind: dict[tuple, list[Tensor]] = {}
        for grad in map(_numbers, grads):
            if grad.numel():
                by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
        flags = []
        for group in by_kind.values():  # GradScaler's own function takes no bf16 on a GPU
            if self._scaled_by != 1.0:
                torch._foreach_mul_(group, 1.0 / self._scaled_by)
            largest = torch.stack(torch._foreach_norm(group, float("inf")))  # a factor below 1 may overflow fp16
            flags.append((~largest.isfinite()).any().float())
        if dist.is_available() and dist.is_initialized():
            device = flags[0].device if flags else _device_of(self.model)
            total = torch.stack([flag.to(device) for flag in flags]).amax() if flags else torch.zeros((), device=device)
            dist.all_reduce(total, op=dist.ReduceOp.MAX, group=self.process_group)
            return bool(total.item())
        return any(flag.item() for flag in flags)


def _numbers(grad: Tensor) -> Tensor:
    """The numbers of a gradient that are here: its shard, or, of a sparse one, its values."""
    grad = getattr(grad, "_local_tensor", grad)
    return grad._values() if grad.layout == torch.sparse_coo else grad


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _check_recipe(model: nn.Module, config: FP8Config) -> None:
    """ValueError unless the layers of a converted model cast as `config` says, and were chosen so, where it does not
    leave that at its default."""
    has = next((m.config for m in model.modules() if isinstance(m, CastsWeights)), config)
    if config.module_filter_fn is not None:
        raise ValueError(
            "FP8TrainingEngine: the config has a module_filter_fn, and the model is converted already; give it to "
            "convert_model_to_fp8"
        )
    for name in (*_RECIPE, *_CHOICES):
        asked, there, default = (getattr(c, name) for c in (config, has, FP8Config()))
        if asked != there and (name in _RECIPE or asked != default):
            asked, there = (x.name if isinstance(x, FP8Format) else repr(x) for x in (asked, there))
            raise ValueError(
                f"FP8TrainingEngine: the config's {name} is {asked}, the model is converted with {there}; call "
                "revert_model_from_fp8(model) first, or make the engine without a config"
            )


def _check_targets(targets: Any, loss_fn: Any) -> None:
    """TypeError, before the forward, unless a loss can be made of these."""
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(
            f"training_step: loss_fn must be callable, (output, targets) -> loss, got {type(loss_fn).__name__}"
        )
    if targets is None and loss_fn is not None:
        raise ValueError("training_step: loss_fn needs targets; pass them, or let the model return its loss")
    if targets is None or loss_fn is not None:
        return
    if not isinstance(targets, Tensor):
        raise TypeError(
            f"training_step: targets must be a tensor, got {type(targets).__name__}; pass a loss_fn for others"
        )
    if targets.dtype == torch.bool or targets.is_complex():
        raise TypeError(
            f"training_step: targets are {targets.dtype}; integers and floats are supported; pass a loss_fn"
        )


def _loss(out: Any, targets: Tensor | None, loss_fn: Callable[[Any, Tensor], Tensor] | None) -> Tensor:
    if targets is None:
        loss = out if isinstance(out, Tensor) else getattr(out, "loss", None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError("training_step: without targets the model must return its loss, or an object with one")
        return loss
    if loss_fn is not None:
        loss = loss_fn(out, targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"training_step: loss_fn returned {what}; it must return a tensor of one number")
        return loss
    out = out if isinstance(out, Tensor) else getattr(out, "logits", out)
    if not isinstance(out, Tensor):
        raise ValueError(f"training_step: the model returned {type(out).__name__}; pass a loss_fn")
    if not targets.is_floating_point():
        if out.ndim < 2 or targets.numel() != out.shape[:-1].numel():
            raise ValueError(
                f"training_step: integer targets are {list(targets.shape)}, the output {list(out.shape)}; there must "
                "be one class for each row of outputs [..., classes]; pass a loss_fn for others"
            )
        return F.cross_entropy(out.flatten(0, -2).float(), targets.flatten())
    if targets.shape != out.shape:
        raise ValueError(
            f"training_step: targets are {list(targets.shape)}, the output {list(out.shape)}; pass a loss_fn"
        )
    return F.mse_loss(out, targets)
