"""The `portable` backend: kernels of `tilesmith.kernels`, launched by `tilesmith.runtime` on the tensors' device.

It reaches what Triton does not: Apple GPUs through Metal, NVIDIA GPUs where Triton is not installed. On a GPU that
Triton reaches, and on CPU tensors (there through what TILESMITH_PORTABLE names), it serves only pinned calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilesmith.engine.backends import declare_backend, triton_missing
from tilesmith.hardware.detect import Arch, assumed

NAME = "portable"
RANK = 10
"""Below Triton's, which is written for the GPU it runs on; above the reference's."""

TYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def _missing(device: torch.device, pinned: bool) -> str | None:
    if device.type == "cpu" and not pinned:
        return "the tensors are on cpu; portable kernels serve them only when pinned"
    if device.type == "cuda" and not pinned and triton_missing() is None:
        return "Triton reaches this GPU; portable kernels serve it only when pinned"
    from tilesmith import runtime  # with the kernel language, which most processes never need

    backend = runtime.backend_of(device)
    if backend is None:
        return f"the tensors are on {device.type}; portable kernels run on cuda, mps and cpu"
    reason = runtime.missing(backend)
    return reason and f"{backend}: {reason}"


def _lacks(arch: Arch) -> str | None:
    if arch.kind == "mps":
        return None
    return f"{arch.name}; on GPUs that Triton supports, portable kernels serve only when pinned"


declare_backend(NAME, _missing, lacks=_lacks)


def reasons(call: Any, *names: str) -> list[str]:
    """Why portable kernels cannot hold the named tensors of a call, or compute with them where they are."""
    from tilesmith import runtime

    found = []
    for name in names:
        facts = getattr(call, name)
        if facts is None:
            continue
        if facts.dtype not in TYPES:
            found.append(f"{name} has dtype {facts.dtype}; portable kernels hold float32, float16 and bfloat16")
            continue
        backend = runtime.backend_of(facts.device)
        here = backend and assumed() is None  # a device that is not here cannot be asked
        lacks = runtime.missing(backend, {TYPES[facts.dtype]} - {"f32"}) if here else None
        if lacks is not None:
            found.append(f"{name} has dtype {facts.dtype}; {backend}: {lacks}")
    return found


def half_of(dtype: torch.dtype) -> str:
    """The field `half` of a configuration for tensors of `dtype`."""
    return "bf16" if dtype is torch.bfloat16 else "f16"


def storage(x: Tensor) -> dict[str, Any]:
    """The fields of a configuration that say x's dtype."""
    return {"use_half": x.dtype is not torch.float32, "half": half_of(x.dtype)}


def launch(ir: Any, grid: tuple[int, int, int], tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
    """Run a kernel where its tensors are."""
    from tilesmith import runtime

    runtime.launch(ir, grid, tensors, scalars)


def flat(x: Tensor, lanes: int) -> tuple[Tensor, list[int]]:
    """The memory of x, whose last stride is 1, as one dimension, and x's other strides in vectors of `lanes` elements.

    A view; of a contiguous copy where a row does not begin at a vector's boundary.
    """
    steps = [step if size > 1 else 0 for size, step in zip(x.shape[:-1], x.stride()[:-1])]
    if any(step % lanes for step in steps) or x.data_ptr() % (lanes * x.element_size()):
        x = x.clone(memory_format=torch.contiguous_format)
        steps = list(x.stride()[:-1])
    length = x.shape[-1] + sum((size - 1) * step for size, step in zip(x.shape[:-1], steps))
    return x.as_strided((length,), (1,)), [step // lanes for step in steps]


def aligned(x: Tensor) -> Tensor:
    """x, or a copy of it, contiguous and starting where every vector may."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def threads(columns: int) -> int:
    """Threads of a workgroup for rows of `columns` elements: as many as every GPU has, more where rows are long.

    H200, f16: 256 instead of 128 took 107 % of the time of softmax and 111 of layer norm at 64 columns, printed as
    CUDA, 110 and 104 through Vulkan; at 256 columns 101 for softmax.
    """
    return 128 if columns <= 512 else 256 if columns <= 16_384 else 512 if columns <= 32_768 else 1024
