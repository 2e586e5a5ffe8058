"""Pack a small trained classifier at several sizes, with widths chosen tile by tile and uniform ones beside them.

    python examples/adaptive_precision.py    # a minute or two on two free cores

Where the chosen widths are no better on held-out batches, a warning says so, and simpler ones are used.
"""

import torch
from torch import nn
from torch.nn import functional as F

from tilesmith.precision import AllocationStrategy, PrecisionConfig, create_ultra_precision_module

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
size = torch.logspace(-1, 0.5, 256)  # some inputs vary much more than others
teacher = nn.Sequential(nn.Linear(256, 32), nn.Tanh(), nn.Linear(32, 10)).to(device)
model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10)).to(device)


def batch(rows=256):
    x = (torch.randn(rows, 256) * size).to(device)
    with torch.no_grad():
        return x, teacher(x).argmax(-1)


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for _ in range(300):
    optimizer.zero_grad()
    loss_fn(model, batch()).backward()
    optimizer.step()
model.eval()

calibration, test = [batch() for _ in range(8)], batch(8192)
with torch.no_grad():
    before = loss_fn(model, test).item()
print(f"loss of the trained model: {before:.4f}")
for saved in (0.70, 0.74, 0.78, 0.82):
    for strategy in (AllocationStrategy.UNIFORM, AllocationStrategy.ENTROPY_BASED):
        config = PrecisionConfig(allocation_strategy=strategy, target_memory_reduction=saved)
        packed = create_ultra_precision_module(model, config, calibration=calibration, loss_fn=loss_fn)
        stats = packed.get_precision_stats()
        with torch.no_grad():
            rise = loss_fn(packed, test).item() - before
        print(f"{stats.memory_savings_ratio:.1%} saved, {stats.strategy:13} loss {rise:+.5f}")
