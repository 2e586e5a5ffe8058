"""Mistakes that users make. Type checkers report each line that is marked, and no other."""

import torch

import tilesmith
from tilesmith import ops

x = torch.ones(4, 8)
ops.rms_nrm(x, x)  # error
tilesmith.optimise(x)  # error
ops.rms_norm("hello", 3)  # error
ops.rms_norm(x, epsilon=1e-5)  # error
y, rstd = ops.rms_norm(x).shape.numel(), ops.rms_norm(x)[0]
y, total, statistics = ops.add_rms_norm(x, x)  # error
number: int = ops.linear_cross_entropy(x, x, x)  # error
ops.linear_cross_entropy(x, x, x, grad_mask=[True, True, True])  # error
ops.attention(x, x, x, x)  # error
ops.rms_norm(x, casting="lama")  # error
ops.cross_entropy(x, x, reduction="avg")  # error
ops.gelu(x, "erf")  # error
tilesmith.optimize(torch.nn.Linear(8, 8), only="norms")  # error
ops.softmax(x, -1)  # error
ops.softmax(x, dim=-1)  # error
tilesmith.optimize(x)  # error
tilesmith.optimize(torch.nn.Linear(8, 8), strict=True, exclud="rope")  # error
ops.Mask(causl=True)  # error
tilesmith.nn.RMSNrm(8)  # error
tilesmith.MemoryConfig(max_memory=1)  # error
tilesmith.explain(x)  # error
tilesmith.hardware.arch_named(90)  # error
tilesmith.codegen.biuld(x)  # error
step: str = tilesmith.nn.FusedLinearGRPOLoss().forward(x, x, x, x, x)  # error
