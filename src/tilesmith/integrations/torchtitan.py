"""torchtitan's overrides: each factory replaces one kind of configuration in a training configuration.

    --override.imports tilesmith.integrations.torchtitan.rms_norm
    --override.imports tilesmith.integrations.torchtitan.feed_forward

torchtitan 0.3: an entry names one factory.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tilesmith import ops

try:
    from torchtitan.config import derive, override
    from torchtitan.models.common.feed_forward import FeedForward
    from torchtitan.models.common.nn_modules import RMSNorm
except ImportError as problem:
    raise ImportError(
        f"tilesmith.integrations.torchtitan needs torchtitan 0.3, which could not be imported ({problem}): "
        "pip install 'torchtitan>=0.3'"
    ) from problem


class TilesmithRMSNorm(RMSNorm):
    """torchtitan's RMSNorm, computed by `ops.rms_norm`."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        """The fields of torchtitan's."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., K]; returns the same shape and dtype. Without a weight it is PyTorch's."""
        if self.weight is None:
            return super().forward(x)
        return ops.rms_norm(x, self.weight, self.eps)


class TilesmithFeedForward(FeedForward):
    """torchtitan's feed-forward, whose gate is `ops.swiglu`."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        """The fields of torchtitan's."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., K]; returns the same shape and dtype."""
        return self.w2(ops.swiglu(self.w1(x), self.w3(x)))


@override(target=RMSNorm.Config, exact=True, description="RMSNorm by tilesmith")
def rms_norm(config: RMSNorm.Config) -> TilesmithRMSNorm.Config:
    """The configuration of the same norm, computed by `ops.rms_norm`."""
    return derive(config, TilesmithRMSNorm.Config)


@override(target=FeedForward.Config, exact=True, description="SwiGLU by tilesmith")
def feed_forward(config: FeedForward.Config) -> TilesmithFeedForward.Config:
    """The configuration of the same feed-forward, gated by `ops.swiglu`."""
    return derive(config, TilesmithFeedForward.Config)
