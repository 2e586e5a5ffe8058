"""How much of a dense attention each sparse pattern holds at the same budget, on structured random data.

python examples/sparse_attention.py
"""

import torch

from tilesmith import ops
from tilesmith.attention import DynamicSparseAttention, SparsePattern

TOKENS, TOPICS = 1024, 8
device = "cuda" if torch.cuda.is_available() else "cpu"

torch.manual_seed(0)
topics = torch.randn(TOPICS, 64)
which = torch.randint(0, TOPICS, (1, TOKENS // 32)).repeat_interleave(32, 1)
x = (topics[which] + 0.5 * torch.randn(1, TOKENS, 64)).to(device)

weights = None
for pattern in SparsePattern:
    learned = {"index_target": "dense"} if pattern is SparsePattern.LEARNED else {}
    layer = DynamicSparseAttention(64, 4, 0.9, pattern, num_kv_heads=2, block_size=16, device=device, **learned)
    if weights is None:
        weights = {name: 3.0 * value for name, value in layer.state_dict().items()}  # sharper attention
    layer.load_state_dict(weights, strict=False)
    if layer.indexer is not None:  # only its own loss trains the indexer; the other parameters stay
        optimizer = torch.optim.Adam(layer.indexer.parameters(), 1e-2)
        for step in range(10):
            optimizer.zero_grad()
            layer(x).sum().backward()
            optimizer.step()
            if step in (0, 9):
                print(f"step {step}: the indexer's loss is {layer.index_loss.item():.3f}")
    report = layer.measure(x)
    print(
        f"{pattern.name:18} keeps {report.kept_blocks:4} of {report.seen_blocks} blocks "
        f"and {report.retained_mass:.1%} of the attention"
    )

q, k, v = (torch.randn(1, heads, TOKENS, 16, device=device) for heads in (4, 2, 2))
mask = ops.Mask(causal=True, blocks=layer.blocks(x))
print("the op with these lists:", tuple(ops.attention(q, k, v, mask)[0].shape))
