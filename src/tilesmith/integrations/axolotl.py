"""Axolotl's plugin: `plugins: [tilesmith.integrations.axolotl.TilesmithPlugin]` in its configuration."""

from __future__ import annotations

from typing import Any

from torch import nn

from tilesmith.models import optimize

try:
    from axolotl.integrations.base import BasePlugin
    from pydantic import BaseModel
except ImportError as problem:
    raise ImportError("tilesmith.integrations.axolotl needs Axolotl: pip install axolotl") from problem


class TilesmithArgs(BaseModel):
    """What the configuration may say: rules to use or to leave out, as `tilesmith.optimize` takes them."""

    tilesmith_only: list[str] | None = None
    tilesmith_exclude: list[str] | None = None


class TilesmithPlugin(BasePlugin):
    """Optimises the model when it is loaded, its adapters included."""

    def get_input_args(self) -> str:
        """Where Axolotl finds the keys that this plugin reads."""
        return f"{__name__}.TilesmithArgs"

    def post_model_load(self, cfg: Any, model: nn.Module) -> None:
        """Called by Axolotl with its configuration and the model, inclusive of adapters."""
        optimize(model, only=cfg.get("tilesmith_only"), exclude=cfg.get("tilesmith_exclude") or ())
