"""Which linear layers belong to PEFT's adapters, and which base layers their adapters leave to be packed."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

_BASES = ("base_layer", "original_module")  # where PEFT's wrappers keep the layer that was there
_CALLERS = ("lora_A", "ia3_l")  # adapters that call the base layer and do not read its weight


def wrappers_of(model: nn.Module) -> dict[str, nn.Module]:
    """PEFT's layers by name: those whose class declares `adapter_layer_names`, and models with a prompt encoder."""
    return {name: module for name, module in model.named_modules() if _declares(module) or _prompts(module)}


def reason_to_leave(name: str, wrappers: Mapping[str, nn.Module]) -> str | None:
    """Why the linear layer of this name has to stay: it is an adapter's, or an adapter reads its weight."""
    path = name.split(".")
    for i in range(len(path)):
        wrapper = wrappers.get(".".join(path[:i]))
        if wrapper is None:
            continue
        if not _declares(wrapper):
            if path[i] == "prompt_encoder":
                return "it is part of a PEFT prompt encoder, which stays trainable"
        elif path[i] not in _BASES:
            return f"it is part of a PEFT adapter ({path[i]}), which stays trainable"
        elif all(step in _BASES for step in path[i:]):
            reason = _needs_weight(wrapper)
            if reason:
                return reason
    return None


def _declares(module: nn.Module) -> bool:
    return hasattr(type(module), "adapter_layer_names") and any(base in module._modules for base in _BASES)


def _prompts(module: nn.Module) -> bool:
    return hasattr(module, "peft_config") and "prompt_encoder" in module._modules


def _needs_weight(wrapper: nn.Module) -> str | None:
    """Why the base layer of a PEFT layer must keep its weight."""
    if "original_module" in wrapper._modules:
        return None
    kind = type(wrapper).__name__
    if getattr(wrapper, "merged", False):
        return "a PEFT adapter is merged into its weight; call unmerge_adapter() or merge_and_unload() before packing"
    if hasattr(wrapper, "parameter_name") or getattr(wrapper, "lora_variant", None):
        return f"its PEFT adapter ({kind}: a variant such as DoRA, or of target_parameters) reads the weight"
    if not any(part in wrapper._modules or part in wrapper._parameters for part in _CALLERS):
        return f"its PEFT adapter ({kind}) may read the weight; LoRA, AdaLoRA and IA3 do not"
    return None
