"""Axolotl's plugin: `plugins: [tilesmith.integrations.axolotl.TilesmithPlugin]` in its configuration."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from tilesmith.integrations.blocks import refuse_idle_blocks
from tilesmith.models import optimize

try:
    from axolotl.integrations.base import BasePlugin
    from pydantic import BaseModel
except ImportError as problem:
    raise ImportError("tilesmith.integrations.axolotl needs Axolotl: pip install axolotl") from problem


class TilesmithArgs(BaseModel):
    """What the configuration may say, as `tilesmith.optimize` takes it: rules to use or to leave out, and whether the
    repeated blocks are compiled ("between") or recorded as CUDA graphs (true, or "auto")."""

    tilesmith_only: list[str] | None = None
    tilesmith_exclude: list[str] | None = None
    tilesmith_compile: str | None = None
    tilesmith_graphs: bool | Literal["auto"] | None = None


# Axolotl turns these on by itself for adapters, unless told otherwise, and they replace the forwards that are ours.
_THEIR_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")


class TilesmithPlugin(BasePlugin):
    """Optimises the model when it is loaded, its adapters included."""

    def register(self, cfg: Any) -> None:
        """Called by Axolotl with the configuration as it was written, before it fills in what is not said.

        Turns off Axolotl's own LoRA kernels where the configuration does not ask for them.
        """
        for name in _THEIR_KERNELS:
            if cfg.get(name) is None:
                cfg[name] = False

    def get_input_args(self) -> str:
        """Where Axolotl finds the keys that this plugin reads."""
        return f"{__name__}.TilesmithArgs"

    def post_model_load(self, cfg: Any, model: nn.Module) -> None:
        """Called by Axolotl with its configuration and the model, inclusive of adapters.

        Raises what `optimize` raises, and ValueError where another key leaves tilesmith_graphs or tilesmith_compile
        nothing to do, as `TilesmithCallback` does.
        """
        options = {
            "only": cfg.get("tilesmith_only"),
            "exclude": cfg.get("tilesmith_exclude") or (),
            "compile": cfg.get("tilesmith_compile"),
            "graphs": "auto" if cfg.get("tilesmith_graphs") == "auto" else bool(cfg.get("tilesmith_graphs")),
        }
        settings = {"torch_compile": cfg.get("torch_compile"), "fsdp": cfg.get("fsdp") or cfg.get("fsdp_config")}
        if cfg.get("gradient_checkpointing"):
            settings["activation_checkpointing_kwargs"] = cfg.get("gradient_checkpointing_kwargs")
        refuse_idle_blocks("TilesmithPlugin", options, settings)
        optimize(model, **options)
