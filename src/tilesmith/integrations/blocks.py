"""`graphs` and `compile="between"` under the settings of a trainer: refused where they would do nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def refuse_idle_blocks(where: str, options: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise ValueError if a trainer's settings keep every block from being recorded or compiled, as options ask for.

    where: the head of the message. options: those of `optimize`. settings: the trainer's, by their names in
    `transformers.TrainingArguments` (torch_compile, fsdp, activation_checkpointing_kwargs), and n_gpu, the devices of
    `torch.nn.DataParallel`; one that is not there is off.
    """
    graphs, compile = bool(options.get("graphs")), options.get("compile") is not None
    if settings.get("torch_compile") and (graphs or compile):
        asked = f"graphs={options['graphs']!r}" if graphs else 'compile="between"'
        raise ValueError(
            f"{where}: {asked} does nothing with torch_compile={settings['torch_compile']!r}, which compiles the whole "
            'model, its blocks included; leave torch_compile off (compile="between" compiles the blocks)'
        )
    why = _unrecorded(settings) if graphs else ""
    if why:
        raise ValueError(f"{where}: graphs={options['graphs']!r} does nothing with {why}; leave out graphs")


def _unrecorded(settings: Mapping[str, Any]) -> str:
    """The setting with which no block is recorded, and why; "" if there is none."""
    if settings.get("fsdp"):
        return f"fsdp={settings['fsdp']!r}, whose hooks on blocks a recording would not call"
    if _zero3():
        return "DeepSpeed's ZeRO-3, whose hooks on modules a recording would not call"
    if (settings.get("n_gpu") or 1) > 1:
        return f"torch.nn.DataParallel over {settings['n_gpu']} GPUs, which makes new modules for each step"
    if (settings.get("activation_checkpointing_kwargs") or {}).get("use_reentrant"):
        return "use_reentrant=True, which runs blocks without gradients and repeats them within the backward"
    return ""


def _zero3() -> bool:
    try:
        from transformers.integrations import is_deepspeed_zero3_enabled
    except ImportError:  # a release without it
        return False
    return bool(is_deepspeed_zero3_enabled())
