"""What users write. Type checkers find nothing to say about it, and it runs."""

import torch
from torch import nn

import tilesmith
from tilesmith import MemoryConfig, ops
from tilesmith.ops import Mask, Score

x, weight = torch.randn(4, 8), torch.ones(8)
y: torch.Tensor = tilesmith.ops.rms_norm(x, weight, eps=1e-5, casting="llama")
normed, total = ops.add_rms_norm(x, x, weight)
loss: torch.Tensor = ops.linear_cross_entropy(x, torch.randn(11, 8), torch.zeros(4, dtype=torch.long))
q = torch.randn(1, 2, 4, 8)
out, lse = ops.attention(q, q, q, Mask(causal=True, window=2), Score(scale=0.5), dropout_p=0.1)
dropped: torch.Tensor = ops.bias_dropout(x, None, 0.5)
layer = tilesmith.nn.RMSNorm(8)
model = tilesmith.optimize(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), only=["norm", "rope"], exclude=["rope"])
first: nn.Module = model[0]
told: str = tilesmith.report(model).full()
calls: dict[str, int] = tilesmith.report(model).calls()
why = [tilesmith.explain("rms_norm", x, weight), tilesmith.explain(ops.rms_norm, x), tilesmith.explain(ops.attention)]
with tilesmith.use(rms_norm="reference"), MemoryConfig(max_memory_gb=1):
    logits: torch.Tensor = tilesmith.undo(model)(layer(x))
units: int = tilesmith.hardware.arch_named("sm90").sms


@tilesmith.register_kernel("rms_norm", backend="mine", rank=7)
@tilesmith.optimize_kernel(num_warps=4)
def mine(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, offset: float = 0.0, casting: str = "fp32"
) -> tuple[torch.Tensor, torch.Tensor]:
    return x, x[..., 0]


version: str = tilesmith.__version__
